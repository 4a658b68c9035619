/* kernels/cuda/linear_batch.cuh - products of a batch of decoding requests (linear_batch.cu), and what may join them. */
#pragma once

#include "kernels/cuda/linear.cuh"

namespace weft {

enum {
    BATCH_TOKENS = 32,
    BATCH_K = 64,    /* columns of w in a chunk, of which up to two come in one copy */
    BATCH_SPLITS = 2 /* clusters of 1 and 2 blocks */
};

/* 2 to BATCH_TOKENS tokens, x and w of one 16-bit type in whole 16 bytes, k in whole chunks, on a Hopper GPU. */
bool batch_fits(const weft_linear_args *a);
/* What is done with x before and with the sums before they are written; NULL: nothing. The arguments must agree with the
 * product's, as the recorder of fused steps sees to (step_record.cu). */
struct BatchJoins {
    const weft_silu_mul_args *silu;  /* of y, gates and then as many values */
    const weft_rope_args *rope;      /* of y's first heads */
    const weft_kv_write_args *pages; /* with rope: of y's keys and values */
    const weft_rms_norm_args *norm;  /* of y, with a residual; batch_norm_fits, and the next product has it in front */
    const weft_rms_norm_args *front; /* of x, as `before` has left it, whose norm this was */
    const weft_linear_args *before;
};

/* Whether it is faster than the other ways; recorded: in a step whose operations are recorded, where others join it. */
bool batch_pays(const weft_linear_args *a, bool recorded);
/* Whether a norm between two products that fit can be shared by them: the first adds the residual and applies the gain,
 * the second multiplies its sums by the rows' factors and writes the norm's result. */
bool batch_norm_fits(const weft_linear_args *first, const weft_rms_norm_args *norm, const weft_linear_args *second);
/* Whether rotation, and pages that may be NULL, can join it, and pay. */
bool batch_rotates(const weft_linear_args *a, const weft_rope_args *rope, const weft_kv_write_args *pages);
/* False where it cannot: nothing is launched then. */
bool batch_product(const weft_linear_args *a, const BatchJoins &joins, void *stream);

/* How many clusters of each size are on the GPU at once. */
void batch_clusters(int (&clusters)[BATCH_SPLITS]);

/* Whether a product's q, k and v stand side by side: keys that are rotated are the last of a's heads, values follow them, in
 * rows of packs of the pages' type. */
bool side_by_side(const weft_rope_args *a, const weft_kv_write_args *p);
/* weft_rope_cuda and weft_kv_write_cuda in one kernel. False where they are not side_by_side: nothing is launched then. */
bool rope_into_pages(const weft_rope_args *a, const weft_kv_write_args *p, void *stream);

/* weft_rms_norm_cuda in front of a batch_product, which then begins to fetch while this runs. */
weft_status norm_before_batch(const weft_rms_norm_args *a, void *stream);

} // namespace weft
