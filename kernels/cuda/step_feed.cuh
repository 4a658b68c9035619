/* kernels/cuda/step_feed.cuh - weights on their way: the ring of a block.
 *
 * A tile is 16 rows of w: rows g and g + 8 are what the tensor cores hold in one lane, so with pairs the
 * lower half are the first rows of 8 pairs and the upper half the second ones. A piece is STEP_PIECE bytes
 * of each row of a tile; piece i of a tile is read by team i % STEP_TEAMS: warp i % STEP_TEAMS the first
 * STEP_HALF bytes of each row, warp i % STEP_TEAMS + STEP_TEAMS the others. Pieces lie in the ring in the
 * order of the list, each as columns of 128 bytes by 16 rows, lower half, then upper, 16 bytes at a time
 * permuted by row as the copy engine does it (hopper.cuh).
 * Pieces may land out of order, and a barrier's parity tells only this phase from the last: a team that has
 * read piece i waits next for one of the 2 STEP_TEAMS - 1 pieces behind it (the most where a tile ends), so what
 * had that one's place before, `places` pieces earlier, must have landed. It has if no more than
 * places - (2 STEP_TEAMS - 1) are ever on their way. */
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
    uint32_t entered, done;       /* of one barrier each: an instruction is entered, it is finished */
    int places;
    uint32_t zero; /* always 0, which the compiler does not know (step_arrived) */
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

/* What lies in shared memory, by an address that the compiler knows to be one of it: functions that are not inlined get it by a reference
 * that may point anywhere. */
template <class T> __device__ __forceinline__ T &step_shared(T &where)
{
    return *(T *)__cvta_shared_to_generic(step_anew(shared_address(&where)));
}

__device__ __forceinline__ uint4 step_read(uint32_t address)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

/* ---- writes that have arrived ----
 *
 * What blocks write for one another must be in the L2 when they arrive at a wait. A fence would see to it, but on this
 * hardware it also waits for all copies that the multiprocessor has on their way, and the ring always has some: 1000 to 6000 clocks.
 * So who writes reads back by the same way, past the L1, and goes on when the value is there; then an arrival without a fence
 * will do. Everything that another block may have written is read past the L1 too. */
__device__ __forceinline__ uint32_t step_back(const float *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
template <class T> __device__ __forceinline__ uint32_t step_back(const T *p)
{
    static_assert(sizeof(T) == 2, "elements of activations");
    unsigned short v;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
/* The same for 4 bytes, in half the time: written by an exchange, which gives back what was there once it is done. */
__device__ __forceinline__ uint32_t step_exchange(void *p, uint32_t value)
{
    uint32_t v;
    asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(v) : "l"(p), "r"(value) : "memory");
    return v;
}
/* Until what was given back is there. */
__device__ __forceinline__ void step_arrived(uint32_t back, uint32_t zero)
{
    if ((back & zero) != 0) __trap();
}

/* When this wait was first looked at (0: now). Does not come back from one that is broken. */
__device__ __forceinline__ uint64_t step_waited(uint64_t since, uint64_t patience)
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

/* This block's first tile of a product; the others follow gridDim.x apart. */
__device__ __forceinline__ int step_first_tile(int first)
{
    const int tile = (int)blockIdx.x - first;
    return tile < 0 ? tile + (int)gridDim.x : tile;
}

/* Weights that no one reads again need not push out what the step keeps in the L2. */
__device__ __forceinline__ void step_copy(uint32_t to, const CUtensorMap *map, int row, int block, int piece, uint32_t barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %3, %5, %6}], [%2], %7;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(block), "r"(STEP_PIECE / 128 * piece), "l"(policy)
                 : "memory");
}

/* Pieces that may be on their way at once: told by one of the warps that compute. */
__device__ __forceinline__ void step_set_in_flight(int *in_flight, int pieces) { (void)atomicExch_block(in_flight, pieces); }
__device__ __forceinline__ int step_in_flight(int *in_flight) { return atomicAdd_block(in_flight, 0); }

/* The one thread that feeds. */
__device__ __forceinline__ void step_feed(const StepProgram &program, const StepRing ring, int *in_flight)
{
    const uint64_t policy = streamed();
    StepPlace to = {0, 1}, landed = {0, 0}; /* a place is empty at first */
    int flying = 0;
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
            const int block = half == 0 ? 0 : 8 * tile / half, row = half == 0 ? 16 * tile : 8 * tile % half;
            for (int piece = 0; piece < pieces; piece++) {
                step_barrier_wait(ring.empty + 8 * to.slot, to.parity, ring);
                for (; flying >= step_in_flight(in_flight); flying--) {
                    step_barrier_wait(ring.full + 8 * landed.slot, landed.parity, ring);
                    landed.advance(1, ring.places);
                }
                const uint32_t barrier = ring.full + 8 * to.slot, at = ring.pieces + to.slot * STEP_PIECE_BYTES;
                barrier_expect(barrier, STEP_PIECE_BYTES);
                step_copy(at, map, row, block, piece, barrier, policy);
                flying++;
                to.advance(1, ring.places);
            }
        }
    }
}

#endif

} // namespace weft
