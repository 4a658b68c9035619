/* kernels/cuda/linear_batch.cu - products of 2 to 32 tokens with 16-bit weights on Hopper GPUs.
 *
 * A tile is 128 rows of w, which are the tensor cores' rows; tokens are its columns. A unit is a tile's next 128
 * columns of w. Tiles are dealt to clusters of one or two blocks, one on each multiprocessor (more do not fill it), and a
 * tile's units to the blocks of its cluster. In a block two threads fetch units through the copy engine into a ring, one weights, those of the first
 * units before the kernel in front has ended, and one x, and two warpgroups multiply, 64 rows each. The blocks of a cluster then send each
 * other their sums, so that each ends its part of the tile: through shared memory, since a way to the L2 and back takes 2
 * to 3 us while the next product's weights are on their way.
 *
 * The ring takes what a multiprocessor's shared memory has: so much on its way keeps the memory busy, and covers the
 * time between the end of the product in front, on this multiprocessor, and that of the small kernel between them. */
#include "kernels/cuda/linear_batch_ends.cuh"

namespace weft {

#ifdef WEFT_HOPPER

/* What a block has of a product: units of tiles. */
struct BatchShare {
    int rank, tile, tiles, unit, units; /* the first and how many, of a tile */
    __device__ __forceinline__ explicit BatchShare(const BatchJob &job)
    {
        const int log = job.split - 1, cluster = blockIdx.x >> log, clusters = gridDim.x >> log; /* of one or two blocks */
        const unsigned each = (unsigned)job.tiles / (unsigned)clusters, more = (unsigned)job.tiles - each * (unsigned)clusters; /* the first ones have one more */
        rank = blockIdx.x & log;
        tile = (int)(each * cluster + min((unsigned)cluster, more));
        tiles = (int)each + (cluster < (int)more);
        unit = (job.units * rank) >> log;
        units = ((job.units * (rank + 1)) >> log) - unit;
    }
};

template <int N, int END, int ROWS> __device__ __forceinline__ void batch_fetch(const BatchJob &job, BatchRoom<N, END, ROWS> &room, const BatchShare &share)
{
    typedef BatchRoom<N, END, ROWS> Room;
    const uint32_t ring = shared_address(room.ring), full = shared_address(room.full), empty = shared_address(room.empty), ready = shared_address(&room.ready);
    const int units = share.tiles * share.units, chunk = share.unit * Room::CHUNKS, end = chunk + share.units * Room::CHUNKS;
    int at = chunk, row = share.tile * ROWS;
    if (threadIdx.x == BATCH_WEIGHTS) {
        const uint64_t policy = streamed();
        batch_feed_weights(units, Room::DEPTH, Room::W_BYTES >> 10, empty, ready, [&](int place) {
            barrier_expect(full + 8 * place, Room::W_BYTES);
            copy_box_once(ring + place * Room::UNIT, &job.w, 0, row, at, full + 8 * place, policy);
            at += Room::CHUNKS;
            if (at == end) at = chunk, row += ROWS;
        });
    } else {
        batch_feed_inputs(units, Room::DEPTH, empty, ready, [&](int place) {
            barrier_expect(full + 8 * place, Room::UNIT - Room::W_BYTES);
            copy_box(ring + place * Room::UNIT + Room::W_BYTES, &job.x, 0, 0, at, full + 8 * place);
            at += Room::CHUNKS;
            if (at == end) at = chunk;
        });
    }
}

/* This block's sums of a tile to those who end it. */
template <int N, int END, int ROWS> __device__ __forceinline__ void batch_send(const BatchJob &job, BatchRoom<N, END, ROWS> &room, const BatchShare &share, const float (&c)[N / 2])
{
    typedef BatchRoom<N, END, ROWS> Room;
    const int per = Room::FOURS / job.split, side = threadIdx.x / 128, warp = threadIdx.x % 128 / 32;
    const uint32_t sums = shared_address(room.sums) + (ROWS == 64 ? 2 * share.rank + side : share.rank) * per * 16, arrived = shared_address(&room.arrived);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const int four = j * Room::GROUP + (ROWS == 64 ? warp : 2 * warp + side) * 32 + threadIdx.x % 32, to = four / per;
        const float4 v = make_float4(c[4 * j], c[4 * j + 1], c[4 * j + 2], c[4 * j + 3]);
        if (to == share.rank) room.sums[(ROWS == 64 ? 2 * share.rank + side : share.rank) * per + four % per] = v;
        else neighbour_send(neighbour_address(sums + four % per * 16, to), v, neighbour_address(arrived, to));
    }
}

/* The fours of a tile that this block ends. */
template <class T, int N, int END, int ROWS> struct BatchFinish {
    typedef BatchRoom<N, END, ROWS> Room;
    enum { EACH = (Room::FOURS + BATCH_SUMMING - 1) / BATCH_SUMMING }; /* fours of a thread, at most */
    const BatchJob &job;
    Room &room;
    const BatchShare &share;
    const int per;
    uint32_t old[2][2], gain[2][2]; /* END_NORM: of the first fours, ahead */
    __device__ __forceinline__ BatchFinish(const BatchJob &job, Room &room, const BatchShare &share)
        : job(job), room(room), share(share), per(Room::FOURS / job.split)
    {
    }
    __device__ __forceinline__ void look(int i, int tile, uint32_t (&r)[2], uint32_t (&by)[2])
    {
        const Four f = Four::at<ROWS>(share.rank * per + i);
        const int64_t row = (int64_t)tile * ROWS + 64 * f.side + 16 * f.warp + 2 * (f.lane % 4);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            by[h] = *(const uint32_t *)((const T *)job.norm.gain + row + 8 * h);
            r[h] = f.token() < job.a.tokens ? *(const uint32_t *)((const T *)job.norm.residual + f.token() * job.norm.residual_stride + row + 8 * h) : 0;
        }
    }
    __device__ __forceinline__ void ahead(int tile)
    {
        if constexpr (END == END_NORM) {
#pragma unroll
            for (int m = 0; m < EACH && m < 2; m++)
                if ((int)threadIdx.x + m * BATCH_SUMMING < per) look(threadIdx.x + m * BATCH_SUMMING, tile, old[m], gain[m]);
        }
    }
    __device__ __forceinline__ float4 sum(int i) const
    {
        float4 v = room.sums[i];
        for (int b = 1; b < job.split * Room::SUMS; b++) {
            const float4 o = room.sums[b * per + i];
            v.x += o.x, v.y += o.y, v.z += o.z, v.w += o.w;
        }
        if (END != END_NORM && job.norm.rows > 0) {
            const int t = 8 * ((share.rank * per + i) / Room::GROUP) + 2 * (i % 4);
            const float f0 = room.factor[t], f1 = room.factor[t + 1];
            v.x *= f0, v.y *= f1, v.z *= f0, v.w *= f1;
        }
        return v;
    }
    __device__ __forceinline__ void end(int i, int m, int tile)
    {
        const Four f = Four::at<ROWS>(share.rank * per + i);
        const float4 v = sum(i);
        if (END == END_HEADS) batch_heads<T>(job, room, f, tile, v, sum(i ^ 32));
        else {
            const int64_t row = (int64_t)tile * ROWS + 64 * f.side + 16 * f.warp;
            if (END == END_NORM) {
                if (m < 2) batch_norm<T, ROWS>(job, room, f, row, v, old[m % 2], gain[m % 2]);
                else {
                    uint32_t r[2], by[2];
                    look(i, tile, r, by);
                    batch_norm<T, ROWS>(job, room, f, row, v, r, by);
                }
            } else batch_write<T>(job.a, f, row, batch_bias(job.a, f, row, v));
        }
    }
    /* Of whole groups of 8 tokens, or of one group's warps where there are fewer fours. */
    __device__ __forceinline__ void put_squares(int tile)
    {
        const int first = share.rank * per, tokens = per < Room::GROUP ? 8 : per / Room::GROUP * 8, parts = per < Room::GROUP ? Room::GROUP / per : 1;
        named_sync(1, BATCH_SUMMING);
        if ((int)threadIdx.x >= tokens) return;
        const int token = first / Room::GROUP * 8 + threadIdx.x, from = first % Room::GROUP / 32, count = min(per, (int)Room::GROUP) / 32;
        float sum = 0.0f;
        for (int i = 0; i < count; i++) sum += room.squares[from + i][token];
        job.squares[(tile * parts + share.rank % parts) * N + token] = sum;
    }
    __device__ __forceinline__ void tile(int tile)
    {
#pragma unroll
        for (int m = 0; m < EACH; m++)
            if ((int)threadIdx.x + m * BATCH_SUMMING < per) end(threadIdx.x + m * BATCH_SUMMING, m, tile);
        if (END == END_NORM) put_squares(tile);
    }
};

template <class T, int N, int END, int ROWS> __device__ __forceinline__ void batch_sum(const BatchJob &job, BatchRoom<N, END, ROWS> &room, const BatchShare &share)
{
    typedef BatchRoom<N, END, ROWS> Room;
    const uint32_t ring = shared_address(room.ring), full = shared_address(room.full), empty = shared_address(room.empty);
    const uint32_t arrived = shared_address(&room.arrived), freed = shared_address(&room.freed);
    const int side = threadIdx.x / 128;
    float c[N / 2];
    BatchFinish<T, N, END, ROWS> finish(job, room, share);
    BatchSquares squares;
    batch_places<N, END>(job, room);
    dependency_wait_only();
    const bool front = END != END_NORM && job.norm.rows > 0;
    if (front) squares.ask(job, N);
    for (int t = 0, place = 0, parity = 0; t < share.tiles; t++) {
        finish.ahead(share.tile + t);
        if (threadIdx.x == 0) barrier_expect(arrived, Room::SUMS * (Room::FOURS - Room::FOURS / job.split) * 16);
        if (share.units == 0)
#pragma unroll
            for (int i = 0; i < N / 2; i++) c[i] = 0.0f;
        for (int unit = 0; unit < share.units; unit++) {
            barrier_wait(full + 8 * place, parity);
            const uint32_t at = ring + place * Room::UNIT;
            /* A warpgroup has its rows of each chunk, or its chunk of each unit. */
            const uint64_t w = tile_descriptor(at + side * (ROWS == 64 ? Room::CHUNK_W : Room::CHUNK_W / 2), 0);
            const uint64_t x = tile_descriptor(at + Room::W_BYTES + (ROWS == 64 ? side * Room::CHUNK_X : 0), 0);
            products_begin();
#pragma unroll
            for (int i = 0; i < BATCH_K / 16 * Room::CHUNKS / Room::SUMS; i++) {
                const int chunk = i / (BATCH_K / 16), step = 2 * (i % (BATCH_K / 16));
                product_shared<T, N>(c, w + chunk * (Room::CHUNK_W / 16) + step, x + chunk * (Room::CHUNK_X / 16) + step, unit > 0 || i > 0);
            }
            products_commit();
            if (unit > 0) {
                products_wait<1>();
                if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * (place == 0 ? Room::DEPTH - 1 : place - 1));
            }
            if (++place == Room::DEPTH) place = 0, parity ^= 1;
        }
        products_wait<0>();
        hold(c);
        if (share.units > 0 && threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * (place == 0 ? Room::DEPTH - 1 : place - 1));
        if (t == 0) cluster_wait(); /* the others' barriers are there */
        else barrier_wait_neighbours(freed, (t - 1) & 1);
        batch_send(job, room, share, c);
        if (t == 0 && front) squares.factors(job, room, N);
        named_sync(1, BATCH_SUMMING);
        barrier_wait_neighbours(arrived, t & 1);
        finish.tile(share.tile + t);
        if (t == share.tiles - 1) continue;
        named_sync(1, BATCH_SUMMING); /* the sums are read */
        if ((int)threadIdx.x < job.split) neighbour_arrive(neighbour_address(freed, threadIdx.x));
    }
}

#endif /* WEFT_HOPPER */

#ifdef WEFT_CUDA_HOPPER

template <class T, int N, int END, int ROWS> __global__ void __launch_bounds__(BATCH_THREADS, 1) batch_rows(const __grid_constant__ BatchJob job)
{
#ifdef WEFT_HOPPER
    extern __shared__ char raw[];
    BatchRoom<N, END, ROWS> &room = *(BatchRoom<N, END, ROWS> *)(raw + (1024 - (shared_address(raw) & 1023)) % 1024);
    const BatchShare share(job);
    if (threadIdx.x == BATCH_SUMMING) {
        map_prefetch(&job.w);
        map_prefetch(&job.x);
        for (int i = 0; i < BatchRoom<N, END, ROWS>::DEPTH; i++) {
            barrier_init(shared_address(&room.full[i]), 2);
            barrier_init(shared_address(&room.empty[i]), BATCH_SUMMING / 32);
        }
        barrier_init(shared_address(&room.arrived), 1);
        barrier_init(shared_address(&room.freed), job.split);
        barrier_init(shared_address(&room.ready), 1);
        barriers_ready();
    }
    __syncthreads();
    cluster_arrive();
    if (threadIdx.x < BATCH_SUMMING) {
        batch_sum<T, N, END, ROWS>(job, room, share); /* comes to cluster_wait(): no block is without a tile */
        return;
    }
    if (threadIdx.x == BATCH_WEIGHTS || threadIdx.x == BATCH_INPUTS) batch_fetch<N, END, ROWS>(job, room, share);
    if (threadIdx.x >= BATCH_NORMS && threadIdx.x < BATCH_INPUTS) {
        dependency_wait_only();
        if (END != END_NORM && job.norm.rows > 0) batch_normed<T>(job, N);
    }
    __syncwarp();
    cluster_wait();
#endif
}

/* ---- host side ---- */

template <class T, int N, int END, int ROWS> static bool launch_batch(const BatchJob &job, int clusters, void *stream)
{
    void (*kernel)(const BatchJob) = batch_rows<T, N, END, ROWS>;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = (unsigned)job.split, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = (unsigned)(clusters * job.split);
    config.blockDim = BATCH_THREADS;
    config.dynamicSmemBytes = BATCH_SHARED;
    config.stream = (cudaStream_t)stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    static_assert(sizeof(BatchRoom<N, END, ROWS>) + 1024 <= BATCH_SHARED, "shared memory of a block");
    (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BATCH_SHARED);
    (void)cudaLaunchKernelEx(&config, kernel, job);
    return true;
}

enum { FEW = 16 }; /* tokens, up to which rope joins (scripts/bench.md) */

/* How a product is cut: tiles of `rows` dealt to clusters, a tile's units, to the `split` blocks of a cluster. */
struct BatchCut {
    int rows, tiles, units, clusters, split;
};

static int columns_for(int64_t tokens) { return tokens <= 8 ? 8 : tokens <= FEW ? FEW : 32; }

/* So that the busiest block fetches little, and then with few joins. */
static BatchCut cut(const weft_linear_args &a, bool halves)
{
    BatchCut best = {};
    int64_t least_bytes = INT64_MAX;
    for (int rows = 128; rows >= (halves ? 64 : 128); rows /= 2)
        for (int log = 0; log < 2; log++) {
            const int64_t tiles = div_up(a.n, rows), clusters = least(tiles, a.cuda->clusters[log]);
            if (clusters < 1) continue;
            const int64_t units = div_up(a.k, BATCH_CHUNKS * BATCH_K), turns = div_up(tiles, clusters), bytes = turns * div_up(units, 1 << log) * (rows + columns_for(a.tokens));
            if (bytes * 100 >= least_bytes * 95) continue;
            least_bytes = bytes;
            best = {rows, (int)tiles, (int)units, (int)div_up(tiles, turns), 1 << log};
        }
    return best;
}

/* Of x, or of what the product in front has left instead. */
static bool inputs_map(BatchJob &job, int columns, int chunks)
{
    const weft_linear_args &a = job.a;
    const int64_t stride = 2 * (job.square_rows > 0 ? a.k : a.x_stride);
    return tensor_map(&job.x, a.x_dtype, job.square_rows > 0 ? job.scaled : a.x, {BATCH_K, a.tokens, a.k / BATCH_K}, {stride, 2 * BATCH_K}, {BATCH_K, columns, chunks});
}

template <class T, int N, int END> static bool start(BatchJob &job, void *stream)
{
    const weft_linear_args &a = job.a;
    const BatchCut c = cut(a, END != END_HEADS);
    if (c.clusters < 1) return false;
    if (!inputs_map(job, N, BATCH_CHUNKS)) return false;
    if (!tensor_map(&job.w, a.w_dtype, a.w, {BATCH_K, a.n, a.k / BATCH_K}, {2 * a.w_stride, 2 * BATCH_K}, {BATCH_K, c.rows, BATCH_CHUNKS})) return false;
    job.units = c.units, job.tiles = c.tiles, job.split = c.split;
    if constexpr (END != END_HEADS)
        if (c.rows == 64) return launch_batch<T, N, END, 64>(job, c.clusters, stream);
    return launch_batch<T, N, END, 128>(job, c.clusters, stream);
}

template <int END> static bool by_tokens(BatchJob &job, void *stream)
{
    auto run = [&](auto tag) {
        using T = decltype(tag);
        if (job.a.tokens <= 8) return start<T, 8, END>(job, stream);
        if constexpr (END == END_HEADS) return start<T, FEW, END>(job, stream);
        else return job.a.tokens <= FEW ? start<T, FEW, END>(job, stream) : start<T, 32, END>(job, stream);
    };
    if (END == END_NORM) return run(bf16());
    return job.a.x_dtype == WEFT_BF16 ? run(bf16()) : run(__half());
}

/* Whether rope and pages are of whole heads of y, each a tile. */
static bool take_heads(BatchJob &job, const weft_rope_args *rope, const weft_kv_write_args *pages)
{
    const weft_linear_args &a = job.a;
    job.rope = *rope;
    if (pages != NULL) job.pages = *pages;
    if (a.tokens > FEW) return false;
    if (job.rope.head_dim != HEAD || job.rope.rotary_dim != HEAD || a.n % HEAD != 0 || a.add || a.y_dtype != a.x_dtype) return false;
    if (!aligned(a.y, 4) || a.y_stride % 2 != 0 || !aligned(job.rope.cos_sin, 16) || job.rope.tokens != a.tokens) return false;
    if (job.pages.tokens == 0) return true;
    const int64_t k = ((const char *)job.pages.k - (const char *)a.y) / 2, v = ((const char *)job.pages.v - (const char *)a.y) / 2;
    if (job.pages.head_dim != HEAD || job.pages.head_dim_v != HEAD || job.pages.cache_dtype != a.y_dtype || k % HEAD != 0 || v % HEAD != 0) return false;
    if (!aligned(job.pages.k_cache, 4) || !aligned(job.pages.v_cache, 4)) return false;
    job.key_head = (int)(k / HEAD), job.value_head = (int)(v / HEAD);
    return true;
}

/* Rows of sums of squares that a product with a norm behind it leaves. */
static int square_rows(const weft_linear_args &a)
{
    const BatchCut c = cut(a, true);
    return c.tiles * (int)most(c.split * 8 / columns_for(a.tokens), 1);
}

enum { SQUARES_BYTES = 1 << 20, MOST_SCALED = 1 << 14 /* columns */ };

/* At the end of the workspace: what two products hand on beside their arguments. */
static char *handed_on(const weft_cuda_context *c) { return c->workspace + ((c->workspace_bytes - SQUARES_BYTES - BATCH_TOKENS * MOST_SCALED * 2) & ~(size_t)255); }

#endif /* WEFT_CUDA_HOPPER */

void batch_clusters(int (&clusters)[BATCH_SPLITS])
{
    for (int log = 0; log < BATCH_SPLITS; log++) clusters[log] = 0;
#ifdef WEFT_CUDA_HOPPER
    void (*kernel)(const BatchJob) = batch_rows<bf16, 8, END_PLAIN, 128>;
    for (int log = 0; log < BATCH_SPLITS; log++) {
        cudaLaunchAttribute cluster = {};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = 1u << log, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = 1024;
        config.blockDim = BATCH_THREADS;
        config.dynamicSmemBytes = BATCH_SHARED;
        config.attrs = &cluster;
        config.numAttrs = 1;
        if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BATCH_SHARED) != cudaSuccess ||
            cudaOccupancyMaxActiveClusters(&clusters[log], kernel, &config) != cudaSuccess)
            clusters[log] = 0;
    }
    (void)cudaGetLastError();
#endif
}

bool batch_fits(const weft_linear_args *a)
{
    if (a->x_dtype != a->w_dtype || (a->x_dtype != WEFT_BF16 && a->x_dtype != WEFT_F16) || a->tokens < 2 || a->tokens > BATCH_TOKENS) return false;
    if (!aligned(a->x, 16) || !aligned(a->w, 16) || (a->x_stride | a->w_stride) % 8 != 0 || a->k < BATCH_K || a->k % BATCH_K != 0) return false;
    return a->cuda != NULL && a->cuda->clusters[0] > 0 && div_up(a->n, 64) * div_up(a->k, BATCH_K) <= 1 << 30;
}

bool batch_norm_fits(const weft_linear_args *first, const weft_rms_norm_args *norm, const weft_linear_args *second)
{
#ifdef WEFT_CUDA_HOPPER
    if (norm->dtype != WEFT_BF16 || norm->gain_dtype != WEFT_BF16 || norm->residual == NULL || norm->rows != first->tokens || norm->cols != first->n) return false;
    if (first->add || first->y_dtype != WEFT_BF16 || first->x_dtype != WEFT_BF16 || norm->x != first->y || norm->x_stride != first->y_stride) return false;
    if (second->x != norm->y || second->k != norm->cols || second->tokens != norm->rows || second->x_stride != norm->y_stride || second->x_dtype != WEFT_BF16) return false;
    if (norm->cols % 128 != 0 || norm->cols > MOST_SCALED || norm->residual_stride % 8 != 0 || norm->y_stride % 8 != 0 || first->y_stride % 2 != 0) return false;
    if (!aligned(norm->residual, 16) || !aligned(norm->y, 16) || !aligned(norm->gain, 16) || !aligned(first->y, 4)) return false;
    return first->cuda == second->cuda && first->cuda->workspace_bytes >= 2 * (SQUARES_BYTES + BATCH_TOKENS * MOST_SCALED * 2);
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

bool batch_rotates(const weft_linear_args *a, const weft_rope_args *rope, const weft_kv_write_args *pages)
{
#ifdef WEFT_CUDA_HOPPER
    BatchJob job;
    memset(&job, 0, sizeof job);
    job.a = *a;
    return batch_fits(a) && take_heads(job, rope, pages);
#else
    return false;
#endif
}

bool batch_product(const weft_linear_args *a, const BatchJoins &joins, void *stream)
{
#ifdef WEFT_CUDA_HOPPER
    BatchJob job;
    memset(&job, 0, sizeof job);
    job.a = *a;
    job.scaled = handed_on(a->cuda);
    job.squares = (float *)((char *)job.scaled + BATCH_TOKENS * MOST_SCALED * 2);
    if (joins.norm != NULL) {
        job.norm = *joins.norm;
        return by_tokens<END_NORM>(job, stream);
    }
    if (joins.front != NULL) {
        job.norm = *joins.front;
        job.square_rows = square_rows(*joins.before);
    }
    if (joins.silu != NULL) {
        job.silu = *joins.silu;
        const int columns = columns_for(a->tokens);
        return inputs_map(job, columns, 1) && batch_gates(job, columns, stream);
    }
    if (joins.rope == NULL) {
        const BatchCut c = cut(*a, true);
        const int columns = columns_for(a->tokens);
        if (a->tokens > FEW && inputs_map(job, columns, BATCH_CHUNKS) && batch_narrow(job, columns, c.clusters * c.split, stream)) return true;
        return by_tokens<END_PLAIN>(job, stream);
    }
    return take_heads(job, joins.rope, joins.pages) && by_tokens<END_HEADS>(job, stream);
#else
    return false;
#endif
}

} // namespace weft
