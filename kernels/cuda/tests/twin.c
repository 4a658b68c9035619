/* kernels/cuda/tests/twin.c */
#include "kernels/cuda/tests/twin.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ARENA = 640 << 20 };

static char *host, *device, *back;
static size_t used;
static uint64_t state;

static void must(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

static uint32_t next(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    uint32_t x = (uint32_t)(((state >> 18) ^ state) >> 27), r = (uint32_t)(state >> 59);
    return x >> r | x << (-r & 31);
}
double twin_uniform(void) { return (next() + 0.5) * 0x1p-32; }
int twin_below(int n) { return (int)(twin_uniform() * n); }

void twin_reset(uint64_t seed)
{
    if (host == NULL) {
        host = malloc(ARENA);
        back = malloc(ARENA);
        must(cudaMalloc((void **)&device, ARENA), "device memory for the checks");
        if (host == NULL || back == NULL) exit(1);
    }
    used = 0;
    state = seed * 0x9E3779B97F4A7C15u + 1;
    next();
}

void *twin_take(int64_t count, weft_dtype dtype, int skew)
{
    size_t size = weft_dtype_size(dtype);
    char *p = host + used + (size_t)skew * size;
    used += ((size_t)(count + skew) * size + 256 + 255) & ~(size_t)255;
    if (used > ARENA) {
        fprintf(stderr, "a case needs more than %d MiB\n", ARENA >> 20);
        exit(1);
    }
    memset(p, (int)next(), (size_t)count * size);
    /* What an operation does not write must not read as NaN in both. */
    if (size > 1 && dtype != WEFT_I32)
        for (int64_t i = 0; i < count; i++) weft_store_f32(p, dtype, i, 1000.0f + (float)(i % 17));
    return p;
}

void *twin_random(int64_t count, weft_dtype dtype, int skew, float scale)
{
    enum { PERIOD = 1048573 }; /* prime: no row of a large matrix begins like another */
    void *p = twin_take(count, dtype, skew);
    for (int64_t i = 0; i < count; i++) {
        if (i >= PERIOD) {
            int64_t size = (int64_t)weft_dtype_size(dtype), part = count - i < PERIOD ? count - i : PERIOD;
            memcpy((char *)p + i * size, p, (size_t)(part * size));
            i += part - 1;
            continue;
        }
        if (dtype == WEFT_F8E4M3) {
            uint8_t b = (uint8_t)next();
            ((uint8_t *)p)[i] = (b & 0x7f) == 0x7f ? 0x38 : b & 0xbf; /* up to 1.875, and subnormals */
            continue;
        }
        double u = twin_uniform(), v = twin_uniform();
        weft_store_f32(p, dtype, i, (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v)) * scale);
    }
    return p;
}

int32_t *twin_integers(int64_t count, int low, int high)
{
    int32_t *p = twin_take(count, WEFT_I32, 0);
    for (int64_t i = 0; i < count; i++) p[i] = low + twin_below(high - low);
    return p;
}

void twin_upload(void) { must(cudaMemcpy(device, host, used, cudaMemcpyHostToDevice), "upload"); }
void *twin_device(const void *p) { return p == NULL ? NULL : device + ((const char *)p - host); }
const void *twin_result(const void *p) { return back + ((const char *)p - host); }

int twin_download(void)
{
    cudaError_t error = cudaDeviceSynchronize();
    if (error == cudaSuccess) error = cudaMemcpy(back, device, used, cudaMemcpyDeviceToHost);
    if (error == cudaSuccess) return 1;
    fprintf(stderr, "the device: %s\n", cudaGetErrorString(error));
    return 0;
}

weft_cuda_context *twin_context(void)
{
    static weft_cuda_context *context;
    void *workspace = NULL;
    if (context != NULL) return context;
    must(cudaMalloc(&workspace, WEFT_CUDA_WORKSPACE_BYTES), "workspace");
    if (weft_cuda_context_create(&context, workspace, WEFT_CUDA_WORKSPACE_BYTES) != WEFT_OK) {
        fprintf(stderr, "%s\n", weft_error_message());
        exit(1);
    }
    return context;
}
