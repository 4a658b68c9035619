/* kernels/cpu/attention.c - attention of a ragged batch with its log-sum-exp.
 *
 * The lanes of a panel are (query, head) pairs that share a KV head. Scores are kept transposed
 * (keys, lanes), so that the softmax over keys runs down the lanes, and so is the output
 * (head_dim_v, lanes). Keys and values are widened once per tile for all panels of an item.
 * Requests with few pairs for each KV head take the path of attention_few.c instead. */
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/pages.h"

enum { KEY_TILE = 64, ITEM_PANELS = 4 };

/* ---- keys ---- */

weft_key_range weft__keys_of(const weft_attention_args *a, int64_t r)
{
    int64_t query = a->query_start_loc[r + 1] - a->query_start_loc[r], context = a->seq_lens[r] - query;
    if (a->keys == WEFT_KEYS_NEW) return (weft_key_range){context, query};
    return (weft_key_range){context, weft__page_local_len(&a->pages, a->keys == WEFT_KEYS_ALL ? a->seq_lens[r] : context)};
}

void weft__visible(const weft_attention_args *a, int64_t r, int64_t i, int64_t *low, int64_t *high)
{
    weft_key_range keys = weft__keys_of(a, r);
    int64_t position = keys.first_position + i, begin = 0, end = INT64_MAX / 4;
    if (a->causal) end = position + 1;
    if (a->window > 0) begin = weft__max(0, position - a->window + 1);
    if (a->keys == WEFT_KEYS_NEW) {
        begin = weft__max(0, begin - keys.first_position);
        end -= keys.first_position;
    } else {
        begin = weft__page_local_len(&a->pages, begin);
        end = weft__page_local_len(&a->pages, end);
    }
    *high = weft__min(end, keys.count);
    *low = weft__min(begin, *high);
}

int weft__heads_of(const weft_attention_args *a, int g, int *first)
{
    int64_t begin = (int64_t)(a->first_kv_head + g) * a->group_size - a->first_head, end = begin + a->group_size;
    begin = weft__max(0, begin);
    end = weft__min(end, a->num_heads);
    *first = (int)begin;
    return end > begin ? (int)(end - begin) : 0;
}

int64_t weft__key_run(const weft_attention_args *a, int64_t r, int g, int values, int64_t begin, int64_t end,
                      const void **rows, int64_t *stride)
{
    const void *base = values ? a->v : a->k;
    const int64_t dim = values ? a->head_dim_v : a->head_dim;
    if (a->keys == WEFT_KEYS_NEW) {
        *stride = values ? a->v_stride : a->k_stride;
        *rows = weft__at(base, a->kv_dtype, (a->query_start_loc[r] + begin) * *stride + g * dim);
        return end - begin;
    }
    const int64_t page = a->pages.page_size, slot = begin % page;
    const int64_t block = a->pages.block_table[r * a->pages.block_table_stride + begin / page];
    *stride = dim;
    *rows = weft__at(base, a->kv_dtype, ((block * a->num_kv_heads + g) * page + slot) * dim);
    return weft__min(end - begin, page - slot);
}

/* ---- one item: up to ITEM_PANELS panels of one request and KV head ---- */

typedef struct {
    const weft_attention_args *args;
    const weft_isa_table *isa;
    char *worker; /* per part */
    size_t worker_bytes;
    float *partials; /* of requests that are cut in splits, in order */
    int split;       /* whether they are */
    int combining;   /* the second pass, over the partials */
    atomic_long next;
} attention_job;

typedef struct {
    int64_t request, first_lane, lanes; /* lanes of this item, over all its panels */
    int g, first_head, heads, panels;
    float *q, *out, *scores, *max, *sum, *ratio, *k, *v, *lines;
    int32_t *low, *high;
} attention_item;

static size_t item_floats(const weft_attention_args *a, int64_t lanes)
{
    int64_t d = a->head_dim, dv = a->head_dim_v;
    return (size_t)(ITEM_PANELS * lanes * (d + dv + 4) + KEY_TILE * (lanes + d + dv) + lanes * (1 + weft__max(d, dv)));
}

static void place(attention_item *item, const weft_attention_args *a, int64_t lanes, float *f)
{
    int64_t d = a->head_dim, dv = a->head_dim_v, all = ITEM_PANELS * lanes;
    item->q = f, f += all * d;
    item->out = f, f += all * dv;
    item->max = f, f += all;
    item->sum = f, f += all;
    item->low = (int32_t *)f, f += all;
    item->high = (int32_t *)f, f += all;
    item->scores = f, f += KEY_TILE * lanes;
    item->ratio = f, f += lanes;
    item->k = f, f += KEY_TILE * d;
    item->v = f, f += KEY_TILE * dv;
    item->lines = f; /* lanes * max(d, dv) */
}

/* Token and head of a lane. */
static void lane_place(const attention_item *item, int64_t lane, int64_t *query, int *head)
{
    *query = (item->first_lane + lane) / item->heads;
    *head = item->first_head + (int)((item->first_lane + lane) % item->heads);
}

/* Packs scaled queries, sets bounds and empties the sums. Lanes that fill up the last panel see
 * what the last real lane sees and are dropped at the end. */
static void load_queries(const attention_job *job, attention_item *item)
{
    const weft_attention_args *a = job->args;
    const int64_t lanes = job->isa->lanes, d = a->head_dim;
    for (int panel = 0; panel < item->panels; panel++) {
        int64_t count = weft__min(lanes, item->lanes - panel * lanes);
        for (int64_t lane = 0; lane < lanes; lane++) {
            int64_t at = panel * lanes + lane, query, low, high;
            int head;
            lane_place(item, panel * lanes + weft__min(lane, count - 1), &query, &head);
            weft__visible(a, item->request, query, &low, &high);
            item->low[at] = (int32_t)low;
            item->high[at] = (int32_t)high;
            item->max[at] = -INFINITY;
            item->sum[at] = 0.0f;
            if (lane >= count) continue;
            float *line = item->lines + lane * d;
            int64_t token = a->query_start_loc[item->request] + query;
            job->isa->widen(line, weft__at(a->q, a->dtype, token * a->q_stride + head * d), a->dtype, d);
            job->isa->scale(line, a->scale, d);
        }
        job->isa->pack(item->q + panel * lanes * d, item->lines, d, count, d);
    }
    memset(item->out, 0, (size_t)(item->panels * lanes * a->head_dim_v) * sizeof(float));
}

static void widen_keys(const attention_job *job, const attention_item *item, int values, int64_t begin, int64_t end, float *to)
{
    const weft_attention_args *a = job->args;
    const int64_t dim = values ? a->head_dim_v : a->head_dim;
    while (begin < end) {
        const void *rows;
        int64_t stride, count = weft__key_run(a, item->request, item->g, values, begin, end, &rows, &stride);
        if (stride == dim) job->isa->widen(to, rows, a->kv_dtype, count * dim);
        else
            for (int64_t i = 0; i < count; i++)
                job->isa->widen(to + i * dim, weft__at(rows, a->kv_dtype, i * stride), a->kv_dtype, dim);
        to += count * dim;
        begin += count;
    }
}

static void mask_scores(float *scores, int64_t lanes, int64_t begin, int64_t end, const int32_t *low, const int32_t *high)
{
    for (int64_t lane = 0; lane < lanes; lane++)
        for (int64_t key = begin; key < end; key++)
            if (key < low[lane] || key >= high[lane]) scores[(key - begin) * lanes + lane] = -INFINITY;
}

/* One panel against one tile of keys. */
static void tile_panel(const attention_job *job, attention_item *item, int panel, int64_t begin, int64_t end)
{
    const weft_attention_args *a = job->args;
    const weft_isa_table *isa = job->isa;
    const int64_t lanes = isa->lanes, d = a->head_dim, dv = a->head_dim_v, keys = end - begin, at = panel * lanes;
    int masked = 0, seen = 0;
    for (int64_t lane = 0; lane < lanes; lane++) {
        masked |= begin < item->low[at + lane] || end > item->high[at + lane];
        seen |= begin < item->high[at + lane] && end > item->low[at + lane];
    }
    if (!seen) return;
    float *out = item->out + at * dv;
    isa->tile(d, item->k, d, 1, keys, item->q + at * d, item->scores, lanes, 0);
    if (masked) mask_scores(item->scores, lanes, begin, end, item->low + at, item->high + at);
    isa->softmax_lanes(item->scores, keys, item->max + at, item->sum + at, item->ratio);
    isa->scale_lanes(out, dv, item->ratio);
    isa->tile(keys, item->v, 1, dv, dv, item->scores, out, lanes, 1);
}

static void store_panel(const attention_job *job, attention_item *item, int panel)
{
    const weft_attention_args *a = job->args;
    const int64_t lanes = job->isa->lanes, dv = a->head_dim_v, at = panel * lanes;
    const int64_t count = weft__min(lanes, item->lanes - at);
    for (int64_t lane = 0; lane < lanes; lane++)
        item->ratio[lane] = item->sum[at + lane] == 0.0f ? 0.0f : 1.0f / item->sum[at + lane];
    job->isa->scale_lanes(item->out + at * dv, dv, item->ratio);
    job->isa->unpack(item->lines, dv, item->out + at * dv, lanes, dv, count);
    for (int64_t lane = 0; lane < count; lane++) {
        int64_t query;
        int head;
        lane_place(item, at + lane, &query, &head);
        int64_t token = a->query_start_loc[item->request] + query;
        job->isa->narrow(weft__at_mut(a->out, a->dtype, token * a->out_stride + head * dv), a->dtype, item->lines + lane * dv, dv);
        if (a->lse == NULL) continue;
        float sum = item->sum[at + lane];
        a->lse[token * a->num_heads + head] = sum == 0.0f ? -INFINITY : item->max[at + lane] + logf(sum);
    }
}

static void attend_item(const attention_job *job, attention_item *item)
{
    const int64_t lanes = job->isa->lanes;
    item->panels = (int)((item->lanes + lanes - 1) / lanes);
    load_queries(job, item);
    int64_t first = INT64_MAX, last = 0;
    for (int64_t lane = 0; lane < item->panels * lanes; lane++) {
        first = weft__min(first, item->low[lane]);
        last = weft__max(last, item->high[lane]);
    }
    for (int64_t begin = first; begin < last; begin += KEY_TILE) {
        int64_t end = weft__min(begin + KEY_TILE, last);
        widen_keys(job, item, 0, begin, end, item->k);
        widen_keys(job, item, 1, begin, end, item->v);
        for (int panel = 0; panel < item->panels; panel++) tile_panel(job, item, panel, begin, end);
    }
    for (int panel = 0; panel < item->panels; panel++) store_panel(job, item, panel);
}

/* ---- all items ---- */

/* How the keys of a request are cut: by its own length alone. */
static int splits_of(const weft_attention_args *a, int64_t request, int64_t *keys_each)
{
    int64_t count = weft__keys_of(a, request).count;
    *keys_each = weft__max(WEFT_FEW_KEYS, (count + WEFT_FEW_SPLITS * 64 - 1) / (WEFT_FEW_SPLITS * 64) * 64);
    return (int)weft__max(1, (count + *keys_each - 1) / *keys_each);
}

static void few(const attention_job *job, const attention_item *item, int number, int splits, int64_t keys_each, float *scratch,
                float *partials)
{
    const weft_attention_args *a = job->args;
    weft_few_item part = {
        .request = item->request, .g = item->g, .first_head = item->first_head, .heads = item->heads, .lanes = (int)item->lanes,
        .begin = number * keys_each, .scratch = scratch,
        .partial = splits > 1 ? partials + (size_t)number * weft__few_partial(a) : NULL,
    };
    part.end = weft__min(part.begin + keys_each, weft__keys_of(a, item->request).count);
    if (job->combining) weft__combine_few(a, job->isa, &part, partials, splits);
    else weft__attend_few(a, job->isa, &part);
}

/* Items in order of (request, KV head, lanes or splits); each thread walks the list and does those
 * that it takes. The second pass has one item for each request and KV head with splits. */
static void attend(void *context, int part, int parts)
{
    attention_job *job = context;
    const weft_attention_args *a = job->args;
    const int64_t item_lanes = ITEM_PANELS * (int64_t)job->isa->lanes;
    float *scratch = (float *)(job->worker + (size_t)part * job->worker_bytes), *partials = job->partials;
    attention_item item = {0};
    place(&item, a, job->isa->lanes, scratch);
    long taken = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed), number = 0;
    for (item.request = 0; item.request < a->requests; item.request++) {
        int64_t queries = a->query_start_loc[item.request + 1] - a->query_start_loc[item.request], keys_each = INT32_MAX;
        int splits = job->split ? splits_of(a, item.request, &keys_each) : 1;
        for (item.g = 0; item.g < a->num_kv_heads; item.g++) {
            item.heads = weft__heads_of(a, item.g, &item.first_head);
            int64_t all = queries * item.heads, items = (all + item_lanes - 1) / item_lanes;
            int is_few = all > 0 && all <= WEFT_FEW_LANES;
            if (is_few) items = job->combining ? splits > 1 : splits;
            else if (job->combining) items = 0;
            for (; taken < number + items; taken = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) {
                item.first_lane = is_few ? 0 : (taken - number) * item_lanes;
                item.lanes = weft__min(item_lanes, all - item.first_lane);
                if (is_few) few(job, &item, (int)(taken - number), splits, keys_each, scratch, partials);
                else attend_item(job, &item);
            }
            number += items;
            if (is_few && splits > 1) partials += (size_t)splits * weft__few_partial(a);
        }
    }
}

/* Cutting pays where requests and KV heads alone do not keep the threads busy; sets job->split and
 * gives the floats that the partial results need. */
static size_t plan_splits(attention_job *job, int threads)
{
    const weft_attention_args *a = job->args;
    int64_t whole = 0, partials = 0, keys_each;
    for (int64_t r = 0; r < a->requests; r++) {
        int64_t queries = a->query_start_loc[r + 1] - a->query_start_loc[r];
        if (queries == 0 || queries > WEFT_FEW_LANES) continue;
        int splits = splits_of(a, r, &keys_each);
        whole += a->num_kv_heads;
        if (splits > 1) partials += (int64_t)splits * a->num_kv_heads;
    }
    job->split = partials > 0 && whole < 8 * (int64_t)threads;
    return job->split ? (size_t)partials * weft__few_partial(a) : 0;
}

/* ---- checks ---- */

/* Every page that a request's keys lie in has a block. */
static weft_status check_blocks(const weft_attention_args *a)
{
    for (int64_t r = 0; r < a->requests; r++) {
        if (a->query_start_loc[r + 1] == a->query_start_loc[r]) continue;
        int64_t pages = (weft__keys_of(a, r).count + a->pages.page_size - 1) / a->pages.page_size;
        if (pages > a->pages.block_table_stride)
            return weft_fail(WEFT_INVALID, "attention: request %" PRId64 " needs %" PRId64 " blocks, its table has %" PRId64, r, pages,
                             a->pages.block_table_stride);
        for (int64_t p = 0; p < pages; p++)
            if (a->pages.block_table[r * a->pages.block_table_stride + p] < 0)
                return weft_fail(WEFT_INVALID, "attention: request %" PRId64 " has no block for its page %" PRId64, r, p);
    }
    return WEFT_OK;
}

static weft_status check(const weft_attention_args *a)
{
    const int64_t sizes[] = {a->tokens, a->requests};
    WEFT_TRY(weft__check_sizes("attention", "tokens, requests", sizes, 2));
    WEFT_TRY(weft__check_float("attention", "q and out", a->dtype));
    WEFT_TRY(weft__check_float("attention", "k and v", a->kv_dtype));
    WEFT_TRY(weft__check_heads(a));
    if (a->requests == 0) return WEFT_OK;
    WEFT_TRY(weft__check_ragged("attention", a->query_start_loc, a->seq_lens, a->requests, a->tokens));
    if (a->keys == WEFT_KEYS_NEW) return WEFT_OK;
    WEFT_TRY(weft__check_pages("attention", &a->pages));
    return check_blocks(a);
}

/* Rows behind the last request: no keys. */
static void clear_padding(const weft_attention_args *a)
{
    int64_t first = a->requests > 0 ? a->query_start_loc[a->requests] : 0;
    for (int64_t t = first; t < a->tokens; t++) {
        memset(weft__at_mut(a->out, a->dtype, t * a->out_stride), 0,
               (size_t)a->num_heads * (size_t)a->head_dim_v * weft_dtype_size(a->dtype));
        for (int h = 0; a->lse != NULL && h < a->num_heads; h++) a->lse[t * a->num_heads + h] = -INFINITY;
    }
}

weft_status weft_attention_cpu(const weft_attention_args *a, weft_pool *pool)
{
    WEFT_TRY(check(a));
    if (a->tokens == 0 || a->num_heads == 0) return WEFT_OK;
    attention_job job = {.args = a, .isa = weft__isa()};
    const int threads = weft_pool_threads(pool);
    size_t floats = item_floats(a, job.isa->lanes), few_floats = weft__few_floats(a), partials = plan_splits(&job, threads);
    job.worker_bytes = ((floats > few_floats ? floats : few_floats) * sizeof(float) + 63) & ~(size_t)63;
    void *scratch = NULL;
    WEFT_TRY(weft__scratch(job.worker_bytes * (size_t)threads + partials * sizeof(float), &scratch));
    job.worker = scratch;
    job.partials = (float *)(job.worker + job.worker_bytes * (size_t)threads);
    clear_padding(a);
    for (job.combining = 0; job.combining <= job.split; job.combining++) {
        atomic_init(&job.next, 0);
        weft_pool_run(pool, attend, &job);
    }
    return WEFT_OK;
}
