/* kernels/cuda/tests/bench.c - how fast the CUDA operations are, beside a copy and a large product
 * of the same run. Arguments name sections: linear attention small experts step fused (all when there are none). */
#include "kernels/cuda/tests/bench.h"
#include "kernels/cuda/tests/sections.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 4096, REPLAYS = 9, POOL = 16 << 20 };

double bench_copy_rate, bench_product_rate;
void (*bench_captured)(void *context);
static void *blocks[BLOCKS];
static int block_count;

static void must(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double bench_us(bench_call call, void *context, int calls)
{
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t run;
    cudaEvent_t begin, end;
    double us[REPLAYS];
    must(cudaDeviceSynchronize(), "fill"); /* copies that fill memory are not waited for otherwise */
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    must(cudaEventCreate(&begin), "event");
    must(cudaEventCreate(&end), "event");
    for (int pass = 0; pass < 2; pass++) { /* first without capture: libraries load their kernels */
        if (pass == 1) must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
        for (int i = 0; i < (pass ? calls : 1); i++)
            if (call(context, i, stream) != WEFT_OK) {
                fprintf(stderr, "%s\n", weft_error_message());
                exit(1);
            }
        must(cudaStreamIsCapturing(stream, &(enum cudaStreamCaptureStatus){0}), "capture");
    }
    must(cudaStreamEndCapture(stream, &graph), "capture");
    must(cudaGraphInstantiate(&run, graph, 0), "graph");
    if (bench_captured != NULL) bench_captured(context);
    for (int i = 0; i < REPLAYS + 2; i++) {
        must(cudaEventRecord(begin, stream), "event");
        must(cudaGraphLaunch(run, stream), "graph");
        must(cudaEventRecord(end, stream), "event");
        must(cudaStreamSynchronize(stream), "replay");
        float ms;
        must(cudaEventElapsedTime(&ms, begin, end), "event");
        if (i >= 2) us[i - 2] = ms * 1e3 / calls;
    }
    cudaGraphExecDestroy(run);
    cudaGraphDestroy(graph);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaStreamDestroy(stream);
    qsort(us, REPLAYS, sizeof *us, ascending);
    return us[REPLAYS / 2];
}

static void *take(size_t bytes)
{
    void *p = NULL;
    must(cudaMalloc(&p, bytes), "device memory");
    if (block_count == BLOCKS) exit(1);
    return blocks[block_count++] = p;
}

void *bench_upload(const void *host, size_t bytes)
{
    void *p = take(bytes);
    must(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice), "upload");
    return p;
}

/* A pool of random values, repeated: enough to keep any cache and compressor busy. */
void *bench_random(int64_t count, weft_dtype dtype, float scale)
{
    static float *normal;
    size_t size = weft_dtype_size(dtype), bytes = (size_t)count * size, pool = (size_t)POOL * size;
    if (normal == NULL) {
        normal = malloc((size_t)POOL * sizeof *normal);
        uint64_t s = 88172645463325252u;
        for (int i = 0; i < POOL; i++) {
            float sum = 0; /* of four uniform values: near enough */
            s ^= s << 13, s ^= s >> 7, s ^= s << 17;
            for (int j = 0; j < 4; j++) sum += (float)((s >> (16 * j)) & 0xffff) * 0x1p-16f - 0.5f;
            normal[i] = sum * 1.732f;
        }
    }
    static struct { weft_dtype dtype; float scale; char *device; } pools[16];
    int known = 0;
    while (pools[known].device != NULL && (pools[known].dtype != dtype || pools[known].scale != scale)) known++;
    if (pools[known].device == NULL) {
        if (known == 15) exit(1);
        char *host = malloc(pool);
        for (int i = 0; i < POOL; i++) {
            if (dtype == WEFT_F8E4M3) ((uint8_t *)host)[i] = weft_e4m3_from_f32(normal[i] * 0.5f);
            else weft_store_f32(host, dtype, i, normal[i] * scale);
        }
        must(cudaMalloc((void **)&pools[known].device, pool), "device memory");
        must(cudaMemcpy(pools[known].device, host, pool, cudaMemcpyHostToDevice), "fill");
        pools[known].dtype = dtype, pools[known].scale = scale;
        free(host);
    }
    char *p = take(bytes);
    for (size_t at = 0; at < bytes; at += pool)
        must(cudaMemcpy(p + at, pools[known].device, bytes - at < pool ? bytes - at : pool, cudaMemcpyDeviceToDevice), "fill");
    return p;
}

void bench_free_all(void)
{
    for (int i = 0; i < block_count; i++) cudaFree(blocks[i]);
    block_count = 0;
}

weft_cuda_context *bench_context(void)
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

void bench_line(const char *name, double us, double bytes, double flop)
{
    printf("%-58s %10.2f us", name, us);
    if (bytes > 0) printf(" %8.0f GB/s", bytes / us * 1e-3);
    if (bytes > 0 && bench_copy_rate > 0) printf(" %5.1f%% of copy", bytes / us * 1e6 / bench_copy_rate * 100);
    if (flop > 0) printf(" %8.1f TFLOP/s", flop / us * 1e-6);
    if (flop > 0 && bench_product_rate > 0) printf(" %5.1f%% of product", flop / us * 1e6 / bench_product_rate * 100);
    printf("\n");
    fflush(stdout);
}

static weft_status copy(void *context, int i, void *stream) { return weft_gather_rows_cuda(context, stream); }
static weft_status product(void *context, int i, void *stream) { return weft_linear_cuda(context, stream); }

static void ceilings(void)
{
    enum { ROWS = 65536, COLS = 16384 };
    weft_gather_rows_args c = {.count = ROWS, .cols = COLS, .x_stride = COLS, .y_stride = COLS, .x_rows = ROWS, .dtype = WEFT_BF16};
    int32_t *rows = malloc(ROWS * sizeof *rows);
    for (int i = 0; i < ROWS; i++) rows[i] = i;
    c.x = bench_random((int64_t)ROWS * COLS, WEFT_BF16, 1), c.y = take((size_t)ROWS * COLS * 2);
    c.indices = bench_upload(rows, ROWS * sizeof *rows);
    free(rows);
    const double bytes = 2.0 * ROWS * COLS * 2;
    double us = bench_us(copy, &c, 2);
    bench_line("device copy, 2 GiB", us, bytes, 0);
    bench_copy_rate = bytes / us * 1e6;
    bench_free_all();
    int64_t n = 8192;
    weft_linear_args a = {.tokens = n, .n = n, .k = n, .x_stride = n, .w_stride = n, .y_stride = n, .x_dtype = WEFT_BF16,
                          .w_dtype = WEFT_BF16, .y_dtype = WEFT_BF16, .cuda = bench_context()};
    a.x = bench_random(n * n, WEFT_BF16, 1), a.w = bench_random(n * n, WEFT_BF16, 1), a.y = bench_random(n * n, WEFT_BF16, 1);
    us = bench_us(product, &a, 4);
    bench_line("bf16 product 8192 x 8192 x 8192 (cuBLASLt)", us, 0, 2.0 * 8192 * 8192 * 8192);
    bench_product_rate = 2.0 * 8192 * 8192 * 8192 / us * 1e6;
    bench_free_all();
}

int main(int argc, char **argv)
{
    static const section sections[] = {{"linear", bench_linear},   {"attention", bench_attention}, {"small", bench_small},
                                       {"experts", bench_experts}, {"step", bench_step},           {"fused", bench_fused}};
    const int count = (int)(sizeof sections / sizeof sections[0]);
    int refused = sections_refuse(sections, count, argv + 1, argc - 1, "usage: weft_gpu_bench [SECTION...]");
    if (refused >= 0) return refused;
    struct cudaDeviceProp device;
    must(cudaGetDeviceProperties(&device, 0), "device");
    printf("%s, %d multiprocessors\n", device.name, device.multiProcessorCount);
    ceilings();
    for (int s = 0; s < count; s++) {
        if (sections_want(&sections[s], argv + 1, argc - 1)) sections[s].run();
        bench_free_all();
    }
    return 0;
}
