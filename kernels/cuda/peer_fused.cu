/* kernels/cuda/peer_fused.cu - norms and the exchange of attention with their collective inside. */
#include "kernels/cuda/peer_launch.cuh"

namespace weft {

enum { DCP_WARPS = 4 };

/* ---- norms of q and k over the members ---- */

struct GroupNorms {
    weft_group_norm_args part[2];
    int count;
};

template <class T, int W> __device__ __forceinline__ float row_squares(const weft_group_norm_args &a, int64_t row)
{
    const Pack<T, W> *x = (const Pack<T, W> *)((const T *)a.x + row * a.x_stride);
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < a.cols / W; i += blockDim.x) {
        const Pack<T, W> v = x[i];
#pragma unroll
        for (int j = 0; j < W; j++) sum += widen(v.v[j]) * widen(v.v[j]);
    }
    return sum;
}

/* Two sums over a block at once. */
__device__ __forceinline__ float2 block_sums(float x, float y)
{
    __shared__ float2 part[32];
    x = warp_sum(x), y = warp_sum(y);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = make_float2(x, y);
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const float2 mine = lane < (int)blockDim.x / 32 ? part[lane] : make_float2(0.0f, 0.0f);
    return make_float2(warp_sum(mine.x), warp_sum(mine.y));
}

template <class T, int W> __device__ __forceinline__ void scale_pack(const weft_group_norm_args &a, int64_t row, int64_t i, Pack<T, W> v, const float (&gain)[W], float factor)
{
#pragma unroll
    for (int j = 0; j < W; j++) v.v[j] = narrow<T>(widen(v.v[j]) * factor * gain[j]);
    ((Pack<T, W> *)((T *)a.y + row * a.y_stride))[i] = v;
}

/* Blocks take rows in turns: all sums leave before the first is waited for. */
template <class T, int W, int N> __global__ void __launch_bounds__(1024) peer_group_norm(const __grid_constant__ weft_peer p, const __grid_constant__ GroupNorms g)
{
    const unsigned flag = peer_begin(p);
    const int64_t rows = g.part[0].rows;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const float2 sums = block_sums(row_squares<T, W>(g.part[0], row), g.count > 1 ? row_squares<T, W>(g.part[1], row) : 0.0f);
        const float q = g.part[0].cols > 0 ? sums.x / (float)g.part[0].cols : 0.0f;
        const float k = g.part[1].cols > 0 ? sums.y / (float)g.part[1].cols : 0.0f;
        if (threadIdx.x < (unsigned)p.size)
            peer_put(peer_box(p, threadIdx.x, p.rank, flag) + row, __float_as_uint(q) | (uint64_t)__float_as_uint(k) << 32, flag);
    }
    peer_counted(p, flag);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const int64_t index[1] = {row};
        uint64_t value[1][N];
        Pack<T, W> first[2];
        float gain[2][W];
#pragma unroll
        for (int n = 0; n < 2; n++) { /* the first pack of each part comes while the others' sums are on their way */
            const weft_group_norm_args &a = g.part[n];
            if (n >= g.count || threadIdx.x >= a.cols / W) continue;
            first[n] = ((const Pack<T, W> *)((const T *)a.x + row * a.x_stride))[threadIdx.x];
            load_pack<W>(a.gain, a.gain_dtype, (int64_t)threadIdx.x * W, gain[n]);
        }
        peer_take_each<N, 1, true>(p, flag, index, value);
        if (row + gridDim.x >= rows) dependency_release();
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const weft_group_norm_args &a = g.part[n];
            if (n >= g.count) continue;
            float var = 0.0f;
#pragma unroll
            for (int m = 0; m < N; m++)
                if (m < p.size) var += __uint_as_float((uint32_t)(value[0][m] >> (32 * n)));
            const float factor = 1.0f / sqrtf(var / (float)a.world + a.eps);
            if (threadIdx.x < a.cols / W) scale_pack<T, W>(a, row, threadIdx.x, first[n], gain[n], factor);
            for (int64_t i = (int64_t)threadIdx.x + blockDim.x; i < a.cols / W; i += blockDim.x) {
                load_pack<W>(a.gain, a.gain_dtype, i * W, gain[n]);
                scale_pack<T, W>(a, row, i, ((const Pack<T, W> *)((const T *)a.x + row * a.x_stride))[i], gain[n], factor);
            }
        }
    }
}

/* ---- the exchange of attention: a warp for each (token, head that stays here) ---- */

__device__ __forceinline__ float clean(float lse) { return isnan(lse) || lse == -minus_inf() ? minus_inf() : lse; }

/* What each member's part and the suffix count in the merged result, and its LSE. */
template <int N> __device__ __forceinline__ float dcp_weights(int size, const float (&lse)[N], float suffix, float (&weight)[N], float *rest)
{
    float max = clean(suffix), sum = 0.0f;
#pragma unroll
    for (int m = 0; m < N; m++)
        if (m < size) max = fmaxf(max, clean(lse[m]));
    const float base = max == minus_inf() ? 0.0f : max;
#pragma unroll
    for (int m = 0; m < N; m++) {
        weight[m] = m < size ? expf(clean(lse[m]) - base) : 0.0f;
        sum += weight[m];
    }
    *rest = expf(clean(suffix) - base);
    sum += *rest;
    const float scale = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
    for (int m = 0; m < N; m++) weight[m] *= scale;
    *rest *= scale;
    return sum > 0.0f ? logf(sum) + max : minus_inf();
}

template <class T, int N> __global__ void peer_dcp(const __grid_constant__ weft_peer p, const __grid_constant__ weft_peer_dcp_args a)
{
    constexpr int E = PeerRows<T>::E;
    const unsigned flag = peer_begin(p);
    const int lane = threadIdx.x % 32, heads = (int)a.heads, packets = (int)((a.dim + E - 1) / E);
    const int first = blockIdx.x * DCP_WARPS + threadIdx.x / 32, step = gridDim.x * DCP_WARPS, items = (int)(a.tokens * a.heads);
    auto source = [&](int item, int m) { return (int64_t)(item / heads) * heads * p.size + m * heads + item % heads; };
    auto rows = [&](const void *base, int64_t at) { return peer_rows<T>((const T *)base + at * a.dim, a.dim, a.dim, 0); };
    for (int item = first; item < items; item += step) {
        for (int k = 1; k < p.size; k++) {
            const int m = p.rank + k < p.size ? p.rank + k : p.rank + k - p.size;
            const int64_t from = source(item, m);
            PeerPacket *box = peer_box(p, m, p.rank, flag) + (int64_t)item * (packets + 1);
            if (lane == 0) peer_put(box, __float_as_uint(a.lse[from]), flag);
            for (int i = lane; i < packets; i += 32) peer_put(box + 1 + i, rows(a.partial, from).get(i), flag);
        }
    }
    peer_counted(p, flag);
    for (int item = first; item < items; item += step) {
        const int64_t here = source(item, p.rank), at = (int64_t)item * (packets + 1);
        const float own_lse = a.lse[here], suffix_lse = a.suffix != nullptr ? a.suffix_lse[item] : minus_inf();
        for (int i = lane; i < packets; i += 32) {
            const int64_t index[2] = {at, at + 1 + i};
            const uint64_t mine = rows(a.partial, here).get(i), late = a.suffix != nullptr ? rows(a.suffix, item).get(i) : 0;
            uint64_t value[2][N];
            float lse[N], weight[N], rest, y[E] = {}, x[E];
            peer_take_each<N, 2, false>(p, flag, index, value);
            if (item + step >= items) dependency_release();
#pragma unroll
            for (int m = 0; m < N; m++) lse[m] = m == p.rank ? own_lse : __uint_as_float((uint32_t)value[0][m]);
            const float whole = dcp_weights<N>(p.size, lse, suffix_lse, weight, &rest);
            auto add = [&](float w, uint64_t bits) { /* a part that counts nothing may hold anything */
                peer_widen<T, float>(bits, x);
                for (int j = 0; j < E; j++)
                    if (w != 0.0f) y[j] += w * x[j];
            };
#pragma unroll
            for (int m = 0; m < N; m++)
                if (m < p.size) add(weight[m], m == p.rank ? mine : value[1][m]);
            if (a.suffix != nullptr) {
                add(rest, late);
                rows(a.out, item).set(i, peer_narrow<T, float>(y));
            } else {
                for (int j = 0; j < E; j++)
                    if (i * E + j < a.dim) ((float *)a.out)[item * a.dim + i * E + j] = y[j];
            }
            if (i == 0 && a.lse_out != nullptr) a.lse_out[item] = whole;
        }
    }
}

template <int N> static cudaError_t load_all()
{
    cudaError_t error = cudaSuccess;
    auto also = [&](auto kernel) {
        if (error == cudaSuccess) error = load_kernel(kernel);
    };
    also(peer_group_norm<float, 4, N>), also(peer_group_norm<bf16, 8, N>), also(peer_group_norm<__half, 8, N>);
    also(peer_group_norm<float, 1, N>), also(peer_group_norm<bf16, 1, N>), also(peer_group_norm<__half, 1, N>);
    also(peer_dcp<float, N>), also(peer_dcp<bf16, N>), also(peer_dcp<__half, N>);
    return error;
}

cudaError_t peer_load_fused(void)
{
    cudaError_t error = load_all<2>();
    if (error == cudaSuccess) error = load_all<4>();
    if (error == cudaSuccess) error = load_all<WEFT_PEER_MAX>();
    return error;
}

static int64_t packets_of(int64_t count, weft_dtype dtype) { return div_up(count, 8 / (int64_t)weft_dtype_size(dtype)); }

static bool takes_packs(const weft_group_norm_args &a, int64_t width)
{
    return a.cols % width == 0 && a.x_stride % width == 0 && a.y_stride % width == 0 && aligned(a.x, 16) && aligned(a.y, 16);
}

static weft_status check_group_norm(const weft_peer *p, const weft_group_norm_args *parts, int count)
{
    WEFT_TRY(peer_check("group_norm over peers", p));
    if (count < 1 || count > 2) return weft_fail(WEFT_INVALID, "group_norm over peers takes 1 or 2 parts, got %d", count);
    for (int n = 0; n < count; n++) {
        const weft_group_norm_args *a = &parts[n];
        const int64_t sizes[] = {a->rows, a->cols};
        WEFT_TRY(weft__check_sizes("group_norm over peers", "rows, cols", sizes, 2));
        WEFT_TRY(weft__check_float("group_norm over peers", "x", a->dtype));
        WEFT_TRY(weft__check_float("group_norm over peers", "gain", a->gain_dtype));
        if (a->rows != parts[0].rows || a->dtype != parts[0].dtype || a->world < 1)
            return weft_fail(WEFT_INVALID, "group_norm over peers: parts must have the same rows and dtype, and world at least 1");
    }
    if (parts[0].rows <= p->capacity) return WEFT_OK;
    return weft_fail(WEFT_UNSUPPORTED, "group_norm over peers: %lld rows are more than an inbox of %lld packets holds", (long long)parts[0].rows,
                     (long long)p->capacity);
}

} // namespace weft

using namespace weft;

extern "C" weft_status weft_peer_group_norm(const weft_peer *p, const weft_group_norm_args *parts, int count, void *stream)
{
    WEFT_TRY(check_group_norm(p, parts, count));
    const int64_t rows = parts[0].rows;
    if (rows == 0) return WEFT_OK;
    GroupNorms g = {{parts[0], parts[count - 1]}, count};
    by_float(parts[0].dtype, [&](auto tag) {
        using T = decltype(tag);
        constexpr int W = 16 / sizeof(T);
        const bool packs = takes_packs(parts[0], W) && takes_packs(parts[count - 1], W);
        const int64_t items = most(parts[0].cols, parts[count - 1].cols) / (packs ? W : 1);
        const unsigned threads = (unsigned)least(1024, most(1, div_up(items, 32)) * 32);
        const unsigned blocks = (unsigned)least(rows, (int64_t)p->blocks * (1024 / threads > 2 ? 2 : 1024 / threads));
        by_size(p->size, [&](auto size) {
            constexpr int N = decltype(size)::value;
            if (packs) launch(peer_group_norm<T, W, N>, blocks, threads, 0, stream, *p, g);
            else launch(peer_group_norm<T, 1, N>, blocks, threads, 0, stream, *p, g);
        });
    });
    return launched("group_norm over peers");
}

extern "C" int weft_peer_dcp_fits(const weft_peer *p, const weft_peer_dcp_args *a)
{
    const int64_t each = packets_of(a->dim, a->dtype) + 1, items = a->tokens * a->heads;
    return items <= p->capacity / each;
}

extern "C" weft_status weft_peer_dcp(const weft_peer *p, const weft_peer_dcp_args *a, void *stream)
{
    const int64_t sizes[] = {a->tokens, a->heads, a->dim};
    WEFT_TRY(weft__check_sizes("exchange over peers", "tokens, heads, dim", sizes, 3));
    WEFT_TRY(weft__check_float("exchange over peers", "partial", a->dtype));
    WEFT_TRY(peer_check("exchange over peers", p));
    if (!weft_peer_dcp_fits(p, a))
        return weft_fail(WEFT_UNSUPPORTED, "exchange over peers: %lld heads of %lld do not fit an inbox of %lld packets",
                         (long long)(a->tokens * a->heads), (long long)a->dim, (long long)p->capacity);
    const int64_t items = a->tokens * a->heads;
    if (items == 0 || a->dim == 0) return WEFT_OK;
    by_float(a->dtype, [&](auto tag) {
        using T = decltype(tag);
        by_size(p->size, [&](auto size) {
            launch(peer_dcp<T, decltype(size)::value>, (unsigned)least(p->blocks, div_up(items, DCP_WARPS)), 32 * DCP_WARPS, 0, stream, *p, *a);
        });
    });
    return launched("exchange over peers");
}
