/* model/dummy.h - weights made from nothing (DESIGN 10), the same for every cut and device.
 *
 * Element (row, column) of a tensor, where column counts its last dimension and row all others
 * together, has 32 random bits h = mix32(key, column) with key = mix64(seed + row * G), seed = mix64 of the
 * FNV-1a hash of the name (dummy.c has the constants). Then m = the upper 16 bits of h as a signed
 * number, and the value is
 *   m * float32(0.02 * sqrt(3) / 2^15)   weights: uniform, standard deviation 0.02
 *   1 + m * 41 / 2^26                    names that end in "norm.weight": 1 +- 0.02
 *   (1 + m / 2^17) * 13 / 2^16           names that end in "weight_scale_inv": positive, see below
 * rounded to the source's dtype. float8_e4m3 takes the upper 8 bits of h as they are (NaN becomes
 * +-448), whose root mean square is near 101: times the scale again near 0.02. A single rounding
 * happens in each formula, so fused arithmetic gives the same bits. */
#pragma once

#include <stdint.h>

#include "base/dtype.h"

typedef struct weft_dummy {
    uint64_t seed;
    enum { WEFT_DUMMY_WEIGHT, WEFT_DUMMY_NORM, WEFT_DUMMY_SCALE } kind;
} weft_dummy;

weft_dummy weft__dummy_of(const char *name);
/* Columns [first, first + count) of a row, in float32 before any rounding to the source's dtype. */
void weft__dummy_f32(const weft_dummy *dummy, uint64_t row, uint64_t first, int64_t count, float *out);
void weft__dummy_e4m3(const weft_dummy *dummy, uint64_t row, uint64_t first, int64_t count, uint8_t *out);
