/* model/checkpoint.h - where a model's weights come from, by name.
 *
 * A folder with model.safetensors, or with model.safetensors.index.json and its shards, or one
 * .safetensors file; or dummy: any name, any shape, values from model/dummy.h. Files are mapped
 * when the checkpoint is opened and stay mapped while it or any of its sources lives. */
#pragma once

#include "model/safetensors.h"
#include "model/source.h"

typedef struct weft_checkpoint_entry {
    const weft_safetensors *file;
    const weft_safetensors_entry *tensor;
} weft_checkpoint_entry;

typedef struct weft_checkpoint {
    weft_object object;
    char *path;
    int dummy;
    size_t num_files;
    weft_safetensors **files;
    size_t count;
    weft_checkpoint_entry *entries; /* sorted by name */
    uint64_t bytes;                 /* of all listed tensors */
} weft_checkpoint;

/* IO or FORMAT, one line that names the file. */
weft_status weft_checkpoint_open(weft_checkpoint **out, const char *path);
weft_status weft_checkpoint_create_dummy(weft_checkpoint **out);

const weft_checkpoint_entry *weft_checkpoint_find(const weft_checkpoint *checkpoint, const char *name);
/* A tensor of the checkpoint as a source, which keeps its file alive. FORMAT when it is not there,
 * UNSUPPORTED when weft does not read its dtype. Not for dummy checkpoints. */
weft_status weft_checkpoint_source(weft_source **out, const weft_checkpoint *checkpoint, const char *name);
