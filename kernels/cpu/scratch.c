/* kernels/cpu/scratch.c - scratch memory of a thread, and the checks that operations share. */
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

#include "kernels/cpu/cpu.h"

static _Thread_local struct {
    void *block;
    size_t bytes;
} scratch;

/* A key of its own only so that the block is freed when the thread ends. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static int key_failed;

static void make_key(void)
{
    key_failed = pthread_key_create(&key, free);
}

weft_status weft__scratch(size_t bytes, void **out)
{
    if (bytes > scratch.bytes) {
        pthread_once(&once, make_key);
        if (key_failed) return weft_fail(WEFT_MEMORY, "the system gave no thread-specific key");
        size_t rounded = (bytes + bytes / 8 + 4095) & ~(size_t)4095;
        void *block = NULL;
        if (rounded < bytes || posix_memalign(&block, 64, rounded) != 0)
            return weft_fail(WEFT_MEMORY, "no memory for %zu bytes of kernel scratch", bytes);
        if (pthread_setspecific(key, block) != 0) {
            free(block);
            return weft_fail(WEFT_MEMORY, "no memory for kernel scratch");
        }
        free(scratch.block);
        scratch.block = block;
        scratch.bytes = rounded;
    }
    *out = scratch.block;
    return WEFT_OK;
}

weft_status weft__check_sizes(const char *op, const char *names, const int64_t *sizes, int count)
{
    for (int i = 0; i < count; i++)
        if (sizes[i] < 0)
            return weft_fail(WEFT_INVALID, "%s: sizes (%s) must not be negative, number %d is %" PRId64, op, names, i + 1, sizes[i]);
    return WEFT_OK;
}

weft_status weft__check_float(const char *op, const char *name, weft_dtype dtype)
{
    if (weft__is_float(dtype)) return WEFT_OK;
    return weft_fail(WEFT_INVALID, "%s: %s must be float32, bfloat16 or float16, got %s", op, name,
                     (unsigned)dtype < WEFT_DTYPE_COUNT ? weft_dtype_name(dtype) : "an unknown dtype");
}

weft_status weft__check_ragged(const char *op, const int32_t *query_start_loc, const int32_t *seq_lens, int64_t requests,
                               int64_t tokens)
{
    if (query_start_loc[0] != 0) return weft_fail(WEFT_INVALID, "%s: query_start_loc must begin with 0, got %d", op, query_start_loc[0]);
    for (int64_t r = 0; r < requests; r++) {
        int32_t begin = query_start_loc[r], end = query_start_loc[r + 1];
        if (end < begin || end > tokens)
            return weft_fail(WEFT_INVALID, "%s: request %" PRId64 " has tokens %d to %d of %" PRId64, op, r, begin, end, tokens);
        if (seq_lens != NULL && seq_lens[r] < end - begin)
            return weft_fail(WEFT_INVALID, "%s: request %" PRId64 " has %d new tokens but a sequence length of %d", op, r,
                             end - begin, seq_lens[r]);
    }
    return WEFT_OK;
}

weft_status weft__check_pages(const char *op, const weft_page_layout *p)
{
    if (p->context_size < 1 || p->context_rank < 0 || p->context_rank >= p->context_size)
        return weft_fail(WEFT_INVALID, "%s: context rank %d of %d", op, p->context_rank, p->context_size);
    if (p->interleave < 1 || p->page_size < 1 || p->page_size % p->interleave != 0)
        return weft_fail(WEFT_INVALID, "%s: a page of %" PRId64 " tokens is no multiple of the interleave %d", op, p->page_size,
                         p->interleave);
    if (p->block_table_stride < 0) return weft_fail(WEFT_INVALID, "%s: a block table cannot have a negative width", op);
    return WEFT_OK;
}
