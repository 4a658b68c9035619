/* kernels/cuda/tile.cuh - a tile of a product in plain float32 arithmetic, for any dtypes, sizes and alignments. */
#pragma once

#include "kernels/cuda/cuda.cuh"

namespace weft {

enum { TILE = 64, TILE_K = 16, TILE_THREADS = 256 };

/* The products of TILE rows of x and TILE rows of w, both with k columns, by a block of TILE_THREADS. x(row, column)
 * and w(row, column): elements, 0 in rows that do not exist; put(x_row, w_row, sum) gets every sum. */
template <class X, class W, class Put> __device__ __forceinline__ void plain_tile(int64_t k, X x, W w, Put put)
{
    __shared__ float xs[TILE_K][TILE + 4], ws[TILE_K][TILE + 4];
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float sum[4][4] = {};
    for (int64_t k0 = 0; k0 < k; k0 += TILE_K) {
        for (int i = threadIdx.x; i < TILE * TILE_K; i += TILE_THREADS) {
            const int r = i / TILE_K, j = i % TILE_K;
            const bool in = k0 + j < k;
            xs[j][r] = in ? x(r, k0 + j) : 0.0f;
            ws[j][r] = in ? w(r, k0 + j) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < TILE_K; j++) {
            float a[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = xs[j][ty * 4 + i], b[i] = ws[j][tx + 16 * i];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int l = 0; l < 4; l++) sum[i][l] += a[i] * b[l];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int l = 0; l < 4; l++) put(ty * 4 + i, tx + 16 * l, sum[i][l]);
}

} // namespace weft
