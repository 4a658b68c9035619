/* comm/internal.h - what the files of this room share: the world, its waits, its groups' state.
 *
 * Rules that keep the thread transport safe:
 * - A barrier either completes for all members or for none: whoever leaves early (abort, timeout)
 *   takes its arrival back first, and cannot when the last member has come.
 * - Peers' buffers are read only between two barriers, of which the second cannot fail: every
 *   member that passed the first comes to it after a bounded copy. So nobody's buffer goes while
 *   it is read, abort or not.
 * - Small data goes through staging slots of two parities instead: a slot is written again two
 *   collectives later, and by then everyone has passed the barrier of the one between. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "comm/group.h"
#include "comm/world.h"

enum {
    WEFT__CACHE_LINE = 64,
    WEFT__MAX_RANKS = 1024,
    WEFT__STAGE_BYTES = 32 * 1024, /* of one member and parity; above it, peers read the caller's memory */
    WEFT__MESSAGE_BYTES = 2048,
    WEFT__HALT_WORDS = 32 /* a rank's own cache lines */
};

/* A word to wait on. sleepers spares the system call when nobody sleeps. */
typedef struct weft__gate {
    _Alignas(WEFT__CACHE_LINE) _Atomic uint32_t word;
    _Atomic uint32_t sleepers;
} weft__gate;

typedef enum weft__op {
    WEFT__OP_NONE,
    WEFT__OP_BARRIER,
    WEFT__OP_CLOSE,
    WEFT__OP_ALL_REDUCE,
    WEFT__OP_ALL_GATHER,
    WEFT__OP_REDUCE_SCATTER,
    WEFT__OP_ALL_TO_ALL,
    WEFT__OP_BROADCAST,
    WEFT__OP_NORM,     /* of GPU memory, one kernel with what is around it */
    WEFT__OP_EXCHANGE, /* the same */
    WEFT__OP_PUBLISH, /* these two are of the world, not of a group */
    WEFT__OP_RECEIVE
} weft__op;

/* What a member asks for; compared over the members. */
typedef struct weft__call {
    uint64_t sequence;
    int64_t count; /* elements of the input */
    int64_t rows;  /* pieces it is cut in along a dimension; 1 for flat calls */
    weft__op op;
    weft_reduce reduce;
    weft_dtype dtype;
    int root;
} weft__call;

/* What the others may know of a rank: for messages about silence, and to tell slow from silent. */
typedef struct weft__presence {
    _Alignas(WEFT__CACHE_LINE) atomic_ullong progress; /* grows with every sign of life */
    atomic_int waiting_on; /* the rank it waits for; -1: it does not wait */
    atomic_int in_wait;    /* it is in weft__wait_for and looks at the clock itself */
    atomic_uint received;  /* last step record taken */
    atomic_int created;
    int spins; /* of its own thread only: how long it spins before it sleeps */
    /* its last call */
    atomic_int op, reduce, dtype, root;
    atomic_llong count;
    atomic_ullong sequence;
    _Atomic(const char *) group_name;
} weft__presence;

/* A (type, ranks) pair that groups were made for. Lives as long as the world. */
typedef struct weft__key {
    struct weft__key *next;
    weft_group_type type;
    int size;
    int *ranks;
    unsigned *created; /* by each member: how many groups so far */
    char *name;        /* "context {0,1,2,3}" */
} weft__key;

/* What a member shows its peers during one collective. */
typedef struct weft__slot {
    _Alignas(WEFT__CACHE_LINE) weft__call call;
    const void *in; /* staged, or the caller's own memory */
    void *out;      /* where peers may write (all_reduce) */
    weft_cuda *cuda; /* its rank's; NULL: it computes on a CPU */
} weft__slot;

/* The common state of one group's members. joined, left and the list: under the world's lock. */
typedef struct weft__shared {
    struct weft__shared *next;
    const weft__key *key;
    unsigned nth; /* the n-th group of this key */
    int size, joined, left;
    weft__gate gate;    /* members arrived in the low half, completed barriers in the high half */
    weft__slot *slots;  /* [2][size] */
    char *staging;      /* [2][size][WEFT__STAGE_BYTES] */
} weft__shared;

typedef struct weft__fault {
    int rank; /* -1: none */
    long long step; /* -1: any */
    char at[24]; /* "": anywhere */
    enum { WEFT__FAULT_RAISE, WEFT__FAULT_STALL, WEFT__FAULT_EXIT } kind;
} weft__fault;

struct weft_world {
    weft_object object;
    int world_size, threads_per_rank;
    int spin; /* no more threads than cores: a short spin before sleeping pays */
    int check; /* WEFT_CHECK=1: members compare the calls that go over NCCL and peer memory too */
    double timeout;
    weft__fault fault;
    weft__presence *presence; /* [world_size] */

    weft__gate aborted; /* word 1: `failure` is final */
    pthread_mutex_t lock;
    int failed_rank; /* -1: none */
    weft_status failed_code;
    char failure[WEFT__MESSAGE_BYTES];
    weft__key *keys;
    weft__shared *shared;
    struct weft__nccl *nccls; /* the communicators of all ranks (nccl_watch.c) */
    int nccls_watched;
    int32_t nccls_made; /* communicators numbered so far */
    unsigned *halt; /* [world_size][WEFT__HALT_WORDS], of kernels that wait for peers (group_peer.c); NULL before the first */

    /* the step record (record.c) */
    weft__gate published; /* number of records so far */
    weft__gate pending;   /* ranks that have not taken the last one */
    void *record;
    size_t record_bytes, record_capacity;

    /* evaluations (settle.c); under the lock, but for the atomics */
    weft__gate settled; /* number of evaluations that all ranks have left */
    int evaluating, arrived;
    int has_evaluated; /* one has begun: before the first, nothing takes a Ctrl-C back */
    int interrupt_waits; /* Ctrl-C came when no evaluation was on */
    atomic_int left;    /* ranks that ended behind a failure */
    atomic_uint life;   /* grows when a failure was taken back: groups count anew */
    weft_outcome outcome;
};

struct weft_group {
    weft_object object;
    weft_rank *owner;  /* borrowed: a rank outlives the use of its groups */
    weft_world *world; /* retained */
    weft_group_type type;
    int size, rank;
    const int *ranks;     /* the key's */
    const char *name;     /* the key's */
    weft__shared *shared; /* NULL: a group of one, or closed */
    const void **sources; /* [size], scratch of a collective */
    uint64_t sequence;
    unsigned life; /* the world's when the sequence began */
    int closed;
    char *death; /* why it is unusable, or NULL */
    void *scratch; /* contiguous copy of a strided input */
    size_t scratch_bytes;
    weft_group_traffic traffic;
    weft_cuda **cudas; /* [size], retained: the members' GPUs, where streams may follow one another; or NULL */
    struct weft__nccl *nccl; /* of GPU memory; NULL: members share a GPU, or are CPU ranks */
    struct weft__peers *peers; /* small collectives of GPU memory; NULL: all go through nccl */
    char *transport;           /* what carries collectives, for people; NULL: by threads */
};

/* ---- wait.c ---- */

typedef enum weft__waited { WEFT__READY, WEFT__ABORTED, WEFT__TIMED_OUT } weft__waited;

typedef struct weft__wait {
    weft__gate *gate;
    int (*ready)(uint32_t word, uint32_t argument);
    uint32_t argument;
    int (*silent)(void *context); /* world rank of the first one waited for; -1: all have come */
    void *context;
    int no_timeout;
    int certain; /* cannot fail: watch neither abort nor time */
} weft__wait;

double weft__now(void); /* seconds, monotonic */
weft__waited weft__wait_for(weft_world *world, int rank, const weft__wait *wait, int *silent);
void weft__wake(weft__gate *gate);           /* behind a change of its word */
void weft__sleep(weft__gate *gate, uint32_t word, double seconds);
/* The text and the abort of a wait that did not end well. */
weft_status weft__wait_failed(weft_world *world, int rank, weft__waited how, int silent);
void weft__note_progress(weft_world *world, int rank);
void weft__note_call(weft_world *world, int rank, const weft__call *call, const char *group_name);
/* "all_reduce sum of 64 float32" */
const char *weft__describe_call(const weft__call *call, char *text, size_t size);

/* ---- group_threads.c ---- */

weft_status weft__shared_join(weft_group *group, weft_group_type type, const int *ranks, int size, const char *label);
void weft__shared_leave(weft_group *group);
void weft__shared_free(weft__shared *shared);
void weft__key_free(weft__key *key);
/* Shows the call to all members, waits for theirs and compares. From then until weft__exchange_end
 * every member's slot can be read. `direct` must follow from the call alone. */
weft_status weft__exchange_begin(weft_group *group, weft__call *call, const void *in, size_t in_bytes, void *out, int direct);
const weft__slot *weft__peer(const weft_group *group, int member);
void weft__exchange_end(weft_group *group, int direct);

/* ---- group_device.c ---- */

/* A collective on GPU memory: as the call says, `bytes` of input. */
weft_status weft__device_collective(weft_group *group, weft__call *call, const void *in, size_t bytes, void *out, uint64_t bytes_sent);
weft_status weft__device_join(weft_group *group); /* collective, behind weft__shared_join */
/* Counts the call and notes it for others; compares it with theirs under WEFT_CHECK=1. */
weft_status weft__device_announce(weft_group *group, weft__call *call);

/* ---- nccl_library.c ---- */

weft_status weft__nccl_load(void); /* opens NCCL, once in a process. UNSUPPORTED says where it was looked for */

/* ---- group_nccl.c ---- */

weft_status weft__nccl_join(weft_group *group);
weft_status weft__nccl_collective(weft_group *group, const weft__call *call, const void *in, size_t bytes, void *out);
weft_status weft__nccl_check(const weft_group *group); /* an error that came in the background */
/* Collective over all ranks, behind a failure that was taken back: where communicators hold calls that not all
 * ranks have made, which would give the next ones their data, the registered groups get new ones. */
weft_status weft__nccl_recover(weft_rank *rank);
void weft__nccl_leave(weft_group *group); /* waits for nothing, but behind a failure */
/* Gives the rank's communicators back that no group uses. together: every rank does it now, and none failed. */
void weft__nccl_clear(weft_rank *rank, int together);

/* ---- group_peer.c ---- */

/* Collective, behind weft__nccl_join: opens peer memory where every member can, else says why not in group->transport. */
weft_status weft__peers_join(weft_group *group);
/* Whether the call goes over peer memory: the same on all members. bytes: of the input. */
int weft__peers_take(const weft_group *group, const weft__call *call, size_t bytes);
weft_status weft__peers_collective(weft_group *group, const weft__call *call, const void *in, void *out);
void weft__peers_leave(weft_group *group); /* never waits */
void weft__peers_halt(weft_world *world, int halt); /* under the world's lock: kernels that wait leave */
weft_status weft__peers_check(const weft_rank *rank); /* a kernel that gave up waiting */
/* Collective over all ranks, behind a failure that was taken back: inboxes are as new. */
weft_status weft__peers_recover(weft_rank *rank);

/* ---- reduce.c ---- */

/* dst[i] = op over sources[0..n)[offset + i], in that order, in float32 (int32: exact, wrapping),
 * rounded once. dst may be sources[k] + offset. */
void weft__reduce(const void *const *sources, int n, int64_t offset, int64_t count, weft_dtype dtype, weft_reduce op, void *dst);

/* ---- group.c ---- */

weft_status weft__group_create(weft_group **out, weft_rank *rank, weft_group_type type, const int *ranks, int size, const char *label);
weft_status weft__group_usable(weft_group *group);
void weft__group_die(weft_group *group);
/* ---- registry.c ---- */
void weft__forget_groups(weft_rank *rank);
/* A failure that NCCL reported in the background on one of the rank's groups. */
weft_status weft__check_groups(const weft_rank *rank);
weft_status weft__renew_groups(weft_rank *rank); /* collective: new communicators for those that had one */
/* ---- world.c ---- */
/* A wait of this rank took too long: the rank that has done least is behind it. WEFT_OK when there is no other. */
weft_status weft__blame(weft_world *world, int rank);
int weft__abort_locked(weft_world *world, int rank, weft_status code, const char *message); /* whether it was the first */
/* ---- settle.c ---- */
/* Refuses what would wait for other ranks while they do not take part. */
weft_status weft__check_company(const weft_rank *rank, const char *what);
/* ---- fault.c ---- */
weft_status weft__fault_parse(weft__fault *out, const char *text, int world_size);
