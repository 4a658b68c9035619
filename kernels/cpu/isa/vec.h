/* kernels/cpu/isa/vec.h - vectors of one instruction set, by GCC's vector extensions.
 *
 * Every file of this folder is compiled once per instruction set: WEFT_ISA names it, LANES is its
 * number of float32 lanes. Loads and stores go through memcpy: any alignment is legal. */
#pragma once

#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

#if defined(WEFT_ISA_avx512) || defined(WEFT_ISA_avx2)
#include <immintrin.h>
#endif

#if defined(WEFT_ISA_avx512)
enum { LANES = 16 };
#elif defined(WEFT_ISA_avx2)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

#define ISA_JOIN_(a, b) a##_##b
#define ISA_JOIN(a, b) ISA_JOIN_(a, b)
/* The name of a function in this instruction set: weft__widen_avx2 */
#define ISA(name) ISA_JOIN(weft__##name, WEFT_ISA)
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef int16_t vhs __attribute__((vector_size(LANES * 2)));
typedef int8_t vb __attribute__((vector_size(LANES)));

INLINE vf vf_load(const void *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void vf_store(void *p, vf v)
{
    memcpy(p, &v, sizeof v);
}
INLINE vf vf_all(float x)
{
    return x - (vf){0};
}
/* mask lanes are 0 or -1 */
INLINE vf vf_select(vi mask, vf yes, vf no)
{
    return (vf)(((vi)yes & mask) | ((vi)no & ~mask));
}
/* a > b ? a : b, so a NaN in b stays */
INLINE vf vf_max(vf a, vf b)
{
#if defined(WEFT_ISA_avx512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(WEFT_ISA_avx2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vf_select(a > b, a, b);
#endif
}
/* The sums of four vectors, each in one order: neighbours, then neighbours of these, then across. */
INLINE void vf_sum4(vf a, vf b, vf c, vf d, float out[4])
{
#if defined(WEFT_ISA_avx512)
    __m512 v[4] = {(__m512)a, (__m512)b, (__m512)c, (__m512)d};
    __m256 half[4];
    for (int i = 0; i < 4; i++) half[i] = _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
#elif defined(WEFT_ISA_avx2)
    __m256 half[4] = {(__m256)a, (__m256)b, (__m256)c, (__m256)d};
#endif
#if defined(WEFT_ISA_avx512) || defined(WEFT_ISA_avx2)
    __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
#else
    const vf all[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) out[i] = (all[i][0] + all[i][1]) + (all[i][2] + all[i][3]);
#endif
}
INLINE float vf_sum(vf v)
{
    float sums[4];
    vf_sum4(v, v, v, v, sums);
    return sums[0];
}

/* Widening and narrowing by name where GCC 12 takes its vector conversions apart. */
INLINE vu vu_from_u16(vh h)
{
#if defined(WEFT_ISA_avx512)
    return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(WEFT_ISA_avx2)
    return (vu)_mm256_cvtepu16_epi32((__m128i)h);
#else
    return __builtin_convertvector(h, vu);
#endif
}
/* Every lane is below 2^16. */
INLINE vh vh_from_u32(vu u)
{
#if defined(WEFT_ISA_avx512)
    return (vh)_mm512_cvtepi32_epi16((__m512i)u);
#elif defined(WEFT_ISA_avx2)
    __m256i halves = _mm256_packus_epi32((__m256i)u, (__m256i)u);
    return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08));
#else
    return __builtin_convertvector(u, vh);
#endif
}
INLINE vhs vhs_from_i8(vb b)
{
#if defined(WEFT_ISA_avx512)
    return (vhs)_mm256_cvtepi8_epi16((__m128i)b);
#elif defined(WEFT_ISA_avx2)
    return (vhs)_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)&b));
#else
    return __builtin_convertvector(b, vhs);
#endif
}

INLINE vf vf_from_bf16(vh h)
{
    return (vf)(vu_from_u16(h) << 16);
}
INLINE vf vf_from_f16(vh h)
{
#if defined(WEFT_ISA_avx512)
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(WEFT_ISA_avx2)
    return (vf)_mm256_cvtph_ps((__m128i)h);
#else
    /* exponent and mantissa as a float 2^112 too small; infinity and NaN get their exponent */
    vu u = vu_from_u16(h), magnitude = (u & 0x7fff) << 13;
    vf value = (vf)magnitude * 0x1p112f;
    vi special = magnitude >= (0x7c00u << 13);
    value = vf_select(special, (vf)(magnitude | 0x7f800000u), value);
    return (vf)((vu)value | (u & 0x8000) << 16);
#endif
}
/* Without NaN: 0x7f and 0xff come out as +-480. The value is 2^-8 of the right one. */
INLINE vf vf_from_e4m3_small(vb b)
{
    vhs wide = vhs_from_i8(b);
    return vf_from_f16((vh)(wide << 7) & (uint16_t)0xbf80);
}

INLINE int64_t element_size(weft_dtype dtype)
{
    return dtype == WEFT_F32 ? 4 : dtype == WEFT_F8E4M3 ? 1 : 2;
}
/* LANES elements of a dtype that is known where this is inlined. fp8: see above. */
INLINE vf vf_load_as(const void *p, weft_dtype dtype)
{
    if (dtype == WEFT_F32) return vf_load(p);
    if (dtype == WEFT_F8E4M3) {
        vb b;
        memcpy(&b, p, sizeof b);
        return vf_from_e4m3_small(b);
    }
    vh h;
    memcpy(&h, p, sizeof h);
    return dtype == WEFT_BF16 ? vf_from_bf16(h) : vf_from_f16(h);
}
/* The first `count` < LANES elements, the rest zero. */
INLINE vf vf_load_part(const void *p, weft_dtype dtype, int64_t count)
{
    char part[LANES * 4] = {0};
    memcpy(part, p, (size_t)(count * element_size(dtype)));
    return vf_load_as(part, dtype);
}

/* e^x to about 1 ulp; 0 below -104, infinity above 88.73, NaN for NaN. */
INLINE vf vf_exp(vf x)
{
    vi low = x < -104.0f, high = x > 89.0f;
    x = vf_select(low, vf_all(-104.0f), vf_select(high, vf_all(89.0f), x));
    vf shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the fraction drops out */
    vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693145752f; /* ln 2 in two parts; the first has trailing zeros */
    r = r - n * 1.42860677e-6f;
    vf p = r * 1.98756912e-4f + 1.39819994e-3f;
    p = p * r + 8.33345205e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666657e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    /* 2^n in two factors, so that results below 2^-126 and above 2^127 come out right */
    vi power = (vi)shifted - 0x4b400000;
    vi half = power >> 1;
    vf first = (vf)((half + 127) << 23), second = (vf)((power - half + 127) << 23);
    return p * first * second;
}
