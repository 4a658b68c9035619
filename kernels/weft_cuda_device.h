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

/* One direction of the mail between a host and its GPU: page-locked memory of two parts that take turns. The
 * kernels count their calls themselves, so that what a graph replays works too. */
typedef struct weft_cuda_mail {
    void *parts;       /* page-locked, 16-byte aligned: call n uses the part n % 2 */
    size_t part_bytes; /* a multiple of 16 */
    unsigned *counter; /* here: [0] calls so far; [1] blocks that are done. Zero at first */
    unsigned *done;    /* page-locked: calls so far, once a call is through with its part */
} weft_cuda_mail;

/* ids[r]: the id of the best of row r over `world` ranks, whose candidates lie one behind another: (rows)
 * float32 values, then (rows) int32 ids. Ties go to the lower id; -1 where no value is a number above -inf. The
 * host reads them in the mail. */
typedef struct weft_cuda_choose_args {
    const void *candidates; /* (world, 2, rows) */
    int32_t *ids;           /* (rows) */
    int64_t world, rows;
    weft_cuda_mail mail;    /* of at least rows ids a part */
} weft_cuda_choose_args;
weft_status weft_cuda_choose(const weft_cuda_choose_args *args, void *stream);

/* A record that came by mail, where the kernels of a step read it. Ids[t] of it below zero become chosen[-1 - ids[t]].
 * Pairs (i, v) of it from word changes_at on are table[i] = v, but not where i < 0. */
typedef struct weft_cuda_arrive_args {
    weft_cuda_mail mail;
    void *record;          /* 16-byte aligned, rounded up to 16 bytes like its part of the mail */
    int64_t bytes;
    int64_t ids_at;        /* where its ids begin, in 4-byte words */
    const int32_t *chosen; /* (rows) */
    int64_t tokens, rows;
    int32_t *table;        /* (table_words); not in the record's bytes */
    int64_t table_words;
    int64_t changes_at, changes; /* a multiple of 4, and how many pairs; 0: no table */
} weft_cuda_arrive_args;
weft_status weft_cuda_arrive(const weft_cuda_arrive_args *args, void *stream);

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
