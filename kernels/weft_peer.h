/* weft_peer.h - small collectives as kernels that write to the memory of the other GPUs. C11, without
 * CUDA types; stream is a cudaStream_t of the current device.
 *
 * Each member of a group owns an inbox on its GPU, open to the others. A call pushes 8 bytes of data
 * at a time, each half beside the number of the call, and waits until the same has come from every
 * other member: one trip over the link, no barrier. Numbers are counted in device memory, so what a
 * graph replays works too. A packet is written again two calls later, and by then every member has
 * left the call between: it needed one packet of this one. Hence the rule for all calls: every member
 * receives at least one packet from every other member.
 *
 * Kernels wait for kernels of other GPUs: every member needs a GPU of its own, all make the same
 * calls in the same order, each on one stream, and kernels are loaded before the first waits
 * (weft_peer_prepare). A wait ends without its data once *halt is not zero or `patience` is over. */
#pragma once

#include "kernels/weft_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { WEFT_PEER_MAX = 8, WEFT_PEER_PACKET = 16 /* bytes, 8 of them data */, WEFT_PEER_BLOCKS = 256 /* most of a kernel that leave a sign (step_peer.cuh) */ };

/* What a member's kernels are given, by value. */
typedef struct weft_peer {
    void *inbox[WEFT_PEER_MAX]; /* of each member: [2][size][capacity] packets, then [size][WEFT_PEER_BLOCKS] words; 16-byte aligned, zero at first; inbox[rank] is here */
    unsigned *counters;         /* here: calls so far; blocks that have read that. Zero at first */
    unsigned *halt;             /* of the host, readable and writable here: [0] leave; [1] is set to 1 by a wait that gave up */
    int64_t capacity;           /* packets from one member in one call */
    int64_t patience;           /* nanoseconds */
    int size, rank;             /* 2 to WEFT_PEER_MAX */
    int blocks;                 /* that run at once: the multiprocessors of this GPU */
} weft_peer;

static inline int64_t weft_peer_inbox_bytes(int size, int64_t capacity)
{
    return 2 * size * capacity * WEFT_PEER_PACKET + size * WEFT_PEER_BLOCKS * 4;
}

/* Loads every kernel of this file on the current device: loading behind a waiting kernel may wait for it. */
weft_status weft_peer_prepare(void);

/* Chunks of `count` elements go to every member: chunk m begins at in + m * in_member_stride. A chunk
 * is rows of `piece` elements (count of them when there is one row), in_row_stride apart.
 * sum: out[i] (i < count, contiguous) = op over the members of chunk `rank`, in their order, in
 * float32 (int32: exact), rounded once. dtype: float32, bfloat16, float16, int32. out may be in when
 * in_member_stride is 0.
 * move: chunk `rank` of member m goes to out + m * out_member_stride, its rows out_row_stride apart.
 * Any dtype; out may not overlap in.
 * Strides count elements. UNSUPPORTED when count elements are more than capacity packets. */
typedef struct weft_peer_args {
    const void *in;
    void *out;
    int64_t count, piece;
    int64_t in_member_stride, in_row_stride;
    int64_t out_member_stride, out_row_stride; /* move */
    int max;                                   /* sum: the largest instead; a NaN stays */
    int threads;                               /* of a block; 0: a good number */
    weft_dtype dtype;
} weft_peer_args;
weft_status weft_peer_sum(const weft_peer *peer, const weft_peer_args *args, void *stream);
weft_status weft_peer_move(const weft_peer *peer, const weft_peer_args *args, void *stream);
/* Whether count elements of the dtype fit in one call. */
int weft_peer_fits(const weft_peer *peer, int64_t count, weft_dtype dtype);

/* y = x w^T + bias of weft_linear, summed over the members as weft_peer_sum does it (every member's y is
 * rounded first), in one kernel: for up to 8 tokens of 16-bit x, where fits. Members for which it does not
 * fit may run weft_linear and weft_peer_sum in its place, when y is dense. */
int weft_peer_linear_fits(const weft_peer *peer, const weft_linear_args *args);
weft_status weft_peer_linear(const weft_peer *peer, const weft_linear_args *args, void *stream);

/* RMSNorms whose statistics span the members, as one kernel: group_norm_sums, the sum of var over
 * the members and group_norm_apply of `count` (1 or 2) parts with the same rows, dtype and world.
 * var is not used. Needs rows <= capacity. */
weft_status weft_peer_group_norm(const weft_peer *peer, const weft_group_norm_args *parts, int count, void *stream);

/* The exchange of partial attention results and their combination (weft_dcp_combine, base e), as one
 * kernel. Heads [m * heads, (m + 1) * heads) of what a member has go to member m. With a suffix the
 * merge (weft_merge_attn_states) of the combination with it is done too, and out is what that gives. */
typedef struct weft_peer_dcp_args {
    const void *partial;     /* (tokens, size * heads, dim) dtype */
    const float *lse;        /* (tokens, size * heads) */
    const void *suffix;      /* (tokens, heads, dim) dtype, or NULL */
    const float *suffix_lse; /* (tokens, heads), with suffix */
    void *out;               /* (tokens, heads, dim): dtype with a suffix (may be suffix), else float32 */
    float *lse_out;          /* (tokens, heads), or NULL */
    int64_t tokens, heads, dim;
    weft_dtype dtype;
} weft_peer_dcp_args;
weft_status weft_peer_dcp(const weft_peer *peer, const weft_peer_dcp_args *args, void *stream);
int weft_peer_dcp_fits(const weft_peer *peer, const weft_peer_dcp_args *args);

#ifdef __cplusplus
}
#endif
