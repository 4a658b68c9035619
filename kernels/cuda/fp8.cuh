/* kernels/cuda/fp8.cuh - e4m3 weights that the tensor cores read as they lie in shared memory.
 *
 * A piece is 512 columns of 16 rows of w: 8 rows, then another 8, each as four segments of 128 columns, as the
 * copy engine leaves them (hopper.cuh). To the tensor cores it is a tile of 64 rows of 128 bytes, segments below
 * one another. Their columns are the token's same four segments, each twice: a 16-bit activation is the sum of
 * two e4m3 values, the second one 16 times finer. Of the 64 x 8 sums those of one segment with itself are used,
 * which leaves the work to be done by reading the piece once; the rest of the tensor cores' time is nobody's.
 *
 * Sums keep 14 bits while the 128 columns of a segment are added up, then go on in float32. */
#pragma once

#include <cuda.h>

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/mma.cuh"

namespace weft {

enum {
    FP8_SEGMENTS = 4,
    FP8_PIECE = FP8_SEGMENTS * 128,    /* columns */
    FP8_PIECE_BYTES = 16 * FP8_PIECE,  /* of w */
    FP8_SCALES = 16 * FP8_SEGMENTS,    /* of a piece; that of a row and segment is at 4 row + segment */
    FP8_INPUT_BYTES = 2 * FP8_PIECE    /* of a token: its 8 columns of 128 bytes, permuted as pieces are */
};

/* Pieces of a row. */
__host__ __device__ __forceinline__ int fp8_pieces(int64_t k) { return (int)((k + FP8_PIECE - 1) / FP8_PIECE); }

#ifdef WEFT_HOPPER

/* Two values of 16 bits each: as e4m3, and 16 times what is left of each. Their magnitude is at most 448. */
__device__ __forceinline__ void fp8_two(uint32_t both, uint32_t &near, uint32_t &finer)
{
    uint16_t part, rest;
    uint32_t back;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(part) : "r"(both));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(back) : "h"(part));
    const __half2 left = __hmul2(__hsub2(*(const __half2 *)&both, *(const __half2 *)&back), __float2half2_rn(16.0f));
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(rest) : "r"(*(const uint32_t *)&left));
    near = part, finer = rest;
}
__device__ __forceinline__ uint2 fp8_eight(const uint32_t (&twos)[4]) { return make_uint2(__byte_perm(twos[0], twos[1], 0x5410), __byte_perm(twos[2], twos[3], 0x5410)); }

/* Eight values of one lane that are at most 448. */
__device__ __forceinline__ void fp8_parts(const float (&v)[8], uint2 &part, uint2 &finer)
{
    uint32_t near[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __half2 both = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
        fp8_two(*(const uint32_t *)&both, near[i], rest[i]);
    }
    part = fp8_eight(near), finer = fp8_eight(rest);
}

/* The factor of a segment whose largest value, of the exponent that float32 has, is below 2^(exponent + 8). */
__device__ __forceinline__ float fp8_power(int exponent) { return exponent >= -120 ? __uint_as_float((uint32_t)(exponent + 127) << 23) : 0.0f; }

/* A segment of values, eight of each of 16 neighbouring lanes, as two parts; and the factor of their sum, part +
 * finer / 16. What is not finite makes the factor a NaN. bfloat16 values down to 2^-13 of the largest are exact, 8
 * bits of others. quantize: the first part is what weft_quantize_groups makes of them, and all there is. */
__device__ __forceinline__ float fp8_split(float (&v)[8], bool quantize, uint2 &part, uint2 &finer)
{
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
#pragma unroll
    for (int d = 8; d > 0; d /= 2) most = max(most, __shfl_xor_sync(~0u, most, d));
    const int exponent = (int)(most >> 23) - 127 - 7; /* the largest: below 2^8 */
    const bool finite = most < 0x7f800000u, some = exponent >= -120;
    float factor = fp8_power(exponent);
    if (quantize && finite && some) {
        factor = __uint_as_float(most) / 448.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint16_t two;
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(v[2 * i + 1] / factor), "f"(v[2 * i] / factor));
            (&part.x)[i / 2] = i % 2 ? (&part.x)[i / 2] | (uint32_t)two << 16 : two;
        }
        finer = make_uint2(0, 0);
    } else {
        const float inverse = finite && some ? __uint_as_float((uint32_t)(127 - exponent) << 23) : 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= inverse;
        fp8_parts(v, part, finer);
        if (quantize) finer = make_uint2(0, 0);
    }
    return finite ? factor : __uint_as_float(0x7fc00000u);
}

/* The same of eight bfloat16 values of each lane, two by two. */
__device__ __forceinline__ float fp8_split(const uint4 &eight, uint2 &part, uint2 &finer)
{
    const uint32_t *two = &eight.x;
    uint32_t most = 0, near[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; i++) most = __vmaxu2(most, two[i] & 0x7fff7fffu);
#pragma unroll
    for (int d = 8; d > 0; d /= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, d));
    most = max(most >> 16, most & 0xffffu);
    const int exponent = (int)(most >> 7) - 127 - 7;
    const bool finite = most < 0x7f80u;
    const uint32_t power = finite && exponent >= -120 ? (uint32_t)(127 - exponent) << 7 : 0, inverse = power | power << 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __nv_bfloat162 scaled = __hmul2(*(const __nv_bfloat162 *)&two[i], *(const __nv_bfloat162 *)&inverse);
        const float2 wide = widen_pair<bf16>(*(const uint32_t *)&scaled);
        const __half2 both = __floats2half2_rn(wide.x, wide.y);
        fp8_two(*(const uint32_t *)&both, near[i], rest[i]);
    }
    part = fp8_eight(near), finer = fp8_eight(rest);
    return finite ? fp8_power(exponent) : __uint_as_float(0x7fc00000u);
}
__device__ __forceinline__ void fp8_widen(const uint4 &eight, float (&v)[8])
{
#pragma unroll
    for (int i = 0; i < 4; i++) v[2 * i] = __uint_as_float((&eight.x)[i] << 16), v[2 * i + 1] = __uint_as_float((&eight.x)[i] & 0xffff0000u);
}

/* Puts a lane's eight columns where they belong: rows 2 segment and 2 segment + 1 of a tile of 128 bytes a row. */
__device__ __forceinline__ void fp8_put(char *tile, int segment, const uint2 &part, const uint2 &finer)
{
    const int lane = threadIdx.x % 16, row = 2 * segment;
    char *to = tile + row * 128 + lane % 2 * 8;
    *(uint2 *)(to + ((lane / 2 ^ row % 8) << 4)) = part;
    *(uint2 *)(to + 128 + ((lane / 2 ^ (row % 8 + 1)) << 4)) = finer;
}

/* A descriptor (tile_descriptor) by its halves: what moves is in the lower one. */
__device__ __forceinline__ uint64_t fp8_descriptor(uint32_t low, uint32_t high) { return (uint64_t)high << 32 | low; }
__device__ __forceinline__ uint32_t fp8_low(uint32_t address) { return address >> 4; }
__device__ __forceinline__ uint32_t fp8_high(uint32_t eight) { return eight >> 4 | 1u << 30; }

/* d = a piece times COLUMNS columns, by a warpgroup, once it has been waited for. w, x: lower halves of descriptors; x_high: the upper one. */
template <int COLUMNS> __device__ __forceinline__ void fp8_begin(float (&d)[COLUMNS / 2], uint32_t w, uint32_t x, uint32_t x_high)
{
    products_begin();
#pragma unroll
    for (int i = 0; i < 4; i++) product_e4m3<COLUMNS>(d, fp8_descriptor(w + 2 * i, fp8_high(1024)), fp8_descriptor(x + 2 * i, x_high), i > 0);
    products_commit();
}
template <int COLUMNS> __device__ __forceinline__ void fp8_multiply(float (&d)[COLUMNS / 2], uint32_t w, uint32_t x, uint32_t x_high)
{
    fp8_begin<COLUMNS>(d, w, x, x_high);
    products_wait<0>();
    hold(d);
}

/* Where in a piece the sums of a lane are from: of four lanes two have some. The others go through the same motions. */
struct Fp8Lane {
    int segment, row; /* row: 0 to 15 */
    bool used, odd;
    __device__ __forceinline__ Fp8Lane(int thread)
    {
        const int warp = thread / 32 % 4, lane = thread % 32;
        segment = lane % 4, row = warp / 2 * 8 + lane / 4;
        used = segment / 2 == warp % 2, odd = segment % 2;
    }
    /* d: four of a token. */
    __device__ __forceinline__ float sum(const float *d) const { return fmaf(odd ? d[3] : d[1], 0.0625f, odd ? d[2] : d[0]); }
};

/* The TOKENS factors of a segment, one behind the other. */
template <int TOKENS> __device__ __forceinline__ void fp8_factors(float (&f)[TOKENS], uint32_t address)
{
    if constexpr (TOKENS == 1) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(f[0]) : "r"(address));
    else if constexpr (TOKENS == 2) asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(f[0]), "=f"(f[1]) : "r"(address));
    else
#pragma unroll
        for (int i = 0; i < TOKENS; i += 4)
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(f[i]), "=f"(f[i + 1]), "=f"(f[i + 2]), "=f"(f[i + 3]) : "r"(address + 4 * i));
}

/* Adds what a piece that is there gives. scale, factors: where the lane's scale and the factors of its segment are.
 * release(): it has been read by this lane. */
template <int TOKENS, class F>
__device__ __forceinline__ void fp8_piece(float (&sum)[TOKENS], const Fp8Lane &own, uint32_t w, uint32_t x, uint32_t x_high, uint32_t scale_at, uint32_t factors, F release)
{
    float d[4 * TOKENS], f[TOKENS], by[1];
    fp8_factors(by, scale_at);
    fp8_factors(f, factors);
    fp8_multiply<8 * TOKENS>(d, w, x, x_high);
    release();
#pragma unroll
    for (int t = 0; t < TOKENS; t++) sum[t] = fmaf(by[0] * f[t], own.sum(d + 4 * t), sum[t]);
}

/* The number of the warpgroup: the same in all lanes, as the compiler sees it too. */
__device__ __forceinline__ int fp8_group() { return __shfl_sync(~0u, (int)threadIdx.x / 128, 0); }

#endif

} // namespace weft
