/* kernels/cuda/linear_batch.cu - products of 2 to 16 tokens with 16-bit weights on Hopper GPUs.
 *
 * A tile is 128 rows of w, which are the tensor cores' rows; tokens are its columns. A unit is a tile's next 64 columns
 * of w: 16 KB. The units of all tiles in a row are dealt to one block on each multiprocessor, equally, so a block
 * begins and ends anywhere in a tile; sums of a tile that several blocks have meet in the workspace, and whoever comes
 * last adds them up, in the order of the blocks. In a block one thread fetches units through the copy engine into a
 * ring, weights of the first ones before the kernel in front has ended, and two warpgroups multiply, 64 rows each.
 *
 * The ring takes a multiprocessor's whole shared memory, 200 KB: so much on its way keeps the memory busy, and covers the
 * time between the end of the product in front, on this multiprocessor, and that of the small kernel between them. */
#include "kernels/cuda/linear_batch.cuh"

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/tensor_map.cuh"

#ifdef WEFT_CUDA_HOPPER
#include <cuda.h>

namespace weft {

enum {
    BATCH_ROWS = 128,
    BATCH_K = 64, /* columns of a unit */
    BATCH_W_BYTES = BATCH_ROWS * BATCH_K * 2,
    BATCH_SUMMING = 256, /* threads; 32 more fetch */
    BATCH_THREADS = BATCH_SUMMING + 32
};

enum BatchEnd { END_PLAIN, END_SILU, END_HEADS };

struct BatchJob {
    CUtensorMap w, x;
    weft_linear_args a;
    weft_silu_mul_args silu;
    weft_rope_args rope;
    weft_kv_write_args pages;
    int key_head, value_head; /* the first, counted in heads of y; pages.tokens is 0 without */
    float4 *partial;    /* (2 of each block, N / 8, BATCH_SUMMING) */
    unsigned *counters; /* of tiles */
    int tiles, chunks;  /* chunks: units of a tile */
};

enum { HEAD = BATCH_ROWS }; /* with END_HEADS a tile is one head of so many elements */

template <int N, int END> struct BatchRoom {
    enum { X_BYTES = N * BATCH_K * 2, UNIT = BATCH_W_BYTES + X_BYTES, DEPTH = 10 };
    alignas(1024) char ring[DEPTH][UNIT];
    uint32_t swapped[END == END_PLAIN ? 1 : END == END_SILU ? N / 8 : N / 4][END == END_PLAIN ? 1 : BATCH_SUMMING]; /* between warpgroups */
    int64_t places[END == END_HEADS ? N : 1]; /* of tokens in the pages */
    float turns[END == END_HEADS ? N : 1][HEAD + 4]; /* of tokens: cosines, sines; padded so that the lanes of a warp meet no bank twice */
    uint64_t full[DEPTH], empty[DEPTH];
    int last;
};

/* Units of block b of `blocks`: from batch_from(b) to batch_from(b + 1); and the block of a unit. */
__device__ __forceinline__ int batch_from(int units, int b, int blocks) { return (int)((int64_t)units * b / blocks); }
__device__ __forceinline__ int batch_block(int units, int unit, int blocks) { return (int)((((int64_t)unit + 1) * blocks - 1) / units); }

} // namespace weft
#endif

namespace weft {

#ifdef WEFT_HOPPER

template <int N, int END> __device__ __forceinline__ void batch_fetch(const BatchJob &job, BatchRoom<N, END> &room, int from, int to)
{
    constexpr int DEPTH = BatchRoom<N, END>::DEPTH;
    const uint32_t ring = shared_address(room.ring), full = shared_address(room.full), empty = shared_address(room.empty);
    auto weights = [&](int unit, int place) {
        const int tile = unit / job.chunks, chunk = unit - tile * job.chunks, rows = END == END_SILU ? 64 : BATCH_ROWS;
        barrier_expect(full + 8 * place, BatchRoom<N, END>::UNIT);
        copy_box(ring + place * BatchRoom<N, END>::UNIT, &job.w, chunk * BATCH_K, tile * rows, 0, full + 8 * place);
    };
    auto inputs = [&](int unit, int place) {
        copy_box(ring + place * BatchRoom<N, END>::UNIT + BATCH_W_BYTES, &job.x, unit % job.chunks * BATCH_K, 0, 0, full + 8 * place);
    };
    const int first = min(DEPTH, to - from);
    for (int i = 0; i < first; i++) weights(from + i, i);
    dependency_wait();
    for (int i = 0; i < first; i++) inputs(from + i, i);
    for (int unit = from + DEPTH, place = 0, parity = 0; unit < to; unit++) {
        barrier_wait(empty + 8 * place, parity);
        weights(unit, place);
        inputs(unit, place);
        if (++place == DEPTH) place = 0, parity ^= 1;
    }
}

/* The lane's four sums of group j of tokens: rows g, g + 8 of its warp, tokens 8 j + 2 q and the next. */
template <class T, int N> __device__ __forceinline__ void batch_write(const weft_linear_args &a, int64_t row, float (&c)[N / 2])
{
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float bias[2] = {0.0f, 0.0f};
    for (int h = 0; h < 2; h++)
        if (a.bias != nullptr && row + g + 8 * h < a.n) bias[h] = load(a.bias, a.bias_dtype, row + g + 8 * h);
    const bool pairs = a.y_dtype == a.x_dtype && !a.add && (a.y_stride | a.n) % 2 == 0 && (uintptr_t)a.y % 4 == 0;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float v0 = c[4 * j + 2 * h] + bias[h], v1 = c[4 * j + 2 * h + 1] + bias[h];
            if (pairs) {
                const uint32_t two = turned(pair<T>(v0, v1));
                const int64_t n = row + 8 * h + 2 * q;
                if (8 * j + g < a.tokens && n < a.n) *(uint32_t *)((T *)a.y + (8 * j + g) * a.y_stride + n) = two;
                continue;
            }
            const int64_t n = row + 8 * h + g;
            for (int e = 0; e < 2; e++) {
                const int t = 8 * j + 2 * q + e;
                if (t >= a.tokens || n >= a.n) continue;
                float v = e == 0 ? v0 : v1;
                if (a.add) v += load(a.y, a.y_dtype, t * a.y_stride + n);
                store(a.y, a.y_dtype, t * a.y_stride + n, v);
            }
        }
    }
}

/* The first warpgroup has gates, the other their values; each ends half of them. row: of the lane's warp among the gates. */
template <class T, int N, int END> __device__ __forceinline__ void batch_silu(const BatchJob &job, BatchRoom<N, END> &room, int64_t row, float (&c)[N / 2])
{
    const int side = threadIdx.x / 128, mate = threadIdx.x ^ 128, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const weft_silu_mul_args &a = job.silu;
    batch_write<T, N>(job.a, side * a.cols + row, c);
    float bias[2] = {0.0f, 0.0f};
    for (int h = 0; h < 2; h++)
        if (job.a.bias != nullptr && row + g + 8 * h < a.cols) bias[h] = load(job.a.bias, job.a.bias_dtype, side * a.cols + row + g + 8 * h);
    named_sync(1, BATCH_SUMMING); /* the tile before is read */
    uint32_t mine[N / 8];
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const uint32_t low = pair<T>(c[4 * j] + bias[0], c[4 * j + 1] + bias[0]), high = pair<T>(c[4 * j + 2] + bias[1], c[4 * j + 3] + bias[1]);
        mine[j] = side == 0 ? low : high;
        room.swapped[j][threadIdx.x] = side == 0 ? high : low;
    }
    named_sync(1, BATCH_SUMMING);
    const bool pairs = (a.y_stride | a.cols) % 2 == 0 && (uintptr_t)a.y % 4 == 0;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const uint32_t other = room.swapped[j][mate];
        const float2 gate = widen_pair<T>(side == 0 ? mine[j] : other), up = widen_pair<T>(side == 0 ? other : mine[j]);
        const uint32_t two = turned(pair<T>(gate.x / (1.0f + expf(-gate.x)) * up.x, gate.y / (1.0f + expf(-gate.y)) * up.y));
        const int64_t n = row + 8 * side + 2 * q;
        T *y = (T *)a.y + (8 * j + g) * a.y_stride + n;
        if (8 * j + g >= a.rows) continue;
        if (pairs) {
            if (n < a.cols) *(uint32_t *)y = two;
        } else {
            if (n < a.cols) y[0] = ((const T *)&two)[0];
            if (n + 1 < a.cols) y[1] = ((const T *)&two)[1];
        }
    }
}

/* The first warpgroup has the first halves of a head's pairs, the other their mates; each turns its own by the tokens'
 * angles, and keys and values also go into the pages. */
template <class T, int N, int END> __device__ __forceinline__ void batch_heads(const BatchJob &job, BatchRoom<N, END> &room, int head, float (&c)[N / 2])
{
    const int side = threadIdx.x / 128, mate = threadIdx.x ^ 128, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int pair0 = threadIdx.x % 128 / 32 * 16, row = side * (HEAD / 2) + pair0; /* of the lane's warp: pairs, and rows of the head */
    const bool turns = head < (int)job.rope.heads;
    T *y = (T *)job.a.y + head * HEAD + row, *cache = nullptr;
    int64_t cache_head = 0;
    if (job.pages.tokens > 0 && head >= job.key_head) {
        const bool value = head >= job.value_head;
        cache = (T *)(value ? job.pages.v_cache : job.pages.k_cache) + row;
        cache_head = (int64_t)(head - (value ? job.value_head : job.key_head)) * job.pages.pages.page_size;
    }
    float bias[2] = {0.0f, 0.0f};
    for (int h = 0; h < 2; h++)
        if (job.a.bias != nullptr) bias[h] = load(job.a.bias, job.a.bias_dtype, head * HEAD + row + g + 8 * h);
    named_sync(1, BATCH_SUMMING); /* the tile before is read */
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const int j = i / 2, h = i % 2;
        room.swapped[i][threadIdx.x] = pair<T>(c[4 * j + 2 * h] + bias[h], c[4 * j + 2 * h + 1] + bias[h]);
    }
    named_sync(1, BATCH_SUMMING);
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const int j = i / 2, h = i % 2;
        uint32_t two = room.swapped[i][threadIdx.x];
        if (turns) {
            const float2 own = widen_pair<T>(two), other = widen_pair<T>(room.swapped[i][mate]);
            float turned_by[2] = {own.x, own.y};
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float *turn = &room.turns[8 * j + 2 * q + e][pair0 + g + 8 * h];
                const float cos = turn[0], sin = turn[HEAD / 2], mine = e == 0 ? own.x : own.y, its = e == 0 ? other.x : other.y;
                turned_by[e] = side == 0 ? mine * cos - its * sin : mine * cos + its * sin;
            }
            two = pair<T>(turned_by[0], turned_by[1]);
        }
        two = turned(two);
        const int token = 8 * j + g, at = 8 * h + 2 * q;
        if (token >= job.a.tokens) continue;
        *(uint32_t *)(y + token * job.a.y_stride + at) = two;
        if (cache != nullptr && room.places[token] >= 0) *(uint32_t *)(cache + (room.places[token] + cache_head) * HEAD + at) = two;
    }
}

/* Angles and places of the tokens, of the host's arrays alone. A token without a place in the table is not turned. */
template <int N, int END> __device__ __forceinline__ void batch_places(const BatchJob &job, BatchRoom<N, END> &room)
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

/* Puts this block's sums of a tile to the others'. True in the block that came last: c is then the whole. */
template <int N, int END> __device__ __forceinline__ bool batch_join(const BatchJob &job, BatchRoom<N, END> &room, int tile, int from, float (&c)[N / 2])
{
    constexpr int FOURS = N / 8;
    const int units = job.tiles * job.chunks, blocks = gridDim.x, begin = tile * job.chunks;
    const int low = batch_block(units, begin, blocks), high = batch_block(units, begin + job.chunks - 1, blocks);
    if (low == high) return true;
    const int me = blockIdx.x;
    auto place = [&](int b) { return job.partial + (int64_t)(2 * b + (batch_from(units, b, blocks) < begin)) * FOURS * BATCH_SUMMING + threadIdx.x; };
    float4 *own = place(me);
#pragma unroll
    for (int j = 0; j < FOURS; j++) __stcg(&own[j * BATCH_SUMMING], make_float4(c[4 * j], c[4 * j + 1], c[4 * j + 2], c[4 * j + 3]));
    __threadfence();
    named_sync(1, BATCH_SUMMING);
    if (threadIdx.x == 0) {
        const int last = atomicAdd(&job.counters[tile], 1u) == (unsigned)(high - low);
        if (last) job.counters[tile] = 0;
        __threadfence();
        room.last = last;
    }
    named_sync(1, BATCH_SUMMING);
    if (!room.last) return false;
#pragma unroll
    for (int i = 0; i < N / 2; i++) c[i] = 0.0f;
#pragma unroll 4
    for (int b = low; b <= high; b++) {
        const float4 *part = place(b);
#pragma unroll
        for (int j = 0; j < FOURS; j++) {
            const float4 v = __ldcg(&part[j * BATCH_SUMMING]);
            c[4 * j] += v.x, c[4 * j + 1] += v.y, c[4 * j + 2] += v.z, c[4 * j + 3] += v.w;
        }
    }
    return true;
}

template <class T, int N, int END> __device__ __forceinline__ void batch_sum(const BatchJob &job, BatchRoom<N, END> &room, int from, int to)
{
    constexpr int DEPTH = BatchRoom<N, END>::DEPTH;
    const uint32_t ring = shared_address(room.ring), full = shared_address(room.full), empty = shared_address(room.empty);
    const int side = threadIdx.x / 128, warp = threadIdx.x % 128 / 32;
    float c[N / 2];
    batch_places(job, room);
    dependency_wait_only();
    int place = 0, parity = 0;
    for (int unit = from; unit < to;) {
        const int tile = unit / job.chunks, end = min(to, (tile + 1) * job.chunks);
        for (const int begin = unit; unit < end; unit++) {
            barrier_wait(full + 8 * place, parity);
            const uint32_t at = ring + place * BatchRoom<N, END>::UNIT;
            const uint64_t w = tile_descriptor(at + side * (BATCH_W_BYTES / 2), 0), x = tile_descriptor(at + BATCH_W_BYTES, 0);
            products_begin();
#pragma unroll
            for (int i = 0; i < BATCH_K / 16; i++) product_shared<T, N>(c, w + 2 * i, x + 2 * i, unit > begin || i > 0);
            products_commit();
            if (unit > begin) {
                products_wait<1>();
                if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * (place == 0 ? DEPTH - 1 : place - 1));
            }
            if (++place == DEPTH) place = 0, parity ^= 1;
        }
        products_wait<0>();
        hold(c);
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * (place == 0 ? DEPTH - 1 : place - 1));
        if (!batch_join<N, END>(job, room, tile, from, c)) continue;
        if (END == END_HEADS) batch_heads<T, N, END>(job, room, tile, c);
        else if (END == END_SILU) batch_silu<T, N, END>(job, room, (int64_t)tile * 64 + 16 * warp, c);
        else batch_write<T, N>(job.a, (int64_t)tile * BATCH_ROWS + 64 * side + 16 * warp, c);
    }
}

#endif /* WEFT_HOPPER */

#ifdef WEFT_CUDA_HOPPER

template <class T, int N, int END> __global__ void __launch_bounds__(BATCH_THREADS, 1) batch_rows(const __grid_constant__ BatchJob job)
{
#ifdef WEFT_HOPPER
    extern __shared__ char raw[];
    BatchRoom<N, END> &room = *(BatchRoom<N, END> *)(raw + (1024 - (shared_address(raw) & 1023)) % 1024);
    const int units = job.tiles * job.chunks;
    const int from = batch_from(units, blockIdx.x, gridDim.x), to = batch_from(units, blockIdx.x + 1, gridDim.x);
    if (threadIdx.x == BATCH_SUMMING) {
        map_prefetch(&job.w);
        map_prefetch(&job.x);
        for (int i = 0; i < BatchRoom<N, END>::DEPTH; i++) {
            barrier_init(shared_address(&room.full[i]), 1);
            barrier_init(shared_address(&room.empty[i]), BATCH_SUMMING / 32);
        }
        barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < BATCH_SUMMING) batch_sum<T, N, END>(job, room, from, to);
    else if (threadIdx.x == BATCH_SUMMING) batch_fetch<N, END>(job, room, from, to);
#endif
}

/* ---- host side ---- */

/* base: (planes, rows, k); copies bring box_planes x box_rows x BATCH_K elements. */
static bool encode(CUtensorMap *map, weft_dtype dtype, const void *base, int64_t k, int64_t rows, int64_t stride, int planes, int box_rows)
{
    return tensor_map(map, dtype, base, {k, rows, planes}, {2 * stride, 2 * stride * (planes > 1 ? rows : 1)}, {BATCH_K, box_rows, planes});
}

/* Best are as many as divide the tiles, or as the tiles divide, and keep most of the GPU busy: then few share a tile. Else
 * so many that all have as many units as the busiest, but no tile has more than a few. */
static int batch_blocks(int sms, int64_t tiles, int64_t chunks)
{
    enum { SHARERS = 8, PERCENT = 70 };
    const int64_t units = tiles * chunks;
    for (int64_t blocks = least(sms, tiles * SHARERS); blocks * 100 >= (int64_t)sms * PERCENT; blocks--)
        if (tiles % blocks == 0 || (blocks % tiles == 0 && units % blocks == 0)) return (int)blocks;
    const int64_t turns = div_up(units, least(units, sms));
    return (int)least(div_up(units, turns), tiles * SHARERS);
}

template <class T, int N, int END> static bool start(BatchJob &job, void *stream)
{
    const weft_linear_args &a = job.a;
    if (!encode(&job.x, a.x_dtype, a.x, a.k, a.tokens, a.x_stride, 1, N)) return false;
    if (END == END_SILU ? !encode(&job.w, a.w_dtype, a.w, a.k, job.silu.cols, a.w_stride, 2, 64)
                        : !encode(&job.w, a.w_dtype, a.w, a.k, a.n, a.w_stride, 1, BATCH_ROWS))
        return false;
    job.chunks = (int)div_up(a.k, BATCH_K);
    job.tiles = (int)(END == END_SILU ? div_up(job.silu.cols, 64) : div_up(a.n, BATCH_ROWS));
    job.partial = (float4 *)a.cuda->workspace;
    job.counters = a.cuda->counters;
    const int blocks = batch_blocks(a.cuda->sms, job.tiles, job.chunks);
    const size_t shared = sizeof(BatchRoom<N, END>) + 1024;
    void (*kernel)(const BatchJob) = batch_rows<T, N, END>;
    (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    launch(kernel, (unsigned)blocks, BATCH_THREADS, shared, stream, job);
    return true;
}

template <int END> static bool by_tokens(BatchJob &job, void *stream)
{
    auto run = [&](auto tag) {
        using T = decltype(tag);
        if (job.a.tokens <= 8) return start<T, 8, END>(job, stream);
        return start<T, 16, END>(job, stream);
    };
    return job.a.x_dtype == WEFT_BF16 ? run(bf16()) : run(__half());
}

/* Whether rope and pages are of whole heads of y, each a tile. */
static bool heads_fit(BatchJob &job)
{
    const weft_linear_args &a = job.a;
    if (job.rope.head_dim != HEAD || job.rope.rotary_dim != HEAD || a.n % HEAD != 0 || a.add || a.y_dtype != a.x_dtype) return false;
    if (!aligned(a.y, 4) || a.y_stride % 2 != 0 || !aligned(job.rope.cos_sin, 16) || job.rope.tokens != a.tokens) return false;
    if (job.pages.tokens == 0) return true;
    const int64_t k = ((const char *)job.pages.k - (const char *)a.y) / 2, v = ((const char *)job.pages.v - (const char *)a.y) / 2;
    if (job.pages.head_dim != HEAD || job.pages.head_dim_v != HEAD || job.pages.cache_dtype != a.y_dtype || k % HEAD != 0 || v % HEAD != 0) return false;
    if (!aligned(job.pages.k_cache, 4) || !aligned(job.pages.v_cache, 4)) return false;
    job.key_head = (int)(k / HEAD), job.value_head = (int)(v / HEAD);
    return true;
}

#endif /* WEFT_CUDA_HOPPER */

bool batch_fits(const weft_linear_args *a)
{
#ifdef WEFT_CUDA_HOPPER
    if (a->x_dtype != a->w_dtype || (a->x_dtype != WEFT_BF16 && a->x_dtype != WEFT_F16) || a->tokens < 2 || a->tokens > BATCH_TOKENS) return false;
    if (!aligned(a->x, 16) || !aligned(a->w, 16) || (a->x_stride | a->w_stride) % 8 != 0 || a->k < 1) return false;
    if (a->cuda == NULL || div_up(a->n, 64) > COUNTERS || div_up(a->n, 64) * div_up(a->k, BATCH_K) > 1 << 30) return false;
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess || major != 9 || minor != 0)
        return false;
    return (size_t)a->cuda->sms * 2 * BATCH_TOKENS * BATCH_ROWS * sizeof(float) <= a->cuda->workspace_bytes;
#else
    return false;
#endif
}

/* Measured, scripts/bench.md. Few weights are not worth their division among blocks. */
bool batch_pays(const weft_linear_args *a, bool recorded)
{
    enum { LEAST = 1 << 23, LEAST_OF_TWO = 1 << 28 };
    const int64_t least = a->tokens == 2 && !recorded ? LEAST_OF_TWO : LEAST;
    return a->tokens >= 2 && a->tokens <= (recorded ? (int)BATCH_TOKENS : 8) && a->n * a->k >= least;
}

bool batch_product(const weft_linear_args *a, const BatchJoins &joins, void *stream)
{
#ifdef WEFT_CUDA_HOPPER
    BatchJob job;
    memset(&job, 0, sizeof job);
    job.a = *a;
    if (joins.silu != NULL) {
        job.silu = *joins.silu;
        if (job.silu.cols % 64 != 0) return false; /* whole tiles */
        return by_tokens<END_SILU>(job, stream);
    }
    if (joins.rope == NULL) return by_tokens<END_PLAIN>(job, stream);
    job.rope = *joins.rope;
    if (joins.pages != NULL) job.pages = *joins.pages;
    return heads_fit(job) && by_tokens<END_HEADS>(job, stream);
#else
    return false;
#endif
}

} // namespace weft
