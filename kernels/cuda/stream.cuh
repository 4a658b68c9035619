/* kernels/cuda/stream.cuh - matrices that are read once while up to 8 tokens wait for them.
 *
 * A warp takes 8 rows of weights, 128 bytes of each, at a time: they are the columns of the tensor cores' tile,
 * tokens its rows. Where a ring of shared memory holds weights on their way, a stage is ST_SPAN bytes of each of
 * its rows, a part for each of the ST_WARPS warps that multiply, and with fp8 the scales of those parts; one more
 * warp keeps it filled. Activations wait in shared memory in T, with a factor for each 128 columns. */
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/pack.cuh"

namespace weft {

enum {
    ST_TOKENS = 8,
    ST_WARPS = 8,            /* that multiply */
    ST_BLOCK = 128,          /* bytes of a row that a warp takes */
    ST_SPAN = 1024,          /* bytes of a row in one stage */
    ST_PITCH = ST_SPAN + 64, /* two rows meet no bank twice */
    ST_STAGES_LEAST = 3,
    ST_STAGES_MOST = 10
};

/* A group of 128 columns of activations in T, and what they are to be multiplied by; all lanes of a warp. Columns
 * [begin, end) of the group are there. load4(v, j): columns j to j + 3. */
template <class T, class F> __device__ __forceinline__ void pack_group(T *to, float *factor, int begin, int end, bool quantize, F load4)
{
    const int lane = threadIdx.x % 32, j = 4 * lane;
    float v[4] = {};
    if (j >= begin && j < end) load4(v, j);
    const float scale = scale_group(v, quantize);
    *(uint2 *)(to + j) = make_uint2(pair<T>(v[0], v[1]), pair<T>(v[2], v[3]));
    if (lane == 0) *factor = scale;
}

/* One step of the tensor cores: 16 bytes of a lane's row of weights with the same columns of its token. */
template <class W, class T> struct Step;
template <class T> struct Step<uint8_t, T> {
    uint4 x0, x1;
    __device__ __forceinline__ void take(const T *x, bool in)
    {
        x0 = in ? *(const uint4 *)x : make_uint4(0, 0, 0, 0);
        x1 = in ? *(const uint4 *)(x + 8) : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void multiply(float (&c)[4], const uint4 &w) const
    {
        one(c, w.x, x0.x, x0.y);
        one(c, w.y, x0.z, x0.w);
        one(c, w.z, x1.x, x1.y);
        one(c, w.w, x1.z, x1.w);
    }
    static __device__ __forceinline__ void one(float (&c)[4], uint32_t w, uint32_t low, uint32_t high)
    {
        uint32_t b0, b1;
        e4m3_to_half(w, b0, b1);
        mma<T>(c, low, 0, high, 0, b0, b1);
    }
};
template <class T> struct Step<T, T> {
    uint4 x;
    __device__ __forceinline__ void take(const T *from, bool in) { x = in ? *(const uint4 *)from : make_uint4(0, 0, 0, 0); }
    __device__ __forceinline__ void multiply(float (&c)[4], const uint4 &w) const
    {
        mma<T>(c, x.x, 0, x.y, 0, w.x, w.y);
        mma<T>(c, x.z, 0, x.w, 0, w.z, w.w);
    }
};

template <class W> struct Row : WeightRow<W> {
    enum { COLUMNS = ST_BLOCK / (int)sizeof(W), CHUNK = 16 / (int)sizeof(W) };
    int blocks; /* of ST_BLOCK bytes */
    __host__ __device__ Row(int64_t scale_phase, int64_t count) : WeightRow<W>(scale_phase, count), blocks((this->phase + this->columns + COLUMNS - 1) / COLUMNS) {}
    /* Bytes between packed rows of activations: two tokens meet no bank twice. */
    __host__ __device__ int pitch() const { return this->groups * 256 + 16; }
};

/* Stages of ROWS rows. Each side keeps its own copy of where it is. */
template <int ROWS> struct Ring {
    enum { SCALES = ROWS * ST_PITCH, BYTES = SCALES + ROWS * ST_WARPS * 4 }; /* of a stage; where its scales begin */
    char *data;
    unsigned long long *full, *empty;
    int stages, stage;
    unsigned parity;
    __device__ __forceinline__ void advance()
    {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};
struct RingBarriers {
    unsigned long long full[ST_STAGES_MOST], empty[ST_STAGES_MOST];
};

/* Where one row of weights and its scales begin. */
struct StreamRow {
    const char *weights;
    const float *scales;
};

#ifdef WEFT_HOPPER
/* bytes and both addresses: whole 16 bytes */
__device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, int bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void word_copy(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
/* Arrives once the thread's word copies so far have come. */
__device__ __forceinline__ void arrive_behind_words(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/* By all threads; the block meets before the ring is used. */
template <class W, int ROWS> __device__ __forceinline__ Ring<ROWS> ring_open(char *data, RingBarriers &b, int stages)
{
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; i++) {
            barrier_init(shared_address(&b.full[i]), sizeof(W) == 1 ? 33 : 1);
            barrier_init(shared_address(&b.empty[i]), ST_WARPS);
        }
        barriers_ready();
    }
    return {data, b.full, b.empty, stages, 0, 0};
}

/* One warp: the rows of items blockIdx.x, + gridDim.x, ... row_at(item, r): its row r. */
template <class W, int ROWS, class F> __device__ __forceinline__ void ring_fill(Ring<ROWS> ring, const Row<W> &row, int items, F row_at)
{
    const int lane = threadIdx.x % 32, r = lane % ROWS, spans = (row.blocks + ST_WARPS - 1) / ST_WARPS;
    enum { WORDS = ROWS * ST_WARPS / 32 };
    if ((int)blockIdx.x >= items) return;
    StreamRow next = row_at(blockIdx.x, r);
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const StreamRow from = next;
        if (item + (int)gridDim.x < items) next = row_at(item + gridDim.x, r);
        for (int span = 0; span < spans; span++) {
            const int begin = max(span * ST_SPAN, row.phase), end = min((span + 1) * ST_SPAN, row.phase + row.bytes);
            const uint32_t to = shared_address(ring.data + ring.stage * Ring<ROWS>::BYTES), full = shared_address(&ring.full[ring.stage]);
            barrier_wait(shared_address(&ring.empty[ring.stage]), ring.parity ^ 1);
            if (lane == 0) barrier_expect(full, ROWS * (end - begin));
            __syncwarp();
            if (lane < ROWS) bulk_copy(to + r * ST_PITCH + begin - span * ST_SPAN, from.weights + begin - row.phase, end - begin, full);
            if (sizeof(W) == 1) {
#pragma unroll
                for (int i = 0; i < WORDS; i++) {
                    const int part = lane / ROWS * WORDS + i;
                    if (span * ST_WARPS + part < row.blocks)
                        word_copy(to + Ring<ROWS>::SCALES + (r * ST_WARPS + part) * 4, from.scales + span * ST_WARPS + part);
                }
                arrive_behind_words(full);
            }
            ring.advance();
        }
    }
}

/* One of the warps 0 to ST_WARPS - 1: its part of one item. Lane 4 g + q: sums of token g and rows 8 n + 2 q, + 1. */
template <class W, class T, int ROWS>
__device__ __forceinline__ void ring_multiply(Ring<ROWS> &ring, const Row<W> &row, const char *x, const float *factor, int tokens,
                                              float (&sum)[ROWS / 8][2])
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int spans = (row.blocks + ST_WARPS - 1) / ST_WARPS;
    const T *own = (const T *)(x + g * row.pitch());
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) sum[n][0] = sum[n][1] = 0.0f;
    for (int span = 0; span < spans; span++) {
        const int block = span * ST_WARPS + warp;
        const bool some = block < row.blocks, token = some && g < tokens;
        const float own_factor = token ? factor[g * row.groups + block * Row<W>::COLUMNS / 128] : 0.0f;
        Step<W, T> step[2];
#pragma unroll
        for (int c = 0; c < 2; c++) step[c].take(own + block * Row<W>::COLUMNS + (4 * c + q) * Row<W>::CHUNK, token);
        barrier_wait(shared_address(&ring.full[ring.stage]), ring.parity);
        const char *data = ring.data + ring.stage * Ring<ROWS>::BYTES, *w = data + g * ST_PITCH + warp * ST_BLOCK + 16 * q;
        const float *scales = (const float *)(data + Ring<ROWS>::SCALES) + warp;
        uint4 weights[ROWS / 8][2];
        float by[ROWS / 8][2];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int at = block * ST_BLOCK + 64 * c + 16 * q;
            const bool in = at >= row.phase && at < row.phase + row.bytes;
#pragma unroll
            for (int n = 0; n < ROWS / 8; n++) weights[n][c] = in ? *(const uint4 *)(w + n * 8 * ST_PITCH + 64 * c) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) by[n][i] = sizeof(W) == 1 && some ? scales[(n * 8 + 2 * q + i) * ST_WARPS] : 1.0f;
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&ring.empty[ring.stage]));
        ring.advance();
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
            float part[4] = {};
#pragma unroll
            for (int c = 0; c < 2; c++) step[c].multiply(part, weights[n][c]);
#pragma unroll
            for (int i = 0; i < 2; i++) sum[n][i] = fmaf(part[i], by[n][i] * own_factor, sum[n][i]);
        }
    }
}
#endif

} // namespace weft
