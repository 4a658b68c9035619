/* kernels/cuda/rows.cu - embedding, sums, activation and chosen rows. */
#include "kernels/cuda/cuda.cuh"

namespace weft {

enum { THREADS = 256 };

/* ---- embedding ---- */

__global__ void embed(const weft_embedding_args a)
{
    dependency_wait();
    const int64_t t = blockIdx.x, row = (int64_t)a.ids[t] - a.first;
    const bool here = row >= 0 && row < a.count;
    for (int64_t i = threadIdx.x; i < a.hidden; i += blockDim.x)
        store(a.y, a.y_dtype, t * a.hidden + i, here ? load(a.w, a.w_dtype, row * a.hidden + i) : 0.0f);
}

/* w and y of one dtype, rows of `packs` times 16 bytes */
__global__ void embed_packs(const weft_embedding_args a, int64_t packs)
{
    dependency_wait();
    const int64_t t = blockIdx.x, row = (int64_t)a.ids[t] - a.first;
    const bool here = row >= 0 && row < a.count;
    const uint4 *from = (const uint4 *)a.w + row * packs;
    uint4 *to = (uint4 *)a.y + t * packs;
    for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) to[i] = here ? from[i] : make_uint4(0, 0, 0, 0);
}

/* ---- rows of elements, N at a time ---- */

template <class T, int N> __global__ void add_rows(const weft_add_args a)
{
    dependency_wait();
    const int64_t packs = a.cols / N, row = blockIdx.y;
    const T *x = (const T *)a.a + row * a.a_stride, *z = (const T *)a.b + row * a.b_stride;
    T *y = (T *)a.y + row * a.y_stride;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < packs; i += (int64_t)gridDim.x * blockDim.x) {
        Pack<T, N> p = ((const Pack<T, N> *)x)[i], q = ((const Pack<T, N> *)z)[i];
#pragma unroll
        for (int j = 0; j < N; j++) p.v[j] = narrow<T>(widen(p.v[j]) + widen(q.v[j]));
        ((Pack<T, N> *)y)[i] = p;
    }
}

template <class T, int N> __global__ void silu_mul_rows(const weft_silu_mul_args a)
{
    dependency_wait();
    const int64_t packs = a.cols / N, row = blockIdx.y;
    const T *gate = (const T *)a.x + row * a.x_stride, *up = gate + a.cols;
    T *y = (T *)a.y + row * a.y_stride;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < packs; i += (int64_t)gridDim.x * blockDim.x) {
        Pack<T, N> p = ((const Pack<T, N> *)gate)[i], q = ((const Pack<T, N> *)up)[i];
#pragma unroll
        for (int j = 0; j < N; j++) p.v[j] = narrow<T>(silu_times<T>(widen(p.v[j]), widen(q.v[j])));
        ((Pack<T, N> *)y)[i] = p;
    }
}

/* Rows go over grid.y in slices, since it ends at 65535. */
template <class A> static A slice(A a, int64_t row);
template <> weft_add_args slice(weft_add_args a, int64_t row)
{
    a.a = at(a.a, a.dtype, row * a.a_stride);
    a.b = at(a.b, a.dtype, row * a.b_stride);
    a.y = (void *)at(a.y, a.dtype, row * a.y_stride);
    return a;
}
template <> weft_silu_mul_args slice(weft_silu_mul_args a, int64_t row)
{
    a.x = at(a.x, a.dtype, row * a.x_stride);
    a.y = (void *)at(a.y, a.dtype, row * a.y_stride);
    return a;
}
template <class A> static void launch_rows(void (*kernel)(const A), const A &a, int64_t packs, void *stream)
{
    for (int64_t row = 0; row < a.rows; row += 65535) {
        dim3 grid((unsigned)least(div_up(packs, THREADS), 1024), (unsigned)least(65535, a.rows - row));
        launch(kernel, grid, THREADS, 0, stream, slice(a, row));
    }
}

template <class T> __global__ void gather(const weft_gather_rows_args a, int64_t width, int64_t x_stride, int64_t y_stride)
{
    dependency_wait();
    const int64_t from = a.indices[blockIdx.x];
    if (from < 0 || from >= a.x_rows) return;
    const T *x = (const T *)a.x + from * x_stride;
    T *y = (T *)a.y + blockIdx.x * y_stride;
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) y[i] = x[i];
}

} // namespace weft

using namespace weft;

extern "C" weft_status weft_embedding_cuda(const weft_embedding_args *a, void *stream)
{
    const int64_t sizes[] = {a->tokens, a->hidden, a->first, a->count};
    WEFT_TRY(weft__check_sizes("embedding", "tokens, hidden, first, count", sizes, 4));
    WEFT_TRY(weft__check_float("embedding", "w", a->w_dtype));
    WEFT_TRY(weft__check_float("embedding", "y", a->y_dtype));
    if (a->tokens == 0 || a->hidden == 0) return WEFT_OK;
    const int64_t bytes = a->hidden * (int64_t)weft_dtype_size(a->y_dtype);
    if (a->w_dtype == a->y_dtype && bytes % 16 == 0 && aligned(a->w, 16) && aligned(a->y, 16))
        launch(embed_packs, (unsigned)a->tokens, THREADS, 0, stream, *a, bytes / 16);
    else launch(embed, (unsigned)a->tokens, THREADS, 0, stream, *a);
    return launched("embedding");
}

extern "C" weft_status weft_add_cuda(const weft_add_args *a, void *stream)
{
    const int64_t sizes[] = {a->rows, a->cols};
    WEFT_TRY(weft__check_sizes("add", "rows, cols", sizes, 2));
    WEFT_TRY(weft__check_float("add", "a", a->dtype));
    if (a->rows == 0 || a->cols == 0) return WEFT_OK;
    by_float(a->dtype, [&](auto tag) {
        using T = decltype(tag);
        constexpr int N = 16 / sizeof(T);
        bool packs = a->cols % N == 0 && a->a_stride % N == 0 && a->b_stride % N == 0 && a->y_stride % N == 0 && aligned(a->a, 16) &&
                     aligned(a->b, 16) && aligned(a->y, 16);
        if (packs) launch_rows(add_rows<T, N>, *a, a->cols / N, stream);
        else launch_rows(add_rows<T, 1>, *a, a->cols, stream);
    });
    return launched("add");
}

extern "C" weft_status weft_silu_mul_cuda(const weft_silu_mul_args *a, void *stream)
{
    const int64_t sizes[] = {a->rows, a->cols};
    WEFT_TRY(weft__check_sizes("silu_mul", "rows, cols", sizes, 2));
    WEFT_TRY(weft__check_float("silu_mul", "x", a->dtype));
    if (a->rows == 0 || a->cols == 0) return WEFT_OK;
    by_float(a->dtype, [&](auto tag) {
        using T = decltype(tag);
        constexpr int N = 16 / sizeof(T);
        bool packs = a->cols % N == 0 && a->x_stride % N == 0 && a->y_stride % N == 0 && aligned(a->x, 16) && aligned(a->y, 16);
        if (packs) launch_rows(silu_mul_rows<T, N>, *a, a->cols / N, stream);
        else launch_rows(silu_mul_rows<T, 1>, *a, a->cols, stream);
    });
    return launched("silu_mul");
}

extern "C" weft_status weft_gather_rows_cuda(const weft_gather_rows_args *a, void *stream)
{
    const int64_t sizes[] = {a->count, a->cols, a->x_rows};
    WEFT_TRY(weft__check_sizes("gather_rows", "count, cols, x_rows", sizes, 3));
    if ((unsigned)a->dtype >= WEFT_DTYPE_COUNT) return weft_fail(WEFT_INVALID, "gather_rows: unknown dtype");
    if (a->count == 0 || a->cols == 0) return WEFT_OK;
    const int64_t size = (int64_t)weft_dtype_size(a->dtype), width = a->cols * size, xs = a->x_stride * size, ys = a->y_stride * size;
    const unsigned blocks = (unsigned)a->count;
    if ((width | xs | ys) % 16 == 0 && aligned(a->x, 16) && aligned(a->y, 16))
        launch(gather<uint4>, blocks, THREADS, 0, stream, *a, width / 16, xs / 16, ys / 16);
    else if (size == 4) launch(gather<uint32_t>, blocks, THREADS, 0, stream, *a, a->cols, a->x_stride, a->y_stride);
    else if (size == 2) launch(gather<uint16_t>, blocks, THREADS, 0, stream, *a, a->cols, a->x_stride, a->y_stride);
    else launch(gather<uint8_t>, blocks, THREADS, 0, stream, *a, a->cols, a->x_stride, a->y_stride);
    return launched("gather_rows");
}
