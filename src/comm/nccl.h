/* comm/nccl.h - a communicator, for group_nccl.c and nccl_watch.c. */
#pragma once

#include <nccl.h>

#include "comm/internal.h"

enum { WEFT__NCCL_LIVE, WEFT__NCCL_UNWANTED, WEFT__NCCL_ABORTING, WEFT__NCCL_GONE };

/* The list, `left` and changes of `state`: under the world's lock. */
struct weft__nccl {
    struct weft__nccl *next; /* of the world */
    ncclComm_t comm;
    weft_world *world; /* retained by the watch */
    int rank;          /* the world's */
    struct weft__nccl *sibling; /* of the rank, the next below are its thread's alone */
    const int *ranks;           /* the members, in order; a key's */
    int size;
    int groups;                 /* that use it; 0: kept for the next one of these members */
    int32_t number;             /* not 0, and the same on all members */
    weft_cuda *cuda;   /* of its rank, as long as that uses it; else NULL */
    atomic_int state;
    int left;                         /* its rank uses it no more: whoever ends it frees it */
    _Atomic double inside;            /* when its rank went into a call that has not come back; 0: none */
    unsigned long long progress;      /* of the other ranks, when the watch last looked */
    double since;                     /* of that progress */
};

/* From here the watch knows it. */
weft_status weft__nccl_watch(struct weft__nccl *nccl);
/* Its rank uses it no more. together: all members leave at once and none failed. Otherwise it is aborted,
 * and waited for only so long. Frees it. */
void weft__nccl_unwatch(struct weft__nccl *nccl, int together);
