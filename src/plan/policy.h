/* plan/policy.h - how a model is cut, before any rank looks at it: sizes, not places.
 *
 * A policy names the tensor size, sizes per layer type and sizes per single layers. Lowered for a
 * rank it gives plans (DESIGN 10, Experts; Groups and policies). */
#pragma once

#include "base/object.h"
#include "plan/plan_table.h"
#include "plan/rank_grid.h"
#include "plan/rules.h"

/* Sizes of one layer type; 0 where not given (exchange_a2a: -1). */
typedef struct weft_layer_sizes {
    int tensor;     /* attention, mlp: default the policy's; experts: the cut of each expert */
    int context;    /* attention; default tp / tensor */
    int expert;     /* experts; default tp / tensor, or 1 */
    int interleave; /* attention; default the policy's */
    int exchange_a2a;
} weft_layer_sizes;

typedef struct weft_policy_entry {
    int first_layer, last_layer; /* inclusive; both -1: all layers of the type */
    weft_layer_type type;
    weft_layer_sizes sizes;
} weft_policy_entry;

typedef struct weft_policy_spec {
    int tensor;
    int block_size, interleave; /* 0: 16, 1 */
    int exchange_a2a;
    const weft_policy_entry *entries; /* any order */
    int num_entries;
} weft_policy_spec;

typedef struct weft_policy {
    weft_object object;
    int tensor, block_size, interleave, exchange_a2a;
    int num_entries;
    weft_policy_entry entries[]; /* complete sizes; types first, then sorted by layer */
} weft_policy;

/* Checks every rule that needs no model; refuses overlapping layers. */
weft_status weft_policy_create(weft_policy **out, const weft_policy_spec *spec);
/* The rules that need a model's numbers, for every entry, and layers that the model has. */
weft_status weft_policy_check_model(const weft_policy *policy, const weft_model_numbers *model);

/* The plan of a layer (< 0: of the type) on a rank of [0, tensor). */
weft_status weft_policy_plan(const weft_policy *policy, weft_layer_type type, int layer, int rank, weft_plan *out);
/* All plans of a rank; *out is one block that the caller frees. */
weft_status weft_policy_lower(const weft_policy *policy, int rank, weft_plan_table **out);

/* What the policy needs to talk: groups larger than one rank, each (type, world_size) once, by type
 * in the order of the enum and then by size. Every rank creates them in this order. */
typedef struct weft_policy_group {
    weft_group_type type;
    weft_rank_rows rows; /* world_size is rows.row_size */
} weft_policy_group;
weft_status weft_policy_groups(const weft_policy *policy, weft_policy_group **out, int *count);
void weft_policy_groups_free(weft_policy_group *groups, int count); /* NULL is allowed */

/* The least common multiple of the context sizes of all layers: a virtual block is this times the
 * block size. */
int weft_policy_context_lcm(const weft_policy *policy);
/* "tensor=8 attention={tensor=2,context=4} layers 0-3 attention={tensor=8}" */
const char *weft_policy_describe(const weft_policy *policy, char *text, size_t size);
