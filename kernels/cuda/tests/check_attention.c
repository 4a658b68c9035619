/* kernels/cuda/tests/check_attention.c - attention over pages and over the step's own tokens. */
#include <math.h>
#include <stdio.h>

#include "kernels/cuda/tests/check.h"

#define D(field) d.field = twin_device(a.field)

typedef struct {
    weft_dtype dtype, kv;
    int heads, kv_heads, group, first_head, first_kv_head, dim, dim_v;
    weft_attention_keys keys;
    int causal, window, page, context, context_rank, interleave, cuda_context;
    const int *queries, *contexts; /* of the requests, ending in -1 */
    int padding, hints;
} shape;

static void attention(const char *name, const shape *s)
{
    if (check_passes_over()) return;
    int requests = 0, tokens = 0, longest = 0, longest_query = 0;
    for (; s->queries[requests] >= 0; requests++) {
        tokens += s->queries[requests];
        if (s->queries[requests] > longest_query) longest_query = s->queries[requests];
        if (s->queries[requests] + s->contexts[requests] > longest) longest = s->queries[requests] + s->contexts[requests];
    }
    const int local = (longest / (s->context * s->interleave) + 1) * s->interleave, width = (local + s->page - 1) / s->page;
    const int blocks = requests * width;
    weft_attention_args a = {.tokens = tokens + s->padding, .requests = requests, .num_heads = s->heads, .num_kv_heads = s->kv_heads,
                             .head_dim = s->dim, .head_dim_v = s->dim_v, .group_size = s->group, .first_head = s->first_head,
                             .first_kv_head = s->first_kv_head, .keys = s->keys, .causal = s->causal, .window = s->window,
                             .scale = 1.0f / sqrtf((float)s->dim), .dtype = s->dtype, .kv_dtype = s->kv}, d;
    a.q_stride = s->heads * s->dim + 8;
    a.out_stride = s->heads * s->dim_v + 8;
    a.k_stride = s->kv_heads * s->dim + 8;
    a.v_stride = s->kv_heads * s->dim_v + 8;
    a.q = twin_random(a.tokens * a.q_stride, s->dtype, 0, 2);
    const int64_t rows = s->keys == WEFT_KEYS_NEW ? 0 : (int64_t)blocks * s->kv_heads * s->page;
    a.k = twin_random(rows ? rows * s->dim : a.tokens * a.k_stride, s->kv, 0, 1);
    a.v = twin_random(rows ? rows * s->dim_v : a.tokens * a.v_stride, s->kv, 0, 1);
    a.out = twin_take(a.tokens * a.out_stride, s->dtype, 0);
    a.lse = twin_take(a.tokens * s->heads, WEFT_F32, 0);
    int32_t *loc = twin_integers(requests + 1, 0, 1), *lens = twin_integers(requests, 0, 1), *table = twin_integers(blocks, 0, 1);
    for (int r = 0; r < requests; r++) {
        loc[r + 1] = loc[r] + s->queries[r];
        lens[r] = s->queries[r] + s->contexts[r];
    }
    for (int i = 0; i < blocks; i++) table[i] = i;
    for (int i = blocks - 1; i > 0; i--) {
        int j = twin_below(i + 1), t = table[i];
        table[i] = table[j], table[j] = t;
    }
    if (rows) /* places behind the last key may hold anything */
        for (int r = 0; r < requests; r++) {
            int held = 0;
            for (int i = 0; i < lens[r]; i++) held += i / s->interleave % s->context == s->context_rank;
            for (int slot = held; slot < width * s->page; slot++)
                for (int g = 0; g < s->kv_heads; g++) {
                    const int64_t row = ((int64_t)table[r * width + slot / s->page] * s->kv_heads + g) * s->page + slot % s->page;
                    for (int i = 0; i < s->dim; i++) weft_store_f32((void *)a.k, s->kv, row * s->dim + i, NAN);
                    for (int i = 0; i < s->dim_v; i++) weft_store_f32((void *)a.v, s->kv, row * s->dim_v + i, NAN);
                }
        }
    a.query_start_loc = loc, a.seq_lens = lens;
    a.pages = (weft_page_layout){table, width, s->page, s->context, s->context_rank, s->interleave};
    d = a, D(q), D(k), D(v), D(out), D(lse), D(query_start_loc), D(seq_lens), D(pages.block_table);
    d.cuda = s->cuda_context ? twin_context() : NULL;
    if (s->hints) d.max_query_len = longest_query, d.max_seq_len = longest;
    if (!RUN(name, attention, a, d)) return;
    /* The tensor cores take the weights of the values in 16 bits. */
    check_values(a.out, s->dtype, a.tokens * a.out_stride, s->dtype == WEFT_F32 ? 5e-6 : 1.5 * check_tolerance(s->dtype));
    check_values(a.lse, WEFT_F32, a.tokens * s->heads, s->dtype == WEFT_F32 ? 1e-6 : 1e-5);
}

static int chosen(const int *from, uint64_t *draw)
{
    int count = 0;
    while (from[count] >= 0) count++;
    const int i = (int)(*draw % (uint64_t)count);
    *draw /= (uint64_t)count;
    return from[i];
}

/* Few queries, by how many rows share a KV head: lengths of all kinds, pages of several sizes. */
static void by_rows(void)
{
    enum { REQUESTS = 70 };
    static const int groups[] = {1, 4, 8, 12, 16, 17, 24, 32, 33, 48, 64, -1}, counts[] = {1, 2, 5, 8, 33, REQUESTS, -1};
    static const int dims[] = {128, 128, 64, 80, 96, -1}, pages[] = {16, 16, 32, 64, 48, -1}, longest[] = {17, 100, 700, 2500, -1};
    uint64_t seed = 12000;
    for (int g = 0; groups[g] >= 0; g++)
        for (int i = 0; i < 10; i++, seed++) {
            uint64_t draw = seed * 0x9E3779B97F4A7C15u >> 8;
            if (check_passes_over()) continue;
            twin_reset(seed);
            int queries[REQUESTS + 1], contexts[REQUESTS + 1];
            const int count = chosen(counts, &draw), most = chosen(longest, &draw), long_one = twin_below(count);
            for (int r = 0; r < count; r++) {
                const int few = groups[g] <= 8 ? 4 : groups[g] <= 32 ? 2 : 1;
                queries[r] = twin_below(8) == 0 ? 0 : 1 + (twin_below(3) == 0 ? twin_below(few) : 0);
                contexts[r] = twin_below(count > 8 && r != long_one ? 60 : most);
            }
            queries[count] = contexts[count] = -1;
            const weft_dtype type = draw % 4 == 0 ? WEFT_F16 : WEFT_BF16;
            const int kv_heads = draw / 4 % 2 ? 1 : 2, cut = draw / 8 % 4 == 0 && groups[g] > 2, context = draw / 32 % 3 == 0 ? 3 : 1;
            shape s = {type, type, groups[g] * kv_heads - cut, kv_heads, groups[g], 3 * groups[g] + cut, 3, chosen(dims, &draw), 0,
                       draw % 3 ? WEFT_KEYS_ALL : WEFT_KEYS_CONTEXT, draw / 3 % 5 != 0, draw / 15 % 3 == 0 ? 1 + (int)(draw / 45 % 300) : 0,
                       chosen(pages, &draw), context, (int)(seed % (uint64_t)context), context > 1 ? 4 : 1, 1, queries, contexts, (int)(draw / 8 % 3),
                       draw / 24 % 4 != 0};
            s.dim_v = draw / 384 % 4 == 0 ? 64 : s.dim;
            char name[48];
            snprintf(name, sizeof name, "attention, %d heads on a KV head", groups[g]);
            attention(name, &s);
        }
}

static const int decode_q[] = {1, 1, 1, 0, 1, -1}, decode_c[] = {0, 300, 77, 5, 1057, -1};
static const int two_q[] = {1, 1, -1}, two_c[] = {1991, 301, -1};
static const int few_q[] = {3, 1, 5, -1}, few_c[] = {700, 40, 0, -1};
static const int ragged_q[] = {130, 1, 0, 77, 64, -1}, ragged_c[] = {0, 90, 10, 33, 200, -1};
static const int long_q[] = {190, 1, 65, 33, -1}, long_c[] = {0, 513, 127, 600, -1};

void check_attention(void)
{
    static const struct { const char *name; const int *q, *c; } batches[] = {
        {"attention, decode", decode_q, decode_c}, {"attention, few queries", few_q, few_c}, {"attention, ragged prefill", ragged_q, ragged_c},
        {"attention, long prefill", long_q, long_c}, {"attention, decode of two", two_q, two_c}};
    static const struct { int heads, kv_heads, group, first_head, first_kv_head; } cuts[] = {
        {8, 2, 4, 0, 0}, {4, 4, 1, 0, 0}, {6, 2, 4, 2, 0}, {20, 1, 32, 12, 0}, {3, 2, 2, 5, 2}};
    static const int dims[][2] = {{128, 128}, {64, 64}, {80, 80}, {16, 16}, {96, 64}, {256, 256}, {7, 5}};
    static const weft_dtype types[][2] = {{WEFT_BF16, WEFT_BF16}, {WEFT_F16, WEFT_F16}, {WEFT_F32, WEFT_F32}, {WEFT_F32, WEFT_BF16}};
    uint64_t seed = 9000;
    for (int b = 0; b < 5; b++)
        for (int t = 0; t < 4; t++)
            for (int m = 0; m < 7; m++)
                for (int c = 0; c < 5; c++)
                    for (int layout = 0; layout < 3; layout++, seed++) {
                        const uint64_t draw = seed * 0x9E3779B97F4A7C15u >> 20; /* the rest is drawn: all of it would be too much */
                        if (draw % (m > 1 || t > 1 ? 8 : 2) != 0) continue;
                        shape s = {types[t][0], types[t][1], cuts[c].heads, cuts[c].kv_heads, cuts[c].group, cuts[c].first_head,
                                   cuts[c].first_kv_head, dims[m][0], dims[m][1], (weft_attention_keys)(draw / 8 % 3), draw / 24 % 4 != 0,
                                   draw / 96 % 3 == 0 ? 50 : 0, 16, 1, 0, 1, draw / 288 % 3 != 0, batches[b].q, batches[b].c, 0, (int)(draw / 864 % 2)};
                        if (layout == 1) s.context = 3, s.interleave = 4, s.context_rank = (int)(seed % 3), s.padding = 3;
                        if (layout == 2) s.page = draw / 1728 % 2 ? 24 : 64;
                        if (check_passes_over()) continue;
                        twin_reset(seed), attention(batches[b].name, &s);
                    }
    by_rows();
}
