/* kernels/cuda/linear_any.cu - products of any dtypes, sizes and alignments, in float32. */
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/tile.cuh"

namespace weft {

/* w[i][j] in float32 */
__device__ __forceinline__ float weight(const weft_linear_args &a, int64_t i, int64_t j)
{
    float w = load(a.w, a.w_dtype, i * a.w_stride + j);
    if (a.w_dtype == WEFT_F8E4M3) w *= a.scale[a.scale_row[i] * a.scale_stride + (a.scale_col_phase + j) / 128];
    return w;
}

/* ---- few tokens: one warp a row ---- */

enum { ROW_WARPS = 8 };

template <int TOKENS> __global__ void rows_any(const weft_linear_args a)
{
    dependency_wait();
    const int64_t row = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / 32;
    if (row >= a.n) return;
    float sum[TOKENS] = {};
#pragma unroll 4
    for (int64_t j = threadIdx.x % 32; j < a.k; j += 32) {
        const float w = weight(a, row, j);
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
            if (t < a.tokens) sum[t] += w * load(a.x, a.x_dtype, t * a.x_stride + j);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        if (t >= a.tokens) break;
        const float y = warp_sum(sum[t]);
        if (threadIdx.x % 32 == 0) finish(a, t, row, y);
    }
}

/* x float32, w float32 or 16 bits, whole packs */
template <class W, int TOKENS> __global__ void rows_packs(const weft_linear_args a)
{
    constexpr int N = 16 / sizeof(W);
    dependency_wait();
    const int64_t row = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / 32;
    if (row >= a.n) return;
    const Pack<W, N> *w = (const Pack<W, N> *)((const W *)a.w + row * a.w_stride);
    const int packs = (int)(a.k / N);
    float sum[TOKENS] = {};
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < packs; i += 32) {
        const Pack<W, N> p = w[i];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (t >= a.tokens) break;
            const Pack<float, 4> *x = (const Pack<float, 4> *)((const float *)a.x + t * a.x_stride) + i * (N / 4);
#pragma unroll
            for (int h = 0; h < N / 4; h++) {
                const Pack<float, 4> b = x[h];
#pragma unroll
                for (int j = 0; j < 4; j++) sum[t] += widen(p.v[4 * h + j]) * b.v[j];
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        if (t >= a.tokens) break;
        const float y = warp_sum(sum[t]);
        if (threadIdx.x % 32 == 0) finish(a, t, row, y);
    }
}

/* x 16 bits, w float32 of few rows (the gate of a mixture of experts): one block a row, so that many
 * multiprocessors have part in it; the row's weights are asked for before the kernel in front has ended. */
enum { WIDE_THREADS = 128, WIDE_PACKS = 8 /* that a thread keeps */, WIDE_ROWS = 4096 };

template <class X, int TOKENS> __global__ void __launch_bounds__(WIDE_THREADS) row_wide(const weft_linear_args a)
{
    typedef Pack<float, 4> F;
    typedef Pack<X, 4> Q;
    const int64_t row = blockIdx.x;
    const F *w = (const F *)((const float *)a.w + row * a.w_stride);
    const int packs = (int)(a.k / 4);
    F kept[WIDE_PACKS];
#pragma unroll
    for (int i = 0; i < WIDE_PACKS; i++) {
        const int j = threadIdx.x + WIDE_THREADS * i;
        if (j < packs) kept[i] = w[j];
    }
    dependency_wait();
    for (int t = 0; t < TOKENS; t++) {
        if (t >= a.tokens) break;
        const Q *x = (const Q *)((const X *)a.x + t * a.x_stride);
        float sum = 0.0f;
        auto add = [&](const F &weights, int j) {
            const Q values = x[j];
#pragma unroll
            for (int l = 0; l < 4; l++) sum = fmaf(weights.v[l], widen(values.v[l]), sum);
        };
#pragma unroll
        for (int i = 0; i < WIDE_PACKS; i++)
            if (threadIdx.x + WIDE_THREADS * i < packs) add(kept[i], threadIdx.x + WIDE_THREADS * i);
        for (int j = threadIdx.x + WIDE_THREADS * WIDE_PACKS; j < packs; j += WIDE_THREADS) add(w[j], j);
        sum = block_sum(sum);
        if (threadIdx.x == 0) finish(a, t, row, sum);
    }
}

void rows_product(const weft_linear_args *a, void *stream)
{
    const unsigned blocks = (unsigned)div_up(a->n, ROW_WARPS), threads = 32 * ROW_WARPS;
    if (a->x_dtype != WEFT_F32 && a->w_dtype == WEFT_F32 && a->n <= WIDE_ROWS && aligned(a->x, 8) && aligned(a->w, 16) &&
        (a->k | a->w_stride | a->x_stride) % 4 == 0 && a->k < INT32_MAX) {
        const bool brain = a->x_dtype == WEFT_BF16;
        if (a->tokens == 1) launch(brain ? row_wide<bf16, 1> : row_wide<__half, 1>, (unsigned)a->n, WIDE_THREADS, 0, stream, *a);
        else launch(brain ? row_wide<bf16, SKINNY_TOKENS> : row_wide<__half, SKINNY_TOKENS>, (unsigned)a->n, WIDE_THREADS, 0, stream, *a);
        return;
    }
    const bool packs = a->x_dtype == WEFT_F32 && a->w_dtype != WEFT_F8E4M3 && aligned(a->x, 16) && aligned(a->w, 16) &&
                       a->x_stride % 4 == 0 && (a->k | a->w_stride) % 8 == 0 && a->k > 0 && a->k < INT32_MAX;
    if (!packs) {
        launch(a->tokens == 1 ? rows_any<1> : rows_any<SKINNY_TOKENS>, blocks, threads, 0, stream, *a);
        return;
    }
    by_float(a->w_dtype, [&](auto tag) {
        using W = decltype(tag);
        launch(a->tokens == 1 ? rows_packs<W, 1> : rows_packs<W, SKINNY_TOKENS>, blocks, threads, 0, stream, *a);
    });
}

/* ---- more tokens: tiles of 64 x 64 ---- */

__global__ void __launch_bounds__(TILE_THREADS) tile(const weft_linear_args a)
{
    dependency_wait();
    const int64_t row0 = (int64_t)blockIdx.x * TILE, token0 = (int64_t)blockIdx.y * TILE;
    plain_tile(
        a.k, [&](int t, int64_t j) { return token0 + t < a.tokens ? load(a.x, a.x_dtype, (token0 + t) * a.x_stride + j) : 0.0f; },
        [&](int r, int64_t j) { return row0 + r < a.n ? weight(a, row0 + r, j) : 0.0f; },
        [&](int t, int r, float sum) {
            if (token0 + t < a.tokens && row0 + r < a.n) finish(a, token0 + t, row0 + r, sum);
        });
}

void tile_product(const weft_linear_args *a, void *stream)
{
    const int64_t most_tokens = (int64_t)TILE * 65535;
    for (int64_t t = 0; t < a->tokens; t += most_tokens) {
        weft_linear_args part = *a;
        part.tokens = least(most_tokens, a->tokens - t);
        part.x = at(a->x, a->x_dtype, t * a->x_stride);
        part.y = (void *)at(a->y, a->y_dtype, t * a->y_stride);
        launch(tile, dim3((unsigned)div_up(a->n, TILE), (unsigned)div_up(part.tokens, TILE)), TILE_THREADS, 0, stream, part);
    }
}

/* ---- fp8 rows made wide ---- */

template <class T> __global__ void expand(const weft_linear_args a, int64_t row0, T *to)
{
    dependency_wait();
    const int64_t row = row0 + blockIdx.x;
    const float *scale = a.scale + a.scale_row[row] * a.scale_stride;
    const uint8_t *w = (const uint8_t *)a.w + row * a.w_stride;
    const bool words = ((uintptr_t)w | (uintptr_t)a.k) % 4 == 0;
    to += blockIdx.x * a.k;
    for (int64_t j = 4 * threadIdx.x; j < a.k; j += 4 * blockDim.x) {
        const int count = (int)min((int64_t)4, a.k - j);
        const uint32_t word = words ? *(const uint32_t *)(w + j) : 0;
        Pack<T, 4> p;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint8_t b = words ? (uint8_t)(word >> (8 * i)) : i < count ? w[j + i] : 0;
            p.v[i] = narrow<T>(widen_e4m3(b) * (i < count ? scale[(a.scale_col_phase + j + i) / 128] : 0.0f));
        }
        if (words) *(Pack<T, 4> *)(to + j) = p;
        else
            for (int i = 0; i < count; i++) to[j + i] = p.v[i];
    }
}

void expand_rows(const weft_linear_args *a, int64_t row, int64_t rows, void *to, weft_dtype dtype, void *stream)
{
    by_float(dtype, [&](auto tag) {
        using T = decltype(tag);
        launch(expand<T>, (unsigned)rows, 256, 0, stream, *a, row, (T *)to);
    });
}

/* ---- x made wide ---- */

template <class X> __global__ void widen_x(const weft_linear_args a, float *to)
{
    dependency_wait();
    const int64_t t = blockIdx.x;
    for (int64_t j = threadIdx.x; j < a.k; j += blockDim.x) to[t * a.k + j] = widen(((const X *)a.x)[t * a.x_stride + j]);
}

void widen_tokens(const weft_linear_args *a, float *to, void *stream)
{
    launch(a->x_dtype == WEFT_BF16 ? widen_x<bf16> : widen_x<__half>, (unsigned)a->tokens, 256, 0, stream, *a, to);
}

} // namespace weft
