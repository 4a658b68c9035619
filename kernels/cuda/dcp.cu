/* kernels/cuda/dcp.cu - partial attention results of the context ranks: merge, combination, packs,
 * masks. One warp for each (token, head). */
#include <inttypes.h>

#include "kernels/cuda/cuda.cuh"

namespace weft {

enum { WARPS = 4 };

__device__ __forceinline__ float clean(float lse) { return isnan(lse) || lse == -minus_inf() ? minus_inf() : lse; }
__device__ __forceinline__ float power(float x, int base2) { return base2 ? exp2f(x) : expf(x); }

/* log_b of the sum of b^lse over the parts; -inf when all are empty. */
__device__ static float combined_lse(const float *lse, int64_t parts, int64_t stride, int base2)
{
    float max = minus_inf(), sum = 0.0f;
    for (int64_t n = 0; n < parts; n++) max = fmaxf(max, clean(lse[n * stride]));
    if (max == minus_inf()) return max;
    for (int64_t n = 0; n < parts; n++) sum += power(clean(lse[n * stride]) - max, base2);
    return (base2 ? log2f(sum) : logf(sum)) + max;
}

/* The (token, head) number of this warp. */
__device__ __forceinline__ int64_t warp_item() { return (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; }

__global__ void merge(const weft_merge_attn_states_args a)
{
    dependency_wait();
    const int64_t item = warp_item(), t = item / a.heads, h = item % a.heads;
    if (item >= a.tokens * a.heads) return;
    const float prefix = clean(a.prefix_lse[item]), suffix = clean(a.suffix_lse[item]), max = fmaxf(prefix, suffix);
    float p = 0.0f, s = 0.0f, lse = minus_inf();
    if (max != minus_inf()) {
        p = expf(prefix - max);
        s = expf(suffix - max);
        const float z = p + s;
        p /= z;
        s /= z;
        lse = logf(z) + max;
    }
    for (int64_t i = threadIdx.x % 32; i < a.dim; i += 32) {
        const int64_t at = h * a.dim + i;
        float y = 0.0f;
        if (p != 0.0f) y += p * load(a.prefix, a.prefix_dtype, t * a.prefix_stride + at);
        if (s != 0.0f) y += s * load(a.suffix, a.suffix_dtype, t * a.suffix_stride + at);
        store(a.out, a.out_dtype, t * a.out_stride + at, y);
    }
    __syncwarp();
    if (a.lse_out != nullptr && threadIdx.x % 32 == 0) a.lse_out[item] = lse;
}

__global__ void combine(const weft_dcp_combine_args a)
{
    dependency_wait();
    const int64_t item = warp_item(), t = item / a.heads, h = item % a.heads;
    if (item >= a.tokens * a.heads) return;
    const float *lse = a.lse + t * a.lse_token_stride + h;
    const float s = t < a.valid_rows ? combined_lse(lse, a.parts, a.lse_part_stride, a.base2) : minus_inf();
    for (int64_t i = threadIdx.x % 32; i < a.dim; i += 32) {
        float y = 0.0f;
        for (int64_t n = 0; n < a.parts && s != minus_inf(); n++) {
            const float own = clean(lse[n * a.lse_part_stride]);
            const float weight = own == minus_inf() ? 0.0f : power(own - s, a.base2);
            if (weight != 0.0f) y += weight * load(a.partial, a.dtype, n * a.part_stride + t * a.token_stride + h * a.head_stride + i);
        }
        store(a.out, a.out_dtype, item * a.dim + i, y);
    }
    if (a.lse_out != nullptr && threadIdx.x % 32 == 0) a.lse_out[item] = s;
}

/* Items are (part, token, head) in the order of the buffer. LANE is a type of the dtype's size. */
template <class LANE> __global__ void pack(const weft_dcp_pack_args a)
{
    dependency_wait();
    constexpr int lanes = 4 / sizeof(LANE);
    const int64_t item = warp_item(), row = item / a.heads, h = item % a.heads;
    if (item >= a.parts * a.tokens * a.heads) return;
    const int64_t n = row / a.tokens, t = row % a.tokens, from = (t * a.parts + n) * a.heads + h;
    const LANE *x = (const LANE *)a.out + from * a.dim;
    LANE *y = (LANE *)a.buffer + item * (a.dim + lanes);
    for (int64_t i = threadIdx.x % 32; i < a.dim; i += 32) y[i] = x[i];
    const uint32_t bits = ((const uint32_t *)a.lse)[from];
    const int lane = threadIdx.x % 32;
    if (lane < lanes) y[a.dim + lane] = (LANE)(bits >> (16 * lane));
}

template <class LANE> __global__ void unpack(const weft_dcp_pack_args a)
{
    dependency_wait();
    constexpr int lanes = 4 / sizeof(LANE);
    const int64_t item = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= a.parts * a.tokens * a.heads) return;
    const LANE *row = (const LANE *)a.buffer + item * (a.dim + lanes) + a.dim;
    uint32_t bits = row[0];
    if (lanes == 2) bits |= (uint32_t)row[1] << 16;
    ((uint32_t *)a.lse_unpacked)[item] = bits;
}

__global__ void scale(const weft_dcp_scale_args a)
{
    dependency_wait();
    const int64_t item = warp_item(), rows = a.tokens * a.heads, t = item / a.heads, h = item % a.heads;
    if (item >= rows) return;
    const float s = combined_lse(a.lses + item, a.parts, rows, a.base2), own = clean(a.lses[a.part * rows + item]);
    const float weight = own == minus_inf() ? 0.0f : power(own - s, a.base2);
    float *to = a.scaled + (h * a.tokens + t) * a.dim;
    for (int64_t i = threadIdx.x % 32; i < a.dim; i += 32)
        to[i] = weight == 0.0f ? 0.0f : weight * load(a.out, a.dtype, item * a.dim + i);
    if (a.lse_out != nullptr && threadIdx.x % 32 == 0 && h >= a.lse_first && h < a.lse_first + a.lse_heads)
        a.lse_out[t * a.lse_heads + h - a.lse_first] = s;
}

__global__ void mask_empty(const weft_mask_empty_args a)
{
    dependency_wait();
    const int64_t t = blockIdx.x;
    const int r = request_of(a.query_start_loc, a.requests, t);
    if (r < a.requests && a.local_lens[r] != 0) return;
    for (int64_t h = threadIdx.x; h < a.heads; h += blockDim.x) a.lse[t * a.heads + h] = minus_inf();
}

static weft_status check_pack(const weft_dcp_pack_args *a)
{
    const int64_t sizes[] = {a->parts, a->tokens, a->heads, a->dim};
    WEFT_TRY(weft__check_sizes("dcp_pack", "parts, tokens, heads, dim", sizes, 4));
    return weft__check_float("dcp_pack", "out", a->dtype);
}

template <class A> static void launch_warps(void (*kernel)(const A), const A &a, int64_t items, void *stream)
{
    launch(kernel, (unsigned)div_up(items, WARPS), 32 * WARPS, 0, stream, a);
}

} // namespace weft

using namespace weft;

extern "C" weft_status weft_merge_attn_states_cuda(const weft_merge_attn_states_args *a, void *stream)
{
    const int64_t sizes[] = {a->tokens, a->heads, a->dim};
    WEFT_TRY(weft__check_sizes("merge_attn_states", "tokens, heads, dim", sizes, 3));
    WEFT_TRY(weft__check_float("merge_attn_states", "prefix", a->prefix_dtype));
    WEFT_TRY(weft__check_float("merge_attn_states", "suffix", a->suffix_dtype));
    WEFT_TRY(weft__check_float("merge_attn_states", "out", a->out_dtype));
    if (a->tokens == 0 || a->heads == 0) return WEFT_OK;
    launch_warps(merge, *a, a->tokens * a->heads, stream);
    return launched("merge_attn_states");
}

extern "C" weft_status weft_dcp_combine_cuda(const weft_dcp_combine_args *a, void *stream)
{
    const int64_t sizes[] = {a->parts, a->tokens, a->heads, a->dim, a->valid_rows};
    WEFT_TRY(weft__check_sizes("dcp_combine", "parts, tokens, heads, dim, valid_rows", sizes, 5));
    WEFT_TRY(weft__check_float("dcp_combine", "partial", a->dtype));
    WEFT_TRY(weft__check_float("dcp_combine", "out", a->out_dtype));
    if (a->tokens == 0 || a->heads == 0) return WEFT_OK;
    launch_warps(combine, *a, a->tokens * a->heads, stream);
    return launched("dcp_combine");
}

extern "C" weft_status weft_dcp_pack_cuda(const weft_dcp_pack_args *a, void *stream)
{
    WEFT_TRY(check_pack(a));
    const int64_t items = a->parts * a->tokens * a->heads;
    if (items == 0) return WEFT_OK;
    if (a->dtype == WEFT_F32) launch_warps(pack<uint32_t>, *a, items, stream);
    else launch_warps(pack<uint16_t>, *a, items, stream);
    return launched("dcp_pack");
}

extern "C" weft_status weft_dcp_unpack_lse_cuda(const weft_dcp_pack_args *a, void *stream)
{
    WEFT_TRY(check_pack(a));
    const int64_t items = a->parts * a->tokens * a->heads;
    if (items == 0) return WEFT_OK;
    if (a->dtype == WEFT_F32) launch(unpack<uint32_t>, (unsigned)div_up(items, 128), 128, 0, stream, *a);
    else launch(unpack<uint16_t>, (unsigned)div_up(items, 128), 128, 0, stream, *a);
    return launched("dcp_unpack_lse");
}

extern "C" weft_status weft_dcp_scale_cuda(const weft_dcp_scale_args *a, void *stream)
{
    const int64_t sizes[] = {a->parts, a->part, a->tokens, a->heads, a->dim, a->lse_first, a->lse_heads};
    WEFT_TRY(weft__check_sizes("dcp_scale", "parts, part, tokens, heads, dim, lse_first, lse_heads", sizes, 7));
    WEFT_TRY(weft__check_float("dcp_scale", "out", a->dtype));
    if (a->part >= a->parts) return weft_fail(WEFT_INVALID, "dcp_scale: part %" PRId64 " of %" PRId64, a->part, a->parts);
    if (a->lse_out != NULL && a->lse_first + a->lse_heads > a->heads)
        return weft_fail(WEFT_INVALID, "dcp_scale: heads %" PRId64 " to %" PRId64 " of %" PRId64, a->lse_first,
                         a->lse_first + a->lse_heads, a->heads);
    if (a->tokens == 0 || a->heads == 0) return WEFT_OK;
    launch_warps(scale, *a, a->tokens * a->heads, stream);
    return launched("dcp_scale");
}

extern "C" weft_status weft_mask_empty_cuda(const weft_mask_empty_args *a, void *stream)
{
    const int64_t sizes[] = {a->tokens, a->heads, a->requests};
    WEFT_TRY(weft__check_sizes("mask_empty", "tokens, heads, requests", sizes, 3));
    if (a->tokens == 0 || a->heads == 0) return WEFT_OK;
    launch(mask_empty, (unsigned)a->tokens, 64, 0, stream, *a);
    return launched("mask_empty");
}
