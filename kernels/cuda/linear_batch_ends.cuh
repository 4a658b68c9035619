/* kernels/cuda/linear_batch_ends.cuh - what is done with the sums of a batch's products before they are written.
 *
 * Sums of a tile come as fours: the lane 4 g + q of a warp has rows g and g + 8 of 16, tokens 8 j + 2 q and the next.
 * A tile's fours are (j, one of four warps, side, lane); each side has 64 rows, and a tile of 64 rows one side. */
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/linear_batch.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/tensor_map.cuh"

#ifdef WEFT_CUDA_HOPPER
#include <cuda.h>

namespace weft {

enum {
    BATCH_SUMMING = 256,                 /* threads; a warp more fetches weights, one writes norms and one fetches x */
    BATCH_WEIGHTS = BATCH_SUMMING,       /* the threads that fetch them, and x */
    BATCH_NORMS = BATCH_SUMMING + 32,    /* the first of a warp */
    BATCH_INPUTS = BATCH_SUMMING + 64,
    BATCH_THREADS = BATCH_SUMMING + 96,
    BATCH_SHARED = 232448,
    BATCH_CHUNKS = 2, /* of BATCH_K columns in a unit: one thread asks for all, and for a large copy as fast as for a small one */
    BATCH_EARLY = 8, /* sums of squares that a thread asks for at once */
    /* Before the kernel in front has ended: so many KB at once, then one in so many clocks, about as fast as memory is. A
     * queue there would hold up what that kernel still writes. */
    BATCH_BURST = 48,
    BATCH_PACE = 32
};

enum BatchEnd { END_PLAIN, END_HEADS, END_NORM };

enum { HEAD = 128 }; /* with END_HEADS a tile is one head of so many elements */

struct BatchJob {
    CUtensorMap w, x;
    weft_linear_args a;
    weft_silu_mul_args silu;
    weft_rope_args rope;
    weft_kv_write_args pages;
    weft_rms_norm_args norm;   /* END_NORM: of y, whose factor the next product applies; else of x, not yet applied, rows 0: none */
    void *scaled;              /* END_NORM: (tokens, n) of y's type */
    float *squares;            /* (square_rows, N): sums to be added up, of what is normed */
    int square_rows;           /* with norm in front */
    int key_head, value_head;  /* the first, counted in heads of y; pages.tokens is 0 without */
    int tiles, units, split;   /* units of a tile, dealt to `split` blocks of a cluster */
};

/* N tokens, ROWS (128 or 64) of a tile. */
template <int N, int END, int ROWS> struct BatchRoom {
    enum {
        SUMS = 128 / ROWS,      /* of a four, in a block: two warpgroups share a tile's columns if they do not its rows */
        CHUNKS = BATCH_CHUNKS,
        CHUNK_W = ROWS * BATCH_K * 2,
        CHUNK_X = N * BATCH_K * 2,
        W_BYTES = CHUNKS * CHUNK_W,
        UNIT = W_BYTES + CHUNKS * CHUNK_X,
        GROUP = 2 * ROWS,       /* fours of 8 tokens */
        FOURS = N / 8 * GROUP,  /* of a tile */
        TURNS = END == END_HEADS ? N : 1,
        OTHER = FOURS * SUMS * 16 + TURNS * (HEAD + 4) * 4 + TURNS * 8 + BATCH_SUMMING * 4 + N * 4 + 8 * N * 4 + 1024,
        ROOM = (BATCH_SHARED - 1024 - OTHER) / UNIT,
        MOST = (ROWS == 64 ? 16 : 10) / CHUNKS,
        DEPTH = ROOM < MOST ? ROOM : MOST
    };
    alignas(1024) char ring[DEPTH][UNIT];
    float4 sums[SUMS * FOURS];    /* (block of the cluster, of SUMS, its sums of the fours that this block ends) */
    float turns[TURNS][HEAD + 4]; /* of tokens: cosines, sines; padded so that the lanes of a warp meet no bank twice */
    int64_t places[TURNS];     /* of tokens in the pages */
    float parts[BATCH_SUMMING]; /* of sums of squares */
    float factor[N];           /* of tokens */
    float squares[8][N];       /* of 16 rows */
    uint64_t full[DEPTH], empty[DEPTH], arrived, freed, ready;
};

} // namespace weft
#endif

namespace weft {

#ifdef WEFT_HOPPER

/* Where a four of a tile stands. */
struct Four {
    int j, side, warp, lane;
    template <int ROWS> static __device__ __forceinline__ Four at(int i) { return ROWS == 64 ? Four{i / 128, 0, i / 32 % 4, i % 32} : Four{i / 256, i / 32 % 2, i / 64 % 4, i % 32}; }
    __device__ __forceinline__ int token() const { return 8 * j + lane / 4; } /* of pairs that are turned */
};

/* v: rows row + g and row + 8 + g. */
template <class T> __device__ __forceinline__ void batch_write(const weft_linear_args &a, const Four &f, int64_t row, float4 v)
{
    const int g = f.lane / 4, q = f.lane % 4;
    const bool pairs = a.y_dtype == a.x_dtype && !a.add && (a.y_stride | a.n) % 2 == 0 && (uintptr_t)a.y % 4 == 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float v0 = h == 0 ? v.x : v.z, v1 = h == 0 ? v.y : v.w;
        if (pairs) {
            const uint32_t two = turned(pair<T>(v0, v1));
            const int64_t n = row + 8 * h + 2 * q;
            if (f.token() < a.tokens && n < a.n) *(uint32_t *)((T *)a.y + f.token() * a.y_stride + n) = two;
            continue;
        }
        const int64_t n = row + 8 * h + g;
        for (int e = 0; e < 2; e++) {
            const int t = 8 * f.j + 2 * q + e;
            if (t >= a.tokens || n >= a.n) continue;
            float y = e == 0 ? v0 : v1;
            if (a.add) y += load(a.y, a.y_dtype, t * a.y_stride + n);
            store(a.y, a.y_dtype, t * a.y_stride + n, y);
        }
    }
}

__device__ __forceinline__ float4 batch_bias(const weft_linear_args &a, const Four &f, int64_t row, float4 v)
{
    if (a.bias == nullptr) return v;
    const int64_t n = row + f.lane / 4;
    const float low = n < a.n ? load(a.bias, a.bias_dtype, n) : 0.0f, high = n + 8 < a.n ? load(a.bias, a.bias_dtype, n + 8) : 0.0f;
    return make_float4(v.x + low, v.y + low, v.z + high, v.w + high);
}

/* The first side has the first halves of a head's pairs, the other their mates; each turns its own by the tokens' angles,
 * and keys and values also go into the pages. */
template <class T, class Room> __device__ __forceinline__ void batch_heads(const BatchJob &job, Room &room, const Four &f, int head, float4 v, float4 mate)
{
    const int g = f.lane / 4, q = f.lane % 4, pair0 = 16 * f.warp, row = f.side * (HEAD / 2) + pair0;
    v = batch_bias(job.a, f, (int64_t)head * HEAD + row, v);
    mate = batch_bias(job.a, f, (int64_t)head * HEAD + (row ^ HEAD / 2), mate);
    const bool turns = head < (int)job.rope.heads;
    T *y = (T *)job.a.y + (int64_t)head * HEAD + row, *cache = nullptr;
    int64_t cache_head = 0;
    if (job.pages.tokens > 0 && head >= job.key_head) {
        const bool value = head >= job.value_head;
        cache = (T *)(value ? job.pages.v_cache : job.pages.k_cache) + row;
        cache_head = (int64_t)(head - (value ? job.value_head : job.key_head)) * job.pages.pages.page_size;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t two = h == 0 ? pair<T>(v.x, v.y) : pair<T>(v.z, v.w);
        if (turns) {
            const float2 own = widen_pair<T>(two), its = widen_pair<T>(h == 0 ? pair<T>(mate.x, mate.y) : pair<T>(mate.z, mate.w));
            float by[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float *turn = &room.turns[8 * f.j + 2 * q + e][pair0 + g + 8 * h];
                const float cos = turn[0], sin = turn[HEAD / 2], mine = e == 0 ? own.x : own.y, other = e == 0 ? its.x : its.y;
                by[e] = f.side == 0 ? mine * cos - other * sin : mine * cos + other * sin;
            }
            two = pair<T>(by[0], by[1]);
        }
        two = turned(two);
        const int token = f.token(), at = 8 * h + 2 * q;
        if (token >= job.a.tokens) continue;
        *(uint32_t *)(y + token * job.a.y_stride + at) = two;
        if (cache != nullptr && room.places[token] >= 0) *(uint32_t *)(cache + (room.places[token] + cache_head) * HEAD + at) = two;
    }
}

/* y, residual += y, that times the gain, and the sum of its squares over the warp's rows. old: the residual. */
template <class T, int ROWS, class Room>
__device__ __forceinline__ void batch_norm(const BatchJob &job, Room &room, const Four &f, int64_t row, float4 v, const uint32_t (&old)[2], const uint32_t (&gain)[2])
{
    const weft_rms_norm_args &a = job.norm;
    const int q = f.lane % 4, token = f.token();
    v = batch_bias(job.a, f, row, v);
    float sum = 0.0f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t two = turned(h == 0 ? pair<T>(v.x, v.y) : pair<T>(v.z, v.w));
        const float2 own = widen_pair<T>(two), before = widen_pair<T>(old[h]), by = widen_pair<T>(gain[h]);
        const uint32_t both = pair<T>(own.x + before.x, own.y + before.y);
        const float2 r = widen_pair<T>(both);
        const int64_t n = row + 8 * h + 2 * q;
        sum += r.x * r.x + r.y * r.y;
        if (token >= job.a.tokens) continue;
        *(uint32_t *)((T *)job.scaled + token * job.a.n + n) = pair<T>(r.x * by.x, r.y * by.y);
        *(uint32_t *)((T *)a.residual + token * a.residual_stride + n) = both;
        *(uint32_t *)((T *)job.a.y + token * job.a.y_stride + n) = two;
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (q == 0) room.squares[ROWS / 64 * f.warp + f.side][token] = sum;
}

/* Angles and places of the tokens, of the host's arrays alone. A token without a place in the table is not turned. */
template <int N, int END, class Room> __device__ __forceinline__ void batch_places(const BatchJob &job, Room &room)
{
    if (END != END_HEADS) return;
    if (threadIdx.x < N) room.places[threadIdx.x] = (int)threadIdx.x < job.pages.tokens ? place_of(job.pages, threadIdx.x) : -1;
#pragma unroll 4
    for (int i = threadIdx.x; i < N * (HEAD / 4); i += BATCH_SUMMING) {
        const int t = i / (HEAD / 4), at = i % (HEAD / 4) * 4;
        const int position = t < job.a.tokens ? job.rope.positions[t] : -1;
        const float still = at < HEAD / 2 ? 1.0f : 0.0f;
        *(float4 *)&room.turns[t][at] = position >= 0 && position < job.rope.max_positions
                                            ? *(const float4 *)(job.rope.cos_sin + (int64_t)position * HEAD + at)
                                            : make_float4(still, still, still, still);
    }
    named_sync(1, BATCH_SUMMING);
}

/* The norm in front, for those who read it later: this block's share of it, a part of a row if there are more blocks than rows. One
 * warp, which asks for much at once: while memory is busy every answer takes long, and the kernel does not end before. */
template <class T> __device__ __forceinline__ void batch_normed(const BatchJob &job, int columns)
{
    enum { AT_ONCE = 4 };
    const weft_rms_norm_args &a = job.norm;
    const int lane = threadIdx.x % 32, packs = (int)a.cols / 8, parts = max(1, (int)(gridDim.x / a.rows));
    for (int64_t i = blockIdx.x; i < a.rows * parts; i += gridDim.x) {
        const int64_t row = i / parts;
        const int step = 32 * parts, first = (int)(i % parts) * 32 + lane;
        const Pack<T, 8> *r = (const Pack<T, 8> *)((const T *)a.residual + row * a.residual_stride), *gain = (const Pack<T, 8> *)a.gain;
        Pack<T, 8> *y = (Pack<T, 8> *)((T *)a.y + row * a.y_stride);
        float factor = 0.0f;
        for (int at = first; at - lane < packs; at += AT_ONCE * step) {
            Pack<T, 8> p[AT_ONCE], g[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (at + j * step < packs) p[j] = r[at + j * step], g[j] = gain[at + j * step];
            if (at == first) {
                float sum = 0.0f;
#pragma unroll 4
                for (int s = lane; s < job.square_rows; s += 32) sum += __ldcg(&job.squares[s * columns + row]);
                factor = 1.0f / sqrtf(warp_sum(sum) / (float)a.cols + a.eps);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                if (at + j * step >= packs) continue;
#pragma unroll
                for (int e = 0; e < 8; e++) p[j].v[e] = narrow<T>(widen(p[j].v[e]) * factor * widen(g[j].v[e]));
                y[at + j * step] = p[j];
            }
        }
    }
}

/* Fetches weights of units, weights(place), `kb` KB of them, through a ring of `depth` places; `ready` is over when the kernel in front has ended. */
template <class Weights> __device__ __forceinline__ void batch_feed_weights(int units, int depth, int kb, uint32_t empty, uint32_t ready, Weights weights)
{
    bool early = true;
    for (int unit = 0, place = 0, parity = 1; unit < units; unit++) {
        if (early && unit * kb >= BATCH_BURST) {
            const long long until = clock64() + kb * BATCH_PACE;
            while (clock64() < until && !barrier_over(ready, 0)) {}
            early = unit < depth && !barrier_over(ready, 0);
        }
        barrier_wait(empty + 8 * place, parity);
        weights(place);
        if (++place == depth) place = 0, parity ^= 1;
    }
}

/* The same of x, inputs(place), by a thread of its own when the kernel in front has ended: one that asks for both would be slower than memory. */
template <class Inputs> __device__ __forceinline__ void batch_feed_inputs(int units, int depth, uint32_t empty, uint32_t ready, Inputs inputs)
{
    dependency_wait_only();
    barrier_arrive(ready);
    for (int unit = 0, place = 0, parity = 1; unit < units; unit++) {
        barrier_wait(empty + 8 * place, parity);
        inputs(place);
        if (unit == 0) dependency_release();
        if (++place == depth) place = 0, parity ^= 1;
    }
}

/* Sums of squares of the rows of x, `columns` (a power of 2) of them: asked for early, added up when the first tile is done. */
struct BatchSquares {
    float early[BATCH_EARLY];
    __device__ __forceinline__ void ask(const BatchJob &job, int columns)
    {
        const int token = threadIdx.x % columns, slice = threadIdx.x / columns, slices = BATCH_SUMMING / columns;
#pragma unroll
        for (int i = 0; i < BATCH_EARLY; i++) {
            const int row = slice + i * slices;
            early[i] = row < job.square_rows ? __ldcg(&job.squares[row * columns + token]) : 0.0f;
        }
    }
    template <class Room> __device__ __forceinline__ void factors(const BatchJob &job, Room &room, int columns)
    {
        const int token = threadIdx.x % columns, slice = threadIdx.x / columns, slices = BATCH_SUMMING / columns;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < BATCH_EARLY; i++) sum += early[i];
        for (int row = slice + BATCH_EARLY * slices; row < job.square_rows; row += slices) sum += __ldcg(&job.squares[row * columns + token]);
        room.parts[threadIdx.x] = sum;
        named_sync(1, BATCH_SUMMING);
        if ((int)threadIdx.x < columns) {
            float all = 0.0f;
            for (int s = 0; s < slices; s++) all += room.parts[s * columns + threadIdx.x];
            room.factor[threadIdx.x] = 1.0f / sqrtf(all / (float)job.norm.cols + job.norm.eps);
        }
        named_sync(1, BATCH_SUMMING);
    }
};

#endif /* WEFT_HOPPER */

#ifdef WEFT_CUDA_HOPPER
/* linear_batch_gates.cu; job.x is made, with boxes of a chunk of `columns` tokens. */
bool batch_gates(BatchJob &job, int columns, void *stream);
/* linear_batch_narrow.cu; boxes of BATCH_CHUNKS chunks. Where that is more than `blocks` tiles, and no more than multiprocessors. */
bool batch_narrow(BatchJob &job, int columns, int blocks, void *stream);
#endif

} // namespace weft
