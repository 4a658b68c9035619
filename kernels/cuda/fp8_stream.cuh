/* kernels/cuda/fp8_stream.cuh - kernels around fp8.cuh: a block's ring of pieces, filled by one thread through the
 * copy engine and read by GROUPS warpgroups in turns.
 *
 * A piece takes its warpgroup longer than the copy engine to bring it, and the more so the fewer warpgroups there are: only when
 * they are faster together than memory is does a full ring make up for a time in which they waited. */
#pragma once

#include <cuda.h>

#include "kernels/cuda/fp8.cuh"
#include "kernels/cuda/quantize.cuh"

namespace weft {

enum {
    F8_TOKENS = 8,
    F8_MOST = 24 /* places of a ring */
};
/* Places of a ring: a multiple of the warpgroups, so that a place is always the same one's. (It may find out whether a
 * piece has come only while the one before it at this place has.) */
static inline int fp8_places(int64_t room, int64_t most, int groups) { return (int)((room / FP8_PIECE_BYTES < most ? room / FP8_PIECE_BYTES : most) / groups * groups); }

/* Tokens as the tensor cores take them. */
__host__ __device__ __forceinline__ int fp8_padded(int64_t tokens) { return tokens <= 2 ? (int)tokens : tokens <= 4 ? 4 : 8; }

struct Fp8Barriers {
    alignas(8) unsigned long long full[F8_MOST], empty[F8_MOST];
};

#ifdef WEFT_HOPPER

struct Fp8Place {
    int slot;
    uint32_t parity;
    /* by: at most `places` */
    __device__ __forceinline__ void advance(int by, int places)
    {
        slot += by;
        if (slot >= places) slot -= places, parity ^= 1;
    }
};

struct Fp8Ring {
    uint32_t data, full, empty; /* addresses */
    int places;
    Fp8Place place; /* the feeder's, or where the next item begins */
    __device__ __forceinline__ Fp8Ring(const char *ring, const Fp8Barriers &b, int count, bool feeder)
        : data(shared_address(ring)), full(shared_address(b.full)), empty(shared_address(b.empty)), places(count), place{0, feeder}
    {
        /* Kept in registers, not found out anew for every piece. */
        asm volatile("" : "+r"(data), "+r"(full), "+r"(empty), "+r"(places));
    }
    /* By one thread, before the others come. */
    __device__ __forceinline__ void init() const
    {
        for (int i = 0; i < places; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 4);
        barriers_ready();
    }
    /* The feeder: the next place, once it is empty; `bytes` will come. */
    __device__ __forceinline__ void claim(uint32_t &to, uint32_t &barrier, int bytes)
    {
        barrier_wait(empty + 8 * place.slot, place.parity);
        to = data + place.slot * FP8_PIECE_BYTES, barrier = full + 8 * place.slot;
        barrier_expect(barrier, bytes);
        place.advance(1, places);
    }
};

/* Weights that no one reads again need not push out what is kept in the L2. */
__device__ __forceinline__ uint64_t fp8_policy()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
/* 8 rows of w from `row` on, from column 128 * segment on. */
__device__ __forceinline__ void fp8_copy(uint32_t to, const CUtensorMap *map, int row, int segment, uint32_t barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(segment), "l"(policy)
                 : "memory");
}

/* Tokens on their way into parts: pieces one behind the other, tokens behind one another; the factors of a segment one
 * behind the other, those of the next segment TOKENS behind.
 *
 * Each warpgroup makes the parts of a piece just before it multiplies it for the first time, so that the ring empties
 * meanwhile. A thread asks for what it is going to split, 16 bytes of a segment, and has them put where that segment's
 * parts will be. Of two pieces, those that follow one another in its warpgroup, each half of a warp has one segment. */
template <int TOKENS, int GROUPS> struct Fp8Input {
    char *const input;
    float *const factors;
    const int tokens, columns, pieces;
    __device__ __forceinline__ Fp8Input(char *to, float *factors_at, int count, int k)
        : input(to), factors(factors_at), tokens(count), columns(k), pieces(fp8_pieces(k))
    {
    }
    static __device__ __forceinline__ int group() { return fp8_group(); }
    static __device__ __forceinline__ int ahead() { return threadIdx.x % 128 / 64 * GROUPS; } /* of the two pieces the second? */
    static __device__ __forceinline__ int segment() { return threadIdx.x / 16 % FP8_SEGMENTS; }
    static __device__ __forceinline__ int column(int piece) { return (piece * FP8_SEGMENTS + segment()) * 128 + threadIdx.x % 16 * 8; }
    /* 16 bytes of the thread in a token's piece, before they are split. */
    __device__ __forceinline__ char *raw(int t, int piece) const { return input + (t * pieces + piece) * FP8_INPUT_BYTES + threadIdx.x % 64 * 16; }
    /* f(piece) for the thread's share. */
    template <class F> __device__ __forceinline__ void each(F f) const
    {
        for (int piece = group() + ahead(); piece < pieces; piece += 2 * GROUPS)
            if (column(piece) < columns) f(piece);
    }
    /* rows: bfloat16, in whole 16 bytes. */
    __device__ __forceinline__ void ask(const void *rows, int64_t stride) const
    {
        each([&](int piece) {
            for (int t = 0; t < tokens; t++) copy16(shared_address(raw(t, piece)), (const bf16 *)rows + t * stride + column(piece));
        });
    }
    /* What this thread has asked for is there. */
    static __device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }
    static __device__ __forceinline__ void copy16(uint32_t to, const void *from)
    {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    }
    /* Splits `first` and the piece behind it of this warpgroup, which comes here as a whole. change(v, t, column): what the
     * tokens' values are made to be before. */
    template <class F> __device__ __forceinline__ void split(int first, bool quantize, F change) const
    {
        const int piece = first + ahead();
        if (piece < pieces)
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                if (t >= tokens) break;
                float v[8] = {};
                if (column(piece) < columns) {
                    fp8_widen(*(const uint4 *)raw(t, piece), v);
                    change(v, t, column(piece));
                }
                __syncwarp();
                uint2 part, finer;
                const float by = fp8_split(v, quantize, part, finer);
                fp8_put(input + (t * pieces + piece) * FP8_INPUT_BYTES, segment(), part, finer);
                if (threadIdx.x % 16 == 0) factors[(piece * FP8_SEGMENTS + segment()) * TOKENS + t] = by;
            }
        writes_visible();
        named_sync(2 + group(), 128);
    }
};

/* A warpgroup's way through the pieces of all items, every one of GROUPS. */
template <int TOKENS, int GROUPS, class C> struct Fp8Walk {
    const Fp8Ring &ring;
    Fp8Scales<GROUPS, C> scales;
    const Fp8Lane own;
    const uint32_t x, x_high, factors;
    Fp8Place mine;
    int piece; /* of the item */
    float scale, scale_then;
    /* input, factors: as Fp8Input makes them. */
    __device__ __forceinline__ Fp8Walk(const Fp8Ring &r, const Fp8Scales<GROUPS, C> &s, const char *input, const float *factors_at)
        : ring(r), scales(s), own(threadIdx.x), x(fp8_low(shared_address(input))), x_high(fp8_high(s.pieces * FP8_INPUT_BYTES)),
          factors(shared_address(factors_at + own.segment * TOKENS)), mine{0, 0}, piece(fp8_group())
    {
        mine.advance(piece, ring.places);
        scale = scales.ask(), scale_then = scales.ask();
    }
    __device__ __forceinline__ void one(float (&sum)[TOKENS], float &by)
    {
        barrier_wait(ring.full + 8 * mine.slot, mine.parity);
        fp8_piece(sum, own, fp8_low(ring.data) + mine.slot * (FP8_PIECE_BYTES / 16), x + piece * (FP8_INPUT_BYTES / 16), x_high, by,
                  factors + piece * (FP8_SEGMENTS * TOKENS * 4), [&] {
                      if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * mine.slot);
                  });
        by = scales.ask();
        mine.advance(GROUPS, ring.places);
        piece += GROUPS;
    }
    /* An item of 16 rows: what this lane has of the sums of its row, of each token. before(piece): the piece and this
     * warpgroup's next one are about to be multiplied. */
    template <class F> __device__ __forceinline__ void item(float (&sum)[TOKENS], F before)
    {
#pragma unroll
        for (int t = 0; t < TOKENS; t++) sum[t] = 0.0f;
        while (piece + GROUPS < scales.pieces) {
            before(piece);
            one(sum, scale), one(sum, scale_then);
        }
        if (piece < scales.pieces) {
            before(piece);
            one(sum, scale);
            const float other = scale;
            scale = scale_then, scale_then = other;
        }
        piece -= scales.pieces;
    }
};

/* Sums of an item by warp, token and row of a half. */
template <int TOKENS, int GROUPS> struct Fp8Sums {
    float v[4 * GROUPS][TOKENS][8];
    __device__ __forceinline__ void put(const float (&sum)[TOKENS], const Fp8Lane &own)
    {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const float both = sum[t] + __shfl_xor_sync(~0u, sum[t], 1);
            if (own.used && lane % 2 == 0) v[warp][t][lane / 4] = both;
        }
    }
    __device__ __forceinline__ float of(int row, int token) const
    {
        const int half = row / 8 * 2;
        float sum = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) sum += v[4 * g + half][token][row % 8] + v[4 * g + half + 1][token][row % 8];
        return sum;
    }
};

#endif

} // namespace weft
