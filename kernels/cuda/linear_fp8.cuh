/* kernels/cuda/linear_fp8.cuh - products of e4m3 weights and up to 8 tokens (linear_fp8.cu), and what may join them. */
#pragma once

#include "kernels/cuda/linear.cuh"

namespace weft {

/* What is done in front of the product and with its sums; NULL: nothing. The arguments must agree with the product's, as the
 * recorder of fused steps sees to (step_record.cu). Every result is written where its operation would have put it. */
struct Fp8Joins {
    const weft_rms_norm_args *norm; /* its y is the product's x; without a residual */
    void *residual; /* y is added to it: (tokens, n) of y's dtype */
    int64_t residual_stride;
    const weft_silu_mul_args *silu; /* of y, gates and then as many values */
    const weft_rope_args *rope;     /* of y's first heads */
    const weft_kv_write_args *pages; /* with rope: of y's keys and values */
};

/* bfloat16 x on a Hopper GPU; norm: with one in front. */
bool fp8_fits(const weft_linear_args *a, bool norm);
/* False where it cannot: nothing is launched then. */
bool fp8_product(const weft_linear_args *a, const Fp8Joins &joins, void *stream);

} // namespace weft
