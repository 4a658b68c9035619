/* kernels/cuda/mma.cuh - the tensor cores' 16 x 8 x 16 product of one warp, and what feeds it.
 *
 * Lane = 4 g + q. A: a[0] row g, a[1] row g + 8, columns 2q, 2q + 1; a[2], a[3] the same, columns + 8.
 * B: b0 rows 2q, 2q + 1 of column g; b1 rows + 8. C: c[0], c[1] row g, columns 2q, 2q + 1; c[2],
 * c[3] row g + 8. The order of the 16 inner elements is free as long as A and B agree, so a lane
 * may load 16 bytes in a row from each and use them as two products' worth. */
#pragma once

#include "kernels/cuda/cuda.cuh"

namespace weft {

template <class T> __device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<bf16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<__half>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <class T> __device__ __forceinline__ uint32_t pair(float low, float high);
template <> __device__ __forceinline__ uint32_t pair<bf16>(float low, float high)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&v;
}
template <> __device__ __forceinline__ uint32_t pair<__half>(float low, float high)
{
    __half2 v = __floats2half2_rn(low, high);
    return *(uint32_t *)&v;
}

template <class T> __device__ __forceinline__ float2 widen_pair(uint32_t two);
template <> __device__ __forceinline__ float2 widen_pair<bf16>(uint32_t two)
{
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 widen_pair<__half>(uint32_t two) { return __half22float2(*(const __half2 *)&two); }

/* Four e4m3 values as two pairs of T, exactly: the bits are moved into T's fields and the exponent
 * is put right by one product. The NaN pattern, which no quantiser writes, counts as 480. */
__device__ __forceinline__ void widen_e4m3_pairs(uint32_t four, uint32_t &low, uint32_t &high, bf16)
{
    const uint32_t t0 = __byte_perm(four, 0, 0x1404), t1 = __byte_perm(four, 0, 0x3424), factor = 0x7b807b80u; /* 2^120 */
    const uint32_t u0 = (t0 & 0x80008000u) | ((t0 & 0x7f007f00u) >> 4), u1 = (t1 & 0x80008000u) | ((t1 & 0x7f007f00u) >> 4);
    __nv_bfloat162 v0 = __hmul2(*(const __nv_bfloat162 *)&u0, *(const __nv_bfloat162 *)&factor);
    __nv_bfloat162 v1 = __hmul2(*(const __nv_bfloat162 *)&u1, *(const __nv_bfloat162 *)&factor);
    low = *(uint32_t *)&v0;
    high = *(uint32_t *)&v1;
}
__device__ __forceinline__ void widen_e4m3_pairs(uint32_t four, uint32_t &low, uint32_t &high, __half)
{
    const uint32_t t0 = __byte_perm(four, 0, 0x1404), t1 = __byte_perm(four, 0, 0x3424), factor = 0x5c005c00u; /* 2^8 */
    const uint32_t u0 = (t0 & 0x80008000u) | ((t0 & 0x7f007f00u) >> 1), u1 = (t1 & 0x80008000u) | ((t1 & 0x7f007f00u) >> 1);
    __half2 v0 = __hmul2(*(const __half2 *)&u0, *(const __half2 *)&factor);
    __half2 v1 = __hmul2(*(const __half2 *)&u1, *(const __half2 *)&factor);
    low = *(uint32_t *)&v0;
    high = *(uint32_t *)&v1;
}

/* Four e4m3 values as two pairs of halves, exactly (NaN stays NaN). */
__device__ __forceinline__ void e4m3_to_half(uint32_t four, uint32_t &low, uint32_t &high)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }" : "=r"(low), "=r"(high) : "r"(four));
#else
    widen_e4m3_pairs(four, low, high, __half());
#endif
}

/* The 8 x 8 matrix of 16-bit elements that a warp holds, transposed. */
__device__ __forceinline__ uint32_t turned(uint32_t x)
{
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(x) : "r"(x));
    return x;
}

/* 16 bytes that are read once, past the L1 and first to leave the L2, or zeros. Only for what no kernel of the stream writes. */
__device__ __forceinline__ uint4 stream_in(const void *p, bool in)
{
    uint4 v;
    const uint64_t policy = streamed();
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
                 "@p ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4], %6; }"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(p), "r"((int)in), "l"(policy));
    return v;
}

} // namespace weft
