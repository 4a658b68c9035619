/* cache/kv_cache.c - pages of a layer and what they weigh. */
#include "cache/kv_cache.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/checked.h"

weft_status weft_kv_page_tokens(const weft_kv_cache_shape *shape, int64_t block_tokens, int64_t *out)
{
    int64_t round = (int64_t)shape->context.size * shape->context.interleave;
    if (block_tokens < 1 || round < 1 || block_tokens % round != 0)
        return weft_fail(WEFT_INVALID,
                         "a block of %" PRId64 " tokens must be a multiple of context size %d times interleave size %d = %" PRId64,
                         block_tokens, shape->context.size, shape->context.interleave, round);
    *out = block_tokens / shape->context.size;
    return WEFT_OK;
}

weft_status weft_kv_block_bytes(const weft_kv_cache_shape *shape, int64_t block_tokens, int64_t *out)
{
    int64_t page, bytes;
    WEFT_TRY(weft_kv_page_tokens(shape, block_tokens, &page));
    int64_t row = ((int64_t)shape->head_dim + shape->head_dim_v) * (int64_t)weft_dtype_size(shape->dtype);
    if (!weft_mul_i64(page, shape->num_kv_heads, &bytes) || !weft_mul_i64(bytes, row, &bytes))
        return weft_fail(WEFT_INVALID, "a block of %" PRId64 " tokens has more bytes than this machine can address", block_tokens);
    *out = bytes;
    return WEFT_OK;
}

weft_status weft_kv_num_blocks(int64_t *out, int64_t budget_bytes, const weft_kv_cache_shape *shapes, int count, int64_t block_tokens)
{
    int64_t total = 0;
    for (int i = 0; i < count; i++) {
        int64_t bytes;
        WEFT_TRY(weft_kv_block_bytes(&shapes[i], block_tokens, &bytes));
        if (!weft_add_i64(total, bytes, &total)) return weft_fail(WEFT_INVALID, "the layers' blocks have too many bytes");
    }
    if (total == 0) return weft_fail(WEFT_INVALID, "no layers to size a cache for");
    if (budget_bytes < total)
        return weft_fail(WEFT_MEMORY,
                         "a cache of %" PRId64 " bytes holds no block: one block of %" PRId64 " tokens over %d layers takes %" PRId64
                         " bytes; raise the budget or lower the block size",
                         budget_bytes, block_tokens, count, total);
    *out = budget_bytes / total;
    return WEFT_OK;
}

static int64_t gcd(int64_t a, int64_t b)
{
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

weft_status weft_kv_block_tokens(int64_t *out, int64_t block_size, const weft_context_layout *contexts, int count)
{
    if (block_size < 1) return weft_fail(WEFT_INVALID, "the block size must be positive, got %" PRId64, block_size);
    int64_t lcm = 1, tokens;
    for (int i = 0; i < count; i++) {
        if (block_size % contexts[i].interleave != 0)
            return weft_fail(WEFT_INVALID, "block size %" PRId64 " must be a multiple of interleave size %d", block_size,
                             contexts[i].interleave);
        lcm = lcm / gcd(lcm, contexts[i].size) * contexts[i].size;
    }
    if (!weft_mul_i64(block_size, lcm, &tokens) || tokens > INT32_MAX)
        return weft_fail(WEFT_INVALID, "a block of %" PRId64 " times %" PRId64 " tokens is too large", block_size, lcm);
    *out = tokens;
    return WEFT_OK;
}

static void destroy(weft_object *object)
{
    weft_kv_cache *cache = (weft_kv_cache *)object;
    WEFT_RELEASE(cache->k);
    WEFT_RELEASE(cache->v);
    free(cache);
}

weft_status weft_kv_cache_create(weft_kv_cache **out, weft_memory *memory, const weft_kv_cache_shape *shape, int64_t num_blocks,
                                 int64_t block_tokens)
{
    int64_t page, block_bytes, bytes;
    if (num_blocks < 1 || num_blocks > INT32_MAX)
        return weft_fail(WEFT_INVALID, "a cache needs 1 to %d blocks, got %" PRId64, INT32_MAX, num_blocks);
    WEFT_TRY(weft_kv_page_tokens(shape, block_tokens, &page));
    WEFT_TRY(weft_kv_block_bytes(shape, block_tokens, &block_bytes));
    if (!weft_mul_i64(block_bytes, num_blocks, &bytes)) return weft_fail(WEFT_INVALID, "a cache of too many bytes");
    weft_kv_cache *cache = calloc(1, sizeof *cache);
    if (cache == NULL) return weft_fail(WEFT_MEMORY, "no memory for a cache");
    weft_object_init(&cache->object, destroy);
    cache->shape = *shape;
    cache->num_blocks = num_blocks;
    cache->block_tokens = block_tokens;
    cache->page_tokens = page;
    cache->bytes = bytes;
    int64_t sizes[4] = {num_blocks, shape->num_kv_heads, page, shape->head_dim};
    weft_status status = weft_tensor_create(&cache->k, memory, shape->dtype, 4, sizes);
    sizes[3] = shape->head_dim_v;
    if (status == WEFT_OK) status = weft_tensor_create(&cache->v, memory, shape->dtype, 4, sizes);
    if (status != WEFT_OK) {
        WEFT_RELEASE(cache);
        return weft_fail_while(status, "making a cache of %" PRId64 " blocks of %" PRId64 " bytes", num_blocks, block_bytes);
    }
    *out = cache;
    return WEFT_OK;
}
