/* kernels/cuda/linear_stream.cu - products for up to 8 tokens through a ring of shared memory.
 *
 * One block on each multiprocessor takes turns at 8 or 16 rows of w. The ring fills before the kernel in front
 * has ended, and leaves room for the next kernel's ring: between two products the memory hardly rests. */
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/stream.cuh"

namespace weft {

enum { LS_SHARED = 110 << 10, LS_SHARED_MOST = 220 << 10 }; /* two blocks on a multiprocessor; one */

template <int ROWS> struct ProductShared {
    RingBarriers barriers;
    alignas(16) float sum[2][ST_WARPS][ROWS / 8][ST_TOKENS * 8];
};

template <class W, class T, int ROWS> __global__ void __launch_bounds__((ST_WARPS + 1) * 32, 2) stream_product_rows(const weft_linear_args a, int stages)
{
#ifdef WEFT_HOPPER
    extern __shared__ __align__(128) char data[];
    __shared__ ProductShared<ROWS> s;
    const Row<W> row(a.scale_col_phase, a.k);
    const int warp = threadIdx.x / 32, tokens = (int)a.tokens, items = (int)((a.n + ROWS - 1) / ROWS);
    char *x = data + stages * Ring<ROWS>::BYTES;
    float *factor = (float *)(x + tokens * row.pitch());
    Ring<ROWS> ring = ring_open<W, ROWS>(data, s.barriers, stages);
    __syncthreads();
    if (warp == ST_WARPS) {
        ring_fill<W, ROWS>(ring, row, items, [&](int item, int r) -> StreamRow {
            const int64_t at = min((int64_t)item * ROWS + r, a.n - 1);
            const float *scales = sizeof(W) == 1 ? a.scale + a.scale_row[at] * a.scale_stride + a.scale_col_phase / 128 : nullptr;
            return {(const char *)a.w + at * a.w_stride * (int64_t)sizeof(W), scales};
        });
        return;
    }
    dependency_wait();
    for (int i = warp; i < tokens * row.groups; i += ST_WARPS) {
        const int t = i / row.groups, group = i % row.groups, skip = 128 * group - row.phase;
        pack_group((T *)(x + t * row.pitch()) + 128 * group, factor + i, -skip, row.columns - skip, false, [&](float(&v)[4], int j) {
            load_four(v, a.x, a.x_dtype, t * a.x_stride + skip + j);
        });
    }
    named_sync(1, ST_WARPS * 32);
    const int lane = threadIdx.x % 32, n = threadIdx.x / 64, t = threadIdx.x % 64 / 8, r = threadIdx.x % 8;
    int side = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x, side ^= 1) {
        float sum[ROWS / 8][2];
        ring_multiply<W, T, ROWS>(ring, row, x, factor, tokens, sum);
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++) *(float2 *)&s.sum[side][warp][i][2 * lane] = make_float2(sum[i][0], sum[i][1]);
        named_sync(1, ST_WARPS * 32);
        const int64_t at = (int64_t)item * ROWS + n * 8 + r;
        if (n >= ROWS / 8 || t >= tokens || at >= a.n) continue;
        float y = 0.0f;
#pragma unroll
        for (int i = 0; i < ST_WARPS; i++) y += s.sum[side][i][n][threadIdx.x % 64];
        finish(a, t, at, y);
    }
#endif
}

template <class W> static int64_t x_bytes(const weft_linear_args *a)
{
    const Row<W> row(a->scale_col_phase, a->k);
    return a->tokens * (row.pitch() + row.groups * 4);
}

/* The stages that fit, of both sizes of blocks; fewer than the least: none do. */
static int stages_for(int64_t stage, int64_t x)
{
    const int64_t fixed = 10 << 10, two = (LS_SHARED - fixed - x) / stage, one = (LS_SHARED_MOST - fixed - x) / stage;
    return (int)least(two >= ST_STAGES_LEAST ? two : one, ST_STAGES_MOST);
}

bool stream_product_fits(const weft_linear_args *a)
{
#ifdef WEFT_CUDA_DEPENDENT_LAUNCH
    const bool fp8 = a->w_dtype == WEFT_F8E4M3;
    if (a->cuda == NULL || a->tokens > ST_TOKENS || a->k * (fp8 ? 1 : 2) < ST_SPAN || a->k > 1 << 20 || a->n >= (int64_t)1 << 30) return false;
    if (fp8 && a->scale_col_phase % 16 != 0) return false;
    return stages_for(Ring<16>::BYTES, fp8 ? x_bytes<uint8_t>(a) : x_bytes<bf16>(a)) >= ST_STAGES_LEAST;
#else
    return false;
#endif
}

template <class W, class T, int ROWS> static void start(const weft_linear_args *a, void *stream)
{
    const int64_t x = x_bytes<W>(a), sms = a->cuda->sms;
    const int stages = stages_for(Ring<ROWS>::BYTES, x);
    const size_t bytes = (size_t)(stages * Ring<ROWS>::BYTES + x);
    (void)cudaFuncSetAttribute(stream_product_rows<W, T, ROWS>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    launch(stream_product_rows<W, T, ROWS>, (unsigned)least(sms, div_up(a->n, ROWS)), (ST_WARPS + 1) * 32, bytes, stream, *a, stages);
}

/* How full the turns of all multiprocessors are. */
static double share(int64_t items, int64_t sms) { return (double)items / (double)(div_up(items, sms) * sms); }

template <class W, class T> static void start_rows(const weft_linear_args *a, void *stream)
{
    const int64_t sms = a->cuda->sms;
    if (share(div_up(a->n, 8), sms) > share(div_up(a->n, 16), sms) + 0.05) start<W, T, 8>(a, stream);
    else start<W, T, 16>(a, stream);
}

void stream_product(const weft_linear_args *a, void *stream)
{
    if (a->w_dtype == WEFT_F8E4M3) start_rows<uint8_t, __half>(a, stream);
    else if (a->w_dtype == WEFT_BF16) start_rows<bf16, bf16>(a, stream);
    else start_rows<__half, __half>(a, stream);
}

} // namespace weft
