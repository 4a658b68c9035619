/* kernels/cpu/isa/weigh.c - sums of rows of v by the weights of a few tokens: decode attention. Each
 * row of v is loaded once for all tokens of a group. */
#include "kernels/cpu/isa/tables.h"

/* Columns [i, i + vectors * LANES) of o for a group of tokens. */
INLINE void weigh_columns(const weft_isa_weigh_args *a, int64_t token, int64_t i, weft_dtype dtype, int tokens, int vectors)
{
    const int64_t size = element_size(dtype), row_bytes = a->v_stride * size;
    const char *from = (const char *)a->v + i * size;
    const float *p = a->p + token * a->p_stride;
    float *o = a->o + token * a->o_stride + i;
    vf acc[4][2];
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
        for (int c = 0; c < vectors; c++) acc[t][c] = vf_load(o + t * a->o_stride + c * LANES);
    for (int64_t j = 0; j < a->keys; j++, from += row_bytes) {
        vf v[2];
#pragma GCC unroll 2
        for (int c = 0; c < vectors; c++) v[c] = vf_load_as(from + c * LANES * size, dtype);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            vf weight = vf_all(p[t * a->p_stride + j]);
#pragma GCC unroll 2
            for (int c = 0; c < vectors; c++) acc[t][c] += v[c] * weight;
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
        for (int c = 0; c < vectors; c++) vf_store(o + t * a->o_stride + c * LANES, acc[t][c]);
}

/* The columns behind the last whole vector. */
static __attribute__((noinline)) void weigh_tail(const weft_isa_weigh_args *a, int64_t token, int64_t i)
{
    float *o = a->o + token * a->o_stride + i;
    vf acc = vf_load_part(o, WEFT_F32, a->dim - i);
    for (int64_t j = 0; j < a->keys; j++) {
        const char *from = (const char *)a->v + (j * a->v_stride + i) * element_size(a->v_dtype);
        acc += vf_load_part(from, a->v_dtype, a->dim - i) * a->p[token * a->p_stride + j];
    }
    memcpy(o, &acc, (size_t)(a->dim - i) * 4);
}

INLINE void weigh_tokens(const weft_isa_weigh_args *a, int64_t token, weft_dtype dtype, int tokens)
{
    int64_t i = 0;
    for (; i + 2 * LANES <= a->dim; i += 2 * LANES) weigh_columns(a, token, i, dtype, tokens, 2);
    for (; i + LANES <= a->dim; i += LANES) weigh_columns(a, token, i, dtype, tokens, 1);
    for (int t = 0; t < tokens && i < a->dim; t++) weigh_tail(a, token + t, i);
}

INLINE void weigh_all(const weft_isa_weigh_args *a, weft_dtype dtype)
{
    int64_t token = 0;
    for (; token + 4 <= a->tokens; token += 4) weigh_tokens(a, token, dtype, 4);
    for (; token + 2 <= a->tokens; token += 2) weigh_tokens(a, token, dtype, 2);
    if (token < a->tokens) weigh_tokens(a, token, dtype, 1);
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
