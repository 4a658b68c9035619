/* layers/attention_parts.h - what hetero and encoder attention have in common. Of this room only. */
#pragma once

#include "cache/step.h"
#include "comm/world.h"
#include "device/tensor.h"
#include "layers/run.h"

typedef struct weft__attention_shape {
    int num_heads, num_kv_heads, head_size, v_head_size; /* of this rank */
    int sliding_window;                                  /* 0: none */
    float scale;                                         /* 0 at creation: 1 / sqrt(head_size) */
} weft__attention_shape;

/* Checks the sizes, fills in the scale. `what` begins the refusals. */
weft_status weft__attention_shape_check(weft__attention_shape *shape, const char *what);
/* q (T, num_heads * head_size), k (T, num_kv_heads * head_size), v (T, num_kv_heads * v_head_size):
 * rows may be apart, elements of a row may not; one float dtype. */
weft_status weft__attention_inputs_check(const weft__attention_shape *shape, const weft_tensor *q, const weft_tensor *k,
                                         const weft_tensor *v, const weft_step *step);
/* Sizes, strides and lengths of an attention call on these inputs: keys NEW, causal, all heads. */
weft_attention_args weft__attention_args_new(const weft_rank *rank, const weft__attention_shape *shape, const weft_tensor *q,
                                             const weft_tensor *k, const weft_tensor *v, const weft_step *step);
