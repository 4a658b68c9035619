/* kernels/cuda/linear_skinny.cuh - the products of up to 8 tokens on tensor cores, for kernels that do
 * something else with the sums (linear_skinny.cu says how they work). */
#pragma once

#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/mma.cuh"

namespace weft {

enum { SKINNY_UNROLL = 4 };

/* What the warps of a block have summed: c of all, as mma's, for 16 rows and 8 tokens. */
template <int WARPS> struct SkinnySums {
    float part[WARPS][8][17];

    __device__ __forceinline__ void put(const float (&c)[4])
    {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
        part[warp][2 * q][g] = c[0];
        part[warp][2 * q + 1][g] = c[1];
        part[warp][2 * q][g + 8] = c[2];
        part[warp][2 * q + 1][g + 8] = c[3];
    }
    /* Of token t and row r, the warps in order; behind a barrier. */
    __device__ __forceinline__ float sum(int t, int r) const
    {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += part[w][t][r];
        return sum;
    }
};

/* A piece: SKINNY_UNROLL times 32 columns of two rows. */
template <class T> struct Piece {
    uint4 w[SKINNY_UNROLL][2];
    __device__ __forceinline__ void take(const T *w0, const T *w1, int k, int end)
    {
#pragma unroll
        for (int u = 0; u < SKINNY_UNROLL; u++) {
            const bool in = k + 32 * u < end;
            w[u][0] = stream_in(w0 + k + 32 * u, in);
            w[u][1] = stream_in(w1 + k + 32 * u, in);
        }
    }
};

/* c: zero at first; the sums of this warp. wait: called once the first weights are asked for, before x is read. */
template <class T, int WARPS, class F> __device__ __forceinline__ void skinny_sums(const weft_linear_args &a, int64_t row0, float (&c)[4], F wait)
{
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4, k = (int)a.k;
    const T *w0 = (const T *)a.w + min(row0 + g, a.n - 1) * a.w_stride, *w1 = (const T *)a.w + min(row0 + g + 8, a.n - 1) * a.w_stride;
    const T *x = (const T *)a.x + (int64_t)g * a.x_stride;
    const bool token = g < a.tokens;
    constexpr int STEP = WARPS * SKINNY_UNROLL * 32;
    Piece<T> now, next;
    int at = warp * SKINNY_UNROLL * 32 + 8 * q;
    now.take(w0, w1, at, k);
    wait();
    for (; at - 8 * q < k; at += STEP) {
        uint4 b[SKINNY_UNROLL];
#pragma unroll
        for (int u = 0; u < SKINNY_UNROLL; u++)
            b[u] = token && at + 32 * u < k ? *(const uint4 *)(x + at + 32 * u) : make_uint4(0, 0, 0, 0);
        next.take(w0, w1, at + STEP, k);
#pragma unroll
        for (int u = 0; u < SKINNY_UNROLL; u++) {
            mma<T>(c, now.w[u][0].x, now.w[u][1].x, now.w[u][0].y, now.w[u][1].y, b[u].x, b[u].y);
            mma<T>(c, now.w[u][0].z, now.w[u][1].z, now.w[u][0].w, now.w[u][1].w, b[u].z, b[u].w);
        }
        now = next;
    }
}

/* The same for e4m3 with one scale for 128 columns: a piece is two such blocks. */
struct Piece8 {
    uint4 w[4][2];
    float scale[2][2];
    __device__ __forceinline__ void take(const uint8_t *w0, const uint8_t *w1, const float *s0, const float *s1, int block, int q, int end)
    {
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const int k = block * 128 + u * 64 + 16 * q;
            const bool in = k < end;
            w[u][0] = stream_in(w0 + k, in);
            w[u][1] = stream_in(w1 + k, in);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool in = (block + i) * 128 < end;
            scale[i][0] = in ? __ldg(s0 + block + i) : 0.0f;
            scale[i][1] = in ? __ldg(s1 + block + i) : 0.0f;
        }
    }
};

template <class T> __device__ __forceinline__ void mma_e4m3(float (&c)[4], uint32_t w0, uint32_t w1, uint32_t b0, uint32_t b1)
{
    uint32_t a0, a1, a2, a3;
    widen_e4m3_pairs(w0, a0, a2, T());
    widen_e4m3_pairs(w1, a1, a3, T());
    mma<T>(c, a0, a1, a2, a3, b0, b1);
}

template <class T, int WARPS, class F> __device__ __forceinline__ void skinny_sums_fp8(const weft_linear_args &a, int64_t row0, float (&c)[4], F wait)
{
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4, k = (int)a.k;
    const int64_t r0 = min(row0 + g, a.n - 1), r1 = min(row0 + g + 8, a.n - 1);
    const uint8_t *w0 = (const uint8_t *)a.w + r0 * a.w_stride, *w1 = (const uint8_t *)a.w + r1 * a.w_stride;
    const float *s0 = a.scale + a.scale_row[r0] * a.scale_stride + a.scale_col_phase / 128;
    const float *s1 = a.scale + a.scale_row[r1] * a.scale_stride + a.scale_col_phase / 128;
    const T *x = (const T *)a.x + (int64_t)g * a.x_stride;
    const bool token = g < a.tokens;
    Piece8 now, next;
    int block = 2 * warp;
    now.take(w0, w1, s0, s1, block, q, k);
    wait();
    for (; block * 128 < k; block += 2 * WARPS) {
        next.take(w0, w1, s0, s1, block + 2 * WARPS, q, k);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int u = 2 * i; u < 2 * i + 2; u++) {
                const int at = block * 128 + u * 64 + 16 * q;
                const bool in = token && at < k;
                const uint4 b0 = in ? *(const uint4 *)(x + at) : make_uint4(0, 0, 0, 0);
                const uint4 b1 = in ? *(const uint4 *)(x + at + 8) : make_uint4(0, 0, 0, 0);
                mma_e4m3<T>(part, now.w[u][0].x, now.w[u][1].x, b0.x, b0.y);
                mma_e4m3<T>(part, now.w[u][0].y, now.w[u][1].y, b0.z, b0.w);
                mma_e4m3<T>(part, now.w[u][0].z, now.w[u][1].z, b1.x, b1.y);
                mma_e4m3<T>(part, now.w[u][0].w, now.w[u][1].w, b1.z, b1.w);
            }
            c[0] += now.scale[i][0] * part[0];
            c[1] += now.scale[i][0] * part[1];
            c[2] += now.scale[i][1] * part[2];
            c[3] += now.scale[i][1] * part[3];
        }
        now = next;
    }
}

} // namespace weft
