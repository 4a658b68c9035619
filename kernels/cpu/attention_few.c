/* kernels/cpu/attention_few.c - attention of a few (query, head) pairs that share a KV head: decode.
 *
 * Keys and values are read once, as they lie in their pages, for all pairs: scores are products of
 * a page with the queries (gemv), outputs are weighted sums of its values (weigh). A long sequence
 * is cut in splits, whose results are merged by their maxima and sums. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/attention.h"

enum { KEY_TILE = 128, CACHE_LINE = 64 };

/* A partial result: maxima, sums, then unnormalised outputs. */
typedef struct {
    float *max, *sum, *out;
} few_state;

static few_state state_at(float *f)
{
    return (few_state){f, f + WEFT_FEW_LANES, f + 2 * WEFT_FEW_LANES};
}

size_t weft__few_partial(const weft_attention_args *a)
{
    return (size_t)WEFT_FEW_LANES * (size_t)(2 + a->head_dim_v);
}

size_t weft__few_floats(const weft_attention_args *a)
{
    return weft__few_partial(a) + (size_t)WEFT_FEW_LANES * (size_t)(a->head_dim + KEY_TILE);
}

static int64_t token_of(const weft_attention_args *a, const weft_few_item *item, int lane)
{
    return a->query_start_loc[item->request] + lane / item->heads;
}

static void load_queries(const weft_attention_args *a, const weft_isa_table *isa, const weft_few_item *item, float *q)
{
    for (int lane = 0; lane < item->lanes; lane++) {
        int64_t head = item->first_head + lane % item->heads;
        isa->widen(q + lane * a->head_dim, weft__at(a->q, a->dtype, token_of(a, item, lane) * a->q_stride + head * a->head_dim),
                   a->dtype, a->head_dim);
        isa->scale(q + lane * a->head_dim, a->scale, a->head_dim);
    }
}

/* The next run of rows is in another page, where the processor does not look ahead by itself. */
static void prefetch_run(const weft_attention_args *a, const weft_few_item *item, int values, int64_t begin)
{
    if (begin >= item->end) return;
    const void *rows;
    int64_t stride, count = weft__key_run(a, item->request, item->g, values, begin, item->end, &rows, &stride);
    int64_t dim = values ? a->head_dim_v : a->head_dim;
    if (stride != dim) return;
    int64_t bytes = count * dim * (int64_t)weft_dtype_size(a->kv_dtype);
    for (int64_t at = 0; at < bytes && at < 8192; at += CACHE_LINE) __builtin_prefetch((const char *)rows + at);
}

/* scores[lane][key - begin] of a tile. */
static void score_tile(const weft_attention_args *a, const weft_isa_table *isa, const weft_few_item *item, const float *q,
                       int64_t begin, int64_t end, float *scores)
{
    for (int64_t key = begin; key < end;) {
        weft_isa_gemv_args g = {
            .x = q, .out = scores + (key - begin), .tokens = item->lanes, .k = a->head_dim, .x_stride = a->head_dim,
            .out_stride = KEY_TILE, .w_dtype = a->kv_dtype,
        };
        g.rows = weft__key_run(a, item->request, item->g, 0, key, end, &g.w, &g.w_stride);
        prefetch_run(a, item, 0, key + g.rows);
        isa->gemv(&g);
        key += g.rows;
    }
}

static void weigh_tile(const weft_attention_args *a, const weft_isa_table *isa, const weft_few_item *item, float *out,
                       int64_t begin, int64_t end, const float *scores)
{
    for (int64_t key = begin; key < end;) {
        weft_isa_weigh_args w = {
            .p = scores + (key - begin), .o = out, .tokens = item->lanes, .dim = a->head_dim_v, .p_stride = KEY_TILE,
            .o_stride = a->head_dim_v, .v_dtype = a->kv_dtype,
        };
        w.keys = weft__key_run(a, item->request, item->g, 1, key, end, &w.v, &w.v_stride);
        prefetch_run(a, item, 1, key + w.keys);
        isa->weigh(&w);
        key += w.keys;
    }
}

static void store(const weft_attention_args *a, const weft_isa_table *isa, const weft_few_item *item, few_state state)
{
    const int64_t dv = a->head_dim_v;
    for (int lane = 0; lane < item->lanes; lane++) {
        int64_t token = token_of(a, item, lane), head = item->first_head + lane % item->heads;
        float sum = state.sum[lane], *out = state.out + lane * dv;
        isa->scale(out, sum == 0.0f ? 0.0f : 1.0f / sum, dv);
        isa->narrow(weft__at_mut(a->out, a->dtype, token * a->out_stride + head * dv), a->dtype, out, dv);
        if (a->lse != NULL) a->lse[token * a->num_heads + head] = sum == 0.0f ? -INFINITY : state.max[lane] + logf(sum);
    }
}

void weft__attend_few(const weft_attention_args *a, const weft_isa_table *isa, const weft_few_item *item)
{
    const int64_t dv = a->head_dim_v;
    few_state state = state_at(item->partial != NULL ? item->partial : item->scratch);
    float *q = item->scratch + weft__few_partial(a), *scores = q + WEFT_FEW_LANES * a->head_dim;
    int64_t low[WEFT_FEW_LANES], high[WEFT_FEW_LANES], first = item->end, last = item->begin;
    for (int lane = 0; lane < item->lanes; lane++) {
        weft__visible(a, item->request, lane / item->heads, &low[lane], &high[lane]);
        first = weft__min(first, low[lane]);
        last = weft__max(last, high[lane]);
        state.max[lane] = -INFINITY;
        state.sum[lane] = 0.0f;
    }
    first = weft__max(first, item->begin);
    last = weft__min(last, item->end);
    memset(state.out, 0, (size_t)(item->lanes * dv) * sizeof(float));
    load_queries(a, isa, item, q);
    for (int64_t begin = first; begin < last; begin += KEY_TILE) {
        int64_t end = weft__min(begin + KEY_TILE, last);
        score_tile(a, isa, item, q, begin, end, scores);
        for (int lane = 0; lane < item->lanes; lane++) {
            float *row = scores + lane * KEY_TILE;
            for (int64_t key = begin; key < weft__min(low[lane], end); key++) row[key - begin] = -INFINITY;
            for (int64_t key = weft__max(high[lane], begin); key < end; key++) row[key - begin] = -INFINITY;
            float ratio = isa->softmax_row(row, end - begin, &state.max[lane], &state.sum[lane]);
            if (ratio != 1.0f) isa->scale(state.out + lane * dv, ratio, dv);
        }
        weigh_tile(a, isa, item, state.out, begin, end, scores);
    }
    if (item->partial == NULL) store(a, isa, item, state);
}

void weft__combine_few(const weft_attention_args *a, const weft_isa_table *isa, const weft_few_item *item, float *partials, int splits)
{
    const int64_t dv = a->head_dim_v;
    few_state all = state_at(partials);
    for (int lane = 0; lane < item->lanes; lane++)
        for (int s = 1; s < splits; s++) {
            few_state other = state_at(partials + (size_t)s * weft__few_partial(a));
            if (other.sum[lane] == 0.0f) continue;
            float max = fmaxf(all.max[lane], other.max[lane]);
            float mine = expf(all.max[lane] - max), theirs = expf(other.max[lane] - max);
            isa->scale(all.out + lane * dv, mine, dv);
            isa->axpy(all.out + lane * dv, other.out + lane * dv, theirs, dv);
            all.sum[lane] = all.sum[lane] * mine + other.sum[lane] * theirs;
            all.max[lane] = max;
        }
    store(a, isa, item, all);
}
