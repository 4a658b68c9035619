/* device/memory.h - memory of the host or of a GPU, accounted and given back.
 *
 * One account per rank (and one per plain script), and a second one for its GPU. Storages keep a
 * reference to their account, so a tensor may outlive its rank. Every block is 64-byte aligned. */
#pragma once

#include <stdatomic.h>
#include <stddef.h>

#include "base/object.h"
#include "base/status.h"
#include "device/cuda.h"

typedef struct weft_memory {
    weft_object object;
    atomic_llong live_bytes, peak_bytes;   /* on a GPU: with what blocks are rounded up by */
    atomic_llong live_blocks, allocations; /* allocations: how many were ever made */
    long long limit_bytes;                 /* 0: none */
    weft_cuda *cuda;                       /* whose memory it is; NULL: the host's */
} weft_memory;

weft_status weft_memory_create(weft_memory **out, long long limit_bytes);
/* Of a GPU. */
weft_status weft_memory_create_cuda(weft_memory **out, weft_cuda *cuda, long long limit_bytes);
/* Fails with MEMORY (DEVICE_MEMORY) and the numbers. bytes 0 gives a valid unique pointer. Contents undefined. */
weft_status weft_memory_alloc(weft_memory *memory, size_t bytes, void **out);
void weft_memory_free(weft_memory *memory, void *block, size_t bytes); /* NULL block is allowed */
