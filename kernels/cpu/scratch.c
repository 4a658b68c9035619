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
