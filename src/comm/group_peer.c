/* comm/group_peer.c - small collectives between GPUs through kernels that write to peer memory.
 *
 * For members of one process with a GPU each, where every GPU reaches the memory of all others and
 * the environment does not say WEFT_PEER=0; all members agree on that when the group is made, and
 * reserve what they need then. Calls above the limit go through NCCL on the same stream.
 *
 * An inbox goes back when its group closes. By then nobody writes to it any more, in the order of the
 * owner's stream: a kernel of the owner ends only when what the others sent for its call has come.
 * Behind a failure that does not hold, and the inbox is left to the end of the rank. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/internal.h"
#include "kernels/weft_fused.h"

#ifdef WEFT_HAVE_CUDA

struct weft__peers {
    struct weft__peers *next; /* of the rank's */
    weft_group *group;
    weft_peer peer;
    size_t limit; /* bytes of a call for each member */
};

enum { COUNTER_BYTES = 256 };

static size_t inbox_bytes(const weft_peer *p) { return (size_t)weft_peer_inbox_bytes(p->size, p->capacity); }

/* So that no member waits for more than 16384 packets of the others at once (kernels/cuda/peer.cuh). */
static size_t limit_of(int size)
{
    return (size_t)(size <= 2 ? 128 : size <= 4 ? 32 : 16) << 10;
}

void weft__peers_halt(weft_world *world, int halt)
{
    for (int r = 0; world->halt != NULL && r < world->world_size; r++)
        __atomic_store_n(&world->halt[r * WEFT__HALT_WORDS], (unsigned)halt, __ATOMIC_RELEASE);
}

static weft_status reserve_halt(weft_world *world)
{
    pthread_mutex_lock(&world->lock);
    weft_status status = WEFT_OK;
    if (world->halt == NULL) status = weft_cuda_words_create(&world->halt, (size_t)world->world_size * WEFT__HALT_WORDS);
    if (status == WEFT_OK && atomic_load(&world->aborted.word) != 0) weft__peers_halt(world, 1);
    pthread_mutex_unlock(&world->lock);
    return status;
}

weft_status weft__peers_check(const weft_rank *rank)
{
    if (rank->peers == NULL) return WEFT_OK;
    unsigned *gave_up = &rank->world->halt[rank->rank * WEFT__HALT_WORDS + 1];
    if (__atomic_load_n(gave_up, __ATOMIC_ACQUIRE) == 0) return WEFT_OK;
    return weft_fail(WEFT_TIMEOUT, "a kernel on GPU %d waited %.3g s in vain for another rank's; if that is only slow, raise --timeout", weft_cuda_index(rank->cuda),
                     (double)rank->peers->peer.patience * 1e-9);
}

/* ---- making them ---- */

/* What this member can do, and where the others find it. */
typedef struct {
    void *inbox;
    char why_not[200];
} offer;

static weft_status prepare(struct weft__peers *peers, const int32_t *gpus)
{
    weft_group *group = peers->group;
    weft_rank *rank = group->owner;
    weft_peer *p = &peers->peer;
    const char *wanted = getenv("WEFT_PEER");
    if (wanted != NULL && strcmp(wanted, "0") == 0) return weft_fail(WEFT_UNSUPPORTED, "WEFT_PEER=0");
    if (group->size > WEFT_PEER_MAX) return weft_fail(WEFT_UNSUPPORTED, "more than %d ranks", WEFT_PEER_MAX);
    WEFT_TRY(reserve_halt(group->world));
    WEFT_TRY(weft_peer_prepare());
    double patience = 4 * group->world->timeout;
    p->size = group->size;
    p->rank = group->rank;
    p->blocks = weft_cuda_multiprocessors(rank->cuda);
    p->capacity = (int64_t)(peers->limit / 8);
    p->patience = patience < 1e9 ? (int64_t)(patience * 1e9) : INT64_MAX;
    p->halt = &group->world->halt[rank->rank * WEFT__HALT_WORDS];
    WEFT_TRY(weft_cuda_share(rank->cuda, inbox_bytes(p) + COUNTER_BYTES, gpus, group->size, &p->inbox[p->rank]));
    p->counters = (unsigned *)((char *)p->inbox[p->rank] + inbox_bytes(p));
    return WEFT_OK;
}

static void give_back(struct weft__peers *peers)
{
    weft_cuda_unshare(peers->group->owner->cuda, peers->peer.inbox[peers->peer.rank]);
    free(peers);
}

/* "peer memory up to 128 KB, NCCL above", or why not. */
static weft_status describe(weft_group *group, const struct weft__peers *peers, const char *why_not, int rank)
{
    char text[300];
    free(group->transport);
    if (why_not == NULL) snprintf(text, sizeof text, "peer memory up to %zu KB, NCCL above", peers->limit >> 10);
    else if (strncmp(why_not, "WEFT_PEER", 9) == 0) snprintf(text, sizeof text, "NCCL (%s)", why_not);
    else snprintf(text, sizeof text, "NCCL (no peer memory; rank %d: %s)", rank, why_not);
    group->transport = strdup(text);
    return group->transport != NULL ? WEFT_OK : weft_fail(WEFT_MEMORY, "no memory for a group");
}

weft_status weft__peers_join(weft_group *group)
{
    weft_rank *rank = group->owner;
    offer mine = {0}, *all = calloc((size_t)group->size, sizeof *all);
    struct weft__peers *peers = calloc(1, sizeof *peers);
    int32_t gpu = weft_cuda_index(rank->cuda), gpus[WEFT__MAX_RANKS];
    weft_status status = all && peers ? weft_group_all_gather(group, &gpu, gpus, 1, WEFT_I32) : weft_fail(WEFT_MEMORY, "no memory for a group");
    if (status != WEFT_OK) {
        free(all);
        free(peers);
        return status;
    }
    peers->group = group;
    peers->limit = limit_of(group->size);
    if (prepare(peers, gpus) != WEFT_OK) snprintf(mine.why_not, sizeof mine.why_not, "%s", weft_error_message());
    mine.inbox = peers->peer.inbox[peers->peer.rank];
    status = weft_cuda_wait(rank->cuda); /* nobody sends before all inboxes are clear */
    if (status == WEFT_OK) status = weft_group_all_gather(group, &mine, all, (int64_t)sizeof mine, WEFT_U8);
    int without = -1;
    for (int m = 0; status == WEFT_OK && m < group->size; m++) {
        peers->peer.inbox[m] = all[m].inbox;
        if (without < 0 && all[m].why_not[0] != 0) without = m;
    }
    if (status == WEFT_OK) status = describe(group, peers, without >= 0 ? all[without].why_not : NULL, without >= 0 ? group->ranks[without] : 0);
    free(all);
    if (status != WEFT_OK || without >= 0) {
        peers->peer.inbox[peers->peer.rank] = mine.inbox;
        give_back(peers);
        return status;
    }
    peers->next = rank->peers;
    rank->peers = group->peers = peers;
    return WEFT_OK;
}

void weft__peers_leave(weft_group *group)
{
    struct weft__peers *peers = group->peers;
    if (peers == NULL) return;
    group->peers = NULL;
    for (struct weft__peers **link = &group->owner->peers; *link != NULL; link = &(*link)->next)
        if (*link == peers) {
            *link = peers->next;
            break;
        }
    if (group->death == NULL && atomic_load(&group->world->aborted.word) == 0) give_back(peers);
    else free(peers);
}

weft_status weft__peers_recover(weft_rank *rank)
{
    weft_world *world = rank->world;
    pthread_mutex_lock(&world->lock);
    int used = world->halt != NULL;
    pthread_mutex_unlock(&world->lock);
    if (!used || world->world_size == 1) return WEFT_OK;
    /* The halt is still on: kernels that wait for a call which others never made leave. */
    if (rank->cuda != NULL && !weft_cuda_rests(rank->cuda, 2))
        return weft_fail(WEFT_TIMEOUT, "GPU %d does not come to rest behind a failure", weft_cuda_index(rank->cuda));
    WEFT_TRY(weft_group_barrier(rank->everyone));
    pthread_mutex_lock(&world->lock);
    if (atomic_load(&world->aborted.word) == 0) memset(&world->halt[rank->rank * WEFT__HALT_WORDS], 0, 2 * sizeof *world->halt);
    pthread_mutex_unlock(&world->lock);
    for (struct weft__peers *p = rank->peers; p != NULL; p = p->next)
        WEFT_TRY(weft_cuda_clear(rank->cuda, p->peer.inbox[p->peer.rank], inbox_bytes(&p->peer) + COUNTER_BYTES));
    if (rank->peers != NULL) WEFT_TRY(weft_cuda_wait(rank->cuda));
    return weft_group_barrier(rank->everyone);
}

void weft_group_set_peer_limit(weft_group *group, size_t bytes)
{
    if (group->peers != NULL) group->peers->limit = bytes;
}

/* ---- calls ---- */

/* Bytes that each member gets from this one; 0 rows or pieces: none. */
static int64_t chunk_of(const weft_group *group, const weft__call *call)
{
    return call->op == WEFT__OP_ALL_REDUCE || call->op == WEFT__OP_ALL_GATHER ? call->count : call->count / group->size;
}

int weft__peers_take(const weft_group *group, const weft__call *call, size_t bytes)
{
    const struct weft__peers *peers = group->peers;
    if (peers == NULL || bytes == 0) return 0;
    if (call->op != WEFT__OP_ALL_REDUCE && call->op != WEFT__OP_ALL_GATHER && call->op != WEFT__OP_REDUCE_SCATTER &&
        call->op != WEFT__OP_ALL_TO_ALL)
        return 0;
    int64_t chunk = chunk_of(group, call);
    return (size_t)chunk * weft_dtype_size(call->dtype) <= peers->limit && weft_peer_fits(&peers->peer, chunk, call->dtype);
}

weft_status weft__peers_collective(weft_group *group, const weft__call *call, const void *in, void *out)
{
    const weft_peer *p = &group->peers->peer;
    int64_t chunk = chunk_of(group, call), rows = call->rows > 0 ? call->rows : 1, piece = chunk / rows;
    weft_peer_args args = {.in = in, .out = out, .count = chunk, .piece = piece, .dtype = call->dtype, .max = call->reduce == WEFT_REDUCE_MAX};
    weft_cuda *cuda = group->owner->cuda;
    weft_status status;
    switch (call->op) {
    case WEFT__OP_ALL_REDUCE: status = weft_peer_sum(p, &args, weft_cuda_stream(cuda)); break;
    case WEFT__OP_REDUCE_SCATTER:
        args.in_member_stride = piece;
        args.in_row_stride = piece * group->size;
        status = weft_peer_sum(p, &args, weft_cuda_stream(cuda));
        break;
    case WEFT__OP_ALL_GATHER:
        args.in_row_stride = args.out_member_stride = piece;
        args.out_row_stride = piece * group->size;
        status = weft_peer_move(p, &args, weft_cuda_stream(cuda));
        break;
    default:
        args.in_member_stride = args.out_member_stride = args.in_row_stride = args.out_row_stride = piece;
        status = weft_peer_move(p, &args, weft_cuda_stream(cuda));
    }
    return weft_cuda_launched(cuda, "a collective", status);
}

/* One that this file runs whole: counted, noted and, where it fails, the end of the group. taken: a product's, which
 * becomes one of the operations that a captured step collects, where it does; else NULL. */
static weft_status fused(weft_group *group, weft__call call, uint64_t bytes_sent, const weft_linear_args *taken,
                         weft_status (*run)(const weft_peer *peer, const void *context, void *stream), const void *context)
{
    double start = weft__now();
    weft_status status = weft__device_announce(group, &call);
    weft_linear_over_args over = {&group->peers->peer, taken};
    if (status == WEFT_OK && (taken == NULL || !weft_cuda_take(group->owner->cuda, WEFT_FUSED_linear_over, &over)))
        status = weft_cuda_launched(group->owner->cuda, "a collective", run(&group->peers->peer, context, weft_cuda_stream(group->owner->cuda)));
    if (status != WEFT_OK) {
        weft__group_die(group);
        return status;
    }
    group->traffic.calls++;
    group->traffic.seconds += weft__now() - start;
    group->traffic.bytes_sent += bytes_sent;
    return WEFT_OK;
}

static weft_status run_linear(const weft_peer *peer, const void *context, void *stream) { return weft_peer_linear(peer, context, stream); }

weft_status weft_group_linear_over(weft_group *group, const weft_linear_args *args, int *done)
{
    *done = 0;
    WEFT_TRY(weft__group_usable(group));
    weft__call call = {.op = WEFT__OP_ALL_REDUCE, .count = args->tokens * args->n, .dtype = args->y_dtype};
    size_t bytes = (size_t)call.count * weft_dtype_size(call.dtype);
    if (!weft__peers_take(group, &call, bytes) || !weft_peer_linear_fits(&group->peers->peer, args)) return WEFT_OK;
    WEFT_TRY(fused(group, call, 2 * (uint64_t)bytes * (uint64_t)(group->size - 1) / (uint64_t)group->size, args, run_linear, args));
    *done = 1;
    return WEFT_OK;
}

typedef struct {
    const weft_group_norm_args *parts;
    int count;
} norm_call;

static weft_status run_norm(const weft_peer *peer, const void *context, void *stream)
{
    const norm_call *n = context;
    return weft_peer_group_norm(peer, n->parts, n->count, stream);
}

weft_status weft_group_norm_over(weft_group *group, const weft_group_norm_args *parts, int count, int *done)
{
    *done = 0;
    WEFT_TRY(weft__group_usable(group));
    if (group->peers == NULL || group->peers->limit == 0 || parts[0].rows == 0 || parts[0].rows > group->peers->peer.capacity) return WEFT_OK;
    norm_call n = {parts, count};
    uint64_t sent = 2 * (uint64_t)(parts[0].rows * count) * sizeof(float) * (uint64_t)(group->size - 1) / (uint64_t)group->size;
    WEFT_TRY(fused(group, (weft__call){.op = WEFT__OP_NORM, .count = parts[0].rows * count, .dtype = WEFT_F32}, sent, NULL, run_norm, &n));
    *done = 1;
    return WEFT_OK;
}

static weft_status run_dcp(const weft_peer *peer, const void *context, void *stream) { return weft_peer_dcp(peer, context, stream); }

weft_status weft_group_dcp_over(weft_group *group, const weft_peer_dcp_args *args, int *done)
{
    *done = 0;
    WEFT_TRY(weft__group_usable(group));
    int64_t count = args->tokens * args->heads * args->dim;
    if (group->peers == NULL || count == 0 || !weft_peer_dcp_fits(&group->peers->peer, args)) return WEFT_OK;
    size_t bytes = (size_t)count * weft_dtype_size(args->dtype) + (size_t)(args->tokens * args->heads) * sizeof(float);
    if (bytes > group->peers->limit) return WEFT_OK;
    weft__call call = {.op = WEFT__OP_EXCHANGE, .count = count, .dtype = args->dtype};
    WEFT_TRY(fused(group, call, (uint64_t)bytes * (uint64_t)(group->size - 1), NULL, run_dcp, args));
    *done = 1;
    return WEFT_OK;
}

#else

void weft__peers_halt(weft_world *world, int halt) {}
weft_status weft__peers_check(const weft_rank *rank) { return WEFT_OK; }
weft_status weft__peers_recover(weft_rank *rank) { return WEFT_OK; }
void weft__peers_leave(weft_group *group) {}
void weft_group_set_peer_limit(weft_group *group, size_t bytes) {}

weft_status weft_group_linear_over(weft_group *group, const weft_linear_args *args, int *done)
{
    *done = 0;
    return WEFT_OK;
}

weft_status weft_group_norm_over(weft_group *group, const weft_group_norm_args *parts, int count, int *done)
{
    *done = 0;
    return WEFT_OK;
}

weft_status weft_group_dcp_over(weft_group *group, const weft_peer_dcp_args *args, int *done)
{
    *done = 0;
    return WEFT_OK;
}

#endif
