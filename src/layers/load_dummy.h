/* layers/load_dummy.h - dummy weights made on the GPU. Of this room only. */
#pragma once

#include "comm/world.h"
#include "model/source.h"

/* Fills the box on the rank's GPU when the source is a dummy that the GPU can make (*made = 1);
 * leaves it to the host otherwise. The same bits as weft_source_read gives. */
weft_status weft__load_dummy(weft_rank *rank, const weft_source *source, const int64_t *start, const int64_t *count, weft_dtype dtype,
                             void *dst, int *made);
