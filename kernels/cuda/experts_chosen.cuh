/* kernels/cuda/experts_chosen.cuh - the experts that a few tokens have chosen, found by a block for itself. */
#pragma once

#include "kernels/cuda/experts.cuh"

namespace weft {

enum { CHOSEN_PAIRS = 256, CHOSEN_TOKENS = 8 };

/* Which experts have tokens here: ascending, or for one token in the order of its choice. */
struct Chosen {
    int count;
    int expert[CHOSEN_PAIRS];
    float weight[CHOSEN_PAIRS];           /* of pairs */
    uint8_t tokens[CHOSEN_PAIRS];         /* bits */
    uint8_t pair[CHOSEN_PAIRS][CHOSEN_TOKENS]; /* of a token there */
    alignas(16) int key[CHOSEN_PAIRS];    /* of pairs; -1: not here */
    alignas(16) int first[CHOSEN_PAIRS];  /* the key where no pair in front has it, else INT_MAX */
};

/* One token with up to 32 choices, by one warp; without `weights` nothing is known of weights. */
__device__ __forceinline__ bool one_chooses(const weft_experts_args &a) { return a.tokens == 1 && a.top_k <= 32; }
__device__ __forceinline__ void choose_of_one(const weft_experts_args &a, Chosen &c, bool weights)
{
    const int p = threadIdx.x % 32, top = (int)a.top_k;
    const int key = p < top ? local_expert(a, a.ids[p]) : -1;
    const float given = weights && p < top ? a.weights[p] : 0.0f, weight = key >= 0 ? given : 0.0f;
    const unsigned same = __match_any_sync(~0u, key);
    const bool first = key >= 0 && __ffs(same) - 1 == p;
    const unsigned firsts = __ballot_sync(~0u, first);
    if (p == 0) c.count = __popc(firsts);
    if (first) {
        const int slot = __popc(firsts & ((1u << p) - 1));
        c.expert[slot] = key, c.tokens[slot] = 1, c.pair[slot][0] = (uint8_t)p;
    }
    if (!weights) return;
    float sum = 0.0f;
    for (int i = 0; i < top; i++) {
        const float other = __shfl_sync(~0u, weight, i);
        if (same >> i & 1) sum += other;
    }
    c.key[p] = key, c.weight[p] = sum;
}

/* All threads of the block, at least CHOSEN_PAIRS. An expert that a token names twice has both weights. */
__device__ static void choose_experts(const weft_experts_args &a, Chosen &c)
{
    if (one_chooses(a)) {
        if (threadIdx.x < 32) choose_of_one(a, c, true);
        __syncthreads();
        return;
    }
    const int p = threadIdx.x, top = (int)a.top_k, pairs = (int)(a.tokens * a.top_k);
    const int key = p < pairs ? local_expert(a, a.ids[p]) : -1, token = p / top * top;
    const float given = p < pairs ? a.weights[p] : 0.0f;
    float weight = key >= 0 ? given : 0.0f;
    if (p < CHOSEN_PAIRS) c.key[p] = key, c.tokens[p] = 0;
    __syncthreads();
    bool first = key >= 0, owner = first; /* the first pair of its expert; of its expert in its token */
    for (int i = 0; i < pairs; i += 4) {
        const int4 keys = *(const int4 *)&c.key[i];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const bool same = (&keys.x)[j] == key, before = i + j < p;
            if (same && before) first = false, owner = owner && i + j < token;
            if (same && owner && i + j > p && i + j < token + top) weight += a.weights[i + j];
        }
    }
    if (p < CHOSEN_PAIRS) c.first[p] = first ? key : 0x7fffffff, c.weight[p] = weight;
    const int count = __syncthreads_count(first);
    if (p == 0) c.count = count;
    if (owner) {
        int slot = 0;
        for (int i = 0; i < pairs; i += 4) {
            const int4 keys = *(const int4 *)&c.first[i];
            slot += (keys.x < key) + (keys.y < key) + (keys.z < key) + (keys.w < key);
        }
        if (first) c.expert[slot] = key;
        c.pair[slot][p / top] = (uint8_t)p;
        atomicOr((unsigned *)&c.tokens[slot & ~3], 1u << (slot % 4 * 8 + p / top));
    }
    __syncthreads();
}

/* Where the scales of an expert's matrix begin in a row of scales. */
__device__ __forceinline__ const float *scales_of(const weft_expert_matrix &m, int64_t expert, int scale_row)
{
    return m.scale + (expert * m.scale_rows + scale_row) * m.scale_stride + m.scale_col_phase / 128;
}

} // namespace weft
