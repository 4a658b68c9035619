/* layers/hetero_attention.h - causal attention over a paged cache, under a layer parallel plan.
 *
 * Three ways, by the plan:
 *   no context parallelism: one pass over the cache, this step's keys included;
 *   resharding (input world < output world): the queries of the rank already hold every head that
 *     its context group serves. Attention over this rank's share of the context, exchange over the
 *     context group, merge with the new-token part, which is computed for the kept heads alone.
 *     Heads leave by the output axis;
 *   plain context parallelism (input == output, context > 1): the queries are gathered over the
 *     context group first, and each rank keeps its own heads.
 * Ranks decide by the step record alone whether the context part and its exchange are skipped. */
#pragma once

#include "cache/kv_cache.h"
#include "cache/step.h"
#include "comm/group.h"
#include "plan/axis.h"

typedef struct weft_hetero_attention weft_hetero_attention;

typedef struct weft_hetero_attention_options {
    int num_heads, num_kv_heads;             /* of this rank, by plan.input */
    int total_num_heads, total_num_kv_heads; /* both given: checked against the plan; 0: not said */
    int head_size, v_head_size;
    int sliding_window; /* 0: none */
    float scale;        /* 0: 1 / sqrt(head_size) */
    weft_dtype kv_dtype;
    weft_plan plan;
} weft_hetero_attention_options;

typedef struct weft_hetero_attention_traffic {
    uint64_t steps, exchanges; /* steps: forwards; exchanges: those that were not skipped */
    uint64_t bytes_sent;       /* query gather and exchange */
    double exchange_seconds;   /* inside the group's calls, waiting included */
    double total_seconds;
} weft_hetero_attention_traffic;

/* UNSUPPORTED: "cpu paged does not support layer parallel plan ...". */
weft_status weft_hetero_attention_supports(const weft_plan *plan);
/* Finds its context group in the rank's registry and keeps it. */
weft_status weft_hetero_attention_create(weft_hetero_attention **out, weft_rank *rank, const weft_hetero_attention_options *options);
weft_object *weft_hetero_attention_object(weft_hetero_attention *attention);
const weft_hetero_attention_options *weft_hetero_attention_get_options(const weft_hetero_attention *attention);
int weft_hetero_attention_output_heads(const weft_hetero_attention *attention);
/* First head that leaves: its absolute index. */
int weft_hetero_attention_output_first_head(const weft_hetero_attention *attention);
weft_kv_cache_shape weft_hetero_attention_cache_shape(const weft_hetero_attention *attention);
/* Allocates the pages, in place of those before. */
weft_status weft_hetero_attention_bind_cache(weft_hetero_attention *attention, int64_t num_blocks, int64_t block_tokens);
const weft_kv_cache *weft_hetero_attention_cache(const weft_hetero_attention *attention); /* borrowed; NULL when unbound */
weft_hetero_attention_traffic weft_hetero_attention_get_traffic(const weft_hetero_attention *attention);
/* Collective over the context group. Writes k and v of the step into the cache, then attends.
 * q, k, v: (tokens, heads * size), rows may be apart. out: (tokens, output heads * v_head_size) of
 * q's dtype in the rank's arena, padding rows zero. */
weft_status weft_hetero_attention_forward(weft_hetero_attention *attention, const weft_tensor *q, const weft_tensor *k,
                                          const weft_tensor *v, const weft_step *step, weft_tensor **out);
