/* comm/group_device.c - collectives on GPU memory between ranks of one process.
 *
 * The members mark their streams and show each other their buffers as for host memory; each copies or
 * sums what it needs on its own stream, behind the others' marks, and marks it again; behind the barrier
 * that cannot fail, every stream goes on only behind these marks: nobody's buffer changes while it is
 * read. No stream comes to rest. Right for any number of ranks on a GPU; between GPUs NCCL is the fast
 * way (group_nccl.c). */
#include <stdlib.h>
#include <string.h>

#include "comm/internal.h"

#ifdef WEFT_HAVE_CUDA

#include "kernels/weft_cuda_device.h"

typedef struct {
    weft_group *group;
    const weft__call *call;
    size_t bytes, piece; /* of the input; of one of its pieces */
    int64_t count;       /* elements of a piece */
} run;

static weft_status reduce_into(const run *r, void *dst, int64_t rows, int64_t cols, int64_t src_stride, int64_t first)
{
    weft_group *group = r->group;
    weft_cuda_reduce_args args = {.dst = dst, .count = group->size, .max = r->call->reduce == WEFT_REDUCE_MAX, .rows = rows, .cols = cols,
                                  .src_stride = src_stride, .dst_stride = cols, .dtype = r->call->dtype};
    if (group->size > WEFT_CUDA_MAX_PEERS)
        return weft_fail(WEFT_UNSUPPORTED, "%s sums over %d ranks in one process, at most %d", group->name, group->size, WEFT_CUDA_MAX_PEERS);
    for (int m = 0; m < group->size; m++)
        args.sources[m] = (const char *)weft__peer(group, m)->in + (size_t)first * weft_dtype_size(r->call->dtype);
    return weft_cuda_reduce(&args, weft_cuda_stream(group->owner->cuda));
}

/* This member's share of the work, between the two barriers. */
static weft_status work(const run *r, void *out)
{
    weft_group *group = r->group;
    weft_cuda *cuda = group->owner->cuda;
    size_t size = (size_t)group->size;
    switch (r->call->op) {
    case WEFT__OP_ALL_REDUCE: return reduce_into(r, out, 1, r->call->count, 0, 0);
    case WEFT__OP_REDUCE_SCATTER:
        return reduce_into(r, out, r->call->rows, r->count, r->count * group->size, r->count * group->rank);
    case WEFT__OP_ALL_GATHER:
        for (size_t m = 0; m < size; m++)
            WEFT_TRY(weft_cuda_copy_rows(cuda, (char *)out + m * r->piece, size * r->piece, weft__peer(group, (int)m)->in, r->piece,
                                         r->piece, (size_t)r->call->rows));
        return WEFT_OK;
    case WEFT__OP_ALL_TO_ALL:
        for (size_t m = 0; m < size; m++)
            WEFT_TRY(weft_cuda_copy(cuda, (char *)out + m * r->piece,
                                    (const char *)weft__peer(group, (int)m)->in + (size_t)group->rank * r->piece, r->piece));
        return WEFT_OK;
    case WEFT__OP_BROADCAST:
        return group->rank == r->call->root ? WEFT_OK : weft_cuda_copy(cuda, out, weft__peer(group, r->call->root)->in, r->bytes);
    default: return weft_fail(WEFT_INTERNAL, "no such collective on a GPU");
    }
}

enum { FILLED, READ }; /* marks: the input is there; this member has read what it needs */

/* What comes next on the stream comes behind every member's mark, once all have set it. */
static weft_status follow_all(const weft_group *group, int mark)
{
    for (int m = 0; m < group->size && group->cudas != NULL; m++)
        WEFT_TRY(weft_cuda_follow(group->owner->cuda, group->cudas[m], mark));
    return WEFT_OK;
}

/* A group that was made before its members had GPUs knows no streams: this one comes to rest. */
static weft_status mark_or_rest(const weft_group *group, int mark)
{
    return group->cudas != NULL ? weft_cuda_mark(group->owner->cuda, mark) : weft_cuda_wait(group->owner->cuda);
}

static weft_status in_process(const run *r, weft__call *call, const void *in, void *out)
{
    weft_group *group = r->group;
    void *target = out;
    /* Peers may still read what `out` holds: sums go beside it first. */
    if (call->op == WEFT__OP_ALL_REDUCE) WEFT_TRY(weft_arena_scratch(group->owner->arena, r->bytes, &target));
    WEFT_TRY(mark_or_rest(group, FILLED));
    WEFT_TRY(weft__exchange_begin(group, call, in, r->bytes, out, 1));
    weft_status status = follow_all(group, FILLED);
    if (status == WEFT_OK) status = work(r, target);
    if (status == WEFT_OK) status = mark_or_rest(group, READ);
    weft__exchange_end(group, 1);
    if (status == WEFT_OK) status = follow_all(group, READ);
    if (status == WEFT_OK && target != out) status = weft_cuda_copy(group->owner->cuda, out, target, r->bytes);
    return status;
}

weft_status weft__device_collective(weft_group *group, weft__call *call, const void *in, size_t bytes, void *out, uint64_t bytes_sent)
{
    size_t parts = call->op == WEFT__OP_ALL_GATHER ? 1 : (size_t)group->size;
    int64_t rows = call->rows > 0 ? call->rows : 1;
    run r = {group, call, bytes, 0, 0};
    if (call->op != WEFT__OP_ALL_REDUCE && call->op != WEFT__OP_BROADCAST) {
        r.piece = bytes / (size_t)rows / parts;
        r.count = call->count / rows / (int64_t)parts;
    }
    if (group->size == 1) return out == in ? WEFT_OK : weft_cuda_copy(group->owner->cuda, out, in, bytes);
    double start = weft__now();
    int peers = weft__peers_take(group, call, bytes);
    weft_status status = group->nccl != NULL ? weft__device_announce(group, call) : in_process(&r, call, in, out);
    if (status == WEFT_OK && peers) status = weft__peers_collective(group, call, in, out);
    else if (status == WEFT_OK && group->nccl != NULL) status = weft__nccl_collective(group, call, in, bytes, out);
    if (status != WEFT_OK) {
        weft__group_die(group);
        return status;
    }
    group->traffic.calls++;
    group->traffic.seconds += weft__now() - start;
    group->traffic.bytes_sent += bytes_sent;
    return WEFT_OK;
}

/* Collective. A member that leaves must not take its marks with it while others look at them. */
static weft_status know_streams(weft_group *group)
{
    weft_cuda **cudas = calloc((size_t)group->size, sizeof *cudas);
    if (cudas == NULL) return weft_fail(WEFT_MEMORY, "no memory for a group of %d ranks", group->size);
    weft_status status = weft__exchange_begin(group, &(weft__call){.op = WEFT__OP_BARRIER}, NULL, 0, NULL, 1);
    if (status != WEFT_OK) {
        free(cudas);
        return status;
    }
    for (int m = 0; m < group->size; m++) cudas[m] = weft_cuda_retain(weft__peer(group, m)->cuda);
    weft__exchange_end(group, 1);
    group->cudas = cudas;
    return WEFT_OK;
}

weft_status weft__device_announce(weft_group *group, weft__call *call)
{
    if (group->world->check) {
        WEFT_TRY(weft__exchange_begin(group, call, NULL, 0, NULL, 0));
        weft__exchange_end(group, 0);
        return WEFT_OK;
    }
    WEFT_TRY(weft_world_check(group->world));
    call->sequence = ++group->sequence;
    weft__note_call(group->world, group->owner->rank, call, group->name);
    return WEFT_OK;
}

/* Collective: which GPUs the members use decides the transport. */
weft_status weft__device_join(weft_group *group)
{
    if (group->owner->cuda == NULL || group->size == 1) return WEFT_OK;
    int32_t mine = weft_cuda_index(group->owner->cuda), all[WEFT__MAX_RANKS];
    WEFT_TRY(weft_group_all_gather(group, &mine, all, 1, WEFT_I32));
    int shared = 0, several = 0;
    for (int m = 0; m < group->size; m++) {
        several |= all[m] != all[0];
        for (int n = 0; n < m; n++) shared |= all[m] == all[n];
    }
    if (several && !shared) {
        WEFT_TRY(weft__nccl_join(group));
        return weft__peers_join(group);
    }
    group->transport = strdup("copies and sums ordered by events");
    WEFT_TRY(know_streams(group));
    /* Some ranks share a GPU and some do not: every member reads the others' memory. */
    for (int m = 0; m < group->size; m++)
        if (all[m] != mine) WEFT_TRY(weft_cuda_open_peer(group->owner->cuda, all[m]));
    return WEFT_OK;
}

#else

weft_status weft__device_collective(weft_group *group, weft__call *call, const void *in, size_t bytes, void *out, uint64_t bytes_sent)
{
    return weft_fail(WEFT_INTERNAL, "this build of weft has no CUDA");
}

weft_status weft__device_join(weft_group *group)
{
    return WEFT_OK;
}

#endif
