/* kernels/cpu/cpu.h - what the CPU operations share: the inner functions of an instruction set,
 * scratch memory and the checks of arguments. */
#pragma once

#include "kernels/weft_kernels.h"

/* One row block times one token block: out[t * out_stride + r] = sum_j x[t][j] w[r][j].
 * Each sum runs in an order that depends on k alone, never on rows or tokens. */
typedef struct weft_isa_gemv_args {
    const void *w;            /* (rows, k) float32, bfloat16, float16 or float8_e4m3; w_stride elements apart */
    const float *x;           /* (tokens, k), x_stride apart */
    float *out;
    const float *scale;       /* fp8 only, as in weft_linear_args; may be NULL: scale 1 */
    const int32_t *scale_row; /* (rows) */
    int64_t rows, tokens, k;
    int64_t w_stride, x_stride, out_stride, scale_stride, scale_phase;
    weft_dtype w_dtype;
} weft_isa_gemv_args;

/* o[t][i] += sum_j p[t * p_stride + j] * v[j][i] for `keys` rows of v in v_dtype. */
typedef struct weft_isa_weigh_args {
    const void *v;
    const float *p;
    float *o; /* (tokens, dim), o_stride apart */
    int64_t tokens, keys, dim, v_stride, p_stride, o_stride;
    weft_dtype v_dtype;
} weft_isa_weigh_args;

/* The inner functions of one instruction set. "Panel": a float32 matrix (k, lanes) with `lanes`
 * columns side by side, the shape that `tile` multiplies. */
typedef struct weft_isa_table {
    const char *name;
    int lanes;     /* columns of a panel */
    int tile_rows; /* rows that `tile` takes at once */

    /* float32, bfloat16, float16, float8_e4m3 <-> float32; any alignment */
    void (*widen)(float *dst, const void *src, weft_dtype dtype, int64_t count);
    void (*narrow)(void *dst, weft_dtype dtype, const float *src, int64_t count);

    uint64_t (*sum_words)(const void *words, int64_t count); /* 64-bit words */
    float (*sum_squares)(const float *x, int64_t count);
    void (*add)(float *y, const float *x, int64_t count);             /* y += x */
    void (*scale)(float *y, float factor, int64_t count);             /* y *= factor */
    void (*axpy)(float *y, const float *x, float factor, int64_t count); /* y += factor x */
    void (*scale_gain)(float *y, float factor, const float *gain, int64_t count); /* y = y * factor * gain */
    void (*silu_mul)(float *y, const float *gate, const float *up, int64_t count);
    /* x1, x2 rotated in place by c, s */
    void (*rotate)(float *x1, float *x2, const float *c, const float *s, int64_t count);

    void (*gemv)(const weft_isa_gemv_args *args);
    void (*weigh)(const weft_isa_weigh_args *args);
    /* scores of one row: s = exp(s - max'), *max = max' (old and new), *sum = *sum * r + sum(s);
     * returns r = exp(old max - max'). All -inf: s = 0. */
    float (*softmax_row)(float *s, int64_t count, float *max, float *sum);

    /* panel[p][lane] = x[lane][p] for `rows` <= lanes rows; other lanes 0 */
    void (*pack)(float *panel, const float *x, int64_t x_stride, int64_t rows, int64_t k);
    /* c[i][lane] (+)= sum_p a[i * a_row + p * a_step] * panel[p][lane], i < rows (any number) */
    void (*tile)(int64_t k, const float *a, int64_t a_row, int64_t a_step, int64_t rows, const float *panel, float *c,
                 int64_t c_stride, int accumulate);
    /* The same in bfloat16 with float32 sums, where the processor multiplies pairs; NULL elsewhere. The
     * panel holds pairs: panel[p / 2][lane][p % 2], zeros behind an odd k. Rows of a are adjacent. */
    void (*pack_pairs)(uint16_t *panel, const uint16_t *x, int64_t x_stride, int64_t rows, int64_t k);
    void (*tile_pairs)(int64_t k, const uint16_t *a, int64_t a_row, int64_t rows, const uint16_t *panel, float *c,
                       int64_t c_stride, int accumulate);
    /* softmax_row for each lane of scores (keys, lanes), with max, sum, ratio (lanes) */
    void (*softmax_lanes)(float *scores, int64_t keys, float *max, float *sum, float *ratio);
    /* c[i][lane] *= ratio[lane] */
    void (*scale_lanes)(float *c, int64_t rows, const float *ratio);
    /* y[lane * y_stride + i] = c[i][lane] for `count` lanes */
    void (*unpack)(float *y, int64_t y_stride, const float *c, int64_t c_stride, int64_t rows, int64_t count);
} weft_isa_table;

extern const weft_isa_table weft_isa_table_scalar, weft_isa_table_avx2, weft_isa_table_avx512;
/* The best one that this machine runs and WEFT_CPU_ISA allows. */
const weft_isa_table *weft__isa(void);

/* Scratch of the calling thread: 64-byte aligned, contents undefined, valid until the next call
 * in this thread, freed when the thread ends. It only grows. */
weft_status weft__scratch(size_t bytes, void **out);

static inline int weft__is_float(weft_dtype dtype)
{
    return dtype == WEFT_F32 || dtype == WEFT_BF16 || dtype == WEFT_F16;
}
/* INVALID with the names when a size is negative, or a dtype is not one of the three float types. */
weft_status weft__check_sizes(const char *op, const char *names, const int64_t *sizes, int count);
weft_status weft__check_float(const char *op, const char *name, weft_dtype dtype);
/* query_start_loc: ascending from 0, its last at most `tokens`; each seq_len at least its query
 * length (seq_lens NULL: not checked). */
weft_status weft__check_ragged(const char *op, const int32_t *query_start_loc, const int32_t *seq_lens, int64_t requests,
                               int64_t tokens);
weft_status weft__check_pages(const char *op, const weft_page_layout *pages);
/* Of single operations, what both devices ask alike. */
enum { WEFT_MAX_HEAD_DIM = 256, WEFT_MAX_EXPERTS = 65536 };
weft_status weft__check_heads(const weft_attention_args *a);
weft_status weft__check_linear(const weft_linear_args *a);
weft_status weft__check_group_norm(const weft_group_norm_args *a, int apply);
weft_status weft__check_router(const weft_router_args *a);
/* name: "gate and up" or "down"; columns: of the matrix; dtype: of its weights. */
weft_status weft__check_expert_matrix(const weft_expert_matrix *m, const char *name, int64_t columns, weft_dtype dtype);

/* Row-wise work goes through float32 blocks of this many elements on the stack. */
enum { WEFT_BLOCK = 1024 };

static inline const void *weft__at(const void *base, weft_dtype dtype, int64_t index)
{
    return (const char *)base + index * (int64_t)weft_dtype_size(dtype);
}
static inline void *weft__at_mut(void *base, weft_dtype dtype, int64_t index)
{
    return (char *)base + index * (int64_t)weft_dtype_size(dtype);
}
static inline int64_t weft__min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t weft__max(int64_t a, int64_t b) { return a > b ? a : b; }
