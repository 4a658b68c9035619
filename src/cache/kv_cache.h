/* cache/kv_cache.h - the pages of one layer on one rank.
 *
 * One block id serves every layer and every rank: it stands for block_tokens tokens of a request (a
 * virtual block). A layer whose cache is dealt out over N context ranks keeps block_tokens / N of
 * them here, its page. Layers with different plans have pages of different size under the same ids. */
#pragma once

#include "device/tensor.h"
#include "plan/layout.h"

typedef struct weft_kv_cache_shape {
    int num_kv_heads, head_dim, head_dim_v; /* of this rank */
    weft_dtype dtype;                       /* float32, bfloat16, float16 */
    weft_context_layout context;
} weft_kv_cache_shape;

typedef struct weft_kv_cache {
    weft_object object;
    weft_kv_cache_shape shape;
    int64_t num_blocks, block_tokens, page_tokens;
    weft_tensor *k, *v; /* (num_blocks, num_kv_heads, page_tokens, head_dim or head_dim_v) */
    int64_t bytes;
} weft_kv_cache;

/* Tokens of a page. INVALID unless block_tokens is a multiple of context.size * interleave. */
weft_status weft_kv_page_tokens(const weft_kv_cache_shape *shape, int64_t block_tokens, int64_t *out);
/* Bytes of one block of this layer on this rank, k and v. */
weft_status weft_kv_block_bytes(const weft_kv_cache_shape *shape, int64_t block_tokens, int64_t *out);
/* How many blocks of a model fit into a budget; shapes of all its layers. MEMORY when none does. */
weft_status weft_kv_num_blocks(int64_t *out, int64_t budget_bytes, const weft_kv_cache_shape *shapes, int count, int64_t block_tokens);
/* V = block_size * lcm(context sizes). INVALID unless block_size is a multiple of every interleave. */
weft_status weft_kv_block_tokens(int64_t *out, int64_t block_size, const weft_context_layout *contexts, int count);

weft_status weft_kv_cache_create(weft_kv_cache **out, weft_memory *memory, const weft_kv_cache_shape *shape, int64_t num_blocks,
                                 int64_t block_tokens);
