/* kernels/cuda/fp8_stream.cuh - kernels around fp8.cuh: a block's ring of pieces, filled by one thread through the
 * copy engine and by a warp with their scales, and read by GROUPS warpgroups in turns.
 *
 * A piece takes its warpgroup longer than memory takes to bring it. Only when the warpgroups are faster together than memory
 * does a full ring make up for a time in which they waited; and only when nothing that a piece needs is asked for when the
 * piece is there: a scale's way through a busy memory takes as long as eight pieces. */
#pragma once

#include <cuda.h>

#include "kernels/cuda/fp8.cuh"
#include "kernels/cuda/quantize.cuh"

namespace weft {

enum {
    F8_TOKENS = 8,
    F8_MOST = 20 /* places of a ring */
};
/* Places of a ring: a multiple of the warpgroups, so that a place is always the same one's. (It may find out whether a
 * piece has come only while the one before it at this place has.) */
static inline int fp8_places(int64_t room, int64_t most, int groups) { return (int)((room / FP8_PIECE_BYTES < most ? room / FP8_PIECE_BYTES : most) / groups * groups); }

/* Tokens as the tensor cores take them. */
__host__ __device__ __forceinline__ int fp8_padded(int64_t tokens) { return tokens <= 2 ? (int)tokens : tokens <= 4 ? 4 : 8; }

struct Fp8Places {
    alignas(16) float scales[F8_MOST][FP8_SCALES];
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

/* 4 bytes on their way into shared memory; NULL: a zero. */
__device__ __forceinline__ void fp8_copy4(uint32_t to, const float *from, const float *any)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from != nullptr ? from : any), "r"(from != nullptr ? 4 : 0) : "memory");
}

struct Fp8Ring {
    uint32_t data, scales, full, empty; /* addresses */
    int places;
    Fp8Place place; /* the feeders', each its own */
    __device__ __forceinline__ Fp8Ring(const char *ring, const Fp8Places &p, int count)
        : data(shared_address(ring)), scales(shared_address(p.scales)), full(shared_address(p.full)), empty(shared_address(p.empty)), places(count), place{0, 1}
    {
        /* Kept in registers, not found out anew for every piece. */
        asm volatile("" : "+r"(data), "+r"(scales), "+r"(full), "+r"(empty), "+r"(places));
    }
    /* By one thread, before the others come. A place is full when its bytes and those of the 32 lanes are there. */
    __device__ __forceinline__ void init() const
    {
        for (int i = 0; i < places; i++) barrier_init(full + 8 * i, 1 + 32), barrier_init(empty + 8 * i, 128);
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
    /* The warp that brings scales, each lane two of a piece: of(h) is where entry lane + 32 h is, NULL: 0. any: memory that
     * may be read. */
    template <class F> __device__ __forceinline__ void bring_scales(const float *any, F of)
    {
        barrier_wait(empty + 8 * place.slot, place.parity);
        const uint32_t to = scales + place.slot * (FP8_SCALES * 4) + threadIdx.x % 32 * 4;
        fp8_copy4(to, of(0), any), fp8_copy4(to + 128, of(1), any);
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full + 8 * place.slot) : "memory");
        place.advance(1, places);
    }
};

/* 8 rows of w from `row` on, from column 128 * segment on. */
__device__ __forceinline__ void fp8_copy(uint32_t to, const CUtensorMap *map, int row, int segment, uint32_t barrier, uint64_t policy)
{
    copy_box_once(to, map, 0, row, segment, barrier, policy);
}

/* A piece in one copy: rows [low, low + 8) of each of two neighbouring blocks of rows, as pairs_map() cuts w, from column 128 * segment on. */
__device__ __forceinline__ void fp8_copy_two(uint32_t to, const CUtensorMap *map, int low, int segment, int block, uint32_t barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %3}], [%2], %7;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(0), "r"(low), "r"(segment), "r"(block), "l"(policy)
                 : "memory");
}

/* Tokens on their way into parts: pieces one behind the other, tokens behind one another; the factors of a segment one
 * behind the other, those of the next segment TOKENS behind.
 *
 * A thread asks for what it is going to split, 16 bytes of a segment, and has them put where that segment's parts will be;
 * half a warp has a segment. By all warps that multiply. */
template <int TOKENS, int GROUPS> struct Fp8Input {
    char *const input;
    float *const factors;
    const int tokens, columns, pieces;
    __device__ __forceinline__ Fp8Input(char *to, float *factors_at, int count, int k)
        : input(to), factors(factors_at), tokens(count), columns(k), pieces(fp8_pieces(k))
    {
    }
    static __device__ __forceinline__ int segment() { return threadIdx.x / 16 % FP8_SEGMENTS; }
    static __device__ __forceinline__ int column(int piece) { return (piece * FP8_SEGMENTS + segment()) * 128 + threadIdx.x % 16 * 8; }
    /* 16 bytes of the thread in a token's piece, before they are split. */
    __device__ __forceinline__ char *raw(int t, int piece) const { return input + (t * pieces + piece) * FP8_INPUT_BYTES + threadIdx.x % 64 * 16; }
    /* f(piece) for the thread's share. */
    template <class F> __device__ __forceinline__ void each(F f) const
    {
#pragma unroll 1 /* here and below: instructions that are run once take longer to come than to run */
        for (int piece = threadIdx.x / 64; piece < pieces; piece += 2 * GROUPS)
            if (column(piece) < columns) f(piece);
    }
    /* rows: bfloat16, in whole 16 bytes. */
    __device__ __forceinline__ void ask(const void *rows, int64_t stride) const
    {
        each([&](int piece) {
            copy16(shared_address(raw(0, piece)), (const bf16 *)rows + column(piece));
#pragma unroll 1
            for (int t = 1; TOKENS > 1 && t < tokens; t++) copy16(shared_address(raw(t, piece)), (const bf16 *)rows + t * stride + column(piece));
        });
    }
    /* What this thread has asked for is there. */
    static __device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }
    static __device__ __forceinline__ void copy16(uint32_t to, const void *from)
    {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    }
    /* Splits all tokens. change(eight, t, column): what their values are made to be before. */
    template <class F> __device__ __forceinline__ void split(bool quantize, F change) const
    {
#pragma unroll 1
        for (int piece = threadIdx.x / 64; piece < pieces; piece += 2 * GROUPS)
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                if (t > 0 && t >= tokens) break;
                uint4 eight = make_uint4(0, 0, 0, 0);
                if (column(piece) < columns) {
                    eight = *(const uint4 *)raw(t, piece);
                    change(eight, t, column(piece));
                }
                __syncwarp();
                uint2 part, finer;
                float by;
                if (quantize) {
                    float v[8];
                    fp8_widen(eight, v);
                    by = fp8_split(v, true, part, finer);
                } else by = fp8_split(eight, part, finer);
                fp8_put(input + (t * pieces + piece) * FP8_INPUT_BYTES, segment(), part, finer);
                if (threadIdx.x % 16 == 0) factors[(piece * FP8_SEGMENTS + segment()) * TOKENS + t] = by;
            }
        writes_visible();
        named_sync(1, GROUPS * 128);
    }
};

/* A warpgroup's way through the pieces of all items, counted on over all of them: every one of GROUPS. */
template <int TOKENS, int GROUPS> struct Fp8Walk {
    const Fp8Ring &ring;
    const Fp8Lane own;
    int pieces; /* of an item */
    const uint32_t x, x_high;
    uint32_t factors;
    Fp8Place mine;
    int piece;
    /* input, factors: as Fp8Input makes them. */
    __device__ __forceinline__ Fp8Walk(const Fp8Ring &r, int of_item, const char *input, const float *factors_at)
        : ring(r), own(threadIdx.x), pieces(of_item), x(fp8_low(shared_address(input))), x_high(fp8_high(of_item * FP8_INPUT_BYTES)),
          factors(shared_address(factors_at + own.segment * TOKENS)), mine{0, 0}, piece(fp8_group())
    {
        mine.advance(piece, ring.places);
    }
    /* Another product of one token, whose factors lie elsewhere. */
    __device__ __forceinline__ void begin(int of_item, const float *factors_at) { pieces = of_item, factors = shared_address(factors_at + own.segment * TOKENS); }
    __device__ __forceinline__ uint32_t weights(const Fp8Place &p) const { return fp8_low(ring.data) + p.slot * (FP8_PIECE_BYTES / 16); }
    __device__ __forceinline__ uint32_t scale(const Fp8Place &p) const { return ring.scales + p.slot * (FP8_SCALES * 4) + (4 * own.row + own.segment) * 4; }
    /* Two pieces of one token, at two places, the second begun while the first is multiplied: one alone mostly waits. */
    __device__ __forceinline__ void two(float &sum)
    {
        Fp8Place second = mine;
        second.advance(GROUPS, ring.places);
        float d[2][4], by[2][1], f[2][1];
        barrier_wait(ring.full + 8 * mine.slot, mine.parity);
        fp8_begin<8>(d[0], weights(mine), x + piece * (FP8_INPUT_BYTES / 16), x_high);
        fp8_factors(by[0], scale(mine));
        fp8_factors(f[0], factors + piece * (FP8_SEGMENTS * 4));
        barrier_wait(ring.full + 8 * second.slot, second.parity);
        fp8_begin<8>(d[1], weights(second), x + (piece + GROUPS) * (FP8_INPUT_BYTES / 16), x_high);
        fp8_factors(by[1], scale(second));
        fp8_factors(f[1], factors + (piece + GROUPS) * (FP8_SEGMENTS * 4));
        products_wait<1>();
        hold(d[0]);
        barrier_arrive(ring.empty + 8 * mine.slot);
        sum = fmaf(by[0][0] * f[0][0], own.sum(d[0]), sum);
        products_wait<0>();
        hold(d[1]);
        barrier_arrive(ring.empty + 8 * second.slot);
        sum = fmaf(by[1][0] * f[1][0], own.sum(d[1]), sum);
        mine = second;
        mine.advance(GROUPS, ring.places);
    }
    /* An item of 16 rows: what this lane has of the sums of its row, of each token. */
    __device__ __forceinline__ void item(float (&sum)[TOKENS])
    {
#pragma unroll
        for (int t = 0; t < TOKENS; t++) sum[t] = 0.0f;
        if constexpr (TOKENS == 1)
            for (; piece + GROUPS < pieces && ring.places >= 2 * GROUPS; piece += 2 * GROUPS) two(sum[0]);
        for (; piece < pieces; piece += GROUPS) {
            barrier_wait(ring.full + 8 * mine.slot, mine.parity);
            fp8_piece(sum, own, weights(mine), x + piece * (FP8_INPUT_BYTES / 16), x_high, scale(mine), factors + piece * (FP8_SEGMENTS * TOKENS * 4),
                      [&] { barrier_arrive(ring.empty + 8 * mine.slot); });
            mine.advance(GROUPS, ring.places);
        }
        piece -= pieces;
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
