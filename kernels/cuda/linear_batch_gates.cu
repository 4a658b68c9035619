/* kernels/cuda/linear_batch_gates.cu - the product of gates and their values for up to 32 tokens on Hopper GPUs, with silu.
 *
 * Here tokens are the tensor cores' rows, 64 of them whatever their number, and rows of w the columns: a tile has 64 to 128
 * gates and as many values, so that each multiprocessor has one tile of about the same size and all columns of it, and
 * nothing is to be joined. (Multiprocessors share their way to the L2 with neighbours: busy and idle ones beside each
 * other, or a longer way for x beside few rows, cost more than in linear_batch.cu's products, which are short.) A unit is
 * a tile's next 64 columns; one warpgroup has the gates, the other their values. */
#include "kernels/cuda/linear_batch_ends.cuh"

#ifdef WEFT_CUDA_HOPPER

namespace weft {

/* GATES of a tile. The ring's places are x's 64 columns of the tokens, then gates and values. */
template <int GATES> struct GatesRoom {
    enum {
        MOST = 16,
        W_BYTES = 2 * GATES * BATCH_K * 2,
        WIDE = GATES * 2 + 16 /* bytes of a row below, so that rows meet no bank twice */
    };
    alignas(16) char ends[2][BATCH_TOKENS][WIDE]; /* a tile's gates and values, narrowed */
    float parts[BATCH_SUMMING], factor[64], bias[2][GATES];
    uint64_t full[MOST], empty[MOST], ready;
};
template <int GATES> struct GatesPlaces {
    enum { BYTES = BATCH_SHARED - 1024 - ((int)sizeof(GatesRoom<GATES>) + 1023) / 1024 * 1024 };
};

#ifdef WEFT_HOPPER

/* c: tokens g and g + 8 of the warp's 16, rows 8 j + 2 q and the next of the tile's gates or values. Only half of the warps have tokens: all
 * of them take part behind shared memory, and write whole packs. Little code, since what a block does at its end comes from the L2
 * or beyond, a line of instructions after another. */
template <class T, int GATES> __device__ __forceinline__ void gates_end(const BatchJob &job, GatesRoom<GATES> &room, int tile, float (&c)[GATES / 2])
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
    auto silu_of = [](T gate, T up) { return narrow<T>(widen(gate) / (1.0f + expf(-widen(gate))) * widen(up)); };
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

template <class T, int GATES> __device__ __forceinline__ void gates_sum(const BatchJob &job, GatesRoom<GATES> &room, uint32_t ring, int columns, int depth)
{
    const uint32_t full = shared_address(room.full), empty = shared_address(room.empty), x_bytes = (uint32_t)columns * BATCH_K * 2;
    const uint32_t unit_bytes = x_bytes + GatesRoom<GATES>::W_BYTES;
    const int side = threadIdx.x / 128;
    float c[GATES / 2];
    BatchSquares squares;
    dependency_wait_only();
    const bool front = job.norm.rows > 0;
    if (front) squares.ask(job, columns);
    for (int tile = blockIdx.x, place = 0, parity = 0; tile < job.tiles; tile += gridDim.x) {
        for (int i = threadIdx.x; i < 2 * GATES; i += BATCH_SUMMING) room.bias[i / GATES][i % GATES] = gates_bias(job, tile * (int64_t)GATES + i % GATES, i / GATES);
        for (int unit = 0; unit < job.units; unit++) {
            barrier_wait(full + 8 * place, parity);
            const uint32_t at = ring + place * unit_bytes;
            const uint64_t x = tile_descriptor(at, 0), w = tile_descriptor(at + x_bytes + side * (GatesRoom<GATES>::W_BYTES / 2), 0);
            products_begin();
#pragma unroll
            for (int i = 0; i < BATCH_K / 16; i++) product_shared<T, GATES>(c, x + 2 * i, w + 2 * i, unit > 0 || i > 0);
            products_commit();
            if (unit > 0) {
                products_wait<1>();
                if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * (place == 0 ? depth - 1 : place - 1));
            }
            if (++place == depth) place = 0, parity ^= 1;
        }
        products_wait<0>();
        hold(c);
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * (place == 0 ? depth - 1 : place - 1));
        if (tile == (int)blockIdx.x && front) squares.factors(job, room, columns);
        gates_end<T, GATES>(job, room, tile, c);
    }
}

#endif

template <class T, int GATES> __global__ void __launch_bounds__(BATCH_THREADS, 1) gates_rows(const __grid_constant__ BatchJob job, const int columns, const int depth)
{
#ifdef WEFT_HOPPER
    extern __shared__ char raw[];
    char *ring = raw + (1024 - (shared_address(raw) & 1023)) % 1024;
    const int unit_bytes = columns * BATCH_K * 2 + GatesRoom<GATES>::W_BYTES;
    GatesRoom<GATES> &room = *(GatesRoom<GATES> *)(ring + GatesPlaces<GATES>::BYTES);
    if (threadIdx.x == BATCH_SUMMING) {
        map_prefetch(&job.w);
        map_prefetch(&job.x);
        for (int i = 0; i < depth; i++) {
            barrier_init(shared_address(&room.full[i]), 1);
            barrier_init(shared_address(&room.empty[i]), BATCH_SUMMING / 32);
        }
        barrier_init(shared_address(&room.ready), 1);
        barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < BATCH_SUMMING) gates_sum<T, GATES>(job, room, shared_address(ring), columns, depth);
    else if (threadIdx.x == BATCH_SUMMING) {
        const uint32_t full = shared_address(room.full), places = shared_address(ring), x_bytes = (uint32_t)columns * BATCH_K * 2;
        const int mine = job.tiles > (int)blockIdx.x ? (job.tiles - 1 - (int)blockIdx.x) / (int)gridDim.x + 1 : 0;
        auto weights = [&](int unit, int place) {
            const int turn = unit / job.units, chunk = unit - turn * job.units;
            barrier_expect(full + 8 * place, unit_bytes);
            copy_box(places + place * unit_bytes + x_bytes, &job.w, chunk * BATCH_K, ((int)blockIdx.x + turn * (int)gridDim.x) * GATES, 0, full + 8 * place);
        };
        auto inputs = [&](int unit, int place) { copy_box(places + place * unit_bytes, &job.x, unit % job.units * BATCH_K, 0, 0, full + 8 * place); };
        batch_feed(mine * job.units, depth, GatesRoom<GATES>::W_BYTES >> 10, shared_address(room.empty), shared_address(&room.ready), true, weights, inputs);
    } else if (threadIdx.x >= BATCH_SUMMING + 32) {
        dependency_wait_only();
        if (threadIdx.x == BATCH_SUMMING + 32) barrier_arrive(shared_address(&room.ready));
        __syncwarp();
        if (job.norm.rows > 0) batch_normed<T>(job, columns);
    }
#endif
}

template <class T, int GATES> static bool start(BatchJob &job, int columns, void *stream)
{
    typedef GatesRoom<GATES> Room;
    const weft_linear_args &a = job.a;
    const int64_t cols = job.silu.cols;
    if (!tensor_map(&job.w, a.w_dtype, a.w, {a.k, cols, 2}, {2 * a.w_stride, 2 * a.w_stride * cols}, {BATCH_K, GATES, 2})) return false;
    job.units = (int)div_up(a.k, BATCH_K);
    job.tiles = (int)div_up(cols, GATES);
    void (*kernel)(const BatchJob, int, int) = gates_rows<T, GATES>;
    (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BATCH_SHARED);
    /* The products read 64 rows of x; those behind its tokens are rows of w, whose sums nobody reads. */
    const int depth = (int)least(Room::MOST, GatesPlaces<GATES>::BYTES / (columns * BATCH_K * 2 + Room::W_BYTES));
    launch(kernel, (unsigned)least(job.tiles, a.cuda->sms), BATCH_THREADS, BATCH_SHARED, stream, job, columns, depth);
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
