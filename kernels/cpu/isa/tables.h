/* kernels/cpu/isa/tables.h - the inner functions of this instruction set, gathered by table.c. */
#pragma once

#include "kernels/cpu/isa/vec.h"

/* Two vectors of columns beside as many rows as the registers hold. */
#if defined(WEFT_ISA_avx512)
enum { TILE_ROWS = 12 };
#else
enum { TILE_ROWS = 6 };
#endif
enum { PANEL = 2 * LANES };

void ISA(widen)(float *dst, const void *src, weft_dtype dtype, int64_t count);
void ISA(narrow)(void *dst, weft_dtype dtype, const float *src, int64_t count);
uint64_t ISA(sum_words)(const void *words, int64_t count);
float ISA(sum_squares)(const float *x, int64_t count);
void ISA(add)(float *y, const float *x, int64_t count);
void ISA(scale)(float *y, float factor, int64_t count);
void ISA(axpy)(float *y, const float *x, float factor, int64_t count);
void ISA(scale_gain)(float *y, float factor, const float *gain, int64_t count);
void ISA(silu_mul)(float *y, const float *gate, const float *up, int64_t count);
void ISA(rotate)(float *x1, float *x2, const float *c, const float *s, int64_t count);
void ISA(gemv)(const weft_isa_gemv_args *args);
void ISA(weigh)(const weft_isa_weigh_args *args);
float ISA(softmax_row)(float *s, int64_t count, float *max, float *sum);
void ISA(pack)(float *panel, const float *x, int64_t x_stride, int64_t rows, int64_t k);
void ISA(tile)(int64_t k, const float *a, int64_t a_row, int64_t a_step, int64_t rows, const float *panel, float *c,
               int64_t c_stride, int accumulate);
#if defined(WEFT_ISA_avx512)
void ISA(pack_pairs)(uint16_t *panel, const uint16_t *x, int64_t x_stride, int64_t rows, int64_t k);
void ISA(tile_pairs)(int64_t k, const uint16_t *a, int64_t a_row, int64_t rows, const uint16_t *panel, float *c, int64_t c_stride,
                     int accumulate);
#endif
void ISA(softmax_lanes)(float *scores, int64_t keys, float *max, float *sum, float *ratio);
void ISA(scale_lanes)(float *c, int64_t rows, const float *ratio);
void ISA(unpack)(float *y, int64_t y_stride, const float *c, int64_t c_stride, int64_t rows, int64_t count);
