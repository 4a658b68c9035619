/* kernels/cpu/attention.h - what prefill (attention.c) and decode (attention_few.c) share. */
#pragma once

#include "kernels/cpu/cpu.h"

/* The keys of a request as this rank numbers them. */
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

/* ---- few (query, head) pairs of one KV head: keys stream past them at memory speed ---- */

enum {
    WEFT_FEW_LANES = 8,
    WEFT_FEW_KEYS = 512, /* a long sequence is cut in splits of at least so many keys, ... */
    WEFT_FEW_SPLITS = 16 /* ... and of at most so many parts */
};

typedef struct weft_few_item {
    int64_t request;
    int g, first_head, heads;
    int lanes;             /* queries * heads, 1 to WEFT_FEW_LANES */
    int64_t begin, end;    /* the keys of this split */
    float *scratch;        /* weft__few_floats */
    float *partial;        /* where an unfinished result goes (weft__few_partial floats), or NULL: finish it */
} weft_few_item;

size_t weft__few_floats(const weft_attention_args *a);
size_t weft__few_partial(const weft_attention_args *a);
void weft__attend_few(const weft_attention_args *a, const weft_isa_table *isa, const weft_few_item *item);
/* Merges `splits` partial results, one behind the other, and stores them. */
void weft__combine_few(const weft_attention_args *a, const weft_isa_table *isa, const weft_few_item *item, float *partials,
                       int splits);
