/* fuzz/safetensors.c - throws damaged files at the safetensors parser.
 *
 *   weft_fuzz_safetensors SECONDS SEED FILE...
 * Mutates the given files for so long, parses each result from a heap block of exactly its size
 * (so that the address sanitizer sees a read one byte behind it), and reads every tensor that was
 * accepted. With -DWEFT_LIBFUZZER it is libFuzzer's entry point instead. Exit 0: nothing crashed. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "model/safetensors.h"
#include "model/source.h"

static void block_destroy(weft_object *object)
{
    weft_file *file = (weft_file *)object;
    free((void *)file->data);
    free(file);
}

static int read_all(const weft_safetensors *file)
{
    int read = 0;
    for (size_t i = 0; i < file->count; i++) {
        const weft_safetensors_entry *entry = &file->entries[i];
        int64_t shape[WEFT_SOURCE_MAX_DIMS], start[WEFT_SOURCE_MAX_DIMS] = {0}, stride[WEFT_SOURCE_MAX_DIMS], n = 1;
        if (entry->dtype < 0 || entry->ndim > WEFT_SOURCE_MAX_DIMS || entry->end == entry->begin) continue;
        for (int d = entry->ndim - 1; d >= 0; d--) {
            shape[d] = (int64_t)entry->shape[d];
            stride[d] = n;
            n *= shape[d];
        }
        weft_source *source;
        float *out = malloc((size_t)n * sizeof *out);
        if (out != NULL && weft_source_create(&source, entry->name, (weft_dtype)entry->dtype, entry->ndim, shape,
                                              file->data + entry->begin, NULL) == WEFT_OK) {
            read += weft_source_read(source, start, shape, out, WEFT_F32, stride) == WEFT_OK;
            WEFT_RELEASE(source);
        }
        free(out);
    }
    return read;
}

/* 1 when the file was accepted. */
static int try_file(const uint8_t *data, size_t bytes)
{
    weft_file *file = calloc(1, sizeof *file);
    uint8_t *copy = malloc(bytes ? bytes : 1);
    if (file == NULL || copy == NULL) abort();
    memcpy(copy, data, bytes);
    weft_object_init(&file->object, block_destroy);
    file->path = "fuzz";
    file->data = copy;
    file->bytes = bytes;
    weft_safetensors *parsed;
    int accepted = weft_safetensors_parse(&parsed, file) == WEFT_OK;
    WEFT_RELEASE(file);
    if (accepted) {
        read_all(parsed);
        WEFT_RELEASE(parsed);
    }
    return accepted;
}

#ifdef WEFT_LIBFUZZER
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    try_file(data, bytes);
    return 0;
}
#else

static uint64_t state;

static uint64_t draw(uint64_t limit)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % limit;
}

enum { MAX_BYTES = 1 << 16 };

static size_t mutate(uint8_t *data, size_t bytes)
{
    static const char *const words[] = {"18446744073709551615", "9223372036854775807", "[", "]", "{", "}", "\"", ",", "0", "-1", "1e5",
                                        "\"shape\":[", "\"dtype\":\"F4\"", "\\ud800", "\\u0041", "\xff", "null", "\"__metadata__\":{}"};
    uint64_t header = 0, whole = bytes;
    for (int i = 7; i >= 0 && bytes >= 8; i--) header = header << 8 | data[i];
    for (uint64_t times = 1 + draw(4); times > 0; times--) {
        size_t at = draw(bytes + 1);
        if (at < bytes && draw(3) == 0) {
            data[at] = (uint8_t)draw(256);
        } else if (draw(2) == 0) {
            const char *word = words[draw(sizeof words / sizeof *words)];
            size_t length = strlen(word);
            if (bytes + length > MAX_BYTES) continue;
            memmove(data + at + length, data + at, bytes - at);
            memcpy(data + at, word, length);
            bytes += length;
        } else {
            size_t gone = draw(1 + (bytes - at < 8 ? bytes - at : 8));
            memmove(data + at, data + at + gone, bytes - at - gone);
            bytes -= gone;
        }
    }
    /* Most of the time the length follows, or nothing behind it would ever be reached. */
    if (bytes >= 8 && whole >= 8 && draw(8) != 0) {
        header += bytes - whole;
        for (int i = 0; i < 8; i++) data[i] = (uint8_t)(header >> (8 * i));
    }
    return bytes;
}

int main(int argc, char **argv)
{
    static uint8_t original[MAX_BYTES], data[MAX_BYTES];
    long runs = 0, accepted = 0;
    if (argc < 4) {
        fprintf(stderr, "usage: %s SECONDS SEED FILE...\n", argv[0]);
        return 2;
    }
    state = strtoull(argv[2], NULL, 10) * 2 + 1;
    for (time_t end = time(NULL) + atol(argv[1]); time(NULL) < end; runs++) {
        FILE *file = fopen(argv[3 + draw((uint64_t)argc - 3)], "rb");
        if (file == NULL) {
            perror("fuzz");
            return 2;
        }
        size_t whole = fread(original, 1, MAX_BYTES, file);
        fclose(file);
        for (int i = 0; i < 200; i++) {
            memcpy(data, original, whole);
            accepted += try_file(data, mutate(data, whole));
        }
    }
    printf("%ld files, %ld accepted\n", runs * 200, accepted);
    return 0;
}
#endif
