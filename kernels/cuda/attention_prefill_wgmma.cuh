/* kernels/cuda/attention_prefill_wgmma.cuh - attention of many queries on Hopper: the items of work, a block's
 * shared memory, and the warp that fills it. */
#pragma once

#include <cuda.h>

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/hopper.cuh"

namespace weft {

enum {
    GROUPS = 3,  /* warpgroups that multiply: 160 registers a thread, all in use */
    ROWS = 64 * GROUPS,
    KEYS = 128,  /* of a tile; fewer make products that wait for shared memory */
    STAGES = 2,
    PARTS = 2,   /* of a tile's weights; 1 and 4 are 2% slower */
    THREADS = 128 * (GROUPS + 1),
    OUTSIDE = -(1 << 20) /* a row where copies find nothing and bring zeros */
};

struct Job {
    CUtensorMap q, k, v;
    weft_attention_args a;
    unsigned *queue;  /* two counters: items taken, blocks that ended; NULL: items in fixed turns */
    int unit_heads;   /* query heads of a unit, a power of two: rows of an item are (token, head of the unit) */
    int units;
    int section;      /* units that are worked on together: their keys and values fit in the L2 */
    int box;          /* rows that one copy brings: as many as are sure to lie together */
};

struct Item {
    int request; /* -1: no more */
    int first_token, query0, queries, unit, kv_head;
    int tiles, first_tile; /* tiles of keys, from first_tile */
};

/* What a row of an item is for: registers are short, so it waits in shared memory. */
struct RowPlace {
    int from, to;    /* the keys that it sees */
    int token, head; /* where its result goes; token -1: nowhere */
};

/* Shared memory of a block. */
template <int DIM> struct Room {
    static constexpr int q_bytes = ROWS * DIM * 2, tile_bytes = KEYS * DIM * 2;
    char q[q_bytes];
    char k[STAGES][tile_bytes], v[STAGES][tile_bytes];
    uint64_t q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES], v_here;
    Item item;
    RowPlace rows[ROWS];
};

#ifdef WEFT_HOPPER

/* Stage and phase of a ring. */
struct Turn {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void next()
    {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

/* ---- the warp that copies ---- */

/* Blocks of `step` tokens that requests from `first` to this lane's have. */
__device__ __forceinline__ int blocks_up_to(const weft_attention_args &a, int first, int step)
{
    const int lane = threadIdx.x % 32, r = first + lane;
    int blocks = r < a.requests ? (a.query_start_loc[r + 1] - a.query_start_loc[r] + step - 1) / step : 0;
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, blocks, d);
        if (lane >= d) blocks += other;
    }
    return blocks;
}

__device__ __forceinline__ int count_blocks(const weft_attention_args &a, int step)
{
    int total = 0;
    for (int first = 0; first < a.requests; first += 32) total += __shfl_sync(~0u, blocks_up_to(a, first, step), 31);
    return total;
}

/* Item `number`: sections of units one after the other, in each the requests in order, their last
 * queries, which see most keys, first. */
__device__ __forceinline__ Item item_at(const Job &job, int64_t number, int blocks, int step)
{
    const weft_attention_args &a = job.a;
    Item item = {};
    item.request = -1;
    const int64_t per_section = (int64_t)blocks * job.section;
    if (number >= (int64_t)blocks * job.units) return item;
    const int section = (int)(number / per_section) * job.section, units = min(job.section, job.units - section);
    const int rest = (int)(number % per_section);
    int block = rest / units;
    item.unit = section + rest % units;
    item.kv_head = (a.first_head + item.unit * job.unit_heads) / a.group_size - a.first_kv_head;
    for (int first = 0; first < a.requests; first += 32) {
        const int up_to = blocks_up_to(a, first, step);
        const unsigned hit = __ballot_sync(~0u, block < up_to);
        if (hit == 0) {
            block -= __shfl_sync(~0u, up_to, 31);
            continue;
        }
        const int lane = __ffs(hit) - 1;
        item.request = first + lane;
        item.query0 = (__shfl_sync(~0u, up_to, lane) - 1 - block) * step;
        break;
    }
    item.first_token = a.query_start_loc[item.request];
    item.queries = min(step, a.query_start_loc[item.request + 1] - item.first_token - item.query0);
    const KeyRange keys = keys_of(a, item.request);
    int low, high, other;
    visible(a, keys, item.query0, low, other);
    visible(a, keys, item.query0 + item.queries - 1, other, high);
    item.first_tile = low / KEYS;
    item.tiles = high > low ? (high + KEYS - 1) / KEYS - item.first_tile : 0;
    return item;
}

/* Where this lane's piece of a tile begins, counted in rows of k and v; far outside where nothing is. */
__device__ __forceinline__ int piece_row(const Job &job, const Item &item, int key, int count)
{
    const weft_attention_args &a = job.a;
    if (key >= count) return OUTSIDE;
    if (a.keys == WEFT_KEYS_NEW) return item.first_token + key;
    const int64_t row = key_row(a, item.request, item.kv_head, key, 0, 1);
    return row < 0 || row > INT32_MAX - 256 ? OUTSIDE : (int)row;
}

template <int DIM>
__device__ __forceinline__ void copy_piece(const Job &job, const void *map, uint32_t tile, int piece, int row, int head, uint32_t barrier)
{
#pragma unroll
    for (int h = 0; h < DIM / 64; h++) copy_box(tile + (uint32_t)(h * KEYS + piece * job.box) * 128, map, 64 * h, head, row, barrier);
}

/* Values of keys behind the last one may be anything, NaN too: zeros, as their weight 0 is not enough. */
template <int DIM> __device__ __forceinline__ void clear_values(char *tile, int from)
{
    for (int i = threadIdx.x % 32; i < (KEYS - from) * 8 * (DIM / 64); i += 32) {
        const int half = i / ((KEYS - from) * 8), rest = i % ((KEYS - from) * 8);
        *(uint4 *)(tile + half * KEYS * 128 + from * 128 + rest * 16) = make_uint4(0, 0, 0, 0);
    }
    writes_visible();
    __syncwarp();
}

template <int DIM> __device__ __forceinline__ void copy_items(const Job &job, Room<DIM> &room)
{
    const weft_attention_args &a = job.a;
    const int lane = threadIdx.x % 32, step = ROWS / job.unit_heads, pieces = KEYS / job.box;
    const int blocks = count_blocks(a, step);
    constexpr int tile_bytes = Room<DIM>::tile_bytes;
    Turn k_turn, v_turn;
    uint32_t q_phase = 0, here_phase = 0;
    int64_t number = blockIdx.x;
    for (bool more = true; more;) {
        const Item item = item_at(job, number, blocks, step);
        more = item.request >= 0;
        barrier_wait(shared_address(&room.q_empty), q_phase ^ 1);
        q_phase ^= 1;
        if (lane == 0) {
            room.item = item;
            if (more) barrier_expect(shared_address(&room.q_full), Room<DIM>::q_bytes);
            else barrier_arrive(shared_address(&room.q_full));
        }
        __syncwarp();
        if (!more) break;
        if (lane < GROUPS * (DIM / 64)) { /* 64 rows of 64 dims each */
            const int token = item.first_token + item.query0 + lane / (DIM / 64) * (64 / job.unit_heads);
            copy_box(shared_address(room.q) + lane * 8192, &job.q, lane % (DIM / 64) * 64, item.unit * job.unit_heads, token, shared_address(&room.q_full));
        }
        const int count = keys_of(a, item.request).count, head = a.keys == WEFT_KEYS_NEW ? item.kv_head : 0;
        auto copy_values = [&](int key0, int row) {
            const uint32_t full = shared_address(&room.v_full[v_turn.stage]);
            barrier_wait(shared_address(&room.v_empty[v_turn.stage]), v_turn.phase ^ 1);
            const bool beyond = key0 + KEYS > count;
            const uint32_t barrier = beyond ? shared_address(&room.v_here) : full;
            if (lane == 0) barrier_expect(barrier, tile_bytes);
            __syncwarp();
            if (lane < pieces) copy_piece<DIM>(job, &job.v, shared_address(room.v[v_turn.stage]), lane, row, head, barrier);
            if (beyond) {
                barrier_wait(barrier, here_phase);
                here_phase ^= 1;
                clear_values<DIM>(room.v[v_turn.stage], count - key0);
                if (lane == 0) barrier_arrive(full);
            }
            v_turn.next();
        };
        /* The keys of the next tile come before the values of this one: they are needed first. */
        int key0 = (item.first_tile + item.tiles - 1) * KEYS, before = 0;
        int row = item.tiles > 0 && lane < pieces ? piece_row(job, item, key0 + lane * job.box, count) : 0;
        for (int i = 0; i < item.tiles; i++, key0 -= KEYS) {
            const uint32_t full = shared_address(&room.k_full[k_turn.stage]);
            barrier_wait(shared_address(&room.k_empty[k_turn.stage]), k_turn.phase ^ 1);
            if (lane == 0) barrier_expect(full, tile_bytes);
            __syncwarp();
            if (lane < pieces) copy_piece<DIM>(job, &job.k, shared_address(room.k[k_turn.stage]), lane, row, head, full);
            k_turn.next();
            const int next = lane < pieces && i + 1 < item.tiles ? piece_row(job, item, key0 - KEYS + lane * job.box, count) : 0;
            if (i > 0) copy_values(key0 + KEYS, before);
            before = row, row = next;
        }
        if (item.tiles > 0) copy_values(key0 + KEYS, before);
        if (job.queue == nullptr) number += gridDim.x;
        else {
            unsigned taken = 0;
            if (lane == 0) taken = atomicAdd(&job.queue[0], 1);
            number = gridDim.x + __shfl_sync(~0u, taken, 0);
        }
    }
    if (job.queue != nullptr && lane == 0 && atomicAdd(&job.queue[1], 1) == gridDim.x - 1) job.queue[0] = job.queue[1] = 0;
}

#endif /* WEFT_HOPPER */

} // namespace weft
