/* kernels/cpu/checksum.c - every byte read once. */
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

typedef struct {
    const char *data;
    int64_t words;
    const weft_isa_table *isa;
    atomic_ullong sum;
} checksum_job;

static void sum_part(void *context, int part, int parts)
{
    checksum_job *job = context;
    long begin, end;
    weft_pool_range(job->words, 8, part, parts, &begin, &end);
    atomic_fetch_add_explicit(&job->sum, job->isa->sum_words(job->data + begin * 8, end - begin), memory_order_relaxed);
}

weft_status weft_checksum_cpu(const void *data, int64_t bytes, uint64_t *sum, weft_pool *pool)
{
    if (bytes < 0) return weft_fail(WEFT_INVALID, "checksum: %" PRId64 " bytes", bytes);
    checksum_job job = {data, bytes / 8, weft__isa(), 0};
    uint64_t last = 0;
    weft_pool_run(bytes < 65536 ? NULL : pool, sum_part, &job);
    if (bytes % 8 != 0) memcpy(&last, job.data + bytes / 8 * 8, (size_t)(bytes % 8));
    *sum = atomic_load(&job.sum) + last;
    return WEFT_OK;
}
