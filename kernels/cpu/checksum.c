/* kernels/cpu/checksum.c - every byte read once. */
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum { CHUNK_WORDS = 1 << 18 };

typedef struct {
    const char *data;
    int64_t words;
    const weft_isa_table *isa;
    atomic_long next;
    atomic_ullong sum;
} checksum_job;

static void sum_part(void *context, int part, int parts)
{
    checksum_job *job = context;
    uint64_t sum = 0;
    for (;;) {
        int64_t begin = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed) * (int64_t)CHUNK_WORDS;
        if (begin >= job->words) break;
        sum += job->isa->sum_words(job->data + begin * 8, weft__min(CHUNK_WORDS, job->words - begin));
    }
    atomic_fetch_add_explicit(&job->sum, sum, memory_order_relaxed);
}

weft_status weft_checksum_cpu(const void *data, int64_t bytes, uint64_t *sum, weft_pool *pool)
{
    if (bytes < 0) return weft_fail(WEFT_INVALID, "checksum: %" PRId64 " bytes", bytes);
    checksum_job job = {.data = data, .words = bytes / 8, .isa = weft__isa()};
    atomic_init(&job.next, 0);
    atomic_init(&job.sum, 0);
    uint64_t last = 0;
    weft_pool_run(bytes < 65536 ? NULL : pool, sum_part, &job);
    if (bytes % 8 != 0) memcpy(&last, job.data + bytes / 8 * 8, (size_t)(bytes % 8));
    *sum = atomic_load(&job.sum) + last;
    return WEFT_OK;
}
