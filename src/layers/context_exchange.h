/* layers/context_exchange.h - partial attention results become whole over the context group.
 * Of this room only. */
#pragma once

#include "comm/group.h"

typedef struct weft__exchange_args {
    const void *out;  /* (tokens, heads, dim) contiguous dtype: all heads of the group, over this rank's keys */
    const float *lse; /* (tokens, heads) contiguous, natural log; -inf where the rank saw no key */
    int64_t tokens, heads, dim;
    weft_dtype dtype;
    int a2a; /* 0: ag_rs */
} weft__exchange_args;

/* Collective. Leaves heads / size of them on each rank, in the group's order: out (tokens, heads /
 * size, dim) and lse (tokens, heads / size), float32, in the rank's arena. */
weft_status weft__context_exchange(weft_rank *rank, weft_group *group, const weft__exchange_args *args, float **out, float **lse);
/* Collective. rows (tokens, width), rows row_stride apart, of each member become (tokens, size * width)
 * in the rank's arena, members side by side in the group's order. */
weft_status weft__gather_rows_by_width(weft_rank *rank, weft_group *group, const void *rows, int64_t tokens, int64_t width,
                                       int64_t row_stride, weft_dtype dtype, void **out);
/* count * element bytes from the current part of the arena. */
weft_status weft__step_scratch(weft_rank *rank, int64_t count, size_t element, void **out);
