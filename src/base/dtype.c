/* base/dtype.c - element types and their conversions. */
#include "base/dtype.h"

#include <math.h>

static const struct {
    const char *name, *short_name;
    size_t size;
} dtypes[WEFT_DTYPE_COUNT] = {
    [WEFT_F32] = {"float32", "f32", 4},
    [WEFT_BF16] = {"bfloat16", "bf16", 2},
    [WEFT_F16] = {"float16", "f16", 2},
    [WEFT_I32] = {"int32", "i32", 4},
    [WEFT_F8E4M3] = {"float8_e4m3", "fp8", 1},
    [WEFT_U8] = {"uint8", "u8", 1},
};

size_t weft_dtype_size(weft_dtype dtype)
{
    return dtypes[dtype].size;
}

const char *weft_dtype_name(weft_dtype dtype)
{
    return dtypes[dtype].name;
}

const char *weft_dtype_short_name(weft_dtype dtype)
{
    return dtypes[dtype].short_name;
}

int weft_dtype_from_name(const char *name, weft_dtype *out)
{
    for (int i = 0; i < WEFT_DTYPE_COUNT; i++) {
        if (strcmp(name, dtypes[i].name) == 0 || strcmp(name, dtypes[i].short_name) == 0) {
            *out = (weft_dtype)i;
            return 1;
        }
    }
    return 0;
}

float weft_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
    if (exponent == 31) return weft_f32_from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent != 0) return weft_f32_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    float tiny = (float)mantissa * 0x1p-24f;
    return sign ? -tiny : tiny;
}

uint16_t weft_f16_from_f32(float f)
{
    uint32_t u = weft_f32_bits(f), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x47800000u) return (uint16_t)(sign | 0x7c00); /* 65536 and up, and infinity */
    if (magnitude < 0x38800000u) { /* below 2^-14: subnormal; the sum rounds to a multiple of 2^-24 */
        float shifted = weft_f32_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (weft_f32_bits(shifted) - 0x3f000000u));
    }
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

float weft_e4m3_to_f32(uint8_t b)
{
    uint32_t exponent = (b >> 3) & 15, mantissa = b & 7;
    if ((b & 0x7f) == 0x7f) return weft_f32_from_bits(0x7fc00000u);
    float value = exponent == 0 ? (float)mantissa * 0x1p-9f
                                : weft_f32_from_bits((exponent + 120) << 23 | mantissa << 20);
    return b & 0x80 ? -value : value;
}

uint8_t weft_e4m3_from_f32(float f)
{
    uint32_t u = weft_f32_bits(f), magnitude = u & 0x7fffffffu;
    uint8_t sign = (uint8_t)((u >> 24) & 0x80);
    if (magnitude > 0x7f800000u) return (uint8_t)(sign | 0x7f);
    float a = weft_f32_from_bits(magnitude);
    if (a >= 448.0f) return (uint8_t)(sign | 0x7e);
    if (a < 0x1p-6f) return (uint8_t)(sign | (uint8_t)lrintf(a * 0x1p9f));
    uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1);
    uint32_t code = (rounded - (120u << 23)) >> 20;
    return (uint8_t)(sign | (code > 0x7e ? 0x7e : code));
}

float weft_load_f32(const void *data, weft_dtype dtype, int64_t i)
{
    switch (dtype) {
    case WEFT_F32: return ((const float *)data)[i];
    case WEFT_BF16: return weft_bf16_to_f32(((const uint16_t *)data)[i]);
    case WEFT_F16: return weft_f16_to_f32(((const uint16_t *)data)[i]);
    case WEFT_I32: return (float)((const int32_t *)data)[i];
    case WEFT_F8E4M3: return weft_e4m3_to_f32(((const uint8_t *)data)[i]);
    case WEFT_U8: return (float)((const uint8_t *)data)[i];
    default: return 0.0f;
    }
}

void weft_store_f32(void *data, weft_dtype dtype, int64_t i, float value)
{
    switch (dtype) {
    case WEFT_F32: ((float *)data)[i] = value; break;
    case WEFT_BF16: ((uint16_t *)data)[i] = weft_bf16_from_f32(value); break;
    case WEFT_F16: ((uint16_t *)data)[i] = weft_f16_from_f32(value); break;
    case WEFT_I32: ((int32_t *)data)[i] = (int32_t)value; break;
    case WEFT_F8E4M3: ((uint8_t *)data)[i] = weft_e4m3_from_f32(value); break;
    case WEFT_U8: ((uint8_t *)data)[i] = (uint8_t)value; break;
    default: break;
    }
}

/* ---- runs ----
 * The loops choose with masks, so that the compiler can make vectors of them; the results are
 * those of the functions above. */

static inline uint32_t choose(int condition, uint32_t yes, uint32_t no)
{
    uint32_t mask = -(uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

static void f16_run_to_f32(float *dst, const uint16_t *src, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t sign = (uint32_t)(src[i] & 0x8000) << 16, magnitude = (uint32_t)(src[i] & 0x7fff) << 13;
        uint32_t scaled = weft_f32_bits(weft_f32_from_bits(magnitude) * 0x1p112f); /* exact, subnormals too */
        dst[i] = weft_f32_from_bits(sign | choose(magnitude >= 0x7c00u << 13, magnitude | 0x7f800000u, scaled));
    }
}

static void f32_run_to_f16(uint16_t *dst, const float *src, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t u = weft_f32_bits(src[i]), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffffu;
        uint32_t tiny = weft_f32_bits(weft_f32_from_bits(magnitude) + 0.5f) - 0x3f000000u;
        uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1) - 0x38000000u) >> 13;
        uint32_t half = choose(magnitude >= 0x47800000u, 0x7c00, choose(magnitude < 0x38800000u, tiny, normal));
        dst[i] = (uint16_t)(sign | choose(magnitude > 0x7f800000u, 0x7e00, half));
    }
}

static void e4m3_run_to_f32(float *dst, const uint8_t *src, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t sign = (uint32_t)(src[i] & 0x80) << 24, magnitude = (uint32_t)(src[i] & 0x7f) << 20;
        uint32_t scaled = weft_f32_bits(weft_f32_from_bits(magnitude) * 0x1p120f) | sign;
        dst[i] = weft_f32_from_bits(choose(magnitude == 0x7fu << 20, 0x7fc00000u, scaled));
    }
}

static void f32_run_to_bf16(uint16_t *dst, const float *src, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t u = weft_f32_bits(src[i]), rounded = u + 0x7fffu + ((u >> 16) & 1);
        dst[i] = (uint16_t)(choose((u & 0x7fffffffu) > 0x7f800000u, u | 0x400000, rounded) >> 16);
    }
}

static void run_to_f32(float *dst, const void *src, weft_dtype dtype, int64_t count)
{
    if (dtype == WEFT_F16) f16_run_to_f32(dst, src, count);
    else if (dtype == WEFT_F8E4M3) e4m3_run_to_f32(dst, src, count);
    else if (dtype == WEFT_BF16)
        for (int64_t i = 0; i < count; i++) dst[i] = weft_bf16_to_f32(((const uint16_t *)src)[i]);
    else
        for (int64_t i = 0; i < count; i++) dst[i] = weft_load_f32(src, dtype, i);
}

static void run_from_f32(void *dst, weft_dtype dtype, const float *src, int64_t count)
{
    if (dtype == WEFT_F16) f32_run_to_f16(dst, src, count);
    else if (dtype == WEFT_BF16) f32_run_to_bf16(dst, src, count);
    else
        for (int64_t i = 0; i < count; i++) weft_store_f32(dst, dtype, i, src[i]);
}

void weft_convert(void *dst, weft_dtype dst_dtype, const void *src, weft_dtype src_dtype, int64_t count)
{
    enum { CHUNK = 512 };
    float values[CHUNK];
    if (dst_dtype == src_dtype) {
        if (count > 0) memmove(dst, src, (size_t)count * weft_dtype_size(dst_dtype));
    } else if (dst_dtype == WEFT_F32) {
        run_to_f32(dst, src, src_dtype, count);
    } else if (src_dtype == WEFT_F32) {
        run_from_f32(dst, dst_dtype, src, count);
    } else {
        size_t from = weft_dtype_size(src_dtype), to = weft_dtype_size(dst_dtype);
        for (int64_t done = 0, n; done < count; done += n) {
            n = count - done < CHUNK ? count - done : CHUNK;
            run_to_f32(values, (const char *)src + (size_t)done * from, src_dtype, n);
            run_from_f32((char *)dst + (size_t)done * to, dst_dtype, values, n);
        }
    }
}
