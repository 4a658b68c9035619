/* kernels/cuda/linear_long.cu - products of many tokens with 16-bit weights on Hopper GPUs.
 *
 * A tile is 128 tokens by 256 rows of w. Two neighbouring blocks, a cluster, work on the same rows of w: each fetches
 * half of them for both, and tokens of its own. A block stays on its multiprocessor; one thread drives the copy engine
 * through a ring of stages of 64 columns, also over the end of a tile, and two warpgroups multiply 64 tokens each. What
 * they have summed goes to shared memory, rounded, from where three other warps end the tile (silu, rope, the residual) and
 * write it under the products of the next one.
 * Tiles are walked so that what is worked on at once fits in the L2. */
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/linear_long.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/tensor_map.cuh"

namespace weft {

enum LongEnd { LONG_PLAIN, LONG_SILU, LONG_SUM, LONG_HEADS };

enum {
    LONG_ROWS = 128, /* tokens of a tile */
    LONG_COLS = 256, /* rows of w */
    LONG_K = 64,
    LONG_STAGES = 3,
    LONG_CLUSTER = 2,
    LONG_GROUP = 8, /* pairs of blocks' tokens that are worked on together: those and as many weights fit in the L2 */
    LONG_THREADS = 3 * 128,
    LONG_X_BYTES = LONG_ROWS * LONG_K * 2,
    LONG_W_BYTES = LONG_COLS * LONG_K * 2,
    LONG_ROW_BYTES = LONG_COLS * 2, /* of a tile's results */
    LONG_SIDE = LONG_ROWS / 2,      /* tokens of a warpgroup */
    LONG_ENDING = 96                /* threads that end tiles: three warps beside that which fetches */
};

struct LongJob {
    CUtensorMap x, w;
    weft_linear_args a;
    weft_silu_mul_args silu;
    weft_rope_args rope;
    weft_kv_write_args pages;   /* tokens 0: none */
    int key_head, value_head;   /* the first of y, with pages */
    void *residual;
    int64_t residual_stride;
    int pairs, columns; /* of tiles: two blocks' tokens; rows of w */
    int group;          /* pairs that are worked on together */
    int chunks;         /* stages of a tile */
};

#ifdef WEFT_HOPPER

struct LongRoom {
    char x[LONG_STAGES][LONG_X_BYTES];
    char w[LONG_STAGES][LONG_W_BYTES];
    char sums[2][LONG_SIDE * LONG_ROW_BYTES]; /* of each warpgroup; 16-byte pieces at piece ^ row % 8 */
    uint64_t full[LONG_STAGES], empty[LONG_STAGES], summed[2], ended[2];
};

struct LongTile {
    int pair, column;
};

/* Groups one after the other, in each the columns, forth and back so that the next group begins with weights that are
 * still in the L2. */
__device__ __forceinline__ LongTile long_tile(const LongJob &job, int number)
{
    const int per_group = job.group * job.columns, group = number / per_group, rest = number - group * per_group;
    const int pairs = min(job.group, job.pairs - group * job.group), column = rest / pairs;
    return {group * job.group + rest - column * pairs, group % 2 == 0 ? column : job.columns - 1 - column};
}

template <int END> __device__ __forceinline__ void long_feed(const LongJob &job, LongRoom &room, int rank)
{
    const int clusters = gridDim.x / LONG_CLUSTER, tiles = job.pairs * job.columns;
    int stage = 0;
    uint32_t phase = 1;
    for (int t = blockIdx.x / LONG_CLUSTER; t < tiles; t += clusters) {
        const LongTile tile = long_tile(job, t);
        const int token = (tile.pair * LONG_CLUSTER + rank) * LONG_ROWS;
        const int row = END == LONG_SILU ? tile.column * (LONG_COLS / 2) : tile.column * LONG_COLS + rank * (LONG_COLS / 2);
        for (int c = 0; c < job.chunks; c++) {
            const uint32_t full = shared_address(&room.full[stage]);
            barrier_wait(shared_address(&room.empty[stage]), phase);
            barrier_expect(full, LONG_X_BYTES + LONG_W_BYTES);
            copy_box(shared_address(room.x[stage]), &job.x, c * LONG_K, token, 0, full);
            copy_box_to(shared_address(room.w[stage]) + rank * (LONG_W_BYTES / 2), &job.w, c * LONG_K, row, END == LONG_SILU ? rank : 0, full, 3);
            if (++stage == LONG_STAGES) stage = 0, phase ^= 1;
        }
    }
}

/* The place of 8 columns of a row among a warpgroup's sums. */
__device__ __forceinline__ uint32_t long_piece(int row, int piece) { return (uint32_t)(row * LONG_ROW_BYTES + ((piece ^ row % 8) << 4)); }

/* What a warpgroup has summed, rounded, to where it is ended. */
template <class T> __device__ __forceinline__ void long_put(const float (&c)[LONG_COLS / 2], uint32_t sums)
{
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, piece = threadIdx.x % 32 / 16;
#pragma unroll
    for (int i = 0; i < LONG_COLS / 16; i++)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(sums + long_piece(row, 2 * i + piece)),
                     "r"(pair<T>(c[8 * i], c[8 * i + 1])), "r"(pair<T>(c[8 * i + 2], c[8 * i + 3])), "r"(pair<T>(c[8 * i + 4], c[8 * i + 5])),
                     "r"(pair<T>(c[8 * i + 6], c[8 * i + 7]))
                     : "memory");
}

template <class T> __device__ __forceinline__ uint32_t silu_pair(uint32_t gates, uint32_t ups)
{
    const float2 g = widen_pair<T>(gates), u = widen_pair<T>(ups);
    return pair<T>(silu_times<T>(g.x, u.x), silu_times<T>(g.y, u.y));
}
template <class T> __device__ __forceinline__ uint32_t sum_pair(uint32_t a, uint32_t b)
{
    const float2 x = widen_pair<T>(a), y = widen_pair<T>(b);
    return pair<T>(x.x + y.x, x.y + y.y);
}

/* 8 pairs turned by their angles, as weft_rope_args says. */
template <class T> __device__ __forceinline__ void turn_pairs(uint4 &low, uint4 &high, const float *cos, const float *sin)
{
    uint32_t *a = &low.x, *b = &high.x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 u = widen_pair<T>(a[i]), v = widen_pair<T>(b[i]);
        const float2 c = *(const float2 *)(cos + 2 * i), s = *(const float2 *)(sin + 2 * i);
        a[i] = pair<T>(u.x * c.x - v.x * s.x, u.y * c.y - v.y * s.y);
        b[i] = pair<T>(v.x * c.x + u.x * s.x, v.y * c.y + u.y * s.y);
    }
}

/* ---- the ends, by rows of a warpgroup's sums; token: of row 0. Two rows of a warp, from `row` on: ---- */

template <class T> __device__ __forceinline__ void end_silu(const LongJob &job, const char *sums, int row, int64_t token, int column)
{
    const int piece = threadIdx.x % 16;
    const int64_t n = (int64_t)column * (LONG_COLS / 2) + 8 * piece, cols = job.silu.cols;
    row += threadIdx.x % 32 / 16, token += row;
    if (token >= job.a.tokens || n >= cols) return;
    const uint4 gate = *(const uint4 *)(sums + long_piece(row, piece)), up = *(const uint4 *)(sums + long_piece(row, piece + LONG_COLS / 16));
    *(uint4 *)((T *)job.silu.y + token * job.silu.y_stride + n) =
        make_uint4(silu_pair<T>(gate.x, up.x), silu_pair<T>(gate.y, up.y), silu_pair<T>(gate.z, up.z), silu_pair<T>(gate.w, up.w));
    T *y = (T *)job.a.y + token * job.a.y_stride + n; /* hardly anybody reads these: they are to leave the L2 first */
    __stcs((uint4 *)y, gate);
    __stcs((uint4 *)(y + cols), up);
}

/* Heads are turned, and keys and values go into the pages too. */
template <class T> __device__ __forceinline__ void end_heads(const LongJob &job, const char *sums, int row, int64_t token, int column)
{
    const int head = column * (LONG_COLS / LONG_HEAD) + threadIdx.x % 16 / 8, piece = threadIdx.x % 16 / 8 * 16 + threadIdx.x % 8, at = threadIdx.x % 8 * 8;
    row += threadIdx.x % 32 / 16, token += row;
    if (token >= job.a.tokens || (int64_t)head * LONG_HEAD >= job.a.n) return;
    uint4 low = *(const uint4 *)(sums + long_piece(row, piece)), high = *(const uint4 *)(sums + long_piece(row, piece + 8));
    const int position = job.rope.positions[token];
    if (head < (int)job.rope.heads && position >= 0 && position < job.rope.max_positions) {
        const float *angles = job.rope.cos_sin + (int64_t)position * LONG_HEAD + at;
        turn_pairs<T>(low, high, angles, angles + LONG_HEAD / 2);
    }
    T *y = (T *)job.a.y + token * job.a.y_stride + (int64_t)head * LONG_HEAD + at;
    *(uint4 *)y = low, *(uint4 *)(y + LONG_HEAD / 2) = high;
    if (job.pages.tokens == 0 || head < job.key_head) return;
    const int64_t place = place_of(job.pages, token);
    if (place < 0) return;
    const bool value = head >= job.value_head;
    const int64_t to = place + (int64_t)(head - (value ? job.value_head : job.key_head)) * job.pages.pages.page_size;
    T *cache = (T *)(value ? job.pages.v_cache : job.pages.k_cache) + to * LONG_HEAD + at;
    *(uint4 *)cache = low, *(uint4 *)(cache + LONG_HEAD / 2) = high;
}

/* ROWS rows, `step` apart. */
template <class T, bool SUM, int ROWS> __device__ __forceinline__ void end_rows(const LongJob &job, const char *sums, int first, int step, int64_t token, int column)
{
    const weft_linear_args &a = job.a;
    const int piece = threadIdx.x % 32;
    const int64_t n = (int64_t)column * LONG_COLS + 8 * piece;
    uint4 old[ROWS];
    auto there = [&](int i) { return first + i * step < LONG_SIDE && token + first + i * step < a.tokens && n < a.n; };
    if (SUM) {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (there(i)) old[i] = *(const uint4 *)((const T *)job.residual + (token + first + i * step) * job.residual_stride + n);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = first + i * step;
        if (!there(i)) continue;
        const uint4 y = *(const uint4 *)(sums + long_piece(row, piece));
        *(uint4 *)((T *)a.y + (token + row) * a.y_stride + n) = y;
        if (SUM)
            *(uint4 *)((T *)job.residual + (token + row) * job.residual_stride + n) =
                make_uint4(sum_pair<T>(y.x, old[i].x), sum_pair<T>(y.y, old[i].y), sum_pair<T>(y.z, old[i].z), sum_pair<T>(y.w, old[i].w));
    }
}

/* A warpgroup's tokens of a tile, by one of three warps. */
template <class T, int END> __device__ __forceinline__ void end_side(const LongJob &job, const char *sums, int warp, int64_t token, int column)
{
    enum { WARPS = LONG_ENDING / 32, AT_ONCE = 4 };
    if constexpr (END == LONG_PLAIN || END == LONG_SUM) {
        for (int row = warp; row < LONG_SIDE; row += WARPS * AT_ONCE) end_rows<T, END == LONG_SUM, AT_ONCE>(job, sums, row, WARPS, token, column);
    } else {
#pragma unroll 2
        for (int row = 2 * warp; row < LONG_SIDE; row += 2 * WARPS) {
            if (END == LONG_SILU) end_silu<T>(job, sums, row, token, column);
            else end_heads<T>(job, sums, row, token, column);
        }
    }
}

template <class T, int END> __device__ __forceinline__ void long_end(const LongJob &job, LongRoom &room, int rank, int warp)
{
    const int clusters = gridDim.x / LONG_CLUSTER, tiles = job.pairs * job.columns;
    uint32_t phase = 0;
    for (int t = blockIdx.x / LONG_CLUSTER; t < tiles; t += clusters, phase ^= 1) {
        const LongTile tile = long_tile(job, t);
        for (int side = 0; side < 2; side++) {
            barrier_wait(shared_address(&room.summed[side]), phase);
            end_side<T, END>(job, room.sums[side], warp, ((int64_t)tile.pair * LONG_CLUSTER + rank) * LONG_ROWS + side * LONG_SIDE, tile.column);
            barrier_arrive(shared_address(&room.ended[side]));
        }
    }
}

/* This warp needs a stage no more, which both blocks of the cluster fill. */
__device__ __forceinline__ void long_leave(LongRoom &room, int stage)
{
    if (threadIdx.x % 32 < LONG_CLUSTER) neighbour_leave(neighbour_address(shared_address(&room.empty[stage]), threadIdx.x % 32));
}

template <class T> __device__ __forceinline__ void long_multiply(const LongJob &job, LongRoom &room, int side)
{
    const int clusters = gridDim.x / LONG_CLUSTER, tiles = job.pairs * job.columns;
    const uint64_t x_first = tile_descriptor(shared_address(room.x[0]) + side * (LONG_X_BYTES / 2), 0), w_first = tile_descriptor(shared_address(room.w[0]), 0);
    int stage = 0;
    uint32_t phase = 0;
    float c[LONG_COLS / 2];
    for (int t = blockIdx.x / LONG_CLUSTER, turn = 0; t < tiles; t += clusters, turn ^= 1) {
        for (int k = 0; k < job.chunks; k++) {
            barrier_wait(shared_address(&room.full[stage]), phase);
            const uint64_t x = x_first + stage * (LONG_X_BYTES / 16), w = w_first + stage * (LONG_W_BYTES / 16);
            products_begin();
#pragma unroll
            for (int i = 0; i < LONG_K / 16; i++) product_shared<T, LONG_COLS>(c, x + 2 * i, w + 2 * i, k > 0 || i > 0);
            products_commit();
            if (k > 0) {
                products_wait<1>();
                long_leave(room, stage == 0 ? LONG_STAGES - 1 : stage - 1);
            }
            if (++stage == LONG_STAGES) stage = 0, phase ^= 1;
        }
        products_wait<0>();
        hold(c);
        long_leave(room, stage == 0 ? LONG_STAGES - 1 : stage - 1);
        barrier_wait(shared_address(&room.ended[side]), turn ^ 1);
        long_put<T>(c, shared_address(room.sums[side]));
        barrier_arrive(shared_address(&room.summed[side]));
    }
}

#endif

#ifdef WEFT_CUDA_HOPPER

template <class T, int END> __global__ void __launch_bounds__(LONG_THREADS, 1) long_rows(const __grid_constant__ LongJob job)
{
#ifdef WEFT_HOPPER
    extern __shared__ char raw[];
    LongRoom &room = *(LongRoom *)(raw + (1024 - (shared_address(raw) & 1023)) % 1024);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), rank = blockIdx.x % LONG_CLUSTER;
    if (threadIdx.x == 0) {
        map_prefetch(&job.x);
        map_prefetch(&job.w);
        for (int i = 0; i < LONG_STAGES; i++) {
            barrier_init(shared_address(&room.full[i]), 1);
            barrier_init(shared_address(&room.empty[i]), 8 * LONG_CLUSTER);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(shared_address(&room.summed[i]), 128);
            barrier_init(shared_address(&room.ended[i]), LONG_ENDING);
        }
        barriers_ready();
    }
    cluster_arrive();
    cluster_wait();
    dependency_wait();
    if (group == 2) {
        registers_down<104>();
        const int warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
        if (warp < LONG_ENDING / 32) long_end<T, END>(job, room, rank, warp);
        else if (threadIdx.x % 32 == 0) long_feed<END>(job, room, rank);
        __syncwarp();
    } else {
        registers_up<200>();
        long_multiply<T>(job, room, group);
    }
    cluster_arrive();
    cluster_wait(); /* nobody leaves while a neighbour still arrives at its barriers */
#endif
}

/* ---- host side ---- */

enum { LONG_SHARED = LONG_STAGES * (LONG_X_BYTES + LONG_W_BYTES) + 2 * LONG_SIDE * LONG_ROW_BYTES + (2 * LONG_STAGES + 4) * 8 + 1024 };

template <class T, int END> static void launch_long(const LongJob &job, int clusters, void *stream)
{
    void (*kernel)(const LongJob) = long_rows<T, END>;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = LONG_CLUSTER, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = (unsigned)(LONG_CLUSTER * clusters);
    config.blockDim = LONG_THREADS;
    config.dynamicSmemBytes = LONG_SHARED;
    config.stream = (cudaStream_t)stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, LONG_SHARED);
    (void)cudaLaunchKernelEx(&config, kernel, job);
}

template <class T> static void start(const LongJob &job, const LongJoins &joins, void *stream)
{
    const int clusters = (int)least((int64_t)job.pairs * job.columns, job.a.cuda->clusters[1]);
    if (joins.silu != NULL) launch_long<T, LONG_SILU>(job, clusters, stream);
    else if (joins.norm != NULL) launch_long<T, LONG_SUM>(job, clusters, stream);
    else if (joins.rope != NULL) launch_long<T, LONG_HEADS>(job, clusters, stream);
    else launch_long<T, LONG_PLAIN>(job, clusters, stream);
}

bool long_product(const weft_linear_args *a, const LongJoins &joins, void *stream)
{
    LongJob job = {};
    job.a = *a;
    if (joins.silu != NULL) job.silu = *joins.silu;
    if (joins.norm != NULL) job.residual = joins.norm->residual, job.residual_stride = joins.norm->residual_stride;
    if (joins.rope != NULL) job.rope = *joins.rope;
    if (joins.pages != NULL) {
        job.pages = *joins.pages;
        job.key_head = (int)(((const char *)job.pages.k - (const char *)a->y) / (2 * LONG_HEAD));
        job.value_head = (int)(((const char *)job.pages.v - (const char *)a->y) / (2 * LONG_HEAD));
    }
    const int64_t planes = joins.silu != NULL ? 2 : 1, rows = a->n / planes, stride = 2 * a->w_stride;
    if (!tensor_map(&job.x, a->x_dtype, a->x, {a->k, a->tokens, 1}, {2 * a->x_stride, 2 * a->x_stride}, {LONG_K, LONG_ROWS, 1})) return false;
    if (!tensor_map(&job.w, a->w_dtype, a->w, {a->k, rows, planes}, {stride, stride * rows}, {LONG_K, LONG_COLS / 2, 1})) return false;
    job.pairs = (int)div_up(a->tokens, LONG_CLUSTER * LONG_ROWS);
    job.columns = (int)div_up(rows, LONG_COLS / planes);
    job.group = (int)least(LONG_GROUP, job.pairs);
    job.chunks = (int)div_up(a->k, LONG_K);
    if (a->x_dtype == WEFT_BF16) start<bf16>(job, joins, stream);
    else start<__half>(job, joins, stream);
    return true;
}

#else

bool long_product(const weft_linear_args *, const LongJoins &, void *) { return false; }

#endif /* WEFT_CUDA_HOPPER */

bool long_fits(const weft_linear_args *a)
{
    if (a->cuda == NULL || a->cuda->clusters[1] < 1 || (a->x_dtype != WEFT_BF16 && a->x_dtype != WEFT_F16)) return false;
    if (a->w_dtype != a->x_dtype || a->y_dtype != a->x_dtype || a->bias != NULL || a->add) return false;
    if (a->tokens < 1 || a->n < 1 || a->k < 1 || a->tokens > 1 << 24 || a->n > 1 << 24 || a->k > 1 << 24) return false;
    if ((a->k | a->n | a->x_stride | a->w_stride | a->y_stride) % 8 != 0 || a->x_stride < a->k || a->w_stride < a->k || a->y_stride < a->n) return false;
    return aligned(a->x, 16) && aligned(a->w, 16) && aligned(a->y, 16);
}

/* Where the last turn of tiles leaves few clusters without work. */
bool long_pays(const weft_linear_args *a)
{
    enum { LEAST_TOKENS = 1024, LEAST_K = 1024, LEAST_PERCENT = 85 };
    if (a->tokens < LEAST_TOKENS || a->k < LEAST_K) return false;
    const int64_t clusters = a->cuda->clusters[1], tiles = div_up(a->tokens, 256) * div_up(a->n, 256);
    return 100 * tiles >= LEAST_PERCENT * div_up(tiles, clusters) * clusters;
}

} // namespace weft
