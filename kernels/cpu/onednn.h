/* kernels/cpu/onednn.h - large bfloat16 products by oneDNN, one thread in each worker of our pool. */
#pragma once

#include <stdint.h>

/* 1 when this build has oneDNN and the processor multiplies bfloat16 natively. Asks oneDNN, so it
 * costs some microseconds. */
int weft__onednn_has_bf16(void);
/* c[t * c_stride + i] = sum_j x[t][j] w[i][j] in float32, on the calling thread. x (tokens, k) and w
 * (n, k) are bfloat16 with adjacent columns. Returns 0, with c undefined, where oneDNN refuses. */
int weft__onednn_product(const void *x, int64_t x_stride, int64_t tokens, const void *w, int64_t w_stride, int64_t n, int64_t k,
                         float *c, int64_t c_stride);
