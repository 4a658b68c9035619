/* kernels/cuda/tests/peer_rig.c */
#include "kernels/cuda/tests/peer_rig.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void peer_must(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

void peer_must_run(weft_status status)
{
    if (status == WEFT_OK) return;
    fprintf(stderr, "%s\n", weft_error_message());
    exit(1);
}

static void *cleared(size_t bytes)
{
    void *p = NULL;
    peer_must(cudaMalloc(&p, bytes), "device memory");
    peer_must(cudaMemset(p, 0, bytes), "device memory");
    return p;
}

static void open_paths(const peer_member *members, int size, int device)
{
    for (int n = 0; n < size; n++) {
        if (members[n].device == device) continue;
        cudaError_t error = cudaDeviceEnablePeerAccess(members[n].device, 0);
        if (error == cudaErrorPeerAccessAlreadyEnabled) (void)cudaGetLastError();
        else peer_must(error, "opening a peer path");
    }
}

void peer_open(peer_member *members, int size, int64_t capacity, void (*fill)(peer_member *m))
{
    int gpus = 0, sms = 0;
    peer_must(cudaGetDeviceCount(&gpus), "GPUs");
    for (int m = 0; m < size; m++) members[m].device = m % gpus;
    for (int m = 0; m < size; m++) {
        weft_peer *p = &members[m].peer;
        peer_must(cudaSetDevice(members[m].device), "GPU");
        peer_must(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, members[m].device), "GPU");
        open_paths(members, size, members[m].device);
        peer_must(cudaStreamCreateWithFlags(&members[m].stream, cudaStreamNonBlocking), "stream");
        /* Members that share a GPU must fit on it together, the launch behind the running one too. */
        *p = (weft_peer){.capacity = capacity, .patience = 5000000000ll, .size = size, .rank = m, .blocks = gpus >= size ? sms : sms / (2 * size)};
        p->inbox[m] = cleared((size_t)weft_peer_inbox_bytes(size, capacity));
        p->counters = cleared(256);
        peer_must(cudaHostAlloc((void **)&p->halt, 64, cudaHostAllocPortable | cudaHostAllocMapped), "page-locked memory");
        memset(p->halt, 0, 64);
        peer_must_run(weft_peer_prepare());
        if (fill != NULL) fill(&members[m]);
        peer_must(cudaDeviceSynchronize(), "GPU");
    }
    for (int m = 0; m < size; m++)
        for (int n = 0; n < size; n++) members[m].peer.inbox[n] = members[n].peer.inbox[n];
}

typedef struct {
    peer_member *member;
    void *(*body)(void *member);
} start;

static void *begin(void *context)
{
    start *s = context;
    peer_must(cudaSetDevice(s->member->device), "GPU");
    return s->body(s->member);
}

void peer_run(peer_member *members, int size, void *(*body)(void *member))
{
    pthread_t threads[WEFT_PEER_MAX];
    start starts[WEFT_PEER_MAX];
    for (int m = 0; m < size; m++) {
        starts[m] = (start){&members[m], body};
        if (pthread_create(&threads[m], NULL, begin, &starts[m]) != 0) exit(1);
    }
    for (int m = 0; m < size; m++) pthread_join(threads[m], NULL);
}

void peer_close(peer_member *members, int size)
{
    for (int m = 0; m < size; m++) {
        peer_must(cudaSetDevice(members[m].device), "GPU");
        peer_must(cudaStreamSynchronize(members[m].stream), "the end");
        if (members[m].peer.halt[1] != 0) {
            fprintf(stderr, "member %d of %d gave up waiting\n", m, size);
            exit(1);
        }
    }
    for (int m = 0; m < size; m++) {
        peer_must(cudaSetDevice(members[m].device), "GPU");
        peer_must(cudaFree(members[m].peer.inbox[m]), "free");
        peer_must(cudaFree(members[m].peer.counters), "free");
        peer_must(cudaFreeHost(members[m].peer.halt), "free");
        peer_must(cudaStreamDestroy(members[m].stream), "stream");
    }
}
