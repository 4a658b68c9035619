/* comm/group_nccl.c - collectives on GPU memory through NCCL: one thread, one GPU, one communicator.
 *
 * A call only puts work on the rank's one stream, so all ranks see one order; what waits for it
 * (weft_cuda_wait) polls the communicators' errors, the world's abort and the clock. Making a
 * communicator waits for the peers inside NCCL: a helper thread does that. A rank keeps those it has made, for
 * later groups of the same members. Calls that do not come back are the watch's business (nccl_watch.c). */
#include "comm/internal.h"

#ifdef WEFT_HAVE_NCCL

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/nccl.h"

static weft_status failed(const weft_group *group, const char *what, ncclResult_t result)
{
    WEFT_TRY(weft_world_check(group->world)); /* an abort from elsewhere: then that is the reason */
    const char *detail = ncclGetLastError(NULL);
    return weft_fail(WEFT_NCCL, "group %s: NCCL: %s (%s)%s%s", group->name, ncclGetErrorString(result), what,
                     detail != NULL && *detail ? ": " : "", detail != NULL ? detail : "");
}

static weft_status taken(const weft_group *group, const char *what, ncclResult_t result)
{
    return result == ncclSuccess ? WEFT_OK : failed(group, what, result);
}

/* What a helper thread makes while the rank waits within bounds. Whoever lets go last frees it. */
typedef struct {
    atomic_int done, holders;
    ncclUniqueId id;
    ncclComm_t comm;
    ncclResult_t result;
    int size, rank, device;
} birth;

static void let_go(birth *b)
{
    if (atomic_fetch_sub(&b->holders, 1) == 1) free(b);
}

static void *make(void *context)
{
    birth *b = context;
    b->result = cudaSetDevice(b->device) == cudaSuccess ? ncclCommInitRank(&b->comm, b->size, b->id, b->rank) : ncclUnhandledCudaError;
    atomic_store(&b->done, 1);
    let_go(b);
    return NULL;
}

/* NCCL takes a second or two to open, however short the timeout is: making a communicator has patience of its own. The
 * rank shows life meanwhile, or ranks of other groups would lose theirs; but it comes no further than the others by that. */
static weft_status wait_for(const weft_group *group, birth *b)
{
    static const double LEAST = 30; /* seconds */
    const double timeout = group->world->timeout, patience = timeout > LEAST ? timeout : LEAST, began = weft__now();
    unsigned long long shown = 0;
    while (!atomic_load(&b->done)) {
        WEFT_TRY(weft_world_check(group->world));
        if (weft__now() - began > patience)
            return weft_fail(WEFT_TIMEOUT, "group %s: making a communicator did not finish within %.3g s; raise --timeout above that",
                             group->name, patience);
        weft__note_progress(group->world, group->owner->rank);
        shown++;
        usleep(200);
    }
    atomic_fetch_sub_explicit(&group->world->presence[group->owner->rank].progress, shown, memory_order_relaxed);
    return b->result == ncclSuccess ? WEFT_OK : failed(group, "making a communicator", b->result);
}

/* The rank's communicator of the group's members, if it has one that lives. */
static struct weft__nccl *known(const weft_group *group)
{
    for (struct weft__nccl *n = group->owner->nccls; n != NULL; n = n->sibling)
        if (n->size == group->size && memcmp(n->ranks, group->ranks, (size_t)n->size * sizeof *n->ranks) == 0 &&
            atomic_load_explicit(&n->state, memory_order_acquire) == WEFT__NCCL_LIVE)
            return n;
    return NULL;
}

/* What member 0 tells the others of a new one. */
typedef struct {
    ncclUniqueId id;
    int32_t number;
} invitation;

static weft_status invite(weft_group *group, invitation *card)
{
    weft_world *world = group->world;
    if (group->rank == 0) {
        ncclResult_t result = ncclGetUniqueId(&card->id);
        if (result != ncclSuccess) return failed(group, "making an id", result);
        pthread_mutex_lock(&world->lock);
        card->number = ++world->nccls_made;
        pthread_mutex_unlock(&world->lock);
    }
    return weft_group_broadcast_bytes(group, card, sizeof *card, 0);
}

static weft_status create(weft_group *group, struct weft__nccl *nccl)
{
    invitation card = {0};
    birth *b = calloc(1, sizeof *b);
    pthread_t thread;
    weft_status status = b != NULL ? invite(group, &card) : weft_fail(WEFT_MEMORY, "no memory for a communicator");
    if (status == WEFT_OK) {
        atomic_init(&b->holders, 2);
        b->id = card.id;
        b->size = group->size;
        b->rank = group->rank;
        b->device = weft_cuda_index(group->owner->cuda);
        if (pthread_create(&thread, NULL, make, b) != 0) status = weft_fail(WEFT_MEMORY, "no thread to make a communicator");
    }
    if (status != WEFT_OK) {
        free(b);
        return status;
    }
    pthread_detach(thread);
    status = wait_for(group, b);
    nccl->comm = status == WEFT_OK ? b->comm : NULL;
    nccl->world = group->world;
    nccl->rank = group->owner->rank;
    nccl->cuda = group->owner->cuda;
    nccl->ranks = group->ranks;
    nccl->size = group->size;
    nccl->number = card.number;
    let_go(b);
    return status == WEFT_OK ? weft__nccl_watch(nccl) : status;
}

/* Groups of the same members share one: all work of a rank is on one stream, in an order that all ranks keep. */
weft_status weft__nccl_join(weft_group *group)
{
    weft_rank *rank = group->owner;
    struct weft__nccl *nccl = known(group);
    int32_t mine = nccl != NULL ? nccl->number : 0, all[WEFT__MAX_RANKS];
    WEFT_TRY(weft__nccl_load());
    WEFT_TRY(weft_group_all_gather(group, &mine, all, 1, WEFT_I32));
    for (int m = 0; m < group->size; m++)
        if (all[m] != mine) nccl = NULL; /* one of them has lost it */
    if (nccl == NULL) {
        nccl = calloc(1, sizeof *nccl);
        weft_status status = nccl != NULL ? create(group, nccl) : weft_fail(WEFT_MEMORY, "no memory for a communicator");
        if (status != WEFT_OK) {
            free(nccl);
            return status;
        }
        nccl->sibling = rank->nccls;
        rank->nccls = nccl;
    }
    nccl->groups++;
    group->nccl = nccl;
    return WEFT_OK;
}

/* A group that no registry knows is not renewed behind a failure. */
static weft_status check_live(const weft_group *group)
{
    if (atomic_load_explicit(&group->nccl->state, memory_order_acquire) == WEFT__NCCL_LIVE) return WEFT_OK;
    WEFT_TRY(weft_world_check(group->world));
    return weft_fail(WEFT_CLOSED, "group %s: its communicator ended with a failure; make the group anew", group->name);
}

weft_status weft__nccl_check(const weft_group *group)
{
    ncclResult_t state = ncclSuccess;
    WEFT_TRY(check_live(group));
    ncclResult_t asked = ncclCommGetAsyncError(group->nccl->comm, &state);
    if (asked == ncclSuccess && (state == ncclSuccess || state == ncclInProgress)) return WEFT_OK;
    return failed(group, "a collective", asked != ncclSuccess ? asked : state);
}

static void end(weft_rank *rank, struct weft__nccl *nccl, int together)
{
    struct weft__nccl **link = &rank->nccls;
    while (*link != nccl) link = &(*link)->sibling;
    *link = nccl->sibling;
    weft__nccl_unwatch(nccl, together);
}

/* It is kept: the last member to end a communicator frees what all of them have, also page-locked memory, and waits for
 * the kernels of their GPUs with it. One of these may by then wait for what this rank launches next. */
void weft__nccl_leave(weft_group *group)
{
    struct weft__nccl *nccl = group->nccl;
    group->nccl = NULL;
    if (nccl == NULL || --nccl->groups > 0) return;
    int failed = group->death != NULL || atomic_load(&group->world->aborted.word) != 0;
    if (failed || atomic_load_explicit(&nccl->state, memory_order_acquire) != WEFT__NCCL_LIVE) end(group->owner, nccl, 0);
}

void weft__nccl_clear(weft_rank *rank, int together)
{
    for (struct weft__nccl *n = rank->nccls, *next; n != NULL; n = next) {
        next = n->sibling;
        if (n->groups == 0) end(rank, n, together);
    }
}

static ncclDataType_t type_of(weft_dtype dtype)
{
    switch (dtype) {
    case WEFT_F32: return ncclFloat32;
    case WEFT_BF16: return ncclBfloat16;
    case WEFT_F16: return ncclFloat16;
    case WEFT_I32: return ncclInt32;
    default: return ncclUint8;
    }
}

/* Rows of pieces are packed piece by piece, as a flat collective wants them. */
static weft_status flatten(weft_group *group, const void *in, size_t piece, int64_t rows, int64_t parts, void **out)
{
    WEFT_TRY(weft_arena_scratch(group->owner->arena, piece * (size_t)(rows * parts), out));
    for (int64_t p = 0; p < parts; p++)
        WEFT_TRY(weft_cuda_copy_rows(group->owner->cuda, (char *)*out + (size_t)(p * rows) * piece, piece, (const char *)in + (size_t)p * piece,
                                     (size_t)parts * piece, piece, (size_t)rows));
    return WEFT_OK;
}

static weft_status all_gather(weft_group *group, const weft__call *call, const void *in, size_t bytes, void *out, cudaStream_t stream)
{
    ncclComm_t comm = group->nccl->comm;
    int64_t parts = group->size, rows = call->rows;
    void *flat = out;
    if (rows > 1) WEFT_TRY(weft_arena_scratch(group->owner->arena, bytes * (size_t)parts, &flat));
    WEFT_TRY(taken(group, "all_gather", ncclAllGather(in, flat, bytes, ncclUint8, comm, stream)));
    if (rows <= 1) return WEFT_OK;
    size_t piece = bytes / (size_t)rows;
    for (int64_t p = 0; p < parts; p++)
        WEFT_TRY(weft_cuda_copy_rows(group->owner->cuda, (char *)out + (size_t)p * piece, (size_t)parts * piece,
                                     (const char *)flat + (size_t)p * bytes, piece, piece, (size_t)rows));
    return WEFT_OK;
}

static weft_status reduce_scatter(weft_group *group, const weft__call *call, const void *in, size_t bytes, void *out, cudaStream_t stream)
{
    ncclComm_t comm = group->nccl->comm;
    void *flat = NULL;
    size_t piece = bytes / (size_t)group->size / (size_t)(call->rows > 0 ? call->rows : 1);
    if (call->rows > 1) {
        WEFT_TRY(flatten(group, in, piece, call->rows, group->size, &flat));
        in = flat;
    }
    return taken(group, "reduce_scatter",
                 ncclReduceScatter(in, out, (size_t)(call->count / group->size), type_of(call->dtype), ncclSum, comm, stream));
}

static weft_status all_to_all(weft_group *group, const void *in, size_t bytes, void *out, cudaStream_t stream)
{
    ncclComm_t comm = group->nccl->comm;
    size_t piece = bytes / (size_t)group->size;
    ncclResult_t result = ncclGroupStart();
    for (int m = 0; m < group->size && result == ncclSuccess; m++) {
        result = ncclSend((const char *)in + (size_t)m * piece, piece, ncclUint8, m, comm, stream);
        if (result == ncclSuccess) result = ncclRecv((char *)out + (size_t)m * piece, piece, ncclUint8, m, comm, stream);
    }
    ncclResult_t ended = ncclGroupEnd();
    return taken(group, "all_to_all", result != ncclSuccess ? result : ended);
}

static weft_status collective(weft_group *group, const weft__call *call, const void *in, size_t bytes, void *out)
{
    ncclComm_t comm = group->nccl->comm;
    cudaStream_t stream = weft_cuda_stream(group->owner->cuda);
    switch (call->op) {
    case WEFT__OP_ALL_REDUCE:
        return taken(group, "all_reduce",
                     ncclAllReduce(in, out, (size_t)call->count, type_of(call->dtype), call->reduce == WEFT_REDUCE_MAX ? ncclMax : ncclSum,
                                   comm, stream));
    case WEFT__OP_ALL_GATHER: return all_gather(group, call, in, bytes, out, stream);
    case WEFT__OP_REDUCE_SCATTER: return reduce_scatter(group, call, in, bytes, out, stream);
    case WEFT__OP_ALL_TO_ALL: return all_to_all(group, in, bytes, out, stream);
    case WEFT__OP_BROADCAST:
        return taken(group, "broadcast", ncclBroadcast(in, out, bytes, ncclUint8, call->root, comm, stream));
    default: return weft_fail(WEFT_INTERNAL, "no such collective on GPUs");
    }
}

weft_status weft__nccl_collective(weft_group *group, const weft__call *call, const void *in, size_t bytes, void *out)
{
    WEFT_TRY(check_live(group));
    group->owner->nccl_calls++;
    atomic_store_explicit(&group->nccl->inside, weft__now(), memory_order_relaxed);
    weft_status status = collective(group, call, in, bytes, out);
    atomic_store_explicit(&group->nccl->inside, 0, memory_order_relaxed);
    return status;
}

#else

weft_status weft__nccl_join(weft_group *group)
{
    return weft_fail(WEFT_UNSUPPORTED, "group %s spans several GPUs, and this build of weft has no NCCL; build it where nccl.h is found",
                     group->name);
}

weft_status weft__nccl_collective(weft_group *group, const weft__call *call, const void *in, size_t bytes, void *out)
{
    return weft__nccl_join(group);
}

weft_status weft__nccl_check(const weft_group *group) { return WEFT_OK; }
void weft__nccl_leave(weft_group *group) {}
void weft__nccl_clear(weft_rank *rank, int together) {}
weft_status weft__nccl_recover(weft_rank *rank) { return WEFT_OK; }

#endif
