/* kernels/cpu/isa/gemm.c - the inner product of large matrices: rows of one operand, read element by
 * element, against a panel of the other that holds 2 vectors of columns. */
#include "kernels/cpu/isa/tables.h"

void ISA(pack)(float *panel, const float *x, int64_t x_stride, int64_t rows, int64_t k)
{
    if (rows < PANEL) memset(panel, 0, (size_t)(k * PANEL) * 4);
    for (int64_t lane = 0; lane < rows; lane++)
        for (int64_t p = 0; p < k; p++) panel[p * PANEL + lane] = x[lane * x_stride + p];
}

void ISA(unpack)(float *y, int64_t y_stride, const float *c, int64_t c_stride, int64_t rows, int64_t count)
{
    for (int64_t lane = 0; lane < count; lane++)
        for (int64_t i = 0; i < rows; i++) y[lane * y_stride + i] = c[i * c_stride + lane];
}

INLINE void tile_of(int rows, int64_t k, const float *a, int64_t a_row, int64_t a_step, const float *panel, float *c,
                    int64_t c_stride, int accumulate)
{
    vf acc[TILE_ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
        for (int h = 0; h < 2; h++) acc[i][h] = accumulate ? vf_load(c + i * c_stride + h * LANES) : (vf){0};
    for (int64_t p = 0; p < k; p++) {
        vf b0 = vf_load(panel), b1 = vf_load(panel + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            vf s = vf_all(a[i * a_row]);
            acc[i][0] += s * b0;
            acc[i][1] += s * b1;
        }
        panel += PANEL;
        a += a_step;
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
        for (int h = 0; h < 2; h++) vf_store(c + i * c_stride + h * LANES, acc[i][h]);
}

void ISA(tile)(int64_t k, const float *a, int64_t a_row, int64_t a_step, int64_t rows, const float *panel, float *c,
               int64_t c_stride, int accumulate)
{
    for (; rows >= TILE_ROWS; rows -= TILE_ROWS) {
        tile_of(TILE_ROWS, k, a, a_row, a_step, panel, c, c_stride, accumulate);
        a += TILE_ROWS * a_row;
        c += TILE_ROWS * c_stride;
    }
#if defined(WEFT_ISA_avx512)
    for (; rows >= 6; rows -= 6) {
        tile_of(6, k, a, a_row, a_step, panel, c, c_stride, accumulate);
        a += 6 * a_row;
        c += 6 * c_stride;
    }
#endif
    switch (rows) {
    case 5: tile_of(5, k, a, a_row, a_step, panel, c, c_stride, accumulate); break;
    case 4: tile_of(4, k, a, a_row, a_step, panel, c, c_stride, accumulate); break;
    case 3: tile_of(3, k, a, a_row, a_step, panel, c, c_stride, accumulate); break;
    case 2: tile_of(2, k, a, a_row, a_step, panel, c, c_stride, accumulate); break;
    case 1: tile_of(1, k, a, a_row, a_step, panel, c, c_stride, accumulate); break;
    default: break;
    }
}
