/* kernels/cpu/isa/gemm_pairs.c - the inner product of large bfloat16 matrices by instructions that
 * multiply pairs and add them to float32. */
#include "kernels/cpu/isa/tables.h"

#if defined(WEFT_ISA_avx512)

void ISA(pack_pairs)(uint16_t *panel, const uint16_t *x, int64_t x_stride, int64_t rows, int64_t k)
{
    if (rows < PANEL || k % 2 != 0) memset(panel, 0, (size_t)((k + 1) / 2 * 2 * PANEL) * 2);
    for (int64_t lane = 0; lane < rows; lane++) {
        const uint16_t *from = x + lane * x_stride;
        for (int64_t p = 0; p + 2 <= k; p += 2) memcpy(panel + p * PANEL + lane * 2, from + p, 4);
        if (k % 2 != 0) memcpy(panel + (k - 1) * PANEL + lane * 2, from + k - 1, 2);
    }
}

INLINE void pair_step(int rows, const uint16_t *a, int64_t a_row, const uint16_t *panel, int count, vf acc[TILE_ROWS][2])
{
    __m512bh b0 = (__m512bh)vf_load(panel), b1 = (__m512bh)vf_load(panel + PANEL);
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        int32_t pair = 0;
        memcpy(&pair, a + i * a_row, (size_t)count * 2);
        __m512bh s = (__m512bh)_mm512_set1_epi32(pair);
        acc[i][0] = (vf)_mm512_dpbf16_ps((__m512)acc[i][0], b0, s);
        acc[i][1] = (vf)_mm512_dpbf16_ps((__m512)acc[i][1], b1, s);
    }
}

INLINE void pairs_of(int rows, int64_t k, const uint16_t *a, int64_t a_row, const uint16_t *panel, float *c, int64_t c_stride,
                     int accumulate)
{
    vf acc[TILE_ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
        for (int h = 0; h < 2; h++) acc[i][h] = accumulate ? vf_load(c + i * c_stride + h * LANES) : (vf){0};
    for (; k >= 2; k -= 2, a += 2, panel += 2 * PANEL) pair_step(rows, a, a_row, panel, 2, acc);
    if (k == 1) pair_step(rows, a, a_row, panel, 1, acc);
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
        for (int h = 0; h < 2; h++) vf_store(c + i * c_stride + h * LANES, acc[i][h]);
}

void ISA(tile_pairs)(int64_t k, const uint16_t *a, int64_t a_row, int64_t rows, const uint16_t *panel, float *c, int64_t c_stride,
                     int accumulate)
{
    for (; rows >= TILE_ROWS; rows -= TILE_ROWS) {
        pairs_of(TILE_ROWS, k, a, a_row, panel, c, c_stride, accumulate);
        a += TILE_ROWS * a_row;
        c += TILE_ROWS * c_stride;
    }
    for (; rows >= 4; rows -= 4) {
        pairs_of(4, k, a, a_row, panel, c, c_stride, accumulate);
        a += 4 * a_row;
        c += 4 * c_stride;
    }
    for (; rows > 0; rows--) {
        pairs_of(1, k, a, a_row, panel, c, c_stride, accumulate);
        a += a_row;
        c += c_stride;
    }
}

#endif
