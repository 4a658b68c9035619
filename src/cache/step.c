/* cache/step.c - layout and checks of step records. */
#include "cache/step.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

/* Format 1; another format gets another number. */
enum { MAGIC = 0x77735431 };
/* Far above any real step, low enough that sums of a few sizes fit in 64 bits. */
enum { MAX_COUNT = 1 << 28 };

static const char *const kind_names[WEFT_STEP_KIND_COUNT] = {"forward", "stop", "command"};

const char *weft_step_kind_name(int kind)
{
    return kind >= 0 && kind < WEFT_STEP_KIND_COUNT ? kind_names[kind] : "unknown";
}

int weft_step_kind_from_name(const char *name, weft_step_kind *out)
{
    for (int i = 0; i < WEFT_STEP_KIND_COUNT; i++) {
        if (strcmp(name, kind_names[i]) != 0) continue;
        *out = (weft_step_kind)i;
        return 1;
    }
    return 0;
}

static void destroy(weft_object *object)
{
    weft_step *step = (weft_step *)object;
    WEFT_RELEASE(step->buffer);
    WEFT_RELEASE(step->memory);
    free(step);
}

weft_status weft_step_create(weft_step **out, weft_memory *memory)
{
    weft_step *step = calloc(1, sizeof *step);
    if (step == NULL) return weft_fail(WEFT_MEMORY, "no memory for a step");
    weft_object_init(&step->object, destroy);
    step->memory = WEFT_RETAIN(memory);
    *out = step;
    return WEFT_OK;
}

static weft_status check_count(const char *what, int64_t count, int64_t low)
{
    if (count < low || count > MAX_COUNT)
        return weft_fail(WEFT_INVALID, "a step's %s must be from %" PRId64 " to %d, got %" PRId64, what, low, MAX_COUNT, count);
    return WEFT_OK;
}

/* Where each array lies, counted from the start of the record. */
typedef struct {
    size_t seeds, ids, positions, query_start_loc, seq_lens, block_table, logits_indices, sample_positions, temperature,
        payload, total;
} offsets;

static weft_status lay_out(offsets *o, const weft_step_shape *s)
{
    WEFT_TRY(check_count("tokens", s->num_tokens, 0));
    WEFT_TRY(check_count("requests", s->num_requests, 0));
    WEFT_TRY(check_count("block table stride", s->block_table_stride, 0));
    WEFT_TRY(check_count("tokens of a block", s->block_tokens, 0));
    WEFT_TRY(check_count("logits rows", s->num_logits, 0));
    WEFT_TRY(check_count("bucket", s->bucket, 0));
    WEFT_TRY(check_count("payload", s->payload_bytes, 0));
    size_t at = sizeof(weft_step_header), n = (size_t)s->num_logits;
    o->seeds = at, at += n * sizeof(uint64_t);
    o->ids = at, at += (size_t)s->num_tokens * 4;
    o->positions = at, at += (size_t)s->num_tokens * 4;
    o->query_start_loc = at, at += (size_t)(s->num_requests + 1) * 4;
    o->seq_lens = at, at += (size_t)s->num_requests * 4;
    o->block_table = at, at += (size_t)s->num_requests * (size_t)s->block_table_stride * 4;
    o->logits_indices = at, at += n * 4;
    o->sample_positions = at, at += n * 4;
    o->temperature = at, at += n * 4;
    o->payload = at, at += (size_t)s->payload_bytes;
    o->total = at;
    return WEFT_OK;
}

/* At least `bytes` of memory. Views of the old buffer keep it alive. */
static weft_status reserve(weft_step *step, size_t bytes)
{
    if (step->buffer != NULL && step->buffer->storage->bytes >= bytes) return WEFT_OK;
    size_t size = step->buffer == NULL ? 4096 : 2 * step->buffer->storage->bytes;
    if (size < bytes) size = bytes;
    weft_tensor *buffer;
    WEFT_TRY(weft_tensor_create(&buffer, step->memory, WEFT_U8, 1, (int64_t[]){(int64_t)size}));
    step->header = NULL;
    WEFT_RELEASE(step->buffer);
    step->buffer = buffer;
    return WEFT_OK;
}

static void point(weft_step *step, const offsets *o)
{
    step->bytes = o->total;
    step->uploaded = 0;
    step->mailed = 0;
    char *base = step->buffer->data;
    step->header = (weft_step_header *)base;
    step->seeds = (uint64_t *)(base + o->seeds);
    step->ids = (int32_t *)(base + o->ids);
    step->positions = (int32_t *)(base + o->positions);
    step->query_start_loc = (int32_t *)(base + o->query_start_loc);
    step->seq_lens = (int32_t *)(base + o->seq_lens);
    step->block_table = (int32_t *)(base + o->block_table);
    step->logits_indices = (int32_t *)(base + o->logits_indices);
    step->sample_positions = (int32_t *)(base + o->sample_positions);
    step->temperature = (float *)(base + o->temperature);
    step->payload = base + o->payload;
}

static weft_status begin(weft_step *step, const weft_step_shape *shape, int clear)
{
    offsets o;
    WEFT_TRY(lay_out(&o, shape));
    WEFT_TRY(reserve(step, o.total));
    if (clear) memset(step->buffer->data, 0, o.total);
    point(step, &o);
    *step->header = (weft_step_header){
        .magic = MAGIC,
        .kind = (int32_t)shape->kind,
        .flags = shape->flags,
        .num_tokens = (int32_t)shape->num_tokens,
        .num_requests = (int32_t)shape->num_requests,
        .block_table_stride = (int32_t)shape->block_table_stride,
        .block_tokens = (int32_t)shape->block_tokens,
        .num_logits = (int32_t)shape->num_logits,
        .max_block = -1,
        .bucket = (int32_t)(shape->bucket ? shape->bucket : shape->num_tokens),
        .payload_bytes = (uint64_t)shape->payload_bytes,
    };
    return WEFT_OK;
}

weft_status weft_step_begin(weft_step *step, const weft_step_shape *shape) { return begin(step, shape, 1); }

/* ---- the record behind another one ---- */

int64_t weft_step_filled_blocks(const weft_step *step, int32_t row)
{
    const weft_step_header *h = step->header;
    return h->block_tokens > 0 ? ((int64_t)step->seq_lens[row] + h->block_tokens - 1) / h->block_tokens : 0;
}

/* Whether every request of a whole record gave one token and draws one, in order. */
static int draws_one_each(const weft_step *step)
{
    const weft_step_header *h = step->header;
    if (weft_step_ready(step) != WEFT_OK || h->kind != WEFT_STEP_FORWARD || h->num_requests == 0 || h->num_logits != h->num_requests) return 0;
    if (h->payload_bytes > 0 || (h->flags & ~WEFT_STEP_GRAPH) != 0) return 0;
    int single = 1;
    for (int32_t r = 0; r < h->num_requests; r++) single &= step->query_start_loc[r + 1] == r + 1 && step->logits_indices[r] == r;
    return single;
}

static void follow_table(weft_step *step, const weft_step *previous, const weft_step_growth *grown, int64_t num_grown)
{
    size_t stride = (size_t)step->header->block_table_stride, before = (size_t)previous->header->block_table_stride;
    for (int32_t r = 0; r < step->header->num_requests; r++) {
        int32_t *row = step->block_table + (size_t)r * stride;
        if (before > 0) memcpy(row, previous->block_table + (size_t)r * before, before * sizeof *row);
        memset(row + before, 0, (stride - before) * sizeof *row);
    }
    for (int64_t g = 0; g < num_grown; g++)
        if (grown[g].count > 0)
            memcpy(step->block_table + (size_t)grown[g].row * stride + (size_t)weft_step_filled_blocks(previous, grown[g].row), grown[g].blocks,
                   (size_t)grown[g].count * sizeof(int32_t));
}

weft_status weft_step_follow(weft_step *step, const weft_step *previous, const weft_step_growth *grown, int64_t num_grown, int *built)
{
    *built = 0;
    if (!draws_one_each(previous)) return WEFT_OK;
    const weft_step_header *h = previous->header;
    weft_step_shape shape = {.kind = h->kind, .flags = h->flags, .num_tokens = h->num_tokens, .num_requests = h->num_requests,
                             .block_table_stride = h->block_table_stride, .block_tokens = h->block_tokens, .num_logits = h->num_logits, .bucket = h->bucket};
    for (int64_t g = 0; g < num_grown; g++) {
        if (grown[g].row < 0 || grown[g].row >= h->num_requests || h->block_tokens == 0)
            return weft_fail(WEFT_INVALID, "blocks for row %d of a step of %d requests", grown[g].row, h->num_requests);
        int64_t reach = weft_step_filled_blocks(previous, grown[g].row) + grown[g].count;
        if (reach > shape.block_table_stride) shape.block_table_stride = reach;
    }
    WEFT_TRY(begin(step, &shape, 0));
    size_t n = (size_t)h->num_requests, padding = (size_t)(h->num_tokens - h->num_requests);
    for (size_t r = 0; r < n; r++) {
        step->ids[r] = -1 - (int32_t)r;
        step->positions[r] = previous->positions[r] + 1;
        step->seq_lens[r] = previous->seq_lens[r] + 1;
        step->sample_positions[r] = previous->sample_positions[r] + 1;
    }
    memset(step->ids + n, 0, padding * sizeof *step->ids);
    memset(step->positions + n, 0, padding * sizeof *step->positions);
    memcpy(step->query_start_loc, previous->query_start_loc, (n + 1) * sizeof *step->query_start_loc);
    memcpy(step->logits_indices, previous->logits_indices, n * sizeof *step->logits_indices);
    memcpy(step->temperature, previous->temperature, n * sizeof *step->temperature);
    memcpy(step->seeds, previous->seeds, n * sizeof *step->seeds);
    follow_table(step, previous, grown, num_grown);
    WEFT_TRY(weft_step_finish(step));
    *built = 1;
    return WEFT_OK;
}

/* ---- checks: every rule of a sound record, for the builder and for what came from a peer ---- */

static weft_status check_requests(const weft_step *step, int32_t *max_context)
{
    const weft_step_header *h = step->header;
    const int32_t *start = step->query_start_loc;
    if (start[0] != 0) return weft_fail(WEFT_INVALID, "query_start_loc must begin with 0, got %d", start[0]);
    *max_context = 0;
    for (int32_t r = 0; r < h->num_requests; r++) {
        if (start[r + 1] <= start[r] || start[r + 1] > h->num_tokens)
            return weft_fail(WEFT_INVALID, "request %d of a step has tokens %d to %d of %d", r, start[r], start[r + 1], h->num_tokens);
        int32_t query_len = start[r + 1] - start[r];
        if (step->seq_lens[r] < query_len)
            return weft_fail(WEFT_INVALID, "request %d of a step has length %d but %d new tokens", r, step->seq_lens[r], query_len);
        int32_t context = step->seq_lens[r] - query_len;
        for (int32_t i = 0; i < query_len; i++)
            if (step->positions[start[r] + i] != context + i)
                return weft_fail(WEFT_INVALID, "token %d of request %d is at position %d, wanted %d", i, r,
                                 step->positions[start[r] + i], context + i);
        if (context > *max_context) *max_context = context;
    }
    for (int32_t t = start[h->num_requests]; t < h->num_tokens; t++)
        if (step->positions[t] != 0) return weft_fail(WEFT_INVALID, "padding row %d has position %d, wanted 0", t, step->positions[t]);
    return WEFT_OK;
}

static weft_status check_blocks(const weft_step *step, int32_t *max_block)
{
    const weft_step_header *h = step->header;
    *max_block = -1;
    if (h->block_tokens == 0) {
        if (h->block_table_stride != 0) return weft_fail(WEFT_INVALID, "a step has a block table but no block size");
        return WEFT_OK;
    }
    for (int32_t r = 0; r < h->num_requests; r++) {
        int64_t used = ((int64_t)step->seq_lens[r] + h->block_tokens - 1) / h->block_tokens;
        if (used > h->block_table_stride)
            return weft_fail(WEFT_INVALID, "request %d has %d tokens, which need %" PRId64 " blocks of %d, and its table holds %d", r,
                             step->seq_lens[r], used, h->block_tokens, h->block_table_stride);
        const int32_t *row = step->block_table + (size_t)r * (size_t)h->block_table_stride;
        int32_t least = 0, most = *max_block; /* without a way out of the loop it becomes vectors: tables are long */
        for (int32_t b = 0; b < h->block_table_stride; b++) {
            least = row[b] < least ? row[b] : least;
            most = row[b] > most ? row[b] : most;
        }
        for (int32_t b = 0; least < 0 && b < h->block_table_stride; b++)
            if (row[b] < 0) return weft_fail(WEFT_INVALID, "block %d of request %d has id %d", b, r, row[b]);
        *max_block = most;
    }
    return WEFT_OK;
}

static weft_status check_logits(const weft_step *step)
{
    const weft_step_header *h = step->header;
    int32_t real = step->query_start_loc[h->num_requests];
    for (int32_t i = 0; i < h->num_logits; i++) {
        int32_t row = step->logits_indices[i];
        if (row < 0 || row >= real) return weft_fail(WEFT_INVALID, "logits are wanted of row %d, and the step has %d", row, real);
        if (!(step->temperature[i] >= 0) || !isfinite(step->temperature[i]))
            return weft_fail(WEFT_INVALID, "the temperature of row %d is %g, wanted 0 or more", row, (double)step->temperature[i]);
        if (step->sample_positions[i] != step->positions[row] + 1)
            return weft_fail(WEFT_INVALID, "row %d at position %d draws a token for position %d", row, step->positions[row],
                             step->sample_positions[i]);
    }
    return WEFT_OK;
}

static weft_status check_graph(const weft_step *step)
{
    const weft_step_header *h = step->header;
    if (!(h->flags & WEFT_STEP_GRAPH)) return WEFT_OK;
    int single = h->num_requests > 0 && h->num_logits == h->num_requests && step->query_start_loc[h->num_requests] == h->num_requests;
    for (int32_t r = 0; single && r < h->num_requests; r++) single = step->logits_indices[r] == r;
    if (!single) return weft_fail(WEFT_INVALID, "a step for a graph has one token and one row of logits for each request, in order");
    return WEFT_OK;
}

static weft_status check(const weft_step *step, int32_t *max_context, int32_t *max_block)
{
    const weft_step_header *h = step->header;
    if (h->kind < 0 || h->kind >= WEFT_STEP_KIND_COUNT) return weft_fail(WEFT_INVALID, "a step of unknown kind %d", h->kind);
    if (h->bucket < h->num_tokens)
        return weft_fail(WEFT_INVALID, "a step of %d tokens in a bucket of %d", h->num_tokens, h->bucket);
    WEFT_TRY(check_requests(step, max_context));
    WEFT_TRY(check_blocks(step, max_block));
    WEFT_TRY(check_graph(step));
    return check_logits(step);
}

weft_status weft_step_finish(weft_step *step)
{
    if (step->header == NULL) return weft_fail(WEFT_INVALID, "the step was not built");
    WEFT_TRY(check(step, &step->header->max_context_len, &step->header->max_block));
    step->header->total_bytes = step->bytes;
    return WEFT_OK;
}

weft_status weft_step_ready(const weft_step *step)
{
    if (step->header == NULL || step->header->total_bytes == 0) return weft_fail(WEFT_INVALID, "the step was not built");
    return WEFT_OK;
}

static weft_status malformed(void)
{
    return weft_fail_while(WEFT_FORMAT, "reading a step record");
}

weft_status weft_step_decode(weft_step *step, const void *record, size_t bytes)
{
    weft_step_header h;
    if (bytes < sizeof h) return weft_fail(WEFT_FORMAT, "a step record of %zu bytes, wanted at least %zu", bytes, sizeof h);
    memcpy(&h, record, sizeof h);
    if (h.magic != MAGIC) return weft_fail(WEFT_FORMAT, "a step record of format %08x, wanted %08x", h.magic, (unsigned)MAGIC);
    if (h.payload_bytes > MAX_COUNT)
        return weft_fail(WEFT_FORMAT, "a step record with a payload of %" PRIu64 " bytes", h.payload_bytes);
    weft_step_shape shape = {.num_tokens = h.num_tokens,
                             .num_requests = h.num_requests,
                             .block_table_stride = h.block_table_stride,
                             .block_tokens = h.block_tokens,
                             .num_logits = h.num_logits,
                             .bucket = h.bucket,
                             .payload_bytes = (int64_t)h.payload_bytes};
    offsets o;
    if (lay_out(&o, &shape) != WEFT_OK) return malformed();
    if (o.total != bytes || h.total_bytes != bytes)
        return weft_fail(WEFT_FORMAT, "a step record of %zu bytes whose sizes ask for %zu", bytes, o.total);
    WEFT_TRY(reserve(step, bytes));
    memcpy(step->buffer->data, record, bytes);
    point(step, &o);
    int32_t max_context, max_block;
    weft_status status = check(step, &max_context, &max_block);
    if (status == WEFT_OK && (max_context != h.max_context_len || max_block != h.max_block))
        status = weft_fail(WEFT_FORMAT, "a step record says context %d and block %d at most, and holds %d and %d", h.max_context_len,
                           h.max_block, max_context, max_block);
    if (status == WEFT_OK) return WEFT_OK;
    step->header = NULL;
    return malformed();
}

weft_status weft_step_publish(weft_step *step, weft_rank *rank)
{
    WEFT_TRY(weft_step_ready(step));
    if (rank->rank != 0) return weft_fail(WEFT_INVALID, "only rank 0 publishes steps, this is rank %d", rank->rank);
    if (rank->world_size == 1) return WEFT_OK;
    return weft_world_publish(rank, step->header, step->bytes);
}

weft_status weft_step_receive(weft_step *step, weft_rank *rank)
{
    if (rank->rank == 0) return weft_fail(WEFT_INVALID, "rank 0 publishes steps, others receive them");
    const void *record;
    size_t bytes;
    WEFT_TRY(weft_world_receive(rank, &record, &bytes));
    return weft_step_decode(step, record, bytes);
}
