/* device/cuda.c - a stream of a GPU: opening, waiting. */
#ifdef WEFT_HAVE_CUDA

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/cuda_internal.h"
#include "kernels/weft_fused.h"

double weft__cuda_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- failures ---- */

static int ruins_context(cudaError_t error)
{
    switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable: return 1;
    default: return 0;
    }
}

weft_status weft__cuda_fail(weft_cuda *cuda, const char *what, cudaError_t error)
{
    (void)cudaGetLastError(); /* or the next innocent call would be blamed */
    if (error == cudaErrorMemoryAllocation) return weft_fail(WEFT_DEVICE_MEMORY, "%s: GPU %d has no memory left", what, cuda->index);
    if (ruins_context(error) && cuda->cause[0] == 0)
        snprintf(cuda->cause, sizeof cuda->cause, "%s (reported by %s)", cudaGetErrorString(error), what);
    return weft_fail(WEFT_CUDA, "GPU %d: %s reported by %s; it may come from an earlier operation (WEFT_SYNC=1 finds it)", cuda->index,
                     cudaGetErrorString(error), what);
}

weft_status weft__cuda_usable(weft_cuda *cuda)
{
    if (cuda->cause[0] == 0) return WEFT_OK;
    return weft_fail(WEFT_POISONED, "GPU %d cannot be used any more: %s", cuda->index, cuda->cause);
}

/* ---- opening and closing ---- */

/* The driver starts threads, which inherit what is blocked: a Ctrl-C must come to the thread that waits for
 * it, not end the program in one of theirs. */
static void hold_signals(sigset_t *old)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, old);
}

static void let_signals(const sigset_t *old) { pthread_sigmask(SIG_SETMASK, old, NULL); }

int weft_cuda_device_count(void)
{
    int count = 0;
    sigset_t old;
    hold_signals(&old);
    cudaError_t error = cudaGetDeviceCount(&count);
    let_signals(&old);
    if (error == cudaSuccess) return count;
    (void)cudaGetLastError();
    return 0;
}

const char *weft_cuda_why_none(void)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    (void)cudaGetLastError();
    return cudaGetErrorString(error);
}

weft_status weft_cuda_describe(int index, char *text, size_t size, size_t *free_bytes, size_t *total_bytes)
{
    struct cudaDeviceProp properties;
    size_t available = 0, total = 0;
    sigset_t old;
    hold_signals(&old);
    cudaError_t error = cudaGetDeviceProperties(&properties, index);
    if (error == cudaSuccess) error = cudaSetDevice(index);
    if (error == cudaSuccess) error = cudaMemGetInfo(&available, &total);
    let_signals(&old);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return weft_fail(WEFT_CUDA, "GPU %d: %s", index, cudaGetErrorString(error));
    }
    if (text != NULL) snprintf(text, size, "%s", properties.name);
    if (free_bytes != NULL) *free_bytes = available;
    if (total_bytes != NULL) *total_bytes = total;
    return WEFT_OK;
}

int weft_cuda_rests(weft_cuda *cuda, double seconds)
{
    double began = weft__cuda_now();
    while (cudaStreamQuery(cuda->stream) == cudaErrorNotReady) {
        if (weft__cuda_now() - began > seconds) return 0;
        sched_yield();
    }
    return cudaGetLastError() == cudaSuccess;
}

double weft_cuda_driver_seconds(const weft_cuda *cuda) { return cuda->driver_seconds; }

unsigned long long weft_cuda_activity(const weft_cuda *cuda)
{
    return atomic_load_explicit(&cuda->activity, memory_order_relaxed);
}

int weft_cuda_is_busy(const weft_cuda *cuda)
{
    cudaError_t error = cudaStreamQuery(cuda->stream);
    (void)cudaGetLastError();
    return error == cudaSuccess ? 0 : error == cudaErrorNotReady ? 1 : -1;
}

static void destroy(weft_object *object)
{
    weft_cuda *cuda = (weft_cuda *)object;
    /* A ruined context or a stream that never ends, as it may behind an abort: the driver takes everything back at exit. */
    if (cuda->cause[0] == 0 && (cuda->stream == NULL || weft_cuda_rests(cuda, 2))) {
        weft_cuda_context_destroy(cuda->kernels);
        weft__cuda_free_unused(cuda);
        if (cuda->workspace != NULL) (void)cudaFree(cuda->workspace);
        for (int i = 0; i < 2; i++) {
            weft__cuda_free_pinned(&cuda->staging[i]);
            weft__cuda_free_pinned(&cuda->outgoing[i]);
            if (cuda->paces[i] != NULL) (void)cudaEventDestroy(cuda->paces[i]);
        }
        weft__cuda_mail_close(cuda);
        if (cuda->waited != NULL) (void)cudaEventDestroy(cuda->waited);
        if (cuda->passed != NULL) (void)cudaEventDestroy(cuda->passed);
        for (int i = 0; i < WEFT_CUDA_MARKS; i++)
            if (cuda->marks[i] != NULL) (void)cudaEventDestroy(cuda->marks[i]);
        if (cuda->stream != NULL) (void)cudaStreamDestroy(cuda->stream);
        if (cuda->shared != NULL) (void)cudaMemPoolDestroy(cuda->shared);
        (void)cudaGetLastError();
    }
    pthread_mutex_destroy(&cuda->lock);
    free(cuda->blocks);
    free(cuda);
}

static weft_status build(weft_cuda *cuda)
{
    cudaError_t error = cudaSetDevice(cuda->index);
    if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&cuda->waited, cudaEventDisableTiming);
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&cuda->passed, cudaEventDisableTiming);
    for (int i = 0; i < WEFT_CUDA_MARKS && error == cudaSuccess; i++) error = cudaEventCreateWithFlags(&cuda->marks[i], cudaEventDisableTiming);
    for (int i = 0; i < 2 && error == cudaSuccess; i++) {
        error = cudaEventCreateWithFlags(&cuda->staging[i].copied, cudaEventDisableTiming);
        if (error == cudaSuccess) error = cudaEventCreateWithFlags(&cuda->paces[i], cudaEventDisableTiming);
        if (error == cudaSuccess) error = cudaEventCreateWithFlags(&cuda->outgoing[i].copied, cudaEventDisableTiming);
    }
    if (error == cudaSuccess) error = cudaMalloc(&cuda->workspace, WEFT_CUDA_WORKSPACE_BYTES);
    if (error != cudaSuccess) return weft__cuda_fail(cuda, "opening the GPU", error);
    WEFT_TRY(weft__cuda_mail_open(cuda));
    return weft_cuda_context_create(&cuda->kernels, cuda->workspace, WEFT_CUDA_WORKSPACE_BYTES);
}

weft_status weft_cuda_open(weft_cuda **out, int index)
{
    int count = weft_cuda_device_count();
    if (index < 0 || index >= count) return weft_fail(WEFT_INVALID, "GPU %d was asked for, and this process sees %d", index, count);
    weft_cuda *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL) return weft_fail(WEFT_MEMORY, "no memory for a GPU");
    weft_object_init(&cuda->object, destroy);
    pthread_mutex_init(&cuda->lock, NULL);
    cuda->index = index;
    cuda->timeout = 300;
    const char *sync = getenv("WEFT_SYNC");
    cuda->sync = sync != NULL && *sync == '1';
    sigset_t old;
    hold_signals(&old);
    weft_status status = build(cuda);
    let_signals(&old);
    if (status != WEFT_OK) {
        weft_cuda_release(cuda);
        return status;
    }
    *out = cuda;
    return WEFT_OK;
}

weft_cuda *weft_cuda_retain(weft_cuda *cuda) { return WEFT_RETAIN(cuda); }

void weft_cuda_release(weft_cuda *cuda)
{
    if (cuda != NULL) weft_object_release(&cuda->object);
}

int weft_cuda_index(const weft_cuda *cuda) { return cuda->index; }
void *weft_cuda_stream(const weft_cuda *cuda)
{
    if (cuda->fused != NULL) (void)weft_fused_flush(cuda->fused); /* a failure comes out at the end of the capture */
    return cuda->stream;
}
struct weft_cuda_context *weft_cuda_kernels(const weft_cuda *cuda) { return cuda->kernels; }
void weft_cuda_moved(weft_cuda *cuda) { cuda->generation++; }

void weft_cuda_watch(weft_cuda *cuda, weft_status (*check)(void *context), weft_status (*late)(void *context), void *context,
                     double seconds)
{
    cuda->check = check;
    cuda->late = late;
    cuda->check_context = context;
    cuda->timeout = seconds;
}

int weft_cuda_is_device(const void *address)
{
    struct cudaPointerAttributes attributes;
    if (address == NULL) return 0;
    if (cudaPointerGetAttributes(&attributes, address) == cudaSuccess) return attributes.type == cudaMemoryTypeDevice;
    (void)cudaGetLastError();
    return 0;
}

weft_status weft_cuda_open_peer(weft_cuda *cuda, int index)
{
    int possible = 0;
    const char *refused = getenv("WEFT_NO_PEER");
    cudaError_t error = cudaDeviceCanAccessPeer(&possible, cuda->index, index);
    if (refused != NULL && *refused == '1') possible = 0;
    if (error == cudaSuccess && !possible) return weft_fail(WEFT_CUDA, "GPU %d cannot read the memory of GPU %d: no peer path", cuda->index, index);
    if (error == cudaSuccess) error = cudaDeviceEnablePeerAccess(index, 0);
    if (error == cudaSuccess) return WEFT_OK;
    (void)cudaGetLastError();
    return error == cudaErrorPeerAccessAlreadyEnabled ? WEFT_OK : weft__cuda_fail(cuda, "opening a peer path", error);
}

/* A pool of its own that keeps what it has: nothing is unmapped while kernels run. */
static cudaError_t make_shared_pool(weft_cuda *cuda)
{
    struct cudaMemPoolProps properties = {.allocType = cudaMemAllocationTypePinned, .location = {cudaMemLocationTypeDevice, cuda->index}};
    cudaError_t error = cudaMemPoolCreate(&cuda->shared, &properties);
    uint64_t all = UINT64_MAX;
    if (error == cudaSuccess) error = cudaMemPoolSetAttribute(cuda->shared, cudaMemPoolAttrReleaseThreshold, &all);
    return error;
}

weft_status weft_cuda_share(weft_cuda *cuda, size_t bytes, const int32_t *gpus, int count, void **out)
{
    void *block = NULL;
    const char *refused = getenv("WEFT_NO_PEER");
    WEFT_TRY(weft__cuda_usable(cuda));
    cudaError_t error = cuda->shared == NULL ? make_shared_pool(cuda) : cudaSuccess;
    for (int i = 0; i < count && error == cudaSuccess; i++) {
        int possible = 0;
        struct cudaMemAccessDesc access = {{cudaMemLocationTypeDevice, gpus[i]}, cudaMemAccessFlagsProtReadWrite};
        if (gpus[i] == cuda->index) continue;
        error = cudaDeviceCanAccessPeer(&possible, gpus[i], cuda->index);
        if (error == cudaSuccess && (!possible || (refused != NULL && *refused == '1')))
            return weft_fail(WEFT_CUDA, "GPU %d cannot reach the memory of GPU %d: no peer path", gpus[i], cuda->index);
        if (error == cudaSuccess) error = cudaMemPoolSetAccess(cuda->shared, &access, 1);
    }
    if (error == cudaSuccess) error = cudaMallocFromPoolAsync(&block, bytes, cuda->shared, cuda->stream);
    if (error == cudaSuccess) error = cudaMemsetAsync(block, 0, bytes, cuda->stream);
    if (error != cudaSuccess) return weft__cuda_fail(cuda, "sharing memory with other GPUs", error);
    *out = block;
    return WEFT_OK;
}

void weft_cuda_unshare(weft_cuda *cuda, void *block)
{
    if (block != NULL && cuda->cause[0] == 0 && cudaFreeAsync(block, cuda->stream) != cudaSuccess) (void)cudaGetLastError();
}

int weft_cuda_multiprocessors(const weft_cuda *cuda)
{
    int count = 0;
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, cuda->index) != cudaSuccess) (void)cudaGetLastError();
    return count > 0 ? count : 1;
}

weft_status weft_cuda_words_create(unsigned **out, size_t count)
{
    void *words = NULL;
    if (cudaHostAlloc(&words, count * sizeof **out, cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess) {
        (void)cudaGetLastError();
        return weft_fail(WEFT_MEMORY, "no page-locked host memory for %zu words", count);
    }
    memset(words, 0, count * sizeof **out);
    *out = words;
    return WEFT_OK;
}

void weft_cuda_words_free(unsigned *words)
{
    if (words != NULL && cudaFreeHost(words) != cudaSuccess) (void)cudaGetLastError();
}

/* ---- waiting ---- */

weft_status weft__cuda_wait_event(weft_cuda *cuda, cudaEvent_t event, const char *what)
{
    if (cuda->capturing) return weft_fail(WEFT_INTERNAL, "%s while a graph is captured: a step must not wait", what);
    WEFT_TRY(weft__cuda_usable(cuda));
    double began = 0;
    for (long turn = 0;; turn++) {
        cudaError_t error = cudaEventQuery(event);
        if (error == cudaSuccess) {
            weft__cuda_note_activity(cuda);
            return WEFT_OK;
        }
        if (error != cudaErrorNotReady) return weft__cuda_fail(cuda, what, error);
        if (cuda->check != NULL) WEFT_TRY(cuda->check(cuda->check_context));
        if (turn < 64) continue;
        sched_yield();
        double now = weft__cuda_now();
        if (began == 0) began = now;
        if (now - began <= cuda->timeout) continue;
        if (cuda->late != NULL) WEFT_TRY(cuda->late(cuda->check_context));
        return weft_fail(WEFT_TIMEOUT, "GPU %d did not finish within %.3g s (%s)", cuda->index, cuda->timeout, what);
    }
}

weft_status weft_cuda_wait(weft_cuda *cuda)
{
    if (cuda->capturing) return weft_fail(WEFT_INTERNAL, "waiting while a graph is captured: a step must not wait");
    WEFT_TRY(weft__cuda_usable(cuda));
    cudaError_t error = cudaEventRecord(cuda->waited, weft_cuda_stream(cuda));
    if (error != cudaSuccess) return weft__cuda_fail(cuda, "recording an event", error);
    return weft__cuda_wait_event(cuda, cuda->waited, "waiting for the stream");
}

weft_status weft_cuda_mark(weft_cuda *cuda, int mark)
{
    WEFT_TRY(weft__cuda_usable(cuda));
    cudaError_t error = cudaEventRecord(cuda->marks[mark], weft_cuda_stream(cuda));
    return error == cudaSuccess ? WEFT_OK : weft__cuda_fail(cuda, "recording an event", error);
}

weft_status weft_cuda_follow(weft_cuda *cuda, const weft_cuda *other, int mark)
{
    if (other == cuda) return WEFT_OK;
    cudaError_t error = cudaStreamWaitEvent(weft_cuda_stream(cuda), other->marks[mark], 0);
    return error == cudaSuccess ? WEFT_OK : weft__cuda_fail(cuda, "waiting for another stream", error);
}

/* A stream takes about a thousand kernels; the launch of one more waits inside the driver, where nothing
 * ends it when a peer has failed. So the host stays within a few hundred: it waits here. */
static weft_status stay_near(weft_cuda *cuda)
{
    weft__cuda_note_activity(cuda);
    if (++cuda->launches % 64 != 0 || cuda->capturing) return WEFT_OK;
    if (cuda->launches > 64) WEFT_TRY(weft__cuda_wait_event(cuda, cuda->passed, "waiting for earlier operations"));
    cudaError_t error = cudaEventRecord(cuda->passed, cuda->stream);
    return error == cudaSuccess ? WEFT_OK : weft__cuda_fail(cuda, "recording an event", error);
}

weft_status weft_cuda_launched(weft_cuda *cuda, const char *what, weft_status status)
{
    if (status == WEFT_OK) status = stay_near(cuda);
    if (status == WEFT_OK && !cuda->sync) return WEFT_OK;
    if (status == WEFT_OK && !cuda->capturing) status = weft_cuda_wait(cuda);
    return status == WEFT_OK ? WEFT_OK : weft_fail_while(status, "while running %s on GPU %d", what, cuda->index);
}

#endif
