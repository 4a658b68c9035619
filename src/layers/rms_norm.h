/* layers/rms_norm.h - y = x / sqrt(mean(x^2) + eps) * gain over the last dimension.
 *
 * One layer for two uses: over whole rows (hidden states, with the residual sum fused in), and over
 * each head of packed heads (q and k norm of Qwen3). Statistics never leave the rank. */
#pragma once

#include "comm/world.h"
#include "device/tensor.h"
#include "model/source.h"

typedef struct weft_rms_norm {
    weft_object object;
    weft_rank *rank;
    char *name;
    int64_t hidden_size;
    float eps;
    int convert;
    weft_dtype dtype;
    weft_tensor *gain; /* (hidden_size); NULL until loaded */
} weft_rms_norm;

/* convert: keep the gains as `dtype`; else as they come. */
weft_status weft_rms_norm_create(weft_rms_norm **out, weft_rank *rank, const char *name, int64_t hidden_size, double eps,
                                 int convert, weft_dtype dtype);
weft_status weft_rms_norm_load(weft_rms_norm *norm, const weft_source *source);
/* x (rows, hidden_size). With a residual (same shape and dtype) the norm is of x + residual, and
 * that sum is written back to residual. y of x's dtype, in the rank's arena. */
weft_status weft_rms_norm_forward(weft_rms_norm *norm, const weft_tensor *x, weft_tensor *residual, weft_tensor **y);
/* In place, each run of hidden_size elements of x (tokens, heads * hidden_size); x may be a view of
 * packed qkv. */
weft_status weft_rms_norm_forward_heads(weft_rms_norm *norm, weft_tensor *x);

/* The gains [offset, offset + count) of a vector of `total`, kept in `*gain` (made at the first call). */
weft_status weft_norm_load_gain(weft_tensor **gain, weft_rank *rank, const weft_source *source, int64_t total, int64_t offset,
                                int64_t count, int convert, weft_dtype dtype);
