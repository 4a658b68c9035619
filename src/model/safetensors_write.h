/* model/safetensors_write.h - tensors out, in the format that safetensors.h reads. */
#pragma once

#include <stdint.h>

#include "base/dtype.h"
#include "base/status.h"

typedef struct weft_safetensors_item {
    const char *name;
    weft_dtype dtype;
    int ndim;
    const int64_t *shape;
    const void *data; /* contiguous */
} weft_safetensors_item;

/* Writes a file of its own beside `path` and renames it when it is whole: nothing half-written. */
weft_status weft_safetensors_write(const char *path, const weft_safetensors_item *items, size_t count);
