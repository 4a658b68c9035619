/* weft_cuda.h - what the CUDA operations keep between calls. C11, without CUDA types.
 *
 * A context belongs to one device and serves one stream at a time: its workspace is reused by
 * every operation that is given it, in stream order. Operations that are given none still work,
 * with weft's own kernels and without splitting.
 * The first product of a weight matrix with 1024 tokens or more, outside a captured graph, waits: it
 * measures which of cuBLASLt's kernels is fastest (once for each shape of matrix, under 0.1 s). */
#pragma once

#include "kernels/weft_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A workspace that serves every operation well. Smaller ones work; what does not fit is cut. */
#define WEFT_CUDA_WORKSPACE_BYTES ((size_t)96 << 20)
/* The least that create accepts. */
#define WEFT_CUDA_WORKSPACE_LEAST ((size_t)1 << 20)

/* workspace: device memory of the current device, 256-byte aligned, the caller's, alive until
 * destroy. Clears part of it (synchronously) and opens cuBLASLt. CUDA when the library refuses. */
weft_status weft_cuda_context_create(weft_cuda_context **out, void *workspace, size_t workspace_bytes);
void weft_cuda_context_destroy(weft_cuda_context *context); /* NULL is allowed; never waits */

#ifdef __cplusplus
}
#endif
