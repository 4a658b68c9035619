/* kernels/cuda/attention_decode.cuh - decode attention (attention_decode.cu says how it works): one split of it by
 * a block, of 4 or 6 warps there and of 8 in a fused step (step.cuh). */
#pragma once

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/mma.cuh"

namespace weft {

enum { DEC_WARPS = 4, DEC_THREADS = DEC_WARPS * 32, WIDE_WARPS = 6 /* of items in one piece */, KEYS = 16, MAX_SPLITS = 128, PAD = 2 };

struct Split {
    float *partial; /* (item, split, rows of a tile, dim_v): sums of values, not yet divided */
    float2 *stats;  /* (item, split, rows of a tile): largest score (base 2), sum */
    unsigned *counters;
    int splits, row_tiles;
};

/* Into how many splits items are cut, at most `limit`, to fill places for blocks: whole turns of them, as few as do. */
static inline int splits_that_fill(int64_t items, int64_t places, int64_t limit)
{
    int64_t best = 1;
    double best_share = 0.0;
    for (int64_t splits = 1; splits <= limit; splits++) {
        const int64_t blocks = items * splits, turns = div_up(blocks, places);
        const double share = (double)blocks / (double)(turns * places);
        if (share > best_share + 0.02) best = splits, best_share = share;
        if (best_share > 0.95) break;
    }
    return (int)best;
}

static constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;

/* 16 bytes past the L1, or zeros. */
__device__ __forceinline__ uint4 read16(const void *p, bool in)
{
    uint4 v;
    const uint64_t policy = streamed();
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
                 "@p ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4], %6; }"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(p), "r"((int)in), "l"(policy));
    return v;
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

/* Scores of 16 keys into weights; adds up the values. k0, k1: this lane's keys, for `masked`. FIRST: nothing has been added up before. */
template <class T, int DIM, int NT, bool FIRST = false>
__device__ __forceinline__ void weigh(Rows<DIM, NT> &s, float (&p)[NT][4], const uint4 (&v)[DIM / 64][4], int k0, int k1, bool masked, float scale)
{
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float ratio[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float &x0 = p[n][e], &x1 = p[n][2 + e]; /* keys k0 and k1 of row 2q + e */
            x0 *= scale, x1 *= scale;
            if (masked) {
                if (k0 < s.low[n][e] || k0 >= s.high[n][e]) x0 = minus_inf();
                if (k1 < s.low[n][e] || k1 >= s.high[n][e]) x1 = minus_inf();
            }
            float top = FIRST ? fmaxf(x0, x1) : fmaxf(s.max[n][e], fmaxf(x0, x1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
            const float base = top == minus_inf() ? 0.0f : top;
            ratio[e] = FIRST ? 0.0f : exp2f(s.max[n][e] - base);
            s.max[n][e] = top;
            x0 = exp2f(x0 - base), x1 = exp2f(x1 - base);
            s.sum[n][e] = FIRST ? x0 + x1 : s.sum[n][e] * ratio[e] + x0 + x1;
        }
        const uint32_t b0 = turned(pair<T>(p[n][0], p[n][1])), b1 = turned(pair<T>(p[n][2], p[n][3]));
#pragma unroll
        for (int h = 0; h < DIM / 64; h++)
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const uint32_t v0 = (&v[h][0].x)[t], v1 = (&v[h][1].x)[t], v2 = (&v[h][2].x)[t], v3 = (&v[h][3].x)[t];
                float(&o)[4] = s.out[n][4 * h + t];
                if (FIRST) o[0] = o[1] = o[2] = o[3] = 0.0f;
                else o[0] *= ratio[0], o[1] *= ratio[1], o[2] *= ratio[0], o[3] *= ratio[1];
                mma<T>(o, __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410), __byte_perm(v2, v3, 0x7632), b0, b1);
            }
    }
}

/* Sums of WARPS warps that have different keys of the same rows, in shared memory. */
template <int DIM, int NT, int WARPS> struct Joined {
    float out[WARPS][8 * NT][DIM + PAD];
    float2 stats[WARPS][8 * NT];
};

template <int DIM, int NT, int WARPS> __device__ __forceinline__ void put_warp(Joined<DIM, NT, WARPS> &to, Rows<DIM, NT> &s, int rows, int warp)
{
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
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
template <int DIM, int NT, int WARPS>
__device__ __forceinline__ float2 row_stats(const Joined<DIM, NT, WARPS> &j, int row, float (&weight)[WARPS])
{
    float max = minus_inf(), sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) max = fmaxf(max, j.stats[w][row].x);
    const float base = max == minus_inf() ? 0.0f : max;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        weight[w] = exp2f(j.stats[w][row].x - base);
        sum += weight[w] * j.stats[w][row].y;
    }
    return make_float2(max, sum);
}
template <int DIM, int NT, int WARPS>
__device__ __forceinline__ float2 row_values(const Joined<DIM, NT, WARPS> &j, int row, int d, const float (&weight)[WARPS])
{
    float2 y = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float2 v = *(const float2 *)&j.out[w][row][d];
        y.x += weight[w] * v.x, y.y += weight[w] * v.y;
    }
    return y;
}

struct Place { /* of the rows of this block */
    int first_token, first_head, heads, row0, rows;
};

/* The bounds of a block's rows, which have seen no key yet. */
template <int DIM, int NT> __device__ __forceinline__ void bound_rows(const weft_attention_args &a, const Place &p, const KeyRange &keys, Rows<DIM, NT> &s)
{
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            visible(a, keys, (p.row0 + min(8 * n + 2 * q + e, p.rows - 1)) / p.heads, s.low[n][e], s.high[n][e]);
            s.max[n][e] = minus_inf();
            s.sum[n][e] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) s.out[n][i][0] = s.out[n][i][1] = s.out[n][i][2] = s.out[n][i][3] = 0.0f;
    }
}
/* Their queries. */
template <class T, int DIM, int NT> __device__ __forceinline__ void read_queries(const weft_attention_args &a, const Place &p, Rows<DIM, NT> &s)
{
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int mine = 8 * n + g, real = p.row0 + min(mine, p.rows - 1);
        const T *from = (const T *)a.q + (int64_t)(p.first_token + real / p.heads) * a.q_stride + (int64_t)(p.first_head + real % p.heads) * a.head_dim;
#pragma unroll
        for (int c = 0; c < DIM / 32; c++)
            s.q[n][c] = mine < p.rows && 32 * c + 8 * q < a.head_dim ? __ldcg((const uint4 *)(from + 32 * c + 8 * q)) : make_uint4(0, 0, 0, 0);
    }
}

/* Who does not ask whether what it writes has arrived. */
struct Unasked {
    template <class To> __device__ __forceinline__ uint32_t back(const To *) const { return 0; }
};
/* These give what join.back() says of what they wrote. */
template <class T, class Join> __device__ __forceinline__ uint32_t put(const weft_attention_args &a, const Place &p, int row, int d, float x, float y, const Join &join)
{
    const int64_t t = p.first_token + (p.row0 + row) / p.heads, h = p.first_head + (p.row0 + row) % p.heads;
    T *to = (T *)a.out + t * a.out_stride + h * a.head_dim_v + d;
    *(uint32_t *)to = pair<T>(x, y);
    return join.back(to);
}
template <class Join> __device__ __forceinline__ uint32_t put_lse(const weft_attention_args &a, const Place &p, int row, float max, float sum, const Join &join)
{
    const int64_t t = p.first_token + (p.row0 + row) / p.heads, h = p.first_head + (p.row0 + row) % p.heads;
    if (a.lse == nullptr) return 0;
    float *to = a.lse + t * a.num_heads + h;
    *to = sum == 0.0f ? minus_inf() : (max + log2f(sum)) * ln_2;
    return join.back(to);
}

/* Dims d and d + 1 of a row from its sums in N parts; parts that are not there have (-inf, 0). With d = 0 the row's lse too. */
template <class T, int N, class Join>
__device__ __forceinline__ uint32_t put_joined(const weft_attention_args &a, const Place &p, int row, int d, const float2 (&stats)[N], const float2 (&values)[N], const Join &join)
{
    float max = minus_inf(), sum = 0.0f;
#pragma unroll
    for (int s = 0; s < N; s++) max = fmaxf(max, stats[s].x);
    const float base = max == minus_inf() ? 0.0f : max;
    float2 y = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int s = 0; s < N; s++) {
        const float weight = exp2f(stats[s].x - base);
        sum += weight * stats[s].y, y.x += weight * values[s].x, y.y += weight * values[s].y;
    }
    const float by = sum == 0.0f ? 0.0f : 1.0f / sum;
    uint32_t of_lse = 0;
    const uint32_t of_out = put<T>(a, p, row, d, y.x * by, y.y * by, join);
    if (d == 0) of_lse = put_lse(a, p, row, max, sum, join);
    return of_out | of_lse;
}

/* All WARPS warps that attend: the block, or in a fused step its first 8, as others do something else there. */
template <int WARPS> __device__ __forceinline__ void sync_warps()
{
    if (WARPS == DEC_WARPS) __syncthreads();
    else asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
}

/* The last block of an item: all its splits together. weights: shared, (splits, R); sums: (R). */
template <class T, int R, int WARPS, class Join>
__device__ __forceinline__ void merge_splits(const weft_attention_args &a, const Split &split, const Place &p, int64_t item, int splits,
                                             float *weights, float *sums, const Join &join)
{
    const float2 *stats = split.stats + item * split.splits * R;
    const float *partial = split.partial + item * split.splits * R * a.head_dim_v;
    const int lane = threadIdx.x % 32, fours = a.head_dim_v / 4;
    uint32_t back = 0;
    for (int row = threadIdx.x / 32; row < p.rows; row += WARPS) {
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
            back = put_lse(a, p, row, max, sum, join);
        }
    }
    sync_warps<WARPS>();
    for (int i = threadIdx.x; i < p.rows * fours; i += WARPS * 32) {
        const int row = i / fours, d = i % fours * 4;
        float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int s = 0; s < splits; s++) {
            const float4 v = __ldcg((const float4 *)&partial[(s * R + row) * a.head_dim_v + d]);
            const float w = weights[s * R + row];
            y.x += w * v.x, y.y += w * v.y, y.z += w * v.z, y.w += w * v.w;
        }
        const float by = sums[row] == 0.0f ? 0.0f : 1.0f / sums[row];
        const uint32_t first = put<T>(a, p, row, d, y.x * by, y.y * by, join), second = put<T>(a, p, row, d + 2, y.z * by, y.w * by, join);
        back |= first | second;
    }
    join.arrived(back);
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

/* Puts the splits of an item together in its block that ends last. */
template <class T, int NT, int WARPS> struct ByLast {
    struct Shared {
        float weights[MAX_SPLITS * 8 * NT], sums[8 * NT];
        bool last;
    };
    const weft_attention_args &a;
    const Split &split;
    Shared &shared;
    __device__ __forceinline__ void leave(int) const {}
    __device__ __forceinline__ void keep(int64_t item, int part, int row, int d, float2 values, float2 stats) const
    {
        const int64_t at = (item * split.splits + part) * 8 * NT + row;
        *(float2 *)&split.partial[at * a.head_dim_v + d] = values;
        if (d == 0) split.stats[at] = stats;
    }
    __device__ __forceinline__ void merge(const Place &p, int64_t item, int, int splits) const
    {
        sync_warps<WARPS>();
        if (threadIdx.x == 0) { /* orders the writes of the block, which the barrier has gathered, before the count */
            unsigned before;
            asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(&split.counters[item]) : "memory");
            shared.last = before == (unsigned)splits - 1;
        }
        sync_warps<WARPS>();
        if (!shared.last) return;
        merge_splits<T, 8 * NT, WARPS>(a, split, p, item, splits, shared.weights, shared.sums, *this);
        if (threadIdx.x == 0) split.counters[item] = 0;
    }
    template <class To> __device__ __forceinline__ uint32_t back(const To *) const { return 0; }
    __device__ __forceinline__ void arrived(uint32_t) const {}
};

/* Part `part` of the splits of rows [tile * 8 NT, ...) of request r and KV head kv_head, by a block of
 * WARPS warps, all of which come here. enter() is called once, before anything is read that this step wrote: before
 * it come lengths and tables and, with `early`, keys and values of earlier steps. JOIN, how splits come together:
 *     void leave(int splits) const                                of a part that has no keys
 *     void keep(item, part, row, d, float2 values, float2 stats)  dims d and d + 1 of a row's sums, if there are more splits
 *     void merge(p, item, part, splits)                           by the block, behind its last keep()
 *     uint32_t back(const T *out) const, back(const float *lse) const  behind each write of a result; for
 *     void arrived(uint32_t back) const                           when the thread has written all of its results */
template <class T, int DIM, int NT, int WARPS, class Enter, class Join>
__device__ __forceinline__ void attend_split(const weft_attention_args &a, const Split &split, int tile, int part, int kv_head, int r,
                                             Joined<DIM, NT, WARPS> &shared, bool early, Enter enter, const Join &join)
{
    constexpr int R = 8 * NT, STEP = KEYS * WARPS;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    Place p;
    p.heads = heads_of(a, kv_head, p.first_head);
    p.first_token = a.query_start_loc[r];
    p.row0 = tile * R;
    p.rows = min(R, p.heads * (a.query_start_loc[r + 1] - p.first_token) - p.row0);
    if (p.rows <= 0) {
        enter();
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
        enter();
        join.leave(splits);
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
    uint4 kf[2][DIM / 32], vf[DIM / 64][4];
    auto read = [&] {
        if (row < 0) return;
        read_keys<T, DIM>(kf, k + row * k_stride, k_stride, a.head_dim, end - key);
        read_values<T, DIM>(vf, v + row * v_stride, v_stride, a.head_dim_v, end - key);
    };
    Rows<DIM, NT> s;
    bound_rows(a, p, keys, s);
    const bool old = early && !fresh && min(key + KEYS, end) <= page_local_len(a.pages, keys.first_position);
    if (old) read();
    enter();
    read_queries<T>(a, p, s);
    if (!old) read();
    const float scale = a.scale * log2_e;
    while (key < end) {
        const int64_t here = row;
        const int next = key + STEP;
        walk.advance();
        row = next < end ? walk.row(a, kv_head, p.first_token) : -1;
        float scores[NT][4];
        if (here >= 0) score<T, DIM, NT>(scores, s, kf);
        if (row >= 0) read_keys<T, DIM>(kf, k + row * k_stride, k_stride, a.head_dim, end - next);
        if (here >= 0) weigh<T, DIM, NT>(s, scores, vf, key + g, key + g + 8, key < low_last || key + KEYS > high_first, scale);
        if (row >= 0) read_values<T, DIM>(vf, v + row * v_stride, v_stride, a.head_dim_v, end - next);
        key = next;
    }
    put_warp(shared, s, p.rows, warp);
    sync_warps<WARPS>();
    const int64_t item = ((int64_t)r * a.num_kv_heads + kv_head) * split.row_tiles + tile;
    const int twos = a.head_dim_v / 2;
    for (int i = threadIdx.x; i < p.rows * twos; i += WARPS * 32) {
        const int mine = i / twos, d = i % twos * 2;
        float weight[WARPS];
        const float2 stats = row_stats(shared, mine, weight), y = row_values(shared, mine, d, weight);
        if (splits > 1) {
            join.keep(item, part, mine, d, y, stats);
        } else {
            const float by = stats.y == 0.0f ? 0.0f : 1.0f / stats.y;
            uint32_t back = put<T>(a, p, mine, d, y.x * by, y.y * by, join);
            if (d == 0) back |= put_lse(a, p, mine, stats.x, stats.y, join);
            join.arrived(back);
        }
    }
    if (splits > 1) join.merge(p, item, part, splits);
}

} // namespace weft
