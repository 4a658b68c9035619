/* model/source.h - where the values of one weight come from.
 *
 * A source is a named global tensor that can be read in boxes: a tensor of a checkpoint (memory
 * mapped, so a rank touches only its shard), plain memory (specs), or dummy weights. Layers ask a
 * source for the box they hold and never learn which it is. */
#pragma once

#include <stdint.h>

#include "base/dtype.h"
#include "base/object.h"
#include "base/status.h"

enum { WEFT_SOURCE_MAX_DIMS = 4 };

typedef struct weft_source {
    weft_object object;
    char *name; /* as in the checkpoint: messages name it */
    weft_dtype dtype;
    int ndim;
    int64_t shape[WEFT_SOURCE_MAX_DIMS];
    const void *data;   /* contiguous; NULL: dummy values, made from (name, global index) */
    weft_object *owner; /* keeps data alive */
} weft_source;

/* Copies nothing: `owner` (may be NULL) keeps data alive. */
weft_status weft_source_create(weft_source **out, const char *name, weft_dtype dtype, int ndim, const int64_t *shape,
                               const void *data, weft_object *owner);
/* DESIGN 10: each element a hash of (name, global index) scaled to 0.02; names that end in
 * "norm.weight" are near 1. Equal for every cut. */
weft_status weft_source_create_dummy(weft_source **out, const char *name, weft_dtype dtype, int ndim, const int64_t *shape);

/* FORMAT unless the shape is this one:
 * "tensor 'model.norm.weight': wanted [192], found [191]" */
weft_status weft_source_expect(const weft_source *source, int ndim, const int64_t *shape);

/* FORMAT unless the values are float32, bfloat16 or float16: "tensor 'x': wanted floats, found int32". */
weft_status weft_source_expect_floats(const weft_source *source);
/* FORMAT when a value is NaN or infinite, which would be lost where scores are compared. Reads all of it. */
weft_status weft_source_expect_finite(const weft_source *source);

/* The box [start, start + count) into dst (strides in elements), converted to dst_dtype.
 * fp8 converts to fp8 or float types only when asked (no scales are applied here). */
weft_status weft_source_read(const weft_source *source, const int64_t *start, const int64_t *count, void *dst,
                             weft_dtype dst_dtype, const int64_t *dst_stride);
