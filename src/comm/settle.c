/* comm/settle.c - how all ranks leave one evaluation, and how a failure in it is taken back.
 *
 * Once every rank has come here, none is inside a collective or a record: arrivals at barriers have
 * been withdrawn (wait.c), so what is left to repair are counts that ran apart. */
#include <stdio.h>
#include <string.h>

#include "comm/internal.h"

void weft_world_begin_evaluation(weft_world *world)
{
    pthread_mutex_lock(&world->lock);
    world->evaluating = world->has_evaluated = 1;
    if (world->interrupt_waits) weft__abort_locked(world, 0, WEFT_INTERRUPTED, "interrupted");
    world->interrupt_waits = 0;
    pthread_mutex_unlock(&world->lock);
}

int weft_world_interrupt_evaluation(weft_world *world)
{
    pthread_mutex_lock(&world->lock);
    int state = 0;
    if (world->evaluating || !world->has_evaluated) {
        int first = weft__abort_locked(world, 0, WEFT_INTERRUPTED, "interrupted");
        state = first && world->evaluating ? 1 : 2;
    } else {
        world->interrupt_waits = 1;
    }
    pthread_mutex_unlock(&world->lock);
    return state;
}

int weft_world_forget_interrupt(weft_world *world)
{
    pthread_mutex_lock(&world->lock);
    int waited = world->interrupt_waits;
    world->interrupt_waits = 0;
    pthread_mutex_unlock(&world->lock);
    return waited;
}

void weft_world_leave(weft_world *world)
{
    atomic_fetch_add(&world->left, 1);
}

weft_status weft__check_company(const weft_rank *rank, const char *what)
{
    if (!rank->alone) return WEFT_OK;
    return weft_fail(WEFT_INVALID, "%s needs other ranks, and only rank %d evaluates this line; leave out @%d, or write @*", what,
                     rank->rank, rank->rank);
}

/* Under the lock, by the last rank to come. */
static void repair(weft_world *world)
{
    world->outcome = (weft_outcome){.rank = -1};
    if (atomic_load(&world->aborted.word) != 0) {
        world->outcome.rank = world->failed_rank;
        world->outcome.code = world->failed_code;
        snprintf(world->outcome.message, sizeof world->outcome.message, "%s", world->failure);
        world->failed_rank = -1;
        atomic_fetch_add(&world->life, 1);
        atomic_store(&world->aborted.word, 0);
    }
    atomic_store(&world->pending.word, 0);
    for (int r = 0; r < world->world_size; r++) {
        weft__presence *p = &world->presence[r];
        atomic_store(&p->received, atomic_load(&world->published.word));
        atomic_store(&p->group_name, NULL);
        atomic_store(&p->sequence, 0);
    }
    /* A group that only some members made stays without use: the next one of its key is a new one. */
    for (weft__key *k = world->keys; k != NULL; k = k->next) {
        unsigned most = 0;
        for (int m = 0; m < k->size; m++) most = k->created[m] > most ? k->created[m] : most;
        for (int m = 0; m < k->size; m++) k->created[m] = most;
    }
    world->evaluating = 0;
    world->arrived = 0;
}

/* Takes the arrival back, unless the last rank has come after all. */
static int withdraw(weft_world *world, uint32_t number)
{
    pthread_mutex_lock(&world->lock);
    int still = atomic_load(&world->settled.word) == number;
    if (still) world->arrived--;
    pthread_mutex_unlock(&world->lock);
    return still;
}

weft_status weft_world_settle(weft_rank *rank, weft_outcome *out)
{
    weft_world *world = rank->world;
    rank->alone = 0;
    weft__note_progress(world, rank->rank);
    pthread_mutex_lock(&world->lock);
    uint32_t number = atomic_load(&world->settled.word);
    if (++world->arrived == world->world_size) {
        repair(world);
        atomic_store(&world->settled.word, number + 1);
        weft__wake(&world->settled);
    }
    pthread_mutex_unlock(&world->lock);

    double aborted_at = 0;
    while (atomic_load(&world->settled.word) == number) {
        if (atomic_load(&world->aborted.word) != 0) {
            if (aborted_at == 0) aborted_at = weft__now();
            int ended = atomic_load(&world->left) > 0, late = weft__now() - aborted_at > world->timeout;
            if ((ended || late) && withdraw(world, number)) {
                weft_status status = weft_world_check(world);
                if (ended) return status;
                return weft_fail(WEFT_TIMEOUT, "a rank does not come back within %.3g s of the failure: %s", world->timeout,
                                 weft_error_message());
            }
        }
        weft__sleep(&world->settled, number, 0.05);
    }
    *out = world->outcome; /* the next one is not written before this rank settles again */
    if (out->rank < 0) return WEFT_OK;
    WEFT_TRY(weft__nccl_recover(rank));
    return weft__peers_recover(rank);
}
