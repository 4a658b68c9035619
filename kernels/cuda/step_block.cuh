/* kernels/cuda/step_block.cuh - what a block of a step keeps, and how blocks wait for one another. */
#pragma once

#include "kernels/cuda/step_product.cuh"

namespace weft {

enum { STEP_LISTED = 3 };
enum { STEP_WORDS = (int)(sizeof(StepInstruction) / 8), STEP_THREADS = STEP_WARPS * 32 };
static_assert(sizeof(StepInstruction) % 8 == 0 && STEP_WORDS <= STEP_THREADS, "instructions are copied in words, one a thread");

/* Keys of a warp in a decode attention, and what becomes of them. */
struct StepPart {
    int head, first_head, rows; /* KV head, its first query head and how many */
    int splits, part;           /* parts of the head's keys; this block's */
    int low, high;              /* keys that the token sees */
    int key, left, old;         /* the warp's first key, how many, and how many of those are of earlier steps */
    int64_t row;                /* of the first key in the cache; -1: the warp has none */
};

/* What every block keeps behind its ring. What lives from one instruction to the next is here, and the
 * parts of the kernel are functions that are not inlined: with this much shared memory there is hardly an
 * L1 left, so a register that the compiler keeps in local memory costs a way to the L2. */
struct StepFixed {
    StepInstruction list[STEP_LISTED]; /* from the one that the finishing warp may still be at to the next */
    int64_t pages[2 * STEP_TOKENS];
    int positions[2 * STEP_TOKENS];
    StepProgram program;
    StepRing ring;
    StepPlaces places;
    StepPart parts[STEP_WARPS]; /* of the attention before (`again`) */
    StepPlace place;           /* of the ring, where the next product begins */
    int turn;                  /* tiles so far */
    int in_flight;             /* pieces on their way at once */
    int at[STEP_WARPS];        /* in the list, of each warp that computes */
    int whole;                 /* the residual sum that is held, late_norm's, is so as a whole */
    int arrived;               /* at the wait that comes next */
    unsigned calls[STEP_GROUPS]; /* of each group before this launch */
    unsigned long long target; /* arrivals at the next wait */
    weft_rms_norm_args late_norm;
    alignas(8) unsigned long long full[STEP_MOST_PLACES], empty[STEP_MOST_PLACES], summed[STEP_SUMS], finished[STEP_SUMS], entered, done;
};

#ifdef WEFT_HOPPER

/* This block is at the next wait: all that it wrote before has arrived. By one thread. */
__device__ __forceinline__ void step_arrive(const StepFixed &fixed)
{
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(fixed.program.arrivals), "l"(1ull) : "memory");
}

/* Until all blocks are here; what they wrote before is seen behind it, past the L1. All warps of this one have ended the
 * instruction before. */
__device__ __forceinline__ void step_wait(StepFixed &fixed)
{
    if (step_thread() == 0) {
        const unsigned long long target = fixed.target, *arrivals = fixed.program.arrivals;
        unsigned long long seen;
        int spins = 0;
        uint64_t since = 0;
        if (!fixed.arrived) step_arrive(fixed);
        do {
            asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(arrivals) : "memory");
            if (++spins % STEP_SPINS == 0) since = step_waited(since, fixed.program.patience);
        } while (seen < target);
        fixed.target = target + gridDim.x;
        fixed.arrived = 0;
    }
    step_sync();
}

/* Nothing that follows comes from the L1. */
__device__ __forceinline__ void step_forget(const StepFixed &fixed)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(fixed.program.arrivals) : "memory");
    step_arrived(v, fixed.ring.zero);
}

/* The gains of a norm, which the step does not write: into the L2 while the blocks wait. */
__device__ __forceinline__ void step_ahead(const StepInstruction &in)
{
    if (in.kind != STEP_PRODUCT || !in.product.has_norm) return;
    const int at = 128 * ((int)blockIdx.x + (int)gridDim.x * step_thread()); /* a line each */
    if (at < (int)in.product.norm.cols * 2) asm volatile("prefetch.global.L2 [%0];" ::"l"((const char *)in.product.norm.gain + at));
}

/* The shares of a residual sum that wait in shared memory: there alone, or (whole) in their rows. */
template <class T> __device__ __forceinline__ void step_put_held(const weft_rms_norm_args &n, const char *held, bool whole)
{
    const int packs = (int)n.cols / 8;
    const StepPacks mine = step_mine(packs);
    const int each = mine.end - mine.first;
    for (int i = step_thread(); i < (int)n.rows * each; i += STEP_THREADS) {
        const int pack = mine.first + i % each;
        *(uint4 *)((T *)n.residual + i / each * n.residual_stride + 8 * pack) = *(const uint4 *)(held + 16 * (whole ? i / each * packs + pack : i));
    }
}

/* Writes the residual sum that is held, until it has arrived. */
template <class T> __device__ __forceinline__ void step_put(const StepFixed &fixed)
{
    const weft_rms_norm_args &n = fixed.late_norm;
    step_put_held<T>(n, fixed.places.held, fixed.whole != 0);
    step_arrived(step_back_shares<T>(n, n.residual, n.residual_stride), fixed.ring.zero);
}

/* Every instruction, by all warps that compute, once, before it reads or writes what others do: until all blocks are here, if it
 * has to wait for them, and the finishing warp is done with the instruction before. */
__device__ __forceinline__ void step_enter(StepFixed &fixed, const StepInstruction &in)
{
    const int at = *(volatile int *)&fixed.at[step_thread() / 32];
    if (step_thread() == 0) step_set_in_flight(&fixed.in_flight, min(in.calm, fixed.program.in_flight));
    if (in.wait) step_wait(fixed);
    if (at > 0) step_barrier_wait(fixed.ring.done, (at - 1) & 1, fixed.ring);
    barrier_arrive(fixed.ring.entered); /* not before: the warp that finishes would go on, and could end the next phase of `done` */
}

#endif

} // namespace weft
