/* kernels/cuda/stream.cuh - matrices that are read once while up to 8 tokens wait for them.
 *
 * A unit is 128 bytes of each of ROWS rows (8 or 16), the work of one warp. Each warp has a ring of shared memory of its own in which its next units
 * arrive, with fp8 each row's scale behind them; no warp waits for another. Within a row the 16-byte pieces of odd
 * rows are stored with their halves swapped, so that two rows meet no bank twice. Activations wait in shared memory
 * in T, with a factor for each 128 columns; fp8 weights become halves exactly. */
#pragma once

#include "kernels/cuda/pack.cuh"

namespace weft {

enum {
    ST_TOKENS = 8,
    ST_WARPS = 8,
    ST_THREADS = ST_WARPS * 32,
    ST_BLOCK = 128 /* bytes of a row in a unit */
};

/* A group of 128 columns of activations, four of each lane, in T; and what they are to be multiplied by. */
template <class T> __device__ __forceinline__ void pack_group(T *to, float *factor, float (&v)[4], bool quantize)
{
    const float scale = scale_group(v, quantize);
    *(uint2 *)(to + 4 * (threadIdx.x % 32)) = make_uint2(pair<T>(v[0], v[1]), pair<T>(v[2], v[3]));
    if (threadIdx.x % 32 == 0) *factor = scale;
}

template <class W> struct Row : WeightRow<W> {
    enum { COLUMNS = ST_BLOCK / (int)sizeof(W), CHUNK = 16 / (int)sizeof(W) };
    int blocks; /* of ST_BLOCK bytes */
    __host__ __device__ Row(int64_t scale_phase, int64_t count)
        : WeightRow<W>(scale_phase, count), blocks((this->phase + this->columns + COLUMNS - 1) / COLUMNS)
    {
    }
    /* Bytes between packed rows of activations: two tokens meet no bank twice. */
    __host__ __device__ int pitch() const { return this->groups * 256 + (sizeof(W) == 1 ? 16 : 64); }
    /* Bytes of packed activations with their factors, of which there are as many as for 8 rows at least. */
    __host__ __device__ int64_t packed(int64_t rows) const { return rows * pitch() + (rows > ST_TOKENS ? rows : (int64_t)ST_TOKENS) * this->groups * 4; }
};

/* Packs `rows` rows by all warps of the block, several groups of a warp on their way at once.
 * load4(v, i, j): columns j to j + 3 of row i; skip(i): row i is not needed. The factor of a group of row i goes to
 * factor[i * row_step + group * group_step]. */
template <class W, class T, class F, class S>
__device__ __forceinline__ void pack_rows(char *x, float *factor, int row_step, int group_step, const Row<W> &row, int rows, bool quantize, F load4,
                                          S skip)
{
    enum { AT_ONCE = 4 };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, items = rows * row.groups;
    for (int item0 = warp; item0 < items; item0 += AT_ONCE * ST_WARPS) {
        float v[AT_ONCE][4];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int item = item0 + k * ST_WARPS, i = item / row.groups, j = item % row.groups * 128 - row.phase + 4 * lane;
            v[k][0] = v[k][1] = v[k][2] = v[k][3] = 0.0f;
            if (item < items && !skip(i) && j >= 0 && j < row.columns) load4(v[k], i, j);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int item = item0 + k * ST_WARPS, i = item / row.groups, group = item % row.groups;
            if (item >= items || skip(i)) continue;
            pack_group((T *)(x + i * row.pitch()) + group * 128, factor + i * row_step + group * group_step, v[k], quantize);
        }
    }
}

/* Where a lane's rows of a unit begin, at the row's first whole block; row i: 4 i + lane / 8. scales: of row lane. */
template <int ROWS> struct Rows {
    const char *weights[ROWS / 4];
    const float *scales;
};

/* A warp's ring of DEPTH units. */
template <class W, int ROWS, int DEPTH> struct Ring {
    enum {
        SCALES = ROWS * ST_BLOCK,
        UNIT = SCALES + (sizeof(W) == 1 ? ROWS * 4 : 0),
        BYTES = ST_WARPS * DEPTH * UNIT /* of all warps */
    };
    char *data;
    int to, from;
    __device__ __forceinline__ Ring(char *all) : data(all + threadIdx.x / 32 * (DEPTH * UNIT)), to(0), from(0) {}
    /* Asks for block `block` of the rows; without `some` for nothing. */
    __device__ __forceinline__ void fetch(const Rows<ROWS> &rows, const Row<W> &row, int block, bool some)
    {
        const int lane = threadIdx.x % 32, at = block * ST_BLOCK + lane % 8 * 16;
        if (some) {
            const uint32_t slot = (uint32_t)__cvta_generic_to_shared(data + to * UNIT);
            const bool in = at >= row.phase && at < row.phase + row.bytes;
#pragma unroll
            for (int i = 0; i < ROWS / 4; i++) {
                const int r = 4 * i + lane / 8;
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(slot + r * ST_BLOCK + ((lane % 8 ^ (r % 2 * 4)) << 4)),
                             "l"(in ? rows.weights[i] + at : rows.weights[i] + row.phase), "r"(in ? 16 : 0)
                             : "memory");
            }
            if (sizeof(W) == 1 && lane < ROWS)
                asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(slot + SCALES + lane * 4), "l"(rows.scales + block) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        to = to + 1 == DEPTH ? 0 : to + 1;
    }
    /* Waits for the oldest unit: its weights of rows 8 n + g, and its scales. */
    __device__ __forceinline__ const float *take(uint4 (&w)[ROWS / 8][2])
    {
        const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 2) : "memory");
        __syncwarp();
        const char *unit = data + from * UNIT;
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) w[n][c] = *(const uint4 *)(unit + (8 * n + g) * ST_BLOCK + ((4 * (c ^ g % 2) + q) << 4));
        from = from + 1 == DEPTH ? 0 : from + 1;
        return (const float *)(unit + SCALES);
    }
};

/* c += the products of 16 bytes of rows with the same columns of tokens; x: of token g. Rows of weights first (16 of
 * them), or tokens first (8 rows). */
template <class W, class T> struct Product {
    enum { PIECES = sizeof(W) == 1 ? 2 : 1 }; /* of 16 bytes of activations */
    uint4 x[PIECES];
    __device__ __forceinline__ void take(const T *from, bool in)
    {
#pragma unroll
        for (int i = 0; i < PIECES; i++) x[i] = in ? *(const uint4 *)(from + 8 * i) : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void rows_first(float (&c)[4], const uint4 &row, const uint4 &row8) const
    {
#pragma unroll
        for (int i = 0; i < 2 * PIECES; i++) {
            uint32_t a0, a1, a2, a3;
            widen(row, i, a0, a2);
            widen(row8, i, a1, a3);
            mma<T>(c, a0, a1, a2, a3, (&x[i / 2].x)[i % 2 * 2], (&x[i / 2].x)[i % 2 * 2 + 1]);
        }
    }
    __device__ __forceinline__ void tokens_first(float (&c)[4], const uint4 &row) const
    {
#pragma unroll
        for (int i = 0; i < 2 * PIECES; i++) {
            uint32_t b0, b1;
            widen(row, i, b0, b1);
            mma<T>(c, (&x[i / 2].x)[i % 2 * 2], 0, (&x[i / 2].x)[i % 2 * 2 + 1], 0, b0, b1);
        }
    }
    static __device__ __forceinline__ void widen(const uint4 &w, int i, uint32_t &low, uint32_t &high)
    {
        if constexpr (sizeof(W) == 1) e4m3_to_half((&w.x)[i], low, high);
        else low = (&w.x)[2 * i], high = (&w.x)[2 * i + 1];
    }
};

/* The warp's units of a block's items, each 16 rows; of an item a warp takes the blocks warp, warp + ST_WARPS, ...
 * C: where an item is:
 *     bool there() const       there is such an item
 *     void advance()           to the block's next one
 *     int hint() const         what rows() wants to have been read in advance
 *     Rows<16> rows(int hint)  the lane's rows */
template <class W, class T, int DEPTH, class C> struct ItemStream {
    enum { ROWS = 16 };
    Ring<W, ROWS, DEPTH> ring;
    const Row<W> &row;
    C next; /* the item behind the one that is fetched */
    int block, hint; /* of the next unit to fetch; of `next` */
    bool some;
    Rows<ROWS> rows;
    __device__ __forceinline__ ItemStream(char *data, const Row<W> &shape, const C &first)
        : ring(data), row(shape), next(first), block(threadIdx.x / 32), hint(0), some(block < shape.blocks && first.there()), rows()
    {
        if (some) {
            rows = next.rows(next.hint());
            next.advance();
            if (next.there()) hint = next.hint();
        }
        for (int i = 0; i < DEPTH - 1; i++) fetch();
    }
    __device__ __forceinline__ void fetch()
    {
        ring.fetch(rows, row, block, some);
        block += ST_WARPS;
        if (block < row.blocks || !some) return;
        block = threadIdx.x / 32;
        some = next.there();
        if (!some) return;
        rows = next.rows(hint);
        next.advance();
        if (next.there()) hint = next.hint();
    }
    /* One item's sums of this warp: sum[n][i] of row 8 n + g, token 2 q + i. factor: [group][ST_TOKENS]. */
    __device__ __forceinline__ void multiply(float (&sum)[2][2], const char *x, const float *factor, int tokens)
    {
        const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
        const T *own = (const T *)(x + g * row.pitch()) + q * Row<W>::CHUNK;
        sum[0][0] = sum[0][1] = sum[1][0] = sum[1][1] = 0.0f;
        for (int b = threadIdx.x / 32; b < row.blocks; b += ST_WARPS) {
            uint4 w[2][2];
            const float *scales = ring.take(w);
            const float by0 = sizeof(W) == 1 ? scales[g] : 1.0f, by1 = sizeof(W) == 1 ? scales[8 + g] : 1.0f;
            const float2 f = *(const float2 *)(factor + b * Row<W>::COLUMNS / 128 * ST_TOKENS + 2 * q);
            float part[2][4] = {};
#pragma unroll
            for (int c = 0; c < 2; c++) {
                Product<W, T> product;
                product.take(own + b * Row<W>::COLUMNS + 4 * c * Row<W>::CHUNK, g < tokens);
                product.rows_first(part[c], w[0][c], w[1][c]);
            }
            fetch();
            sum[0][0] = fmaf(part[0][0] + part[1][0], by0 * f.x, sum[0][0]);
            sum[0][1] = fmaf(part[0][1] + part[1][1], by0 * f.y, sum[0][1]);
            sum[1][0] = fmaf(part[0][2] + part[1][2], by1 * f.x, sum[1][0]);
            sum[1][1] = fmaf(part[0][3] + part[1][3], by1 * f.y, sum[1][1]);
        }
    }
};

/* Sums of an item by warp, row and token. */
struct ItemSums {
    alignas(16) float v[ST_WARPS][16][ST_TOKENS];
    __device__ __forceinline__ void put(const float (&sum)[2][2])
    {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
        *(float2 *)&v[warp][g][2 * q] = make_float2(sum[0][0], sum[0][1]);
        *(float2 *)&v[warp][8 + g][2 * q] = make_float2(sum[1][0], sum[1][1]);
    }
    __device__ __forceinline__ float of(int row, int token) const
    {
        float y = 0.0f;
#pragma unroll
        for (int i = 0; i < ST_WARPS; i++) y += v[i][row][token];
        return y;
    }
};

} // namespace weft
