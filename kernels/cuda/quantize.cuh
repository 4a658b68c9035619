/* kernels/cuda/quantize.cuh - a group of 128 activations as e4m3 with one scale would hold it. */
#pragma once

#include "kernels/cuda/cuda.cuh"

namespace weft {

/* Nearest e4m3 value, ties to even; |x| <= 448. Steps are 2^-9 below 2^-6 and 1/8 of the power of
 * two above. */
__device__ __forceinline__ float round_e4m3(float x)
{
    int exponent = (int)(__float_as_uint(x) >> 23 & 0xff) - 127;
    exponent = exponent < -6 ? -9 : exponent - 3;
    const float step = __uint_as_float((uint32_t)(exponent + 127) << 23);
    return rintf(x / step) * step;
}

/* The largest magnitude of a warp's values, four a lane, in every lane; whether all are finite. */
__device__ __forceinline__ bool largest_of_group(const float (&v)[4], float &largest)
{
    largest = 0.0f;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        largest = fmaxf(largest, fabsf(v[i]));
        finite = finite && isfinite(v[i]);
    }
    for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
    return __all_sync(~0u, finite);
}

/* The values of a warp's lanes, four each; lanes behind the end hold 0. What is not finite stays. */
__device__ __forceinline__ void quantize_group(float (&v)[4])
{
    float largest;
    const bool finite = largest_of_group(v, largest);
    const float scale = largest / 448.0f;
    if (!finite || !(scale > 0.0f)) return;
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = round_e4m3(fmaxf(-448.0f, fminf(448.0f, v[i] / scale))) * scale;
}

} // namespace weft
