/* device/memory.c - memory, accounted. */
#include "device/memory.h"

#include <stdlib.h>
#include <sys/mman.h>

/* Weights and caches: pages of 2 MiB make the first touch several times faster and spare the
 * translation of addresses when every weight is read once a step. */
enum { HUGE_PAGE = 2 << 20, SMALL_BLOCK = 2 * HUGE_PAGE };

static void *aligned_block(size_t bytes)
{
    if (bytes < SMALL_BLOCK) return aligned_alloc(64, bytes);
    size_t rounded = (bytes + 4095) / 4096 * 4096;
    void *block = NULL;
    if (rounded < bytes || posix_memalign(&block, HUGE_PAGE, rounded) != 0) return NULL;
    (void)madvise(block, rounded, MADV_HUGEPAGE); /* a wish: refused where the system has none */
    return block;
}

static void destroy(weft_object *object)
{
    weft_cuda_release(((weft_memory *)object)->cuda);
    free(object);
}

weft_status weft_memory_create(weft_memory **out, long long limit_bytes)
{
    weft_memory *memory = calloc(1, sizeof *memory);
    if (memory == NULL) return weft_fail(WEFT_MEMORY, "no memory for a memory account");
    weft_object_init(&memory->object, destroy);
    memory->limit_bytes = limit_bytes;
    *out = memory;
    return WEFT_OK;
}

weft_status weft_memory_create_cuda(weft_memory **out, weft_cuda *cuda, long long limit_bytes)
{
    weft_memory *memory;
    WEFT_TRY(weft_memory_create(&memory, limit_bytes));
    memory->cuda = weft_cuda_retain(cuda);
    *out = memory;
    return WEFT_OK;
}

/* Why a block of the account's own device was not given. */
static weft_status refuse(const weft_memory *memory, size_t bytes, long long used)
{
    weft_status code = memory->cuda != NULL ? WEFT_DEVICE_MEMORY : WEFT_MEMORY;
    if (memory->limit_bytes != 0 && memory->cuda != NULL)
        return weft_fail(code, "GPU %d: %.1f MB wanted, %.1f of the %.1f MB that --gpu-memory-utilization allows this rank are in use",
                         weft_cuda_index(memory->cuda), (double)bytes / 1e6, (double)used / 1e6, (double)memory->limit_bytes / 1e6);
    if (memory->limit_bytes != 0)
        return weft_fail(code, "%zu bytes wanted, %lld of %lld in use", bytes, used, memory->limit_bytes);
    return weft_fail(code, "%zu bytes wanted%s, %lld in use, and the system has no more", bytes, memory->cuda != NULL ? " on the GPU" : "", used);
}

/* What a block of so many bytes counts for: on a GPU, what it takes there. */
static long long counted(const weft_memory *memory, size_t bytes) { return (long long)(memory->cuda != NULL ? weft_cuda_block_bytes(bytes) : bytes); }

weft_status weft_memory_alloc(weft_memory *memory, size_t bytes, void **out)
{
    size_t rounded = bytes == 0 ? 64 : (bytes + 63) / 64 * 64;
    if (rounded < bytes) return weft_fail(WEFT_MEMORY, "%zu bytes is more than this machine can address", bytes);
    const long long taken = counted(memory, bytes), live = atomic_fetch_add(&memory->live_bytes, taken) + taken;
    void *block = NULL;
    int within = memory->limit_bytes == 0 || live <= memory->limit_bytes;
    weft_status status = WEFT_OK;
    if (within && memory->cuda != NULL) status = weft_cuda_alloc(memory->cuda, rounded, &block);
    else if (within) block = aligned_block(rounded);
    if (block == NULL) {
        atomic_fetch_sub(&memory->live_bytes, taken);
        return status != WEFT_OK ? status : refuse(memory, bytes, live - taken);
    }
    long long peak = atomic_load(&memory->peak_bytes);
    while (live > peak && !atomic_compare_exchange_weak(&memory->peak_bytes, &peak, live)) {}
    atomic_fetch_add(&memory->live_blocks, 1);
    atomic_fetch_add(&memory->allocations, 1);
    *out = block;
    return WEFT_OK;
}

void weft_memory_free(weft_memory *memory, void *block, size_t bytes)
{
    if (block == NULL) return;
    if (memory->cuda != NULL) weft_cuda_retire(memory->cuda, block, bytes == 0 ? 64 : (bytes + 63) / 64 * 64);
    else free(block);
    atomic_fetch_sub(&memory->live_bytes, counted(memory, bytes));
    atomic_fetch_sub(&memory->live_blocks, 1);
}
