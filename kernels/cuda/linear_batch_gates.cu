/* kernels/cuda/linear_batch_gates.cu - the product of gates and their values for up to 32 tokens on Hopper GPUs, with silu.
 *
 * A tile (linear_batch_tokens.cuh) has 64 to 128 gates and as many values; one warpgroup has the gates, the other their
 * values. (Multiprocessors share their way to the L2 with neighbours: busy and idle ones beside each other, or a longer
 * way for x beside few rows, cost more than in linear_batch.cu's products, which are short.) */
#include "kernels/cuda/linear_batch_tokens.cuh"

#ifdef WEFT_CUDA_HOPPER

namespace weft {

template <int GATES> struct GatesRoom : TokensRoom {
    enum { WIDE = GATES * 2 + 16 /* bytes of a row below, so that rows meet no bank twice */ };
    alignas(16) char ends[2][BATCH_TOKENS][WIDE]; /* a tile's gates and values, narrowed */
    float bias[2][GATES];
};

#ifdef WEFT_HOPPER

/* c: tokens g and g + 8 of the warp's 16, rows 8 j + 2 q and the next of the tile's gates or values. Only half of the warps have tokens: all
 * of them take part behind shared memory, and write whole packs. Little code, since what a block does at its end comes from the L2
 * or beyond, a line of instructions after another. */
template <class T, int GATES> __device__ __forceinline__ void gates_end(const BatchJob &job, GatesRoom<GATES> &room, int tile, const float (&c)[GATES / 2])
{
    const int side = threadIdx.x / 128, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int token = threadIdx.x % 128 / 32 * 16 + g;
    const weft_linear_args &a = job.a;
    const weft_silu_mul_args &silu = job.silu;
    const int64_t cols = silu.cols, first = (int64_t)tile * GATES;
    const bool whole = (a.y_stride | silu.y_stride | cols) % 8 == 0 && ((uintptr_t)a.y | (uintptr_t)silu.y) % 16 == 0;
    const int each = whole ? 8 : 1, parts = GATES / each;
    named_sync(1, BATCH_SUMMING); /* the tile before is read, this one's biases are there */
    if (token < BATCH_TOKENS) {
        const float factor[2] = {job.norm.rows > 0 ? room.factor[token] : 1.0f, job.norm.rows > 0 ? room.factor[token + 8] : 1.0f};
#pragma unroll
        for (int j = 0; j < GATES / 8; j++) {
            const float2 bias = *(const float2 *)&room.bias[side][8 * j + 2 * q];
#pragma unroll
            for (int h = 0; h < 2; h++)
                *(uint32_t *)&room.ends[side][token + 8 * h][(8 * j + 2 * q) * 2] = pair<T>(c[4 * j + 2 * h] * factor[h] + bias.x, c[4 * j + 2 * h + 1] * factor[h] + bias.y);
        }
    }
    named_sync(1, BATCH_SUMMING);
    auto silu_of = [](T gate, T up) { return narrow<T>(silu_times<T>(widen(gate), widen(up))); };
#pragma unroll 1
    for (int i = threadIdx.x; i < (int)a.tokens * parts; i += BATCH_SUMMING) {
        const int t = i / parts, at = i % parts * each;
        const char *gates = &room.ends[0][t][at * 2], *ups = &room.ends[1][t][at * 2];
        T *y = (T *)a.y + t * a.y_stride + first + at, *to = (T *)silu.y + t * silu.y_stride + first + at;
        if (first + at >= cols) continue;
        if (whole) {
            const Pack<T, 8> gate = *(const Pack<T, 8> *)gates, up = *(const Pack<T, 8> *)ups;
            Pack<T, 8> both;
#pragma unroll
            for (int e = 0; e < 8; e++) both.v[e] = silu_of(gate.v[e], up.v[e]);
            *(Pack<T, 8> *)to = both, *(Pack<T, 8> *)y = gate, *(Pack<T, 8> *)(y + cols) = up;
        } else {
            const T gate = *(const T *)gates, up = *(const T *)ups;
            *to = silu_of(gate, up), *y = gate, y[cols] = up;
        }
    }
}

__device__ __forceinline__ float gates_bias(const BatchJob &job, int64_t gate, int side)
{
    const weft_linear_args &a = job.a;
    return a.bias != nullptr && gate < job.silu.cols ? load(a.bias, a.bias_dtype, side * job.silu.cols + gate) : 0.0f;
}

#endif

/* GATES of a tile. */
template <class T, int GATES> struct GatesForm {
    enum { EACH = GATES, CHUNKS = 1 };
    typedef GatesRoom<GATES> Room;
#ifdef WEFT_HOPPER
    static __device__ __forceinline__ void copy(uint32_t to, const BatchJob &job, int tile, int unit, uint32_t barrier, uint64_t policy)
    {
        copy_box_once(to, &job.w, unit * BATCH_K, tile * GATES, 0, barrier, policy);
    }
    static __device__ __forceinline__ void begin(const BatchJob &job, Room &room, int tile)
    {
        for (int i = threadIdx.x; i < 2 * GATES; i += BATCH_SUMMING) room.bias[i / GATES][i % GATES] = gates_bias(job, tile * (int64_t)GATES + i % GATES, i / GATES);
    }
    static __device__ __forceinline__ void end(const BatchJob &job, Room &room, int tile, const float (&c)[GATES / 2]) { gates_end<T, GATES>(job, room, tile, c); }
#endif
};

template <class T, int GATES> static bool start(BatchJob &job, int columns, void *stream)
{
    const weft_linear_args &a = job.a;
    const int64_t cols = job.silu.cols;
    if (!tensor_map(&job.w, a.w_dtype, a.w, {a.k, cols, 2}, {2 * a.w_stride, 2 * a.w_stride * cols}, {BATCH_K, GATES, 2})) return false;
    job.tiles = (int)div_up(cols, GATES);
    launch_by_tokens<T, GatesForm<T, GATES>>(job, columns, stream);
    return true;
}

template <class T> static bool by_gates(BatchJob &job, int columns, void *stream)
{
    const int64_t cols = job.silu.cols, sms = job.a.cuda->sms;
    static const int sizes[] = {64, 96, 112, 128};
    int best = 128;
    int64_t least_rows = INT64_MAX;
    for (int gates : sizes) {
        const int64_t rows = div_up(div_up(cols, gates), sms) * gates;
        if (rows < least_rows) best = gates, least_rows = rows;
    }
    if (best == 64) return start<T, 64>(job, columns, stream);
    if (best == 96) return start<T, 96>(job, columns, stream);
    if (best == 112) return start<T, 112>(job, columns, stream);
    return start<T, 128>(job, columns, stream);
}

bool batch_gates(BatchJob &job, int columns, void *stream)
{
    return job.a.x_dtype == WEFT_BF16 ? by_gates<bf16>(job, columns, stream) : by_gates<__half>(job, columns, stream);
}

} // namespace weft

#endif
