/* kernels/cuda/linear_skinny.cu - products for up to 8 tokens, at the speed of memory.
 *
 * One or two tokens with very many 16-bit weights: as many warps as stay on the machine take turns at
 * the rows of w, 512 bytes at a time, without a break between rows. All others: tensor cores. A block owns 16 rows of w (the rows of the tensor cores' tile; tokens are its columns) and its
 * warps take turns along k. Weights go straight to registers, 16 bytes a lane, the next piece on
 * its way while this one is multiplied; the first piece is asked for before the kernel in front
 * has ended. */
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/mma.cuh"

namespace weft {

enum { UNROLL = 4, WARPS_MOST = 8 };

/* The sums of the warps, in order; then bias and store. c: as mma's. */
template <int WARPS> __device__ static void reduce_and_store(const weft_linear_args &a, const float (&c)[4], int64_t row0)
{
    __shared__ float part[WARPS][8][17];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    part[warp][2 * q][g] = c[0];
    part[warp][2 * q + 1][g] = c[1];
    part[warp][2 * q][g + 8] = c[2];
    part[warp][2 * q + 1][g + 8] = c[3];
    __syncthreads();
    for (int i = threadIdx.x; i < 128; i += WARPS * 32) {
        const int t = i / 16, r = i % 16;
        if (t >= a.tokens || row0 + r >= a.n) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += part[w][t][r];
        finish(a, t, row0 + r, sum);
    }
}

/* A piece: UNROLL times 32 columns of two rows. */
template <class T> struct Piece {
    uint4 w[UNROLL][2];
    __device__ __forceinline__ void take(const T *w0, const T *w1, int k, int end)
    {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const bool in = k + 32 * u < end;
            w[u][0] = stream_in(w0 + k + 32 * u, in);
            w[u][1] = stream_in(w1 + k + 32 * u, in);
        }
    }
};

template <class T, int WARPS> __global__ void __launch_bounds__(WARPS * 32) skinny_rows(const weft_linear_args a)
{
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4, k = (int)a.k;
    const int64_t row0 = (int64_t)blockIdx.x * 16;
    const T *w0 = (const T *)a.w + min(row0 + g, a.n - 1) * a.w_stride, *w1 = (const T *)a.w + min(row0 + g + 8, a.n - 1) * a.w_stride;
    const T *x = (const T *)a.x + (int64_t)g * a.x_stride;
    const bool token = g < a.tokens;
    constexpr int STEP = WARPS * UNROLL * 32;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    Piece<T> now, next;
    int at = warp * UNROLL * 32 + 8 * q;
    now.take(w0, w1, at, k);
    dependency_wait();
    for (; at - 8 * q < k; at += STEP) {
        uint4 b[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            b[u] = token && at + 32 * u < k ? *(const uint4 *)(x + at + 32 * u) : make_uint4(0, 0, 0, 0);
        next.take(w0, w1, at + STEP, k);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            mma<T>(c, now.w[u][0].x, now.w[u][1].x, now.w[u][0].y, now.w[u][1].y, b[u].x, b[u].y);
            mma<T>(c, now.w[u][0].z, now.w[u][1].z, now.w[u][0].w, now.w[u][1].w, b[u].z, b[u].w);
        }
        now = next;
    }
    reduce_and_store<WARPS>(a, c, row0);
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

template <class T, int WARPS> __global__ void __launch_bounds__(WARPS * 32) skinny_rows_fp8(const weft_linear_args a)
{
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4, k = (int)a.k;
    const int64_t row0 = (int64_t)blockIdx.x * 16, r0 = min(row0 + g, a.n - 1), r1 = min(row0 + g + 8, a.n - 1);
    const uint8_t *w0 = (const uint8_t *)a.w + r0 * a.w_stride, *w1 = (const uint8_t *)a.w + r1 * a.w_stride;
    const float *s0 = a.scale + a.scale_row[r0] * a.scale_stride + a.scale_col_phase / 128;
    const float *s1 = a.scale + a.scale_row[r1] * a.scale_stride + a.scale_col_phase / 128;
    const T *x = (const T *)a.x + (int64_t)g * a.x_stride;
    const bool token = g < a.tokens;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    Piece8 now, next;
    int block = 2 * warp;
    now.take(w0, w1, s0, s1, block, q, k);
    dependency_wait();
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
    reduce_and_store<WARPS>(a, c, row0);
}

/* ---- one or two tokens ---- */

enum {
    LINE_LEAST = 1 << 28,    /* weights from which on it pays */
    LINE_SHARED = 120 << 10, /* asked for so that a multiprocessor takes one block, never two */
    LINE_WARPS_MOST = 24,
    LINE_UNROLL = 8,
    LINE = 256 * LINE_UNROLL /* columns on their way */
};

template <class T> __device__ __forceinline__ float2 widen_pair(uint32_t two);
template <> __device__ __forceinline__ float2 widen_pair<bf16>(uint32_t two)
{
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 widen_pair<__half>(uint32_t two) { return __half22float2(*(const __half2 *)&two); }

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
        launch(kernel, (unsigned)a->cuda->sms, 32 * line_warps(a->n, a->cuda->sms), LINE_SHARED, stream, *a);
        return;
    }
    if (stream_product_fits(a)) stream_product(a, stream);
    else if (a->k >= (fp8 ? 2048 : 1024)) launch(fp8 ? skinny_rows_fp8<T, 8> : skinny_rows<T, 8>, blocks, 256, 0, stream, *a);
    else launch(fp8 ? skinny_rows_fp8<T, 2> : skinny_rows<T, 2>, blocks, 64, 0, stream, *a);
}

void skinny(const weft_linear_args *a, void *stream)
{
    if (a->x_dtype == WEFT_BF16) launch_skinny<bf16>(a, stream);
    else launch_skinny<__half>(a, stream);
}

} // namespace weft
