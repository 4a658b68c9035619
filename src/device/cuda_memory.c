/* device/cuda_memory.c - device memory: blocks by size class, given back to a list and used again. */
#ifdef WEFT_HAVE_CUDA

#include <stdlib.h>

#include "device/cuda_internal.h"

enum { LARGE = 64 << 20 };

/* Steps of an eighth of the size, at least 512 bytes: a request of nearly the same size finds the
 * block again and at most an eighth is wasted. Weights and caches, which are large and stay, a 64th. */
size_t weft_cuda_block_bytes(size_t bytes)
{
    size_t step = 512;
    while (step < bytes / (bytes < LARGE ? 16 : 128)) step *= 2;
    size_t rounded = (bytes + step - 1) / step * step;
    return rounded < 512 ? 512 : rounded;
}

static void *take_free(weft_cuda *cuda, size_t bytes)
{
    for (size_t i = cuda->num_blocks; i > 0; i--) {
        if (cuda->blocks[i - 1].bytes != bytes) continue;
        void *data = cuda->blocks[i - 1].data;
        cuda->blocks[i - 1] = cuda->blocks[--cuda->num_blocks];
        return data;
    }
    return NULL;
}

void weft__cuda_free_unused(weft_cuda *cuda)
{
    for (size_t i = 0; i < cuda->num_blocks; i++) {
        (void)cudaFree(cuda->blocks[i].data); /* the driver waits for work that uses it */
        cuda->held_bytes -= cuda->blocks[i].bytes;
    }
    cuda->num_blocks = 0;
}

/* Room for one more block in the list, so that giving back cannot fail. */
static int reserve_entry(weft_cuda *cuda, size_t blocks)
{
    if (blocks <= cuda->max_blocks) return 1;
    size_t wanted = cuda->max_blocks == 0 ? 1024 : 2 * cuda->max_blocks;
    weft__block *grown = realloc(cuda->blocks, wanted * sizeof *grown);
    if (grown == NULL) return 0;
    cuda->blocks = grown;
    cuda->max_blocks = wanted;
    return 1;
}

static weft_status out_of_memory(weft_cuda *cuda, size_t bytes)
{
    size_t available = 0, total = 0;
    (void)cudaGetLastError();
    (void)cudaMemGetInfo(&available, &total);
    return weft_fail(WEFT_DEVICE_MEMORY, "GPU %d has no room for %.1f MB: this rank uses %.1f MB, %.1f of %.1f MB are free", cuda->index,
                     (double)bytes / 1e6, (double)cuda->used_bytes / 1e6, (double)available / 1e6, (double)total / 1e6);
}

static weft_status from_driver(weft_cuda *cuda, size_t bytes, void **out)
{
    if (cuda->capturing) return weft_fail(WEFT_INTERNAL, "%zu bytes wanted while a graph is captured: a step must not allocate", bytes);
    if (!reserve_entry(cuda, ++cuda->owned_blocks)) return weft_fail(WEFT_MEMORY, "no memory for a list of blocks");
    cudaError_t error = cudaMalloc(out, bytes);
    if (error == cudaErrorMemoryAllocation && cuda->num_blocks > 0) {
        (void)cudaGetLastError();
        (void)weft_cuda_stream(cuda); /* products that are held back read blocks that nobody else has any more */
        weft__cuda_free_unused(cuda);
        error = cudaMalloc(out, bytes);
    }
    if (error == cudaErrorMemoryAllocation) return out_of_memory(cuda, bytes);
    if (error != cudaSuccess) return weft__cuda_fail(cuda, "allocating memory", error);
    cuda->held_bytes += bytes;
    return WEFT_OK;
}

weft_status weft_cuda_alloc(weft_cuda *cuda, size_t bytes, void **out)
{
    WEFT_TRY(weft__cuda_usable(cuda));
    size_t rounded = weft_cuda_block_bytes(bytes);
    if (rounded < bytes) return weft_fail(WEFT_DEVICE_MEMORY, "%zu bytes is more than a GPU can address", bytes);
    pthread_mutex_lock(&cuda->lock);
    void *block = take_free(cuda, rounded);
    weft_status status = block != NULL ? WEFT_OK : from_driver(cuda, rounded, &block);
    if (status == WEFT_OK) cuda->used_bytes += rounded;
    pthread_mutex_unlock(&cuda->lock);
    if (status == WEFT_OK) *out = block;
    return status;
}

void weft_cuda_retire(weft_cuda *cuda, void *block, size_t bytes)
{
    pthread_mutex_lock(&cuda->lock);
    cuda->blocks[cuda->num_blocks++] = (weft__block){block, weft_cuda_block_bytes(bytes)};
    cuda->used_bytes -= weft_cuda_block_bytes(bytes);
    pthread_mutex_unlock(&cuda->lock);
}

#endif
