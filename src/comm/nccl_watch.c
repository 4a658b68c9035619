/* comm/nccl_watch.c - a thread that ends communicators whose ranks cannot.
 *
 * A call into NCCL may wait in there for a peer that has failed (the first collective makes connections),
 * where no abort flag of ours is seen; and ncclCommAbort itself may wait. So one thread of the world
 * has them aborted: communicators that their ranks give up, and a second behind an abort of the world all others.
 * It lives while there are communicators. (Communicators that do not block would start a thread for every
 * call instead, which costs more than the call.)
 *
 * It also holds the ranks themselves against the world's timeout: calls into NCCL that do not come back, and
 * calls into the driver. Loading a kernel, making a graph or allocating may wait in there for all that
 * the GPU does, and so for a kernel that waits for a peer, which looks at no clock before that of group_peer.c
 * (four times the timeout) or at none at all (NCCL's). So may a rank that waits for rank 0's next record, without a limit, while
 * its GPU waits for rank 0's part of a step. A rank is stuck when no rank has shown life for the timeout, it is not in a
 * wait that looks at the clock, and its GPU has work that is not done. Whether it has is asked in a thread of its own:
 * the question may wait in the driver like everything else, which is an answer. */
#include "comm/internal.h"

#ifdef WEFT_HAVE_NCCL

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/nccl.h"

static const double RANKS_LEAVE = 1;   /* seconds that ranks have to give up a communicator themselves */
static const double ABORT_TAKES = 2; /* seconds that a rank waits for its communicator's abort */

static void unlink_locked(struct weft__nccl *nccl)
{
    struct weft__nccl **link = &nccl->world->nccls;
    while (*link != nccl) link = &(*link)->next;
    *link = nccl->next;
}

static void *abort_it(void *context)
{
    struct weft__nccl *nccl = context;
    weft_world *world = nccl->world;
    (void)ncclCommAbort(nccl->comm);
    pthread_mutex_lock(&world->lock);
    nccl->state = WEFT__NCCL_GONE;
    int mine = nccl->left;
    if (mine) unlink_locked(nccl);
    pthread_mutex_unlock(&world->lock);
    if (mine) free(nccl);
    weft_world_release(world);
    return NULL;
}

/* Each in a thread of its own: an abort first lets its kernels end, then waits for the streams, and so for
 * the kernels of other communicators, which theirs must end. */
static void abort_locked(weft_world *world, int all)
{
    for (struct weft__nccl *n = world->nccls; n != NULL; n = n->next) {
        pthread_t thread;
        if (n->state != WEFT__NCCL_UNWANTED && !(all && n->state == WEFT__NCCL_LIVE)) continue;
        (void)WEFT_RETAIN(world);
        n->state = WEFT__NCCL_ABORTING;
        if (pthread_create(&thread, NULL, abort_it, n) == 0) {
            pthread_detach(thread);
            continue;
        }
        n->state = WEFT__NCCL_UNWANTED; /* at the next turn */
        weft_world_release(world);
    }
}

static unsigned long long progress_of_others(const weft_world *world, int rank)
{
    unsigned long long sum = 0;
    for (int r = 0; r < world->world_size; r++)
        if (r != rank) sum += atomic_load_explicit(&world->presence[r].progress, memory_order_relaxed);
    return sum;
}

/* The world rank that has been in a call for too long while no other rank showed life; or -1. */
static int stuck_rank_locked(weft_world *world, double now)
{
    for (struct weft__nccl *n = world->nccls; n != NULL; n = n->next) {
        double inside = atomic_load_explicit(&n->inside, memory_order_relaxed);
        if (inside == 0) continue;
        unsigned long long progress = progress_of_others(world, n->rank);
        if (progress != n->progress || n->since < inside) {
            n->progress = progress;
            n->since = now;
        }
        if (now - n->since > world->timeout) return n->rank;
    }
    return -1;
}

/* ---- ranks that are stuck in the driver ---- */

static const double RANKS_TELL = 0.25; /* seconds that ranks have to blame another one themselves */
static const double ANSWER_TAKES = 1;  /* seconds in which the driver says whether a GPU is busy */

/* A question to the driver. Whoever lets go last frees it. */
typedef struct {
    atomic_int answer;
    atomic_int holders;
    weft_cuda *cuda; /* retained */
} question;

enum { NO_ANSWER, GPU_RESTS, NOT_SURE, GPU_IS_BUSY };

/* What the watch knows of the ranks' lives. */
typedef struct {
    unsigned long long signs; /* of life, of all ranks together */
    double since;             /* they are as they are */
    double asked_at;          /* 0: not yet */
    int over;                 /* the answers were looked at */
    question *open[WEFT__MAX_RANKS]; /* about the ranks that may be stuck */
} silence;

static void let_go(question *q)
{
    if (atomic_fetch_sub(&q->holders, 1) != 1) return;
    weft_cuda_release(q->cuda);
    free(q);
}

static void *ask(void *context)
{
    question *q = context;
    int busy = weft_cuda_is_busy(q->cuda);
    atomic_store(&q->answer, busy > 0 ? GPU_IS_BUSY : busy < 0 ? NOT_SURE : GPU_RESTS);
    let_go(q);
    return NULL;
}

/* NULL where there is no memory for it. */
static question *put(const struct weft__nccl *nccl)
{
    question *q = calloc(1, sizeof *q);
    pthread_t thread;
    if (q == NULL) return NULL;
    atomic_init(&q->holders, 2);
    q->cuda = weft_cuda_retain(nccl->cuda);
    if (pthread_create(&thread, NULL, ask, q) != 0) {
        atomic_store(&q->holders, 1);
        let_go(q);
        return NULL;
    }
    pthread_detach(thread);
    return q;
}

static void forget(const weft_world *world, silence *s)
{
    for (int r = 0; r < world->world_size; r++) {
        if (s->open[r] != NULL) let_go(s->open[r]);
        s->open[r] = NULL;
    }
}

static unsigned long long signs_of_life_locked(const weft_world *world)
{
    unsigned long long sum = progress_of_others(world, -1);
    for (const struct weft__nccl *n = world->nccls; n != NULL; n = n->next)
        if (n->cuda != NULL) sum += weft_cuda_activity(n->cuda);
    return sum;
}

/* Asks about every rank with a GPU that is not in a wait which looks at the clock. */
static void ask_about_locked(const weft_world *world, silence *s, double now)
{
    s->asked_at = now;
    for (const struct weft__nccl *n = world->nccls; n != NULL; n = n->next) {
        int waits = atomic_load_explicit(&world->presence[n->rank].in_wait, memory_order_relaxed);
        if (n->cuda == NULL || s->open[n->rank] != NULL || waits) continue;
        s->open[n->rank] = put(n);
        if (s->open[n->rank] == NULL) s->asked_at = 0; /* at the next turn */
    }
}

/* Of the ranks whose GPU is busy the one that has come furthest: others wait for less. Where none is for certain, of
 * those about whom the driver says nothing; or -1. */
static int furthest(const weft_world *world, const silence *s)
{
    int found = -1, certain = 0;
    unsigned long long most = 0;
    for (int r = 0; r < world->world_size; r++) {
        int answer = s->open[r] != NULL ? atomic_load(&s->open[r]->answer) : GPU_RESTS;
        unsigned long long progress = atomic_load_explicit(&world->presence[r].progress, memory_order_relaxed);
        if (answer == GPU_RESTS || (certain && answer != GPU_IS_BUSY)) continue;
        if (found >= 0 && certain == (answer == GPU_IS_BUSY) && progress <= most) continue;
        found = r;
        most = progress;
        certain = answer == GPU_IS_BUSY;
    }
    return found;
}

/* The world rank that does not come back from the driver; or -1. */
static int silent_rank_locked(weft_world *world, silence *s, double now)
{
    unsigned long long signs = signs_of_life_locked(world);
    if (signs != s->signs || s->since == 0) {
        forget(world, s);
        s->signs = signs;
        s->since = now;
        s->asked_at = 0;
        s->over = 0;
    }
    if (s->over || now - s->since < world->timeout + RANKS_TELL) return -1;
    if (s->asked_at == 0) {
        ask_about_locked(world, s, now);
        return -1;
    }
    for (int r = 0; r < world->world_size && now - s->asked_at < ANSWER_TAKES; r++)
        if (s->open[r] != NULL && atomic_load(&s->open[r]->answer) == NO_ANSWER) return -1;
    int rank = furthest(world, s);
    forget(world, s);
    s->over = 1;
    return rank;
}

static void *watch(void *context)
{
    weft_world *world = context;
    double aborted_at = 0;
    silence quiet = {0};
    for (;;) {
        usleep(20000);
        double now = weft__now();
        if (atomic_load(&world->aborted.word) == 0) aborted_at = 0;
        else if (aborted_at == 0) aborted_at = now;
        pthread_mutex_lock(&world->lock);
        int over = world->nccls == NULL;
        if (over) world->nccls_watched = 0;
        abort_locked(world, aborted_at != 0 && now - aborted_at > RANKS_LEAVE);
        int stuck = aborted_at == 0 ? stuck_rank_locked(world, now) : -1;
        if (aborted_at == 0 && stuck < 0) stuck = silent_rank_locked(world, &quiet, now);
        pthread_mutex_unlock(&world->lock);
        if (over) break;
        if (stuck >= 0) (void)weft__blame(world, stuck);
    }
    forget(world, &quiet);
    weft_world_release(world);
    return NULL;
}

weft_status weft__nccl_watch(struct weft__nccl *nccl)
{
    weft_world *world = nccl->world;
    pthread_t thread;
    pthread_mutex_lock(&world->lock);
    int started = world->nccls_watched;
    if (!started && pthread_create(&thread, NULL, watch, world) == 0) {
        pthread_detach(thread);
        world->nccls_watched = started = 1;
        (void)WEFT_RETAIN(world);
    }
    if (started) {
        nccl->next = world->nccls;
        world->nccls = nccl;
    }
    pthread_mutex_unlock(&world->lock);
    return started ? WEFT_OK : weft_fail(WEFT_MEMORY, "no thread to watch over communicators");
}

/* Behind a failure a rank gives up all it has, and none can end alone. */
static void mark_unwanted_locked(struct weft__nccl *nccl)
{
    int failed = atomic_load(&nccl->world->aborted.word) != 0;
    for (struct weft__nccl *n = nccl->world->nccls; n != NULL; n = n->next)
        if (n->state == WEFT__NCCL_LIVE && (n == nccl || (failed && n->rank == nccl->rank))) n->state = WEFT__NCCL_UNWANTED;
}

/* Whether an abort on this rank has been waited for in vain. */
static int hopeless_locked(const struct weft__nccl *nccl)
{
    for (const struct weft__nccl *n = nccl->world->nccls; n != NULL; n = n->next)
        if (n->rank == nccl->rank && n->left) return 1;
    return 0;
}

/* Asks the watch to abort it, and waits a while. Returns whether it is this thread's to free. */
static int give_up(struct weft__nccl *nccl)
{
    weft_world *world = nccl->world;
    double began = weft__now();
    for (int over = 0, mine = 0;; usleep(2000)) {
        pthread_mutex_lock(&world->lock);
        mark_unwanted_locked(nccl);
        mine = nccl->state == WEFT__NCCL_GONE;
        over = mine || weft__now() - began > ABORT_TAKES || hopeless_locked(nccl);
        if (mine) unlink_locked(nccl);
        else if (over) nccl->left = 1;
        pthread_mutex_unlock(&world->lock);
        if (over) return mine;
    }
}

void weft__nccl_unwatch(struct weft__nccl *nccl, int together)
{
    weft_world *world = nccl->world;
    pthread_mutex_lock(&world->lock);
    int whole = together && nccl->state == WEFT__NCCL_LIVE;
    nccl->cuda = NULL;
    if (whole) unlink_locked(nccl);
    pthread_mutex_unlock(&world->lock);
    if (whole) (void)ncclCommDestroy(nccl->comm);
    if (whole || give_up(nccl)) free(nccl);
}

/* ---- behind a failure that was taken back ---- */

/* Whether this rank's communicators and stream are as if nothing had happened. A kernel that waits for a call
 * which others never made keeps the stream from coming to rest. */
static int is_whole(const weft_rank *rank)
{
    weft_world *world = rank->world;
    int live = 1;
    pthread_mutex_lock(&world->lock);
    for (const struct weft__nccl *n = world->nccls; n != NULL; n = n->next) live &= n->rank != rank->rank || n->state == WEFT__NCCL_LIVE;
    pthread_mutex_unlock(&world->lock);
    return live && (rank->cuda == NULL || weft_cuda_rests(rank->cuda, 1.5));
}

/* Ends all communicators of this rank, so that nothing on its stream waits any more. */
static weft_status end_all(const weft_rank *rank)
{
    weft_world *world = rank->world;
    pthread_mutex_lock(&world->lock);
    for (struct weft__nccl *n = world->nccls; n != NULL; n = n->next)
        if (n->rank == rank->rank && n->state == WEFT__NCCL_LIVE) n->state = WEFT__NCCL_UNWANTED;
    pthread_mutex_unlock(&world->lock);
    if (rank->cuda == NULL || weft_cuda_rests(rank->cuda, 2)) return WEFT_OK;
    return weft_fail(WEFT_TIMEOUT, "GPU %d does not come to rest behind a failure", weft_cuda_index(rank->cuda));
}

weft_status weft__nccl_recover(weft_rank *rank)
{
    weft_world *world = rank->world;
    int32_t mine[2], all[2 * WEFT__MAX_RANKS];
    pthread_mutex_lock(&world->lock);
    int used = world->nccls != NULL;
    pthread_mutex_unlock(&world->lock);
    if (!used) return WEFT_OK;
    mine[0] = (int32_t)rank->nccl_calls;
    mine[1] = is_whole(rank);
    WEFT_TRY(weft_group_all_gather(rank->everyone, mine, all, 2, WEFT_I32));
    int whole = 1;
    for (int r = 0; r < world->world_size; r++) whole &= all[2 * r] == all[0] && all[2 * r + 1];
    if (whole) return WEFT_OK;
    rank->nccl_calls = 0;
    WEFT_TRY(end_all(rank));
    WEFT_TRY(weft_group_barrier(rank->everyone)); /* before any has ended, none is made */
    if (rank->cuda != NULL) weft_cuda_drop_graphs(rank->cuda); /* an abort waits for those that hold it */
    return weft__renew_groups(rank);
}

#endif
