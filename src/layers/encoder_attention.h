/* layers/encoder_attention.h - attention that sees both ways, within the step's own tokens.
 *
 * For encoder-only models (is_causal false in their configuration): no cache, no context part. It
 * runs under plans that leave the heads where they came in. */
#pragma once

#include "cache/step.h"
#include "plan/axis.h"

typedef struct weft_encoder_attention weft_encoder_attention;

typedef struct weft_encoder_attention_options {
    int num_heads, num_kv_heads; /* of this rank */
    int head_size, v_head_size;
    int sliding_window; /* 0: none. A key is seen from up to window - 1 tokens behind it, and from all before */
    float scale;        /* 0: 1 / sqrt(head_size) */
    weft_plan plan;
} weft_encoder_attention_options;

/* UNSUPPORTED, naming the backend and the plan, for a resharding or context parallel one. */
weft_status weft_encoder_attention_supports(const weft_plan *plan);
weft_status weft_encoder_attention_create(weft_encoder_attention **out, weft_rank *rank, const weft_encoder_attention_options *options);
weft_object *weft_encoder_attention_object(weft_encoder_attention *attention);
const weft_encoder_attention_options *weft_encoder_attention_get_options(const weft_encoder_attention *attention);
/* out: (tokens, num_heads * v_head_size) of q's dtype, in the rank's arena. */
weft_status weft_encoder_attention_forward(weft_encoder_attention *attention, const weft_tensor *q, const weft_tensor *k,
                                           const weft_tensor *v, const weft_step *step, weft_tensor **out);
