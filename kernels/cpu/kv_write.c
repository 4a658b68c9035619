/* kernels/cpu/kv_write.c - keys and values of this step into the pages that this rank owns. */
#include <inttypes.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/pages.h"

typedef struct {
    const weft_kv_write_args *args;
    const weft_isa_table *isa;
} write_job;

static void write_heads(const write_job *job, const void *from, void *cache, int64_t block, int64_t slot, int64_t dim)
{
    const weft_kv_write_args *a = job->args;
    float x[WEFT_BLOCK];
    for (int64_t h = 0; h < a->num_kv_heads; h++) {
        int64_t to = ((block * a->num_kv_heads + h) * a->pages.page_size + slot) * dim;
        for (int64_t i = 0; i < dim; i += WEFT_BLOCK) {
            int64_t n = weft__min(WEFT_BLOCK, dim - i);
            job->isa->widen(x, weft__at(from, a->dtype, h * dim + i), a->dtype, n);
            job->isa->narrow(weft__at_mut(cache, a->cache_dtype, to + i), a->cache_dtype, x, n);
        }
    }
}

static void write_requests(void *context, int part, int parts)
{
    const write_job *job = context;
    const weft_kv_write_args *a = job->args;
    const weft_page_layout *pages = &a->pages;
    for (int64_t r = 0; r < a->requests; r++) {
        const int32_t *table = pages->block_table + r * pages->block_table_stride;
        long count = a->query_start_loc[r + 1] - a->query_start_loc[r], begin, end;
        weft_pool_range(count, 1, part, parts, &begin, &end);
        for (long i = begin; i < end; i++) {
            int64_t t = a->query_start_loc[r] + i, position = a->positions[t];
            if (weft__page_owner(pages, position) != pages->context_rank) continue;
            int64_t local = weft__page_local(pages, position);
            int64_t block = table[local / pages->page_size], slot = local % pages->page_size;
            write_heads(job, weft__at(a->k, a->dtype, t * a->k_stride), a->k_cache, block, slot, a->head_dim);
            write_heads(job, weft__at(a->v, a->dtype, t * a->v_stride), a->v_cache, block, slot, a->head_dim_v);
        }
    }
}

/* Every position that this rank owns has a block. */
static weft_status check_blocks(const weft_kv_write_args *a)
{
    const weft_page_layout *pages = &a->pages;
    for (int64_t r = 0; r < a->requests; r++)
        for (int64_t t = a->query_start_loc[r]; t < a->query_start_loc[r + 1]; t++) {
            int64_t position = a->positions[t];
            if (position < 0) return weft_fail(WEFT_INVALID, "kv_write: token %" PRId64 " has position %" PRId64, t, position);
            if (weft__page_owner(pages, position) != pages->context_rank) continue;
            int64_t entry = weft__page_local(pages, position) / pages->page_size;
            if (entry >= pages->block_table_stride || pages->block_table[r * pages->block_table_stride + entry] < 0)
                return weft_fail(WEFT_INVALID, "kv_write: request %" PRId64 " has no block for position %" PRId64, r, position);
        }
    return WEFT_OK;
}

weft_status weft_kv_write_cpu(const weft_kv_write_args *a, weft_pool *pool)
{
    const int64_t sizes[] = {a->tokens, a->requests, a->num_kv_heads, a->head_dim, a->head_dim_v};
    WEFT_TRY(weft__check_sizes("kv_write", "tokens, requests, num_kv_heads, head_dim, head_dim_v", sizes, 5));
    WEFT_TRY(weft__check_float("kv_write", "k and v", a->dtype));
    WEFT_TRY(weft__check_float("kv_write", "the cache", a->cache_dtype));
    WEFT_TRY(weft__check_pages("kv_write", &a->pages));
    if (a->requests == 0) return WEFT_OK;
    WEFT_TRY(weft__check_ragged("kv_write", a->query_start_loc, NULL, a->requests, a->tokens));
    WEFT_TRY(check_blocks(a));
    write_job job = {a, weft__isa()};
    weft_pool_run(a->tokens < 32 ? NULL : pool, write_requests, &job);
    return WEFT_OK;
}
