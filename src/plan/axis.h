/* plan/axis.h - an axis says where a rank stands along one cut; a plan says how a layer is cut.
 *
 * Both are immutable values. Errors carry the seed's words. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef enum weft_group_type {
    WEFT_GROUP_TENSOR,           /* "tensor" */
    WEFT_GROUP_ATTENTION_TENSOR, /* "attention_tensor": the input cut of attention */
    WEFT_GROUP_CONTEXT,          /* "context": shares of the sequence (DCP) */
    WEFT_GROUP_EXPERT,           /* "expert": whole experts */
    WEFT_GROUP_EXPERT_TENSOR,    /* "expert_tensor": the cut of each expert */
    WEFT_GROUP_MLP_TENSOR,       /* "mlp_tensor": mlp = {tensor = k}, k below tp */
    WEFT_GROUP_PIPELINE,
    WEFT_GROUP_DATA,
    WEFT_GROUP_PREFILL_CONTEXT,
    WEFT_GROUP_TYPE_COUNT
} weft_group_type;

typedef enum weft_layer_type {
    WEFT_LAYER_DEFAULT,
    WEFT_LAYER_ATTENTION,
    WEFT_LAYER_MLP,
    WEFT_LAYER_EXPERTS,
    WEFT_LAYER_EMBEDDING,
    WEFT_LAYER_LM_HEAD,
    WEFT_LAYER_TYPE_COUNT
} weft_layer_type;

const char *weft_group_type_name(weft_group_type type);
int weft_group_type_from_name(const char *name, weft_group_type *out); /* 0 when unknown */
const char *weft_layer_type_name(weft_layer_type type);
int weft_layer_type_from_name(const char *name, weft_layer_type *out);

typedef struct weft_axis {
    int world_size; /* >= 1 */
    int rank;       /* [0, world_size) */
    weft_group_type group;
} weft_axis;

/* "world_size must be positive, got 0", "rank must be in [0, 2), got 2" */
weft_status weft_axis_make(weft_axis *out, int world_size, int rank, weft_group_type group);
int weft_axis_equal(weft_axis a, weft_axis b); /* all three fields */

/* input: how the layer's weights and activations come in. output: how they leave.
 * context: the rank's share of the sequence; (1, 0, context) unless decode context parallel.
 * expert: whole experts over ranks; (1, 0, expert) for every layer but experts. */
typedef struct weft_plan {
    weft_axis input, output, context, expert;
    int interleave;   /* tokens that stay together on one context rank; >= 1 */
    int exchange_a2a; /* 0: ag_rs, 1: a2a */
} weft_plan;

/* context (1, 0), expert (1, 0), interleave 1, ag_rs. A resharding attention plan whose output
 * world is a multiple of its input world gets context (output / input, output.rank % that). */
weft_plan weft_plan_make(weft_axis input, weft_axis output);
int weft_plan_equal(const weft_plan *a, const weft_plan *b);
int weft_plan_reshards_output(const weft_plan *plan); /* input != output, all three fields */
/* input_size * input.world / output.world, or "Global input size must be divisible by ..." */
weft_status weft_plan_output_size(const weft_plan *plan, int64_t input_size, int64_t *out);
weft_plan weft_plan_single_rank(void);
const char *weft_axis_describe(weft_axis axis, char *text, size_t size); /* "tensor 5/8" */
const char *weft_plan_describe(const weft_plan *plan, char *text, size_t size);
