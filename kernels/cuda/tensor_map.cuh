/* kernels/cuda/tensor_map.cuh - maps for the tensor copy engine, on the host. */
#pragma once

#include <cuda.h>

#include "kernels/cuda/cuda.cuh"

namespace weft {

/* A tensor of three dimensions as the copy engine brings boxes of it: the innermost dimension comes first and its elements
 * lie one behind the other; strides, in bytes and multiples of 16, are those of the other two. A box is stored in rows of
 * 128 bytes, permuted as hopper.cuh says; what lies outside of the tensor comes as zeros. dtype: of 16 bits, or of 8.
 * False where the driver has no such maps or does not take this one. */
bool tensor_map(CUtensorMap *map, weft_dtype dtype, const void *base, const int64_t (&sizes)[3], const int64_t (&strides)[2], const int64_t (&box)[3]);

/* The same of bytes, in five dimensions. */
bool bytes_map(CUtensorMap *map, const void *base, const int64_t (&sizes)[5], const int64_t (&strides)[4], const int64_t (&box)[5]);

/* The same of rows of bytes: boxes of 8 rows and `columns` times 128 bytes, which lie column by column. row_bytes: a multiple
 * of 128. */
bool rows_map(CUtensorMap *map, const void *rows_of, int64_t rows, int64_t row_bytes, int64_t stride_bytes, int columns);

/* The same in blocks of `apart` rows, which divides their number: boxes of the same 8 rows of two neighbouring blocks, one behind the other. */
bool pairs_map(CUtensorMap *map, const void *rows_of, int64_t rows, int64_t row_bytes, int64_t stride_bytes, int64_t apart, int columns);

/* Maps in the GPU's memory have been written there, `count` of them `stride` bytes apart, a multiple of 128 as is their address: kernels behind
 * this in the stream read them, whatever lay there before. */
void maps_arrived(const void *maps, int count, size_t stride, const weft_cuda_context *context, void *stream);

} // namespace weft
