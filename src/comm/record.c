/* comm/record.c - one flat record from rank 0 to all others, once a step. */
#include <stdlib.h>
#include <string.h>

#include "comm/internal.h"

static int all_taken(uint32_t word, uint32_t argument)
{
    (void)argument;
    return word == 0;
}

static int is_new(uint32_t word, uint32_t seen)
{
    return word != seen;
}

/* The first rank that has not taken the last record. */
static int slow_receiver(void *context)
{
    weft_world *world = context;
    uint32_t number = atomic_load_explicit(&world->published.word, memory_order_relaxed);
    for (int r = 1; r < world->world_size; r++)
        if (atomic_load_explicit(&world->presence[r].received, memory_order_relaxed) != number) return r;
    return -1;
}

static int publisher(void *context)
{
    (void)context;
    return 0;
}

static weft_status reserve(void **block, size_t *capacity, size_t bytes)
{
    if (bytes <= *capacity) return WEFT_OK;
    void *larger = realloc(*block, bytes);
    if (larger == NULL) return weft_fail(WEFT_MEMORY, "no memory for a step record of %zu bytes", bytes);
    *block = larger;
    *capacity = bytes;
    return WEFT_OK;
}

static void note(weft_rank *rank, weft__op op, uint32_t number)
{
    weft__note_call(rank->world, rank->rank, &(weft__call){.op = op, .sequence = number}, NULL);
}

weft_status weft_world_publish(weft_rank *rank, const void *record, size_t bytes)
{
    weft_world *world = rank->world;
    if (rank->rank != 0) return weft_fail(WEFT_INVALID, "only rank 0 publishes, this is rank %d", rank->rank);
    if (rank->world_size > 1) WEFT_TRY(weft__check_company(rank, "a step record"));
    uint32_t number = atomic_load_explicit(&world->published.word, memory_order_relaxed) + 1;
    note(rank, WEFT__OP_PUBLISH, number);
    WEFT_TRY(weft_world_check(world));
    weft__wait wait = {.gate = &world->pending, .ready = all_taken, .silent = slow_receiver, .context = world};
    int silent = -1;
    weft__waited how = weft__wait_for(world, 0, &wait, &silent);
    if (how != WEFT__READY) return weft__wait_failed(world, 0, how, silent);
    if (world->world_size == 1) return WEFT_OK;
    WEFT_TRY(reserve(&world->record, &world->record_capacity, bytes));
    if (bytes > 0) memcpy(world->record, record, bytes);
    world->record_bytes = bytes;
    atomic_store_explicit(&world->pending.word, (uint32_t)world->world_size - 1, memory_order_relaxed);
    atomic_store(&world->published.word, number);
    weft__wake(&world->published);
    return WEFT_OK;
}

weft_status weft_world_receive(weft_rank *rank, const void **record, size_t *bytes)
{
    weft_world *world = rank->world;
    if (rank->rank == 0) return weft_fail(WEFT_INVALID, "rank 0 publishes; it does not receive");
    WEFT_TRY(weft__check_company(rank, "a step record"));
    weft__presence *me = &world->presence[rank->rank];
    uint32_t seen = atomic_load_explicit(&me->received, memory_order_relaxed);
    note(rank, WEFT__OP_RECEIVE, seen + 1);
    /* No limit: rank 0 may sit at a prompt for hours. */
    weft__wait wait = {.gate = &world->published, .ready = is_new, .argument = seen, .silent = publisher, .no_timeout = 1};
    int silent = -1;
    weft__waited how = weft__wait_for(world, rank->rank, &wait, &silent);
    if (how != WEFT__READY) return weft__wait_failed(world, rank->rank, how, silent);
    WEFT_TRY(reserve(&rank->record, &rank->record_capacity, world->record_bytes > 0 ? world->record_bytes : 1));
    if (world->record_bytes > 0) memcpy(rank->record, world->record, world->record_bytes);
    *record = rank->record;
    *bytes = world->record_bytes;
    atomic_store_explicit(&me->received, seen + 1, memory_order_relaxed);
    if (atomic_fetch_sub(&world->pending.word, 1) == 1) weft__wake(&world->pending);
    return WEFT_OK;
}
