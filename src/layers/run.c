/* layers/run.c - operands, copies and weights where the rank computes. */
#include "layers/run.h"

#include <string.h>

#include "layers/load_dummy.h"
#include "model/source.h"

weft_status weft_run_operand(weft_rank *rank, const weft_tensor *tensor, const void **out)
{
    *out = tensor->data;
    if (rank->cuda == NULL || tensor->storage->cuda != NULL) return WEFT_OK;
    if (tensor->device_data != NULL) {
        *out = tensor->device_data;
        return WEFT_OK;
    }
    size_t bytes = (size_t)weft_tensor_numel(tensor) * weft_dtype_size(tensor->dtype);
    void *copy = NULL;
    WEFT_TRY(weft_arena_scratch(rank->arena, bytes, &copy));
    WEFT_TRY(weft_cuda_to_device(rank->cuda, copy, tensor->data, bytes));
    *out = copy;
    return WEFT_OK;
}

weft_status weft_run_copy_rows(weft_rank *rank, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                               int64_t rows)
{
    if (rank->cuda != NULL) return weft_cuda_copy_rows(rank->cuda, dst, dst_pitch, src, src_pitch, width, (size_t)rows);
    for (int64_t r = 0; r < rows; r++) memcpy((char *)dst + (size_t)r * dst_pitch, (const char *)src + (size_t)r * src_pitch, width);
    return WEFT_OK;
}

/* Some first-dimension rows at a time through page-locked memory: the next piece is read while the
 * one before is on its way. */
static weft_status load_to_device(weft_rank *rank, const weft_source *source, const int64_t *start, const int64_t *count,
                                  const int64_t *stride, weft_dtype dtype, char *dst)
{
    enum { PIECE_BYTES = 8 << 20 };
    int64_t first[WEFT_SOURCE_MAX_DIMS], length[WEFT_SOURCE_MAX_DIMS];
    size_t row = (source->ndim > 0 ? (size_t)stride[0] : 1) * weft_dtype_size(dtype);
    int64_t rows = source->ndim > 0 ? count[0] : 1, piece = row > 0 && row < PIECE_BYTES ? (int64_t)(PIECE_BYTES / row) : 1;
    if (rows == 0 || row == 0) return WEFT_OK;
    memcpy(first, start, (size_t)source->ndim * sizeof *first);
    memcpy(length, count, (size_t)source->ndim * sizeof *length);
    for (int64_t done = 0, n; done < rows; done += n) {
        void *pinned;
        n = rows - done < piece ? rows - done : piece;
        first[0] = start[0] + done;
        length[0] = n;
        WEFT_TRY(weft_cuda_outgoing(rank->cuda, (size_t)n * row, &pinned));
        WEFT_TRY(weft_source_read(source, first, length, pinned, dtype, stride));
        WEFT_TRY(weft_cuda_send(rank->cuda, dst + (size_t)done * row, (size_t)n * row));
    }
    return WEFT_OK;
}

weft_status weft_run_load(weft_rank *rank, const weft_source *source, const int64_t *start, const int64_t *count, weft_tensor *tensor,
                          int64_t offset)
{
    int64_t stride[WEFT_SOURCE_MAX_DIMS], step = 1;
    for (int i = source->ndim - 1; i >= 0; i--) {
        stride[i] = step;
        step *= count[i];
    }
    char *dst = (char *)tensor->data + (size_t)offset * weft_dtype_size(tensor->dtype);
    if (tensor->storage->cuda == NULL) return weft_source_read(source, start, count, dst, tensor->dtype, stride);
    int made = 0;
    WEFT_TRY(weft__load_dummy(rank, source, start, count, tensor->dtype, dst, &made));
    return made ? WEFT_OK : load_to_device(rank, source, start, count, stride, tensor->dtype, dst);
}
