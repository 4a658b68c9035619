/* model/safetensors_write.c - tensors out. */
#include "model/safetensors_write.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const type_names[WEFT_DTYPE_COUNT] = {
    [WEFT_F32] = "F32", [WEFT_BF16] = "BF16", [WEFT_F16] = "F16",
    [WEFT_I32] = "I32", [WEFT_F8E4M3] = "F8_E4M3", [WEFT_U8] = "U8",
};

static size_t item_bytes(const weft_safetensors_item *item)
{
    size_t bytes = weft_dtype_size(item->dtype);
    for (int i = 0; i < item->ndim; i++) bytes *= (size_t)item->shape[i];
    return bytes;
}

/* The header's JSON, padded with spaces so that the data begins at a multiple of 8. */
static char *header_text(const weft_safetensors_item *items, size_t count)
{
    json_t *header = json_object();
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        json_t *shape = json_array();
        for (int d = 0; d < items[i].ndim; d++) json_array_append_new(shape, json_integer(items[i].shape[d]));
        size_t end = at + item_bytes(&items[i]);
        json_object_set_new(header, items[i].name,
                            json_pack("{s:s, s:o, s:[I,I]}", "dtype", type_names[items[i].dtype], "shape", shape,
                                      "data_offsets", (json_int_t)at, (json_int_t)end));
        at = end;
    }
    char *text = json_dumps(header, JSON_COMPACT);
    json_decref(header);
    if (text == NULL) return NULL;
    size_t length = strlen(text), padded = (length + 7) / 8 * 8;
    char *grown = realloc(text, padded + 1);
    if (grown == NULL) {
        free(text);
        return NULL;
    }
    memset(grown + length, ' ', padded - length);
    grown[padded] = 0;
    return grown;
}

static int write_all(FILE *file, const char *header, const weft_safetensors_item *items, size_t count)
{
    uint64_t length = strlen(header);
    unsigned char prefix[8];
    for (int i = 0; i < 8; i++) prefix[i] = (unsigned char)(length >> (8 * i));
    if (fwrite(prefix, 1, 8, file) != 8 || fwrite(header, 1, length, file) != length) return 0;
    for (size_t i = 0; i < count; i++) {
        size_t bytes = item_bytes(&items[i]);
        if (bytes > 0 && fwrite(items[i].data, 1, bytes, file) != bytes) return 0;
    }
    return 1;
}

/* Where to write: links are followed, and what is there must be a regular file, whose mode stays. */
static weft_status check_target(const char *path, char *target, mode_t *mode)
{
    struct stat there;
    *mode = 0;
    if (stat(path, &there) != 0) {
        if (strlen(path) >= PATH_MAX) return weft_fail(WEFT_IO, "cannot write to a path of %zu characters", strlen(path));
        strcpy(target, path);
        return WEFT_OK;
    }
    if (!S_ISREG(there.st_mode)) return weft_fail(WEFT_IO, "cannot write %s: it is not a regular file", path);
    if (realpath(path, target) == NULL) return weft_fail(WEFT_IO, "cannot write %s: %s", path, strerror(errno));
    *mode = there.st_mode & 07777;
    return WEFT_OK;
}

weft_status weft_safetensors_can_write(const char *name)
{
    char path[PATH_MAX], temporary[PATH_MAX + 16];
    mode_t mode;
    WEFT_TRY(check_target(name, path, &mode));
    snprintf(temporary, sizeof temporary, "%s.part", path);
    int file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) return errno == EEXIST ? WEFT_OK : weft_fail(WEFT_IO, "cannot write %s: %s", path, strerror(errno));
    close(file);
    unlink(temporary);
    return WEFT_OK;
}

weft_status weft_safetensors_write(const char *name, const weft_safetensors_item *items, size_t count)
{
    char path[PATH_MAX];
    mode_t mode;
    WEFT_TRY(check_target(name, path, &mode));
    size_t length = strlen(path) + 16;
    char *temporary = malloc(length), *header = header_text(items, count);
    if (temporary == NULL || header == NULL) {
        free(temporary);
        free(header);
        return weft_fail(WEFT_MEMORY, "no memory to write %s", path);
    }
    snprintf(temporary, length, "%s.part", path);
    weft_status status = WEFT_OK;
    FILE *file = fopen(temporary, "wb");
    if (file == NULL) {
        status = weft_fail(WEFT_IO, "cannot write %s: %s", path, strerror(errno));
    } else {
        int written = write_all(file, header, items, count) && (mode == 0 || fchmod(fileno(file), mode) == 0);
        written = fclose(file) == 0 && written;
        if (!written || rename(temporary, path) != 0) {
            status = weft_fail(WEFT_IO, "cannot write %s: %s", path, strerror(errno));
            unlink(temporary);
        }
    }
    free(temporary);
    free(header);
    return status;
}
