/* kernels/cuda/tests/check_rotated.c - rotation, writes into pages and attention of a recorded decode step, which may be one kernel
 * (kernels/cuda/attention_decode_rotate.cu), against the three operations launched one by one: the same bits. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/tests/check.h"
#include "kernels/weft_fused.h"

typedef struct {
    int requests, group, dim, context, page;
    weft_dtype dtype;
    int empty;   /* requests without a token, among the others */
    int behind;  /* tokens behind the last request */
    int odd;     /* pages that are missing, positions that are negative or beyond the table of angles */
    int one;     /* 1: one kernel, where the GPU records steps; 0: not, as not every item is whole */
} shape;

/* Everything that one of the two ways writes. */
typedef struct {
    char *x;
    void *k_cache, *v_cache, *out;
    float *lse;
} state;

typedef struct {
    const shape *s;
    int64_t kv, heads, dim, row, tokens, width; /* row: q, k and v of a token */
    void *hidden, *w;
    int64_t columns;
    int32_t *positions, *loc, *lens, *table;
    int64_t table_rows; /* of cos_sin */
    float *cos_sin;
} inputs;

/* Fewest KV heads with which items fill two blocks of each multiprocessor in whole turns. */
static int64_t kv_heads(int requests)
{
    int device = 0, sms = 1;
    (void)cudaGetDevice(&device);
    (void)cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    for (int64_t kv = 1;; kv++) {
        const int64_t items = requests * kv, turns = (items + 2 * sms - 1) / (2 * sms);
        if (20 * items >= 19 * turns * 2 * sms) return kv;
    }
}

static int records(void)
{
    int device = 0, major = 0;
    (void)cudaGetDevice(&device);
    (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major == 9;
}

static state take_state(const inputs *in)
{
    const weft_dtype dtype = in->s->dtype;
    state st = {twin_take(in->tokens * in->row, dtype, 0), NULL, NULL, twin_take(in->tokens * in->heads * in->dim, dtype, 0), twin_take(in->tokens * in->heads, WEFT_F32, 0)};
    return st;
}

/* Lengths from 1 to context, the first of them the longest; its pages are all there, the others' as many as they need. */
static int64_t fill_requests(inputs *in)
{
    const shape *s = in->s;
    int64_t blocks = 0, t = 0;
    in->width = (s->context + s->page - 1) / s->page;
    in->loc = twin_integers(s->requests + 1, 0, 1), in->lens = twin_integers(s->requests, 0, 1);
    in->positions = twin_integers(in->tokens, 0, 1), in->table = twin_integers(s->requests * in->width, 0, 1);
    for (int r = 0; r < s->requests; r++) {
        const int most = s->context < 400 ? s->context : 400, length = r == 0 ? s->context : 1 + twin_below(most);
        const int gap = s->requests - r <= s->empty || (s->empty > 0 && r == 0);
        in->loc[r] = (int32_t)t, in->lens[r] = length;
        if (!gap || s->requests == 1) in->positions[t++] = length - 1;
        for (int64_t e = 0; e < in->width; e++) in->table[r * in->width + e] = e * s->page < length ? (int32_t)blocks++ : -1;
    }
    in->loc[s->requests] = (int32_t)t;
    for (; t < in->tokens; t++) in->positions[t] = (int32_t)(t % 3) - 1;
    for (int i = 0; s->odd && i < s->requests; i++) {
        if (i % 3 == 1) in->positions[in->loc[i]] = -1;
        if (i % 4 == 2) in->table[i * in->width + (in->lens[i] - 1) / s->page] = -1;
        if (i % 5 == 3) in->table[i * in->width + twin_below(1 + (in->lens[i] - 1) / s->page)] = -1;
    }
    return blocks;
}

#define D(field) d.field = twin_device(a.field)

static weft_linear_args product(const inputs *in, const state *st)
{
    weft_linear_args a = {.x = in->hidden, .w = in->w, .y = st->x, .tokens = in->tokens, .n = in->row, .k = in->columns, .x_stride = in->columns,
                          .w_stride = in->columns, .y_stride = in->row, .x_dtype = in->s->dtype, .w_dtype = in->s->dtype, .y_dtype = in->s->dtype,
                          .cuda = twin_context()}, d;
    d = a, D(x), D(w), D(y);
    return d;
}
static weft_rope_args rotation(const inputs *in, const state *st)
{
    weft_rope_args a = {.x = st->x, .positions = in->positions, .cos_sin = in->cos_sin, .tokens = in->tokens, .heads = in->heads + in->kv,
                        .head_dim = in->dim, .rotary_dim = in->dim, .token_stride = in->row, .max_positions = in->table_rows, .dtype = in->s->dtype}, d;
    d = a, D(x), D(positions), D(cos_sin);
    return d;
}
static weft_kv_write_args writes(const inputs *in, const state *st)
{
    const size_t size = weft_dtype_size(in->s->dtype);
    char *k = st->x + (size_t)(in->heads * in->dim) * size, *v = k + (size_t)(in->kv * in->dim) * size;
    weft_kv_write_args a = {.k = k, .v = v, .k_cache = st->k_cache, .v_cache = st->v_cache, .positions = in->positions, .query_start_loc = in->loc,
                            .pages = {in->table, in->width, in->s->page, 1, 0, 1}, .tokens = in->tokens, .requests = in->s->requests,
                            .num_kv_heads = in->kv, .head_dim = in->dim, .head_dim_v = in->dim, .k_stride = in->row, .v_stride = in->row,
                            .dtype = in->s->dtype, .cache_dtype = in->s->dtype}, d;
    d = a, D(k), D(v), D(k_cache), D(v_cache), D(positions), D(query_start_loc), D(pages.block_table);
    return d;
}
static weft_attention_args attention(const inputs *in, const state *st)
{
    weft_attention_args a = {.q = st->x, .k = st->k_cache, .v = st->v_cache, .out = st->out, .lse = in->s->odd ? NULL : st->lse, .query_start_loc = in->loc,
                             .seq_lens = in->lens, .pages = {in->table, in->width, in->s->page, 1, 0, 1}, .tokens = in->tokens,
                             .requests = in->s->requests, .q_stride = in->row, .out_stride = in->heads * in->dim, .num_heads = (int)in->heads,
                             .num_kv_heads = (int)in->kv, .head_dim = (int)in->dim, .head_dim_v = (int)in->dim, .group_size = in->s->group,
                             .causal = in->s->group % 2, .scale = 1.0f / sqrtf((float)in->dim), .dtype = in->s->dtype, .kv_dtype = in->s->dtype,
                             .max_query_len = 1, .max_seq_len = in->s->context, .cuda = twin_context()}, d;
    d = a, D(q), D(k), D(v), D(out), D(lse), D(query_start_loc), D(seq_lens), D(pages.block_table);
    return d;
}

/* The product, and behind it the three recorded or launched; captured, replayed twice. `kernels`: how many that became. */
static weft_status run(const inputs *in, const state *st, int recorded, size_t *kernels)
{
    weft_fused *fused = NULL;
    cudaStream_t stream = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    void *memory = NULL;
    weft_linear_args l = product(in, st);
    weft_rope_args r = rotation(in, st);
    weft_kv_write_args w = writes(in, st);
    weft_attention_args a = attention(in, st);
    if (cudaMalloc(&memory, WEFT_FUSED_BYTES) || cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) ||
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) || weft_fused_begin(&fused, twin_context(), memory, 0, stream) != WEFT_OK) exit(1);
    weft_status status = WEFT_OK;
    struct {
        weft_fused_op op;
        const void *args;
    } ops[] = {{WEFT_FUSED_linear, &l}, {WEFT_FUSED_rope, &r}, {WEFT_FUSED_kv_write, &w}, {WEFT_FUSED_attention, &a}};
    for (int i = 0; i < 4 && status == WEFT_OK; i++) {
        if ((i == 0 || recorded) && weft_fused_take(fused, ops[i].op, ops[i].args)) continue;
        status = weft_fused_flush(fused);
        if (status != WEFT_OK) break;
        status = i == 0 ? weft_linear_cuda(&l, stream) : i == 1 ? weft_rope_cuda(&r, stream) : i == 2 ? weft_kv_write_cuda(&w, stream) : weft_attention_cuda(&a, stream);
    }
    if (status == WEFT_OK) status = weft_fused_flush(fused);
    cudaError_t error = cudaStreamEndCapture(stream, &graph);
    if (error == cudaSuccess) error = cudaGraphGetNodes(graph, NULL, kernels);
    if (error == cudaSuccess) error = cudaGraphInstantiate(&exec, graph, 0);
    const weft_status ended = weft_fused_end(fused, error == cudaSuccess);
    if (status == WEFT_OK) status = ended;
    for (int replay = 0; replay < 2 && error == cudaSuccess; replay++) error = cudaGraphLaunch(exec, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    if (error != cudaSuccess && status == WEFT_OK) status = weft_fail(WEFT_CUDA, "%s", cudaGetErrorString(error));
    if (exec != NULL) cudaGraphExecDestroy(exec);
    if (graph != NULL) cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    cudaFree(memory);
    return status;
}

static void same(const void *one, const void *other, int64_t count, weft_dtype dtype)
{
    const size_t bytes = (size_t)count * weft_dtype_size(dtype);
    memcpy((void *)(uintptr_t)other, twin_result(one), bytes);
    check_equal(other, bytes);
}

static void compare(const shape *s, int number)
{
    twin_reset(9000 + (uint64_t)number);
    inputs in = {.s = s, .kv = kv_heads(s->requests), .dim = s->dim};
    in.heads = in.kv * s->group, in.row = (in.heads + 2 * in.kv) * s->dim;
    in.tokens = (s->requests == 1 ? 1 : s->requests - s->empty - (s->empty > 0)) + s->behind;
    in.columns = ((8 << 20) / in.row / 64 + 1) * 64; /* enough for the products that a recorded step has */
    const int64_t cache = fill_requests(&in) * in.kv * s->page * s->dim;
    in.table_rows = s->odd ? s->context / 2 + 1 : s->context;
    in.cos_sin = twin_random(in.table_rows * s->dim, WEFT_F32, 0, 0.7f);
    in.hidden = twin_random(in.tokens * in.columns, s->dtype, 0, 1), in.w = twin_random(in.row * in.columns, s->dtype, 0, 1.0f / sqrtf((float)in.columns));
    state plain = take_state(&in), one = take_state(&in);
    const size_t size = weft_dtype_size(s->dtype);
    plain.k_cache = twin_random(cache, s->dtype, 0, 1), plain.v_cache = twin_random(cache, s->dtype, 0, 1);
    one.k_cache = twin_take(cache, s->dtype, 0), one.v_cache = twin_take(cache, s->dtype, 0);
    memcpy(one.k_cache, plain.k_cache, (size_t)cache * size), memcpy(one.v_cache, plain.v_cache, (size_t)cache * size);
    twin_upload();
    size_t kernels = 0, joined = 0;
    weft_status status = run(&in, &plain, 0, &kernels);
    if (status == WEFT_OK) status = run(&in, &one, 1, &joined);
    if (status == WEFT_OK && records() && joined + (s->one ? 2 : 1) != kernels)
        status = weft_fail(WEFT_INTERNAL, "%d requests, group %d, context %d: %zu kernels, recorded %zu", s->requests, s->group, s->context, kernels, joined);
    char name[48];
    snprintf(name, sizeof name, "rotation in attention, %s", weft_dtype_name(s->dtype));
    if (!check_begin(name, status, WEFT_OK)) return;
    same(plain.x, one.x, in.tokens * in.row, s->dtype);
    same(plain.k_cache, one.k_cache, cache, s->dtype);
    same(plain.v_cache, one.v_cache, cache, s->dtype);
    same(plain.out, one.out, in.tokens * in.heads * s->dim, s->dtype);
    same(plain.lse, one.lse, in.tokens * in.heads, WEFT_F32);
}

void check_rotated(void)
{
    static const shape shapes[] = {
        {32, 4, 128, 1024, 16, WEFT_BF16, 0, 0, 0, 1}, {32, 4, 128, 340, 16, WEFT_BF16, 0, 0, 1, 1},  {32, 8, 128, 17, 16, WEFT_F16, 0, 0, 0, 1},
        {33, 3, 128, 1024, 32, WEFT_BF16, 2, 1, 0, 1}, {30, 1, 128, 4095, 16, WEFT_BF16, 0, 0, 0, 1}, {27, 4, 128, 16, 16, WEFT_BF16, 0, 3, 1, 1},
        {24, 8, 128, 340, 48, WEFT_BF16, 3, 1, 0, 1},  {19, 3, 128, 15, 16, WEFT_F16, 0, 1, 0, 1},    {17, 4, 128, 1, 16, WEFT_BF16, 0, 0, 0, 1},
        {32, 4, 128, 4096, 16, WEFT_BF16, 0, 0, 0, 0}, {1, 4, 128, 340, 16, WEFT_BF16, 0, 0, 0, 1},   {2, 1, 64, 4095, 16, WEFT_F16, 0, 0, 0, 1},
        {1, 8, 64, 17, 16, WEFT_BF16, 0, 0, 0, 1},     {3, 3, 64, 1024, 16, WEFT_BF16, 0, 0, 1, 1},   {5, 4, 64, 340, 112, WEFT_F16, 0, 2, 0, 1},
        {8, 7, 64, 16, 16, WEFT_BF16, 1, 0, 0, 1},     {11, 5, 64, 1000, 64, WEFT_BF16, 0, 5, 1, 1},  {16, 1, 64, 15, 16, WEFT_F16, 2, 1, 0, 1},
        {33, 8, 64, 1024, 16, WEFT_BF16, 1, 0, 0, 1},  {29, 2, 64, 97, 16, WEFT_BF16, 0, 3, 0, 1},    {32, 6, 64, 96, 16, WEFT_F16, 0, 0, 1, 1},
    };
    for (int i = 0; i < (int)(sizeof shapes / sizeof shapes[0]); i++)
        if (!check_skips()) compare(&shapes[i], i);
}
