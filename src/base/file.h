/* base/file.h - files that come in: mapped whole, or read whole when small; and files that go out whole or not at all. */
#pragma once

#include <limits.h>
#include <stddef.h>
#include <stdio.h>

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

/* IO when the system refuses or path is no regular file: "PATH: No such file or directory"; MEMORY when there is no room. */
weft_status weft_file_map(weft_file **out, const char *path);
/* A hint that [begin, begin + bytes) is about to be read from end to end. */
void weft_file_will_read(const void *begin, size_t bytes);

/* The whole file in fresh memory with a 0 behind it; the caller frees *text. FORMAT when it is
 * longer than limit. */
weft_status weft_file_read(const char *path, size_t limit, char **text, size_t *bytes);

/* A file that is being written beside the one that it will replace: nothing half-written. */
typedef struct weft_file_out {
    FILE *file; /* to write to */
    int mode;   /* of the file that is replaced; 0: there is none */
    char path[PATH_MAX], temporary[PATH_MAX + 16]; /* links are followed */
} weft_file_out;

/* IO where it cannot: "cannot write PATH: it is not a regular file". Leaves no file. */
weft_status weft_file_can_replace(const char *path);
weft_status weft_file_replace_begin(weft_file_out *out, const char *path);
/* written: whether all writes have succeeded; otherwise, and when the rest fails, the file that was there stays. */
weft_status weft_file_replace_end(weft_file_out *out, int written);
/* The text as the file at `path`: replaced as above, or written at once into what is there and neither a regular file nor a folder, such as a pipe. */
weft_status weft_file_write(const char *path, const char *text, size_t bytes);

/* Whether a name in the folder ends so (".gguf"); the first of them by name goes into name[size]. */
int weft_file_find_ending(const char *folder, const char *ending, char *name, size_t size);

/* 1: a regular file (or a link to one), 2: a directory, 0: anything else or nothing. */
int weft_file_kind(const char *path);
