/* kernels/cuda/step_list.cuh - the recorder's list of instructions, on the host. */
#pragma once

#include "kernels/cuda/step.cuh"
extern "C" {
#include "kernels/weft_fused.h"
}

namespace weft {

/* Shared memory of a product besides the rings, in bytes. */
struct StepNeeds {
    int x, held, cos_sin, sums;
};

/* Memory that instructions read and write. */
struct StepTraffic {
    struct Ranges {
        enum { MOST = 48 };
        struct {
            const void *p;
            int64_t bytes;
        } at[MOST];
        int count;
        void add(const void *p, int64_t bytes, bool *full);
    } reads, writes;
    bool full; /* more than is kept: counts as meeting everything */
    void clear();
    bool before(const StepTraffic &next) const; /* whether `next` must wait for this */
    void join(const StepTraffic &other);
};

/* Operations taken since the last flush. take: false when the operation does not fit. */
struct StepList {
    weft_cuda_context *context;
    int blocks;
    int most_tokens; /* of a product */
    bool batch;      /* products of more tokens too, if batch_product is faster: such a list is launched one by one, as fp8 weights are */
    StepInstruction *list;
    int count, capacity;
    weft_peer peers[STEP_GROUPS]; /* whose sums are in the list */
    int calls[STEP_GROUPS], num_groups;
    weft_dtype dtype; /* of all activations */

    bool take(const weft_embedding_args *a);
    bool take(const weft_gather_rows_args *a);
    bool take(const weft_add_args *a);
    bool take(const weft_rms_norm_args *a);
    bool take(const weft_attention_args *a);
    bool take(const weft_linear_args *a);
    bool take(const weft_linear_over_args *a);
    bool take(const weft_silu_mul_args *a);
    bool take(const weft_rope_args *a);
    bool take(const weft_kv_write_args *a);

    StepNeeds needs_of(const StepProduct *p) const;
    int arrange(StepInstruction *to, int room) const;

private:
    bool take_type(weft_dtype type);
    StepInstruction *append(StepKind kind);
    StepInstruction *last(StepKind kind);
    int group_of(const weft_peer *peer) const;
    bool product_fits(const weft_linear_args *a) const;
    bool take_product(const weft_linear_args *a, bool takes_sums);
};

} // namespace weft
