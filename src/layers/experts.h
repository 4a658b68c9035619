/* layers/experts.h - the experts of a mixture, cut over ranks by a plan (DESIGN 10, Experts).
 *
 *     plan.expert   whole experts over E ranks: this rank holds num_experts / E
 *     plan.input    the width of each expert over m ranks: gate and up by rows, down by columns
 *     plan.output   all ranks that hold a part: one sum over its group joins experts and widths
 *
 * Every rank sees all tokens. Weights are those of this rank only:
 *
 *     up    (local experts, 2 I, hidden)   rows: gate, then up; I = local width
 *     down  (local experts, hidden, I)
 *
 * A checkpoint has three matrices for each expert (gate, up, down), or all experts in two tensors:
 * gate and up (experts, 2 width, hidden), down (experts, hidden, width). fp8 comes with scales as in
 * linear_weight.h; a shard may begin anywhere inside a block. */
#pragma once

#include "comm/group.h"
#include "kernels/weft_kernels.h"
#include "layers/linear_weight.h"

typedef enum weft_expert_part { WEFT_EXPERT_GATE, WEFT_EXPERT_UP, WEFT_EXPERT_DOWN, WEFT_EXPERT_PARTS } weft_expert_part;

typedef struct weft_experts_options {
    weft_weight_options weight; /* no bias */
    int64_t num_experts, hidden_size, intermediate_size; /* global */
    weft_plan plan;
} weft_experts_options;

typedef struct weft_experts_matrix {
    weft_tensor *w;         /* (local experts, rows, columns) */
    weft_tensor *scale;     /* float32 (local experts, scale rows, scale columns); NULL unless fp8 */
    weft_tensor *scale_row; /* int32 (rows) */
} weft_experts_matrix;

typedef struct weft_experts {
    weft_object object;
    weft_rank *rank;
    weft_group *group; /* of plan.output; NULL for a world of 1 */
    char *name;
    weft_plan plan;
    int64_t num_experts, hidden_size, intermediate_size;
    weft_shard experts, width; /* of this rank */
    int convert, dequantize, quantize;
    weft_dtype dtype;
    weft_experts_matrix up, down;
    int fused_scales;     /* 1: as one tensor, 0: each expert's own, -1: none yet */
    int ready;            /* everything was loaded */
    uint16_t *state;      /* (local experts): bits of each part: loaded, awaits scales, has scales */
} weft_experts;

weft_status weft_experts_create(weft_experts **out, weft_rank *rank, const weft_experts_options *options);
/* One matrix of one expert (a global id that this rank holds; others are refused). */
weft_status weft_experts_load(weft_experts *experts, weft_expert_part part, int64_t expert, const weft_source *source);
weft_status weft_experts_load_scale(weft_experts *experts, weft_expert_part part, int64_t expert, const weft_source *source);
/* All experts in one tensor: part UP is gate and up together, part DOWN is down. */
weft_status weft_experts_load_fused(weft_experts *experts, weft_expert_part part, const weft_source *source);
weft_status weft_experts_load_scale_fused(weft_experts *experts, weft_expert_part part, const weft_source *source);
/* "weights of expert 5 of X were not loaded (missing: up)" */
weft_status weft_experts_check_ready(weft_experts *experts);
int64_t weft_experts_bytes(const weft_experts *experts);

/* x (tokens, hidden_size), ids int32 and weights float32 (tokens, k) -> y (tokens, hidden_size) of x's
 * dtype, in the rank's arena. Collective over the group. */
weft_status weft_experts_forward(weft_experts *experts, const weft_tensor *x, const weft_tensor *ids, const weft_tensor *weights,
                                 weft_tensor **y);
