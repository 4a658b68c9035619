/* kernels/cuda/linear_stream.cu - products for one or two tokens through rings of shared memory (stream.cuh).
 *
 * One block on each multiprocessor, and never two, takes turns at 16 rows of w. The rings fill before the kernel in
 * front has ended. */
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/stream.cuh"

namespace weft {

enum {
    LS_DEPTH = 5,
    LS_SHARED = 108 << 10, /* at least, so that a multiprocessor never takes two blocks of a product */
    LS_TOKENS = 2,    /* more, and more columns of 16-bit weights: the registers of linear_skinny.cu are faster */
    LS_COLUMNS = 8192
};

struct ProductShared {
    ItemSums sums[2];
};

/* 16 rows of w. */
template <class W> struct ProductItem {
    const weft_linear_args &a;
    int64_t row0;
    int phase;
    __device__ __forceinline__ ProductItem(const weft_linear_args &args, const Row<W> &row) : a(args), row0((int64_t)blockIdx.x * 16), phase(row.phase) {}
    __device__ __forceinline__ bool there() const { return row0 < a.n; }
    __device__ __forceinline__ void advance() { row0 += (int64_t)gridDim.x * 16; }
    __device__ __forceinline__ int hint() const { return sizeof(W) == 1 ? __ldg(a.scale_row + min(row0 + threadIdx.x % 16, a.n - 1)) : 0; }
    __device__ __forceinline__ Rows<16> rows(int scale_row) const
    {
        Rows<16> rows;
#pragma unroll
        for (int i = 0; i < 4; i++)
            rows.weights[i] = (const char *)a.w + min(row0 + 4 * i + threadIdx.x % 32 / 8, a.n - 1) * a.w_stride * (int64_t)sizeof(W) - phase;
        rows.scales = sizeof(W) == 1 ? a.scale + scale_row * a.scale_stride + a.scale_col_phase / 128 : nullptr;
        return rows;
    }
};

template <class W, class T> __global__ void __launch_bounds__(ST_THREADS, 2) stream_rows(const weft_linear_args a)
{
    extern __shared__ __align__(128) char data[];
    __shared__ ProductShared s;
    const Row<W> row(a.scale_col_phase, a.k);
    const int tokens = (int)a.tokens;
    ProductItem<W> item(a, row);
    ItemStream<W, T, LS_DEPTH, ProductItem<W>> stream(data, row, item);
    dependency_wait();
    char *x = data + Ring<W, 16, LS_DEPTH>::BYTES;
    float *factor = (float *)(x + tokens * row.pitch());
    pack_rows<W, T>(x, factor, 1, ST_TOKENS, row, tokens, false,
                    [&](float(&v)[4], int i, int j) { load_four(v, a.x, a.x_dtype, i * a.x_stride + j); }, [](int) { return false; });
    __syncthreads();
    const int t = threadIdx.x % 8, r = threadIdx.x / 8;
    for (int side = 0; item.there(); item.advance(), side ^= 1) {
        float sum[2][2];
        stream.multiply(sum, x, factor, tokens);
        s.sums[side].put(sum);
        __syncthreads();
        if (r < 16 && t < tokens && item.row0 + r < a.n) finish(a, t, item.row0 + r, s.sums[side].of(r, t));
    }
}

template <class W> static size_t bytes_of(const weft_linear_args *a)
{
    return (size_t)most(Ring<W, 16, LS_DEPTH>::BYTES + Row<W>(a->scale_col_phase, a->k).packed(a->tokens), LS_SHARED);
}

bool stream_product_fits(const weft_linear_args *a)
{
    const bool fp8 = a->w_dtype == WEFT_F8E4M3;
    if (a->cuda == NULL || a->tokens > LS_TOKENS || a->k > (fp8 ? 1 << 20 : LS_COLUMNS) || a->n >= (int64_t)1 << 30) return false;
    if (a->k * (fp8 ? 1 : 2) < ST_WARPS * ST_BLOCK || (fp8 && a->scale_col_phase % 16 != 0)) return false;
    return (fp8 ? bytes_of<uint8_t>(a) : bytes_of<bf16>(a)) + sizeof(ProductShared) <= (size_t)a->cuda->shared;
}

template <class W, class T> static void start(const weft_linear_args *a, void *stream)
{
    const size_t bytes = bytes_of<W>(a);
    (void)cudaFuncSetAttribute(stream_rows<W, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    launch(stream_rows<W, T>, (unsigned)least(a->cuda->sms, div_up(a->n, 16)), ST_THREADS, bytes, stream, *a);
}

void stream_product(const weft_linear_args *a, void *stream)
{
    if (a->w_dtype == WEFT_F8E4M3) start<uint8_t, __half>(a, stream);
    else if (a->w_dtype == WEFT_BF16) start<bf16, bf16>(a, stream);
    else start<__half, __half>(a, stream);
}

} // namespace weft
