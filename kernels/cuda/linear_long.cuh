/* kernels/cuda/linear_long.cuh - products of many tokens with 16-bit weights (linear_long.cu), and what may join them. */
#pragma once

#include "kernels/cuda/linear.cuh"

namespace weft {

enum { LONG_HEAD = 128 }; /* dimension of the heads that are turned in a product's end */

/* What is done with the results behind the product, which writes its own too; NULL: nothing. */
struct LongJoins {
    const weft_silu_mul_args *silu; /* of y: gates, then as many values */
    const weft_rope_args *rope;      /* of y's first heads, of 128 */
    const weft_kv_write_args *pages; /* with rope: of y's keys and values */
    const weft_rms_norm_args *norm; /* of y: its sum with the residual, which is all that is done; the rest of the norm is the caller's */
};

/* Many tokens, x, w and y of one 16-bit type in whole 16 bytes, without a bias, on a Hopper GPU. */
bool long_fits(const weft_linear_args *a);
/* Whether it is as fast as cuBLASLt for the product alone, and so faster with what joins it. */
bool long_pays(const weft_linear_args *a);
/* False where it cannot: nothing is launched then. */
bool long_product(const weft_linear_args *a, const LongJoins &joins, void *stream);

} // namespace weft
