/* kernels/cuda/sample.cu - Gumbel-max over a shard of the vocabulary, or the largest logit.
 *
 * A row is cut into parts, one block each; the block that ends last takes the best of the parts.
 * As on the CPU the largest logit's score bounds the others, so few need noise. */
#include <inttypes.h>

#include "kernels/cuda/cuda.cuh"

namespace weft {

enum { SAMPLE_THREADS = 512, MAX_PARTS = 32 /* of a row: a warp takes the best of them */, PART_LEAST = 4096 };

struct Best {
    float value;
    int id; /* of the part, -1: none */
};

__device__ __forceinline__ Best better(Best a, Best b)
{
    if (b.id < 0) return a;
    if (a.id < 0) return b;
    if (a.value != b.value) return a.value > b.value ? a : b;
    return a.id < b.id ? a : b;
}

__device__ __forceinline__ Best warp_best(Best b)
{
    for (int d = 16; d > 0; d /= 2) {
        Best other = {__shfl_xor_sync(~0u, b.value, d), __shfl_xor_sync(~0u, b.id, d)};
        b = better(b, other);
    }
    return b;
}

__device__ static Best block_best(Best b)
{
    __shared__ Best part[SAMPLE_THREADS / 32];
    b = warp_best(b);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = b;
    __syncthreads();
    b = part[0];
    for (int w = 1; w < SAMPLE_THREADS / 32; w++) b = better(b, part[w]);
    return b;
}

/* kernels/cpu/philox.h and sample.c: the block of (id / 4, position), lane id % 4. */
__device__ static float gumbel(uint64_t seed, int32_t position, int32_t id)
{
    uint32_t c0 = (uint32_t)id / 4, c1 = (uint32_t)position, c2 = 0, c3 = 0, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint32_t n0 = __umulhi(0xCD9E8D57u, c2) ^ c1 ^ k0, n2 = __umulhi(0xD2511F53u, c0) ^ c3 ^ k1;
        c1 = 0xCD9E8D57u * c2;
        c3 = 0xD2511F53u * c0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const uint32_t lane = (uint32_t)id % 4, x = lane == 0 ? c0 : lane == 1 ? c1 : lane == 2 ? c2 : c3;
    return (float)-log(-log(((double)x + 0.5) * 0x1p-32));
}

/* No noise is larger (kernels/cpu/sample.c). */
__device__ const float gumbel_limit = 22.8740f;

/* use(x, i) for the logits [begin, end) that are a thread's, i rising; many are on their way at once, 16 bytes each where they are aligned. begin: a
 * multiple of 4. */
template <class Use> __device__ __forceinline__ void each_logit(const float *logits, int begin, int end, Use use)
{
    enum { AT_ONCE = 4 };
    const int whole = (uintptr_t)logits % 16 == 0 ? begin + (end - begin) / 4 * 4 : begin;
    for (int64_t at = begin + 4 * (int)threadIdx.x; at < whole; at += AT_ONCE * 4 * SAMPLE_THREADS) {
        float4 four[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int64_t i = at + j * 4 * SAMPLE_THREADS;
            if (i < whole) four[j] = *(const float4 *)(logits + i);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int64_t from = at + j * 4 * SAMPLE_THREADS;
            if (from >= whole) continue;
            const int i = (int)from;
            use(four[j].x, i), use(four[j].y, i + 1), use(four[j].z, i + 2), use(four[j].w, i + 3);
        }
    }
    for (int64_t i = whole + (int)threadIdx.x; i < end; i += SAMPLE_THREADS) use(logits[i], (int)i);
}

__device__ static Best part_best(const weft_sample_args &a, int64_t row, int begin, int end)
{
    const float *logits = a.logits + row * a.logits_stride;
    const float temperature = a.temperature[row];
    Best best = {minus_inf(), -1};
    each_logit(logits, begin, end, [&](float x, int i) {
        if (x > best.value) best = {x, i};
    });
    best = block_best(best);
    if (best.id < 0 || !(temperature > 0.0f)) return best;
    const uint64_t seed = a.seed[row];
    const int32_t position = a.position[row], first = (int32_t)a.first;
    const float bound = best.value / temperature + gumbel(seed, position, first + best.id);
    best = {minus_inf(), -1};
    each_logit(logits, begin, end, [&](float x, int i) {
        const float scaled = x / temperature;
        if (!(scaled + gumbel_limit >= bound) || scaled == minus_inf()) return;
        const float score = scaled + gumbel(seed, position, first + i);
        if (score > best.value) best = {score, i};
    });
    return block_best(best);
}

__device__ static void put(const weft_sample_args &a, int64_t row, Best best)
{
    a.value[row] = best.id < 0 ? minus_inf() : best.value;
    a.id[row] = (int32_t)(a.first + (best.id < 0 ? 0 : best.id));
}

__global__ void __launch_bounds__(SAMPLE_THREADS) sample(const weft_sample_args a, Best *parts, unsigned *counters)
{
    dependency_wait();
    __shared__ bool last;
    const int64_t row = blockIdx.y;
    const int64_t per = (a.count + 4 * gridDim.x - 1) / (4 * gridDim.x) * 4;
    const int begin = (int)min(a.count, blockIdx.x * per), end = (int)min(a.count, begin + per);
    Best best = part_best(a, row, begin, end);
    if (gridDim.x == 1) {
        if (threadIdx.x == 0) put(a, row, best);
        return;
    }
    if (threadIdx.x == 0) {
        parts[row * MAX_PARTS + blockIdx.x] = best;
        __threadfence();
        last = atomicAdd(&counters[row], 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last || threadIdx.x >= MAX_PARTS) return;
    __threadfence();
    best = {minus_inf(), -1};
    if (threadIdx.x < gridDim.x) { /* all on their way at once */
        const volatile Best *from = &parts[row * MAX_PARTS + threadIdx.x];
        best = {from->value, from->id};
    }
    best = warp_best(best);
    if (threadIdx.x != 0) return;
    counters[row] = 0;
    put(a, row, best);
}

} // namespace weft

using namespace weft;

extern "C" weft_status weft_sample_cuda(const weft_sample_args *a, void *stream)
{
    const int64_t sizes[] = {a->rows, a->first, a->count};
    WEFT_TRY(weft__check_sizes("sample", "rows, first, count", sizes, 3));
    if (a->first + a->count > INT32_MAX)
        return weft_fail(WEFT_INVALID, "sample: ids up to %" PRId64 " do not fit in 32 bits", a->first + a->count - 1);
    if (a->rows > 65535) return weft_fail(WEFT_INVALID, "sample: %" PRId64 " rows, at most 65535 at once", a->rows);
    if (a->rows == 0) return WEFT_OK;
    weft_cuda_context *c = a->cuda;
    unsigned parts = 1;
    if (c != NULL && a->rows <= COUNTERS && (size_t)a->rows * MAX_PARTS * sizeof(Best) <= c->workspace_bytes)
        parts = (unsigned)least(least(MAX_PARTS, most(1, 2 * c->sms / a->rows)), most(1, div_up(a->count, PART_LEAST)));
    launch(sample, dim3(parts, (unsigned)a->rows), SAMPLE_THREADS, 0, stream, *a, c ? (Best *)c->workspace : (Best *)NULL,
           c ? c->counters : (unsigned *)NULL);
    return launched("sample");
}
