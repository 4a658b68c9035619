/* comm/group.c - groups and their collectives, over what group_threads.c shares. */
#include "comm/group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "comm/internal.h"

static void destroy(weft_object *object)
{
    weft_group *group = (weft_group *)object;
    weft__peers_leave(group);
    weft__nccl_leave(group);
    weft__shared_leave(group);
    for (int m = 0; m < group->size && group->cudas != NULL; m++) weft_cuda_release(group->cudas[m]);
    weft_world_release(group->world);
    free(group->cudas);
    free(group->sources);
    free(group->scratch);
    free(group->death);
    free(group->transport);
    free(group);
}

static weft_status check_ranks(const weft_rank *rank, const char *label, const int *ranks, int size, int *place)
{
    if (size < 1 || size > rank->world_size)
        return weft_fail(WEFT_INVALID, "a %s group needs 1 to %d ranks, got %d", label, rank->world_size, size);
    *place = -1;
    for (int i = 0; i < size; i++) {
        if (ranks[i] < 0 || ranks[i] >= rank->world_size)
            return weft_fail(WEFT_INVALID, "a %s group lists rank %d, the world has ranks 0 to %d", label, ranks[i], rank->world_size - 1);
        for (int j = 0; j < i; j++)
            if (ranks[j] == ranks[i]) return weft_fail(WEFT_INVALID, "a %s group lists rank %d twice", label, ranks[i]);
        if (ranks[i] == rank->rank) *place = i;
    }
    if (*place < 0) return weft_fail(WEFT_INVALID, "rank %d is not in the %s group that it creates", rank->rank, label);
    return WEFT_OK;
}

weft_status weft__group_create(weft_group **out, weft_rank *rank, weft_group_type type, const int *ranks, int size, const char *label)
{
    int place;
    WEFT_TRY(check_ranks(rank, label, ranks, size, &place));
    weft_group *group = calloc(1, sizeof *group);
    if (group == NULL) return weft_fail(WEFT_MEMORY, "no memory for a group");
    weft_object_init(&group->object, destroy);
    group->owner = rank;
    group->world = WEFT_RETAIN(rank->world);
    group->type = type;
    group->life = atomic_load(&rank->world->life);
    group->size = size;
    group->rank = place;
    group->sources = calloc((size_t)size, sizeof *group->sources);
    weft_status status = group->sources ? weft__shared_join(group, type, ranks, size, label) : weft_fail(WEFT_MEMORY, "no memory for a group");
    if (status != WEFT_OK) {
        weft_group_release(group);
        return status;
    }
    *out = group;
    return WEFT_OK;
}

weft_status weft_group_create(weft_group **out, weft_rank *rank, weft_group_type type, const int *ranks, int size)
{
    if ((unsigned)type >= WEFT_GROUP_TYPE_COUNT) return weft_fail(WEFT_INVALID, "unknown group type %d", (int)type);
    weft_group *group = NULL;
    WEFT_TRY(weft__group_create(&group, rank, type, ranks, size, weft_group_type_name(type)));
    weft_status status = weft__device_join(group);
    if (status != WEFT_OK) {
        weft_group_release(group);
        return status;
    }
    *out = group;
    return WEFT_OK;
}

weft_group *weft_group_retain(weft_group *group)
{
    return WEFT_RETAIN(group);
}

void weft_group_release(weft_group *group)
{
    if (group != NULL) weft_object_release(&group->object);
}

int weft_group_size(const weft_group *group) { return group->size; }
int weft_group_rank(const weft_group *group) { return group->rank; }
const int *weft_group_ranks(const weft_group *group) { return group->ranks; }
weft_group_type weft_group_get_type(const weft_group *group) { return group->type; }
weft_rank *weft_group_owner(const weft_group *group) { return group->owner; }
const char *weft_group_name(const weft_group *group) { return group->name; }
const char *weft_group_transport(const weft_group *group)
{
    return group->transport != NULL ? group->transport : group->size == 1 ? "none" : "threads";
}
weft_group_traffic weft_group_get_traffic(const weft_group *group) { return group->traffic; }

/* Behind a failure that all ranks have settled, members count their collectives from 0 again. */
static void join_life(weft_group *group)
{
    unsigned life = atomic_load_explicit(&group->world->life, memory_order_acquire);
    if (group->life == life) return;
    group->life = life;
    group->sequence = 0;
    free(group->death);
    group->death = NULL;
}

weft_status weft__group_usable(weft_group *group)
{
    join_life(group);
    if (group->size > 1) WEFT_TRY(weft__check_company(group->owner, group->name));
    if (group->death != NULL) return weft_fail(WEFT_CLOSED, "group %s died: %s", group->name, group->death);
    if (group->closed) return weft_fail(WEFT_CLOSED, "group %s is closed", group->name);
    return WEFT_OK;
}

/* Behind a failure its members no longer agree on what comes next. */
void weft__group_die(weft_group *group)
{
    if (group->death == NULL) group->death = strdup(weft_error_message());
}

/* ---- one collective ---- */

static weft_status begin(weft_group *group, weft__call *call, const void *in, size_t in_bytes, void *out, int direct)
{
    double start = weft__now();
    weft_status status = weft__exchange_begin(group, call, in, in_bytes, out, direct);
    if (status != WEFT_OK) {
        weft__group_die(group);
        return status;
    }
    for (int m = 0; m < group->size; m++) group->sources[m] = weft__peer(group, m)->in;
    group->traffic.calls++;
    group->traffic.seconds -= start;
    return WEFT_OK;
}

static weft_status end(weft_group *group, int direct, uint64_t bytes_sent)
{
    weft__exchange_end(group, direct);
    group->traffic.seconds += weft__now();
    group->traffic.bytes_sent += bytes_sent;
    return WEFT_OK;
}

/* Whether a collective is on the GPU of this rank: what lies on the host goes through the threads. */
static int on_device(const weft_group *group, const void *in)
{
    return group->owner->cuda != NULL && weft_cuda_is_device(in);
}

static int is_direct(size_t in_bytes)
{
    return in_bytes > WEFT__STAGE_BYTES;
}

/* bytes = count * parts elements; parts is the group's size, or 1. */
static weft_status measure(const weft_group *group, const char *what, int64_t count, int parts, weft_dtype dtype, size_t *bytes)
{
    size_t elements;
    if (count < 0) return weft_fail(WEFT_INVALID, "%s on %s: a negative count (%lld)", what, group->name, (long long)count);
    if ((unsigned)dtype >= WEFT_DTYPE_COUNT) return weft_fail(WEFT_INVALID, "%s on %s: unknown dtype %d", what, group->name, (int)dtype);
    if (!weft_mul_size((size_t)count, (size_t)parts, &elements) || !weft_mul_size(elements, weft_dtype_size(dtype), bytes) ||
        *bytes > (size_t)INT64_MAX)
        return weft_fail(WEFT_INVALID, "%s on %s: %lld elements are more than memory holds", what, group->name, (long long)count);
    return WEFT_OK;
}

static weft_status check_sum(const weft_group *group, const char *what, weft_dtype dtype)
{
    if (dtype == WEFT_F32 || dtype == WEFT_BF16 || dtype == WEFT_F16 || dtype == WEFT_I32) return WEFT_OK;
    return weft_fail(WEFT_INVALID, "%s on %s takes float32, bfloat16, float16 or int32, got %s", what, group->name, weft_dtype_name(dtype));
}

static void copy(void *to, const void *from, size_t bytes)
{
    if (bytes > 0 && to != from) memmove(to, from, bytes);
}

weft_status weft_group_barrier(weft_group *group)
{
    WEFT_TRY(weft__group_usable(group));
    if (group->size == 1) return WEFT_OK;
    WEFT_TRY(begin(group, &(weft__call){.op = WEFT__OP_BARRIER}, NULL, 0, NULL, 0));
    return end(group, 0, 0);
}

weft_status weft_group_close(weft_group *group)
{
    if (group->closed) return WEFT_OK;
    join_life(group);
    if (group->size > 1) WEFT_TRY(weft__check_company(group->owner, group->name));
    weft_status status = WEFT_OK;
    if (group->size > 1 && group->death == NULL) {
        status = begin(group, &(weft__call){.op = WEFT__OP_CLOSE}, NULL, 0, NULL, 0);
        if (status == WEFT_OK) end(group, 0, 0);
    }
    weft__peers_leave(group);
    weft__nccl_leave(group);
    group->closed = 1;
    weft__shared_leave(group);
    return status;
}

/* Each member sums one run of a large input and writes it to everyone. A block is read from all
 * inputs before it is written, so in == out is fine. */
static void all_reduce_run(weft_group *group, int64_t count, weft_dtype dtype, weft_reduce op)
{
    enum { BLOCK = 4096 };
    size_t element = weft_dtype_size(dtype);
    long first, last;
    weft_pool_range((long)count, 64, group->rank, group->size, &first, &last);
    char *mine = weft__peer(group, group->rank)->out;
    for (long at = first; at < last; at += BLOCK) {
        long n = last - at < BLOCK ? last - at : BLOCK;
        size_t offset = (size_t)at * element;
        weft__reduce(group->sources, group->size, at, n, dtype, op, mine + offset);
        for (int m = 0; m < group->size; m++)
            if (m != group->rank) memcpy((char *)weft__peer(group, m)->out + offset, mine + offset, (size_t)n * element);
    }
}

weft_status weft_group_all_reduce(weft_group *group, const void *in, void *out, int64_t count, weft_dtype dtype, weft_reduce op)
{
    size_t bytes;
    WEFT_TRY(weft__group_usable(group));
    WEFT_TRY(measure(group, "all_reduce", count, 1, dtype, &bytes));
    WEFT_TRY(check_sum(group, "all_reduce", dtype));
    weft__call call = {.op = WEFT__OP_ALL_REDUCE, .count = count, .dtype = dtype, .reduce = op};
    uint64_t sent = 2 * (uint64_t)bytes * (uint64_t)(group->size - 1) / (uint64_t)group->size;
    if (on_device(group, in)) return weft__device_collective(group, &call, in, bytes, out, sent);
    if (group->size == 1) {
        copy(out, in, bytes);
        return WEFT_OK;
    }
    int direct = is_direct(bytes);
    WEFT_TRY(begin(group, &call, in, bytes, out, direct));
    if (direct) all_reduce_run(group, count, dtype, op);
    else weft__reduce(group->sources, group->size, 0, count, dtype, op, out);
    return end(group, direct, sent);
}

weft_status weft_group_broadcast(weft_group *group, void *data, int64_t count, weft_dtype dtype, int root)
{
    size_t bytes;
    WEFT_TRY(weft__group_usable(group));
    WEFT_TRY(measure(group, "broadcast", count, 1, dtype, &bytes));
    if (root < 0 || root >= group->size)
        return weft_fail(WEFT_INVALID, "broadcast on %s: root must be in [0, %d), got %d", group->name, group->size, root);
    if (group->size == 1) return WEFT_OK;
    int direct = is_direct(bytes), is_root = group->rank == root;
    weft__call call = {.op = WEFT__OP_BROADCAST, .count = count, .dtype = dtype, .root = root};
    uint64_t sent = is_root ? (uint64_t)bytes * (uint64_t)(group->size - 1) : 0;
    if (on_device(group, data)) return weft__device_collective(group, &call, data, bytes, data, sent);
    WEFT_TRY(begin(group, &call, data, is_root ? bytes : 0, NULL, direct));
    if (!is_root) copy(data, group->sources[root], bytes);
    return end(group, direct, sent);
}

weft_status weft_group_broadcast_bytes(weft_group *group, void *data, size_t bytes, int root)
{
    if (bytes > (size_t)INT64_MAX) return weft_fail(WEFT_INVALID, "broadcast of %zu bytes", bytes);
    return weft_group_broadcast(group, data, (int64_t)bytes, WEFT_U8, root);
}

/* ---- gather, scatter and all_to_all: `rows` pieces along a dimension, 1 for flat calls ---- */

/* in: rows pieces of `piece` bytes; out: rows of size pieces, member by member. */
static weft_status gather(weft_group *group, weft__call *call, const void *in, size_t bytes, void *out)
{
    if (on_device(group, in)) return weft__device_collective(group, call, in, bytes, out, (uint64_t)bytes * (uint64_t)(group->size - 1));
    if (group->size == 1) {
        copy(out, in, bytes);
        return WEFT_OK;
    }
    int direct = is_direct(bytes);
    WEFT_TRY(begin(group, call, in, bytes, out, direct));
    size_t piece = call->rows > 0 ? bytes / (size_t)call->rows : 0, size = (size_t)group->size;
    for (int64_t row = 0; row < call->rows && piece > 0; row++)
        for (size_t m = 0; m < size; m++)
            memcpy((char *)out + ((size_t)row * size + m) * piece, (const char *)group->sources[m] + (size_t)row * piece, piece);
    return end(group, direct, (uint64_t)bytes * (uint64_t)(group->size - 1));
}

/* in: rows of size pieces; out: the sum of this member's piece of each row. call->count: of in. */
static weft_status scatter(weft_group *group, weft__call *call, const void *in, size_t bytes, void *out)
{
    if (on_device(group, in))
        return weft__device_collective(group, call, in, bytes, out, (uint64_t)bytes / (uint64_t)group->size * (uint64_t)(group->size - 1));
    if (group->size == 1) {
        copy(out, in, bytes);
        return WEFT_OK;
    }
    int direct = is_direct(bytes);
    WEFT_TRY(begin(group, call, in, bytes, out, direct));
    int64_t piece = call->rows > 0 ? call->count / call->rows / group->size : 0;
    size_t element = weft_dtype_size(call->dtype);
    for (int64_t row = 0; row < call->rows; row++)
        weft__reduce(group->sources, group->size, (row * group->size + group->rank) * piece, piece, call->dtype, call->reduce,
                     (char *)out + (size_t)(row * piece) * element);
    return end(group, direct, (uint64_t)bytes / (uint64_t)group->size * (uint64_t)(group->size - 1));
}

weft_status weft_group_all_gather(weft_group *group, const void *in, void *out, int64_t count, weft_dtype dtype)
{
    size_t bytes;
    WEFT_TRY(weft__group_usable(group));
    WEFT_TRY(measure(group, "all_gather", count, group->size, dtype, &bytes));
    weft__call call = {.op = WEFT__OP_ALL_GATHER, .count = count, .dtype = dtype, .rows = 1};
    return gather(group, &call, in, bytes / (size_t)group->size, out);
}

weft_status weft_group_reduce_scatter(weft_group *group, const void *in, void *out, int64_t count, weft_dtype dtype)
{
    size_t bytes;
    WEFT_TRY(weft__group_usable(group));
    WEFT_TRY(measure(group, "reduce_scatter", count, group->size, dtype, &bytes));
    WEFT_TRY(check_sum(group, "reduce_scatter", dtype));
    weft__call call = {.op = WEFT__OP_REDUCE_SCATTER, .count = count * group->size, .dtype = dtype, .rows = 1};
    return scatter(group, &call, in, bytes, out);
}

weft_status weft_group_all_to_all(weft_group *group, const void *in, void *out, int64_t count, weft_dtype dtype)
{
    size_t bytes;
    WEFT_TRY(weft__group_usable(group));
    WEFT_TRY(measure(group, "all_to_all", count, group->size, dtype, &bytes));
    size_t piece = bytes / (size_t)group->size;
    weft__call call = {.op = WEFT__OP_ALL_TO_ALL, .count = count * group->size, .dtype = dtype, .rows = 1};
    if (on_device(group, in))
        return weft__device_collective(group, &call, in, bytes, out, (uint64_t)piece * (uint64_t)(group->size - 1));
    if (group->size == 1) {
        copy(out, in, bytes);
        return WEFT_OK;
    }
    int direct = is_direct(bytes);
    WEFT_TRY(begin(group, &call, in, bytes, out, direct));
    for (size_t m = 0; m < (size_t)group->size && piece > 0; m++)
        memcpy((char *)out + m * piece, (const char *)group->sources[m] + (size_t)group->rank * piece, piece);
    return end(group, direct, (uint64_t)piece * (uint64_t)(group->size - 1));
}

/* ---- along a dimension of tensors ---- */

/* Rows with a stride, side by side in the arena. */
static weft_status pack_device_rows(weft_group *group, const weft_tensor *in, const void **data)
{
    size_t element = weft_dtype_size(in->dtype), width = (size_t)(in->ndim == 2 ? in->shape[1] : 0) * element;
    void *packed = NULL;
    if (in->ndim != 2 || (in->stride[1] != 1 && in->shape[1] > 1))
        return weft_fail(WEFT_UNSUPPORTED, "%s on a GPU takes contiguous tensors or matrices of dense rows", group->name);
    WEFT_TRY(weft_arena_scratch(group->owner->arena, (size_t)in->shape[0] * width, &packed));
    *data = packed;
    return weft_cuda_copy_rows(group->owner->cuda, packed, width, in->data, (size_t)in->stride[0] * element, width, (size_t)in->shape[0]);
}

/* The tensor's elements in order: its own memory, or a copy in the group's scratch. */
static weft_status contiguous(weft_group *group, const weft_tensor *in, const void **data)
{
    *data = in->data;
    if (weft_tensor_is_contiguous(in)) return WEFT_OK;
    size_t bytes = (size_t)weft_tensor_numel(in) * weft_dtype_size(in->dtype);
    if (in->storage->cuda != NULL) return pack_device_rows(group, in, data);
    if (bytes > group->scratch_bytes) {
        void *larger = realloc(group->scratch, bytes);
        if (larger == NULL) return weft_fail(WEFT_MEMORY, "no memory for a contiguous copy of %zu bytes", bytes);
        group->scratch = larger;
        group->scratch_bytes = bytes;
    }
    weft_tensor *copy = NULL;
    WEFT_TRY(weft_tensor_wrap(&copy, NULL, group->scratch, in->dtype, in->ndim, in->shape));
    weft_status status = weft_tensor_copy(copy, in);
    WEFT_RELEASE(copy);
    *data = group->scratch;
    return status;
}

/* `small` is `large` with dimension dim divided by the group's size. */
static weft_status check_dim(const weft_group *group, const char *what, const weft_tensor *large, const weft_tensor *small, int dim,
                             const weft_tensor *out)
{
    char a[120], b[120];
    weft_tensor_describe(large, a, sizeof a);
    weft_tensor_describe(small, b, sizeof b);
    if (dim < 0 || dim >= large->ndim) return weft_fail(WEFT_INVALID, "%s on %s: dimension %d of %s", what, group->name, dim, a);
    int fits = large->ndim == small->ndim && large->dtype == small->dtype;
    for (int d = 0; fits && d < large->ndim; d++) fits = large->shape[d] == small->shape[d] * (d == dim ? group->size : 1);
    if (!fits)
        return weft_fail(WEFT_INVALID, "%s on %s: %s is not %s with dimension %d times %d", what, group->name, a, b, dim, group->size);
    if (!weft_tensor_is_contiguous(out)) return weft_fail(WEFT_INVALID, "%s on %s: the output must be contiguous", what, group->name);
    return WEFT_OK;
}

static int64_t rows_before(const weft_tensor *tensor, int dim)
{
    int64_t rows = 1;
    for (int d = 0; d < dim; d++) rows *= tensor->shape[d];
    return rows;
}

weft_status weft_group_all_gather_dim(weft_group *group, const weft_tensor *in, int dim, weft_tensor *out)
{
    const void *data;
    WEFT_TRY(weft__group_usable(group));
    WEFT_TRY(check_dim(group, "all_gather", out, in, dim, out));
    WEFT_TRY(contiguous(group, in, &data));
    weft__call call = {.op = WEFT__OP_ALL_GATHER, .count = weft_tensor_numel(in), .dtype = in->dtype, .rows = rows_before(in, dim)};
    return gather(group, &call, data, (size_t)call.count * weft_dtype_size(in->dtype), out->data);
}

weft_status weft_group_reduce_scatter_dim(weft_group *group, const weft_tensor *in, int dim, weft_tensor *out)
{
    const void *data;
    WEFT_TRY(weft__group_usable(group));
    WEFT_TRY(check_dim(group, "reduce_scatter", in, out, dim, out));
    WEFT_TRY(check_sum(group, "reduce_scatter", in->dtype));
    WEFT_TRY(contiguous(group, in, &data));
    weft__call call = {.op = WEFT__OP_REDUCE_SCATTER, .count = weft_tensor_numel(in), .dtype = in->dtype, .rows = rows_before(in, dim)};
    return scatter(group, &call, data, (size_t)call.count * weft_dtype_size(in->dtype), out->data);
}

/* ---- split ---- */

typedef struct place {
    int32_t color, key;
} place;

weft_status weft_group_split(weft_group *group, int color, int key, weft_group **out)
{
    int *ranks = malloc((size_t)group->size * sizeof *ranks), *keys = malloc((size_t)group->size * sizeof *keys);
    place *all = malloc((size_t)group->size * sizeof *all), mine = {color, key};
    weft_status status = ranks && keys && all ? WEFT_OK : weft_fail(WEFT_MEMORY, "no memory to split %s", group->name);
    if (status == WEFT_OK) status = weft_group_all_gather(group, &mine, all, 2, WEFT_I32);
    int size = 0;
    for (int m = 0; status == WEFT_OK && color >= 0 && m < group->size; m++) {
        if (all[m].color != color) continue;
        int at = size++; /* insertion sort by key; equal keys keep the old order */
        for (; at > 0 && keys[at - 1] > all[m].key; at--) {
            keys[at] = keys[at - 1];
            ranks[at] = ranks[at - 1];
        }
        keys[at] = all[m].key;
        ranks[at] = group->ranks[m];
    }
    if (status == WEFT_OK && color < 0) *out = NULL;
    else if (status == WEFT_OK) status = weft_group_create(out, group->owner, group->type, ranks, size);
    free(ranks);
    free(keys);
    free(all);
    return status;
}
