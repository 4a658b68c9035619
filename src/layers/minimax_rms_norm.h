/* layers/minimax_rms_norm.h - RMSNorm of q or k over all heads of the model (SEMANTICS 5).
 *
 * Statistics span the plan's input group: each rank gives the mean of its own squares, the group
 * sums them, and the sum is divided by the input world. That is the mean over all heads because
 * shards are equally wide, and stays right when several ranks hold the same KV head.
 * With plan.input.world_size 1 nothing is sent. */
#pragma once

#include "comm/group.h"
#include "device/tensor.h"
#include "model/source.h"
#include "plan/axis.h"

typedef struct weft_minimax_rms_norm_options {
    const char *name;
    int64_t hidden_size; /* of all heads: the length of the gain in the checkpoint */
    double eps;
    /* How the gain is cut; 0: like plan.input. For k with more ranks than KV heads: KV shards, one
     * held by several ranks. */
    int weight_shard_world_size, weight_shard_rank;
    weft_plan plan;
    int convert;
    weft_dtype dtype;
} weft_minimax_rms_norm_options;

typedef struct weft_minimax_rms_norm {
    weft_object object;
    weft_rank *rank;
    weft_group *group; /* NULL when plan.input.world_size is 1 */
    weft_plan plan;
    char *name;
    int64_t total_size, offset, size; /* size: of this rank */
    float eps;
    int convert;
    weft_dtype dtype;
    weft_tensor *gain;
} weft_minimax_rms_norm;

weft_status weft_minimax_rms_norm_create(weft_minimax_rms_norm **out, weft_rank *rank, const weft_minimax_rms_norm_options *options);
weft_status weft_minimax_rms_norm_load(weft_minimax_rms_norm *norm, const weft_source *source);
/* x (tokens, size) -> y, dense, in the rank's arena. Collective over the group. */
weft_status weft_minimax_rms_norm_forward(weft_minimax_rms_norm *norm, const weft_tensor *x, weft_tensor **y);
/* Both norms straight out of packed qkv (tokens, at least q size + k size): two passes around one
 * float32 all_reduce of (tokens, 2). q (tokens, q size) and k (tokens, k size) come out dense; the
 * rest of qkv is not touched. The norms must have the same eps and plan.input. */
weft_status weft_minimax_rms_norm_forward_qk(weft_minimax_rms_norm *q_norm, weft_minimax_rms_norm *k_norm, const weft_tensor *qkv,
                                             weft_tensor **q, weft_tensor **k);
