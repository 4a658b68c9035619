/* kernels/cuda/context.cu - the context of a stream, and how launches fail. */
#include <stdlib.h>

#include "kernels/cuda/blas.cuh"
#include "kernels/cuda/linear_batch.cuh"

namespace weft {

weft_status failed(const char *op, cudaError_t error)
{
    (void)cudaGetLastError();
    return weft_fail(error == cudaErrorMemoryAllocation ? WEFT_DEVICE_MEMORY : WEFT_CUDA,
                     "%s: the GPU reported %s (%s); it may be the echo of an earlier operation", op, cudaGetErrorName(error),
                     cudaGetErrorString(error));
}

weft_status launched(const char *op)
{
    cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? WEFT_OK : failed(op, error);
}

} // namespace weft

using namespace weft;

extern "C" weft_status weft_cuda_context_create(weft_cuda_context **out, void *workspace, size_t workspace_bytes)
{
    const size_t counter_bytes = COUNTERS * sizeof(unsigned);
    if (workspace == NULL || !aligned(workspace, 256) || workspace_bytes < WEFT_CUDA_WORKSPACE_LEAST)
        return weft_fail(WEFT_INVALID, "a CUDA context needs an aligned workspace of at least %zu bytes, got %zu",
                         WEFT_CUDA_WORKSPACE_LEAST, workspace_bytes);
    int device = 0, sms = 0, shared = 0, major = 0, minor = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error == cudaSuccess) error = cudaMemset(workspace, 0, counter_bytes);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    if (error != cudaSuccess) return failed("CUDA context", error);
    weft_cuda_context *c = (weft_cuda_context *)calloc(1, sizeof *c);
    if (c == NULL) return weft_fail(WEFT_MEMORY, "no memory for a CUDA context");
    c->sms = sms;
    c->shared = shared;
    c->hopper = major == 9 && minor == 0;
    if (c->hopper) batch_clusters(c->clusters);
    c->counters = (unsigned *)workspace;
    c->workspace = (char *)workspace + counter_bytes;
    c->workspace_bytes = workspace_bytes - counter_bytes;
    weft_status status = blas_create(&c->blas);
    if (status != WEFT_OK) {
        free(c);
        return status;
    }
    *out = c;
    return WEFT_OK;
}

extern "C" void weft_cuda_context_destroy(weft_cuda_context *c)
{
    if (c == NULL) return;
    blas_destroy(c->blas);
    free(c);
}
