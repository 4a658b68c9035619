/* kernels/cuda/tests/peer_rig.h - members of a group over peer memory, a thread each, for checks and timing. */
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/weft_cuda.h"
#include "kernels/weft_peer.h"

typedef struct peer_member {
    weft_peer peer;
    int device;
    cudaStream_t stream;
    void *context; /* the caller's */
} peer_member;

void peer_must(cudaError_t error, const char *what); /* exits */
void peer_must_run(weft_status status);
/* `size` members over the GPUs there are, in turns. Exits when it cannot. */
void peer_open(peer_member *members, int size, int64_t capacity, void (*fill)(peer_member *m));
/* body on a thread of each member, its device current; returns when all are done. */
void peer_run(peer_member *members, int size, void *(*body)(void *member));
void peer_close(peer_member *members, int size);
