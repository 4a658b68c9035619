/* weft_fused.h - many operations of a step as one launch. C11, without CUDA types.
 *
 * Between begin and end, operations of a captured step are offered to the recorder before they are
 * launched. Those it takes run, in their order and with the results they would have had, in one kernel
 * that stays on the GPU (kernels/cuda/step.cuh); it is launched when the recorder is flushed. Whoever
 * puts other work on the stream flushes first.
 *
 * Without memory a recorder is for steps of many tokens, captured or not: a product that it takes waits for the operations
 * behind it that may run in its end (kernels/cuda/long_record.cuh). */
#pragma once

#include "kernels/weft_cuda.h"
#include "kernels/weft_peer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct weft_fused weft_fused;

/* What a recorder needs for one captured step. */
#define WEFT_FUSED_BYTES ((size_t)3 << 20)

/* WEFT_FUSED_linear_over: weft_peer_linear, for a group of two. */
typedef struct weft_linear_over_args {
    const weft_peer *peer;
    const weft_linear_args *linear;
} weft_linear_over_args;

/* The operations, named as weft_OP_cuda; those up to WEFT_FUSED_OPS may be taken. */
typedef enum weft_fused_op {
    WEFT_FUSED_embedding,
    WEFT_FUSED_linear,
    WEFT_FUSED_rms_norm,
    WEFT_FUSED_rope,
    WEFT_FUSED_kv_write,
    WEFT_FUSED_attention,
    WEFT_FUSED_silu_mul,
    WEFT_FUSED_add,
    WEFT_FUSED_gather_rows,
    WEFT_FUSED_linear_over,
    WEFT_FUSED_OPS, /* from here on: never taken */
    WEFT_FUSED_group_norm_sums,
    WEFT_FUSED_group_norm_apply,
    WEFT_FUSED_merge_attn_states,
    WEFT_FUSED_dcp_combine,
    WEFT_FUSED_dcp_pack,
    WEFT_FUSED_dcp_unpack_lse,
    WEFT_FUSED_dcp_scale,
    WEFT_FUSED_mask_empty,
    WEFT_FUSED_router,
    WEFT_FUSED_experts,
    WEFT_FUSED_quantize_groups,
    WEFT_FUSED_sample
} weft_fused_op;

/* memory: WEFT_FUSED_BYTES of the current device, 256-byte aligned, the caller's, alive as long as what was
 * captured, or NULL. Launches go to `stream`, one that the context serves. On cards that cannot run steps as one launch it takes
 * none of their operations; products of many tokens it may take anywhere.
 * all: also products of several tokens, which launches do as fast or faster (scripts/bench.md); for checks and
 * measurements. */
weft_status weft_fused_begin(weft_fused **out, weft_cuda_context *context, void *memory, int all, void *stream);
/* 1: taken, do not launch. 0: launch it, behind a flush. */
int weft_fused_take(weft_fused *recorder, weft_fused_op op, const void *args);
/* Launches what was taken since the last flush. The first failure is kept for end. */
weft_status weft_fused_flush(weft_fused *recorder);
/* Behind a flush and the end of the capture: sends the lists to the device, in the order of the stream, and frees the
 * recorder, whatever happened. keep: whether what was captured will be used. Fails as the first flush that failed did. */
weft_status weft_fused_end(weft_fused *recorder, int keep);

#ifdef __cplusplus
}
#endif
