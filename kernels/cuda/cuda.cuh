/* kernels/cuda/cuda.cuh - what the CUDA operations share: elements, vectors, sums over a block,
 * launches and checks.
 *
 * Every kernel begins with `dependency_wait()`: launches overlap the end of the kernel before them
 * (programmatic dependent launch), and until that call returns nothing that an earlier kernel of
 * the stream wrote may be read, nor anything be written. Only what no kernel of a step writes may be
 * read before it: weights, keys and values of earlier steps, and what the host copies (positions, lengths, tables),
 * since a copy is never overlapped. Every block calls it, also one that has nothing to do: a kernel that ended before the one
 * in front of it would let its successor begin too soon. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

extern "C" {
#include "kernels/cpu/cpu.h"
#include "kernels/weft_cuda.h"
#include "kernels/weft_kernels.h"
}

struct weft_cuda_context {
    int sms, shared; /* multiprocessors; bytes of shared memory that a block may have */
    bool hopper;     /* compute capability 9.0 */
    int clusters[2]; /* of 1 and 2 blocks with all shared memory, that fit at once; 0 before compute capability 9.0 */
    unsigned *counters; /* zero between operations; whoever counts clears */
    char *workspace;    /* 256-byte aligned */
    size_t workspace_bytes;
    struct weft_blas *blas;
};

namespace weft {

enum { COUNTERS = 16384 };

typedef __nv_bfloat16 bf16;

/* ---- host side ---- */

/* The status of the launches so far; `op` begins the text. */
weft_status launched(const char *op);
weft_status failed(const char *op, cudaError_t error);

static inline int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline bool aligned(const void *p, size_t bytes) { return (uintptr_t)p % bytes == 0; }
/* NULL overlaps nothing. */
static inline bool overlap(const void *p, int64_t p_bytes, const void *q, int64_t q_bytes)
{
    return p != NULL && q != NULL && (const char *)p < (const char *)q + q_bytes && (const char *)q < (const char *)p + p_bytes;
}
static inline const char *at(const void *base, weft_dtype dtype, int64_t index)
{
    return (const char *)base + index * (int64_t)weft_dtype_size(dtype);
}

/* f(T()) with T the element type of a dtype that check_float has passed. */
template <class F> static inline void by_float(weft_dtype dtype, F f)
{
    if (dtype == WEFT_F32) f(float());
    else if (dtype == WEFT_BF16) f(bf16());
    else f(__half());
}

template <class... P, class... A>
static inline void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, void *stream, A... args)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = (cudaStream_t)stream;
#ifdef WEFT_CUDA_DEPENDENT_LAUNCH
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &overlap;
    config.numAttrs = 1;
#endif
    /* The error stays the runtime's last error, which launched() takes. */
    (void)cudaLaunchKernelEx(&config, kernel, P(args)...);
}

/* What a multiprocessor keeps of its memory for the shared memory of `blocks` of this kernel's, without dynamic one (1 KB of each is the driver's); the rest is its L1, where what loads have
 * asked for is kept. Else it stays as the kernel before had it, where this one comes before that ends: as next to nothing, behind one that took all. */
template <class... P> static inline void keep_l1(void (*kernel)(P...), int blocks)
{
    cudaFuncAttributes code = {};
    int device = 0, all = 0;
    if (cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) == cudaSuccess && all > 0 &&
        cudaFuncGetAttributes(&code, kernel) == cudaSuccess)
        (void)cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                   (int)least(100, div_up(100 * blocks * ((int64_t)code.sharedSizeBytes + 1024), all)));
}

/* One whose blocks wait for one another: all of them at once, or none. shared: of a block, up to all that it may have. */
template <class... P, class... A>
static inline void launch_at_once(void (*kernel)(P...), int blocks, int threads, int shared, void *stream, const A &...args)
{
    (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    cudaLaunchConfig_t config = {};
    config.gridDim = (unsigned)blocks;
    config.blockDim = (unsigned)threads;
    config.dynamicSmemBytes = (size_t)shared;
    config.stream = (cudaStream_t)stream;
    cudaLaunchAttribute together = {};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    config.attrs = &together;
    config.numAttrs = 1;
    (void)cudaLaunchKernelEx(&config, kernel, args...);
}

/* The same in clusters of `blocks` neighbours in x, up to 16. False where the GPU has no clusters, or no room
 * for one of that size: nothing is launched then. */
template <class... P, class... A>
static inline bool launch_cluster(void (*kernel)(P...), dim3 grid, dim3 block, int blocks, void *stream, A... args)
{
#ifdef WEFT_CUDA_DEPENDENT_LAUNCH
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = (unsigned)blocks, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.stream = (cudaStream_t)stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
        cudaLaunchKernelEx(&config, kernel, P(args)...) == cudaSuccess)
        return true;
    (void)cudaGetLastError();
#endif
    return false;
}

/* ---- device side ---- */

/* Lets the next kernel be launched. */
__device__ __forceinline__ void dependency_release()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* dependency_wait() that leaves dependency_release() to the kernel. */
__device__ __forceinline__ void dependency_wait_only()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Also lets the next kernel be launched. Not sooner: its blocks would take places that this kernel's
 * neighbours need, unevenly (measured: a decode step loses 8%). */
__device__ __forceinline__ void dependency_wait()
{
    dependency_wait_only();
    dependency_release();
}

/* How the L2 keeps what no one reads again: weights and keys need not push out activations and code, which every block waits for. */
__device__ __forceinline__ uint64_t streamed()
{
    uint64_t policy = 0;
#ifdef __CUDA_ARCH__
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

__device__ __forceinline__ float minus_inf() { return __int_as_float((int)0xff800000u); }

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
template <class T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }

/* e4m3 by its bits: exact, NaN included. */
__device__ __forceinline__ float widen_e4m3(uint8_t b)
{
    uint32_t sign = (uint32_t)(b & 0x80) << 24, rest = b & 0x7f;
    if (rest == 0x7f) return __uint_as_float(0x7fc00000u | sign);
    return __uint_as_float(sign | (rest << 20)) * 0x1p120f;
}

/* One element of a dtype known at run time. */
__device__ __forceinline__ float load(const void *p, int dtype, int64_t i)
{
    if (dtype == WEFT_F32) return ((const float *)p)[i];
    if (dtype == WEFT_BF16) return widen(((const bf16 *)p)[i]);
    if (dtype == WEFT_F16) return widen(((const __half *)p)[i]);
    return widen_e4m3(((const uint8_t *)p)[i]);
}
__device__ __forceinline__ void store(void *p, int dtype, int64_t i, float x)
{
    if (dtype == WEFT_F32) ((float *)p)[i] = x;
    else if (dtype == WEFT_BF16) ((bf16 *)p)[i] = narrow<bf16>(x);
    else ((__half *)p)[i] = narrow<__half>(x);
}

/* silu(gate) * up before it is rounded to T: 16 bits need no exact exponential, whose instructions would not fit under the
 * products of a long step. */
template <class T> __device__ __forceinline__ float silu_times(float gate, float up)
{
    if (sizeof(T) == 2) return __fdividef(gate, 1.0f + __expf(-gate)) * up;
    return gate / (1.0f + expf(-gate)) * up;
}

template <class T, int N> struct alignas(sizeof(T) * N) Pack {
    T v[N];
};

/* Turns N pairs of a head's elements by their angles. */
template <class T, int N> __device__ __forceinline__ void rotate_pairs(Pack<T, N> &x1, Pack<T, N> &x2, const Pack<float, N> &cos, const Pack<float, N> &sin)
{
#pragma unroll
    for (int e = 0; e < N; e++) {
        const float u = widen(x1.v[e]), v = widen(x2.v[e]);
        x1.v[e] = narrow<T>(__fmaf_rn(u, cos.v[e], -__fmul_rn(v, sin.v[e])));
        x2.v[e] = narrow<T>(__fmaf_rn(v, cos.v[e], __fmul_rn(u, sin.v[e])));
    }
}

/* N elements from `first` on of a dtype known at run time, 8 bytes at a time where they are aligned. */
template <int N> __device__ __forceinline__ void load_pack(const void *p, int dtype, int64_t first, float (&x)[N])
{
    const char *from = (const char *)p + first * (dtype == WEFT_F32 ? 4 : 2);
    const bool whole = (uintptr_t)from % 8 == 0;
    if (N % 2 == 0 && whole && dtype == WEFT_F32) {
#pragma unroll
        for (int j = 0; j + 1 < N; j += 2) {
            const float2 v = *(const float2 *)(from + 4 * j);
            x[j] = v.x, x[j + 1] = v.y;
        }
    } else if (N % 4 == 0 && whole && (dtype == WEFT_BF16 || dtype == WEFT_F16)) {
#pragma unroll
        for (int j = 0; j + 3 < N; j += 4) {
            const uint2 bits = *(const uint2 *)(from + 2 * j);
            const uint32_t word[2] = {bits.x, bits.y};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const uint16_t half = (uint16_t)(word[k / 2] >> (16 * (k % 2)));
                if (dtype == WEFT_BF16) x[j + k] = __uint_as_float((uint32_t)half << 16);
                else x[j + k] = __half2float(__ushort_as_half(half));
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = load(p, dtype, first + j);
    }
}

__device__ __forceinline__ float warp_sum(float x)
{
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}
/* The sum over a block of whole warps, in every thread. */
__device__ __forceinline__ float block_sum(float x)
{
    __shared__ float part[32];
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (int w = 0; w < (int)blockDim.x / 32; w++) sum += part[w];
    return sum;
}

/* Who holds a position and where: plan/layout.h for a weft_page_layout. */
__device__ __forceinline__ int page_owner(const weft_page_layout &p, int64_t position)
{
    if (p.context_size == 1) return 0;
    return (int)((int)position / p.interleave % p.context_size);
}
__device__ __forceinline__ int page_local(const weft_page_layout &p, int64_t position)
{
    if (p.context_size == 1) return (int)position;
    int i = (int)position, round = p.context_size * p.interleave;
    return i / round * p.interleave + i % p.interleave;
}
__device__ __forceinline__ int page_local_len(const weft_page_layout &p, int64_t length)
{
    if (p.context_size == 1) return (int)length;
    int n = (int)length, round = p.context_size * p.interleave;
    int rest = n % round - p.context_rank * p.interleave;
    rest = rest < 0 ? 0 : rest > p.interleave ? p.interleave : rest;
    return n / round * p.interleave + rest;
}

/* The request of a token, or `requests` behind the last. */
__device__ __forceinline__ int request_of(const int32_t *query_start_loc, int64_t requests, int64_t token)
{
    int low = 0, high = (int)requests;
    if (requests == 0 || token >= query_start_loc[requests]) return (int)requests;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (query_start_loc[middle] <= token) low = middle;
        else high = middle;
    }
    return low;
}

/* The row of pages of token t, or -1 where this rank holds no place for it. */
__device__ __forceinline__ int64_t place_of(const weft_kv_write_args &a, int64_t t)
{
    const int r = request_of(a.query_start_loc, a.requests, t), position = a.positions[t];
    if (r >= a.requests || position < 0 || page_owner(a.pages, position) != a.pages.context_rank) return -1;
    const int local = page_local(a.pages, position), page = (int)a.pages.page_size, entry = local / page;
    if (entry >= a.pages.block_table_stride) return -1;
    const int64_t block = a.pages.block_table[r * a.pages.block_table_stride + entry];
    return block < 0 ? -1 : block * a.num_kv_heads * page + local % page;
}

} // namespace weft
