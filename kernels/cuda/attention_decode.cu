/* kernels/cuda/attention_decode.cu - attention of few queries over many keys.
 *
 * The columns of a tile are the (query, head) pairs of one request that share a KV head, 8 or 16 of
 * them ("rows" of the result); the keys are cut over blocks (splits) and over the warps of a block,
 * 16 keys at a time. Scores are S = K Q and values O = V^T P, so that K and V are the tensor cores'
 * first operand. Both are read once, 16 bytes a lane, straight into its fragments: for K a lane holds
 * 8 neighbouring dims of two keys, for V of four keys, so the inner order is permuted and rows g and
 * g + 8 of output tile (h, t) are dims 64 h + 8 g + 2 t and the next. The splits of an item are merged
 * by its block that ends last or, where they are few, by all of its blocks: they are then one cluster and
 * read each other's shared memory. */
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/mma.cuh"

namespace weft {

enum { DEC_WARPS = 4, DEC_THREADS = DEC_WARPS * 32, KEYS = 16, MAX_SPLITS = 128, PAD = 2, CLUSTER_SPLITS = 16 };

struct Split {
    float *partial; /* (item, split, rows of a tile, dim_v): sums of values, not yet divided */
    float2 *stats;  /* (item, split, rows of a tile): largest score (base 2), sum */
    unsigned *counters;
    int splits, row_tiles;
};

static constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;

/* 16 bytes past the L1, or zeros. */
__device__ __forceinline__ uint4 read16(const void *p, bool in)
{
    uint4 v;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
                 "@p ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4]; }"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(p), "r"((int)in));
    return v;
}
/* The 8 x 8 matrix of 16-bit elements that a warp holds, transposed. */
__device__ __forceinline__ uint32_t turned(uint32_t x)
{
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(x) : "r"(x));
    return x;
}

/* What a lane carries along the keys. NT: groups of 8 rows; lanes hold rows 2q, 2q + 1 of each. */
template <int DIM, int NT> struct Rows {
    uint4 q[NT][DIM / 32];
    float out[NT][DIM / 16][4];
    float max[NT][2], sum[NT][2]; /* sums: of this lane's keys */
    int low[NT][2], high[NT][2];
};

/* Two keys' dims of a lane. k: row of the tile's first key; left: keys from there that may be read. */
template <class T, int DIM>
__device__ __forceinline__ void read_keys(uint4 (&f)[2][DIM / 32], const T *k, int64_t stride, int dim, int left)
{
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const T *row = k + min(8 * j + g, left - 1) * stride + 8 * q;
#pragma unroll
        for (int c = 0; c < DIM / 32; c++) f[j][c] = read16(row + 32 * c, 32 * c + 8 * q < dim);
    }
}
template <class T, int DIM>
__device__ __forceinline__ void read_values(uint4 (&f)[DIM / 64][4], const T *v, int64_t stride, int dim, int left)
{
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const T *row = v + min(2 * q + (i & 1) + (i & 2) * 4, left - 1) * stride + 8 * g;
#pragma unroll
        for (int h = 0; h < DIM / 64; h++) f[h][i] = read16(row + 64 * h, 64 * h + 8 * g < dim);
    }
}

template <class T, int DIM, int NT>
__device__ __forceinline__ void score(float (&p)[NT][4], const Rows<DIM, NT> &s, const uint4 (&k)[2][DIM / 32])
{
#pragma unroll
    for (int n = 0; n < NT; n++) {
        p[n][0] = p[n][1] = p[n][2] = p[n][3] = 0.0f;
#pragma unroll
        for (int c = 0; c < DIM / 32; c++) {
            mma<T>(p[n], k[0][c].x, k[1][c].x, k[0][c].y, k[1][c].y, s.q[n][c].x, s.q[n][c].y);
            mma<T>(p[n], k[0][c].z, k[1][c].z, k[0][c].w, k[1][c].w, s.q[n][c].z, s.q[n][c].w);
        }
    }
}

/* Scores of 16 keys from `key` into weights; adds up the values. */
template <class T, int DIM, int NT>
__device__ __forceinline__ void weigh(Rows<DIM, NT> &s, float (&p)[NT][4], const uint4 (&v)[DIM / 64][4], int key, bool masked, float scale)
{
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float ratio[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float &x0 = p[n][e], &x1 = p[n][2 + e]; /* keys g and g + 8 of row 2q + e */
            x0 *= scale, x1 *= scale;
            if (masked) {
                const int k0 = key + g, k1 = k0 + 8;
                if (k0 < s.low[n][e] || k0 >= s.high[n][e]) x0 = minus_inf();
                if (k1 < s.low[n][e] || k1 >= s.high[n][e]) x1 = minus_inf();
            }
            float top = fmaxf(s.max[n][e], fmaxf(x0, x1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
            const float base = top == minus_inf() ? 0.0f : top;
            ratio[e] = exp2f(s.max[n][e] - base);
            s.max[n][e] = top;
            x0 = exp2f(x0 - base), x1 = exp2f(x1 - base);
            s.sum[n][e] = s.sum[n][e] * ratio[e] + x0 + x1;
        }
        const uint32_t b0 = turned(pair<T>(p[n][0], p[n][1])), b1 = turned(pair<T>(p[n][2], p[n][3]));
#pragma unroll
        for (int h = 0; h < DIM / 64; h++)
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const uint32_t v0 = (&v[h][0].x)[t], v1 = (&v[h][1].x)[t], v2 = (&v[h][2].x)[t], v3 = (&v[h][3].x)[t];
                float(&o)[4] = s.out[n][4 * h + t];
                o[0] *= ratio[0], o[1] *= ratio[1], o[2] *= ratio[0], o[3] *= ratio[1];
                mma<T>(o, __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410), __byte_perm(v2, v3, 0x7632), b0, b1);
            }
    }
}

/* Sums of the block's warps, in shared memory. */
template <int DIM, int NT> struct Joined {
    float out[DEC_WARPS][8 * NT][DIM + PAD];
    float2 stats[DEC_WARPS][8 * NT];
};

template <int DIM, int NT> __device__ __forceinline__ void put_warp(Joined<DIM, NT> &to, Rows<DIM, NT> &s, int rows)
{
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * n + 2 * q + e;
            float sum = s.sum[n][e];
            sum += __shfl_xor_sync(~0u, sum, 4);
            sum += __shfl_xor_sync(~0u, sum, 8);
            sum += __shfl_xor_sync(~0u, sum, 16);
            if (g == 0) to.stats[warp][row] = make_float2(s.max[n][e], sum);
            if (row >= rows) continue;
#pragma unroll
            for (int i = 0; i < DIM / 16; i++)
                *(float2 *)&to.out[warp][row][64 * (i / 4) + 8 * g + 2 * (i % 4)] = make_float2(s.out[n][i][e], s.out[n][i][2 + e]);
        }
}
/* A row's largest score and sum over the warps, and what each warp's values weigh. */
template <int DIM, int NT> __device__ __forceinline__ float2 row_stats(const Joined<DIM, NT> &j, int row, float (&weight)[DEC_WARPS])
{
    float max = minus_inf(), sum = 0.0f;
#pragma unroll
    for (int w = 0; w < DEC_WARPS; w++) max = fmaxf(max, j.stats[w][row].x);
    const float base = max == minus_inf() ? 0.0f : max;
#pragma unroll
    for (int w = 0; w < DEC_WARPS; w++) {
        weight[w] = exp2f(j.stats[w][row].x - base);
        sum += weight[w] * j.stats[w][row].y;
    }
    return make_float2(max, sum);
}
template <int DIM, int NT> __device__ __forceinline__ float2 row_values(const Joined<DIM, NT> &j, int row, int d, const float (&weight)[DEC_WARPS])
{
    float2 y = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < DEC_WARPS; w++) {
        const float2 v = *(const float2 *)&j.out[w][row][d];
        y.x += weight[w] * v.x, y.y += weight[w] * v.y;
    }
    return y;
}

struct Place { /* of the rows of this block */
    int first_token, first_head, heads, row0, rows;
};

template <class T> __device__ __forceinline__ void put(const weft_attention_args &a, const Place &p, int row, int d, float x, float y)
{
    const int64_t t = p.first_token + (p.row0 + row) / p.heads, h = p.first_head + (p.row0 + row) % p.heads;
    *(uint32_t *)((T *)a.out + t * a.out_stride + h * a.head_dim_v + d) = pair<T>(x, y);
}
__device__ __forceinline__ void put_lse(const weft_attention_args &a, const Place &p, int row, float max, float sum)
{
    const int64_t t = p.first_token + (p.row0 + row) / p.heads, h = p.first_head + (p.row0 + row) % p.heads;
    if (a.lse != nullptr) a.lse[t * a.num_heads + h] = sum == 0.0f ? minus_inf() : (max + log2f(sum)) * ln_2;
}

/* The last block of an item: all its splits together. weights: shared, (splits, R); sums: (R). */
template <class T, int R>
__device__ __forceinline__ void merge_splits(const weft_attention_args &a, const Split &split, const Place &p, int64_t item, int splits,
                                             float *weights, float *sums)
{
    const float2 *stats = split.stats + item * split.splits * R;
    const float *partial = split.partial + item * split.splits * R * a.head_dim_v;
    const int lane = threadIdx.x % 32, fours = a.head_dim_v / 4;
    for (int row = threadIdx.x / 32; row < p.rows; row += DEC_WARPS) {
        float max = minus_inf(), sum = 0.0f;
        for (int s = lane; s < splits; s += 32) max = fmaxf(max, __ldcg(&stats[s * R + row]).x);
        for (int d = 16; d > 0; d /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, d));
        const float base = max == minus_inf() ? 0.0f : max;
        for (int s = lane; s < splits; s += 32) {
            const float2 own = __ldcg(&stats[s * R + row]);
            const float weight = exp2f(own.x - base);
            weights[s * R + row] = weight;
            sum += weight * own.y;
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            sums[row] = sum;
            put_lse(a, p, row, max, sum);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.rows * fours; i += DEC_THREADS) {
        const int row = i / fours, d = i % fours * 4;
        float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int s = 0; s < splits; s++) {
            const float4 v = __ldcg((const float4 *)&partial[(s * R + row) * a.head_dim_v + d]);
            const float w = weights[s * R + row];
            y.x += w * v.x, y.y += w * v.y, y.z += w * v.z, y.w += w * v.w;
        }
        const float by = sums[row] == 0.0f ? 0.0f : 1.0f / sums[row];
        put<T>(a, p, row, d, y.x * by, y.y * by);
        put<T>(a, p, row, d + 2, y.z * by, y.w * by);
    }
}

/* What a block of a cluster shows to the others: the sums of its split. */
template <int R, int DIM> struct Shown {
    float2 values[R][DIM / 2], stats[R];
};

__device__ __forceinline__ void cluster_sync()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/* What block `rank` of the cluster has where this one has *p. */
__device__ __forceinline__ float2 shown_by(const float2 *p, int rank)
{
    float2 v = *p;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((uint32_t)__cvta_generic_to_shared(p)), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
#endif
    return v;
}

/* Each block of the cluster, one for each split, merges its share of the rows' elements. */
template <class T, int R, int DIM>
__device__ __forceinline__ void merge_cluster(const weft_attention_args &a, const Place &p, const Shown<R, DIM> &shown, int part, int splits)
{
    cluster_sync();
    const int twos = a.head_dim_v / 2;
    for (int i = part + splits * threadIdx.x; i < p.rows * twos; i += splits * DEC_THREADS) {
        const int row = i / twos, two = i % twos;
        float2 stats[CLUSTER_SPLITS], values[CLUSTER_SPLITS];
        float max = minus_inf(), sum = 0.0f;
#pragma unroll
        for (int s = 0; s < CLUSTER_SPLITS; s++)
            if (s < splits) stats[s] = shown_by(&shown.stats[row], s), values[s] = shown_by(&shown.values[row][two], s);
            else stats[s] = make_float2(minus_inf(), 0.0f), values[s] = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int s = 0; s < CLUSTER_SPLITS; s++) max = fmaxf(max, stats[s].x);
        const float base = max == minus_inf() ? 0.0f : max;
        float2 y = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int s = 0; s < CLUSTER_SPLITS; s++) {
            const float weight = exp2f(stats[s].x - base);
            sum += weight * stats[s].y, y.x += weight * values[s].x, y.y += weight * values[s].y;
        }
        const float by = sum == 0.0f ? 0.0f : 1.0f / sum;
        put<T>(a, p, row, 2 * two, y.x * by, y.y * by);
        if (two == 0) put_lse(a, p, row, max, sum);
    }
    cluster_sync(); /* no block ends while others read it */
}

/* The keys of a split in pages (or in this step's tensors), tile by tile of one warp. */
struct Walk {
    const int32_t *table;
    int entry, offset, entry_step, offset_step, page;
    __device__ __forceinline__ void begin(const weft_attention_args &a, int r, int key, int step)
    {
        page = a.keys == WEFT_KEYS_NEW ? INT32_MAX : (int)a.pages.page_size;
        table = a.pages.block_table + r * a.pages.block_table_stride;
        entry = key / page, offset = key % page;
        entry_step = step / page, offset_step = step % page;
    }
    __device__ __forceinline__ void advance()
    {
        entry += entry_step, offset += offset_step;
        if (offset >= page) offset -= page, entry++;
    }
    /* Row of the tile's first key, counted in rows of k and v; -1 where there is no block. */
    __device__ __forceinline__ int64_t row(const weft_attention_args &a, int g, int64_t first_token) const
    {
        if (a.keys == WEFT_KEYS_NEW) return first_token + offset;
        const int64_t block = table[entry];
        return block < 0 ? -1 : (block * a.num_kv_heads + g) * page + offset;
    }
};

/* CLUSTER: the blocks of an item, split.splits neighbours, are a cluster. */
template <class T, int DIM, int NT, bool CLUSTER>
__global__ void __launch_bounds__(DEC_THREADS, NT == 1 ? 3 : 2) decode(const weft_attention_args a, const Split split)
{
    constexpr int R = 8 * NT, STEP = KEYS * DEC_WARPS;
    __shared__ Joined<DIM, NT> joined;
    __shared__ float weights[MAX_SPLITS * R], sums[R];
    __shared__ bool last_block;
    __shared__ Shown<R, DIM> shown; /* with CLUSTER, instead of the three before */
    const int tile = CLUSTER ? blockIdx.x / split.splits : blockIdx.x % split.row_tiles;
    const int part = CLUSTER ? blockIdx.x % split.splits : blockIdx.x / split.row_tiles, kv_head = blockIdx.y, r = blockIdx.z;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    if (r == a.requests) { /* one block more, for the tokens behind the last request */
        dependency_wait();
        if (blockIdx.x == 0 && kv_head == 0) clear_padding(a, 0, 1);
        return;
    }
    Place p;
    p.heads = heads_of(a, kv_head, p.first_head);
    p.first_token = a.query_start_loc[r];
    p.row0 = tile * R;
    p.rows = min(R, p.heads * (a.query_start_loc[r + 1] - p.first_token) - p.row0);
    if (p.rows <= 0) {
        dependency_wait();
        return;
    }
    const KeyRange keys = keys_of(a, r);

    /* Keys of all rows of the block, then of this split: whole tiles of every warp. */
    int low, high, low_last, high_first;
    visible(a, keys, p.row0 / p.heads, low, high_first);
    visible(a, keys, (p.row0 + p.rows - 1) / p.heads, low_last, high);
    low = low / KEYS * KEYS;
    const int total = max(0, high - low), tiles = (total + STEP - 1) / STEP;
    const int per = max(1, (tiles + split.splits - 1) / split.splits) * STEP, splits = max(1, (total + per - 1) / per);
    if (part >= splits) {
        dependency_wait();
        if (CLUSTER && splits > 1) cluster_sync(), cluster_sync(); /* as often as the others */
        return;
    }
    const int begin = low + part * per, end = min(high, begin + per);

    const bool fresh = a.keys == WEFT_KEYS_NEW;
    const int64_t k_stride = fresh ? a.k_stride : a.head_dim, v_stride = fresh ? a.v_stride : a.head_dim_v;
    const T *k = (const T *)a.k + (fresh ? kv_head * a.head_dim : 0), *v = (const T *)a.v + (fresh ? kv_head * a.head_dim_v : 0);
    int key = begin + warp * KEYS;
    Walk walk;
    walk.begin(a, r, key, STEP);
    int64_t row = key < end ? walk.row(a, kv_head, p.first_token) : -1;
    uint4 kf[2][DIM / 32];
    dependency_wait(); /* lengths and tables are the host's; keys and queries are not */
    if (row >= 0) read_keys<T, DIM>(kf, k + row * k_stride, k_stride, a.head_dim, end - key);

    Rows<DIM, NT> s;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int mine = 8 * n + g, real = p.row0 + min(mine, p.rows - 1);
        const T *from = (const T *)a.q + (int64_t)(p.first_token + real / p.heads) * a.q_stride + (int64_t)(p.first_head + real % p.heads) * a.head_dim;
#pragma unroll
        for (int c = 0; c < DIM / 32; c++) s.q[n][c] = read16(from + 32 * c + 8 * q, mine < p.rows && 32 * c + 8 * q < a.head_dim);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            visible(a, keys, (p.row0 + min(8 * n + 2 * q + e, p.rows - 1)) / p.heads, s.low[n][e], s.high[n][e]);
            s.max[n][e] = minus_inf();
            s.sum[n][e] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) s.out[n][i][0] = s.out[n][i][1] = s.out[n][i][2] = s.out[n][i][3] = 0.0f;
    }
    const float scale = a.scale * log2_e;
    while (key < end) {
        const int64_t here = row;
        const int next = key + STEP;
        walk.advance();
        row = next < end ? walk.row(a, kv_head, p.first_token) : -1;
        uint4 vf[DIM / 64][4];
        float scores[NT][4];
        if (here >= 0) {
            read_values<T, DIM>(vf, v + here * v_stride, v_stride, a.head_dim_v, end - key);
            score<T, DIM, NT>(scores, s, kf);
        }
        if (row >= 0) read_keys<T, DIM>(kf, k + row * k_stride, k_stride, a.head_dim, end - next);
        if (here >= 0) weigh<T, DIM, NT>(s, scores, vf, key, key < low_last || key + KEYS > high_first, scale);
        key = next;
    }
    put_warp<DIM, NT>(joined, s, p.rows);
    __syncthreads();
    const int64_t item = ((int64_t)r * gridDim.y + kv_head) * split.row_tiles + tile, at = (item * split.splits + part) * R;
    const int twos = a.head_dim_v / 2;
    for (int i = threadIdx.x; i < p.rows * twos; i += DEC_THREADS) {
        const int mine = i / twos, d = i % twos * 2;
        float weight[DEC_WARPS];
        const float2 stats = row_stats<DIM, NT>(joined, mine, weight), y = row_values<DIM, NT>(joined, mine, d, weight);
        if (splits > 1) {
            if constexpr (CLUSTER) shown.values[mine][d / 2] = y;
            else *(float2 *)&split.partial[(at + mine) * a.head_dim_v + d] = y;
            if (d == 0) *(CLUSTER ? &shown.stats[mine] : &split.stats[at + mine]) = stats;
        } else {
            const float by = stats.y == 0.0f ? 0.0f : 1.0f / stats.y;
            put<T>(a, p, mine, d, y.x * by, y.y * by);
            if (d == 0) put_lse(a, p, mine, stats.x, stats.y);
        }
    }
    if (splits == 1) return;
    if constexpr (CLUSTER) merge_cluster<T, R, DIM>(a, p, shown, part, splits);
    else {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) last_block = atomicAdd(&split.counters[item], 1) == (unsigned)splits - 1;
        __syncthreads();
        if (!last_block) return;
        __threadfence();
        merge_splits<T, R>(a, split, p, item, splits, weights, sums);
        if (threadIdx.x == 0) split.counters[item] = 0;
    }
}

bool attention_mma_fits(const weft_attention_args *a)
{
    if (!(a->scale > 0.0f) || a->dtype == WEFT_F32 || a->dtype != a->kv_dtype || a->head_dim > 128 || a->head_dim_v > 128) return false;
    if ((a->head_dim | a->head_dim_v) % 8 != 0 || a->q_stride % 8 != 0 || a->out_stride % 2 != 0 || !aligned(a->out, 4) || !aligned(a->q, 16) || !aligned(a->k, 16) || !aligned(a->v, 16))
        return false;
    if (a->keys == WEFT_KEYS_NEW) return (a->k_stride | a->v_stride) % 8 == 0;
    return a->pages.page_size % KEYS == 0 && a->pages.page_size < INT32_MAX;
}

/* How many splits fill the machine: whole waves of blocks, as few as do. */
static int splits_for(const weft_attention_args *a, int64_t items, int64_t seq_len, int rows, int blocks_per_sm)
{
    if (a->cuda == NULL || items > COUNTERS) return 1;
    const size_t room = a->cuda->workspace_bytes / ((size_t)items * (size_t)rows * ((size_t)a->head_dim_v * 4 + sizeof(float2)));
    const int64_t slots = (int64_t)a->cuda->sms * blocks_per_sm;
    const int64_t limit = least(least(MAX_SPLITS, (int64_t)room), div_up(seq_len, KEYS * DEC_WARPS));
    int64_t best = 1;
    double best_share = 0.0;
    for (int64_t s = 1; s <= limit; s++) {
        const int64_t blocks = items * s, waves = div_up(blocks, slots);
        const double share = (double)blocks / (double)(waves * slots);
        if (share > best_share + 0.02) best = s, best_share = share;
        if (best_share > 0.95) break;
    }
    return (int)best;
}

template <class T, int DIM, int NT> static void launch_decode(const weft_attention_args *a, int64_t query_len, int64_t seq_len, void *stream)
{
    Split split = {};
    split.row_tiles = (int)div_up(query_len * least(a->group_size, a->num_heads), 8 * NT);
    const int64_t items = a->requests * a->num_kv_heads * split.row_tiles;
    const int64_t steps = div_up(seq_len, KEYS * DEC_WARPS);
    /* Few keys of few requests: a cluster for each item, all of them at once. Large clusters do not fill a
     * machine evenly, so not for more. */
    if (a->cuda != NULL && steps > 1 && steps <= 2 * CLUSTER_SPLITS && items * CLUSTER_SPLITS <= a->cuda->sms) {
        split.splits = (int)least(steps, CLUSTER_SPLITS);
        const dim3 grid((unsigned)(split.row_tiles * split.splits), (unsigned)a->num_kv_heads, (unsigned)a->requests + 1);
        if (launch_cluster(decode<T, DIM, NT, true>, grid, DEC_THREADS, split.splits, stream, *a, split)) return;
    }
    split.splits = splits_for(a, items, seq_len, 8 * NT, NT == 1 ? 3 : 2);
    if (a->cuda != NULL) {
        split.counters = a->cuda->counters;
        split.stats = (float2 *)a->cuda->workspace;
        split.partial = (float *)(split.stats + items * split.splits * 8 * NT);
    }
    const dim3 grid((unsigned)(split.row_tiles * split.splits), (unsigned)a->num_kv_heads, (unsigned)a->requests + 1);
    launch(decode<T, DIM, NT, false>, grid, DEC_THREADS, 0, stream, *a, split);
}

void attention_decode(const weft_attention_args *a, int64_t query_len, void *stream)
{
    int64_t seq_len = a->max_seq_len;
    if (a->keys == WEFT_KEYS_NEW) seq_len = query_len;
    else if (seq_len == 0) seq_len = a->pages.block_table_stride * a->pages.page_size;
    else seq_len = div_up(seq_len, a->pages.context_size) + a->pages.interleave;
    if (a->window > 0) seq_len = least(seq_len, a->window + query_len);
    const bool small = a->head_dim <= 64 && a->head_dim_v <= 64, eight = query_len * least(a->group_size, a->num_heads) <= 8;
    auto run = [&](auto tag) {
        using T = decltype(tag);
        if (small && eight) launch_decode<T, 64, 1>(a, query_len, seq_len, stream);
        else if (small) launch_decode<T, 64, 2>(a, query_len, seq_len, stream);
        else if (eight) launch_decode<T, 128, 1>(a, query_len, seq_len, stream);
        else launch_decode<T, 128, 2>(a, query_len, seq_len, stream);
    };
    if (a->dtype == WEFT_BF16) run(bf16());
    else run(__half());
}

} // namespace weft
