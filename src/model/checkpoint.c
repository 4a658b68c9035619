/* model/checkpoint.c - a folder of safetensors files, found by name. */
#include "model/checkpoint.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/json_scan.h"

enum { MAX_INDEX_BYTES = 256 << 20, MAX_FILES = 65536, MAX_FILE_NAME = 255, MAX_DEPTH = 64 };

static void checkpoint_destroy(weft_object *object)
{
    weft_checkpoint *self = (weft_checkpoint *)object;
    for (size_t i = 0; i < self->num_files; i++) WEFT_RELEASE(self->files[i]);
    free(self->files);
    free(self->entries);
    free(self->path);
    free(self);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const weft_checkpoint_entry *)a)->tensor->name, ((const weft_checkpoint_entry *)b)->tensor->name);
}

static weft_status join(const char *folder, const char *name, char *path, size_t size)
{
    int used = snprintf(path, size, "%s/%s", folder, name);
    return used > 0 && (size_t)used < size ? WEFT_OK : weft_fail(WEFT_INVALID, "%s: the path is too long", folder);
}

static weft_status open_file(weft_checkpoint *self, const char *path, size_t *number)
{
    weft_safetensors **grown = realloc(self->files, (self->num_files + 1) * sizeof *grown);
    if (grown == NULL) return weft_fail(WEFT_MEMORY, "no memory for %s", path);
    self->files = grown;
    WEFT_TRY(weft_safetensors_open(&self->files[self->num_files], path));
    *number = self->num_files++;
    return WEFT_OK;
}

/* ---- the index ---- */

typedef struct {
    char *tensor;
    char *shard; /* both owned */
} mapping;

typedef struct {
    mapping *items;
    size_t count, capacity;
} weight_map;

static void free_map(weight_map *map)
{
    for (size_t i = 0; i < map->count; i++) {
        free(map->items[i].tensor);
        free(map->items[i].shard);
    }
    free(map->items);
}

/* A shard lies beside its index: the name may not lead anywhere else. */
static int is_plain_name(const char *name)
{
    return name[0] != 0 && strpbrk(name, "/\\:") == NULL && strcmp(name, ".") != 0 && strstr(name, "..") == NULL;
}

static weft_status add_mapping(weight_map *map, const char *tensor, const char *shard)
{
    if (!is_plain_name(shard))
        return weft_fail(WEFT_FORMAT, "tensor '%s' is mapped to '%s', which is not the name of a file in this folder", tensor, shard);
    if (map->count == map->capacity) {
        size_t wanted = map->capacity == 0 ? 256 : map->capacity * 2;
        mapping *grown = realloc(map->items, wanted * sizeof *grown);
        if (grown == NULL) return weft_fail(WEFT_MEMORY, "no memory for %zu names", wanted);
        map->items = grown;
        map->capacity = wanted;
    }
    mapping item = {strdup(tensor), strdup(shard)};
    map->items[map->count++] = item;
    return item.tensor && item.shard ? WEFT_OK : weft_fail(WEFT_MEMORY, "no memory for a tensor's name");
}

static weft_status parse_weight_map(weft_json_scan *scan, weight_map *map)
{
    char tensor[WEFT_SAFETENSORS_MAX_NAME + 1], shard[MAX_FILE_NAME + 1];
    int more = 1;
    WEFT_TRY(weft__json_take(scan, '{'));
    if (weft__json_peek(scan) == '}') {
        scan->at++;
        return WEFT_OK;
    }
    while (more) {
        WEFT_TRY(weft__json_string(scan, "a tensor's name", tensor, sizeof tensor));
        WEFT_TRY(weft__json_take(scan, ':'));
        WEFT_TRY(weft__json_string(scan, "a file's name", shard, sizeof shard));
        WEFT_TRY(add_mapping(map, tensor, shard));
        WEFT_TRY(weft__json_more(scan, '}', &more));
    }
    return WEFT_OK;
}

static weft_status parse_index(weft_json_scan *scan, weight_map *map)
{
    char key[WEFT_SAFETENSORS_MAX_NAME + 1];
    int more = 1, found = 0;
    WEFT_TRY(weft__json_take(scan, '{'));
    if (weft__json_peek(scan) == '}') more = 0, scan->at++;
    while (more) {
        WEFT_TRY(weft__json_string(scan, "a key", key, sizeof key));
        WEFT_TRY(weft__json_take(scan, ':'));
        if (strcmp(key, "weight_map") != 0) {
            WEFT_TRY(weft__json_skip(scan, MAX_DEPTH)); /* metadata.total_size is advice only */
        } else {
            if (found++) return weft__json_refuse(scan, "weight_map is there twice");
            WEFT_TRY(parse_weight_map(scan, map));
        }
        WEFT_TRY(weft__json_more(scan, '}', &more));
    }
    (void)weft__json_peek(scan);
    if (scan->at != scan->end) return weft__json_refuse(scan, "text behind the last brace");
    return found ? WEFT_OK : weft_fail(WEFT_FORMAT, "weight_map is missing");
}

static int by_shard_then_tensor(const void *a, const void *b)
{
    const mapping *x = a, *y = b;
    int order = strcmp(x->shard, y->shard);
    return order ? order : strcmp(x->tensor, y->tensor);
}

/* Opens each shard once and finds every mapped name in it. */
static weft_status open_shards(weft_checkpoint *self, weight_map *map)
{
    char path[4096];
    size_t number = 0;
    if (map->count == 0) return weft_fail(WEFT_FORMAT, "weight_map is empty");
    self->entries = calloc(map->count, sizeof *self->entries);
    if (self->entries == NULL) return weft_fail(WEFT_MEMORY, "no memory for %zu names", map->count);
    qsort(map->items, map->count, sizeof *map->items, by_shard_then_tensor);
    for (size_t i = 0; i < map->count; i++) {
        const mapping *item = &map->items[i];
        if (i == 0 || strcmp(item->shard, map->items[i - 1].shard) != 0) {
            if (self->num_files == MAX_FILES) return weft_fail(WEFT_FORMAT, "more than %d shards", MAX_FILES);
            WEFT_TRY(join(self->path, item->shard, path, sizeof path));
            if (weft_file_kind(path) != 1)
                return weft_fail(WEFT_IO, "shard '%s' (which holds tensor '%s') is not there: the download is not complete", item->shard, item->tensor);
            WEFT_TRY(open_file(self, path, &number));
        }
        const weft_safetensors_entry *tensor = weft_safetensors_find(self->files[number], item->tensor);
        if (tensor == NULL)
            return weft_fail(WEFT_FORMAT, "tensor '%s' is mapped to '%s', which does not hold it", item->tensor, item->shard);
        self->entries[self->count++] = (weft_checkpoint_entry){self->files[number], tensor};
    }
    return WEFT_OK;
}

/* No name may be in two shards, mapped or not: which one is meant would be a guess. */
static weft_status check_unique(const weft_checkpoint *self)
{
    size_t total = 0, used = 0;
    for (size_t i = 0; i < self->num_files; i++) total += self->files[i]->count;
    weft_checkpoint_entry *all = calloc(total + 1, sizeof *all);
    if (all == NULL) return weft_fail(WEFT_MEMORY, "no memory for %zu names", total);
    for (size_t i = 0; i < self->num_files; i++)
        for (size_t j = 0; j < self->files[i]->count; j++) all[used++] = (weft_checkpoint_entry){self->files[i], &self->files[i]->entries[j]};
    qsort(all, used, sizeof *all, by_name);
    weft_status status = WEFT_OK;
    for (size_t i = 1; i < used && status == WEFT_OK; i++)
        if (by_name(&all[i - 1], &all[i]) == 0)
            status = weft_fail(WEFT_FORMAT, "tensor '%s' is in two shards: %s and %s", all[i].tensor->name, all[i - 1].file->file->path,
                               all[i].file->file->path);
    free(all);
    return status;
}

static weft_status open_index(weft_checkpoint *self, const char *path)
{
    weft_file *file;
    WEFT_TRY(weft_file_map(&file, path));
    weight_map map = {0};
    weft_json_scan scan = {file->data, file->data, file->data + file->bytes};
    if (file->bytes >= 3 && memcmp(file->data, "\xEF\xBB\xBF", 3) == 0) scan.at += 3; /* the mark of UTF-8 that some editors write */
    weft_status status = file->bytes > MAX_INDEX_BYTES ? weft_fail(WEFT_FORMAT, "%zu bytes are too many for an index", file->bytes) : WEFT_OK;
    if (status == WEFT_OK) status = parse_index(&scan, &map);
    if (status == WEFT_OK) status = open_shards(self, &map);
    free_map(&map);
    WEFT_RELEASE(file);
    if (status == WEFT_OK) qsort(self->entries, self->count, sizeof *self->entries, by_name);
    for (size_t i = 1; i < self->count && status == WEFT_OK; i++)
        if (by_name(&self->entries[i - 1], &self->entries[i]) == 0)
            status = weft_fail(WEFT_FORMAT, "tensor '%s' is mapped twice", self->entries[i].tensor->name);
    if (status == WEFT_OK) status = check_unique(self);
    /* A shard's own failure names its file already. */
    if (status != WEFT_OK && strncmp(weft_error_message(), self->path, strlen(self->path)) != 0)
        return weft_fail(status, "%s: %s", path, weft_error_message());
    return status;
}

/* ---- opening ---- */

static weft_status open_single(weft_checkpoint *self, const char *path)
{
    size_t number;
    WEFT_TRY(open_file(self, path, &number));
    const weft_safetensors *file = self->files[number];
    self->entries = calloc(file->count + 1, sizeof *self->entries);
    if (self->entries == NULL) return weft_fail(WEFT_MEMORY, "no memory for %zu names", file->count);
    for (size_t i = 0; i < file->count; i++) self->entries[self->count++] = (weft_checkpoint_entry){file, &file->entries[i]};
    return WEFT_OK;
}

static weft_status open_folder(weft_checkpoint *self)
{
    static const char *const others[] = {"pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "consolidated.safetensors"};
    char path[4096];
    WEFT_TRY(join(self->path, "model.safetensors", path, sizeof path));
    if (weft_file_kind(path) == 1) return open_single(self, path);
    WEFT_TRY(join(self->path, "model.safetensors.index.json", path, sizeof path));
    if (weft_file_kind(path) == 1) return open_index(self, path);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        WEFT_TRY(join(self->path, others[i], path, sizeof path));
        if (weft_file_kind(path) == 1)
            return weft_fail(WEFT_IO, "%s: holds %s, which weft does not read; it wants model.safetensors or model.safetensors.index.json",
                             self->path, others[i]);
    }
    char gguf[256];
    if (weft_file_find_ending(self->path, ".gguf", gguf, sizeof gguf))
        return weft_fail(WEFT_IO, "%s: holds %s, and weft does not read GGUF files; it wants model.safetensors or model.safetensors.index.json",
                         self->path, gguf);
    return weft_fail(WEFT_IO, "%s: neither model.safetensors nor model.safetensors.index.json is there", self->path);
}

static weft_status create(weft_checkpoint **out, const char *path)
{
    weft_checkpoint *self = calloc(1, sizeof *self);
    char *copy = strdup(path);
    if (self == NULL || copy == NULL) {
        free(self);
        free(copy);
        return weft_fail(WEFT_MEMORY, "no memory for a checkpoint");
    }
    size_t length = strlen(copy);
    while (length > 1 && copy[length - 1] == '/') copy[--length] = 0;
    weft_object_init(&self->object, checkpoint_destroy);
    self->path = copy;
    *out = self;
    return WEFT_OK;
}

weft_status weft_checkpoint_open(weft_checkpoint **out, const char *path)
{
    weft_checkpoint *self;
    WEFT_TRY(create(&self, path));
    int kind = weft_file_kind(self->path);
    weft_status status = kind == 2 ? open_folder(self) : open_single(self, self->path);
    if (status != WEFT_OK) {
        weft_object_release(&self->object);
        return status;
    }
    for (size_t i = 0; i < self->count; i++) self->bytes += self->entries[i].tensor->end - self->entries[i].tensor->begin;
    *out = self;
    return WEFT_OK;
}

weft_status weft_checkpoint_create_dummy(weft_checkpoint **out)
{
    WEFT_TRY(create(out, "dummy weights"));
    (*out)->dummy = 1;
    return WEFT_OK;
}

/* ---- finding ---- */

const weft_checkpoint_entry *weft_checkpoint_find(const weft_checkpoint *checkpoint, const char *name)
{
    weft_safetensors_entry tensor = {.name = (char *)name};
    weft_checkpoint_entry key = {NULL, &tensor};
    if (checkpoint->count == 0) return NULL;
    return bsearch(&key, checkpoint->entries, checkpoint->count, sizeof key, by_name);
}

/* `end` is the whole of text, or stands behind one of its dots. */
static int ends_with_name(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0 && (n == m || text[n - m - 1] == '.');
}

/* Often only a prefix differs ("model.", "language_model."): a name that ends alike is the best hint. */
static weft_status missing(const weft_checkpoint *checkpoint, const char *name)
{
    for (size_t i = 0; i < checkpoint->count; i++) {
        const char *there = checkpoint->entries[i].tensor->name;
        if (ends_with_name(there, name) || ends_with_name(name, there))
            return weft_fail(WEFT_FORMAT, "tensor '%s' is not in %s; '%s' is", name, checkpoint->path, there);
    }
    if (checkpoint->count == 0) return weft_fail(WEFT_FORMAT, "tensor '%s' is not in %s; it holds no tensors", name, checkpoint->path);
    return weft_fail(WEFT_FORMAT, "tensor '%s' is not in %s; it holds %zu tensors, from '%s' to '%s'", name, checkpoint->path, checkpoint->count,
                     checkpoint->entries[0].tensor->name, checkpoint->entries[checkpoint->count - 1].tensor->name);
}

weft_status weft_checkpoint_source(weft_source **out, const weft_checkpoint *checkpoint, const char *name)
{
    const weft_checkpoint_entry *entry = weft_checkpoint_find(checkpoint, name);
    if (entry == NULL) return missing(checkpoint, name);
    const weft_safetensors_entry *tensor = entry->tensor;
    int64_t shape[WEFT_SOURCE_MAX_DIMS];
    if (tensor->dtype < 0)
        return weft_fail(WEFT_UNSUPPORTED, "%s: dtype %s of tensor '%s' is not one weft reads (F32, BF16, F16, I32, F8_E4M3, U8)",
                         entry->file->file->path, tensor->type, name);
    if (tensor->ndim > WEFT_SOURCE_MAX_DIMS)
        return weft_fail(WEFT_UNSUPPORTED, "%s: tensor '%s' has %d dimensions; weft reads at most %d", entry->file->file->path, name,
                         tensor->ndim, WEFT_SOURCE_MAX_DIMS);
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] > INT64_MAX) return weft_fail(WEFT_UNSUPPORTED, "tensor '%s': a dimension of %" PRIu64, name, tensor->shape[i]);
        shape[i] = (int64_t)tensor->shape[i];
    }
    return weft_source_create(out, name, (weft_dtype)tensor->dtype, tensor->ndim, shape, entry->file->data + tensor->begin,
                              (weft_object *)&entry->file->object);
}
