/* kernels/cuda/attention.cu - which attention kernel runs, and the one for any dtype and size. */
#include <inttypes.h>

#include "kernels/cuda/attention.cuh"

namespace weft {

enum { ANY_THREADS = 128, ANY_WARPS = ANY_THREADS / 32, DECODE_ROWS = 64 };

__global__ void padding(const weft_attention_args a)
{
    dependency_wait();
    clear_padding(a, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
}

/* One block for each (head, token). Its warps take turns at 32 keys; a lane scores one key, then
 * all lanes add up the values, each its dims. */
__global__ void __launch_bounds__(ANY_THREADS) attend_any(const weft_attention_args a, int64_t token0)
{
    dependency_wait();
    __shared__ float q[WEFT_MAX_HEAD_DIM], out[ANY_WARPS][WEFT_MAX_HEAD_DIM], maxes[ANY_WARPS], sums[ANY_WARPS];
    const int64_t t = token0 + blockIdx.y;
    const int h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = a.head_dim, dim_v = a.head_dim_v;
    const int r = request_of(a.query_start_loc, a.requests, t);
    if (r >= a.requests) return;
    const int g = (a.first_head + h) / a.group_size - a.first_kv_head;
    const KeyRange keys = keys_of(a, r);
    int low, high;
    visible(a, keys, (int)t - a.query_start_loc[r], low, high);
    for (int i = threadIdx.x; i < dim; i += ANY_THREADS) q[i] = load(a.q, a.dtype, t * a.q_stride + (int64_t)h * dim + i) * a.scale;
    __syncthreads();
    float acc[WEFT_MAX_HEAD_DIM / 32] = {}, max = minus_inf(), sum = 0.0f;
    for (int key0 = low + warp * 32; key0 < high; key0 += ANY_THREADS) {
        const int key = key0 + lane;
        float score = minus_inf();
        int64_t row_v = -1;
        if (key < high) {
            const int64_t row = key_row(a, r, g, key, a.k_stride, dim);
            row_v = key_row(a, r, g, key, a.v_stride, dim_v);
            score = 0.0f;
#pragma unroll 8
            for (int i = 0; i < dim; i++) score += q[i] * (row < 0 ? 0.0f : load(a.k, a.kv_dtype, row + i));
            if (row < 0) score = minus_inf();
        }
        float top = score;
        for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        if (top == minus_inf()) continue;
        const float next = fmaxf(max, top), ratio = expf(max - next), p = expf(score - next);
        max = next;
        sum = sum * ratio + warp_sum(p);
#pragma unroll
        for (int i = 0; i < WEFT_MAX_HEAD_DIM / 32; i++) acc[i] *= ratio;
        for (int j = 0; j < 32 && key0 + j < high; j++) {
            const float weight = __shfl_sync(~0u, p, j);
            const int64_t row = __shfl_sync(~0u, row_v, j);
            if (weight == 0.0f || row < 0) continue;
#pragma unroll
            for (int i = 0; i < WEFT_MAX_HEAD_DIM / 32; i++)
                if (32 * i + lane < dim_v) acc[i] += weight * load(a.v, a.kv_dtype, row + 32 * i + lane);
        }
    }
#pragma unroll
    for (int i = 0; i < WEFT_MAX_HEAD_DIM / 32; i++) out[warp][32 * i + lane] = acc[i];
    if (lane == 0) maxes[warp] = max, sums[warp] = sum;
    __syncthreads();
    max = minus_inf(), sum = 0.0f;
    for (int w = 0; w < ANY_WARPS; w++) max = fmaxf(max, maxes[w]);
    float weights[ANY_WARPS];
    for (int w = 0; w < ANY_WARPS; w++) {
        weights[w] = max == minus_inf() ? 0.0f : expf(maxes[w] - max);
        sum += weights[w] * sums[w];
    }
    for (int i = threadIdx.x; i < dim_v; i += ANY_THREADS) {
        float y = 0.0f;
        for (int w = 0; w < ANY_WARPS; w++) y += weights[w] * out[w][i];
        store(a.out, a.dtype, t * a.out_stride + (int64_t)h * dim_v + i, sum == 0.0f ? 0.0f : y / sum);
    }
    if (a.lse != nullptr && threadIdx.x == 0) a.lse[t * a.num_heads + h] = sum == 0.0f ? minus_inf() : max + logf(sum);
}

void attention_any(const weft_attention_args *a, void *stream)
{
    for (int64_t t = 0; t < a->tokens; t += 65535)
        launch(attend_any, dim3((unsigned)a->num_heads, (unsigned)least(65535, a->tokens - t)), ANY_THREADS, 0, stream, *a, t);
}

static weft_status check(const weft_attention_args *a)
{
    const int64_t sizes[] = {a->tokens, a->requests, a->max_query_len, a->max_seq_len};
    WEFT_TRY(weft__check_sizes("attention", "tokens, requests, max_query_len, max_seq_len", sizes, 4));
    WEFT_TRY(weft__check_float("attention", "q and out", a->dtype));
    WEFT_TRY(weft__check_float("attention", "k and v", a->kv_dtype));
    WEFT_TRY(weft__check_heads(a));
    if (a->keys != WEFT_KEYS_NEW) WEFT_TRY(weft__check_pages("attention", &a->pages));
    if (a->requests > 65534) return weft_fail(WEFT_INVALID, "attention: %" PRId64 " requests, at most 65534 at once", a->requests);
    return WEFT_OK;
}

} // namespace weft

using namespace weft;

extern "C" weft_status weft_attention_cuda(const weft_attention_args *a, void *stream)
{
    WEFT_TRY(check(a));
    if (a->tokens == 0 || a->num_heads == 0) return WEFT_OK;
    const int64_t query_len = a->max_query_len > 0 ? least(a->max_query_len, a->tokens) : a->tokens;
    const int64_t rows = query_len * least(a->group_size, a->num_heads);
    const bool mma = a->requests > 0 && attention_mma_fits(a);
    if (mma && rows <= DECODE_ROWS) {
        attention_decode(a, query_len, stream);
        return launched("attention");
    }
    launch(padding, (unsigned)least(a->tokens, 64), 128, 0, stream, *a);
    if (mma && attention_prefill_wgmma(a, stream)) return launched("attention");
    if (mma) attention_prefill(a, stream);
    else if (a->requests > 0) attention_any(a, stream);
    return launched("attention");
}
