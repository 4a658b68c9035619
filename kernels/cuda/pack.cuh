/* kernels/cuda/pack.cuh - activations of 128 columns as the tensor cores take them. */
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/quantize.cuh"

namespace weft {

/* The shape of a row of weights, in blocks of 128 columns counted from the first block of scales on. */
template <class W> struct WeightRow {
    int phase, columns, bytes, groups;
    __host__ __device__ WeightRow(int64_t scale_phase, int64_t count)
        : phase(sizeof(W) == 1 ? (int)(scale_phase % 128) : 0), columns((int)count), bytes((int)(count * (int64_t)sizeof(W))),
          groups((phase + columns + 127) / 128)
    {
    }
};

/* Four columns a lane of a group, zeros outside; all lanes of a warp. Afterwards v times what is returned are
 * the values: v are e4m3 values where `quantize` says so (values of weft_quantize_groups), else the values times
 * a power of two that brings the largest just below 2^15, so that no half overflows. */
__device__ __forceinline__ float scale_group(float (&v)[4], bool quantize)
{
    float largest;
    const bool finite = largest_of_group(v, largest);
    const float scale = largest / 448.0f;
    if (quantize && finite && scale > 0.0f) {
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = round_e4m3(fmaxf(-448.0f, fminf(448.0f, v[i] / scale)));
        return scale;
    }
    const int exponent = (int)(__float_as_uint(largest) >> 23) - 127 - 14;
    if (!finite || exponent <= -126 || exponent >= 126) return 1.0f;
    const float inverse = __uint_as_float((uint32_t)(127 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] *= inverse;
    return __uint_as_float((uint32_t)(exponent + 127) << 23);
}

/* Elements j to j + 3, aligned as four of them are. */
__device__ __forceinline__ void load_four(float (&v)[4], const void *x, int dtype, int64_t j)
{
    if (dtype == WEFT_F32) {
        const float4 four = *(const float4 *)((const float *)x + j);
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
        return;
    }
    const uint2 four = *(const uint2 *)((const uint16_t *)x + j);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint16_t bits = (uint16_t)((i < 2 ? four.x : four.y) >> (16 * (i % 2)));
        v[i] = dtype == WEFT_BF16 ? __uint_as_float((uint32_t)bits << 16) : __half2float(__ushort_as_half(bits));
    }
}

} // namespace weft
