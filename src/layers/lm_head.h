/* layers/lm_head.h - hidden states to logits, the vocabulary cut over the ranks of an axis.
 *
 * Logits are float32 whatever the weights are. forward gives this rank's shard, padded: every rank
 * has the same number of columns, those without a row hold -inf. gather joins the shards and cuts
 * the padding off. A tied head reads the embedding's rows. */
#pragma once

#include "layers/vocab_embedding.h"

typedef struct weft_lm_head {
    weft_object object;
    weft_rank *rank;
    weft_group *group;
    weft_axis axis;
    int64_t vocab_size, hidden_size;
    weft_vocab_layout layout;
    float logit_scale;
    weft_vocab_embedding *tied; /* NULL: weight is its own */
    weft_linear_weight weight;
} weft_lm_head;

/* tied may be NULL; else its cut and sizes are taken and options->weight only names the layer. */
weft_status weft_lm_head_create(weft_lm_head **out, weft_rank *rank, const weft_vocab_options *options,
                                weft_vocab_embedding *tied, double logit_scale);
/* x (rows, hidden_size) -> float32 (rows, layout.count). Talks to nobody. */
weft_status weft_lm_head_forward(weft_lm_head *head, const weft_tensor *x, weft_tensor **logits);
/* (rows, layout.count) -> a float32 view (rows, vocab_size), the same on all ranks. Collective. */
weft_status weft_lm_head_gather(weft_lm_head *head, weft_tensor *logits, weft_tensor **all);
const weft_linear_weight *weft_lm_head_weight(const weft_lm_head *head);
