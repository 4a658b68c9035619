/* layers/run.c - operands, copies and weights where the rank computes. */
#include "layers/run.h"

#include <stdatomic.h>
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

/* Some first-dimension rows of a source, by all threads of the rank: one alone reads the cache of files at a tenth
 * of what goes over to the GPU. */
typedef struct {
    const weft_source *source;
    const int64_t *start, *count, *stride;
    char *dst;
    weft_dtype dtype;
    atomic_int failed;
} piece_read;

static weft_status read_part(const piece_read *read, long begin, long end)
{
    int64_t first[WEFT_SOURCE_MAX_DIMS] = {0}, length[WEFT_SOURCE_MAX_DIMS] = {0};
    size_t row = (size_t)read->stride[0] * weft_dtype_size(read->dtype);
    memcpy(first, read->start, (size_t)read->source->ndim * sizeof *first);
    memcpy(length, read->count, (size_t)read->source->ndim * sizeof *length);
    first[0] += begin;
    length[0] = end - begin;
    return weft_source_read(read->source, first, length, read->dst + (size_t)begin * row, read->dtype, read->stride);
}

static void read_on_thread(void *context, int part, int parts)
{
    piece_read *read = context;
    long begin, end;
    weft_pool_range((long)read->count[0], 1, part, parts, &begin, &end);
    if (end > begin && read_part(read, begin, end) != WEFT_OK) atomic_store(&read->failed, 1);
}

static weft_status read_piece(weft_rank *rank, const weft_source *source, const int64_t *start, const int64_t *count, void *dst,
                              weft_dtype dtype, const int64_t *stride)
{
    if (source->ndim == 0 || count[0] < 2) return weft_source_read(source, start, count, dst, dtype, stride);
    piece_read read = {.source = source, .start = start, .count = count, .stride = stride, .dst = dst, .dtype = dtype};
    weft_pool_run(rank->pool, read_on_thread, &read);
    return atomic_load(&read.failed) ? read_part(&read, 0, (long)count[0]) : WEFT_OK; /* once more, for what this thread is to say */
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
        WEFT_TRY(read_piece(rank, source, first, length, pinned, dtype, stride));
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
