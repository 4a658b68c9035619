/* model/safetensors.h - one safetensors file.
 *
 * Layout: 8 bytes n (little endian), n bytes of JSON, then the data to the end of the file. The
 * header is hostile input: every offset, product and length is checked before anything is used.
 * Stricter than the reference reader where its own description is: no name twice. Own limits:
 * names of 1 to 1024 bytes, 8 dimensions, 2^20 tensors, 64 levels of unknown fields. */
#pragma once

#include <stdint.h>

#include "base/dtype.h"
#include "base/file.h"
#include "base/object.h"
#include "base/status.h"

enum { WEFT_SAFETENSORS_MAX_DIMS = 8, WEFT_SAFETENSORS_MAX_NAME = 1024 };

typedef struct weft_safetensors_entry {
    char *name;             /* UTF-8, no NUL */
    const char *type;       /* as in the file: "BF16" */
    int dtype;              /* a weft_dtype, or -1: legal in the format, not read by weft */
    int ndim;
    uint64_t shape[WEFT_SAFETENSORS_MAX_DIMS];
    uint64_t begin, end;    /* bytes, relative to the data; may be unaligned */
} weft_safetensors_entry;

typedef struct weft_safetensors {
    weft_object object;
    weft_file *file;
    const unsigned char *data; /* behind the header */
    uint64_t data_bytes;
    size_t count;
    weft_safetensors_entry *entries; /* sorted by name (bytes) */
} weft_safetensors;

/* IO, or FORMAT with one line: "FILE: tensor 'x': what is wrong". Takes its own reference to file. */
weft_status weft_safetensors_parse(weft_safetensors **out, weft_file *file);
weft_status weft_safetensors_open(weft_safetensors **out, const char *path);
/* NULL when there is none. */
const weft_safetensors_entry *weft_safetensors_find(const weft_safetensors *file, const char *name);
