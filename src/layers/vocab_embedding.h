/* layers/vocab_embedding.h - token embeddings, rows cut over the ranks of an axis (SEMANTICS 4.3).
 *
 * The vocabulary is padded to a multiple of lcm(64, world), so every rank has as many rows; rows
 * that do not exist are never stored, and a rank may hold none. */
#pragma once

#include "comm/group.h"
#include "layers/linear_weight.h"

typedef struct weft_vocab_options {
    weft_weight_options weight;
    int64_t vocab_size, hidden_size;
    weft_axis axis;
} weft_vocab_options;

typedef struct weft_vocab_embedding {
    weft_object object;
    weft_rank *rank;
    weft_group *group; /* NULL for a world of 1 */
    weft_axis axis;
    int64_t vocab_size, hidden_size;
    weft_vocab_layout layout;
    int has_output_dtype;
    weft_dtype output_dtype;  /* of the result; else the stored dtype (bfloat16 for fp8) */
    weft_linear_weight weight; /* (layout.real, hidden_size), one part */
} weft_vocab_embedding;

weft_status weft_vocab_embedding_create(weft_vocab_embedding **out, weft_rank *rank, const weft_vocab_options *options);
/* ids int32 (tokens), each in [0, vocab_size) -> (tokens, hidden_size), the same on all ranks.
 * "token id 1010 is outside the vocabulary of 1010". Collective over the group. */
weft_status weft_vocab_embedding_forward(weft_vocab_embedding *embedding, const weft_tensor *ids, weft_tensor **y);
/* The shard of vocabulary rows of `layout` as a part of `weight`. */
weft_status weft_vocab_weight_init(weft_linear_weight *weight, weft_rank *rank, const weft_vocab_options *options,
                                   weft_vocab_layout *layout);
