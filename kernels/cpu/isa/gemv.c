/* kernels/cpu/isa/gemv.c - a few rows of w against a few tokens, vectors along k; each element of w
 * is loaded once for all tokens of a group. Decode-size products and decode attention. */
#include "kernels/cpu/isa/tables.h"

/* Four tokens at once fill 16 registers with two rows: 8 sums, 4 of x, 1 of w. */
#if defined(WEFT_ISA_avx512)
enum { FOUR_TOKEN_ROWS = 4 };
#else
enum { FOUR_TOKEN_ROWS = 2 };
#endif

static __attribute__((noinline)) vf load_tail(const void *p, weft_dtype dtype, int64_t count)
{
    return vf_load_part(p, dtype, count);
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
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) {
        vf xs = load_tail(x + t * a->x_stride + j, WEFT_F32, end - j);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) acc[r][t] += load_tail(w + r * row_bytes + j * size, dtype, end - j) * xs;
    }
}

/* fp8: codes 0x7f and 0xff are NaN, which the fast conversion does not know */
static int row_has_nan(const uint8_t *codes, int64_t count)
{
    typedef uint8_t bytes __attribute__((vector_size(LANES * 4)));
    bytes found = {0};
    int64_t i = 0;
    for (; i + (int64_t)sizeof found <= count; i += sizeof found) {
        bytes b;
        memcpy(&b, codes + i, sizeof b);
        found |= (bytes)((b & 0x7f) == 0x7f);
    }
    int nan = 0;
    for (size_t j = 0; j < sizeof found; j++) nan |= found[j];
    for (; i < count; i++) nan |= (codes[i] & 0x7f) == 0x7f;
    return nan;
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
    for (int t = 0; t < tokens; t++) {
        float sums[4];
        vf_sum4(acc[0][t], rows > 1 ? acc[1][t] : acc[0][t], rows > 2 ? acc[2][t] : acc[0][t], rows > 2 ? acc[3][t] : acc[0][t], sums);
        memcpy(a->out + (token + t) * a->out_stride + row, sums, (size_t)rows * 4);
    }
    for (int r = 0; r < rows && dtype == WEFT_F8E4M3; r++)
        if (row_has_nan((const uint8_t *)w + r * a->w_stride, a->k))
            for (int t = 0; t < tokens; t++) a->out[(token + t) * a->out_stride + row + r] = NAN;
}

INLINE void four_rows(const weft_isa_gemv_args *a, int64_t row, weft_dtype dtype)
{
    int64_t token = 0;
    for (; token + 4 <= a->tokens; token += 4)
        for (int r = 0; r < 4; r += FOUR_TOKEN_ROWS) dot_block(a, row + r, token, dtype, FOUR_TOKEN_ROWS, 4);
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
