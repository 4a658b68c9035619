/* layers/rotary.h - rotary position embeddings (SEMANTICS 6.3).
 *
 * angle(position, i) = position * inv_freq[i], i < rotary_dim / 2. The scaling types change
 * inv_freq, and yarn also the size of cos and sin:
 *
 *   default   theta^(-2i / rotary_dim)
 *   linear    that / factor
 *   dynamic   default up to max_position (alpha: theta * alpha^(rd / (rd - 2))); beyond it refused
 *   llama3    long waves / factor, short ones unchanged, a ramp between
 *   yarn      a ramp over i between inv_freq / factor and inv_freq; cos, sin times m
 *
 * The frequencies are rounded to float32 and so is position * inv_freq, as in the reference
 * implementation that models were trained with. Rows of the table are made when a position is
 * first seen, so a model with a long limit does not pay for it. */
#pragma once

#include "comm/world.h"
#include "device/tensor.h"

typedef enum weft_rope_type {
    WEFT_ROPE_DEFAULT,
    WEFT_ROPE_LINEAR,
    WEFT_ROPE_DYNAMIC,
    WEFT_ROPE_LLAMA3,
    WEFT_ROPE_YARN,
    WEFT_ROPE_TYPE_COUNT
} weft_rope_type;

typedef struct weft_rope_scaling {
    weft_rope_type type;
    double factor, alpha;
    double low_freq_factor, high_freq_factor;
    int64_t original_max_position; /* 0: max_position */
    double beta_fast, beta_slow, extrapolation_factor;
    double attention_factor; /* m itself; 0: from factor (and mscale, mscale_all_dim where both are set) */
    double attn_factor;      /* multiplies m */
    double mscale, mscale_all_dim;
    int apply_yarn_scaling; /* 0: m is attn_factor alone */
    int truncate;           /* yarn: the ramp begins and ends at whole numbers */
} weft_rope_scaling;

/* The values that a config which does not name them means. */
weft_rope_scaling weft_rope_scaling_default(void);
/* "su" and unknown names: "unknown rope type 'x' (known: default, linear, ...)" */
weft_status weft_rope_type_from_name(const char *name, weft_rope_type *out);
const char *weft_rope_type_name(weft_rope_type type);

/* inv_freq (rotary_dim / 2), *scale = m, *positions = rows that make sense. */
weft_status weft_rope_frequencies(double *inv_freq, double *scale, int64_t *positions, int rotary_dim, int64_t max_position,
                                  double theta, const weft_rope_scaling *scaling);

enum { WEFT_ROPE_MAX_DIM = 256 };
/* On a GPU the table has this many rows from the start (or all): a captured graph may hold its address
 * and reads any position below. */
enum { WEFT_ROPE_GPU_ROWS = 1 << 18 };

typedef struct weft_rotary {
    weft_object object;
    weft_rank *rank;
    int head_size, rotary_dim;
    int64_t max_positions;
    double theta, scale;
    weft_rope_scaling scaling;
    double inv_freq[WEFT_ROPE_MAX_DIM / 2];
    weft_tensor *table; /* float32 (rows so far, rotary_dim): cos, then sin; NULL at first */
    weft_tensor *device_table; /* the same on the rank's GPU */
} weft_rotary;

/* rotary_dim 0: head_size. Even, at most head_size and 256. */
weft_status weft_rotary_create(weft_rotary **out, weft_rank *rank, int head_size, int rotary_dim, int64_t max_position,
                               double theta, const weft_rope_scaling *scaling);
/* Makes the rows of positions below `positions` now. */
weft_status weft_rotary_reserve(weft_rotary *rotary, int64_t positions);
/* Rotates q and k (k may be NULL) in place; each (tokens, heads * head_size) or (tokens, heads,
 * head_size), rows any distance apart: views of packed qkv are what it is for. positions: int32 (tokens). */
weft_status weft_rotary_forward(weft_rotary *rotary, const weft_tensor *positions, weft_tensor *q, weft_tensor *k);
