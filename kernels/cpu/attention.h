/* kernels/cpu/attention.h - what prefill and decode attention share. */
#pragma once

#include "kernels/cpu/cpu.h"

/* The keys of a request as this rank numbers them, and which of them a query sees. */
typedef struct weft_key_range {
    int64_t first_position; /* global position of the request's first new token */
    int64_t count;          /* keys that this rank holds */
} weft_key_range;

weft_key_range weft__keys_of(const weft_attention_args *a, int64_t request);
/* The keys [*low, *high) that the request's query number i sees. Never outside [0, count). */
void weft__visible(const weft_attention_args *a, int64_t request, int64_t i, int64_t *low, int64_t *high);
/* Query heads of local KV head g: [*first, *first + count); returns count. */
int weft__heads_of(const weft_attention_args *a, int g, int *first);
/* A run of keys of kv head g from key `begin`, as rows `*stride` elements apart; returns how many
 * rows of [begin, end) are there. values: of v instead of k. */
int64_t weft__key_run(const weft_attention_args *a, int64_t request, int g, int values, int64_t begin, int64_t end,
                      const void **rows, int64_t *stride);
