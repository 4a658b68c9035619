/* base/file.h - files that come in: mapped whole, or read whole when small. */
#pragma once

#include <stddef.h>

#include "base/object.h"
#include "base/status.h"

/* A read-only mapping. Pages are read when they are touched, so many ranks may map one file and
 * each pays for its own shard. */
typedef struct weft_file {
    weft_object object;
    char *path;
    const unsigned char *data; /* bytes long; page aligned; never NULL */
    size_t bytes;
} weft_file;

/* IO when the system refuses or path is no regular file: "PATH: No such file or directory". */
weft_status weft_file_map(weft_file **out, const char *path);
/* A hint that [begin, begin + bytes) is about to be read from end to end. */
void weft_file_will_read(const void *begin, size_t bytes);

/* The whole file in fresh memory with a 0 behind it; the caller frees *text. FORMAT when it is
 * longer than limit. */
weft_status weft_file_read(const char *path, size_t limit, char **text, size_t *bytes);
/* 1: a regular file (or a link to one), 2: a directory, 0: anything else or nothing. */
int weft_file_kind(const char *path);
