/* device/cuda_internal.h - what the CUDA files of this room share. The only place of src/device
 * with CUDA types. */
#pragma once

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>

#include "device/cuda.h"
#include "kernels/weft_cuda_device.h"

enum { STAGING_BYTES = 16 << 20, WEFT__OUTGROWN = 48 };

typedef struct weft__pinned {
    void *data; /* page-locked */
    size_t bytes;
    cudaEvent_t copied;
    int busy; /* `copied` was recorded behind its last copy */
    void *outgrown[WEFT__OUTGROWN]; /* each at least twice the one before */
    int num_outgrown;
} weft__pinned;

typedef struct weft__block {
    void *data;
    size_t bytes; /* its size class */
} weft__block;

/* One direction of the mail, as the host counts it (cuda_mail.c). */
typedef struct weft__mailbox {
    weft_cuda_mail mail;
    unsigned calls, taken; /* put on the stream so far; read by the host */
    unsigned captured;     /* recorded into the graph that is being captured */
} weft__mailbox;

/* What one call of weft_cuda_pace marked. */
typedef struct weft__pace {
    unsigned tokens;
    int by_event, event;
} weft__pace;

struct weft_cuda {
    weft_object object;
    int index, sync, capturing;
    cudaStream_t stream;
    cudaEvent_t waited;
    cudaEvent_t passed; /* by the stream: recorded at every 64th operation */
    uint64_t launches;  /* operations so far */
    double driver_seconds; /* in calls that put a step's work on the stream */
    atomic_ullong activity; /* grows with every call that came back from the driver */
    cudaEvent_t marks[WEFT_CUDA_MARKS];
    cudaMemPool_t shared; /* what other GPUs may use; NULL before the first */
    struct weft_cuda_context *kernels;
    void *workspace;
    weft_status (*check)(void *context), (*late)(void *context);
    void *check_context;
    double timeout;
    uint64_t generation;
    struct weft_cuda_graph *graphs; /* all of them */
    struct weft_fused *fused; /* while a graph is captured whose operations run together, or operations are joined */
    void *fused_memory;
    char cause[256]; /* what ruined the context; empty: nothing */

    weft__pinned staging[2], outgoing[2];
    int staging_turn, outgoing_turn;
    weft__mailbox records, tokens;
    unsigned *mail_words, *mail_counters; /* of the host and of the GPU */
    cudaEvent_t paces[2];
    weft__pace pace; /* the last one */

    pthread_mutex_t lock; /* of the blocks */
    weft__block *blocks;  /* free ones */
    size_t num_blocks, max_blocks;
    size_t owned_blocks; /* ever made: the list has room for all */
    size_t held_bytes, used_bytes; /* from the driver; of them in use */
};

double weft__cuda_now(void);
/* The rank's thread is not stuck in the driver. */
static inline void weft__cuda_note_activity(weft_cuda *cuda)
{
    atomic_fetch_add_explicit(&cuda->activity, 1, memory_order_relaxed);
}
weft_status weft__cuda_fail(weft_cuda *cuda, const char *what, cudaError_t error);
weft_status weft__cuda_usable(weft_cuda *cuda); /* POISONED with the first cause */
/* Until the event has come; what names the wait. */
weft_status weft__cuda_wait_event(weft_cuda *cuda, cudaEvent_t event, const char *what);
void weft__cuda_free_unused(weft_cuda *cuda);
void weft__cuda_free_pinned(weft__pinned *pinned);
weft_status weft__cuda_mail_open(weft_cuda *cuda);
void weft__cuda_mail_close(weft_cuda *cuda);
