/* comm/world.c - the ranks of a process, their common abort, and what one rank owns. */
#include "comm/world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/internal.h"

static void destroy_world(weft_object *object)
{
    weft_world *world = (weft_world *)object;
    for (weft__shared *s = world->shared, *next; s != NULL; s = next) {
        next = s->next;
        weft__shared_free(s);
    }
    for (weft__key *k = world->keys, *next; k != NULL; k = next) {
        next = k->next;
        weft__key_free(k);
    }
    pthread_mutex_destroy(&world->lock);
    weft_cuda_words_free(world->halt);
    free(world->record);
    free(world->presence);
    free(world);
}

weft_status weft_world_create(weft_world **out, const weft_world_options *options)
{
    int size = options->world_size;
    if (size < 1 || size > WEFT__MAX_RANKS)
        return weft_fail(WEFT_INVALID, "a world has 1 to %d ranks, got %d", WEFT__MAX_RANKS, size);
    if (options->total_threads < 0) return weft_fail(WEFT_INVALID, "total_threads must not be negative, got %d", options->total_threads);
    if (!(options->timeout_seconds >= 0)) return weft_fail(WEFT_INVALID, "the timeout must not be negative, got %g", options->timeout_seconds);
    weft__fault fault;
    WEFT_TRY(weft__fault_parse(&fault, options->fault, size));

    weft_world *world = aligned_alloc(WEFT__CACHE_LINE, sizeof *world);
    weft__presence *presence = aligned_alloc(WEFT__CACHE_LINE, (size_t)size * sizeof *presence);
    if (world == NULL || presence == NULL) {
        free(world);
        free(presence);
        return weft_fail(WEFT_MEMORY, "no memory for a world of %d ranks", size);
    }
    memset(world, 0, sizeof *world);
    memset(presence, 0, (size_t)size * sizeof *presence);
    for (int r = 0; r < size; r++) {
        atomic_init(&presence[r].waiting_on, -1);
        presence[r].spins = 1000;
    }
    int cores = weft_cpu_cores();
    int total = options->total_threads > 0 ? options->total_threads : cores;
    world->world_size = size;
    world->threads_per_rank = total / size > 1 ? total / size : 1;
    world->spin = world->threads_per_rank * size <= cores;
    world->timeout = options->timeout_seconds > 0 ? options->timeout_seconds : 300;
    world->fault = fault;
    const char *check = getenv("WEFT_CHECK");
    world->check = check != NULL && strcmp(check, "1") == 0;
    world->presence = presence;
    world->failed_rank = -1;
    pthread_mutex_init(&world->lock, NULL);
    weft_object_init(&world->object, destroy_world);
    *out = world;
    return WEFT_OK;
}

void weft_world_release(weft_world *world)
{
    if (world != NULL) weft_object_release(&world->object);
}

int weft_world_size(const weft_world *world)
{
    return world->world_size;
}

int weft__abort_locked(weft_world *world, int rank, weft_status code, const char *message)
{
    if (atomic_load(&world->aborted.word) != 0) {
        /* All ranks fail alike: the lowest speaks for them. */
        if (rank < world->failed_rank && strcmp(world->failure, message) == 0) world->failed_rank = rank;
        return 0;
    }
    world->failed_rank = rank;
    world->failed_code = code;
    snprintf(world->failure, sizeof world->failure, "%s", message);
    atomic_store(&world->aborted.word, 1);
    weft__peers_halt(world, 1);
    weft__wake(&world->aborted);
    weft__wake(&world->published);
    weft__wake(&world->pending);
    for (weft__shared *s = world->shared; s != NULL; s = s->next) weft__wake(&s->gate);
    return 1;
}

void weft_world_abort(weft_world *world, int rank, weft_status code, const char *message)
{
    pthread_mutex_lock(&world->lock);
    weft__abort_locked(world, rank, code, message);
    pthread_mutex_unlock(&world->lock);
}

void weft_world_interrupt(weft_world *world)
{
    weft_world_abort(world, 0, WEFT_INTERRUPTED, "interrupted");
}

weft_status weft_world_check(weft_world *world)
{
    if (atomic_load_explicit(&world->aborted.word, memory_order_acquire) == 0) return WEFT_OK;
    pthread_mutex_lock(&world->lock); /* an abort may just be taken back */
    weft_status status = WEFT_OK;
    if (world->failed_rank >= 0 && world->failed_code == WEFT_INTERRUPTED) status = weft_fail(WEFT_INTERRUPTED, "%s", world->failure);
    else if (world->failed_rank >= 0) status = weft_fail(WEFT_ABORTED, "rank %d: %s", world->failed_rank, world->failure);
    pthread_mutex_unlock(&world->lock);
    return status;
}

int weft_world_failure(weft_world *world, weft_status *code, const char **message)
{
    if (atomic_load_explicit(&world->aborted.word, memory_order_acquire) == 0) return -1;
    *code = world->failed_code;
    *message = world->failure;
    return world->failed_rank;
}

int weft_world_spans_gpus(weft_world *world)
{
    pthread_mutex_lock(&world->lock);
    int spans = world->nccls != NULL;
    pthread_mutex_unlock(&world->lock);
    return spans;
}

/* ---- a rank ---- */

static void destroy_rank(weft_object *object)
{
    weft_rank *rank = (weft_rank *)object;
    weft__forget_groups(rank);
    weft__nccl_clear(rank, 0);
    if (rank->everyone != NULL) weft_group_release(rank->everyone);
    weft_pool_destroy(rank->pool);
    if (rank->arena != NULL) weft_arena_release(rank->arena);
    WEFT_RELEASE(rank->step_buffer);
    if (rank->cuda != NULL) weft_cuda_watch(rank->cuda, NULL, NULL, NULL, 5); /* the world may go before its tensors */
    WEFT_RELEASE(rank->device_memory);
    weft_cuda_release(rank->cuda);
    WEFT_RELEASE(rank->memory);
    weft_world_release(rank->world);
    free(rank->known_table.words);
    free(rank->record);
    free(rank);
}

static weft_status fill_rank(weft_rank *rank, int threads, int spin)
{
    weft_world *world = rank->world;
    WEFT_TRY(weft_memory_create(&rank->memory, 0));
    rank->device_memory = WEFT_RETAIN(rank->memory);
    WEFT_TRY(weft_arena_create(&rank->arena, rank->memory));
    WEFT_TRY(weft_pool_create(&rank->pool, threads, spin));
    int *ranks = malloc((size_t)world->world_size * sizeof *ranks);
    if (ranks == NULL) return weft_fail(WEFT_MEMORY, "no memory for a list of ranks");
    for (int r = 0; r < world->world_size; r++) ranks[r] = r;
    weft_status status = weft__group_create(&rank->everyone, rank, WEFT_GROUP_TENSOR, ranks, world->world_size, "world");
    free(ranks);
    return status;
}

static weft_status create_rank(weft_rank **out, weft_world *world, int index, int threads, int spin)
{
    weft_rank *rank = calloc(1, sizeof *rank);
    if (rank == NULL) return weft_fail(WEFT_MEMORY, "no memory for a rank");
    weft_object_init(&rank->object, destroy_rank);
    rank->world = WEFT_RETAIN(world);
    rank->rank = index;
    rank->world_size = world->world_size;
    weft_status status = fill_rank(rank, threads, spin);
    if (status != WEFT_OK) {
        weft_rank_release(rank);
        return status;
    }
    *out = rank;
    return WEFT_OK;
}

weft_status weft_rank_create(weft_rank **out, weft_world *world, int rank)
{
    if (rank < 0 || rank >= world->world_size)
        return weft_fail(WEFT_INVALID, "rank must be in [0, %d), got %d", world->world_size, rank);
    if (atomic_exchange(&world->presence[rank].created, 1) != 0) return weft_fail(WEFT_INVALID, "rank %d exists already", rank);
    return create_rank(out, world, rank, world->threads_per_rank, world->spin);
}

weft_status weft_rank_create_single(weft_rank **out, int threads)
{
    weft_world *world = NULL;
    WEFT_TRY(weft_world_create(&world, &(weft_world_options){.world_size = 1, .total_threads = threads}));
    weft_status status = weft_rank_create(out, world, 0);
    weft_world_release(world);
    return status;
}

void weft_rank_release(weft_rank *rank)
{
    if (rank != NULL) weft_object_release(&rank->object);
}

/* What every wait for the GPU also watches. */
static weft_status check_world(void *context)
{
    weft_rank *rank = context;
    WEFT_TRY(weft_world_check(rank->world));
    WEFT_TRY(weft__peers_check(rank));
    return weft__check_groups(rank);
}

weft_status weft__blame(weft_world *world, int rank)
{
    int silent = -1;
    unsigned long long least = 0;
    for (int r = 0; r < world->world_size; r++) {
        unsigned long long progress = atomic_load_explicit(&world->presence[r].progress, memory_order_relaxed);
        if (r == rank || (silent >= 0 && progress >= least)) continue;
        silent = r;
        least = progress;
    }
    return silent < 0 ? WEFT_OK : weft__wait_failed(world, rank, WEFT__TIMED_OUT, silent);
}

static weft_status blame(void *context)
{
    weft_rank *rank = context;
    return weft__blame(rank->world, rank->rank);
}

weft_status weft_rank_use_cuda(weft_rank *rank, int index, long long limit_bytes)
{
    if (rank->cuda != NULL) return weft_fail(WEFT_INVALID, "rank %d uses GPU %d already", rank->rank, weft_cuda_index(rank->cuda));
    weft_cuda *cuda = NULL;
    weft_memory *memory = NULL;
    weft_arena *arena = NULL;
    WEFT_TRY(weft_cuda_open(&cuda, index));
    weft_status status = weft_memory_create_cuda(&memory, cuda, limit_bytes);
    if (status == WEFT_OK) status = weft_arena_create(&arena, memory);
    if (status != WEFT_OK) {
        WEFT_RELEASE(memory);
        weft_cuda_release(cuda);
        return status;
    }
    weft_cuda_watch(cuda, check_world, blame, rank, rank->world->timeout);
    weft_arena_release(rank->arena);
    WEFT_RELEASE(rank->device_memory);
    rank->arena = arena;
    rank->device_memory = memory;
    rank->cuda = cuda;
    return WEFT_OK;
}

weft_status weft_rank_begin_step(weft_rank *rank)
{
    rank->step++;
    weft__note_progress(rank->world, rank->rank);
    weft_arena_begin_step(rank->arena);
    WEFT_TRY(weft_world_check(rank->world));
    return weft_rank_fault(rank, "step");
}
