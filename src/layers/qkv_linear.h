/* layers/qkv_linear.h - the projections to queries, keys and values as one product (SEMANTICS 4.1).
 *
 * Rows come from the plan's input axis (P ranks, this one is r), D = head_size, Dv = v_head_size:
 *
 *     local rows   q [0, nq D)   k [nq D, (nq + nkv) D)   v [.., + nkv Dv)
 *
 * With P >= KV each rank holds one KV head, and P / KV ranks hold the same. Nothing is reduced: a
 * bias belongs to its rows. */
#pragma once

#include "layers/linear_weight.h"

typedef struct weft_qkv_options {
    weft_weight_options weight;
    int64_t hidden_size;
    int head_size, v_head_size; /* v_head_size 0: head_size */
    int total_num_heads, total_num_kv_heads; /* kv 0: total_num_heads */
    weft_plan plan;
    int tensor_parallel_size; /* what plan.output must be cut by */
    int disable_tp;           /* every rank holds all heads, whatever the plan */
} weft_qkv_options;

typedef struct weft_qkv_linear {
    weft_object object;
    weft_rank *rank;
    weft_plan plan;
    weft_head_layout layout;
    int head_size, v_head_size, total_num_heads, total_num_kv_heads;
    int64_t q_size, k_size, v_size; /* of this rank */
    weft_linear_weight weight;      /* parts "q", "k", "v" */
} weft_qkv_linear;

/* "QKV output plan must match tensor parallelism: plan=4, tp=8"; heads that do not divide. */
weft_status weft_qkv_linear_create(weft_qkv_linear **out, weft_rank *rank, const weft_qkv_options *options);
/* x (tokens, hidden_size) -> qkv (tokens, q_size + k_size + v_size) in the rank's arena. */
weft_status weft_qkv_linear_forward(weft_qkv_linear *layer, const weft_tensor *x, weft_tensor **qkv);
/* Views of qkv; outputs are the caller's. */
weft_status weft_qkv_linear_split(const weft_qkv_linear *layer, weft_tensor *qkv, weft_tensor **q, weft_tensor **k, weft_tensor **v);
