/* cache/step_device.c - a step's arrays on the rank's GPU. */
#include <string.h>

#include "cache/step.h"
#include "kernels/weft_cuda_device.h"

enum { FIRST_BYTES = 1 << 18, LEAST_BLOCKS = 16 };

/* Sizes on the GPU: they follow from the record's header and lengths alone. */
typedef struct {
    int64_t tokens, requests, stride, logits;
    size_t bytes;
} padded;

static padded pad(const weft_step_header *h)
{
    int graph = (h->flags & WEFT_STEP_GRAPH) != 0;
    padded p = {.tokens = h->num_tokens, .requests = graph ? h->num_tokens : h->num_requests, .logits = graph ? h->num_tokens : h->num_logits};
    if (h->block_tokens > 0)
        for (p.stride = LEAST_BLOCKS; p.stride < h->block_table_stride;) p.stride *= 2;
    p.bytes = (size_t)p.logits * (sizeof(uint64_t) + 3 * 4) +
              (size_t)(2 * p.tokens + 2 * p.requests + 1 + p.requests * p.stride) * sizeof(int32_t);
    return p;
}

static weft_status reserve(weft_rank *rank, size_t bytes)
{
    weft_tensor *old = rank->step_buffer, *buffer = NULL;
    if (old != NULL && old->storage->bytes >= bytes) return WEFT_OK;
    int64_t size = FIRST_BYTES;
    while ((size_t)size < bytes) size *= 2;
    WEFT_TRY(weft_tensor_create(&buffer, rank->device_memory, WEFT_U8, 1, &size));
    if (old != NULL) weft_cuda_moved(rank->cuda);
    WEFT_RELEASE(rank->step_buffer);
    rank->step_buffer = buffer;
    return WEFT_OK;
}

typedef struct {
    char *host;
    const char *device;
} cursor;

/* `count` elements of which the first `real` are given and the rest are `rest` (4-byte elements). */
static const void *put(cursor *at, const void *from, int64_t real, int64_t count, size_t element, int32_t rest)
{
    const void *device = at->device;
    size_t given = (size_t)real * element, all = (size_t)count * element;
    memcpy(at->host, from, given);
    if (rest == 0) memset(at->host + given, 0, all - given);
    else
        for (int64_t i = real; i < count; i++) ((int32_t *)at->host)[i] = rest;
    at->host += all;
    at->device += all;
    return device;
}

static const int32_t *put_table(cursor *at, const weft_step *step, const padded *p)
{
    const weft_step_header *h = step->header;
    const char *device = at->device;
    for (int64_t r = 0; r < p->requests; r++) {
        int64_t real = r < h->num_requests ? h->block_table_stride : 0;
        (void)put(at, step->block_table + r * h->block_table_stride, real, p->stride, sizeof(int32_t), 0);
    }
    return (const int32_t *)device;
}

static void bounds(const weft_step *step, const padded *p, weft_step_arrays *a)
{
    const weft_step_header *h = step->header;
    for (int32_t r = 0; r < h->num_requests; r++) {
        int64_t query = step->query_start_loc[r + 1] - step->query_start_loc[r];
        if (query > a->max_query_len) a->max_query_len = query;
        if (step->seq_lens[r] > a->max_seq_len) a->max_seq_len = step->seq_lens[r];
    }
    /* As much as the padded table holds: the same launch, and the same sums, for all lengths below. */
    if (h->block_tokens > 0) a->max_seq_len = p->stride * h->block_tokens;
}

weft_status weft_step_upload(weft_step *step, weft_rank *rank)
{
    WEFT_TRY(weft_step_ready(step));
    if (rank->cuda == NULL) return WEFT_OK;
    const weft_step_header *h = step->header;
    padded p = pad(h);
    WEFT_TRY(reserve(rank, p.bytes));
    void *pinned;
    size_t mailed = (p.bytes + 15) / 16 * 16;
    if (!(h->flags & WEFT_STEP_GRAPH) || h->max_context_len == 0 || mailed > weft_cuda_record_room(rank->cuda)) mailed = 0;
    WEFT_TRY(mailed > 0 ? weft_cuda_record_slot(rank->cuda, &pinned) : weft_cuda_outgoing(rank->cuda, p.bytes, &pinned));
    cursor at = {pinned, rank->step_buffer->data};
    weft_step_arrays a = {.requests = p.requests, .block_table_stride = p.stride, .logits = p.logits};
    a.seeds = put(&at, step->seeds, h->num_logits, p.logits, sizeof(uint64_t), 0);
    a.ids = put(&at, step->ids, h->num_tokens, p.tokens, sizeof(int32_t), 0);
    a.positions = put(&at, step->positions, h->num_tokens, p.tokens, sizeof(int32_t), 0);
    a.query_start_loc = put(&at, step->query_start_loc, h->num_requests + 1, p.requests + 1, sizeof(int32_t),
                            step->query_start_loc[h->num_requests]);
    a.seq_lens = put(&at, step->seq_lens, h->num_requests, p.requests, sizeof(int32_t), 0);
    a.block_table = put_table(&at, step, &p);
    a.logits_indices = put(&at, step->logits_indices, h->num_logits, p.logits, sizeof(int32_t), 0);
    a.sample_positions = put(&at, step->sample_positions, h->num_logits, p.logits, sizeof(int32_t), 0);
    a.temperature = put(&at, step->temperature, h->num_logits, p.logits, sizeof(float), 0);
    bounds(step, &p, &a);
    if (mailed == 0) WEFT_TRY(weft_cuda_send(rank->cuda, rank->step_buffer->data, p.bytes));
    step->device = a;
    step->uploaded = 1;
    step->mailed = mailed;
    return WEFT_OK;
}

#ifdef WEFT_HAVE_CUDA

weft_status weft_step_arrive(weft_step *step, weft_rank *rank, const int32_t *chosen, int64_t rows)
{
    if (!step->uploaded || rank->cuda == NULL) return weft_fail(WEFT_INVALID, "the step was not uploaded");
    int32_t *ids = (int32_t *)step->device.ids, tokens = step->header->num_tokens;
    void *stream = weft_cuda_stream(rank->cuda), *record = rank->step_buffer->data;
    if (step->mailed == 0) {
        weft_cuda_follow_ids_args follow = {.ids = ids, .chosen = chosen, .tokens = tokens, .rows = rows};
        return weft_cuda_launched(rank->cuda, "the ids of the step before", weft_cuda_follow_ids(&follow, stream));
    }
    weft_cuda_arrive_args arrive = {.mail = weft_cuda_record_mail(rank->cuda),
                                    .record = record,
                                    .bytes = (int64_t)step->mailed,
                                    .ids_at = ids - (int32_t *)record,
                                    .chosen = chosen,
                                    .tokens = tokens,
                                    .rows = rows};
    return weft_cuda_launched(rank->cuda, "a step's record", weft_cuda_arrive(&arrive, stream));
}

#else

weft_status weft_step_arrive(weft_step *step, weft_rank *rank, const int32_t *chosen, int64_t rows)
{
    return weft_fail(WEFT_INVALID, "the step was not uploaded");
}

#endif

weft_step_arrays weft_step_arrays_of(const weft_step *step)
{
    if (step->uploaded) return step->device;
    const weft_step_header *h = step->header;
    return (weft_step_arrays){
        .seeds = step->seeds,
        .ids = step->ids,
        .positions = step->positions,
        .query_start_loc = step->query_start_loc,
        .seq_lens = step->seq_lens,
        .block_table = step->block_table,
        .logits_indices = step->logits_indices,
        .sample_positions = step->sample_positions,
        .temperature = step->temperature,
        .requests = h->num_requests,
        .block_table_stride = h->block_table_stride,
        .logits = h->num_logits,
    };
}
