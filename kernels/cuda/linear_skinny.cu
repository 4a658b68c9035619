/* kernels/cuda/linear_skinny.cu - products for up to 8 tokens, at the speed of memory.
 *
 * One or two tokens with very many 16-bit weights: as many warps as stay on the machine take turns at
 * the rows of w, 512 bytes at a time, without a break between rows. fp8 weights with bfloat16 activations on
 * Hopper: linear_fp8.cu. Others of one or two tokens: linear_stream.cu, where it is faster. The rest: a block owns 16 rows of w (the rows of the tensor
 * cores' tile; tokens are its columns) and its warps take turns along k. Weights go straight to
 * registers, 16 bytes a lane, the next piece on its way while this one is multiplied; the first piece
 * is asked for before the kernel in front has ended. */
#include "kernels/cuda/linear_fp8.cuh"
#include "kernels/cuda/linear_skinny.cuh"

namespace weft {

template <class T, int WARPS, bool FP8> __global__ void __launch_bounds__(WARPS * 32) skinny_rows(const weft_linear_args a)
{
    __shared__ SkinnySums<WARPS> sums;
    const int64_t row0 = (int64_t)blockIdx.x * 16;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if constexpr (FP8) skinny_sums_fp8<T, WARPS>(a, row0, c, [] { dependency_wait(); });
    else skinny_sums<T, WARPS>(a, row0, c, [] { dependency_wait(); });
    sums.put(c);
    __syncthreads();
    for (int i = threadIdx.x; i < 128; i += WARPS * 32) {
        const int t = i / 16, r = i % 16;
        if (t < a.tokens && row0 + r < a.n) finish(a, t, row0 + r, sums.sum(t, r));
    }
}

/* ---- one or two tokens ---- */

enum {
    LINE_LEAST = 1 << 28,    /* weights from which on it pays */
    LINE_SHARED = 120 << 10, /* asked for so that a multiprocessor takes one block, never two */
    LINE_CARVEOUT = 57,      /* per cent of shared memory for it: the loads that are on their way need the rest (150 us more without, at 2^29 weights) */
    LINE_WARPS_MOST = 24,
    LINE_UNROLL = 8,
    LINE = 256 * LINE_UNROLL /* columns on their way */
};

template <class T> __device__ __forceinline__ float dot8(const uint4 &w, const uint4 &x, float sum)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 a = widen_pair<T>((&w.x)[i]), b = widen_pair<T>((&x.x)[i]);
        sum = fmaf(a.x, b.x, sum);
        sum = fmaf(a.y, b.y, sum);
    }
    return sum;
}

template <class T, int TOKENS> __global__ void __launch_bounds__(LINE_WARPS_MOST * 32, 1) line_rows(const weft_linear_args a)
{
    const int lane = threadIdx.x % 32, k = (int)a.k, warps = blockDim.x / 32;
    const int64_t step = (int64_t)gridDim.x * warps;
    int64_t row = (int64_t)(threadIdx.x / 32) * gridDim.x + blockIdx.x;
    const T *w = (const T *)a.w + row * a.w_stride + lane * 8, *x = (const T *)a.x + lane * 8;
    uint4 piece[LINE_UNROLL];
#pragma unroll
    for (int u = 0; u < LINE_UNROLL; u++) piece[u] = stream_in(w + 256 * u, row < a.n && lane * 8 + 256 * u < k);
    dependency_wait();
    for (; row < a.n; row += step) {
        const T *next_row = w + step * a.w_stride;
        float sum[TOKENS] = {};
        for (int at = 0; at < k; at += LINE) {
            /* what is loaded while these columns are multiplied: this row's next, or the next row's first */
            const bool ends = at + LINE >= k;
            const T *next = ends ? next_row : w + at + LINE;
            const int left = (ends ? (row + step < a.n ? k : 0) : k - at - LINE) - lane * 8, here = k - at - lane * 8;
#pragma unroll
            for (int u = 0; u < LINE_UNROLL; u++) {
                if (256 * u < here)
#pragma unroll
                    for (int t = 0; t < TOKENS; t++) sum[t] = dot8<T>(piece[u], *(const uint4 *)(x + t * a.x_stride + at + 256 * u), sum[t]);
                piece[u] = stream_in(next + 256 * u, 256 * u < left);
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            sum[t] = warp_sum(sum[t]);
            if (lane == 0) finish(a, t, row, sum[t]);
        }
        w = next_row;
    }
}

/* Warps of each multiprocessor, so that the last turn leaves few of them idle. */
static int line_warps(int64_t n, int sms)
{
    int best = 16;
    double best_share = 0.0;
    for (int warps = 16; warps <= LINE_WARPS_MOST; warps += 2) {
        const int64_t turns = div_up(n, (int64_t)sms * warps);
        const double share = (double)n / (double)(turns * sms * warps);
        if (share > best_share + 0.01) best = warps, best_share = share;
    }
    return best;
}

bool skinny_fits(const weft_linear_args *a)
{
    if (a->x_dtype == WEFT_F32 || !aligned(a->x, 16) || !aligned(a->w, 16) || a->x_stride % 8 != 0 || a->k > INT32_MAX / 2) return false;
    if (a->w_dtype == WEFT_F8E4M3) return (a->k | a->w_stride) % 16 == 0 && a->scale_col_phase % 128 == 0;
    return a->w_dtype == a->x_dtype && (a->k | a->w_stride) % 8 == 0;
}

template <class T> static void launch_skinny(const weft_linear_args *a, void *stream)
{
    const unsigned blocks = (unsigned)div_up(a->n, 16);
    const bool fp8 = a->w_dtype == WEFT_F8E4M3;
    if (!fp8 && a->tokens <= 2 && a->cuda != NULL && a->n * a->k >= LINE_LEAST) {
        void (*kernel)(const weft_linear_args) = a->tokens == 1 ? line_rows<T, 1> : line_rows<T, 2>;
        (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, LINE_SHARED);
        (void)cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, LINE_CARVEOUT);
        launch(kernel, (unsigned)a->cuda->sms, 32 * line_warps(a->n, a->cuda->sms), LINE_SHARED, stream, *a);
        return;
    }
    if (fp8 && fp8_product(a, {}, stream)) return;
    if (stream_product_fits(a)) stream_product(a, stream);
    else if (a->k >= (fp8 ? 2048 : 1024)) launch(fp8 ? skinny_rows<T, 8, true> : skinny_rows<T, 8, false>, blocks, 256, 0, stream, *a);
    else launch(fp8 ? skinny_rows<T, 2, true> : skinny_rows<T, 2, false>, blocks, 64, 0, stream, *a);
}

void skinny(const weft_linear_args *a, void *stream)
{
    if (a->x_dtype == WEFT_BF16) launch_skinny<bf16>(a, stream);
    else launch_skinny<__half>(a, stream);
}

} // namespace weft
