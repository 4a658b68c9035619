/* kernels/cuda/blas.cuh - products through cuBLASLt, with a plan kept for each shape. */
#pragma once

#include "kernels/cuda/cuda.cuh"

namespace weft {

/* Opens the library (cublaslt.cu), once in a process. UNSUPPORTED says where it was looked for. */
weft_status blas_load(void);
weft_status blas_create(struct weft_blas **out);
void blas_destroy(struct weft_blas *blas);

/* y = x w^T (+ bias) (+ y) for args whose x and w have one float dtype. *done stays false where the
 * library cannot (a dtype or an alignment that it has no kernel for): the caller uses its own.
 * The first `reserved` bytes of the workspace are not touched. */
weft_status blas_linear(const weft_linear_args *args, size_t reserved, void *stream, bool *done);

} // namespace weft
