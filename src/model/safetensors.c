/* model/safetensors.c - parses and checks the header of one file. */
#include "model/safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/json_scan.h"

enum { MAX_HEADER = 100000000, MAX_TENSORS = 1 << 20, MAX_DEPTH = 64 };

/* Every type of the format. dtype -1: known and checked, but no tensor of weft holds it. */
static const struct {
    const char *name;
    int bits, dtype;
} types[] = {
    {"F32", 32, WEFT_F32}, {"BF16", 16, WEFT_BF16}, {"F16", 16, WEFT_F16}, {"I32", 32, WEFT_I32},
    {"F8_E4M3", 8, WEFT_F8E4M3}, {"U8", 8, WEFT_U8}, {"BOOL", 8, -1}, {"F4", 4, -1}, {"F6_E2M3", 6, -1},
    {"F6_E3M2", 6, -1}, {"I8", 8, -1}, {"F8_E5M2", 8, -1}, {"F8_E8M0", 8, -1}, {"F8_E4M3FNUZ", 8, -1},
    {"F8_E5M2FNUZ", 8, -1}, {"I16", 16, -1}, {"U16", 16, -1}, {"U32", 32, -1}, {"C64", 64, -1}, {"F64", 64, -1},
    {"I64", 64, -1}, {"U64", 64, -1},
};

static void safetensors_destroy(weft_object *object)
{
    weft_safetensors *self = (weft_safetensors *)object;
    for (size_t i = 0; i < self->count; i++) free(self->entries[i].name);
    free(self->entries);
    WEFT_RELEASE(self->file);
    free(self);
}

static weft_status parse_type(weft_json_scan *scan, weft_safetensors_entry *entry, int *bits)
{
    char name[32], text[96];
    WEFT_TRY(weft__json_string(scan, "dtype", name, sizeof name));
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (strcmp(name, types[i].name) != 0) continue;
        entry->type = types[i].name;
        entry->dtype = types[i].dtype;
        *bits = types[i].bits;
        return WEFT_OK;
    }
    snprintf(text, sizeof text, "unknown dtype '%s'", name);
    return weft__json_refuse(scan, text);
}

static weft_status parse_list(weft_json_scan *scan, const char *what, uint64_t *values, int limit, int *count)
{
    char text[64];
    int more = 1, used = 0;
    WEFT_TRY(weft__json_take(scan, '['));
    if (weft__json_peek(scan) == ']') {
        scan->at++;
        more = 0;
    }
    while (more) {
        if (used == limit) {
            snprintf(text, sizeof text, "%s with more than %d numbers", what, limit);
            return weft__json_refuse(scan, text);
        }
        WEFT_TRY(weft__json_u64(scan, what, &values[used++]));
        WEFT_TRY(weft__json_more(scan, ']', &more));
    }
    *count = used;
    return WEFT_OK;
}

/* The record of one tensor, behind its name and colon. */
static weft_status parse_record(weft_json_scan *scan, weft_safetensors_entry *entry, int *bits)
{
    enum { TYPE = 1, SHAPE = 2, OFFSETS = 4 };
    uint64_t offsets[2];
    int more = 1, seen = 0, count;
    WEFT_TRY(weft__json_take(scan, '{'));
    if (weft__json_peek(scan) == '}') {
        scan->at++;
        more = 0;
    }
    while (more) {
        char key[64];
        WEFT_TRY(weft__json_string(scan, "a field name", key, sizeof key));
        WEFT_TRY(weft__json_take(scan, ':'));
        int field = strcmp(key, "dtype") == 0 ? TYPE : strcmp(key, "shape") == 0 ? SHAPE : strcmp(key, "data_offsets") == 0 ? OFFSETS : 0;
        if (seen & field) return weft__json_refuse(scan, "a field that is there twice");
        seen |= field;
        if (field == TYPE) {
            WEFT_TRY(parse_type(scan, entry, bits));
        } else if (field == SHAPE) {
            WEFT_TRY(parse_list(scan, "shape", entry->shape, WEFT_SAFETENSORS_MAX_DIMS, &entry->ndim));
        } else if (field == OFFSETS) {
            WEFT_TRY(parse_list(scan, "data_offsets", offsets, 2, &count));
            if (count != 2) return weft__json_refuse(scan, "data_offsets must be two numbers");
            entry->begin = offsets[0];
            entry->end = offsets[1];
        } else {
            WEFT_TRY(weft__json_skip(scan, MAX_DEPTH));
        }
        WEFT_TRY(weft__json_more(scan, '}', &more));
    }
    if (seen != (TYPE | SHAPE | OFFSETS))
        return weft__json_refuse(scan, !(seen & TYPE) ? "dtype is missing" : !(seen & SHAPE) ? "shape is missing" : "data_offsets is missing");
    return WEFT_OK;
}

/* The product is taken from left to right and may not pass 64 bits on the way, as in the
 * reference reader: a zero behind an overflow does not excuse it. */
static weft_status check_size(const weft_safetensors_entry *entry, int bits)
{
    uint64_t elements = 1, total;
    int fits = 1;
    for (int i = 0; i < entry->ndim && fits; i++) fits = !__builtin_mul_overflow(elements, entry->shape[i], &elements);
    if (!fits || __builtin_mul_overflow(elements, (uint64_t)bits, &total))
        return weft_fail(WEFT_FORMAT, "the product of its shape passes 64 bits");
    if (total % 8 != 0) return weft_fail(WEFT_FORMAT, "%" PRIu64 " elements of %s do not end on a byte", elements, entry->type);
    if (entry->end < entry->begin)
        return weft_fail(WEFT_FORMAT, "data_offsets end (%" PRIu64 ") before they begin (%" PRIu64 ")", entry->end, entry->begin);
    if (total / 8 != entry->end - entry->begin)
        return weft_fail(WEFT_FORMAT, "its shape needs %" PRIu64 " bytes, data_offsets hold %" PRIu64, total / 8, entry->end - entry->begin);
    return WEFT_OK;
}

static weft_status add_entry(weft_safetensors *self, size_t *capacity, const char *name, weft_json_scan *scan)
{
    weft_safetensors_entry entry = {0};
    int bits = 0;
    weft_status status = parse_record(scan, &entry, &bits);
    if (status == WEFT_OK) status = check_size(&entry, bits);
    if (status != WEFT_OK) return weft_fail(status, "tensor '%s': %s", name, weft_error_message());
    if (self->count == MAX_TENSORS) return weft_fail(WEFT_FORMAT, "more than %d tensors", MAX_TENSORS);
    if (self->count == *capacity) {
        size_t wanted = *capacity == 0 ? 64 : *capacity * 2;
        weft_safetensors_entry *grown = realloc(self->entries, wanted * sizeof *grown);
        if (grown == NULL) return weft_fail(WEFT_MEMORY, "no memory for %zu tensors", wanted);
        self->entries = grown;
        *capacity = wanted;
    }
    entry.name = strdup(name);
    if (entry.name == NULL) return weft_fail(WEFT_MEMORY, "no memory for a tensor's name");
    self->entries[self->count++] = entry;
    return WEFT_OK;
}

/* __metadata__ is a map from strings to strings; weft uses none of it. */
static weft_status skip_metadata(weft_json_scan *scan)
{
    int more = 1;
    if (weft__json_peek(scan) != '{') return weft__json_refuse(scan, "__metadata__ must be an object of strings");
    scan->at++;
    if (weft__json_peek(scan) == '}') {
        scan->at++;
        return WEFT_OK;
    }
    while (more) {
        for (int part = 0; part < 2; part++) {
            if (weft__json_peek(scan) != '"') return weft__json_refuse(scan, "__metadata__ must be an object of strings");
            WEFT_TRY(weft__json_skip(scan, 0));
            if (part == 0) WEFT_TRY(weft__json_take(scan, ':'));
        }
        WEFT_TRY(weft__json_more(scan, '}', &more));
    }
    return WEFT_OK;
}

static weft_status parse_header(weft_safetensors *self, weft_json_scan *scan)
{
    char name[WEFT_SAFETENSORS_MAX_NAME + 1];
    size_t capacity = 0;
    int more = 1, metadata = 0;
    WEFT_TRY(weft__json_take(scan, '{'));
    if (weft__json_peek(scan) == '}') {
        scan->at++;
        more = 0;
    }
    while (more) {
        WEFT_TRY(weft__json_string(scan, "a tensor's name", name, sizeof name));
        WEFT_TRY(weft__json_take(scan, ':'));
        if (strcmp(name, "__metadata__") == 0) {
            if (metadata++) return weft__json_refuse(scan, "__metadata__ is there twice");
            WEFT_TRY(skip_metadata(scan));
        } else {
            if (name[0] == 0) return weft__json_refuse(scan, "a tensor without a name");
            WEFT_TRY(add_entry(self, &capacity, name, scan));
        }
        WEFT_TRY(weft__json_more(scan, '}', &more));
    }
    (void)weft__json_peek(scan);
    return scan->at == scan->end ? WEFT_OK : weft__json_refuse(scan, "text behind the header's last brace");
}

static int by_offset(const void *a, const void *b)
{
    const weft_safetensors_entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const weft_safetensors_entry *)a)->name, ((const weft_safetensors_entry *)b)->name);
}

/* The tensors must tile the data: no overlap, no hole, nothing behind the last. Ends sorted by
 * name, which shows a name that is there twice. */
static weft_status check_layout(weft_safetensors *self)
{
    uint64_t at = 0;
    if (self->count > 0) qsort(self->entries, self->count, sizeof *self->entries, by_name);
    for (size_t i = 1; i < self->count; i++)
        if (strcmp(self->entries[i - 1].name, self->entries[i].name) == 0)
            return weft_fail(WEFT_FORMAT, "tensor '%s' is there twice", self->entries[i].name);
    if (self->count > 0) qsort(self->entries, self->count, sizeof *self->entries, by_offset);
    for (size_t i = 0; i < self->count; i++) {
        const weft_safetensors_entry *entry = &self->entries[i];
        if (entry->begin != at)
            return weft_fail(WEFT_FORMAT, "tensor '%s' begins at byte %" PRIu64 ", but the one before ends at %" PRIu64 " (%s)",
                             entry->name, entry->begin, at, entry->begin < at ? "they overlap" : "a hole");
        at = entry->end;
    }
    if (at != self->data_bytes)
        return weft_fail(WEFT_FORMAT, "the tensors hold %" PRIu64 " bytes, the file has %" PRIu64 " behind its header (%s)", at,
                         self->data_bytes, at > self->data_bytes ? "the file is cut short" : "bytes behind the last tensor");
    if (self->count > 0) qsort(self->entries, self->count, sizeof *self->entries, by_name);
    return WEFT_OK;
}

static weft_status parse(weft_safetensors *self)
{
    const weft_file *file = self->file;
    uint64_t header = 0;
    if (file->bytes < 8) return weft_fail(WEFT_FORMAT, "%zu bytes are too few for a safetensors file", file->bytes);
    for (int i = 7; i >= 0; i--) header = header << 8 | file->data[i];
    if (header > MAX_HEADER)
        return weft_fail(WEFT_FORMAT, "a header of %" PRIu64 " bytes, more than the %d that are allowed (not a safetensors file?)", header, MAX_HEADER);
    if (header > file->bytes - 8)
        return weft_fail(WEFT_FORMAT, "a header of %" PRIu64 " bytes in a file of %zu (the file is cut short)", header, file->bytes);
    self->data = file->data + 8 + header;
    self->data_bytes = file->bytes - 8 - header;
    weft_json_scan scan = {file->data + 8, file->data + 8, self->data};
    WEFT_TRY(parse_header(self, &scan));
    return check_layout(self);
}

weft_status weft_safetensors_parse(weft_safetensors **out, weft_file *file)
{
    weft_safetensors *self = calloc(1, sizeof *self);
    if (self == NULL) return weft_fail(WEFT_MEMORY, "no memory for %s", file->path);
    weft_object_init(&self->object, safetensors_destroy);
    self->file = WEFT_RETAIN(file);
    weft_status status = parse(self);
    if (status != WEFT_OK) {
        weft_object_release(&self->object);
        return weft_fail(status, "%s: %s", file->path, weft_error_message());
    }
    *out = self;
    return WEFT_OK;
}

weft_status weft_safetensors_open(weft_safetensors **out, const char *path)
{
    weft_file *file;
    WEFT_TRY(weft_file_map(&file, path));
    weft_status status = weft_safetensors_parse(out, file);
    WEFT_RELEASE(file);
    return status;
}

const weft_safetensors_entry *weft_safetensors_find(const weft_safetensors *file, const char *name)
{
    weft_safetensors_entry key = {.name = (char *)name};
    if (file->count == 0) return NULL;
    return bsearch(&key, file->entries, file->count, sizeof key, by_name);
}
