/* kernels/cuda/linear_batch_gates.cu - the product of gates and their values for 17 to 32 tokens on Hopper GPUs, with silu.
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
    float parts[BATCH_SUMMING], factor[64];
    uint64_t full[MOST], empty[MOST], ready;
};
template <int GATES> struct GatesPlaces {
    enum { BYTES = BATCH_SHARED - 1024 - ((int)sizeof(GatesRoom<GATES>) + 1023) / 1024 * 1024 };
};

#ifdef WEFT_HOPPER

/* 8 neighbours of a row, of which the first `count` are there. */
template <class T> __device__ __noinline__ void put_some(T *to, Pack<T, 8> p, int64_t count)
{
#pragma unroll
    for (int e = 0; e < 8; e++)
        if (e < count) to[e] = p.v[e];
}
template <class T> __device__ __forceinline__ void put_eight(T *to, int64_t count, const Pack<T, 8> &p)
{
    if (count >= 8 && (uintptr_t)to % 16 == 0) *(Pack<T, 8> *)to = p;
    else put_some(to, p, count);
}
static __device__ __noinline__ float gates_bias(const weft_linear_args &a, int side, int64_t n, int64_t cols)
{
    return n < cols ? load(a.bias, a.bias_dtype, side * cols + n) : 0.0f;
}

/* c: tokens g and g + 8 of the warp's 16, rows 8 j + 2 q and the next of the tile's gates or values. Only half of the warps have tokens: all
 * of them take part behind shared memory, and write whole packs. */
template <class T, int GATES> __device__ __forceinline__ void gates_end(const BatchJob &job, GatesRoom<GATES> &room, int tile, float (&c)[GATES / 2])
{
    const int side = threadIdx.x / 128, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int token = threadIdx.x % 128 / 32 * 16 + g;
    const weft_linear_args &a = job.a;
    const int64_t cols = job.silu.cols, first = (int64_t)tile * GATES;
    named_sync(1, BATCH_SUMMING); /* the tile before is read */
    if (token < BATCH_TOKENS) {
        const float factor[2] = {job.norm.rows > 0 ? room.factor[token] : 1.0f, job.norm.rows > 0 ? room.factor[token + 8] : 1.0f};
#pragma unroll
        for (int i = 0; i < GATES / 2; i++) c[i] *= factor[i / 2 % 2];
        if (a.bias != nullptr)
#pragma unroll
            for (int i = 0; i < GATES / 2; i++) c[i] += gates_bias(a, side, first + i / 4 * 8 + 2 * q + i % 2, cols);
#pragma unroll
        for (int i = 0; i < GATES / 4; i++)
            *(uint32_t *)&room.ends[side][token + i % 2 * 8][(i / 2 * 8 + 2 * q) * 2] = pair<T>(c[2 * i], c[2 * i + 1]);
    }
    named_sync(1, BATCH_SUMMING);
#pragma unroll 1
    for (int i = threadIdx.x; i < (int)a.tokens * (GATES / 8); i += BATCH_SUMMING) {
        const int t = i / (GATES / 8), at = i % (GATES / 8) * 8;
        const Pack<T, 8> gate = *(const Pack<T, 8> *)&room.ends[0][t][at * 2], up = *(const Pack<T, 8> *)&room.ends[1][t][at * 2];
        Pack<T, 8> both;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float x = widen(gate.v[e]);
            both.v[e] = narrow<T>(x / (1.0f + expf(-x)) * widen(up.v[e]));
        }
        T *y = (T *)a.y + t * a.y_stride + first + at;
        put_eight((T *)job.silu.y + t * job.silu.y_stride + first + at, cols - first - at, both);
        put_eight(y, cols - first - at, gate);
        put_eight(y + cols, cols - first - at, up);
    }
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
        for (int unit = 0; unit < job.chunks; unit++) {
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
            const int turn = unit / job.chunks, chunk = unit - turn * job.chunks;
            barrier_expect(full + 8 * place, unit_bytes);
            copy_box(places + place * unit_bytes + x_bytes, &job.w, chunk * BATCH_K, ((int)blockIdx.x + turn * (int)gridDim.x) * GATES, 0, full + 8 * place);
        };
        auto inputs = [&](int unit, int place) { copy_box(places + place * unit_bytes, &job.x, unit % job.chunks * BATCH_K, 0, 0, full + 8 * place); };
        batch_feed(mine * job.chunks, depth, GatesRoom<GATES>::W_BYTES >> 10, shared_address(room.empty), shared_address(&room.ready), weights, inputs);
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
    job.chunks = (int)div_up(a.k, BATCH_K);
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
