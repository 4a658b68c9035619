/* layers/linear_weight.h - the part of a weight matrix that one rank holds, with bias and scales.
 *
 * A matrix (out, in) is made of parts that are sharded each for itself (q, k, v; gate, up). The
 * local matrix is the parts' shards one under the other:
 *
 *     checkpoint, one tensor per part        checkpoint, fused          this rank
 *     part 0: [total 0, in]                  [part 0]                   [shard of part 0]
 *     part 1: [total 1, in]                  [part 1]                   [shard of part 1]
 *
 * A fused tensor is cut into its parts first, then sharded. Float weights keep the dtype of the
 * checkpoint unless another is asked for; fp8 stays fp8 and brings block scales (one float32 for
 * 128 x 128 elements, SEMANTICS 4.2). A shard may begin anywhere inside a block: each local row
 * keeps the row of its scale. */
#pragma once

#include "comm/group.h"
#include "device/tensor.h"
#include "model/source.h"
#include "plan/layout.h"

enum { WEFT_WEIGHT_MAX_PARTS = 8, WEFT_SCALE_BLOCK = 128 };

typedef struct weft_weight_part {
    char id[12];        /* "q", "0": what load() is asked for */
    int64_t total;      /* rows of the whole part */
    int64_t global_row; /* its first row where the parts are fused */
    weft_shard rows;    /* what this rank holds of the part */
    int64_t row;        /* first local row */
    int64_t scale_row;  /* first local row of its scales */
} weft_weight_part;

typedef struct weft_linear_weight {
    char *name; /* for messages */
    weft_rank *rank; /* borrowed from the layer that holds this */
    weft_memory *memory;
    int num_parts;
    weft_weight_part parts[WEFT_WEIGHT_MAX_PARTS];
    int64_t rows, total_rows;
    int64_t total_columns;
    weft_shard columns;
    int has_bias;
    int holds_bias; /* 0: another rank adds it; only its shape is checked here */
    int convert;    /* store float weights as `dtype`; else as they come */
    int dequantize, quantize_activations;
    weft_dtype dtype;
    weft_tensor *weight;    /* (rows, columns.count) */
    weft_tensor *bias;      /* (rows) */
    weft_tensor *scale;     /* float32 (scale rows, scale columns) */
    weft_tensor *scale_row; /* int32 (rows) */
    unsigned loaded, bias_loaded, scale_loaded; /* a bit for each part */
    unsigned awaits_scale; /* parts that came as fp8 */
} weft_linear_weight;

typedef struct weft_weight_options {
    const char *name;
    int bias;
    int convert;
    weft_dtype dtype; /* with convert: float32, bfloat16 or float16 */
    int dequantize;   /* fp8 is stored as `dtype` (float32 without convert), scales multiplied in */
    int quantize_activations; /* with fp8 weights: x is rounded to e4m3, one scale for 128 columns of a token */
} weft_weight_options;

weft_status weft_linear_weight_init(weft_linear_weight *w, weft_rank *rank, const weft_weight_options *options,
                                    int64_t total_columns, weft_shard columns);
void weft_linear_weight_clear(weft_linear_weight *w);
/* Adds a part; all before the first load. */
weft_status weft_linear_weight_add_part(weft_linear_weight *w, const char *id, int64_t total, weft_shard rows);
/* The index of a shard id, or "unknown shard id 'x' (known: q, k, v)". NULL is -1: the fused tensor. */
weft_status weft_linear_weight_find(const weft_linear_weight *w, const char *id, int *part);

/* part -1: a fused tensor of all parts. FORMAT names the tensor, wanted and found. */
weft_status weft_linear_weight_load(weft_linear_weight *w, int part, const weft_source *source);
weft_status weft_linear_weight_load_bias(weft_linear_weight *w, int part, const weft_source *source);
weft_status weft_linear_weight_load_scale(weft_linear_weight *w, int part, const weft_source *source);
/* "weights of X were not loaded (missing: k, v)" */
weft_status weft_linear_weight_ready(const weft_linear_weight *w);
int64_t weft_linear_weight_bytes(const weft_linear_weight *w);

/* y = x W^T (+ bias when add_bias): x (tokens, columns.count), y (tokens, rows) of y_dtype, cut from
 * the rank's arena; summed over the group where one is given (collective). */
weft_status weft_linear_weight_apply(const weft_linear_weight *w, weft_rank *rank, const weft_tensor *x, int add_bias,
                                     weft_dtype y_dtype, weft_group *group, weft_tensor **y);
/* The same into the first `rows` columns of out (tokens, at least rows), dense rows. */
weft_status weft_linear_weight_apply_into(const weft_linear_weight *w, weft_rank *rank, const weft_tensor *x, int add_bias,
                                          weft_tensor *out);

/* row[j] *= scale[(first_column % 128 + j) / 128] for `count` floats of dtype, rounded once. */
void weft_scale_row(void *row, weft_dtype dtype, int64_t count, const float *scale, int64_t first_column);

/* INVALID unless x is a live (tokens, columns) tensor of floats with dense rows. */
weft_status weft_layer_check_rows(const char *name, const weft_tensor *x, int64_t columns);
