/* device/tensor.h - shapes, strides and views over accounted memory.
 *
 * A tensor is a view of a storage. Storages are counted, so a view keeps its memory alive. Strides
 * are in elements. Sizes are checked against overflow where they enter (weft_tensor_create). */
#pragma once

#include <stdint.h>

#include "base/dtype.h"
#include "base/object.h"
#include "base/status.h"
#include "device/memory.h"

enum { WEFT_MAX_DIMS = 6 };

typedef struct weft_storage {
    weft_object object;
    weft_memory *memory; /* NULL: the bytes belong to somebody else (`owner`, if any) */
    weft_object *owner;
    weft_cuda *cuda; /* whose memory `data` is, kept by memory or owner; NULL: the host's */
    void *data;
    size_t bytes;
} weft_storage;

struct weft_arena;

typedef struct weft_tensor {
    weft_object object;
    weft_storage *storage;
    void *data; /* first element of this view */
    void *device_data; /* of a host tensor: the same elements on the rank's GPU, or NULL (cache/step.h) */
    weft_dtype dtype;
    int ndim; /* 0: one element */
    int64_t shape[WEFT_MAX_DIMS];
    int64_t stride[WEFT_MAX_DIMS];
    /* Tensors of a step live in an arena and die when their part of it is used again; `epoch` is
     * compared on use (weft_tensor_check). NULL for all others. */
    struct weft_arena *arena;
    int arena_part;
    uint64_t epoch;
    /* For people: dimension cut_dim is this rank's part of 1/cut_size along an axis. NULL: not known. */
    const char *cut_axis; /* of static life */
    int cut_dim, cut_size;
} weft_tensor;

/* Contiguous; contents undefined. Fails with INVALID for a negative or overflowing shape. */
weft_status weft_tensor_create(weft_tensor **out, weft_memory *memory, weft_dtype dtype, int ndim, const int64_t *shape);
/* A contiguous tensor over bytes that `owner` keeps alive (NULL: the caller does). */
weft_status weft_tensor_wrap(weft_tensor **out, weft_object *owner, void *data, weft_dtype dtype, int ndim,
                             const int64_t *shape);

/* Notes that dimension dim is cut; size 1 notes nothing. Views that keep the dimension whole keep the note. */
void weft_tensor_note_cut(weft_tensor *tensor, int dim, const char *axis, int size);

int64_t weft_tensor_numel(const weft_tensor *tensor);
int weft_tensor_is_contiguous(const weft_tensor *tensor);
/* CLOSED when the tensor belonged to an earlier layer or step of its arena. */
weft_status weft_tensor_check(const weft_tensor *tensor);
/* "bfloat16[8, 3072]" into text; returns text. Where the cut is known: "bfloat16[8, 768 @tensor/4]". */
const char *weft_tensor_describe(const weft_tensor *tensor, char *text, size_t size);

/* Views share the storage. Indices are checked. */
weft_status weft_tensor_narrow(weft_tensor **out, weft_tensor *tensor, int dim, int64_t start, int64_t length);
weft_status weft_tensor_select(weft_tensor **out, weft_tensor *tensor, int dim, int64_t index);
weft_status weft_tensor_transpose(weft_tensor **out, weft_tensor *tensor, int dim0, int dim1);
/* Needs a contiguous tensor; one size may be -1. */
weft_status weft_tensor_view(weft_tensor **out, weft_tensor *tensor, int ndim, const int64_t *shape);

/* Element by element with conversion; shapes must be equal. dst and src must not overlap unless
 * they are the same view. Between host and GPU too; what leaves a GPU is waited for. */
weft_status weft_tensor_copy(weft_tensor *dst, const weft_tensor *src);
weft_status weft_tensor_fill(weft_tensor *tensor, double value);
/* The tensor itself where it lies on the host, else a host copy. A new reference. */
weft_status weft_tensor_to_host(weft_tensor **out, weft_tensor *tensor);
