/* weft_cuda_device.h - device work that is no operation of a model: what the host does in place for
 * CPU ranks. C11, without CUDA types; stream is a cudaStream_t of the current device. */
#pragma once

#include "kernels/weft_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { WEFT_CUDA_MAX_PEERS = 64 };

/* dst[r][c] = the dummy weight of row (row + r), column (column + c): the bits of src/model/dummy.h,
 * rounded to source_dtype and then to dtype. kind: that of weft_dummy. */
typedef struct weft_cuda_dummy_args {
    void *dst; /* (rows, columns) contiguous dtype */
    uint64_t seed;
    int kind;
    int64_t row, rows, column, columns;
    weft_dtype source_dtype, dtype; /* floats; or both float8_e4m3 */
} weft_cuda_dummy_args;
weft_status weft_cuda_dummy(const weft_cuda_dummy_args *args, void *stream);

/* dst[r * dst_stride + i] = op over sources s of source[s][r * src_stride + i], in order, in float32
 * (int32: exact), rounded once. dst may be one of the sources. */
typedef struct weft_cuda_reduce_args {
    const void *sources[WEFT_CUDA_MAX_PEERS];
    void *dst;
    int count, max; /* max: the largest, not the sum */
    int64_t rows, cols, src_stride, dst_stride;
    weft_dtype dtype; /* float32, bfloat16, float16, int32 */
} weft_cuda_reduce_args;
weft_status weft_cuda_reduce(const weft_cuda_reduce_args *args, void *stream);

/* Rows of float32 logits: the first `real` columns times scale, those behind them -inf. */
typedef struct weft_cuda_finish_args {
    float *x;
    int64_t rows, cols, real, stride;
    float scale;
} weft_cuda_finish_args;
weft_status weft_cuda_finish_logits(const weft_cuda_finish_args *args, void *stream);

/* ids[r]: the id of the best of row r over `world` ranks, whose candidates lie one behind another: (rows)
 * float32 values, then (rows) int32 ids. Ties go to the lower id; -1 where no value is a number above -inf. */
typedef struct weft_cuda_choose_args {
    const void *candidates; /* (world, 2, rows) */
    int32_t *ids;           /* (rows) */
    int64_t world, rows;
} weft_cuda_choose_args;
weft_status weft_cuda_choose(const weft_cuda_choose_args *args, void *stream);

/* ids[t] below zero become chosen[-1 - ids[t]]. */
typedef struct weft_cuda_follow_ids_args {
    int32_t *ids;          /* (tokens) */
    const int32_t *chosen; /* (rows) */
    int64_t tokens, rows;
} weft_cuda_follow_ids_args;
weft_status weft_cuda_follow_ids(const weft_cuda_follow_ids_args *args, void *stream);

#ifdef __cplusplus
}
#endif
