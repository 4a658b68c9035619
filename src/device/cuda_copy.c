/* device/cuda_copy.c - copies of a GPU's stream, through page-locked memory where the host has a part in them. */
#ifdef WEFT_HAVE_CUDA

#include <string.h>

#include "device/cuda_internal.h"

/* What has become too small is kept to the end: freeing page-locked memory waits for all that the GPU does. */
static weft_status reserve_pinned(weft_cuda *cuda, weft__pinned *pinned, size_t bytes)
{
    if (pinned->bytes >= bytes) return WEFT_OK;
    if (pinned->num_outgrown == WEFT__OUTGROWN) return weft_fail(WEFT_INTERNAL, "a copy of %zu bytes to GPU %d at once", bytes, cuda->index);
    void *larger = NULL;
    cudaError_t error = cudaHostAlloc(&larger, bytes, cudaHostAllocDefault);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return weft_fail(WEFT_MEMORY, "no page-locked host memory for copies to GPU %d (%zu bytes)", cuda->index, bytes);
    }
    if (pinned->data != NULL) pinned->outgrown[pinned->num_outgrown++] = pinned->data;
    pinned->data = larger;
    pinned->bytes = bytes;
    return WEFT_OK;
}

void weft__cuda_free_pinned(weft__pinned *pinned)
{
    for (int i = 0; i < pinned->num_outgrown; i++) (void)cudaFreeHost(pinned->outgrown[i]);
    if (pinned->data != NULL) (void)cudaFreeHost(pinned->data);
    if (pinned->copied != NULL) (void)cudaEventDestroy(pinned->copied);
}

/* The next of two buffers, once what it held is copied. Sizes double: page-locking takes long. */
static weft_status next_pinned(weft_cuda *cuda, weft__pinned *pair, int *turn, size_t bytes, weft__pinned **out)
{
    size_t rounded = (size_t)64 << 10;
    while (rounded < bytes) rounded *= 2;
    weft__pinned *pinned = &pair[*turn ^= 1];
    if (pinned->busy) WEFT_TRY(weft__cuda_wait_event(cuda, pinned->copied, "copying to the GPU"));
    pinned->busy = 0;
    WEFT_TRY(reserve_pinned(cuda, pinned, rounded));
    *out = pinned;
    return WEFT_OK;
}

static weft_status send(weft_cuda *cuda, weft__pinned *pinned, void *dst, size_t bytes)
{
    double began = weft__cuda_now();
    cudaError_t error = cudaMemcpyAsync(dst, pinned->data, bytes, cudaMemcpyHostToDevice, weft_cuda_stream(cuda));
    if (error == cudaSuccess) error = cudaEventRecord(pinned->copied, weft_cuda_stream(cuda));
    cuda->driver_seconds += weft__cuda_now() - began;
    if (error != cudaSuccess) return weft__cuda_fail(cuda, "a copy to the GPU", error);
    weft__cuda_note_activity(cuda);
    pinned->busy = 1;
    return WEFT_OK;
}

weft_status weft_cuda_to_device(weft_cuda *cuda, void *dst, const void *src, size_t bytes)
{
    if (cuda->capturing) return weft_fail(WEFT_INTERNAL, "a copy from the host while a graph is captured");
    WEFT_TRY(weft__cuda_usable(cuda));
    for (size_t done = 0, n; done < bytes; done += n) {
        n = bytes - done < STAGING_BYTES ? bytes - done : STAGING_BYTES;
        weft__pinned *pinned;
        WEFT_TRY(next_pinned(cuda, cuda->staging, &cuda->staging_turn, n, &pinned));
        memcpy(pinned->data, (const char *)src + done, n);
        WEFT_TRY(send(cuda, pinned, (char *)dst + done, n));
    }
    return WEFT_OK;
}

weft_status weft_cuda_to_host(weft_cuda *cuda, void *dst, const void *src, size_t bytes)
{
    WEFT_TRY(weft__cuda_usable(cuda));
    for (size_t done = 0, n; done < bytes; done += n) {
        n = bytes - done < STAGING_BYTES ? bytes - done : STAGING_BYTES;
        weft__pinned *pinned;
        WEFT_TRY(next_pinned(cuda, cuda->staging, &cuda->staging_turn, n, &pinned));
        cudaError_t error = cudaMemcpyAsync(pinned->data, (const char *)src + done, n, cudaMemcpyDeviceToHost, weft_cuda_stream(cuda));
        if (error == cudaSuccess) error = cudaEventRecord(cuda->waited, weft_cuda_stream(cuda));
        if (error != cudaSuccess) return weft__cuda_fail(cuda, "a copy from the GPU", error);
        WEFT_TRY(weft__cuda_wait_event(cuda, cuda->waited, "copying from the GPU"));
        memcpy((char *)dst + done, pinned->data, n);
    }
    return WEFT_OK;
}

weft_status weft_cuda_copy(weft_cuda *cuda, void *dst, const void *src, size_t bytes)
{
    if (bytes == 0 || dst == src) return WEFT_OK;
    cudaError_t error = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, weft_cuda_stream(cuda));
    return error == cudaSuccess ? WEFT_OK : weft__cuda_fail(cuda, "a copy", error);
}

weft_status weft_cuda_copy_rows(weft_cuda *cuda, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t rows)
{
    if (rows == 0 || width == 0) return WEFT_OK;
    if (rows == 1 || (dst_pitch == width && src_pitch == width)) return weft_cuda_copy(cuda, dst, src, width * rows);
    cudaError_t error = cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, rows, cudaMemcpyDeviceToDevice, weft_cuda_stream(cuda));
    return error == cudaSuccess ? WEFT_OK : weft__cuda_fail(cuda, "a copy of rows", error);
}

weft_status weft_cuda_clear(weft_cuda *cuda, void *data, size_t bytes)
{
    if (bytes == 0) return WEFT_OK;
    cudaError_t error = cudaMemsetAsync(data, 0, bytes, weft_cuda_stream(cuda));
    return error == cudaSuccess ? WEFT_OK : weft__cuda_fail(cuda, "clearing memory", error);
}

weft_status weft_cuda_outgoing(weft_cuda *cuda, size_t bytes, void **out)
{
    weft__pinned *pinned;
    WEFT_TRY(next_pinned(cuda, cuda->outgoing, &cuda->outgoing_turn, bytes, &pinned));
    *out = pinned->data;
    return WEFT_OK;
}

weft_status weft_cuda_send(weft_cuda *cuda, void *dst, size_t bytes)
{
    if (cuda->capturing) return weft_fail(WEFT_INTERNAL, "a copy from the host while a graph is captured");
    return send(cuda, &cuda->outgoing[cuda->outgoing_turn], dst, bytes);
}

#endif
