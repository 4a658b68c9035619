/* model/safetensors_write.c - tensors out. */
#include "model/safetensors_write.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

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

weft_status weft_safetensors_write(const char *path, const weft_safetensors_item *items, size_t count)
{
    weft_file_out out;
    char *header = header_text(items, count);
    if (header == NULL) return weft_fail(WEFT_MEMORY, "no memory to write %s", path);
    weft_status status = weft_file_replace_begin(&out, path);
    if (status == WEFT_OK) status = weft_file_replace_end(&out, write_all(out.file, header, items, count));
    free(header);
    return status;
}
