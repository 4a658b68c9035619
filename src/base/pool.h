/* base/pool.h - a rank's own worker threads.
 *
 * The cores of the process are shared out over its ranks once, at start: each rank's pool has
 * max(1, cores / ranks) threads, the rank's own thread being one of them. */
#pragma once

#include "base/status.h"

typedef struct weft_pool weft_pool;

/* One part of a job: `part` of `parts`, called on some thread of the pool. `parts` is the number
 * of threads; a job cuts its work by weft_pool_range. It must not fail and must not use the pool. */
typedef void (*weft_pool_job)(void *context, int part, int parts);

/* threads >= 1; a pool of one runs jobs on the caller. spin: workers spin briefly before they
 * sleep (only sensible when the process has no more threads than cores). */
weft_status weft_pool_create(weft_pool **out, int threads, int spin);
void weft_pool_destroy(weft_pool *pool); /* NULL is allowed; waits for the workers to leave */
int weft_pool_threads(const weft_pool *pool); /* 1 for NULL */
/* Runs job on every thread and returns when all parts are done. pool NULL: one part, here. */
void weft_pool_run(weft_pool *pool, weft_pool_job job, void *context);
/* Cores this process may use (affinity mask). */
int weft_cpu_cores(void);

/* The [begin, end) of `part` when `count` items are cut into `parts`, in steps of `grain`. */
static inline void weft_pool_range(long count, long grain, int part, int parts, long *begin, long *end)
{
    long grains = (count + grain - 1) / grain;
    *begin = grains * part / parts * grain;
    *end = grains * (part + 1) / parts * grain;
    if (*begin > count) *begin = count;
    if (*end > count) *end = count;
}
