/* comm/world.h - the ranks of a process, and what stops them all.
 *
 * Ranks are threads. A world is made once by whoever starts them and shared by all; each rank has
 * its own weft_rank. Every wait of a rank (barrier, collective, step record) also watches the
 * world's abort flag: the first rank that fails leaves its message there and the others leave
 * their waits with it (WEFT_ABORTED) within a second. Ctrl-C travels the same way. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/pool.h"
#include "base/status.h"
#include "device/arena.h"
#include "device/memory.h"
#include "plan/axis.h"

typedef struct weft_world weft_world;
typedef struct weft_rank weft_rank;
typedef struct weft_group weft_group;

typedef struct weft_world_options {
    int world_size;
    int total_threads;      /* cores to share out; 0: all of the process */
    double timeout_seconds; /* a wait without any progress of the silent rank; 0: 300 */
    const char *fault;      /* WEFT_FAULT text, or NULL (DESIGN 10) */
} weft_world_options;

weft_status weft_world_create(weft_world **out, const weft_world_options *options);
void weft_world_release(weft_world *world);
int weft_world_size(const weft_world *world);

/* The first call wins; wakes every waiting rank. */
void weft_world_abort(weft_world *world, int rank, weft_status code, const char *message);
/* Ctrl-C: aborts with WEFT_INTERRUPTED. Safe to call from the supervising thread. */
void weft_world_interrupt(weft_world *world);
/* WEFT_OK, or ABORTED/INTERRUPTED with the first failing rank's message. */
weft_status weft_world_check(weft_world *world);
/* The first failure; returns its rank, or -1 when there was none. */
int weft_world_failure(weft_world *world, weft_status *code, const char **message);
/* Whether ranks talk from GPU to GPU now: then one may sit in the driver behind a kernel that waits for a peer. */
int weft_world_spans_gpus(weft_world *world);

/* ---- evaluations: failures that the world survives, for a prompt over all ranks ----
 *
 * Rank 0 begins one; every rank runs its part and then settles. A rank whose part failed calls
 * weft_world_abort first, so that the others leave their waits. When all have come, the abort is
 * taken back, groups count anew, and each rank has the same outcome. */
typedef struct weft_outcome {
    int rank; /* the first that failed; -1: none did */
    weft_status code;
    char message[2048];
} weft_outcome;

void weft_world_begin_evaluation(weft_world *world);
/* Ctrl-C: 0 when no evaluation is on (the next one is interrupted as it begins), 1 when this call interrupted it, 2 when it had
 * failed already. Before the first evaluation it aborts for good (2): the ranks are still starting. */
int weft_world_interrupt_evaluation(weft_world *world);
/* A new prompt: a Ctrl-C of before does not count any more. Returns whether there was one. */
int weft_world_forget_interrupt(weft_world *world);
/* Collective over all ranks, wherever they failed. Fails when a rank has ended or, behind a failure,
 * does not come within the world's timeout: then the world is lost. */
weft_status weft_world_settle(weft_rank *rank, weft_outcome *out);
/* A rank's thread ends behind a failure: nobody can settle any more. */
void weft_world_leave(weft_world *world);

/* A step's block table as it lies on the rank's GPU (cache/step_device.c). */
typedef struct weft_known_table {
    int32_t *words; /* (requests, stride) */
    int64_t capacity, requests, stride;
    const void *where; /* there; NULL: nothing is known */
    unsigned arrivals; /* of records, before the one that brought it up to this */
} weft_known_table;

/* What one rank owns. Made on the rank's own thread. */
struct weft_rank {
    weft_object object;
    weft_world *world;
    int rank, world_size;
    weft_pool *pool;
    weft_memory *memory;        /* the host's */
    weft_memory *device_memory; /* where weights, cache and steps live: `memory`, or the GPU's */
    weft_cuda *cuda;            /* NULL: this rank computes on its CPU pool */
    weft_arena *arena;          /* of device_memory */
    weft_tensor *step_buffer;   /* a step's arrays on the GPU (cache/step_device.c); NULL at first */
    weft_known_table known_table;
    uint64_t step;       /* number of steps begun: for messages and faults */
    weft_group *everyone; /* all ranks, in order */
    struct weft_group_list *groups; /* found by (type, world_size) */
    uint64_t nccl_calls; /* collectives given to NCCL so far */
    struct weft__nccl *nccls;       /* this rank's communicators (group_nccl.c) */
    struct weft__peers *peers;      /* of this rank's groups that have peer memory */
    int alone; /* it evaluates something that the others do not: collectives are refused */
    void *record; /* the step record last received */
    size_t record_capacity;
};

weft_status weft_rank_create(weft_rank **out, weft_world *world, int rank);
/* The single rank of a plain script or spec: a world of one, a pool of all cores. */
weft_status weft_rank_create_single(weft_rank **out, int threads);
void weft_rank_release(weft_rank *rank);
/* From here the rank computes on a GPU. Before it makes layers or steps. limit_bytes 0: none. */
weft_status weft_rank_use_cuda(weft_rank *rank, int index, long long limit_bytes);

/* A new step: counts it, starts the arena's step, leaves if the world was aborted, and is the place
 * "step" of WEFT_FAULT. */
weft_status weft_rank_begin_step(weft_rank *rank);

/* WEFT_FAULT: acts when (rank, step, at) match. Called with at = "exchange", "step", "load", ... */
weft_status weft_rank_fault(weft_rank *rank, const char *at);

/* One flat record from rank 0 to all others. publish waits until every rank has taken the one
 * before; receive waits for the next and gives a copy that lasts until the next receive. */
weft_status weft_world_publish(weft_rank *rank, const void *record, size_t bytes);
weft_status weft_world_receive(weft_rank *rank, const void **record, size_t *bytes);
