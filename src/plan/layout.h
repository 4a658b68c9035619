/* plan/layout.h - which rank owns what. Pure arithmetic; nobody else divides by a group's size.
 *
 * A shard is a run [offset, offset + count) of something global: heads, rows, columns, experts,
 * vocabulary. The sequence is not cut in runs but dealt out in strips of `interleave` tokens over
 * the `size` ranks of the context group (SEMANTICS 2.1):
 *
 *     owner(p) = (p / I) mod N      local(p) = (p / (N I)) I + p mod I
 *     global(l, d) = (l / I) (N I) + d I + l mod I */
#pragma once

#include <stdint.h>

#include "base/status.h"
#include "plan/axis.h"

typedef struct weft_shard {
    int64_t offset, count;
} weft_shard;

/* Equal parts; `what` names the thing in the refusal: "8 key heads do not divide over 3 ranks". */
weft_status weft_shard_even(weft_shard *out, const char *what, int64_t total, weft_axis axis);

/* The heads of a rank under plan.input (SEMANTICS 4.1). With world >= KV each rank holds one KV
 * head and num_kv_head_replicas ranks hold the same. */
typedef struct weft_head_layout {
    int num_heads, num_kv_heads;  /* of this rank */
    int num_kv_head_replicas;
    int first_head, first_kv_head; /* absolute */
    int output_num_heads;         /* heads that leave by plan.output */
    int output_first_head;        /* absolute */
} weft_head_layout;
weft_status weft_head_layout_make(weft_head_layout *out, int total_num_heads, int total_num_kv_heads, const weft_plan *plan);

/* Vocabulary rows of a rank: padded to a multiple of lcm(64, world). real: rows that exist. */
typedef struct weft_vocab_layout {
    int64_t padded_vocab, offset, count, real;
} weft_vocab_layout;
weft_vocab_layout weft_vocab_layout_make(int64_t vocab_size, weft_axis axis);

/* The share of a sequence that a context rank holds. */
typedef struct weft_context_layout {
    int size, rank, interleave;
} weft_context_layout;

static inline int weft_context_owner(weft_context_layout c, int64_t p)
{
    return (int)(p / c.interleave % c.size);
}
static inline int64_t weft_context_local(weft_context_layout c, int64_t p)
{
    return p / ((int64_t)c.size * c.interleave) * c.interleave + p % c.interleave;
}
static inline int64_t weft_context_global(weft_context_layout c, int64_t l)
{
    return l / c.interleave * ((int64_t)c.size * c.interleave) + (int64_t)c.rank * c.interleave + l % c.interleave;
}
/* How many of the first `length` tokens this rank holds. */
static inline int64_t weft_context_local_len(weft_context_layout c, int64_t length)
{
    int64_t round = (int64_t)c.size * c.interleave;
    int64_t rest = length % round - (int64_t)c.rank * c.interleave;
    if (rest < 0) rest = 0;
    if (rest > c.interleave) rest = c.interleave;
    return length / round * c.interleave + rest;
}
/* Slot of position p: table[p / V] * page + offset in page, V = page * size; -1 when another rank
 * owns it. page (tokens per block on one rank) must be a multiple of interleave. */
static inline int64_t weft_context_slot(weft_context_layout c, int64_t page, const int32_t *table, int64_t p)
{
    if (weft_context_owner(c, p) != c.rank) return -1;
    int64_t l = weft_context_local(c, p);
    return (int64_t)table[l / page] * page + l % page;
}
