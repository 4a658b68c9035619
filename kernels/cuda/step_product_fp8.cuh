/* kernels/cuda/step_product_fp8.cuh - a product of the step with e4m3 weights and one token of bfloat16: the
 * tensor cores read the ring themselves (fp8.cuh), two warpgroups taking turns at the pieces of a tile. */
#pragma once

#include "kernels/cuda/fp8.cuh"
#include "kernels/cuda/step_product.cuh"

namespace weft {

static_assert((int)FP8_PIECE_BYTES == (int)STEP_PIECE_BYTES, "the ring's pieces");

#ifdef WEFT_HOPPER

/* Scales of a lane (Fp8Scales); items are tiles. */
struct StepScales {
    const weft_linear_args &a;
    int half;
    Fp8Lane lane;
    const float *row;
    __device__ __forceinline__ int hint(int tile) const
    {
        const int lower = step_lower(tile, half), at = lane.row < 8 ? lower + lane.row : step_upper(lower, half) + lane.row - 8;
        return __ldg(a.scale_row + min(at, (int)a.n - 1));
    }
    __device__ __forceinline__ void begin(int, int hint) { row = a.scale + hint * a.scale_stride + a.scale_col_phase / 128 + lane.segment; }
    __device__ __forceinline__ const float *at(int piece) const
    {
        return (piece * FP8_SEGMENTS + lane.segment) * 128 < (int)a.k ? row + piece * FP8_SEGMENTS : nullptr;
    }
};

/* The input, which lies in shared memory as 16-bit values, into its two parts at the same place; the factors of
 * its segments behind it. */
__device__ __forceinline__ void step_split(const StepProduct &p, const StepPlaces &places)
{
    const int thread = step_thread(), pieces = fp8_pieces(p.linear.k);
    float *factor = (float *)(places.x + pieces * FP8_INPUT_BYTES);
#pragma unroll 4
    for (int segment = thread / 16; segment < pieces * FP8_SEGMENTS; segment += STEP_WARPS * 2) {
        float v[8];
        fp8_widen(*(const uint4 *)(places.x + segment * 256 + thread % 16 * 16), v);
        uint2 part, finer;
        const float by = fp8_split(v, false, part, finer);
        __syncwarp();
        fp8_put(places.x + segment / FP8_SEGMENTS * FP8_INPUT_BYTES, segment % FP8_SEGMENTS, part, finer);
        if (thread % 16 == 0) factor[segment] = by;
    }
    writes_visible();
}

/* As step_tiles. scales: not yet asked. */
__device__ __forceinline__ void step_tiles_fp8(const StepProduct &p, const StepRing &ring, StepPlace &place, int &turn, Fp8Scales<StepScales> &scales,
                                               float &scale, float &scale_then, const StepPlaces &places)
{
    const int thread = step_thread(), warp = thread / 32, lane = thread % 32, group = thread / 128, pieces = scales.pieces;
    const Fp8Lane own(thread);
    const uint32_t x_at = shared_address(places.x), factors = x_at + pieces * FP8_INPUT_BYTES + own.segment * 4;
    const uint32_t x = fp8_low(x_at), x_high = fp8_high(1024), w = fp8_low(ring.pieces);
    StepPlace mine = place;
    mine.advance(group, ring.places);
    int piece = group;
    for (int tile = step_first_tile(p.first); tile < p.tiles; tile += gridDim.x, turn++) {
        float sum[1] = {};
        auto one = [&](float &by) {
            step_barrier_wait(ring.full + 8 * mine.slot, mine.parity, ring);
            fp8_piece(sum, own, w + mine.slot * (FP8_PIECE_BYTES / 16), x + piece * (FP8_INPUT_BYTES / 16), x_high, by, factors + piece * (FP8_SEGMENTS * 4), [&] {
                named_sync(3 + group, 128); /* all four warps have read */
                if (thread % 128 == 0) barrier_arrive(ring.empty + 8 * mine.slot);
            });
            by = scales.ask();
            mine.advance(2, ring.places);
            piece += 2;
        };
        for (; piece + 2 < pieces;) one(scale), one(scale_then);
        if (piece < pieces) {
            one(scale);
            const float other = scale;
            scale = scale_then, scale_then = other;
        }
        piece -= pieces;
        place.advance(pieces, ring.places);
        sum[0] += __shfl_xor_sync(~0u, sum[0], 1);
        const int buffer = turn % STEP_SUMS;
        float *to = places.sums + (buffer * STEP_WARPS + warp) * 16 + own.row;
        step_barrier_wait(ring.finished + 8 * buffer, turn / STEP_SUMS % 2 ^ 1, ring);
        if (own.used && !own.odd) *to = sum[0];
        if (lane % 4 == (warp % 2 ? 0 : 2)) *(own.row < 8 ? to + 8 : to - 8) = 0.0f; /* another warp's rows */
        barrier_arrive(ring.summed + 8 * buffer);
    }
}

#endif

} // namespace weft
