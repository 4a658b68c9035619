/* kernels/cpu/isa/gemv.c - a few rows of w against a few tokens, vectors along k; each element of w
 * is loaded once for all tokens of a group. Decode-size products and decode attention. */
#include "kernels/cpu/isa/tables.h"

#if defined(WEFT_ISA_avx512)
enum { GROUP_TOKENS = 4 };
#else
enum { GROUP_TOKENS = 3 }; /* 4 rows x 3 tokens + 3 of x + 1 of w: 16 registers */
#endif

INLINE int64_t element_size(weft_dtype dtype)
{
    return dtype == WEFT_F32 ? 4 : dtype == WEFT_F8E4M3 ? 1 : 2;
}

/* The last `count` < LANES elements. Not inlined: one copy serves every shape below. */
static __attribute__((noinline)) vf load_tail(const void *p, weft_dtype dtype, int64_t count)
{
    char part[LANES * 4] = {0};
    memcpy(part, p, (size_t)(count * element_size(dtype)));
    return vf_load_as(part, dtype);
}

static __attribute__((noinline)) float sum_lanes(vf v)
{
    return vf_sum(v);
}

/* acc[r][t] += sums over [begin, end) of k */
INLINE void dot_span(const weft_isa_gemv_args *a, const char *w, const float *x, int64_t begin, int64_t end, weft_dtype dtype,
                     int rows, int tokens, vf acc[4][4])
{
    const int64_t size = element_size(dtype), row_bytes = a->w_stride * size;
    int64_t j = begin;
    for (; j + LANES <= end; j += LANES) {
        vf xs[4];
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) xs[t] = vf_load(x + t * a->x_stride + j);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vf ws = vf_load_as(w + r * row_bytes + j * size, dtype);
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++) acc[r][t] += ws * xs[t];
        }
    }
    if (j == end) return;
    for (int t = 0; t < tokens; t++) {
        vf xs = load_tail(x + t * a->x_stride + j, WEFT_F32, end - j);
        for (int r = 0; r < rows; r++) acc[r][t] += load_tail(w + r * row_bytes + j * size, dtype, end - j) * xs;
    }
}

/* fp8: codes 0x7f and 0xff are NaN, which the fast conversion does not know */
static int row_has_nan(const uint8_t *codes, int64_t count)
{
    unsigned worst = 0;
    for (int64_t i = 0; i < count; i++) {
        unsigned magnitude = codes[i] & 0x7f;
        worst = magnitude > worst ? magnitude : worst;
    }
    return worst == 0x7f;
}

INLINE void dot_block(const weft_isa_gemv_args *a, int64_t row, int64_t token, weft_dtype dtype, int rows, int tokens)
{
    const char *w = (const char *)a->w + row * a->w_stride * element_size(dtype);
    const float *x = a->x + token * a->x_stride;
    vf acc[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) acc[r][t] = (vf){0};
    if (dtype != WEFT_F8E4M3) {
        dot_span(a, w, x, 0, a->k, dtype, rows, tokens, acc);
    } else {
        for (int64_t begin = 0; begin < a->k;) {
            int64_t column = (a->scale_phase + begin) / 128;
            int64_t end = weft__min((column + 1) * 128 - a->scale_phase, a->k);
            vf part[4][4];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int t = 0; t < tokens; t++) part[r][t] = (vf){0};
            dot_span(a, w, x, begin, end, dtype, rows, tokens, part);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                float scale = 256.0f;
                if (a->scale != NULL) scale *= a->scale[a->scale_row[row + r] * a->scale_stride + column];
#pragma GCC unroll 4
                for (int t = 0; t < tokens; t++) acc[r][t] += part[r][t] * scale;
            }
            begin = end;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        int nan = dtype == WEFT_F8E4M3 && row_has_nan((const uint8_t *)w + r * a->w_stride, a->k);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++)
            a->out[(token + t) * a->out_stride + row + r] = nan ? NAN : sum_lanes(acc[r][t]);
    }
}

INLINE void four_rows(const weft_isa_gemv_args *a, int64_t row, weft_dtype dtype)
{
    int64_t token = 0;
    for (; token + GROUP_TOKENS <= a->tokens; token += GROUP_TOKENS) dot_block(a, row, token, dtype, 4, GROUP_TOKENS);
    switch (a->tokens - token) {
    case 3: dot_block(a, row, token, dtype, 4, 3); break;
    case 2: dot_block(a, row, token, dtype, 4, 2); break;
    case 1: dot_block(a, row, token, dtype, 4, 1); break;
    default: break;
    }
}

INLINE void all_rows(const weft_isa_gemv_args *a, weft_dtype dtype)
{
    int64_t row = 0;
    for (; row + 4 <= a->rows; row += 4) four_rows(a, row, dtype);
    for (; row < a->rows; row++)
        for (int64_t token = 0; token < a->tokens; token++) dot_block(a, row, token, dtype, 1, 1);
}

void ISA(gemv)(const weft_isa_gemv_args *a)
{
    switch (a->w_dtype) {
    case WEFT_F32: all_rows(a, WEFT_F32); break;
    case WEFT_BF16: all_rows(a, WEFT_BF16); break;
    case WEFT_F16: all_rows(a, WEFT_F16); break;
    case WEFT_F8E4M3: all_rows(a, WEFT_F8E4M3); break;
    default: break;
    }
}

/* One vector of columns of o for a group of tokens. */
INLINE void weigh_columns(const weft_isa_weigh_args *a, int64_t token, int64_t i, int64_t part, weft_dtype dtype, int tokens)
{
    const int64_t size = element_size(dtype);
    vf acc[4];
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) {
        const float *o = a->o + (token + t) * a->o_stride + i;
        acc[t] = part == LANES ? vf_load(o) : load_tail(o, WEFT_F32, part);
    }
    for (int64_t j = 0; j < a->keys; j++) {
        const char *from = (const char *)a->v + (j * a->v_stride + i) * size;
        vf v = part == LANES ? vf_load_as(from, dtype) : load_tail(from, dtype, part);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) acc[t] += v * a->p[(token + t) * a->p_stride + j];
    }
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) memcpy(a->o + (token + t) * a->o_stride + i, &acc[t], (size_t)part * 4);
}

INLINE void weigh_tokens(const weft_isa_weigh_args *a, int64_t token, weft_dtype dtype, int tokens)
{
    int64_t i = 0;
    for (; i + LANES <= a->dim; i += LANES) weigh_columns(a, token, i, LANES, dtype, tokens);
    if (i < a->dim) weigh_columns(a, token, i, a->dim - i, dtype, tokens);
}

INLINE void weigh_all(const weft_isa_weigh_args *a, weft_dtype dtype)
{
    int64_t token = 0;
    for (; token + 4 <= a->tokens; token += 4) weigh_tokens(a, token, dtype, 4);
    for (; token < a->tokens; token++) weigh_tokens(a, token, dtype, 1);
}

void ISA(weigh)(const weft_isa_weigh_args *a)
{
    switch (a->v_dtype) {
    case WEFT_F32: weigh_all(a, WEFT_F32); break;
    case WEFT_BF16: weigh_all(a, WEFT_BF16); break;
    case WEFT_F16: weigh_all(a, WEFT_F16); break;
    default: break;
    }
}
