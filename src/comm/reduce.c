/* comm/reduce.c - sums over members, the same on every member: list order, float32, one rounding. */
#include <string.h>

#include "comm/internal.h"

enum { BLOCK = 512 };

static void load(float *to, const void *from, weft_dtype dtype, int64_t offset, int count)
{
    if (dtype == WEFT_F32) {
        memcpy(to, (const float *)from + offset, (size_t)count * sizeof *to);
    } else if (dtype == WEFT_BF16) {
        const uint16_t *bits = (const uint16_t *)from + offset;
        for (int i = 0; i < count; i++) to[i] = weft_bf16_to_f32(bits[i]);
    } else {
        weft_convert(to, WEFT_F32, (const char *)from + offset * (int64_t)weft_dtype_size(dtype), dtype, count);
    }
}

static void store(void *to, weft_dtype dtype, int64_t offset, const float *from, int count)
{
    if (dtype == WEFT_F32) {
        memcpy((float *)to + offset, from, (size_t)count * sizeof *from);
    } else if (dtype == WEFT_BF16) {
        uint16_t *bits = (uint16_t *)to + offset;
        for (int i = 0; i < count; i++) bits[i] = weft_bf16_from_f32(from[i]);
    } else {
        weft_convert((char *)to + offset * (int64_t)weft_dtype_size(dtype), dtype, from, WEFT_F32, count);
    }
}

static void accumulate(float *sum, const float *x, int count, weft_reduce op)
{
    if (op == WEFT_REDUCE_SUM) {
        for (int i = 0; i < count; i++) sum[i] += x[i];
    } else {
        /* A NaN of any member stays. */
        for (int i = 0; i < count; i++) sum[i] = x[i] > sum[i] || x[i] != x[i] ? x[i] : sum[i];
    }
}

static void reduce_floats(const void *const *sources, int n, int64_t offset, int count, weft_dtype dtype, weft_reduce op, void *dst,
                          int64_t at)
{
    float sum[BLOCK], x[BLOCK];
    load(sum, sources[0], dtype, offset, count);
    for (int m = 1; m < n; m++) {
        const float *next = x;
        if (dtype == WEFT_F32) next = (const float *)sources[m] + offset;
        else load(x, sources[m], dtype, offset, count);
        accumulate(sum, next, count, op);
    }
    store(dst, dtype, at, sum, count);
}

static void reduce_ints(const void *const *sources, int n, int64_t offset, int count, weft_reduce op, int32_t *dst)
{
    int32_t sum[BLOCK];
    memcpy(sum, (const int32_t *)sources[0] + offset, (size_t)count * sizeof *sum);
    for (int m = 1; m < n; m++) {
        const int32_t *x = (const int32_t *)sources[m] + offset;
        if (op == WEFT_REDUCE_SUM)
            for (int i = 0; i < count; i++) sum[i] = (int32_t)((uint32_t)sum[i] + (uint32_t)x[i]);
        else
            for (int i = 0; i < count; i++) sum[i] = x[i] > sum[i] ? x[i] : sum[i];
    }
    memcpy(dst, sum, (size_t)count * sizeof *sum);
}

void weft__reduce(const void *const *sources, int n, int64_t offset, int64_t count, weft_dtype dtype, weft_reduce op, void *dst)
{
    for (int64_t done = 0; done < count; done += BLOCK) {
        int block = count - done < BLOCK ? (int)(count - done) : BLOCK;
        if (dtype == WEFT_I32) reduce_ints(sources, n, offset + done, block, op, (int32_t *)dst + done);
        else reduce_floats(sources, n, offset + done, block, dtype, op, dst, done);
    }
}
