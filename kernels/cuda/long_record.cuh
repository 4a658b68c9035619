/* kernels/cuda/long_record.cuh - a product of many tokens that waits for the operations that may join it. */
#pragma once

#include "kernels/cuda/linear_long.cuh"
#include "kernels/weft_fused.h"

namespace weft {

/* The recorder (weft_fused.h) of steps that are launched operation by operation: at most one product is held back. What joins
 * it runs in its end, with the results that both would have had. */
struct LongPending {
    bool all; /* also where launches one by one are faster: for checks */
    bool held, turned;
    weft_linear_args linear;
    weft_rope_args rope; /* turned: joins */

    /* Whether the operation was taken: it has been launched, or will be by flush or behind the next take. */
    bool take(weft_fused_op op, const void *args, void *stream, weft_status *status);
    weft_status flush(void *stream);

private:
    bool take(const weft_linear_args *a, void *stream, weft_status *status);
    bool take(const weft_silu_mul_args *a, void *stream, weft_status *status);
    bool take(const weft_rms_norm_args *a, void *stream, weft_status *status);
    bool take(const weft_rope_args *a);
    bool take(const weft_kv_write_args *a, void *stream, weft_status *status);
};

} // namespace weft
