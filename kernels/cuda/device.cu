/* kernels/cuda/device.cu - dummy weights, sums over peers, the last touch to logits. */
#include "kernels/cuda/cuda.cuh"
extern "C" {
#include "kernels/weft_cuda_device.h"
}

namespace weft {

enum { DEVICE_THREADS = 256, DEVICE_BLOCKS = 4096 };

static unsigned blocks_for(int64_t items)
{
    return (unsigned)least(DEVICE_BLOCKS, most(1, div_up(items, DEVICE_THREADS)));
}

/* ---- dummy weights: src/model/dummy.c, number by number ---- */

__device__ __forceinline__ uint64_t mix64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

__device__ __forceinline__ uint32_t mix32(uint64_t key, uint32_t column)
{
    uint32_t x = column * 0x9e3779b9u + (uint32_t)key;
    x = (x ^ (x >> 16)) * 0x7feb352du ^ (uint32_t)(key >> 32);
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

__device__ __forceinline__ float rounded(float x, int dtype)
{
    if (dtype == WEFT_BF16) return widen(narrow<bf16>(x));
    if (dtype == WEFT_F16) return widen(narrow<__half>(x));
    return x;
}

__global__ void dummy(const weft_cuda_dummy_args a, float scale, float base)
{
    dependency_wait();
    const int64_t total = a.rows * a.columns;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        const uint64_t key = mix64(a.seed + (uint64_t)(a.row + i / a.columns) * 0x9e3779b97f4a7c15ull);
        const uint32_t h = mix32(key, (uint32_t)a.column + (uint32_t)(i % a.columns));
        if (a.dtype == WEFT_F8E4M3) {
            const uint8_t b = (uint8_t)(h >> 24);
            ((uint8_t *)a.dst)[i] = (uint8_t)(b - ((b & 0x7f) == 0x7f));
        } else {
            store(a.dst, a.dtype, i, rounded(fmaf((float)((int32_t)h >> 16), scale, base), a.source_dtype));
        }
    }
}

/* ---- sums over peers ---- */

template <class T, class S> __device__ __forceinline__ S up(T x) { return widen(x); }
template <> __device__ __forceinline__ int32_t up<int32_t, int32_t>(int32_t x) { return x; }
template <class T, class S> __device__ __forceinline__ T down(S x) { return narrow<T>(x); }
template <> __device__ __forceinline__ int32_t down<int32_t, int32_t>(int32_t x) { return x; }

template <class T, class S> __global__ void reduce(const weft_cuda_reduce_args a)
{
    dependency_wait();
    const int64_t total = a.rows * a.cols;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t from = i / a.cols * a.src_stride + i % a.cols;
        S sum = up<T, S>(((const T *)a.sources[0])[from]);
        for (int s = 1; s < a.count; s++) {
            const S x = up<T, S>(((const T *)a.sources[s])[from]);
            sum = !a.max ? (S)(sum + x) : x > sum ? x : sum;
        }
        ((T *)a.dst)[i / a.cols * a.dst_stride + i % a.cols] = down<T, S>(sum);
    }
}

__global__ void finish_logits(const weft_cuda_finish_args a)
{
    dependency_wait();
    const int64_t total = a.rows * a.cols;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t column = i % a.cols;
        float *x = a.x + i / a.cols * a.stride + column;
        if (column >= a.real) *x = minus_inf();
        else if (a.scale != 1.0f) *x *= a.scale;
    }
}

/* The last block of a call counts it and tells the host. What other blocks did to the part comes before. */
__device__ static void mail_done(const weft_cuda_mail &mail, unsigned call)
{
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (gridDim.x > 1) {
        __threadfence_system(); /* of what its block did */
        if (atomicInc(mail.counter + 1, gridDim.x - 1) != gridDim.x - 1) return;
    }
    *(volatile unsigned *)mail.counter = call + 1;
    __threadfence_system();
    *(volatile unsigned *)mail.done = call + 1;
}

__device__ static char *mail_part(const weft_cuda_mail &mail, unsigned call) { return (char *)mail.parts + (call & 1) * mail.part_bytes; }

__global__ void __launch_bounds__(DEVICE_THREADS) choose(const weft_cuda_choose_args a)
{
    dependency_wait();
    const unsigned call = *(volatile const unsigned *)a.mail.counter;
    volatile int32_t *told = (volatile int32_t *)mail_part(a.mail, call);
    for (int64_t r = blockIdx.x * (int64_t)DEVICE_THREADS + threadIdx.x; r < a.rows; r += (int64_t)gridDim.x * DEVICE_THREADS) {
        float best = minus_inf();
        int32_t id = -1;
        for (int64_t w = 0; w < a.world; w++) {
            const float value = ((const float *)a.candidates)[2 * w * a.rows + r];
            const int32_t other = ((const int32_t *)a.candidates)[(2 * w + 1) * a.rows + r];
            if (value > best || (value == best && id >= 0 && other < id)) best = value, id = other;
        }
        a.ids[r] = id;
        told[r] = id;
    }
    mail_done(a.mail, call);
}

/* 16 bytes at a time: the way to the host's memory is long, so all of them are on it at once. */
__global__ void __launch_bounds__(DEVICE_THREADS) arrive(const weft_cuda_arrive_args a)
{
    dependency_wait();
    const unsigned call = *(volatile const unsigned *)a.mail.counter;
    const char *part = mail_part(a.mail, call);
    for (int64_t i = blockIdx.x * (int64_t)DEVICE_THREADS + threadIdx.x; i * 16 < a.bytes; i += (int64_t)gridDim.x * DEVICE_THREADS) {
        int32_t v[4];
        asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(part + i * 16) : "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int64_t t = i * 4 + k - a.ids_at, row = -1 - (int64_t)v[k];
            if (t >= 0 && t < a.tokens && row >= 0 && row < a.rows) v[k] = a.chosen[row];
        }
        const int64_t pair = i * 2 - a.changes_at / 2;
#pragma unroll
        for (int k = 0; k < 2; k++)
            if (pair + k >= 0 && pair + k < a.changes && v[2 * k] >= 0 && v[2 * k] < a.table_words) a.table[v[2 * k]] = v[2 * k + 1];
        *(int4 *)((char *)a.record + i * 16) = make_int4(v[0], v[1], v[2], v[3]);
    }
    mail_done(a.mail, call);
}

__global__ void __launch_bounds__(DEVICE_THREADS) follow_ids(const weft_cuda_follow_ids_args a)
{
    dependency_wait();
    for (int64_t t = blockIdx.x * (int64_t)DEVICE_THREADS + threadIdx.x; t < a.tokens; t += (int64_t)gridDim.x * DEVICE_THREADS) {
        const int64_t row = -1 - (int64_t)a.ids[t];
        if (row >= 0 && row < a.rows) a.ids[t] = a.chosen[row];
    }
}

} // namespace weft

using namespace weft;

extern "C" weft_status weft_cuda_dummy(const weft_cuda_dummy_args *a, void *stream)
{
    static const float scales[] = {0x1.1bc77ap-20f, 0x1.48p-21f, 0x1.ap-30f}, bases[] = {0.0f, 1.0f, 0x1.ap-13f};
    if (a->kind < 0 || a->kind > 2) return weft_fail(WEFT_INVALID, "dummy weights of unknown kind %d", a->kind);
    if (a->rows < 1 || a->columns < 1) return WEFT_OK;
    launch(dummy, blocks_for(a->rows * a->columns), DEVICE_THREADS, 0, stream, *a, scales[a->kind], bases[a->kind]);
    return launched("dummy weights");
}

extern "C" weft_status weft_cuda_reduce(const weft_cuda_reduce_args *a, void *stream)
{
    if (a->count < 1 || a->count > WEFT_CUDA_MAX_PEERS)
        return weft_fail(WEFT_INVALID, "a sum over %d ranks of one GPU, at most %d", a->count, WEFT_CUDA_MAX_PEERS);
    if (a->rows < 1 || a->cols < 1) return WEFT_OK;
    const unsigned blocks = blocks_for(a->rows * a->cols);
    if (a->dtype == WEFT_I32) launch(reduce<int32_t, int32_t>, blocks, DEVICE_THREADS, 0, stream, *a);
    else if (a->dtype == WEFT_F32) launch(reduce<float, float>, blocks, DEVICE_THREADS, 0, stream, *a);
    else if (a->dtype == WEFT_BF16) launch(reduce<bf16, float>, blocks, DEVICE_THREADS, 0, stream, *a);
    else launch(reduce<__half, float>, blocks, DEVICE_THREADS, 0, stream, *a);
    return launched("a sum over ranks");
}

extern "C" weft_status weft_cuda_finish_logits(const weft_cuda_finish_args *a, void *stream)
{
    if (a->rows < 1 || a->cols < 1 || (a->scale == 1.0f && a->real == a->cols)) return WEFT_OK;
    launch(finish_logits, blocks_for(a->rows * a->cols), DEVICE_THREADS, 0, stream, *a);
    return launched("logits");
}

extern "C" weft_status weft_cuda_choose(const weft_cuda_choose_args *a, void *stream)
{
    if (a->rows < 1) return WEFT_OK;
    if ((size_t)a->rows * sizeof(int32_t) > a->mail.part_bytes)
        return weft_fail(WEFT_INVALID, "%lld tokens in a mail of %zu bytes", (long long)a->rows, a->mail.part_bytes);
    launch(choose, blocks_for(a->rows), DEVICE_THREADS, 0, stream, *a);
    return launched("choosing tokens");
}

extern "C" weft_status weft_cuda_arrive(const weft_cuda_arrive_args *a, void *stream)
{
    if (a->bytes < 1 || (size_t)a->bytes > a->mail.part_bytes)
        return weft_fail(WEFT_INVALID, "a record of %lld bytes in a mail of %zu", (long long)a->bytes, a->mail.part_bytes);
    launch(arrive, blocks_for(div_up(a->bytes, 16)), DEVICE_THREADS, 0, stream, *a);
    return launched("a record that arrives");
}

extern "C" weft_status weft_cuda_follow_ids(const weft_cuda_follow_ids_args *a, void *stream)
{
    if (a->tokens < 1 || a->rows < 1) return WEFT_OK;
    launch(follow_ids, blocks_for(a->tokens), DEVICE_THREADS, 0, stream, *a);
    return launched("ids of the step before");
}
