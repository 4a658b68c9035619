/* cache/block_pool.h - which blocks of the cache are in use, and which hold a known prefix.
 *
 * Lives on rank 0. An id stands for a virtual block of block_tokens tokens in every layer and on
 * every rank. Blocks are counted: requests with a common prefix share them. A full block may be
 * committed: its tokens, behind the tokens before it, are remembered, also while nobody uses it,
 * until its memory is needed (least recently used first). A match compares the tokens themselves,
 * block by block from the start, so that two prompts never share what is not equal. */
#pragma once

#include <stdint.h>

#include "base/object.h"
#include "base/status.h"

typedef struct weft_block_pool weft_block_pool;

typedef struct weft_block_pool_stats {
    int64_t num_blocks, used, free; /* free: available at once, cached ones included */
    int64_t cached;                 /* committed blocks, in use or not */
    int64_t queried_tokens, hit_tokens, evictions, refusals;
} weft_block_pool_stats;

weft_status weft_block_pool_create(weft_block_pool **out, int64_t num_blocks, int64_t block_tokens);
weft_object *weft_block_pool_object(weft_block_pool *pool);
int64_t weft_block_pool_block_tokens(const weft_block_pool *pool);

/* Takes `count` blocks, each with one reference. Returns 0 and takes none when there are not as many. */
int weft_block_pool_allocate(weft_block_pool *pool, int64_t count, int32_t *out);
/* One reference more to each; INVALID for a block that nobody holds. All or none. */
weft_status weft_block_pool_retain(weft_block_pool *pool, const int32_t *blocks, int64_t count);
/* One reference less to each, the last block first, so that prefixes outlive their tails. INVALID
 * for a block that is free already. All or none. */
weft_status weft_block_pool_free(weft_block_pool *pool, const int32_t *blocks, int64_t count);
/* The longest run of committed blocks that hold the beginning of `ids`, with a reference to each;
 * at least one token stays to be computed. out has room for count / block_tokens. Returns how many. */
int64_t weft_block_pool_match(weft_block_pool *pool, const int32_t *ids, int64_t count, int32_t *out);
/* How many of a request's first blocks are committed already. */
int64_t weft_block_pool_committed(const weft_block_pool *pool, const int32_t *blocks, int64_t count);
/* Remembers the full blocks of a request from number `first` on, those before being committed:
 * blocks[first + i] holds ids[i * block_tokens ..], of `count` ids. A last part of a block is left. */
weft_status weft_block_pool_commit(weft_block_pool *pool, const int32_t *blocks, int64_t num_blocks, int64_t first, const int32_t *ids,
                                   int64_t count);
weft_block_pool_stats weft_block_pool_get_stats(const weft_block_pool *pool);
