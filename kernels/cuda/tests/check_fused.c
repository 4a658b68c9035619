/* kernels/cuda/tests/check_fused.c - two decoder layers and a head through the recorder (weft_fused.h),
 * captured and replayed twice, against the same operations on the CPU. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/tests/check.h"
#include "kernels/weft_fused.h"

enum { LAYERS = 2, PAGE = 16, VOCAB = 777 };

typedef struct {
    int64_t tokens, requests, hidden, heads, kv, dim, inner, context;
    weft_dtype dtype, w_dtype;
    int bias, merged, apart; /* merged: q, k and v from one product; apart: another operation between norm and product */
    enum { TOGETHER, BATCH, JOIN } kind; /* one launch; products of several tokens as launches of their own; of many, with what follows in their ends */
    int first; /* the list begins with a norm and its product */
} shape;

static weft_fused *fused;
static cudaStream_t stream;
static weft_status failure;

static void note(weft_status status)
{
    if (failure == WEFT_OK) failure = status;
}

/* On the CPU at once, on the device recorded or launched. */
#define BOTH(op, a, d)                                                                  \
    do {                                                                                \
        note(weft_##op##_cpu(&(a), check_pool()));                                      \
        if (!weft_fused_take(fused, WEFT_FUSED_##op, &(d))) {                           \
            note(weft_fused_flush(fused));                                              \
            note(weft_##op##_cuda(&(d), stream));                                       \
        }                                                                               \
    } while (0)
#define D(field) d.field = twin_device(a.field)

static void product(const shape *s, const void *x, const void *w, const void *bias, void *y, int64_t n, int64_t k, weft_dtype y_dtype,
                    const float *scale, const int32_t *scale_row)
{
    weft_linear_args a = {.x = x, .w = w, .bias = bias, .y = y, .scale = scale, .scale_row = scale_row, .tokens = s->tokens, .n = n, .k = k,
                          .x_stride = k, .w_stride = k, .y_stride = n, .scale_stride = (k + 127) / 128, .x_dtype = s->dtype,
                          .w_dtype = scale != NULL ? s->w_dtype : s->dtype, .bias_dtype = s->dtype, .y_dtype = y_dtype, .cuda = twin_context()}, d;
    d = a, D(x), D(w), D(bias), D(y), D(scale), D(scale_row);
    BOTH(linear, a, d);
}

static void norm(const shape *s, const void *x, void *residual, const void *gain, void *y)
{
    weft_rms_norm_args a = {.x = x, .residual = residual, .gain = gain, .y = y, .rows = s->tokens, .cols = s->hidden, .x_stride = s->hidden,
                            .residual_stride = s->hidden, .y_stride = s->hidden, .eps = 1e-5f, .dtype = s->dtype, .gain_dtype = s->dtype}, d;
    d = a, D(x), D(residual), D(gain), D(y);
    BOTH(rms_norm, a, d);
}

struct weights {
    void *qkv, *o, *up, *down, *bias, *up_bias, *k_cache, *v_cache;
};
struct scales {
    float *values;
    int32_t *rows;
};

static void *weight(const shape *s, int64_t n, int64_t k)
{
    return twin_random(n * k, s->w_dtype, 0, s->w_dtype == WEFT_F8E4M3 ? 1.0f : 1.0f / sqrtf((float)k));
}

static void rotate(const shape *s, void *x, int64_t heads, int64_t stride, const int32_t *positions, const float *cos_sin)
{
    weft_rope_args a = {.x = x, .positions = positions, .cos_sin = cos_sin, .tokens = s->tokens, .heads = heads, .head_dim = s->dim,
                        .rotary_dim = s->dim, .token_stride = stride, .max_positions = s->context, .dtype = s->dtype}, d;
    d = a, D(x), D(positions), D(cos_sin);
    BOTH(rope, a, d);
}

static void layers(const shape *s, int number)
{
    const size_t size = weft_dtype_size(s->dtype);
    const int64_t t = s->tokens, qkv = (s->heads + 2 * s->kv) * s->dim, width = (s->context + PAGE - 1) / PAGE;
    (void)twin_context(); /* not while a capture forbids allocations */
    twin_reset(4000 + (uint64_t)number);
    struct weights w[LAYERS];
    const int64_t cache = s->requests * width * s->kv * PAGE * s->dim;
    for (int i = 0; i < LAYERS; i++) {
        w[i] = (struct weights){weight(s, qkv, s->hidden), weight(s, s->hidden, s->heads * s->dim), weight(s, 2 * s->inner, s->hidden),
                                weight(s, s->hidden, s->inner), s->bias ? twin_random(qkv, s->dtype, 0, 0.3f) : NULL,
                                s->bias && s->kind == BATCH ? twin_random(2 * s->inner, s->dtype, 0, 0.3f) : NULL,
                                twin_random(cache, s->dtype, 0, 1), twin_random(cache, s->dtype, 0, 1)};
    }
    struct scales up = {NULL, NULL}; /* one table for all: rows of 128, as many columns as the widest */
    int64_t rows = 2 * s->inner > qkv ? 2 * s->inner : qkv, columns = (s->inner > s->hidden ? s->inner : s->hidden) / 128 + 1;
    if (rows < s->hidden) rows = s->hidden;
    if (s->w_dtype == WEFT_F8E4M3) {
        up.values = twin_random((rows / 128 + 1) * columns, WEFT_F32, 0, 0.06f);
        up.rows = twin_integers(rows, 0, 1);
        for (int64_t i = 0; i < rows; i++) up.rows[i] = (int32_t)(i / 128);
    }
    void *embedding = twin_random(VOCAB * s->hidden, s->dtype, 0, 1), *head = twin_random(VOCAB * s->hidden, s->dtype, 0, 1.0f / sqrtf((float)s->hidden));
    void *gain = twin_random(s->hidden, s->dtype, 0, 1);
    int32_t *ids = twin_integers(t, 0, VOCAB), *positions = twin_integers(t, 0, 1), *loc = twin_integers(s->requests + 1, 0, 1);
    int32_t *lens = twin_integers(s->requests, 0, 1), *table = twin_integers(s->requests * width, 0, 1), *chosen = twin_integers(t, 0, (int)t);
    float *cos_sin = twin_random(s->context * s->dim, WEFT_F32, 0, 0.7f);
    for (int64_t r = 0, at = 0; r < s->requests; r++) {
        const int64_t query = t / s->requests + (r < t % s->requests);
        lens[r] = (int32_t)(t == 1 ? s->context : query + twin_below((int)(s->context - query + 1)));
        for (int64_t i = 0; i < query; i++) positions[at + i] = (int32_t)(lens[r] - query + i);
        at += query;
        loc[r + 1] = (int32_t)at;
    }
    loc[0] = 0;
    for (int64_t i = 0; i < s->requests * width; i++) table[i] = (int32_t)(s->requests * width - 1 - i);
    void *residual = twin_take(t * s->hidden, s->dtype, 0), *normed = twin_take(t * s->hidden, s->dtype, 0), *projected = twin_take(t * qkv, s->dtype, 0);
    void *attended = twin_take(t * s->heads * s->dim, s->dtype, 0), *x = twin_take(t * s->hidden, s->dtype, 0), *both = twin_take(t * 2 * s->inner, s->dtype, 0);
    void *inner = twin_take(t * s->inner, s->dtype, 0), *last = twin_take(t * s->hidden, s->dtype, 0), *rows_of = twin_take(t * s->hidden, s->dtype, 0);
    float *logits = twin_take(t * VOCAB, WEFT_F32, 0), *lse = twin_take(t * s->heads, WEFT_F32, 0);
    void *memory = NULL;
    twin_upload();
    failure = WEFT_OK;
    if (cudaMalloc(&memory, WEFT_FUSED_BYTES) || cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) ||
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)) exit(1);
    if (weft_fused_begin(&fused, twin_context(), s->kind == JOIN ? NULL : memory, s->kind != BATCH, stream) != WEFT_OK) exit(1);
    {
        weft_embedding_args a = {.w = embedding, .ids = ids, .y = residual, .tokens = t, .hidden = s->hidden, .count = VOCAB, .w_dtype = s->dtype,
                                 .y_dtype = s->dtype}, d;
        d = a, D(w), D(ids), D(y);
        BOTH(embedding, a, d);
        if (s->first) note(weft_fused_flush(fused));
    }
    for (int i = 0; i < LAYERS; i++) {
        char *q = projected, *k = q + (size_t)(s->heads * s->dim) * size, *v = k + (size_t)(s->kv * s->dim) * size;
        norm(s, i == 0 ? residual : x, i == 0 ? NULL : residual, gain, normed);
        product(s, normed, w[i].qkv, w[i].bias, projected, qkv, s->hidden, s->dtype, up.values, up.rows);
        if (s->merged) rotate(s, q, s->heads + s->kv, qkv, positions, cos_sin);
        else rotate(s, q, s->heads, qkv, positions, cos_sin), rotate(s, k, s->kv, qkv, positions, cos_sin);
        const weft_page_layout pages = {table, width, PAGE, 1, 0, 1};
        {
            weft_kv_write_args a = {.k = k, .v = v, .k_cache = w[i].k_cache, .v_cache = w[i].v_cache, .positions = positions, .query_start_loc = loc,
                                    .pages = pages, .tokens = t, .requests = s->requests, .num_kv_heads = s->kv, .head_dim = s->dim,
                                    .head_dim_v = s->dim, .k_stride = qkv, .v_stride = qkv, .dtype = s->dtype, .cache_dtype = s->dtype}, d;
            d = a, D(k), D(v), D(k_cache), D(v_cache), D(positions), D(query_start_loc), D(pages.block_table);
            BOTH(kv_write, a, d);
        }
        {
            weft_attention_args a = {.q = q, .k = w[i].k_cache, .v = w[i].v_cache, .out = attended, .lse = i == 0 ? lse : NULL, .query_start_loc = loc,
                                     .seq_lens = lens, .pages = pages, .tokens = t, .requests = s->requests, .q_stride = qkv,
                                     .out_stride = s->heads * s->dim, .num_heads = (int)s->heads, .num_kv_heads = (int)s->kv, .head_dim = (int)s->dim,
                                     .head_dim_v = (int)s->dim, .group_size = (int)(s->heads / s->kv), .causal = 1,
                                     .scale = 1.0f / sqrtf((float)s->dim), .dtype = s->dtype, .kv_dtype = s->dtype,
                                     .max_query_len = (t + s->requests - 1) / s->requests, .max_seq_len = s->context, .cuda = twin_context()}, d;
            d = a, D(q), D(k), D(v), D(out), D(lse), D(query_start_loc), D(seq_lens), D(pages.block_table);
            BOTH(attention, a, d);
        }
        product(s, attended, w[i].o, NULL, x, s->hidden, s->heads * s->dim, s->dtype, up.values, up.rows);
        norm(s, x, residual, gain, normed);
        if (s->apart) {
            weft_add_args a = {.a = normed, .b = residual, .y = last, .rows = t, .cols = s->hidden, .a_stride = s->hidden, .b_stride = s->hidden,
                               .y_stride = s->hidden, .dtype = s->dtype}, d;
            d = a, D(a), D(b), D(y);
            BOTH(add, a, d);
        }
        product(s, normed, w[i].up, w[i].up_bias, both, 2 * s->inner, s->hidden, s->dtype, up.values, up.rows);
        {
            weft_silu_mul_args a = {.x = both, .y = inner, .rows = t, .cols = s->inner, .x_stride = 2 * s->inner, .y_stride = s->inner, .dtype = s->dtype}, d;
            d = a, D(x), D(y);
            BOTH(silu_mul, a, d);
        }
        product(s, inner, w[i].down, NULL, x, s->hidden, s->inner, s->dtype, up.values, up.rows);
    }
    norm(s, x, residual, gain, last);
    {
        weft_gather_rows_args a = {.x = last, .indices = chosen, .y = rows_of, .count = t, .cols = s->hidden, .x_stride = s->hidden,
                                   .y_stride = s->hidden, .x_rows = t, .dtype = s->dtype}, d;
        d = a, D(x), D(indices), D(y);
        BOTH(gather_rows, a, d);
    }
    product(s, rows_of, head, NULL, logits, VOCAB, s->hidden, WEFT_F32, NULL, NULL);
    note(weft_fused_flush(fused));
    cudaGraph_t graph = NULL;
    cudaGraphExec_t run = NULL;
    cudaError_t error = cudaStreamEndCapture(stream, &graph);
    if (error == cudaSuccess) error = cudaGraphInstantiate(&run, graph, 0);
    note(weft_fused_end(fused, error == cudaSuccess));
    for (int replay = 0; replay < 2 && error == cudaSuccess; replay++) {
        error = cudaGraphLaunch(run, stream);
        if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    }
    if (error != cudaSuccess) note(weft_fail(WEFT_CUDA, "%s", cudaGetErrorString(error)));
    char name[48];
    snprintf(name, sizeof name, "%s, %s x %s", s->kind == JOIN ? "joined products" : "fused step", weft_dtype_name(s->dtype), weft_dtype_name(s->w_dtype));
    if (check_begin(name, failure, WEFT_OK)) {
        const double one = 3 * check_tolerance(s->dtype), deep = 6 * one;
        check_values(lse, WEFT_F32, t * s->heads, deep);
        check_values(w[0].k_cache, s->dtype, cache, one);
        check_values(w[0].v_cache, s->dtype, cache, one);
        check_values(w[1].k_cache, s->dtype, cache, deep);
        check_values(residual, s->dtype, t * s->hidden, deep);
        if (s->kind == JOIN) check_values(x, s->dtype, t * s->hidden, deep);
        if (s->kind == JOIN || (s->kind == BATCH && s->w_dtype == s->dtype)) check_values(normed, s->dtype, t * s->hidden, deep);
        check_values(projected, s->dtype, t * qkv, deep);
        check_values(attended, s->dtype, t * s->heads * s->dim, deep);
        check_values(both, s->dtype, t * 2 * s->inner, deep);
        check_values(inner, s->dtype, t * s->inner, deep);
        check_values(last, s->dtype, t * s->hidden, deep);
        check_values(logits, WEFT_F32, t * VOCAB, deep);
    }
    if (run != NULL) cudaGraphExecDestroy(run);
    if (graph != NULL) cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    cudaFree(memory);
}

static void each(const shape *shapes, size_t count, int seed)
{
    for (int i = 0; i < (int)count; i++)
        if (!check_skips()) layers(&shapes[i], seed + i);
}

void check_fused(void)
{
    static const shape shapes[] = {
        {1, 1, 512, 4, 2, 128, 1408, 300, WEFT_BF16, WEFT_BF16, 0, 1, 0, TOGETHER, 0},
        {1, 1, 4096, 32, 8, 128, 3584, 1000, WEFT_BF16, WEFT_BF16, 0, 1, 0, TOGETHER, 0},
        {3, 3, 1024, 8, 8, 64, 1000, 77, WEFT_BF16, WEFT_BF16, 1, 1, 0, TOGETHER, 0},
        {8, 8, 768, 12, 4, 64, 2080, 200, WEFT_F16, WEFT_F16, 1, 0, 1, TOGETHER, 0},
        {2, 2, 2048, 16, 2, 128, 4096, 40, WEFT_BF16, WEFT_F8E4M3, 0, 1, 1, TOGETHER, 0},
        {1, 1, 4096, 32, 8, 128, 14336, 500, WEFT_BF16, WEFT_F8E4M3, 0, 1, 0, TOGETHER, 0},
        {5, 2, 640, 10, 2, 64, 1280, 90, WEFT_F16, WEFT_F8E4M3, 1, 1, 0, TOGETHER, 0},
        {7, 4, 96, 6, 3, 32, 160, 60, WEFT_BF16, WEFT_BF16, 0, 1, 0, TOGETHER, 0},
        {1, 1, 100, 2, 1, 20, 130, 30, WEFT_BF16, WEFT_BF16, 0, 1, 0, TOGETHER, 0},
        {8, 8, 3072, 24, 8, 128, 2816, 300, WEFT_BF16, WEFT_BF16, 1, 1, 0, BATCH, 0},
        {2, 2, 3072, 24, 8, 128, 2816, 700, WEFT_BF16, WEFT_BF16, 0, 1, 1, BATCH, 0},
        {7, 4, 2944, 20, 4, 128, 3008, 200, WEFT_F16, WEFT_F16, 1, 1, 0, BATCH, 0},
        {5, 5, 2944, 24, 8, 128, 2912, 90, WEFT_BF16, WEFT_BF16, 0, 0, 0, BATCH, 0},
        {6, 6, 2944, 48, 8, 64, 2900, 60, WEFT_BF16, WEFT_BF16, 0, 1, 0, BATCH, 0},
        {16, 16, 3072, 24, 8, 128, 2752, 100, WEFT_BF16, WEFT_BF16, 0, 1, 1, BATCH, 0},
        {1, 1, 1024, 8, 2, 128, 1408, 700, WEFT_BF16, WEFT_BF16, 1, 1, 0, TOGETHER, 1},
        {1, 1, 2048, 16, 1, 128, 1408, 1, WEFT_F16, WEFT_F16, 0, 1, 1, TOGETHER, 1},
        {1, 1, 1024, 8, 8, 128, 1408, 16, WEFT_BF16, WEFT_BF16, 0, 1, 0, TOGETHER, 0},
        {1, 1, 1024, 8, 8, 128, 1408, 17, WEFT_BF16, WEFT_BF16, 0, 1, 0, TOGETHER, 0},
        {1, 1, 1024, 8, 4, 128, 1408, 128, WEFT_BF16, WEFT_BF16, 0, 1, 0, TOGETHER, 0},
        {1, 1, 1024, 8, 4, 128, 1408, 129, WEFT_BF16, WEFT_BF16, 0, 1, 0, TOGETHER, 0},
        {1, 1, 1024, 8, 2, 128, 1408, 2300, WEFT_F16, WEFT_F16, 0, 1, 0, TOGETHER, 0},
        {1, 1, 1000, 3, 1, 128, 1000, 333, WEFT_BF16, WEFT_BF16, 1, 1, 0, TOGETHER, 0},
        {4, 4, 2048, 16, 4, 128, 3584, 120, WEFT_BF16, WEFT_F8E4M3, 1, 1, 0, BATCH, 0},
        {8, 5, 1024, 16, 8, 64, 1408, 60, WEFT_BF16, WEFT_F8E4M3, 1, 0, 0, BATCH, 0},
        {1, 1, 640, 5, 1, 128, 384, 40, WEFT_BF16, WEFT_F8E4M3, 1, 1, 0, BATCH, 0},
        {3, 2, 1152, 9, 3, 128, 1000, 90, WEFT_BF16, WEFT_F8E4M3, 0, 1, 0, BATCH, 0},
        {1, 1, 1024, 8, 2, 128, 1408, 1100, WEFT_BF16, WEFT_F8E4M3, 1, 1, 0, BATCH, 1},
        {1, 1, 2176, 8, 8, 128, 1152, 2300, WEFT_BF16, WEFT_F8E4M3, 0, 1, 0, BATCH, 0},
        {1, 1, 512, 24, 4, 128, 4992, 17, WEFT_BF16, WEFT_F8E4M3, 0, 1, 1, BATCH, 0},
        {1, 1, 384, 4, 1, 128, 256, 1, WEFT_BF16, WEFT_F8E4M3, 1, 1, 0, BATCH, 0},
        {7, 7, 1536, 24, 2, 64, 128, 33, WEFT_BF16, WEFT_F8E4M3, 0, 1, 1, TOGETHER, 0},
        {29, 20, 3072, 24, 8, 128, 2816, 90, WEFT_BF16, WEFT_BF16, 1, 1, 0, BATCH, 0},
        {32, 32, 2944, 24, 8, 128, 2952, 60, WEFT_BF16, WEFT_BF16, 0, 1, 0, BATCH, 0},
        {30, 30, 2944, 24, 4, 128, 2880, 60, WEFT_F16, WEFT_F16, 1, 1, 0, BATCH, 0},
        {17, 17, 2944, 24, 4, 128, 2880, 60, WEFT_F16, WEFT_F16, 0, 1, 0, BATCH, 0},
        {1, 1, 1024, 32, 8, 128, 1408, 1024, WEFT_BF16, WEFT_F8E4M3, 0, 1, 0, BATCH, 0},
        {1, 1, 1024, 16, 8, 128, 1408, 1025, WEFT_BF16, WEFT_F8E4M3, 0, 1, 0, BATCH, 0},
        {1, 1, 1024, 16, 2, 128, 1408, 1089, WEFT_BF16, WEFT_F8E4M3, 0, 1, 0, BATCH, 0},
        {1, 1, 1024, 32, 8, 128, 1408, 2048, WEFT_BF16, WEFT_F8E4M3, 0, 1, 0, BATCH, 0},
        {1, 1, 1024, 12, 4, 128, 1408, 2049, WEFT_BF16, WEFT_F8E4M3, 0, 1, 0, BATCH, 0},
        {1, 1, 1024, 24, 3, 128, 1408, 4001, WEFT_BF16, WEFT_F8E4M3, 0, 1, 0, BATCH, 0},
        {1, 1, 1024, 20, 5, 128, 1408, 80, WEFT_BF16, WEFT_F8E4M3, 0, 1, 0, BATCH, 0},
    };
    each(shapes, sizeof shapes / sizeof shapes[0], 0);
}

void check_joined(void)
{
    static const shape shapes[] = {
        {300, 3, 512, 4, 2, 128, 1408, 400, WEFT_BF16, WEFT_BF16, 0, 1, 0, JOIN, 0},
        {257, 2, 1016, 6, 3, 128, 1000, 300, WEFT_F16, WEFT_F16, 0, 1, 1, JOIN, 0},
        {130, 1, 640, 8, 4, 64, 776, 300, WEFT_BF16, WEFT_BF16, 0, 1, 0, JOIN, 0},
        {515, 4, 384, 3, 1, 128, 520, 200, WEFT_BF16, WEFT_BF16, 0, 0, 0, JOIN, 0},
        {261, 2, 768, 12, 4, 64, 1096, 200, WEFT_F16, WEFT_F16, 1, 1, 0, JOIN, 0},
        {9, 3, 96, 2, 1, 32, 100, 60, WEFT_BF16, WEFT_BF16, 0, 1, 0, JOIN, 0},
    };
    each(shapes, sizeof shapes / sizeof shapes[0], 100);
}
