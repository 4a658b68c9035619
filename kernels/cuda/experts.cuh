/* kernels/cuda/experts.cuh - the parts of weft_experts_cuda. Each launches; none checks. */
#pragma once

#include "kernels/cuda/cuda.cuh"

namespace weft {

/* The local index of an expert, -1: not here. */
__device__ __forceinline__ int local_expert(const weft_experts_args &a, int id)
{
    return id >= a.first && id < a.first + a.count ? (int)(id - a.first) : -1;
}

/* Few tokens, tensor cores, weights streamed once (experts_stream.cu). act: (pairs, intermediate). */
bool stream_fits(const weft_experts_args *a);
void stream_experts(const weft_experts_args *a, float *act, void *stream);

/* The same on Hopper, fp8 weights and bfloat16 x (experts_fp8.cu). False: nothing was launched. */
bool fp8_experts(const weft_experts_args *a, float *act, void *stream);

/* Many tokens, products of warpgroups (experts_tile.cu), in the whole workspace. */
bool tiles_fit(const weft_experts_args *a);
void tile_experts(const weft_experts_args *a, void *stream);

} // namespace weft
