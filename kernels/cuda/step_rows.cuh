/* kernels/cuda/step_rows.cuh - the small operations of a step that were not joined to a product, spread
 * over the blocks of its kernel. Rows are whole packs of 8 elements of T. */
#pragma once

#include "kernels/cuda/step_feed.cuh"

namespace weft {

#ifdef WEFT_HOPPER

/* f(row, pack) for every pack of rows, spread over all threads of the kernel. */
template <class F> __device__ __forceinline__ void step_each_pack(int64_t rows, int64_t packs, F f)
{
    const int each = (int)packs;
    for (int i = (int)blockIdx.x * (STEP_WARPS * 32) + (int)threadIdx.x; i < (int)rows * each; i += (int)gridDim.x * (STEP_WARPS * 32))
        f(i / each, i % each);
}
/* Elements that another block may have written: never from the L1. */
template <class T> __device__ __forceinline__ float widen_cg(const T *p)
{
    const unsigned short bits = __ldcg((const unsigned short *)p);
    T value;
    memcpy(&value, &bits, 2);
    return widen(value);
}
template <class T> __device__ __forceinline__ Pack<T, 8> step_pack(const void *base, int64_t index)
{
    const uint4 bits = __ldcg((const uint4 *)((const T *)base + index));
    Pack<T, 8> p;
    memcpy(&p, &bits, 16);
    return p;
}

__device__ static void step_embedding(const weft_embedding_args &a)
{
    step_each_pack(a.tokens, a.hidden / 8, [&](int64_t t, int i) {
        const int64_t row = (int64_t)a.ids[t] - a.first;
        const bool here = row >= 0 && row < a.count;
        ((uint4 *)a.y)[t * (a.hidden / 8) + i] = here ? __ldg((const uint4 *)a.w + row * (a.hidden / 8) + i) : make_uint4(0, 0, 0, 0);
    });
}
template <class T> __device__ static void step_gather(const weft_gather_rows_args &a)
{
    step_each_pack(a.count, a.cols / 8, [&](int64_t t, int i) {
        const int64_t from = a.indices[t];
        if (from >= 0 && from < a.x_rows) *(Pack<T, 8> *)((T *)a.y + t * a.y_stride + 8 * i) = step_pack<T>(a.x, from * a.x_stride + 8 * i);
    });
}
template <class T> __device__ static void step_silu(const weft_silu_mul_args &a)
{
    step_each_pack(a.rows, a.cols / 8, [&](int64_t t, int i) {
        Pack<T, 8> gate = step_pack<T>(a.x, t * a.x_stride + 8 * i), up = step_pack<T>(a.x, t * a.x_stride + a.cols + 8 * i);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float v = widen(gate.v[j]);
            gate.v[j] = narrow<T>(v / (1.0f + expf(-v)) * widen(up.v[j]));
        }
        *(Pack<T, 8> *)((T *)a.y + t * a.y_stride + 8 * i) = gate;
    });
}
template <class T> __device__ static void step_add(const weft_add_args &a)
{
    step_each_pack(a.rows, a.cols / 8, [&](int64_t t, int i) {
        Pack<T, 8> x = step_pack<T>(a.a, t * a.a_stride + 8 * i), y = step_pack<T>(a.b, t * a.b_stride + 8 * i);
#pragma unroll
        for (int j = 0; j < 8; j++) x.v[j] = narrow<T>(widen(x.v[j]) + widen(y.v[j]));
        *(Pack<T, 8> *)((T *)a.y + t * a.y_stride + 8 * i) = x;
    });
}
template <class T> __device__ static void step_rope(const weft_rope_args &a)
{
    const int half = (int)a.rotary_dim / 2;
    step_each_pack(a.tokens, a.heads * half, [&](int64_t t, int i) {
        const int position = a.positions[t], j = (int)(i % half);
        if (position < 0 || position >= a.max_positions) return;
        const float *cos = a.cos_sin + (int64_t)position * a.rotary_dim;
        T *x = (T *)a.x + t * a.token_stride + i / half * a.head_dim + j;
        const float c = __ldg(cos + j), s = __ldg(cos + half + j), x1 = widen_cg(x), x2 = widen_cg(x + half);
        x[0] = narrow<T>(x1 * c - x2 * s);
        x[half] = narrow<T>(x2 * c + x1 * s);
    });
}
template <class T> __device__ __forceinline__ void step_keep_rows(const weft_kv_write_args &a, const void *from, int64_t stride, void *cache, int dim)
{
    const int packs = dim / 8;
    step_each_pack(a.tokens, a.num_kv_heads * packs, [&](int64_t t, int i) {
        const int64_t place = place_of(a, t);
        if (place < 0) return;
        *(Pack<T, 8> *)((T *)cache + (place + i / packs * a.pages.page_size) * dim + i % packs * 8) = step_pack<T>(from, t * stride + 8 * i);
    });
}
template <class T> __device__ static void step_kv_write(const weft_kv_write_args &a)
{
    step_keep_rows<T>(a, a.k, a.k_stride, a.k_cache, (int)a.head_dim);
    step_keep_rows<T>(a, a.v, a.v_stride, a.v_cache, (int)a.head_dim_v);
}

/* A row is one block's: y may be x. */
template <class T> __device__ static void step_norm(const weft_rms_norm_args &a, float *sums)
{
    for (int64_t t = blockIdx.x; t < a.rows; t += gridDim.x) {
        T *residual = a.residual != nullptr ? (T *)a.residual + t * a.residual_stride : nullptr;
        const T *x = (const T *)a.x + t * a.x_stride, *r = residual != nullptr ? residual : x;
        float sum = 0.0f;
        for (int i = threadIdx.x; i < (int)a.cols; i += STEP_WARPS * 32) {
            float v = widen_cg(x + i);
            if (residual != nullptr) {
                const T both = narrow<T>(v + widen_cg(residual + i));
                residual[i] = both;
                v = widen(both);
            }
            sum += v * v;
        }
        sum = warp_sum(sum);
        step_sync();
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        step_sync();
        sum = 0.0f;
        for (int w = 0; w < STEP_WARPS; w++) sum += sums[w];
        const float factor = 1.0f / sqrtf(sum / (float)a.cols + a.eps);
        for (int i = threadIdx.x; i < (int)a.cols; i += STEP_WARPS * 32)
            ((T *)a.y)[t * a.y_stride + i] = narrow<T>(widen_cg(r + i) * factor * load(a.gain, a.gain_dtype, i));
    }
}

#endif

} // namespace weft
