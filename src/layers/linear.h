/* layers/linear.h - y = x W^T + b, whole or cut over the ranks of an axis.
 *
 *   replicated     every rank holds all of W
 *   column         a rank holds rows of W, gives its columns of y; gather_output joins them
 *   merged column  several matrices with one input (gate, up), each sharded for itself:
 *                  y = [shard of part 0 | shard of part 1 | ...]
 *   row            a rank holds columns of W, takes its columns of x; the partial results are
 *                  summed over the axis's group. The bias is added once, by the axis's rank 0
 *
 * The group of the axis must exist when the layer talks (row, gather_output); it is never replaced
 * by another. */
#pragma once

#include "comm/group.h"
#include "layers/linear_weight.h"

typedef enum weft_linear_kind { WEFT_LINEAR_REPLICATED, WEFT_LINEAR_COLUMN, WEFT_LINEAR_ROW } weft_linear_kind;

typedef struct weft_linear_options {
    weft_linear_kind kind;
    weft_weight_options weight;
    int64_t input_size; /* global */
    int num_outputs;    /* column: 1 to 8 parts; others: 1 */
    const int64_t *output_sizes; /* global */
    weft_axis axis;     /* not for replicated */
    int gather_output;  /* column with one part */
    int reduce_results; /* row: 0 leaves partial results, and refuses a bias */
} weft_linear_options;

typedef struct weft_linear {
    weft_object object;
    weft_linear_kind kind;
    weft_axis axis;
    weft_rank *rank;
    weft_group *group; /* NULL when it never talks */
    int gather_output;
    weft_linear_weight weight;
} weft_linear;

weft_status weft_linear_create(weft_linear **out, weft_rank *rank, const weft_linear_options *options);
/* x (tokens, local input) -> y (tokens, local or gathered output) of x's dtype, in the rank's arena.
 * Collective over the group where there is one. */
weft_status weft_linear_forward(weft_linear *linear, const weft_tensor *x, weft_tensor **y);
const char *weft_linear_kind_name(weft_linear_kind kind);

/* The registered group of an axis, where this rank must stand at axis.rank; NULL for a world of 1. */
weft_status weft_layer_group(weft_rank *rank, weft_axis axis, const char *name, weft_group **out); /* retained */
