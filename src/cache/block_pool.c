/* cache/block_pool.c - reference counts, a list of free blocks and an index of committed ones.
 *
 * Free blocks are one list: at its head those that hold nothing, then committed ones in the order
 * in which they were given up. allocate takes from the head. The index is keyed by (chain before,
 * tokens). A chain number is given out once and names one exact sequence of tokens from position 0;
 * comparing chain and tokens therefore compares whole prefixes, whatever the hash does. */
#include "cache/block_pool.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

enum { NONE = -1 };

typedef struct {
    int32_t refs;
    int32_t prev, next;   /* free list; only while refs == 0 */
    int32_t bucket_next;  /* index; only while indexed */
    int32_t indexed;
    uint64_t hash;
    uint64_t parent;      /* chain of the blocks before */
    uint64_t chain;       /* 0: not committed */
} block;

struct weft_block_pool {
    weft_object object;
    int64_t num_blocks, block_tokens;
    block *blocks;     /* (num_blocks) */
    int32_t *tokens;   /* (num_blocks, block_tokens) of committed blocks */
    int32_t *buckets;  /* (num_buckets) first block of each, or NONE */
    uint64_t num_buckets, next_chain;
    int32_t head, tail;
    weft_block_pool_stats stats;
};

static void destroy(weft_object *object)
{
    weft_block_pool *pool = (weft_block_pool *)object;
    free(pool->blocks);
    free(pool->tokens);
    free(pool->buckets);
    free(pool);
}

/* ---- the free list ---- */

static void list_remove(weft_block_pool *pool, int32_t id)
{
    block *b = &pool->blocks[id];
    if (b->prev != NONE) pool->blocks[b->prev].next = b->next;
    else pool->head = b->next;
    if (b->next != NONE) pool->blocks[b->next].prev = b->prev;
    else pool->tail = b->prev;
    pool->stats.free--;
    pool->stats.used++;
}

/* At the head when the block holds nothing worth keeping, else at the tail. */
static void list_insert(weft_block_pool *pool, int32_t id)
{
    block *b = &pool->blocks[id];
    b->prev = b->indexed ? pool->tail : NONE;
    b->next = b->indexed ? NONE : pool->head;
    if (b->prev != NONE) pool->blocks[b->prev].next = id;
    else pool->head = id;
    if (b->next != NONE) pool->blocks[b->next].prev = id;
    else pool->tail = id;
    pool->stats.free++;
    pool->stats.used--;
}

/* ---- the index ---- */

static uint64_t mix(uint64_t h)
{
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93u;
    h ^= h >> 29;
    return h;
}

static uint64_t hash_block(uint64_t parent, const int32_t *ids, int64_t count)
{
    uint64_t h = mix(parent + 0x9e3779b97f4a7c15u);
    for (int64_t i = 0; i < count; i++) h = mix(h * 31 + (uint32_t)ids[i]);
    return h;
}

static int32_t find(const weft_block_pool *pool, uint64_t parent, const int32_t *ids)
{
    uint64_t hash = hash_block(parent, ids, pool->block_tokens);
    for (int32_t id = pool->buckets[hash & (pool->num_buckets - 1)]; id != NONE; id = pool->blocks[id].bucket_next) {
        const block *b = &pool->blocks[id];
        if (b->hash == hash && b->parent == parent &&
            memcmp(pool->tokens + id * pool->block_tokens, ids, (size_t)pool->block_tokens * sizeof *ids) == 0)
            return id;
    }
    return NONE;
}

static void index_insert(weft_block_pool *pool, int32_t id, uint64_t parent, const int32_t *ids)
{
    block *b = &pool->blocks[id];
    b->parent = parent;
    b->hash = hash_block(parent, ids, pool->block_tokens);
    b->chain = ++pool->next_chain;
    b->indexed = 1;
    memcpy(pool->tokens + id * pool->block_tokens, ids, (size_t)pool->block_tokens * sizeof *ids);
    int32_t *bucket = &pool->buckets[b->hash & (pool->num_buckets - 1)];
    b->bucket_next = *bucket;
    *bucket = id;
    pool->stats.cached++;
}

static void index_remove(weft_block_pool *pool, int32_t id)
{
    block *b = &pool->blocks[id];
    int32_t *link = &pool->buckets[b->hash & (pool->num_buckets - 1)];
    while (*link != id) link = &pool->blocks[*link].bucket_next;
    *link = b->bucket_next;
    b->indexed = 0;
    pool->stats.cached--;
    pool->stats.evictions++;
}

/* ---- calls ---- */

weft_status weft_block_pool_create(weft_block_pool **out, int64_t num_blocks, int64_t block_tokens)
{
    if (num_blocks < 1 || num_blocks > INT32_MAX / 2)
        return weft_fail(WEFT_INVALID, "a block pool needs 1 to %d blocks, got %lld", INT32_MAX / 2, (long long)num_blocks);
    if (block_tokens < 1 || block_tokens > INT32_MAX)
        return weft_fail(WEFT_INVALID, "a block needs 1 to %d tokens, got %lld", INT32_MAX, (long long)block_tokens);
    weft_block_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL) return weft_fail(WEFT_MEMORY, "no memory for a block pool");
    weft_object_init(&pool->object, destroy);
    pool->num_blocks = num_blocks;
    pool->block_tokens = block_tokens;
    pool->num_buckets = 64;
    while (pool->num_buckets < (uint64_t)num_blocks * 2) pool->num_buckets *= 2;
    size_t tokens;
    pool->blocks = calloc((size_t)num_blocks, sizeof *pool->blocks);
    pool->buckets = malloc(pool->num_buckets * sizeof *pool->buckets);
    if (weft_mul_size((size_t)num_blocks, (size_t)block_tokens, &tokens)) pool->tokens = calloc(tokens, sizeof *pool->tokens);
    if (pool->blocks == NULL || pool->buckets == NULL || pool->tokens == NULL) {
        WEFT_RELEASE(pool);
        return weft_fail(WEFT_MEMORY, "no memory for a pool of %lld blocks of %lld tokens", (long long)num_blocks, (long long)block_tokens);
    }
    memset(pool->buckets, 0xff, pool->num_buckets * sizeof *pool->buckets);
    pool->head = pool->tail = NONE;
    for (int64_t i = num_blocks - 1; i >= 0; i--) list_insert(pool, (int32_t)i);
    pool->stats.num_blocks = num_blocks;
    pool->stats.used = 0;
    *out = pool;
    return WEFT_OK;
}

weft_object *weft_block_pool_object(weft_block_pool *pool)
{
    return &pool->object;
}

int64_t weft_block_pool_block_tokens(const weft_block_pool *pool)
{
    return pool->block_tokens;
}

int weft_block_pool_allocate(weft_block_pool *pool, int64_t count, int32_t *out)
{
    if (count > pool->stats.free) {
        pool->stats.refusals++;
        return 0;
    }
    for (int64_t i = 0; i < count; i++) {
        int32_t id = pool->head;
        block *b = &pool->blocks[id];
        list_remove(pool, id);
        if (b->indexed) index_remove(pool, id);
        b->chain = 0;
        b->refs = 1;
        out[i] = id;
    }
    return 1;
}

static weft_status check_held(const weft_block_pool *pool, int32_t id, const char *verb)
{
    if (id < 0 || id >= pool->num_blocks)
        return weft_fail(WEFT_INVALID, "cannot %s block %d: the pool has blocks 0 to %lld", verb, id, (long long)pool->num_blocks - 1);
    if (pool->blocks[id].refs == 0) return weft_fail(WEFT_INVALID, "cannot %s block %d: it is free", verb, id);
    return WEFT_OK;
}

weft_status weft_block_pool_retain(weft_block_pool *pool, const int32_t *blocks, int64_t count)
{
    for (int64_t i = 0; i < count; i++) WEFT_TRY(check_held(pool, blocks[i], "retain"));
    for (int64_t i = 0; i < count; i++) pool->blocks[blocks[i]].refs++;
    return WEFT_OK;
}

weft_status weft_block_pool_free(weft_block_pool *pool, const int32_t *blocks, int64_t count)
{
    /* Counts first: a block may stand in the list more often than it is held. */
    for (int64_t i = 0; i < count; i++) {
        weft_status status = check_held(pool, blocks[i], "free");
        if (status != WEFT_OK) {
            while (i-- > 0) pool->blocks[blocks[i]].refs++;
            return status;
        }
        pool->blocks[blocks[i]].refs--;
    }
    for (int64_t i = count - 1; i >= 0; i--) {
        block *b = &pool->blocks[blocks[i]];
        if (b->refs != 0) continue;
        b->refs = NONE; /* marks a block that is in the list already */
        list_insert(pool, blocks[i]);
    }
    for (int64_t i = 0; i < count; i++)
        if (pool->blocks[blocks[i]].refs == NONE) pool->blocks[blocks[i]].refs = 0;
    return WEFT_OK;
}

int64_t weft_block_pool_match(weft_block_pool *pool, const int32_t *ids, int64_t count, int32_t *out)
{
    int64_t found = 0;
    uint64_t chain = 0;
    for (; (found + 1) * pool->block_tokens < count; found++) {
        int32_t id = find(pool, chain, ids + found * pool->block_tokens);
        if (id == NONE) break;
        block *b = &pool->blocks[id];
        if (b->refs == 0) list_remove(pool, id);
        b->refs++;
        chain = b->chain;
        out[found] = id;
    }
    pool->stats.queried_tokens += count;
    pool->stats.hit_tokens += found * pool->block_tokens;
    return found;
}

int64_t weft_block_pool_committed(const weft_block_pool *pool, const int32_t *blocks, int64_t count)
{
    int64_t n = 0;
    while (n < count && blocks[n] >= 0 && blocks[n] < pool->num_blocks && pool->blocks[blocks[n]].refs > 0 &&
           pool->blocks[blocks[n]].chain != 0)
        n++;
    return n;
}

weft_status weft_block_pool_commit(weft_block_pool *pool, const int32_t *blocks, int64_t num_blocks, int64_t first, const int32_t *ids,
                                   int64_t count)
{
    int64_t full = count / pool->block_tokens;
    if (full > num_blocks - first)
        return weft_fail(WEFT_INVALID, "%lld tokens fill %lld blocks, and %lld were given", (long long)(count + first * pool->block_tokens),
                         (long long)(full + first), (long long)num_blocks);
    if (weft_block_pool_committed(pool, blocks, first) != first)
        return weft_fail(WEFT_INVALID, "the first %lld blocks of a request are not committed", (long long)first);
    for (int64_t i = 0; i < full; i++) WEFT_TRY(check_held(pool, blocks[first + i], "commit"));
    uint64_t chain = first == 0 ? 0 : pool->blocks[blocks[first - 1]].chain;
    for (int64_t i = 0; i < full; i++) {
        block *b = &pool->blocks[blocks[first + i]];
        if (b->chain == 0) {
            const int32_t *tokens = ids + i * pool->block_tokens;
            int32_t same = find(pool, chain, tokens);
            /* Another request computed the same block: ours stays unknown and carries its chain on. */
            if (same != NONE) b->chain = pool->blocks[same].chain;
            else index_insert(pool, blocks[first + i], chain, tokens);
        }
        chain = b->chain;
    }
    return WEFT_OK;
}

weft_block_pool_stats weft_block_pool_get_stats(const weft_block_pool *pool)
{
    return pool->stats;
}
