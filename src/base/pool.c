/* base/pool.c - a rank's own worker threads. */
#include "base/pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

struct weft_pool {
    int threads, spin;
    pthread_t *workers; /* threads - 1 of them */
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    atomic_ulong job_number; /* changes when there is work */
    atomic_int remaining;
    weft_pool_job job;
    void *context;
    int started, quit;
};

typedef struct {
    weft_pool *pool;
    int part;
} worker_start;

enum { SPINS = 2000 };

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void *worker_main(void *argument)
{
    worker_start start = *(worker_start *)argument;
    free(argument);
    weft_pool *pool = start.pool;
    unsigned long seen = 0;
    for (;;) {
        if (pool->spin)
            for (int i = 0; i < SPINS && atomic_load_explicit(&pool->job_number, memory_order_acquire) == seen; i++) relax();
        pthread_mutex_lock(&pool->lock);
        while (atomic_load_explicit(&pool->job_number, memory_order_relaxed) == seen && !pool->quit)
            pthread_cond_wait(&pool->wake, &pool->lock);
        int quit = pool->quit;
        seen = atomic_load_explicit(&pool->job_number, memory_order_relaxed);
        weft_pool_job job = pool->job;
        void *context = pool->context;
        pthread_mutex_unlock(&pool->lock);
        if (quit) return NULL;
        job(context, start.part, pool->threads);
        if (atomic_fetch_sub_explicit(&pool->remaining, 1, memory_order_acq_rel) == 1) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->lock);
        }
    }
}

static weft_status start_worker(weft_pool *pool, int part)
{
    worker_start *start = malloc(sizeof *start);
    if (start == NULL) return weft_fail(WEFT_MEMORY, "no memory for a worker thread");
    *start = (worker_start){pool, part};
    /* Workers take no signals: Ctrl-C belongs to the thread that supervises the ranks. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int failed = pthread_create(&pool->workers[part - 1], NULL, worker_main, start);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (failed) {
        free(start);
        return weft_fail(WEFT_MEMORY, "the system gave no thread for worker %d of %d", part, pool->threads);
    }
    pool->started++;
    return WEFT_OK;
}

weft_status weft_pool_create(weft_pool **out, int threads, int spin)
{
    if (threads < 1 || threads > 4096) return weft_fail(WEFT_INVALID, "a pool needs 1 to 4096 threads, got %d", threads);
    weft_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL) return weft_fail(WEFT_MEMORY, "no memory for a pool");
    pool->threads = threads;
    pool->spin = spin;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    weft_status status = pool->workers ? WEFT_OK : weft_fail(WEFT_MEMORY, "no memory for a pool");
    for (int part = 1; status == WEFT_OK && part < threads; part++) status = start_worker(pool, part);
    if (status != WEFT_OK) {
        weft_pool_destroy(pool);
        return status;
    }
    *out = pool;
    return WEFT_OK;
}

void weft_pool_destroy(weft_pool *pool)
{
    if (pool == NULL) return;
    pthread_mutex_lock(&pool->lock);
    pool->quit = 1;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->started; i++) pthread_join(pool->workers[i], NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}

int weft_pool_threads(const weft_pool *pool)
{
    return pool == NULL ? 1 : pool->threads;
}

void weft_pool_run(weft_pool *pool, weft_pool_job job, void *context)
{
    if (pool == NULL || pool->threads == 1) {
        job(context, 0, 1);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->job = job;
    pool->context = context;
    atomic_store_explicit(&pool->remaining, pool->threads - 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&pool->job_number, 1, memory_order_release);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);

    job(context, 0, pool->threads);

    if (pool->spin)
        for (int i = 0; i < SPINS && atomic_load_explicit(&pool->remaining, memory_order_acquire) != 0; i++) relax();
    if (atomic_load_explicit(&pool->remaining, memory_order_acquire) == 0) return;
    pthread_mutex_lock(&pool->lock);
    while (atomic_load_explicit(&pool->remaining, memory_order_acquire) != 0)
        pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

int weft_cpu_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    int count = CPU_COUNT(&set);
    return count > 0 ? count : 1;
}
