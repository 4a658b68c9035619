/* kernels/cuda/tests/bench_ops.c - single operations: products, attention, what lies between. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/tests/bench.h"

/* ---- products; every call has weights of its own, more than any cache holds ---- */

struct products { weft_linear_args args; int copies; int64_t w_bytes; };

static weft_status one_product(void *context, int i, void *stream)
{
    struct products *p = context;
    weft_linear_args a = p->args;
    a.w = (const char *)a.w + i % p->copies * p->w_bytes;
    return weft_linear_cuda(&a, stream);
}

static void product(int64_t tokens, int64_t n, int64_t k, weft_dtype x, weft_dtype w)
{
    struct products p = {.args = {.tokens = tokens, .n = n, .k = k, .x_stride = k, .w_stride = k, .y_stride = n, .x_dtype = x, .w_dtype = w,
                                  .y_dtype = x, .cuda = bench_context()}};
    p.w_bytes = n * k * (int64_t)weft_dtype_size(w);
    p.copies = (int)(((int64_t)1 << 30) / p.w_bytes) + 2;
    p.args.w = bench_random(p.copies * n * k, w, 0.02f);
    p.args.x = bench_random(tokens * k, x, 1);
    p.args.y = bench_random(tokens * n, x, 1);
    if (w == WEFT_F8E4M3) {
        int32_t *rows = malloc((size_t)n * 4);
        for (int64_t i = 0; i < n; i++) rows[i] = (int32_t)(i / 128);
        p.args.scale_row = bench_upload(rows, (size_t)n * 4);
        p.args.scale_stride = (k + 127) / 128;
        p.args.scale = bench_random((n + 127) / 128 * p.args.scale_stride, WEFT_F32, 1);
        free(rows);
    }
    char name[96];
    snprintf(name, sizeof name, "linear %s x %s, %lld tokens, %lld x %lld", weft_dtype_name(x), weft_dtype_name(w), (long long)tokens,
             (long long)n, (long long)k);
    double size = (double)weft_dtype_size(x), moved = (double)p.w_bytes + size * (double)(tokens * (n + k));
    double us = bench_us(one_product, &p, tokens > 256 ? 4 : p.copies > 32 ? 32 : p.copies);
    bench_line(name, us, tokens > 256 ? 0 : moved, tokens > 8 ? 2.0 * (double)tokens * (double)n * (double)k : 0);
    bench_free_all();
}

void bench_linear(void)
{
    static const int64_t shapes[][2] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {128256, 4096}};
    for (int s = 0; s < 5; s++) product(1, shapes[s][0], shapes[s][1], WEFT_BF16, WEFT_BF16);
    for (int s = 0; s < 4; s++) product(8, shapes[s][0], shapes[s][1], WEFT_BF16, WEFT_BF16);
    for (int s = 0; s < 4; s++) product(32, shapes[s][0], shapes[s][1], WEFT_BF16, WEFT_BF16);
    for (int s = 0; s < 5; s++) product(1, shapes[s][0], shapes[s][1], WEFT_BF16, WEFT_F8E4M3);
    product(8, 28672, 4096, WEFT_BF16, WEFT_F8E4M3);
    product(32, 28672, 4096, WEFT_BF16, WEFT_F8E4M3);
    product(1, 28672, 4096, WEFT_F16, WEFT_F8E4M3);
    product(1, 28672, 4096, WEFT_F16, WEFT_F16);
    product(1, 28672, 4096, WEFT_F32, WEFT_F32);
    product(8, 28672, 4096, WEFT_F32, WEFT_F32);
    for (int s = 0; s < 4; s++) product(8192, shapes[s][0], shapes[s][1], WEFT_BF16, WEFT_BF16);
    product(8192, 28672, 4096, WEFT_BF16, WEFT_F8E4M3);
}

/* ---- attention ---- */

struct attentions { weft_attention_args args; int copies; int64_t kv_bytes; };

static weft_status one_attention(void *context, int i, void *stream)
{
    struct attentions *p = context;
    weft_attention_args a = p->args;
    a.k = (const char *)a.k + i % p->copies * p->kv_bytes;
    a.v = (const char *)a.v + i % p->copies * p->kv_bytes;
    return weft_attention_cuda(&a, stream);
}

static void attention(int64_t requests, int64_t queries, int64_t length, int64_t page, int heads, int kv_heads)
{
    enum { DIM = 128 };
    const int64_t tokens = requests * queries, width = (length + page - 1) / page, blocks = requests * width;
    struct attentions p = {.args = {.tokens = tokens, .requests = requests, .q_stride = heads * DIM, .out_stride = heads * DIM,
                                    .num_heads = heads, .num_kv_heads = kv_heads, .head_dim = DIM, .head_dim_v = DIM, .group_size = heads / kv_heads,
                                    .causal = 1, .scale = 0.088f, .dtype = WEFT_BF16, .kv_dtype = WEFT_BF16, .max_query_len = queries,
                                    .max_seq_len = length, .cuda = bench_context()}};
    p.kv_bytes = blocks * kv_heads * page * DIM * 2;
    p.copies = queries > 1 ? 1 : (int)(((int64_t)1 << 29) / p.kv_bytes) + 1;
    p.args.q = bench_random(tokens * heads * DIM, WEFT_BF16, 1);
    p.args.out = bench_random(tokens * heads * DIM, WEFT_BF16, 1);
    p.args.lse = bench_random(tokens * heads, WEFT_F32, 1);
    p.args.k = bench_random(p.copies * p.kv_bytes / 2, WEFT_BF16, 1);
    p.args.v = bench_random(p.copies * p.kv_bytes / 2, WEFT_BF16, 1);
    int32_t *table = malloc((size_t)blocks * 4), *loc = malloc((size_t)(requests + 1) * 4), *lens = malloc((size_t)requests * 4);
    for (int64_t i = 0; i < blocks; i++) table[i] = (int32_t)i;
    for (int64_t i = blocks - 1; i > 0; i--) {
        int64_t j = rand() % (i + 1);
        int32_t t = table[i];
        table[i] = table[j], table[j] = t;
    }
    for (int64_t r = 0; r <= requests; r++) loc[r] = (int32_t)(r * queries);
    for (int64_t r = 0; r < requests; r++) lens[r] = (int32_t)length;
    p.args.pages = (weft_page_layout){bench_upload(table, (size_t)blocks * 4), width, page, 1, 0, 1};
    p.args.query_start_loc = bench_upload(loc, (size_t)(requests + 1) * 4);
    p.args.seq_lens = bench_upload(lens, (size_t)requests * 4);
    free(table), free(loc), free(lens);
    char name[96];
    int at = snprintf(name, sizeof name, "attention %lld x %lld queries over %lld, page %lld", (long long)requests, (long long)queries,
                      (long long)length, (long long)page);
    if (kv_heads == 1) snprintf(name + at, sizeof name - (size_t)at, ", %d heads on one", heads);
    double us = bench_us(one_attention, &p, queries > 1 ? 2 : p.copies > 32 ? 32 : p.copies < 4 ? 4 : p.copies);
    double pairs = (double)requests * (double)queries * ((double)length - ((double)queries - 1) / 2);
    bench_line(name, us, queries == 1 ? 2.0 * (double)(requests * length) * kv_heads * DIM * 2 : 0, queries > 1 ? 4.0 * pairs * heads * DIM : 0);
    bench_free_all();
}

void bench_attention(void)
{
    attention(1, 1, 1024, 16, 32, 8);
    attention(8, 1, 1024, 16, 32, 8);
    attention(32, 1, 1024, 16, 32, 8);
    attention(1, 1, 131072, 16, 32, 8);
    attention(1, 1, 131072, 64, 32, 8);
    attention(32, 1, 8192, 16, 32, 8);
    /* What a rank of two has: the tokens shared, or the heads. */
    attention(8, 1, 65536, 16, 32, 1);
    attention(8, 1, 131072, 16, 16, 1);
    attention(1, 2048, 2048, 16, 32, 8);
    attention(1, 8192, 8192, 16, 32, 8);
    attention(1, 32768, 32768, 16, 32, 8);
    attention(1, 2048, 32768, 16, 32, 8);
}

/* ---- between the products ---- */

static weft_status call_norm(void *a, int i, void *stream) { return weft_rms_norm_cuda(a, stream); }
static weft_status call_silu(void *a, int i, void *stream) { return weft_silu_mul_cuda(a, stream); }
static weft_status call_add(void *a, int i, void *stream) { return weft_add_cuda(a, stream); }
static weft_status call_rope(void *a, int i, void *stream) { return weft_rope_cuda(a, stream); }
static weft_status call_sample(void *a, int i, void *stream) { return weft_sample_cuda(a, stream); }

/* MiniMax-M2's experts on one of two ranks: 256 of them, 8 a token, half of each one's width; another
 * choice in each call. */
enum { CHOICES = 8, COUNT = 256, HIDDEN = 3072, WIDTH = 768, TOP = 8 };
struct expert_calls {
    weft_experts_args args;
    int64_t ids;
};

static weft_status call_experts(void *context, int i, void *stream)
{
    struct expert_calls *c = context;
    weft_experts_args a = c->args;
    a.ids += i % CHOICES * c->ids;
    return weft_experts_cuda(&a, stream);
}

/* Eight different experts for each token. The experts used, over all choices. */
static int64_t choose(int32_t *ids, int64_t tokens)
{
    int64_t used = 0;
    uint32_t state = 12345;
    for (int choice = 0; choice < CHOICES; choice++) {
        unsigned char seen[COUNT] = {0};
        for (int64_t t = 0; t < tokens; t++)
            for (int k = 0; k < TOP; k++) {
                int32_t *own = ids + (choice * tokens + t) * TOP, id = 0;
                for (int again = 1; again;) {
                    state = state * 1664525 + 1013904223;
                    id = (int32_t)(state >> 24);
                    again = 0;
                    for (int j = 0; j < k; j++) again |= own[j] == id;
                }
                own[k] = id;
                used += !seen[id];
                seen[id] = 1;
            }
    }
    return used;
}

static void experts(int64_t tokens, weft_dtype w)
{
    struct expert_calls c = {.args = {.tokens = tokens, .top_k = TOP, .count = COUNT, .hidden = HIDDEN, .intermediate = WIDTH, .x_stride = HIDDEN,
                                      .y_stride = HIDDEN, .x_dtype = WEFT_BF16, .w_dtype = w, .y_dtype = WEFT_BF16, .cuda = bench_context()},
                             .ids = tokens * TOP};
    weft_experts_args *a = &c.args;
    int32_t rows[HIDDEN], *ids = malloc((size_t)(CHOICES * tokens * TOP) * 4);
    const double used = (double)choose(ids, tokens) / CHOICES, size = (double)weft_dtype_size(w);
    for (int i = 0; i < HIDDEN; i++) rows[i] = i / 128;
    a->x = bench_random(tokens * HIDDEN, WEFT_BF16, 1), a->y = bench_random(tokens * HIDDEN, WEFT_BF16, 1);
    a->ids = bench_upload(ids, (size_t)(CHOICES * tokens * TOP) * 4), a->weights = bench_random(tokens * TOP, WEFT_F32, 0.3f);
    free(ids);
    const int32_t *scale_row = bench_upload(rows, sizeof rows);
    a->up = (weft_expert_matrix){bench_random((int64_t)COUNT * 2 * WIDTH * HIDDEN, w, 0.02f),
                                 bench_random(COUNT * 12 * 24, WEFT_F32, 0.04f), scale_row, 12, 24, 0};
    a->down = (weft_expert_matrix){bench_random((int64_t)COUNT * HIDDEN * WIDTH, w, 0.02f),
                                   bench_random(COUNT * 24 * 6, WEFT_F32, 0.04f), scale_row, 24, 6, 0};
    size_t bytes = 0;
    if (weft_experts_workspace(a, &bytes) != WEFT_OK) return;
    a->workspace = bench_random((int64_t)bytes / 4 + 1, WEFT_F32, 1);
    char name[96];
    snprintf(name, sizeof name, "experts %s, %lld tokens, 8 of 256, 3072 x 768", weft_dtype_name(w), (long long)tokens);
    bench_line(name, bench_us(call_experts, &c, tokens > 64 ? 2 : CHOICES), tokens > 1024 ? 0 : used * 3 * HIDDEN * WIDTH * size,
               tokens > 64 ? 6.0 * (double)(tokens * TOP) * HIDDEN * WIDTH : 0);
    bench_free_all();
}

void bench_small(void)
{
    static const int64_t tokens[] = {1, 32, 8192};
    char name[96];
    for (int i = 0; i < 3; i++) {
        const int64_t t = tokens[i], cols = 4096;
        const double row = (double)(t * cols) * 2;
        weft_rms_norm_args n = {.rows = t, .cols = cols, .x_stride = cols, .residual_stride = cols, .y_stride = cols, .eps = 1e-5f,
                                .dtype = WEFT_BF16, .gain_dtype = WEFT_BF16};
        n.x = bench_random(t * cols, WEFT_BF16, 1), n.residual = bench_random(t * cols, WEFT_BF16, 1);
        n.gain = bench_random(cols, WEFT_BF16, 1), n.y = bench_random(t * cols, WEFT_BF16, 1);
        snprintf(name, sizeof name, "rms_norm with residual, %lld x 4096", (long long)t);
        bench_line(name, bench_us(call_norm, &n, 20), 4 * row, 0);
        weft_silu_mul_args s = {.rows = t, .cols = 14336, .x_stride = 28672, .y_stride = 14336, .dtype = WEFT_BF16};
        s.x = bench_random(t * 28672, WEFT_BF16, 1), s.y = bench_random(t * 14336, WEFT_BF16, 1);
        snprintf(name, sizeof name, "silu_mul, %lld x 14336", (long long)t);
        bench_line(name, bench_us(call_silu, &s, 20), (double)t * 14336 * 6, 0);
        weft_add_args a = {.rows = t, .cols = cols, .a_stride = cols, .b_stride = cols, .y_stride = cols, .dtype = WEFT_BF16};
        a.a = n.x, a.b = n.residual, a.y = n.y;
        snprintf(name, sizeof name, "add, %lld x 4096", (long long)t);
        bench_line(name, bench_us(call_add, &a, 20), 3 * row, 0);
        int32_t *positions = calloc((size_t)t, 4);
        for (int64_t j = 0; j < t; j++) positions[j] = (int32_t)j;
        weft_rope_args r = {.tokens = t, .heads = 40, .head_dim = 128, .rotary_dim = 128, .token_stride = 6144, .max_positions = 8192,
                            .dtype = WEFT_BF16};
        r.x = bench_random(t * 6144, WEFT_BF16, 1), r.positions = bench_upload(positions, (size_t)t * 4);
        r.cos_sin = bench_random(8192 * 128, WEFT_F32, 1);
        free(positions);
        snprintf(name, sizeof name, "rope, %lld x 40 x 128", (long long)t);
        bench_line(name, bench_us(call_rope, &r, 20), 2 * (double)t * 40 * 128 * 2, 0);
        bench_free_all();
    }
    static const int64_t sampled[][2] = {{1, 1}, {8, 1}, {32, 32}}; /* rows, those that are greedy */
    for (int i = 0; i < 3; i++) {
        const int64_t rows = sampled[i][0], greedy = sampled[i][1];
        float temperature[32];
        for (int64_t r = 0; r < rows; r++) temperature[r] = r < greedy ? 0.0f : 1.0f;
        weft_sample_args s = {.rows = rows, .count = 128256, .logits_stride = 128256, .cuda = bench_context()};
        s.logits = bench_random(rows * 128256, WEFT_F32, 1), s.temperature = bench_upload(temperature, (size_t)rows * 4);
        s.seed = bench_random(2 * rows, WEFT_F32, 1), s.position = bench_random(rows, WEFT_F32, 1);
        s.value = bench_random(rows, WEFT_F32, 1), s.id = bench_random(rows, WEFT_F32, 1);
        char line[64];
        snprintf(line, sizeof line, "sample, %lld rows of 128256, %lld greedy", (long long)rows, (long long)greedy);
        bench_line(line, bench_us(call_sample, &s, 20), 0, 0);
        bench_free_all();
    }
}

void bench_experts(void)
{
    static const int64_t tokens[] = {1, 2, 4, 8, 32, 512, 4096};
    for (int i = 0; i < 7; i++) experts(tokens[i], WEFT_F8E4M3);
    for (int i = 0; i < 7; i += 3) experts(tokens[i], WEFT_BF16);
}
