/* layers/run.h - one line to run an operation where the rank computes: on its GPU's stream, or on
 * its pool of threads. */
#pragma once

#include "comm/world.h"
#include "device/tensor.h"
#include "kernels/weft_fused.h"
#include "kernels/weft_kernels.h"

#ifdef WEFT_HAVE_CUDA
#define WEFT_RUN(rank, op, args)                                                                                 \
    ((rank)->cuda == NULL ? weft_##op##_cpu((args), (rank)->pool)                                                \
     : weft_cuda_take((rank)->cuda, WEFT_FUSED_##op, (args))                                                     \
         ? WEFT_OK                                                                                               \
         : weft_cuda_launched((rank)->cuda, #op, weft_##op##_cuda((args), weft_cuda_stream((rank)->cuda))))
#else
#define WEFT_RUN(rank, op, args) weft_##op##_cpu((args), (rank)->pool)
#endif

/* What args.cuda of an operation is on this rank: NULL on a CPU. */
static inline weft_cuda_context *weft_run_context(const weft_rank *rank)
{
    return rank->cuda == NULL ? NULL : weft_cuda_kernels(rank->cuda);
}

/* The address of a contiguous tensor's elements for an operation of this rank. On a GPU a host tensor
 * stands for its device copy (arrays of a step), or is copied into the arena. */
weft_status weft_run_operand(weft_rank *rank, const weft_tensor *tensor, const void **out);
/* Rows of `width` bytes, dst_pitch and src_pitch bytes apart, both where the rank computes. */
weft_status weft_run_copy_rows(weft_rank *rank, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                               int64_t rows);
/* The box [start, start + count) of a weight into contiguous elements of `tensor`, from element
 * `offset` on, wherever the tensor lies. */
struct weft_source;
weft_status weft_run_load(weft_rank *rank, const struct weft_source *source, const int64_t *start, const int64_t *count,
                          weft_tensor *tensor, int64_t offset);
