/* base/dtype.h - element types and their conversions. Arithmetic is always in float32. */
#pragma once

#include <stdint.h>
#include <stddef.h>
#include <string.h>

typedef enum weft_dtype {
    WEFT_F32 = 0,
    WEFT_BF16,
    WEFT_F16,
    WEFT_I32,
    WEFT_F8E4M3, /* storage only */
    WEFT_U8,     /* storage only */
    WEFT_DTYPE_COUNT
} weft_dtype;

size_t weft_dtype_size(weft_dtype dtype);
/* "float32", "bfloat16", "float16", "int32", "float8_e4m3", "uint8" */
const char *weft_dtype_name(weft_dtype dtype);
/* "bf16": as the prompt shows it. */
const char *weft_dtype_short_name(weft_dtype dtype);
/* Accepts the names above and the short forms f32, bf16, f16, i32, fp8. Returns 0 when unknown. */
int weft_dtype_from_name(const char *name, weft_dtype *out);

static inline float weft_f32_from_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline uint32_t weft_f32_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}
static inline float weft_bf16_to_f32(uint16_t b)
{
    return weft_f32_from_bits((uint32_t)b << 16);
}
/* Round to nearest even; NaN stays NaN. */
static inline uint16_t weft_bf16_from_f32(float f)
{
    uint32_t u = weft_f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
float weft_f16_to_f32(uint16_t h);
uint16_t weft_f16_from_f32(float f);
float weft_e4m3_to_f32(uint8_t b);
/* Round to nearest even, saturating at +-448; NaN is 0x7f. */
uint8_t weft_e4m3_from_f32(float f);

/* One element, any float dtype or int32. For slow paths. */
float weft_load_f32(const void *data, weft_dtype dtype, int64_t index);
void weft_store_f32(void *data, weft_dtype dtype, int64_t index, float value);
/* A run of elements between any two dtypes. */
void weft_convert(void *dst, weft_dtype dst_dtype, const void *src, weft_dtype src_dtype, int64_t count);
