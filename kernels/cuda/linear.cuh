/* kernels/cuda/linear.cuh - the parts of weft_linear_cuda. Each launches; none checks. */
#pragma once

#include "kernels/cuda/cuda.cuh"

namespace weft {

enum { SKINNY_TOKENS = 8 };

/* Tensor cores, w streamed once: x 16-bit, w of x's type or fp8, everything in whole 16 bytes. */
bool skinny_fits(const weft_linear_args *a);
void skinny(const weft_linear_args *a, void *stream); /* tokens <= SKINNY_TOKENS */

/* The same through a ring of shared memory (linear_stream.cu), of what skinny_fits allows; what is faster so. */
bool stream_product_fits(const weft_linear_args *a);
void stream_product(const weft_linear_args *a, void *stream);

/* Any dtypes, sizes and alignments. */
void rows_product(const weft_linear_args *a, void *stream); /* tokens <= SKINNY_TOKENS */
void tile_product(const weft_linear_args *a, void *stream);

/* Rows [row, row + rows) of fp8 w into `to` (rows, k) of dtype. */
void expand_rows(const weft_linear_args *a, int64_t row, int64_t rows, void *to, weft_dtype dtype, void *stream);

/* 16-bit x into `to` (tokens, k) float32. */
void widen_tokens(const weft_linear_args *a, float *to, void *stream);

/* y[t][i] = value + bias (+ y) */
__device__ __forceinline__ void finish(const weft_linear_args &a, int64_t t, int64_t i, float value)
{
    if (a.bias != nullptr) value += load(a.bias, a.bias_dtype, i);
    if (a.add) value += load(a.y, a.y_dtype, t * a.y_stride + i);
    store(a.y, a.y_dtype, t * a.y_stride + i, value);
}

} // namespace weft
