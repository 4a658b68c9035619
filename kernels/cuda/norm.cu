/* kernels/cuda/norm.cu - RMSNorm with its residual sum, and the two halves of a norm over a group.
 * One block a row; what fits stays in registers between the sum and the scaling. */
#include "kernels/cuda/linear_batch.cuh"

namespace weft {

enum {
    KEPT = 4, /* packs that a thread keeps */
    MANY_ROWS = 2048,
    WARP_THREADS = 128, /* of kernels whose rows are warps */
    WARP_PACKS = 512
};

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

template <class T, int N> __device__ __forceinline__ Pack<T, N> sum_of(Pack<T, N> p, const Pack<T, N> &q)
{
#pragma unroll
    for (int j = 0; j < N; j++) p.v[j] = narrow<T>(widen(p.v[j]) + widen(q.v[j]));
    return p;
}

/* The pack i of x + residual, written back to residual; of x where there is no residual. */
template <class T, int N> __device__ __forceinline__ Pack<T, N> take(const T *x, T *residual, int64_t i)
{
    Pack<T, N> p = ((const Pack<T, N> *)x)[i];
    if (residual == nullptr) return p;
    p = sum_of(p, ((Pack<T, N> *)residual)[i]);
    ((Pack<T, N> *)residual)[i] = p;
    return p;
}

/* The packs of this thread that it keeps; all are on their way before the first is written. */
template <class T, int N> __device__ __forceinline__ void take_kept(Pack<T, N> (&kept)[KEPT], const T *x, T *residual, int64_t packs)
{
    Pack<T, N> old[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int64_t i = threadIdx.x + (int64_t)k * blockDim.x;
        if (i < packs) kept[k] = ((const Pack<T, N> *)x)[i];
        if (i < packs && residual != nullptr) old[k] = ((const Pack<T, N> *)residual)[i];
    }
    if (residual == nullptr) return;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int64_t i = threadIdx.x + (int64_t)k * blockDim.x;
        if (i >= packs) continue;
        kept[k] = sum_of(kept[k], old[k]);
        ((Pack<T, N> *)residual)[i] = kept[k];
    }
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
    take_kept<T, N>(kept, x, residual, packs);
#pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (threadIdx.x + (int64_t)k * blockDim.x < packs) sum += squares(kept[k]);
    for (int64_t i = threadIdx.x + (int64_t)KEPT * blockDim.x; i < packs; i += blockDim.x) sum += squares(take<T, N>(x, residual, i));
    const float factor = 1.0f / sqrtf(block_sum(sum) / (float)a.cols + a.eps);
    scale_row<T, N>(kept, residual != nullptr ? residual : x, (T *)a.y + row * a.y_stride, a.gain, a.gain_dtype, gains, factor, packs);
}

/* A warp a row, which it keeps: nobody waits for other warps, and more rows are on their way at once. */
template <class T, int N> __global__ void __launch_bounds__(WARP_THREADS, 4) rms_norm_warps(const weft_rms_norm_args a)
{
    enum { PACKS = 16, AT_ONCE = 4 }; /* of a lane; those of x and the residual that are on their way together */
    const int64_t row = (int64_t)blockIdx.x * (WARP_THREADS / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, packs = (int)(a.cols / N);
    dependency_wait();
    if (row >= a.rows) return;
    const T *x = (const T *)a.x + row * a.x_stride;
    T *residual = a.residual != nullptr ? (T *)a.residual + row * a.residual_stride : nullptr;
    Pack<T, N> kept[PACKS];
    float sum = 0.0f;
#pragma unroll
    for (int first = 0; first < PACKS; first += AT_ONCE) {
        Pack<T, N> old[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int i = lane + 32 * (first + k);
            if (i < packs) kept[first + k] = ((const Pack<T, N> *)x)[i];
            if (i < packs && residual != nullptr) old[k] = ((const Pack<T, N> *)residual)[i];
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int i = lane + 32 * (first + k);
            if (i >= packs) continue;
            if (residual != nullptr) {
                kept[first + k] = sum_of(kept[first + k], old[k]);
                ((Pack<T, N> *)residual)[i] = kept[first + k];
            }
            sum += squares(kept[first + k]);
        }
    }
    const float factor = 1.0f / sqrtf(warp_sum(sum) / (float)a.cols + a.eps);
    T *y = (T *)a.y + row * a.y_stride;
#pragma unroll
    for (int k = 0; k < PACKS; k++)
#pragma unroll
        for (int j = 0; j < 4; j++) asm volatile("" : "+r"(((uint32_t *)&kept[k])[j])); /* not widened twice as long */
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        const int i = lane + 32 * k;
        float g[N];
        if (i >= packs) continue;
        load_pack<N>(a.gain, a.gain_dtype, (int64_t)i * N, g);
#pragma unroll
        for (int j = 0; j < N; j++) kept[k].v[j] = narrow<T>(widen(kept[k].v[j]) * factor * g[j]);
        ((Pack<T, N> *)y)[i] = kept[k];
    }
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

/* A row by as many threads as it has packs; where rows fill the GPU several times over, each thread takes what it can keep, and
 * more rows are on their way at once. */
static unsigned threads_for(int64_t rows, int64_t packs)
{
    return (unsigned)least(1024, most(1, div_up(packs, rows >= MANY_ROWS ? 32 * KEPT : 32)) * 32);
}

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
        if (packs && !early && a->rows >= MANY_ROWS && a->cols / N <= WARP_PACKS && sizeof(T) == 2)
            launch(rms_norm_warps<T, N>, (unsigned)div_up(a->rows, WARP_THREADS / 32), WARP_THREADS, 0, stream, *a);
        else if (packs) launch(rms_norm<T, N>, (unsigned)a->rows, threads_for(a->rows, a->cols / N), 0, stream, *a, early);
        else launch(rms_norm<T, 1>, (unsigned)a->rows, threads_for(a->rows, a->cols), 0, stream, *a, early);
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
        if (packs) launch(group_sums<T, N>, (unsigned)a->rows, threads_for(a->rows, a->cols / N), 0, stream, *a);
        else launch(group_sums<T, 1>, (unsigned)a->rows, threads_for(a->rows, a->cols), 0, stream, *a);
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
        if (packs) launch(group_apply<T, N>, (unsigned)a->rows, threads_for(a->rows, a->cols / N), 0, stream, *a);
        else launch(group_apply<T, 1>, (unsigned)a->rows, threads_for(a->rows, a->cols), 0, stream, *a);
    });
    return launched("group_norm");
}
