/* device/arena.c - a bump allocator of three parts; chunks stay, so that a warm step allocates nothing. */
#include "device/arena.h"

#include <stdlib.h>

enum { MIN_CHUNK = 1 << 20, MAX_CHUNKS = 64 };

typedef struct {
    weft_storage *chunks[MAX_CHUNKS];
    int count, current;
    size_t used; /* of the current chunk */
    uint64_t epoch;
} part;

struct weft_arena {
    weft_object object;
    weft_memory *memory;
    part parts[WEFT_ARENA_PARTS];
    int current;
    size_t bytes;
};

static void destroy(weft_object *object)
{
    weft_arena *arena = (weft_arena *)object;
    for (int p = 0; p < WEFT_ARENA_PARTS; p++)
        for (int i = 0; i < arena->parts[p].count; i++) WEFT_RELEASE(arena->parts[p].chunks[i]);
    WEFT_RELEASE(arena->memory);
    free(arena);
}

weft_status weft_arena_create(weft_arena **out, weft_memory *memory)
{
    weft_arena *arena = calloc(1, sizeof *arena);
    if (arena == NULL) return weft_fail(WEFT_MEMORY, "no memory for an arena");
    weft_object_init(&arena->object, destroy);
    arena->memory = WEFT_RETAIN(memory);
    *out = arena;
    return WEFT_OK;
}

void weft_arena_release(weft_arena *arena)
{
    WEFT_RELEASE(arena);
}

static void reset(part *p)
{
    p->current = 0;
    p->used = 0;
    p->epoch++;
}

void weft_arena_begin_step(weft_arena *arena)
{
    for (int p = 0; p < WEFT_ARENA_PARTS; p++) reset(&arena->parts[p]);
    arena->current = WEFT_ARENA_STEP;
}

void weft_arena_next_layer(weft_arena *arena)
{
    arena->current = arena->current == WEFT_ARENA_EVEN ? WEFT_ARENA_ODD : WEFT_ARENA_EVEN;
    reset(&arena->parts[arena->current]);
}

void weft_arena_end_layers(weft_arena *arena)
{
    arena->current = WEFT_ARENA_STEP;
}

static weft_status grow(weft_arena *arena, part *p, size_t bytes)
{
    if (p->count == MAX_CHUNKS) return weft_fail(WEFT_MEMORY, "a step needs more than %d chunks of its arena", MAX_CHUNKS);
    size_t size = p->count ? 2 * p->chunks[p->count - 1]->bytes : MIN_CHUNK;
    if (size > ((size_t)64 << 20)) size = (size_t)64 << 20;
    if (size < bytes) size = bytes;
    weft_tensor *chunk;
    WEFT_TRY(weft_tensor_create(&chunk, arena->memory, WEFT_U8, 1, (int64_t[]){(int64_t)size}));
    p->chunks[p->count++] = WEFT_RETAIN(chunk->storage);
    WEFT_RELEASE(chunk);
    arena->bytes += size;
    return WEFT_OK;
}

static weft_status take(weft_arena *arena, int which, size_t bytes, weft_storage **storage, void **data)
{
    part *p = &arena->parts[which];
    size_t rounded = (bytes + 63) / 64 * 64;
    if (rounded < bytes) return weft_fail(WEFT_MEMORY, "%zu bytes is more than this machine can address", bytes);
    while (p->current < p->count && p->used + rounded > p->chunks[p->current]->bytes) {
        p->current++;
        p->used = 0;
    }
    if (p->current == p->count) WEFT_TRY(grow(arena, p, rounded));
    *storage = p->chunks[p->current];
    *data = (char *)(*storage)->data + p->used;
    p->used += rounded;
    return WEFT_OK;
}

weft_status weft_arena_tensor_in(weft_arena *arena, int which, weft_tensor **out, weft_dtype dtype, int ndim,
                                 const int64_t *shape)
{
    weft_tensor *tensor;
    WEFT_TRY(weft_tensor_wrap(&tensor, NULL, NULL, dtype, ndim, shape));
    weft_storage *storage;
    weft_status status = take(arena, which, tensor->storage->bytes, &storage, &tensor->data);
    if (status != WEFT_OK) {
        WEFT_RELEASE(tensor);
        return status;
    }
    WEFT_RELEASE(tensor->storage);
    tensor->storage = WEFT_RETAIN(storage);
    tensor->arena = WEFT_RETAIN(arena);
    tensor->arena_part = which;
    tensor->epoch = arena->parts[which].epoch;
    *out = tensor;
    return WEFT_OK;
}

weft_status weft_arena_tensor(weft_arena *arena, weft_tensor **out, weft_dtype dtype, int ndim, const int64_t *shape)
{
    return weft_arena_tensor_in(arena, arena->current, out, dtype, ndim, shape);
}

weft_status weft_arena_scratch(weft_arena *arena, size_t bytes, void **out)
{
    weft_storage *storage;
    return take(arena, arena->current, bytes, &storage, out);
}

size_t weft_arena_bytes(const weft_arena *arena)
{
    return arena->bytes;
}

uint64_t weft_arena_epoch(const weft_arena *arena, int which)
{
    return arena->parts[which].epoch;
}
