/* cache/step_device.c - a step's arrays on the rank's GPU. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cache/step.h"
#include "kernels/weft_cuda_device.h"

/* Of a step that may run as a graph, the record goes by mail. A long table does not go with it: it stays on the GPU from step
 * to step, and the record brings the blocks that are new. */
enum { FIRST_BYTES = 1 << 18, LEAST_BLOCKS = 16, LEAST_APART = 1 << 10, ALIGN = 16 };

/* Sizes on the GPU: they follow from the record's header and lengths alone. Arrays one behind another, then, where the table is apart,
 * pairs (entry, block) of what is new in it, then the table. */
typedef struct {
    int64_t tokens, requests, stride, logits;
    int64_t changes; /* of the table, at most; 0: it is not apart */
    size_t changes_at, table_at, table_bytes, bytes;
    size_t mailed; /* bytes that go by mail; 0: all are copied */
} padded;

static size_t align_up(size_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }

static padded pad(const weft_step_header *h, size_t room)
{
    int graph = (h->flags & WEFT_STEP_GRAPH) != 0;
    padded p = {.tokens = h->num_tokens, .requests = graph ? h->num_tokens : h->num_requests, .logits = graph ? h->num_tokens : h->num_logits};
    if (h->block_tokens > 0)
        for (p.stride = LEAST_BLOCKS; p.stride < h->block_table_stride;) p.stride *= 2;
    p.table_bytes = (size_t)(p.requests * p.stride) * sizeof(int32_t);
    size_t arrays = (size_t)p.logits * (sizeof(uint64_t) + 3 * 4) + (size_t)(2 * p.tokens + 2 * p.requests + 1) * sizeof(int32_t);
    int by_mail = graph && h->max_context_len > 0;
    p.changes_at = align_up(arrays);
    p.changes = by_mail && p.table_bytes >= LEAST_APART && p.requests * p.stride <= INT32_MAX ? 2 * p.requests : 0;
    p.table_at = align_up(p.changes_at + (size_t)p.changes * 2 * sizeof(int32_t));
    if (p.changes > 0 && p.table_at > room) p.changes = 0, p.table_at = p.changes_at;
    p.bytes = p.table_at + p.table_bytes;
    p.mailed = p.changes > 0 ? p.table_at : by_mail && align_up(p.bytes) <= room ? align_up(p.bytes) : 0;
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

/* Row r of the padded table: `*real` entries that are given, then zeros. */
static const int32_t *table_row(const weft_step *step, int64_t r, int64_t *real)
{
    const weft_step_header *h = step->header;
    *real = r < h->num_requests ? h->block_table_stride : 0;
    return step->block_table + r * h->block_table_stride;
}

static void put_table(int32_t *to, const weft_step *step, const padded *p)
{
    for (int64_t r = 0; r < p->requests; r++, to += p->stride) {
        int64_t real;
        const int32_t *row = table_row(step, r, &real);
        if (real > 0) memcpy(to, row, (size_t)real * sizeof *to);
        memset(to + real, 0, (size_t)(p->stride - real) * sizeof *to);
    }
}

/* ---- a table apart ---- */

/* Whether the GPU has what is known of its table: exactly the record that brought it there has arrived since. */
static int is_known(const weft_rank *rank, const padded *p, const void *where)
{
    const weft_known_table *known = &rank->known_table;
    return known->where == where && known->requests == p->requests && known->stride == p->stride &&
           weft_cuda_record_calls(rank->cuda) == known->arrivals + 1;
}

static weft_status know_as_many(weft_known_table *known, int64_t words)
{
    if (known->capacity >= words) return WEFT_OK;
    int32_t *grown = realloc(known->words, (size_t)words * sizeof *grown);
    if (grown == NULL) return weft_fail(WEFT_MEMORY, "no memory for a block table of %" PRId64 " entries", words);
    known->words = grown, known->capacity = words;
    return WEFT_OK;
}

/* Pairs from number `from` on that change nothing. */
static void no_changes(int32_t *pairs, int64_t from, int64_t count)
{
    for (int64_t i = from; i < count; i++) pairs[2 * i] = -1, pairs[2 * i + 1] = 0;
}

/* Brings what is known up to the step; pairs: (p->changes, 2) what is new. 0: there is more. */
static int list_changes(weft_known_table *known, const weft_step *step, const padded *p, int32_t *pairs)
{
    int64_t count = 0;
    for (int64_t r = 0; r < p->requests; r++) {
        int64_t real;
        const int32_t *row = table_row(step, r, &real);
        int32_t *has = known->words + r * p->stride, beyond = 0;
        for (int64_t b = real; b < p->stride; b++) beyond |= has[b];
        if (beyond == 0 && (real == 0 || memcmp(has, row, (size_t)real * sizeof *row) == 0)) continue;
        for (int64_t b = 0; b < p->stride; b++) {
            int32_t wanted = b < real ? row[b] : 0;
            if (has[b] == wanted) continue;
            if (count == p->changes) return 0;
            pairs[2 * count] = (int32_t)(r * p->stride + b), pairs[2 * count + 1] = wanted;
            has[b] = wanted, count++;
        }
    }
    no_changes(pairs, count, p->changes);
    return 1;
}

/* The table to where `to` is on the GPU: what is new in `pairs` of the mail, or all of it by a copy. */
static weft_status send_table(weft_rank *rank, const weft_step *step, const padded *p, void *to, int32_t *pairs)
{
    weft_known_table *known = &rank->known_table;
    int news = is_known(rank, p, to);
    known->where = NULL;
    if (!news || !list_changes(known, step, p, pairs)) {
        void *pinned;
        WEFT_TRY(know_as_many(known, p->requests * p->stride));
        WEFT_TRY(weft_cuda_outgoing(rank->cuda, p->table_bytes, &pinned));
        put_table(known->words, step, p);
        memcpy(pinned, known->words, p->table_bytes);
        WEFT_TRY(weft_cuda_send(rank->cuda, to, p->table_bytes));
        no_changes(pairs, 0, p->changes);
    }
    known->where = to, known->requests = p->requests, known->stride = p->stride;
    known->arrivals = weft_cuda_record_calls(rank->cuda);
    return WEFT_OK;
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
    padded p = pad(h, weft_cuda_record_room(rank->cuda));
    WEFT_TRY(reserve(rank, p.bytes));
    void *pinned;
    WEFT_TRY(p.mailed > 0 ? weft_cuda_record_slot(rank->cuda, &pinned) : weft_cuda_outgoing(rank->cuda, p.bytes, &pinned));
    char *device = rank->step_buffer->data;
    cursor at = {pinned, device};
    weft_step_arrays a = {.requests = p.requests, .block_table_stride = p.stride, .logits = p.logits};
    a.seeds = put(&at, step->seeds, h->num_logits, p.logits, sizeof(uint64_t), 0);
    a.ids = put(&at, step->ids, h->num_tokens, p.tokens, sizeof(int32_t), 0);
    a.positions = put(&at, step->positions, h->num_tokens, p.tokens, sizeof(int32_t), 0);
    a.query_start_loc = put(&at, step->query_start_loc, h->num_requests + 1, p.requests + 1, sizeof(int32_t),
                            step->query_start_loc[h->num_requests]);
    a.seq_lens = put(&at, step->seq_lens, h->num_requests, p.requests, sizeof(int32_t), 0);
    a.logits_indices = put(&at, step->logits_indices, h->num_logits, p.logits, sizeof(int32_t), 0);
    a.sample_positions = put(&at, step->sample_positions, h->num_logits, p.logits, sizeof(int32_t), 0);
    a.temperature = put(&at, step->temperature, h->num_logits, p.logits, sizeof(float), 0);
    a.block_table = (const int32_t *)(device + p.table_at);
    if (p.changes > 0) {
        WEFT_TRY(send_table(rank, step, &p, device + p.table_at, (int32_t *)((char *)pinned + p.changes_at)));
    } else {
        rank->known_table.where = NULL;
        put_table((int32_t *)((char *)pinned + p.table_at), step, &p);
    }
    bounds(step, &p, &a);
    if (p.mailed == 0) WEFT_TRY(weft_cuda_send(rank->cuda, device, p.bytes));
    step->device = a;
    step->uploaded = 1;
    step->mailed = p.mailed;
    step->table_changes = p.changes;
    step->changes_at = (int64_t)(p.changes_at / sizeof(int32_t));
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
    if (step->table_changes > 0) {
        arrive.table = (int32_t *)step->device.block_table;
        arrive.table_words = step->device.requests * step->device.block_table_stride;
        arrive.changes = step->table_changes;
        arrive.changes_at = step->changes_at;
    }
    weft_status status = weft_cuda_launched(rank->cuda, "a step's record", weft_cuda_arrive(&arrive, stream));
    if (status != WEFT_OK) rank->known_table.where = NULL;
    return status;
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
