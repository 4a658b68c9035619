/* kernels/cpu/philox.h - Philox4x32-10, the generator of Salmon et al., "Parallel random numbers: as
 * easy as 1, 2, 3" (SC 2011). */
#pragma once

#include <stdint.h>

/* The block of (index, position, 0, 0) under a 64-bit key. */
static inline void weft__philox(uint64_t seed, uint32_t index, uint32_t position, uint32_t out[4])
{
    uint32_t c0 = index, c1 = position, c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}
