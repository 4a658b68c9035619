/* kernels/cuda/tensor_map.cu - maps for the tensor copy engine. */
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tensor_map.cuh"

namespace weft {

typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                           const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static bool encode(CUtensorMap *map, CUtensorMapDataType type, int rank, const void *base, const int64_t *sizes, const int64_t *strides, const int64_t *box)
{
    void *function = NULL; /* of the driver, which is not linked */
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) != cudaSuccess) {
        (void)cudaGetLastError();
        return false;
    }
    if (found != cudaDriverEntryPointSuccess) return false;
    cuuint64_t lengths[5], apart[4];
    cuuint32_t edges[5], steps[5];
    for (int i = 0; i < rank; i++) lengths[i] = (cuuint64_t)sizes[i], edges[i] = (cuuint32_t)box[i], steps[i] = 1;
    for (int i = 0; i + 1 < rank; i++) apart[i] = (cuuint64_t)strides[i];
    return ((Encode)function)(map, type, (cuuint32_t)rank, (void *)base, lengths, apart, edges, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool tensor_map(CUtensorMap *map, weft_dtype dtype, const void *base, const int64_t (&sizes)[3], const int64_t (&strides)[2], const int64_t (&box)[3])
{
    const CUtensorMapDataType type = dtype == WEFT_BF16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                     : dtype == WEFT_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                         : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    return encode(map, type, 3, base, sizes, strides, box);
}

bool bytes_map(CUtensorMap *map, const void *base, const int64_t (&sizes)[5], const int64_t (&strides)[4], const int64_t (&box)[5])
{
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5, base, sizes, strides, box);
}

bool rows_map(CUtensorMap *map, const void *rows_of, int64_t rows, int64_t row_bytes, int64_t stride_bytes, int columns)
{
    return tensor_map(map, WEFT_F8E4M3, rows_of, {128, rows, row_bytes / 128}, {stride_bytes, 128}, {128, 8, columns}); /* bytes */
}

bool pairs_map(CUtensorMap *map, const void *rows_of, int64_t rows, int64_t row_bytes, int64_t stride_bytes, int64_t apart, int columns)
{
    return bytes_map(map, rows_of, {128, apart, row_bytes / 128, rows / apart, 1}, {stride_bytes, 128, apart * stride_bytes, rows * stride_bytes}, {128, 8, columns, 2, 1});
}

/* A block on each multiprocessor: each remembers maps of its own. */
__global__ void forget_maps(const char *maps, int count, size_t stride)
{
#ifdef WEFT_HOPPER
    for (int i = threadIdx.x; i < count; i += blockDim.x) map_arrived(maps + i * stride);
#endif
}

void maps_arrived(const void *maps, int count, size_t stride, const weft_cuda_context *context, void *stream)
{
    if (count > 0) launch_at_once(forget_maps, context->sms, 32, (int)context->shared, stream, (const char *)maps, count, stride);
}

} // namespace weft
