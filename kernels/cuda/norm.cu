/* kernels/cuda/norm.cu - RMSNorm with its residual sum, and the two halves of a norm over a group.
 * One block a row; what fits stays in registers between the sum and the scaling. */
#include "kernels/cuda/linear_batch.cuh"

namespace weft {

enum { KEPT = 4 }; /* packs that a thread keeps */

/* The gains of a thread's first pack: weights, so they come while the kernel before still runs. */
template <int N> __device__ __forceinline__ void first_gains(const void *gain, int gain_dtype, int64_t packs, float (&g)[N])
{
    if (threadIdx.x < packs) load_pack<N>(gain, gain_dtype, (int64_t)threadIdx.x * N, g);
}

/* y = r * factor * gain for the packs of this thread; those beyond `kept` are read again. */
template <class T, int N>
__device__ __forceinline__ void scale_row(const Pack<T, N> *kept, const T *r, T *y, const void *gain, int gain_dtype,
                                          const float (&first)[N], float factor, int64_t packs)
{
    auto scale = [&](Pack<T, N> p, int64_t i, const float(&g)[N]) {
#pragma unroll
        for (int j = 0; j < N; j++) p.v[j] = narrow<T>(widen(p.v[j]) * factor * g[j]);
        ((Pack<T, N> *)y)[i] = p;
    };
    if (threadIdx.x < packs) scale(kept[0], threadIdx.x, first);
#pragma unroll
    for (int k = 1; k < KEPT; k++) {
        int64_t i = threadIdx.x + (int64_t)k * blockDim.x;
        float g[N];
        if (i >= packs) continue;
        load_pack<N>(gain, gain_dtype, i * N, g);
        scale(kept[k], i, g);
    }
    for (int64_t i = threadIdx.x + (int64_t)KEPT * blockDim.x; i < packs; i += blockDim.x) {
        float g[N];
        load_pack<N>(gain, gain_dtype, i * N, g);
        scale(((const Pack<T, N> *)r)[i], i, g);
    }
}

template <class T, int N> __device__ __forceinline__ float squares(const Pack<T, N> &p)
{
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++) sum += widen(p.v[j]) * widen(p.v[j]);
    return sum;
}

/* The pack i of x + residual, written back to residual; of x where there is no residual. */
template <class T, int N> __device__ __forceinline__ Pack<T, N> take(const T *x, T *residual, int64_t i)
{
    Pack<T, N> p = ((const Pack<T, N> *)x)[i];
    if (residual == nullptr) return p;
    Pack<T, N> q = ((Pack<T, N> *)residual)[i];
#pragma unroll
    for (int j = 0; j < N; j++) p.v[j] = narrow<T>(widen(p.v[j]) + widen(q.v[j]));
    ((Pack<T, N> *)residual)[i] = p;
    return p;
}

/* early: the next kernel is a product of a batch, whose blocks may come as soon as there is room. */
template <class T, int N> __global__ void rms_norm(const weft_rms_norm_args a, const bool early)
{
    if (early) dependency_release();
    const int64_t row = blockIdx.x, packs = a.cols / N;
    float gains[N];
    first_gains<N>(a.gain, a.gain_dtype, packs, gains);
    dependency_wait();
    const T *x = (const T *)a.x + row * a.x_stride;
    T *residual = a.residual != nullptr ? (T *)a.residual + row * a.residual_stride : nullptr;
    Pack<T, N> kept[KEPT];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int64_t i = threadIdx.x + (int64_t)k * blockDim.x;
        if (i >= packs) continue;
        kept[k] = take<T, N>(x, residual, i);
        sum += squares(kept[k]);
    }
    for (int64_t i = threadIdx.x + (int64_t)KEPT * blockDim.x; i < packs; i += blockDim.x) sum += squares(take<T, N>(x, residual, i));
    const float factor = 1.0f / sqrtf(block_sum(sum) / (float)a.cols + a.eps);
    scale_row<T, N>(kept, residual != nullptr ? residual : x, (T *)a.y + row * a.y_stride, a.gain, a.gain_dtype, gains, factor, packs);
}

template <class T, int N> __global__ void group_sums(const weft_group_norm_args a)
{
    dependency_wait();
    const int64_t row = blockIdx.x, packs = a.cols / N;
    const Pack<T, N> *x = (const Pack<T, N> *)((const T *)a.x + row * a.x_stride);
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) sum += squares(x[i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) a.var[row * a.var_stride] = a.cols > 0 ? sum / (float)a.cols : 0.0f;
}

template <class T, int N> __global__ void group_apply(const weft_group_norm_args a)
{
    const int64_t row = blockIdx.x, packs = a.cols / N;
    float gains[N];
    first_gains<N>(a.gain, a.gain_dtype, packs, gains);
    dependency_wait();
    const T *x = (const T *)a.x + row * a.x_stride;
    const float factor = 1.0f / sqrtf(a.var[row * a.var_stride] / (float)a.world + a.eps);
    Pack<T, N> kept[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int64_t i = threadIdx.x + (int64_t)k * blockDim.x;
        if (i < packs) kept[k] = ((const Pack<T, N> *)x)[i];
    }
    scale_row<T, N>(kept, x, (T *)a.y + row * a.y_stride, a.gain, a.gain_dtype, gains, factor, packs);
}

static unsigned threads_for(int64_t packs) { return (unsigned)least(1024, most(1, div_up(packs, 32)) * 32); }

} // namespace weft

using namespace weft;

static weft_status norm(const weft_rms_norm_args *a, bool early, void *stream)
{
    const int64_t sizes[] = {a->rows, a->cols};
    WEFT_TRY(weft__check_sizes("rms_norm", "rows, cols", sizes, 2));
    WEFT_TRY(weft__check_float("rms_norm", "x", a->dtype));
    WEFT_TRY(weft__check_float("rms_norm", "gain", a->gain_dtype));
    if (a->rows == 0 || a->cols == 0) return WEFT_OK;
    by_float(a->dtype, [&](auto tag) {
        using T = decltype(tag);
        constexpr int N = 16 / sizeof(T);
        bool packs = a->cols % N == 0 && a->x_stride % N == 0 && a->y_stride % N == 0 && aligned(a->x, 16) && aligned(a->y, 16) &&
                     (a->residual == nullptr || (a->residual_stride % N == 0 && aligned(a->residual, 16)));
        if (packs) launch(rms_norm<T, N>, (unsigned)a->rows, threads_for(a->cols / N), 0, stream, *a, early);
        else launch(rms_norm<T, 1>, (unsigned)a->rows, threads_for(a->cols), 0, stream, *a, early);
    });
    return launched("rms_norm");
}

weft_status weft::norm_before_batch(const weft_rms_norm_args *a, void *stream) { return norm(a, true, stream); }

extern "C" weft_status weft_rms_norm_cuda(const weft_rms_norm_args *a, void *stream) { return norm(a, false, stream); }

extern "C" weft_status weft_group_norm_sums_cuda(const weft_group_norm_args *a, void *stream)
{
    WEFT_TRY(weft__check_group_norm(a, 0));
    if (a->rows == 0) return WEFT_OK;
    by_float(a->dtype, [&](auto tag) {
        using T = decltype(tag);
        constexpr int N = 16 / sizeof(T);
        bool packs = a->cols % N == 0 && a->x_stride % N == 0 && aligned(a->x, 16);
        if (packs) launch(group_sums<T, N>, (unsigned)a->rows, threads_for(a->cols / N), 0, stream, *a);
        else launch(group_sums<T, 1>, (unsigned)a->rows, threads_for(a->cols), 0, stream, *a);
    });
    return launched("group_norm");
}

extern "C" weft_status weft_group_norm_apply_cuda(const weft_group_norm_args *a, void *stream)
{
    WEFT_TRY(weft__check_group_norm(a, 1));
    if (a->rows == 0 || a->cols == 0) return WEFT_OK;
    by_float(a->dtype, [&](auto tag) {
        using T = decltype(tag);
        constexpr int N = 16 / sizeof(T);
        bool packs = a->cols % N == 0 && a->x_stride % N == 0 && a->y_stride % N == 0 && aligned(a->x, 16) && aligned(a->y, 16);
        if (packs) launch(group_apply<T, N>, (unsigned)a->rows, threads_for(a->cols / N), 0, stream, *a);
        else launch(group_apply<T, 1>, (unsigned)a->rows, threads_for(a->cols), 0, stream, *a);
    });
    return launched("group_norm");
}
