/* kernels/cuda/step_feed.cuh - weights on their way: the ring of a block.
 *
 * A tile is 16 rows of w: rows g and g + 8 are what the tensor cores hold in one lane, so with pairs the
 * lower half are the first rows of 8 pairs and the upper half the second ones. A piece is STEP_PIECE bytes
 * of each row of a tile; piece i of a tile is read by warp i % STEP_WARPS. Pieces lie in the ring in the
 * order of the list: lower half, then upper, each four columns of 128 bytes by 8 rows, 16 bytes at a time
 * permuted by row as the copy engine does it (hopper.cuh). */
#pragma once

#include "kernels/cuda/step.cuh"

namespace weft {

/* Places of the ring, in order. */
struct StepPlace {
    int slot;
    uint32_t parity;
    __device__ __forceinline__ void advance(int by, int places)
    {
        slot += by;
        while (slot >= places) slot -= places, parity ^= 1;
    }
};

enum { STEP_SPINS = 1 << 16 }; /* of a wait between looks at the clock */

struct StepRing {
    uint32_t pieces, full, empty; /* addresses: of the places, and of a barrier for each */
    uint32_t summed, finished;    /* of two barriers for each buffer of sums */
    uint32_t listed, done;        /* of one barrier each: the next instruction is in the list, this one is finished */
    int places;
    uint64_t patience; /* ns of a wait; more means that something is broken */
};
/* At the last four every lane arrives, not one for its warp: racecheck does not follow an order through
 * __syncwarp and the arrival of another lane (measured: 32 arrivals take no longer than one). Barriers of
 * named warps would not do between those that compute and the one that finishes: synccheck wants all of them to
 * come from one place in the code, and racecheck does not follow bar.arrive. */

#ifdef WEFT_HOPPER

/* threadIdx.x, read anew: what is computed from it does not stay in registers (or in local memory, for
 * which there is hardly any L1 left) from one instruction of the list to the next. */
__device__ __forceinline__ int step_thread()
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
/* The same for a value. */
__device__ __forceinline__ uint32_t step_anew(uint32_t value)
{
    asm volatile("" : "+r"(value));
    return value;
}

__device__ __forceinline__ uint4 step_read(uint32_t address)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

/* When this wait was first looked at (0: now). Does not come back from one that is broken. */
__device__ static __noinline__ uint64_t step_waited(uint64_t since, uint64_t patience)
{
    const uint64_t now = peer_clock();
    if (since == 0) return now;
    if (now - since > patience) __trap();
    return since;
}

/* barrier_wait with an end. */
__device__ __forceinline__ void step_barrier_wait(uint32_t barrier, uint32_t parity, const StepRing &ring)
{
    uint32_t over = 0;
    uint64_t since = 0;
    for (int spins = 1; !over; spins++) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(over)
                     : "r"(barrier), "r"(parity)
                     : "memory");
        if (spins % STEP_SPINS == 0) since = step_waited(since, ring.patience);
    }
}

/* The warps that compute. */
__device__ __forceinline__ void step_sync() { named_sync(1, STEP_WARPS * 32); }

/* Rows of w where the halves of a tile begin. */
__device__ __forceinline__ int step_lower(int tile, int half)
{
    const int unit = 8 * tile;
    return half == 0 ? 16 * tile : unit / half * 2 * half + unit % half;
}
__device__ __forceinline__ int step_upper(int lower, int half) { return half == 0 ? lower + 8 : lower + half; }

/* This block's first tile of a product; the others follow gridDim.x apart. */
__device__ __forceinline__ int step_first_tile(int first)
{
    const int tile = (int)blockIdx.x - first;
    return tile < 0 ? tile + (int)gridDim.x : tile;
}

/* Weights that no one reads again need not push out what the step keeps in the L2. */
__device__ __forceinline__ void step_copy(uint32_t to, const CUtensorMap *map, int row, int piece, uint32_t barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(4 * piece), "l"(policy)
                 : "memory");
}

/* The one thread that feeds. */
__device__ __forceinline__ void step_feed(const StepProgram &program, const StepRing ring)
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    StepPlace to = {0, 1}, landed = {0, 0}; /* a place is empty at first */
    int asked = 0;
    const int in_flight = program.in_flight;
    int4 next = program.num_streams > 0 ? *(const int4 *)&program.streams[0].tiles : make_int4(0, 0, 0, 0);
    for (int i = 0; i < program.num_streams; i++) {
        const CUtensorMap *map = &program.streams[i].map;
        const int tiles = next.x, pieces = next.y, half = next.z;
        int tile = step_first_tile(next.w);
        if (i + 1 < program.num_streams) {
            next = *(const int4 *)&program.streams[i + 1].tiles;
            map_prefetch(&program.streams[i + 1].map);
        }
        for (; tile < tiles; tile += gridDim.x) {
            const int lower = step_lower(tile, half), upper = step_upper(lower, half);
            for (int piece = 0; piece < pieces; piece++) {
                step_barrier_wait(ring.empty + 8 * to.slot, to.parity, ring);
                if (asked >= in_flight) {
                    step_barrier_wait(ring.full + 8 * landed.slot, landed.parity, ring);
                    landed.advance(1, ring.places);
                }
                const uint32_t barrier = ring.full + 8 * to.slot, at = ring.pieces + to.slot * STEP_PIECE_BYTES;
                barrier_expect(barrier, STEP_PIECE_BYTES);
                step_copy(at, map, lower, piece, barrier, policy);
                step_copy(at + STEP_PIECE_BYTES / 2, map, upper, piece, barrier, policy);
                asked++;
                to.advance(1, ring.places);
            }
        }
    }
}

#endif

} // namespace weft
