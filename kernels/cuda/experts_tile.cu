/* kernels/cuda/experts_tile.cu - the experts of many tokens, on Hopper's warpgroup products.
 *
 *     order    pairs (token, choice) by expert, cut into segments; x packed     one block; a warp per 128 columns
 *     up       act[pair] = silu(gate x) * (up x)                                per (128 rows, segment)
 *     pack     act packed
 *     down     out[pair] = down act                                            per (128 rows, segment)
 *     sum      y[token] = sum of weight * out, experts ascending               per token
 *
 * Weights are the first operand and go straight from memory to registers, where fp8 becomes half precision
 * exactly: every weight is in one warp only. Packed activations (the second operand) are gathered by pair into
 * shared memory, columns permuted so that a lane's 16 bytes of a weight row are its operands of consecutive
 * products. With fp8, sums over 128 columns are multiplied by the scales of both. What lies between the two
 * products is rounded to x's type. */
#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/hopper.cuh"

namespace weft {

enum {
    SORT = 1024, /* threads */
    MOST_COUNT = 4096,
    TL_THREADS = 256,
    TL_STAGES = 4,
    TL_GROUP = 256 /* bytes of a packed group */
};

struct TileSegment {
    int expert, first, count; /* pairs [first, first + count) in order */
};

struct Tiles {
    weft_experts_args a;
    int32_t *order, *place;
    TileSegment *segments;
    int32_t *here;   /* (1): pairs that are here */
    char *x, *act;   /* packed */
    float *x_factor, *act_factor;
    void *raw, *out; /* act before it is packed, and out in x's type; by place */
    int raw_dtype;   /* float32 where activations are rounded to e4m3, else x's */
    int columns, most_segments; /* pairs in a segment at most */
    int64_t pairs;
};

/* ---- order ---- */

__device__ static void sort_by_expert(const Tiles &w)
{
    __shared__ int counts[MOST_COUNT], cut;
    const weft_experts_args &a = w.a;
    const int pairs = (int)w.pairs, count = (int)a.count, lane = threadIdx.x % 32;
    for (int e = threadIdx.x; e < count; e += SORT) counts[e] = 0;
    __syncthreads();
#pragma unroll 4
    for (int p = threadIdx.x; p < pairs; p += SORT) {
        const int e = local_expert(a, a.ids[p]);
        w.place[p] = e >= 0 ? atomicAdd(&counts[e], 1) : -1;
    }
    __syncthreads();
    if (threadIdx.x < 32) { /* counts into starts */
        int before = 0, cut_before = 0;
        for (int e0 = 0; e0 < count; e0 += 32) {
            const int e = e0 + lane, own = e < count ? counts[e] : 0, own_cuts = (own + w.columns - 1) / w.columns;
            int sum = own, cut_sum = own_cuts;
            for (int d = 1; d < 32; d *= 2) {
                const int other = __shfl_up_sync(~0u, sum, d), other_cuts = __shfl_up_sync(~0u, cut_sum, d);
                if (lane >= d) sum += other, cut_sum += other_cuts;
            }
            if (e < count) {
                const int first = before + sum - own, first_cut = cut_before + cut_sum - own_cuts;
                counts[e] = first;
                for (int i = 0; i < own_cuts; i++)
                    w.segments[first_cut + i] = {e, first + i * w.columns, min(w.columns, own - i * w.columns)};
            }
            before += __shfl_sync(~0u, sum, 31), cut_before += __shfl_sync(~0u, cut_sum, 31);
        }
        if (lane == 0) cut = cut_before, *w.here = before;
    }
    __syncthreads();
    for (int i = cut + threadIdx.x; i < w.most_segments; i += SORT) w.segments[i] = {0, 0, 0};
#pragma unroll 4
    for (int p = threadIdx.x; p < pairs; p += SORT) {
        const int e = local_expert(a, a.ids[p]);
        if (e < 0) continue;
        const int at = counts[e] + w.place[p];
        w.place[p] = at;
        w.order[at] = p;
    }
}

/* Where four columns 4 * lane.. of a group go: two pairs, 8 apart. */
template <class W> __device__ __forceinline__ int packed_place(int lane)
{
    if (sizeof(W) == 1) return lane / 16 * 64 + lane % 4 * 16 + lane % 16 / 4 * 2;
    return lane / 8 * 32 + lane % 2 * 16 + lane % 8 / 2 * 2;
}

/* One group of a row of activations. */
template <class W, class T>
__device__ __forceinline__ void pack_columns(T *to, float *factor, const void *x, int dtype, int64_t row, const WeightRow<W> &shape, int group, bool quantize)
{
    const int lane = threadIdx.x % 32, j = 128 * group - shape.phase + 4 * lane;
    float v[4] = {}, scale = 1.0f;
    if (j >= 0 && j < shape.columns) load_four(v, x, dtype, row + j);
    if (sizeof(W) == 1) scale = scale_group(v, quantize);
    T *own = to + 128 * group + packed_place<W>(lane);
    *(uint32_t *)own = pair<T>(v[0], v[1]);
    *(uint32_t *)(own + 8) = pair<T>(v[2], v[3]);
    if (lane == 0) factor[group] = scale;
}

/* Block 0 sorts; the warps of the others take a group each. */
template <class W, class T> __global__ void __launch_bounds__(SORT) order_pairs(const Tiles w)
{
    dependency_wait();
    if (blockIdx.x == 0) {
        sort_by_expert(w);
        return;
    }
    const WeightRow<W> shape(w.a.up.scale_col_phase, w.a.hidden);
    const int64_t item = (int64_t)(blockIdx.x - 1) * (SORT / 32) + threadIdx.x / 32, token = item / shape.groups;
    if (token >= w.a.tokens) return;
    pack_columns<W, T>((T *)(w.x + token * shape.groups * TL_GROUP), w.x_factor + token * shape.groups, w.a.x, w.a.x_dtype, token * w.a.x_stride, shape,
                       (int)(item % shape.groups), w.a.quantize);
}

template <class W, class T> __global__ void __launch_bounds__(256) pack_act(const Tiles w)
{
    dependency_wait();
    const WeightRow<W> shape(w.a.down.scale_col_phase, w.a.intermediate);
    const int64_t item = (int64_t)blockIdx.x * 8 + threadIdx.x / 32, p = item / shape.groups;
    if (p >= *w.here) return;
    pack_columns<W, T>((T *)(w.act + p * shape.groups * TL_GROUP), w.act_factor + p * shape.groups, w.raw, w.raw_dtype, p * w.a.intermediate, shape,
                       (int)(item % shape.groups), w.a.quantize);
}

/* ---- products ---- */

#ifdef WEFT_HOPPER

/* d (+)= a b^T: 64 rows of a in the registers of a warpgroup, N rows of b in shared memory, 16 inner elements. */
template <class T, int N> __device__ __forceinline__ void product_rows(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int add)
{
#define WEFT_PRODUCT(COLUMNS, TYPE, NAMES, A, B, ADD, REGISTERS)                                                                          \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0;\n"                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" NAMES "}, {" A "}, " B ", p, 1, 1, 0; }"       \
                 : REGISTERS                                                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)                                                           \
                 : "memory")
    constexpr bool brain = __is_same(T, bf16);
    if constexpr (N == 32 && brain) WEFT_PRODUCT("32", "bf16", WEFT_NAMES_16, "%16,%17,%18,%19", "%20", "%21", WEFT_16(d, 0));
    else if constexpr (N == 32) WEFT_PRODUCT("32", "f16", WEFT_NAMES_16, "%16,%17,%18,%19", "%20", "%21", WEFT_16(d, 0));
    else if constexpr (N == 64 && brain) WEFT_PRODUCT("64", "bf16", WEFT_NAMES_32, "%32,%33,%34,%35", "%36", "%37", WEFT_32(d));
    else if constexpr (N == 64) WEFT_PRODUCT("64", "f16", WEFT_NAMES_32, "%32,%33,%34,%35", "%36", "%37", WEFT_32(d));
    else if constexpr (brain) WEFT_PRODUCT("128", "bf16", WEFT_NAMES_64, "%64,%65,%66,%67", "%68", "%69", WEFT_64(d));
    else WEFT_PRODUCT("128", "f16", WEFT_NAMES_64, "%64,%65,%66,%67", "%68", "%69", WEFT_64(d));
#undef WEFT_PRODUCT
}

__device__ __forceinline__ void copy_16(uint32_t to, const void *from, bool in)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(in ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_4(uint32_t to, const void *from, bool in)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(in ? 4 : 0) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int OPEN> __device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory"); }

/* Four words of an operand: those of product `step` of a group. fp8: one word of each of two rows. */
template <class W> struct Weights {
    enum { LOADS = 2 * (int)sizeof(W) };
    uint4 w[2][LOADS];
    /* Bytes [at, at + 128) and so on of two rows, of which [begin, end) are there. */
    __device__ __forceinline__ void take(const char *row, uint32_t second, int at, int begin, int end)
    {
#pragma unroll
        for (int c = 0; c < LOADS; c++) {
            const bool in = at + 64 * c >= begin && at + 64 * c < end;
            w[0][c] = stream_in(row + at + 64 * c, in);
            w[1][c] = stream_in(row + second + at + 64 * c, in);
        }
    }
    __device__ __forceinline__ void operand(uint32_t (&a)[4], int step) const
    {
        if constexpr (sizeof(W) == 1) {
            e4m3_to_half((&w[0][step / 4].x)[step % 4], a[0], a[2]);
            e4m3_to_half((&w[1][step / 4].x)[step % 4], a[1], a[3]);
        } else {
            a[0] = (&w[0][step / 2].x)[step % 2 * 2], a[2] = (&w[0][step / 2].x)[step % 2 * 2 + 1];
            a[1] = (&w[1][step / 2].x)[step % 2 * 2], a[3] = (&w[1][step / 2].x)[step % 2 * 2 + 1];
        }
    }
};
#endif

template <int N> constexpr size_t tile_bytes() { return 1024 + TL_STAGES * (size_t)(N * TL_GROUP + N * 4); }

#ifdef WEFT_HOPPER
/* sum += part by the scales of two rows and the factors of the lane's pairs 8 j, + 1. */
template <int N> __device__ __forceinline__ void add_scaled(float (&sum)[N / 2], const float (&part)[N / 2], float by0, float by1, const float *factor)
{
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float2 by = *(const float2 *)(factor + 8 * j);
        sum[4 * j] = fmaf(part[4 * j], by0 * by.x, sum[4 * j]);
        sum[4 * j + 1] = fmaf(part[4 * j + 1], by0 * by.y, sum[4 * j + 1]);
        sum[4 * j + 2] = fmaf(part[4 * j + 2], by1 * by.x, sum[4 * j + 2]);
        sum[4 * j + 3] = fmaf(part[4 * j + 3], by1 * by.y, sum[4 * j + 3]);
    }
}

/* A tile's sums: row0 and its second row (UP: of up; else row0 + 8) of the segment's pairs. */
template <int N, bool UP> __device__ __forceinline__ void store_tile(const Tiles &w, const TileSegment &s, const float (&sum)[N / 2], int row0)
{
    const weft_experts_args &a = w.a;
    const int rows = (int)(UP ? a.intermediate : a.hidden), q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int p = 8 * j + 2 * q + i;
            if (p >= s.count) continue;
            const float first = sum[4 * j + i], other = sum[4 * j + 2 + i];
            if (UP) {
                if (row0 < rows) store(w.raw, w.raw_dtype, (int64_t)(s.first + p) * rows + row0, first / (1.0f + expf(-first)) * other);
            } else {
                if (row0 < rows) store(w.out, a.x_dtype, (int64_t)(s.first + p) * rows + row0, first);
                if (row0 + 8 < rows) store(w.out, a.x_dtype, (int64_t)(s.first + p) * rows + row0 + 8, other);
            }
        }
}

/* 128 rows of a matrix, from tile blockIdx.x on, times the pairs of a segment, at most N. UP: 64 rows of gate and
 * the same of up. */
template <class W, class T, int N, bool UP> __device__ static void multiply_tile(const Tiles &w, const TileSegment &s, char *dynamic)
{
    const weft_experts_args &a = w.a;
    const weft_expert_matrix &m = UP ? a.up : a.down;
    const int rows = (int)(UP ? a.intermediate : a.hidden);
    const WeightRow<W> shape(m.scale_col_phase, UP ? a.hidden : a.intermediate);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int row0 = UP ? blockIdx.x * 64 + warp * 8 + g : blockIdx.x * 128 + warp * 16 + g;
    /* rows beyond the last count as the last */
    const int read0 = min(row0, rows - 1), read1 = UP ? read0 + rows : min(row0 + 8, rows - 1);
    const char *from = (const char *)m.w + (int64_t)s.expert * (UP ? 2 : 1) * rows * shape.bytes + (int64_t)read0 * shape.bytes - shape.phase + 16 * q;
    const uint32_t second = (uint32_t)(read1 - read0) * (uint32_t)shape.bytes;
    const float *scale0 = nullptr, *scale1 = nullptr;
    float next0 = 1.0f, next1 = 1.0f; /* scales of the next group */
    if (sizeof(W) == 1) {
        const float *scale = m.scale + (int64_t)s.expert * m.scale_rows * m.scale_stride + m.scale_col_phase / 128;
        scale0 = scale + m.scale_row[read0] * m.scale_stride, scale1 = scale + m.scale_row[read1] * m.scale_stride;
        next0 = __ldg(scale0), next1 = __ldg(scale1);
    }

    /* The gathered rows of this thread's copies: 16 bytes of rows threadIdx / 16 + 16 i. */
    const char *packed = (UP ? w.x : w.act) + threadIdx.x % 16 * 16;
    const float *factors = UP ? w.x_factor : w.act_factor;
    auto source = [&](int p) { return UP ? w.order[s.first + p] / (int)a.top_k : s.first + p; };
    uint32_t gathered[N / 16];
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
        const int p = threadIdx.x / 16 + 16 * i;
        gathered[i] = p < s.count ? (uint32_t)source(p) * (uint32_t)shape.groups : ~0u;
    }
    const uint32_t own_factor = threadIdx.x < N && threadIdx.x < s.count ? (uint32_t)source(threadIdx.x) * (uint32_t)shape.groups : ~0u;
    const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u, factor_base = base + TL_STAGES * N * TL_GROUP;
    const float *factor_shared = (const float *)(dynamic + (factor_base - shared_address(dynamic)));
    const int half = threadIdx.x % 16 / 8, piece = threadIdx.x % 8;
    auto fetch = [&](int group) {
        const int stage = group % TL_STAGES;
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            const int p = threadIdx.x / 16 + 16 * i;
            const bool in = gathered[i] != ~0u && group < shape.groups;
            copy_16(base + stage * N * TL_GROUP + half * N * 128 + p * 128 + ((piece ^ p % 8) << 4),
                    packed + (in ? (int64_t)(gathered[i] + group) * TL_GROUP : 0), in);
        }
        if (sizeof(W) == 1 && threadIdx.x < N) {
            const bool in = own_factor != ~0u && group < shape.groups;
            copy_4(factor_base + (stage * N + threadIdx.x) * 4, factors + (in ? own_factor + group : 0), in);
        }
        copies_commit();
    };
    const int begin = shape.phase - 16 * q, end = shape.phase + shape.bytes - 16 * q; /* of a row, as `at` counts */
    enum { SPAN = 128 * (int)sizeof(W) };
    Weights<W> now, next;
    now.take(from, second, 0, begin, end);
    next.take(from, second, SPAN, begin, end);
    for (int i = 0; i < TL_STAGES - 1; i++) fetch(i);
    float sum[N / 2] = {}, part[N / 2];
    for (int group = 0; group < shape.groups; group++) {
        const int stage = group % TL_STAGES;
        copies_wait<TL_STAGES - 2>();
        writes_visible();
        __syncthreads();
        fetch(group + TL_STAGES - 1);
        const float by0 = next0, by1 = next1;
        if (sizeof(W) == 1 && group + 1 < shape.groups) next0 = __ldg(scale0 + group + 1), next1 = __ldg(scale1 + group + 1);
        uint32_t operands[8][4];
#pragma unroll
        for (int k = 0; k < 8; k++) now.operand(operands[k], k);
        now = next;
        next.take(from, second, (group + 2) * SPAN, begin, end);
        float(&to)[N / 2] = *(sizeof(W) == 1 ? &part : &sum);
        hold(to);
        products_begin();
#pragma unroll
        for (int k = 0; k < 8; k++)
            product_rows<T, N>(to, operands[k], tile_descriptor(base + stage * N * TL_GROUP + k / 4 * N * 128 + k % 4 * 32, 16),
                               sizeof(W) == 1 ? k > 0 : group + k > 0);
        products_commit();
        products_wait<0>();
        hold(to);
        if (sizeof(W) == 1) add_scaled<N>(sum, part, by0, by1, factor_shared + stage * N + 2 * q);
    }
    copies_wait<0>();
    store_tile<N, UP>(w, s, sum, row0);
}
#endif

/* Segments of at most MOST pairs; those with few are multiplied as such. */
template <class W, class T, int MOST, bool UP> __global__ void __launch_bounds__(TL_THREADS, MOST == 32 ? 2 : 1) tile_rows(const Tiles w)
{
#ifdef WEFT_HOPPER
    extern __shared__ char dynamic[];
    dependency_wait();
    const TileSegment s = w.segments[blockIdx.y];
    if (s.count == 0) return;
    if (MOST == 32 || s.count <= 32) multiply_tile<W, T, 32, UP>(w, s, dynamic);
    else if (s.count <= 64) multiply_tile<W, T, 64, UP>(w, s, dynamic);
    else multiply_tile<W, T, 128, UP>(w, s, dynamic);
#endif
}

/* ---- sum ---- */

enum { SUM_THREADS = 128, SUM_CHOICES = 64 };

/* A token's pairs that are here in the order of places, which is that of experts. */
__global__ void __launch_bounds__(SUM_THREADS) sum_pairs(const Tiles w)
{
    __shared__ int64_t from[SUM_CHOICES];
    __shared__ float weight[SUM_CHOICES];
    dependency_wait();
    const weft_experts_args &a = w.a;
    const int64_t t = blockIdx.x;
    const int k = (int)a.top_k, own = threadIdx.x < k ? w.place[t * k + threadIdx.x] : -1;
    if (own >= 0) {
        int rank = 0;
        for (int i = 0; i < k; i++) {
            const int other = w.place[t * k + i];
            rank += other >= 0 && other < own;
        }
        from[rank] = own, weight[rank] = a.weights[t * k + threadIdx.x];
    }
    const int count = __syncthreads_count(own >= 0);
    for (int64_t j = 4 * threadIdx.x; j < a.hidden; j += 4 * SUM_THREADS) {
        float y[4] = {};
        for (int i = 0; i < count; i++) {
            float v[4];
            load_four(v, w.out, a.x_dtype, from[i] * a.hidden + j);
#pragma unroll
            for (int l = 0; l < 4; l++) y[l] = fmaf(weight[i], v[l], y[l]);
        }
#pragma unroll
        for (int l = 0; l < 4; l++) store(a.y, a.y_dtype, t * a.y_stride + j + l, y[l]);
    }
}

/* ---- launches ---- */

template <class W> static bool whole(const weft_experts_args *a)
{
    const int64_t pack = 16 / (int64_t)sizeof(W), most = (int64_t)1 << 20;
    return (a->hidden | a->intermediate) % pack == 0 && a->intermediate > 0 && (a->up.scale_col_phase | a->down.scale_col_phase) % 16 == 0 &&
           a->hidden < most && a->intermediate < most;
}

bool tiles_fit(const weft_experts_args *a)
{
#ifdef WEFT_CUDA_HOPPER
    if (a->cuda == NULL || a->count == 0 || a->count > MOST_COUNT || a->top_k > SUM_CHOICES) return false;
    if (a->x_dtype == WEFT_F32 || !aligned(a->x, 8) || a->x_stride % 4 != 0 || !aligned(a->up.w, 16) || !aligned(a->down.w, 16)) return false;
    const int64_t most_columns = most(a->hidden, a->intermediate), offsets = UINT32_MAX / 2;
    if (a->tokens * a->top_k * div_up(most_columns + 127, 128) > offsets || a->hidden * a->intermediate > offsets / 2) return false;
    if (a->w_dtype == WEFT_F8E4M3) return whole<uint8_t>(a);
    return a->w_dtype == a->x_dtype && !a->quantize && a->up.scale_col_phase == 0 && a->down.scale_col_phase == 0 && whole<bf16>(a);
#else
    return false;
#endif
}

template <class W, class T, int N> static void multiply(const Tiles &w, void *stream)
{
    const unsigned segments = (unsigned)w.most_segments;
    const WeightRow<W> act(w.a.down.scale_col_phase, w.a.intermediate);
    (void)cudaFuncSetAttribute(tile_rows<W, T, N, true>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)tile_bytes<N>());
    (void)cudaFuncSetAttribute(tile_rows<W, T, N, false>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)tile_bytes<N>());
    launch(tile_rows<W, T, N, true>, dim3((unsigned)div_up(w.a.intermediate, 64), segments), TL_THREADS, tile_bytes<N>(), stream, w);
    launch(pack_act<W, T>, (unsigned)div_up(w.pairs * act.groups, 8), 256, 0, stream, w);
    launch(tile_rows<W, T, N, false>, dim3((unsigned)div_up(w.a.hidden, 128), segments), TL_THREADS, tile_bytes<N>(), stream, w);
}

template <class W, class T> static void start(Tiles &w, void *stream)
{
    const int64_t average = w.pairs / w.a.count;
    const WeightRow<W> x(w.a.up.scale_col_phase, w.a.hidden), act(w.a.down.scale_col_phase, w.a.intermediate);
    w.columns = average <= 24 ? 32 : 128;
    w.most_segments = (int)(w.pairs / w.columns + least(w.pairs, w.a.count));
    char *at = (char *)w.a.workspace;
    auto take = [&](int64_t bytes) {
        char *p = at;
        at += div_up(bytes, 64) * 64;
        return p;
    };
    w.order = (int32_t *)take(w.pairs * 4), w.place = (int32_t *)take(w.pairs * 4), w.here = (int32_t *)take(4);
    w.segments = (TileSegment *)take((int64_t)w.most_segments * (int64_t)sizeof(TileSegment));
    w.x = take(w.a.tokens * x.groups * TL_GROUP), w.x_factor = (float *)take(w.a.tokens * x.groups * 4);
    w.act = take(w.pairs * act.groups * TL_GROUP), w.act_factor = (float *)take(w.pairs * act.groups * 4);
    w.raw = take(w.pairs * w.a.intermediate * 4), w.out = take(w.pairs * w.a.hidden * 2);
    w.raw_dtype = w.a.quantize ? WEFT_F32 : w.a.x_dtype;
    launch(order_pairs<W, T>, (unsigned)(1 + div_up(w.a.tokens * x.groups, SORT / 32)), SORT, 0, stream, w);
    if (w.columns == 32) multiply<W, T, 32>(w, stream);
    else multiply<W, T, 128>(w, stream);
    launch(sum_pairs, (unsigned)w.a.tokens, SUM_THREADS, 0, stream, w);
}

void tile_experts(const weft_experts_args *a, void *stream)
{
    Tiles w = {};
    w.a = *a;
    w.pairs = a->tokens * a->top_k;
    if (a->w_dtype == WEFT_F8E4M3) start<uint8_t, __half>(w, stream);
    else if (a->w_dtype == WEFT_BF16) start<bf16, bf16>(w, stream);
    else start<__half, __half>(w, stream);
}

} // namespace weft
