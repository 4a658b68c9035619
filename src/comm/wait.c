/* comm/wait.c - how a rank waits: a short spin, then sleep; always with an eye on the world. */
#include <errno.h>
#include <linux/futex.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "comm/internal.h"

enum { MOST_SPINS = 4000, LEAST_SPINS = 64 };

/* Sleeps end after this many seconds to look at the clock and at the abort flag once more: an
 * abort wakes all sleepers, but one that was just about to sleep may miss it. */
#define SLICE 0.05

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

double weft__now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void weft__sleep(weft__gate *gate, uint32_t word, double seconds)
{
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    atomic_fetch_add(&gate->sleepers, 1);
    syscall(SYS_futex, &gate->word, FUTEX_WAIT_PRIVATE, word, &t, NULL, 0);
    atomic_fetch_sub(&gate->sleepers, 1);
}

void weft__wake(weft__gate *gate)
{
    if (atomic_load(&gate->sleepers) != 0) syscall(SYS_futex, &gate->word, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
}

/* The clock of a wait starts again whenever the rank that is waited for changes or shows life. */
typedef struct patience {
    int silent;
    unsigned long long progress;
    double since;
} patience;

static int out_of_patience(patience *p, weft_world *world, const weft__wait *wait)
{
    int silent = wait->silent(wait->context);
    unsigned long long progress = silent < 0 ? 0 : atomic_load_explicit(&world->presence[silent].progress, memory_order_relaxed);
    double now = weft__now();
    if (silent < 0 || silent != p->silent || progress != p->progress) *p = (patience){silent, progress, now};
    return now - p->since >= world->timeout;
}

/* Spinning pays only while the other one runs on another core, which other programs may prevent. So
 * each rank spins less behind a spin that was in vain, and more again behind one that was not. */
static int spin(weft_world *world, int rank, const weft__wait *wait)
{
    int *limit = &world->presence[rank].spins;
    for (int i = 0; i < *limit; i++) {
        if (wait->ready(atomic_load_explicit(&wait->gate->word, memory_order_acquire), wait->argument)) {
            *limit = *limit + *limit / 4 < MOST_SPINS ? *limit + *limit / 4 : MOST_SPINS;
            return 1;
        }
        relax();
    }
    *limit = *limit / 2 > LEAST_SPINS ? *limit / 2 : LEAST_SPINS;
    return 0;
}

weft__waited weft__wait_for(weft_world *world, int rank, const weft__wait *wait, int *silent)
{
    weft__gate *gate = wait->gate;
    if (world->spin && spin(world, rank, wait)) return WEFT__READY;
    patience p = {-2, 0, 0};
    atomic_store_explicit(&world->presence[rank].in_wait, !wait->no_timeout, memory_order_relaxed);
    double slice = world->timeout / 4 < SLICE ? world->timeout / 4 : SLICE;
    weft__waited result = WEFT__READY;
    for (;;) {
        uint32_t word = atomic_load(&gate->word);
        if (wait->ready(word, wait->argument)) break;
        if (!wait->certain) {
            if (atomic_load(&world->aborted.word) != 0) {
                result = WEFT__ABORTED;
                break;
            }
            int impatient = out_of_patience(&p, world, wait);
            atomic_store_explicit(&world->presence[rank].waiting_on, p.silent, memory_order_relaxed);
            if (impatient && !wait->no_timeout) {
                *silent = p.silent;
                result = WEFT__TIMED_OUT;
                break;
            }
        }
        weft__sleep(gate, word, slice);
    }
    atomic_store_explicit(&world->presence[rank].waiting_on, -1, memory_order_relaxed);
    atomic_store_explicit(&world->presence[rank].in_wait, 0, memory_order_relaxed);
    return result;
}

void weft__note_progress(weft_world *world, int rank)
{
    atomic_fetch_add_explicit(&world->presence[rank].progress, 1, memory_order_relaxed);
}

void weft__note_call(weft_world *world, int rank, const weft__call *call, const char *group_name)
{
    weft__presence *p = &world->presence[rank];
    atomic_store_explicit(&p->op, (int)call->op, memory_order_relaxed);
    atomic_store_explicit(&p->reduce, (int)call->reduce, memory_order_relaxed);
    atomic_store_explicit(&p->dtype, (int)call->dtype, memory_order_relaxed);
    atomic_store_explicit(&p->root, call->root, memory_order_relaxed);
    atomic_store_explicit(&p->count, call->count, memory_order_relaxed);
    atomic_store_explicit(&p->sequence, call->sequence, memory_order_relaxed);
    atomic_store_explicit(&p->group_name, group_name, memory_order_relaxed);
    weft__note_progress(world, rank);
}

const char *weft__describe_call(const weft__call *call, char *text, size_t size)
{
    static const char *const names[] = {"nothing",    "barrier",   "close",   "all_reduce", "all_gather", "reduce_scatter",
                                        "all_to_all", "broadcast", "norm", "exchange", "publish", "receive"};
    const char *name = names[call->op], *dtype = weft_dtype_name(call->dtype);
    const char *reduce = call->reduce == WEFT_REDUCE_MAX ? "max" : "sum";
    long long count = (long long)call->count;
    char rows[40] = "";
    if (call->rows > 1) snprintf(rows, sizeof rows, " in %lld rows", (long long)call->rows);
    switch (call->op) {
    case WEFT__OP_ALL_REDUCE:
    case WEFT__OP_REDUCE_SCATTER: snprintf(text, size, "%s %s of %lld %s%s", name, reduce, count, dtype, rows); break;
    case WEFT__OP_ALL_GATHER:
    case WEFT__OP_NORM:
    case WEFT__OP_EXCHANGE:
    case WEFT__OP_ALL_TO_ALL: snprintf(text, size, "%s of %lld %s%s", name, count, dtype, rows); break;
    case WEFT__OP_BROADCAST: snprintf(text, size, "%s of %lld %s from member %d", name, count, dtype, call->root); break;
    default: snprintf(text, size, "%s", name);
    }
    return text;
}

/* "all_reduce sum of 64 float32 (number 7 of tensor {0,1})", "none" */
static const char *describe_last(weft_world *world, int rank, char *text, size_t size)
{
    weft__presence *p = &world->presence[rank];
    weft__call call = {
        .sequence = atomic_load_explicit(&p->sequence, memory_order_relaxed),
        .count = atomic_load_explicit(&p->count, memory_order_relaxed),
        .op = (weft__op)atomic_load_explicit(&p->op, memory_order_relaxed),
        .reduce = (weft_reduce)atomic_load_explicit(&p->reduce, memory_order_relaxed),
        .dtype = (weft_dtype)atomic_load_explicit(&p->dtype, memory_order_relaxed),
        .root = atomic_load_explicit(&p->root, memory_order_relaxed),
    };
    const char *group = atomic_load_explicit(&p->group_name, memory_order_relaxed);
    char what[120];
    weft__describe_call(&call, what, sizeof what);
    if (call.op == WEFT__OP_NONE) snprintf(text, size, "none");
    else if (group == NULL) snprintf(text, size, "%s (step record %llu)", what, (unsigned long long)call.sequence);
    else snprintf(text, size, "%s (number %llu of %s)", what, (unsigned long long)call.sequence, group);
    return text;
}

weft_status weft__wait_failed(weft_world *world, int rank, weft__waited how, int silent)
{
    if (how == WEFT__ABORTED) return weft_world_check(world);
    /* The one we wait for may itself wait: the one behind it all is to blame. In a ring of waits,
     * it is the first. */
    int culprit = silent;
    for (int i = 0; i < world->world_size; i++) {
        int next = atomic_load_explicit(&world->presence[culprit].waiting_on, memory_order_relaxed);
        if (next < 0) break;
        culprit = next;
        if (next == rank) {
            culprit = silent;
            break;
        }
    }
    char mine[400], its[400];
    char text[WEFT__MESSAGE_BYTES];
    snprintf(text, sizeof text, "no sign of life for %.3g s: rank %d waits in %s, and the last collective of rank %d was %s; if it is only slow, raise --timeout",
             world->timeout, rank, describe_last(world, rank, mine, sizeof mine), culprit,
             describe_last(world, culprit, its, sizeof its));
    weft_world_abort(world, culprit, WEFT_TIMEOUT, text);
    /* Another failure may have come first: then that one is the reason. */
    return weft_world_check(world);
}
