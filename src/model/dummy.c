/* model/dummy.c - weights made from nothing. */
#include "model/dummy.h"

static uint64_t mix64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* The second half of the key enters in the middle, so that rows are not shifted copies. */
static inline __attribute__((always_inline)) uint32_t mix32(uint64_t key, uint32_t column)
{
    uint32_t x = column * 0x9e3779b9u + (uint32_t)key;
    x = (x ^ (x >> 16)) * 0x7feb352du ^ (uint32_t)(key >> 32);
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

static int ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && memcmp(text + n - m, end, m) == 0;
}

weft_dummy weft__dummy_of(const char *name)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (const char *c = name; *c != 0; c++) hash = (hash ^ (unsigned char)*c) * 0x100000001b3u;
    weft_dummy dummy = {mix64(hash), WEFT_DUMMY_WEIGHT};
    if (ends_with(name, "norm.weight")) dummy.kind = WEFT_DUMMY_NORM;
    if (ends_with(name, "weight_scale_inv")) dummy.kind = WEFT_DUMMY_SCALE;
    return dummy;
}

static uint64_t row_key(const weft_dummy *dummy, uint64_t row)
{
    return mix64(dummy->seed + row * 0x9e3779b97f4a7c15u);
}

/* Two copies of the loops: the second for processors with wide integer products. */
static inline __attribute__((always_inline)) void fill_f32(uint64_t key, uint32_t column, int64_t count, float scale, float base, float *out)
{
    for (int64_t i = 0; i < count; i++) {
        int32_t m = (int32_t)mix32(key, column + (uint32_t)i) >> 16;
        out[i] = base + (float)m * scale;
    }
}

static inline __attribute__((always_inline)) void fill_e4m3(uint64_t key, uint32_t column, int64_t count, uint8_t *out)
{
    for (int64_t i = 0; i < count; i++) {
        uint8_t b = (uint8_t)(mix32(key, column + (uint32_t)i) >> 24);
        out[i] = (uint8_t)(b - ((b & 0x7f) == 0x7f));
    }
}

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx2")))
WIDE static void fill_f32_avx2(uint64_t key, uint32_t column, int64_t count, float scale, float base, float *out)
{
    fill_f32(key, column, count, scale, base, out);
}
WIDE static void fill_e4m3_avx2(uint64_t key, uint32_t column, int64_t count, uint8_t *out)
{
    fill_e4m3(key, column, count, out);
}
static int wide(void)
{
    return __builtin_cpu_supports("avx2");
}
#else
#define fill_f32_avx2 fill_f32
#define fill_e4m3_avx2 fill_e4m3
static int wide(void)
{
    return 0;
}
#endif

void weft__dummy_f32(const weft_dummy *dummy, uint64_t row, uint64_t first, int64_t count, float *out)
{
    float scale = 0x1.1bc77ap-20f, base = 0.0f; /* 0.02 * sqrt(3) / 2^15 */
    if (dummy->kind == WEFT_DUMMY_NORM) scale = 0x1.48p-21f, base = 1.0f;
    if (dummy->kind == WEFT_DUMMY_SCALE) scale = 0x1.ap-30f, base = 0x1.ap-13f;
    uint64_t key = row_key(dummy, row);
    if (wide()) fill_f32_avx2(key, (uint32_t)first, count, scale, base, out);
    else fill_f32(key, (uint32_t)first, count, scale, base, out);
}

void weft__dummy_e4m3(const weft_dummy *dummy, uint64_t row, uint64_t first, int64_t count, uint8_t *out)
{
    uint64_t key = row_key(dummy, row);
    if (wide()) fill_e4m3_avx2(key, (uint32_t)first, count, out);
    else fill_e4m3(key, (uint32_t)first, count, out);
}
