/* kernels/cuda/router.cu - the top experts of each token, and rounding to e4m3 groups. */
#include <inttypes.h>

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/quantize.cuh"

namespace weft {

enum { ROUTER_THREADS = 128 };

__device__ static float block_largest(float x)
{
    __shared__ float part[ROUTER_THREADS / 32];
    for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    for (int w = 0; w < ROUTER_THREADS / 32; w++) x = fmaxf(x, part[w]);
    return x;
}

struct Choice {
    float value;
    int id; /* INT_MAX: nobody */
};

/* The order of choice: larger value, then lower id. */
__device__ __forceinline__ bool before(Choice a, Choice b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

__device__ static Choice block_first(Choice c)
{
    __shared__ Choice part[ROUTER_THREADS / 32];
    for (int d = 16; d > 0; d /= 2) {
        Choice other = {__shfl_xor_sync(~0u, c.value, d), __shfl_xor_sync(~0u, c.id, d)};
        if (before(other, c)) c = other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = c;
    __syncthreads();
    for (int w = 0; w < ROUTER_THREADS / 32; w++)
        if (before(part[w], c)) c = part[w];
    return c;
}

/* The score of an expert; what is no finite number is 0. */
__device__ __forceinline__ float score_of(const weft_router_args &a, const float *logits, int e, float largest, float sum)
{
    float s = logits[e];
    if (a.scoring == WEFT_ROUTER_SOFTMAX) s = expf(s - largest) / sum;
    else if (a.scoring == WEFT_ROUTER_SIGMOID) s = 1.0f / (1.0f + expf(-s));
    return isfinite(s) ? s : 0.0f;
}

__device__ static void weigh(const weft_router_args &a, float *weights)
{
    const int k = (int)a.top_k;
    float sum = 0.0f;
    if (a.scoring == WEFT_ROUTER_SOFTMAX_TOPK) {
        float largest = weights[0];
        for (int i = 1; i < k; i++) largest = fmaxf(largest, weights[i]);
        for (int i = 0; i < k; i++) weights[i] = expf(weights[i] - largest);
    } else if (!a.renormalize) {
        return;
    }
    for (int i = 0; i < k; i++) sum += weights[i];
    if (!(sum > 0.0f)) return;
    for (int i = 0; i < k; i++) weights[i] /= sum;
}

/* Any number of experts: one block a token. Each round finds the first behind the one chosen last, so nothing is marked. */
__global__ void __launch_bounds__(ROUTER_THREADS) route(const weft_router_args a)
{
    dependency_wait();
    const int64_t t = blockIdx.x;
    const int n = (int)a.experts;
    const float *logits = a.logits + t * a.logits_stride;
    float largest = minus_inf(), sum = 0.0f;
    if (a.scoring == WEFT_ROUTER_SOFTMAX) {
        for (int e = threadIdx.x; e < n; e += ROUTER_THREADS) largest = fmaxf(largest, logits[e]);
        largest = block_largest(largest);
        for (int e = threadIdx.x; e < n; e += ROUTER_THREADS) sum += expf(logits[e] - largest);
        sum = block_sum(sum);
    }
    Choice last = {-minus_inf(), -1};
    for (int k = 0; k < (int)a.top_k; k++) {
        Choice best = {minus_inf(), INT_MAX};
        for (int e = threadIdx.x; e < n; e += ROUTER_THREADS) {
            float value = score_of(a, logits, e, largest, sum);
            if (a.bias != nullptr) value += a.bias[e];
            const Choice c = {isnan(value) ? minus_inf() : value, e};
            if (before(last, c) && before(c, best)) best = c;
        }
        last = block_first(best);
        if (threadIdx.x == 0) {
            a.ids[t * a.top_k + k] = last.id;
            a.weights[t * a.top_k + k] = score_of(a, logits, last.id, largest, sum);
        }
    }
    if (threadIdx.x == 0) weigh(a, a.weights + t * a.top_k);
}

/* ---- up to 1024 experts: one warp a token, its scores in registers ---- */

enum { WARP_TOKENS = 4, WARP_CHOICES = 32 };

/* Unsigned integers in the order of floats, none of them 0; NaN counts as the lowest. */
__device__ __forceinline__ unsigned ordered(float x)
{
    const unsigned bits = __float_as_uint(isnan(x) ? minus_inf() : x + 0.0f); /* no negative zero */
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ unsigned warp_most(unsigned x)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, x);
#else
    for (int d = 16; d > 0; d /= 2) x = max(x, __shfl_xor_sync(~0u, x, d));
    return x;
#endif
}

template <int N> __global__ void __launch_bounds__(WARP_TOKENS * 32) route_warps(const weft_router_args a)
{
    const int64_t t = (int64_t)blockIdx.x * WARP_TOKENS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, n = (int)a.experts, top = (int)a.top_k;
    float bias[N];
#pragma unroll
    for (int i = 0; i < N; i++) bias[i] = a.bias != nullptr && lane + 32 * i < n ? __ldg(a.bias + lane + 32 * i) : 0.0f;
    dependency_wait();
    if (t >= a.tokens) return;
    const float *logits = a.logits + t * a.logits_stride;
    float score[N], largest = minus_inf(), sum = 0.0f;
    unsigned key[N]; /* 0: nobody, or taken */
#pragma unroll
    for (int i = 0; i < N; i++) score[i] = lane + 32 * i < n ? logits[lane + 32 * i] : minus_inf();
    if (a.scoring == WEFT_ROUTER_SOFTMAX) {
#pragma unroll
        for (int i = 0; i < N; i++) largest = fmaxf(largest, score[i]);
        for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
#pragma unroll
        for (int i = 0; i < N; i++) sum += lane + 32 * i < n ? expf(score[i] - largest) : 0.0f;
        sum = warp_sum(sum);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int e = lane + 32 * i;
        float s = score[i];
        if (a.scoring == WEFT_ROUTER_SOFTMAX) s = expf(s - largest) / sum;
        else if (a.scoring == WEFT_ROUTER_SIGMOID) s = 1.0f / (1.0f + expf(-s));
        score[i] = isfinite(s) ? s : 0.0f;
        key[i] = e < n ? ordered(score[i] + bias[i]) : 0;
    }
    float weight = 0.0f; /* of this lane's choice */
    int chosen = 0;
    for (int k = 0; k < top; k++) {
        unsigned best = 0;
#pragma unroll
        for (int i = 0; i < N; i++) best = max(best, key[i]);
        const unsigned most = warp_most(best);
        unsigned id = ~0u; /* the lane's first of the largest */
        float own = 0.0f;
#pragma unroll
        for (int i = N - 1; i >= 0; i--)
            if (key[i] == most) id = lane + 32 * i, own = score[i];
        const int first = (int)~warp_most(~id);
        const float value = __shfl_sync(~0u, own, first % 32);
        if (lane == k) chosen = first, weight = value;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (lane + 32 * i == first) key[i] = 0;
    }
    if (a.scoring == WEFT_ROUTER_SOFTMAX_TOPK) {
        float most = lane < top ? weight : minus_inf();
        for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
        weight = expf(weight - most);
    }
    if (a.scoring == WEFT_ROUTER_SOFTMAX_TOPK || a.renormalize) {
        float all = 0.0f;
        for (int i = 0; i < top; i++) all += __shfl_sync(~0u, weight, i);
        if (all > 0.0f) weight /= all;
    }
    if (lane >= top) return;
    a.ids[t * top + lane] = chosen;
    a.weights[t * top + lane] = weight;
}

static void launch_route(const weft_router_args *a, void *stream)
{
    const unsigned blocks = (unsigned)div_up(a->tokens, WARP_TOKENS);
    if (a->experts > 1024 || a->top_k > WARP_CHOICES) launch(route, (unsigned)a->tokens, ROUTER_THREADS, 0, stream, *a);
    else launch(a->experts <= 128 ? route_warps<4> : a->experts <= 256 ? route_warps<8> : route_warps<32>, blocks, WARP_TOKENS * 32, 0, stream, *a);
}

/* One warp a group of a row. */
__global__ void quantize_rows(const weft_quantize_groups_args a, int64_t groups)
{
    dependency_wait();
    const int64_t item = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, row = item / groups, group = item % groups;
    if (row >= a.rows) return;
    const int64_t first = group * 128 - a.phase, begin = first < 0 ? 0 : first, end = min(first + 128, a.cols);
    float v[4];
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int64_t j = begin + lane + 32 * i;
        v[i] = j < end ? load(a.x, a.dtype, row * a.x_stride + j) : 0.0f;
    }
    quantize_group(v);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int64_t j = begin + lane + 32 * i;
        if (j < end) store(a.y, a.y_dtype, row * a.y_stride + j, v[i]);
    }
}

} // namespace weft

using namespace weft;

extern "C" weft_status weft_router_cuda(const weft_router_args *a, void *stream)
{
    WEFT_TRY(weft__check_router(a));
    if (a->tokens == 0) return WEFT_OK;
    launch_route(a, stream);
    return launched("router");
}

extern "C" weft_status weft_quantize_groups_cuda(const weft_quantize_groups_args *a, void *stream)
{
    const int64_t sizes[] = {a->rows, a->cols, a->x_stride, a->y_stride, a->phase};
    WEFT_TRY(weft__check_sizes("quantize_groups", "rows, cols, x_stride, y_stride, phase", sizes, 5));
    WEFT_TRY(weft__check_float("quantize_groups", "x", a->dtype));
    WEFT_TRY(weft__check_float("quantize_groups", "y", a->y_dtype));
    if (a->phase >= 128) return weft_fail(WEFT_INVALID, "quantize_groups: phase %" PRId64 " is not below 128", a->phase);
    if (a->rows == 0 || a->cols == 0) return WEFT_OK;
    const int64_t groups = (a->phase + a->cols + 127) / 128;
    launch(quantize_rows, (unsigned)div_up(a->rows * groups, 4), 128, 0, stream, *a, groups);
    return launched("quantize_groups");
}
