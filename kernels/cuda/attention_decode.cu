/* kernels/cuda/attention_decode.cu - attention of few queries over many keys.
 *
 * The rows of a tile are the (query, head) pairs of one request that share a KV head, 16 at most;
 * the keys are cut over blocks (splits) and over the warps of a block, 16 keys at a time. K and V
 * are read once, 16 bytes a lane, straight into the fragments of the tensor cores: for K a lane
 * holds 8 neighbouring dims of one key, for V of four keys, so the inner order is permuted and
 * columns of the output belong to dims 8 g + i. The block of a row that ends last merges the splits. */
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/mma.cuh"

namespace weft {

enum { ROWS = 16, DEC_WARPS = 4, DEC_THREADS = DEC_WARPS * 32, KEYS = 16, MAX_SPLITS = 128 };

struct Split {
    float *partial; /* (item, split, ROWS, dim_v): sums of values, not yet divided */
    float2 *stats;  /* (item, split, ROWS): largest score (base 2), sum */
    unsigned *counters;
    int splits, row_tiles;
};

static constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;

/* Where 16 keys from `key` (a multiple of 16) lie: rows at base + i * stride. */
__device__ __forceinline__ int64_t tile_row(const weft_attention_args &a, int r, int g, int key, int64_t block, int64_t stride, int dim)
{
    if (a.keys == WEFT_KEYS_NEW) return (int64_t)(a.query_start_loc[r] + key) * stride + (int64_t)g * dim;
    const int page = (int)a.pages.page_size;
    return ((block * a.num_kv_heads + g) * page + key % page) * dim;
}

template <class T, int DIM> struct Rows {
    uint32_t q[DIM / 32][8]; /* per 32 dims: A of two products */
    float out[DIM / 64][8][4];
    float max[2], sum[2];
    int low[2], high[2];
};

/* One tile of 16 keys. k, v: row of key `key`; last: the last key that may be read. */
template <class T, int DIM>
__device__ __forceinline__ void attend_tile(Rows<T, DIM> &s, const T *k, const T *v, int64_t k_stride, int64_t v_stride, int dim, int dim_v,
                                            int key, int last, bool masked, float scale)
{
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    uint4 kf[2][DIM / 32], vf[DIM / 64][4];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const T *row = k + min(8 * j + g, last - key) * k_stride;
#pragma unroll
        for (int c = 0; c < DIM / 32; c++)
            kf[j][c] = 32 * c + 8 * q < dim ? *(const uint4 *)(row + 32 * c + 8 * q) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const T *row = v + min(2 * q + (i & 1) + (i & 2) * 4, last - key) * v_stride;
#pragma unroll
        for (int h = 0; h < DIM / 64; h++) vf[h][i] = 64 * h + 8 * g < dim_v ? *(const uint4 *)(row + 64 * h + 8 * g) : make_uint4(0, 0, 0, 0);
    }
    float p[2][4] = {};
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int c = 0; c < DIM / 32; c++) {
            mma<T>(p[j], s.q[c][0], s.q[c][1], s.q[c][2], s.q[c][3], kf[j][c].x, kf[j][c].y);
            mma<T>(p[j], s.q[c][4], s.q[c][5], s.q[c][6], s.q[c][7], kf[j][c].z, kf[j][c].w);
        }
    float top[2] = {s.max[0], s.max[1]}, ratio[2];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = key + 8 * j + 2 * q + (i & 1), half = i / 2;
            p[j][i] *= scale;
            if (masked && (column < s.low[half] || column >= s.high[half])) p[j][i] = minus_inf();
            top[half] = fmaxf(top[half], p[j][i]);
        }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
        top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2));
        const float base = top[half] == minus_inf() ? 0.0f : top[half];
        ratio[half] = exp2f(s.max[half] - base);
        s.max[half] = top[half];
        s.sum[half] *= ratio[half];
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                p[j][i] = exp2f(p[j][i] - base);
                s.sum[half] += p[j][i];
            }
    }
    const uint32_t a0 = pair<T>(p[0][0], p[0][1]), a1 = pair<T>(p[0][2], p[0][3]);
    const uint32_t a2 = pair<T>(p[1][0], p[1][1]), a3 = pair<T>(p[1][2], p[1][3]);
#pragma unroll
    for (int h = 0; h < DIM / 64; h++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t v0 = (&vf[h][0].x)[i / 2], v1 = (&vf[h][1].x)[i / 2], v2 = (&vf[h][2].x)[i / 2], v3 = (&vf[h][3].x)[i / 2];
            const uint32_t pick = i % 2 == 0 ? 0x5410u : 0x7632u;
            float(&o)[4] = s.out[h][i];
            o[0] *= ratio[0], o[1] *= ratio[0], o[2] *= ratio[1], o[3] *= ratio[1];
            mma<T>(o, a0, a1, a2, a3, __byte_perm(v0, v1, pick), __byte_perm(v2, v3, pick));
        }
}

/* Adds up the warps of the block: out[ROWS][DIM] in shared memory, and max and sum of each row. */
template <class T, int DIM>
__device__ static void join_warps(Rows<T, DIM> &s, float (&out)[ROWS][DIM], float2 (&stats)[DEC_WARPS][ROWS], float (&row_max)[ROWS],
                                  float (&row_sum)[ROWS])
{
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        s.sum[half] += __shfl_xor_sync(~0u, s.sum[half], 1);
        s.sum[half] += __shfl_xor_sync(~0u, s.sum[half], 2);
        if (q == 0) stats[warp][g + 8 * half] = make_float2(s.max[half], s.sum[half]);
    }
    __syncthreads();
    float weight[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = minus_inf(), sum = 0.0f;
        for (int w = 0; w < DEC_WARPS; w++) max = fmaxf(max, stats[w][g + 8 * half].x);
        const float base = max == minus_inf() ? 0.0f : max;
        for (int w = 0; w < DEC_WARPS; w++) sum += exp2f(stats[w][g + 8 * half].x - base) * stats[w][g + 8 * half].y;
        weight[half] = exp2f(s.max[half] - base);
        if (warp == 0 && q == 0) row_max[g + 8 * half] = max, row_sum[g + 8 * half] = sum;
    }
    for (int w = 0; w < DEC_WARPS; w++) {
        if (warp == w)
#pragma unroll
            for (int h = 0; h < DIM / 64; h++)
#pragma unroll
                for (int i = 0; i < 8; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float &to = out[g + 8 * (e / 2)][64 * h + 8 * (2 * q + e % 2) + i];
                        const float value = s.out[h][i][e] * weight[e / 2];
                        to = w == 0 ? value : to + value;
                    }
        __syncthreads();
    }
}

struct Place { /* of the rows of this block */
    int first_token, first_head, heads, row0, rows;
};

template <class T> __device__ __forceinline__ void put(const weft_attention_args &a, const Place &p, int row, int i, float value)
{
    const int64_t t = p.first_token + (p.row0 + row) / p.heads, h = p.first_head + (p.row0 + row) % p.heads;
    ((T *)a.out)[t * a.out_stride + h * a.head_dim_v + i] = narrow<T>(value);
}
__device__ __forceinline__ void put_lse(const weft_attention_args &a, const Place &p, int row, float max, float sum)
{
    const int64_t t = p.first_token + (p.row0 + row) / p.heads, h = p.first_head + (p.row0 + row) % p.heads;
    if (a.lse != nullptr) a.lse[t * a.num_heads + h] = sum == 0.0f ? minus_inf() : (max + log2f(sum)) * ln_2;
}

/* The last block of an item: all its splits together. weights: shared, (splits, ROWS). */
template <class T, int DIM>
__device__ static void merge_splits(const weft_attention_args &a, const Split &split, const Place &p, int64_t item, int splits, float *weights,
                                    float (&row_sum)[ROWS])
{
    const float2 *stats = split.stats + item * split.splits * ROWS;
    const float *partial = split.partial + item * split.splits * ROWS * a.head_dim_v;
    for (int row = threadIdx.x / 32; row < p.rows; row += DEC_WARPS) {
        const int lane = threadIdx.x % 32;
        float max = minus_inf(), sum = 0.0f;
        for (int s = lane; s < splits; s += 32) max = fmaxf(max, __ldcg(&stats[s * ROWS + row]).x);
        for (int d = 16; d > 0; d /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, d));
        const float base = max == minus_inf() ? 0.0f : max;
        for (int s = lane; s < splits; s += 32) {
            const float2 own = __ldcg(&stats[s * ROWS + row]);
            const float weight = exp2f(own.x - base);
            weights[s * ROWS + row] = weight;
            sum += weight * own.y;
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            row_sum[row] = sum;
            put_lse(a, p, row, max, sum);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.rows * a.head_dim_v; i += DEC_THREADS) {
        const int row = i / a.head_dim_v, d = i % a.head_dim_v;
        float y = 0.0f;
#pragma unroll 8
        for (int s = 0; s < splits; s++) y += weights[s * ROWS + row] * __ldcg(&partial[(s * ROWS + row) * a.head_dim_v + d]);
        put<T>(a, p, row, d, row_sum[row] == 0.0f ? 0.0f : y / row_sum[row]);
    }
}

template <class T, int DIM> __global__ void __launch_bounds__(DEC_THREADS, DIM == 64 ? 4 : 3) decode(const weft_attention_args a, const Split split)
{
    __shared__ float out[ROWS][DIM], row_max[ROWS], row_sum[ROWS];
    __shared__ float2 stats[DEC_WARPS][ROWS];
    __shared__ bool last_block;
    dependency_wait();
    const int tile = blockIdx.x % split.row_tiles, part = blockIdx.x / split.row_tiles, kv_head = blockIdx.y, r = blockIdx.z;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    if (r == a.requests) { /* one block more, for the tokens behind the last request */
        if (blockIdx.x == 0 && kv_head == 0) clear_padding(a, 0, 1);
        return;
    }
    Place p;
    p.heads = heads_of(a, kv_head, p.first_head);
    p.first_token = a.query_start_loc[r];
    p.row0 = tile * ROWS;
    const int all_rows = p.heads * (a.query_start_loc[r + 1] - p.first_token);
    p.rows = min(ROWS, all_rows - p.row0);
    if (p.rows <= 0) return;
    const KeyRange keys = keys_of(a, r);
    Rows<T, DIM> s;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = p.row0 + min(g + 8 * half, p.rows - 1);
        visible(a, keys, row / p.heads, s.low[half], s.high[half]);
        s.max[half] = minus_inf();
        s.sum[half] = 0.0f;
        const bool real = g + 8 * half < p.rows;
        const T *from = (const T *)a.q + (int64_t)(p.first_token + row / p.heads) * a.q_stride + (int64_t)(p.first_head + row % p.heads) * a.head_dim;
#pragma unroll
        for (int c = 0; c < DIM / 32; c++) {
            const uint4 v = real && 32 * c + 8 * q < a.head_dim ? *(const uint4 *)(from + 32 * c + 8 * q) : make_uint4(0, 0, 0, 0);
            s.q[c][half] = v.x, s.q[c][2 + half] = v.y, s.q[c][4 + half] = v.z, s.q[c][6 + half] = v.w;
        }
    }
#pragma unroll
    for (int h = 0; h < DIM / 64; h++)
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) s.out[h][i][e] = 0.0f;

    /* Keys of all rows of the block, then of this split: whole tiles of every warp. */
    int low, high, low_last, high_first;
    visible(a, keys, p.row0 / p.heads, low, high_first);
    visible(a, keys, (p.row0 + p.rows - 1) / p.heads, low_last, high);
    low = low / KEYS * KEYS;
    const int step = KEYS * DEC_WARPS, total = max(0, high - low), tiles = (total + step - 1) / step;
    const int per = max(1, (tiles + split.splits - 1) / split.splits) * step, splits = max(1, (total + per - 1) / per);
    if (part >= splits) return;
    const int begin = low + part * per, end = min(high, begin + per);
    const float scale = a.scale * log2_e;
    const int64_t k_stride = a.keys == WEFT_KEYS_NEW ? a.k_stride : a.head_dim, v_stride = a.keys == WEFT_KEYS_NEW ? a.v_stride : a.head_dim_v;
    const int32_t *table = a.pages.block_table + r * a.pages.block_table_stride;
    const int page = (int)a.pages.page_size;
    const bool paged = a.keys != WEFT_KEYS_NEW;
    int64_t block = paged && begin + warp * KEYS < end ? table[(begin + warp * KEYS) / page] : 0;
    for (int key = begin + warp * KEYS; key < end; key += step) {
        const int64_t here = block;
        if (paged && key + step < end) block = table[(key + step) / page];
        if (here < 0) continue;
        const bool masked = key < low_last || key + KEYS > high_first;
        attend_tile<T, DIM>(s, (const T *)a.k + tile_row(a, r, kv_head, key, here, k_stride, a.head_dim),
                            (const T *)a.v + tile_row(a, r, kv_head, key, here, v_stride, a.head_dim_v), k_stride, v_stride, a.head_dim,
                            a.head_dim_v, key, end - 1, masked, scale);
    }
    join_warps<T, DIM>(s, out, stats, row_max, row_sum);
    if (splits == 1) {
        for (int i = threadIdx.x; i < p.rows * a.head_dim_v; i += DEC_THREADS) {
            const int row = i / a.head_dim_v, d = i % a.head_dim_v;
            put<T>(a, p, row, d, row_sum[row] == 0.0f ? 0.0f : out[row][d] / row_sum[row]);
        }
        if (threadIdx.x < p.rows) put_lse(a, p, threadIdx.x, row_max[threadIdx.x], row_sum[threadIdx.x]);
        return;
    }
    const int64_t item = ((int64_t)r * gridDim.y + kv_head) * split.row_tiles + tile, at = (item * split.splits + part) * ROWS;
    for (int i = threadIdx.x; i < p.rows * a.head_dim_v; i += DEC_THREADS)
        split.partial[at * a.head_dim_v + i] = out[i / a.head_dim_v][i % a.head_dim_v];
    if (threadIdx.x < p.rows) split.stats[at + threadIdx.x] = make_float2(row_max[threadIdx.x], row_sum[threadIdx.x]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last_block = atomicAdd(&split.counters[item], 1) == (unsigned)splits - 1;
    __syncthreads();
    if (!last_block) return;
    __threadfence();
    __shared__ float weights[MAX_SPLITS * ROWS];
    merge_splits<T, DIM>(a, split, p, item, splits, weights, row_sum);
    if (threadIdx.x == 0) split.counters[item] = 0;
}

bool attention_mma_fits(const weft_attention_args *a)
{
    if (a->dtype == WEFT_F32 || a->dtype != a->kv_dtype || a->head_dim > 128 || a->head_dim_v > 128) return false;
    if ((a->head_dim | a->head_dim_v) % 8 != 0 || a->q_stride % 8 != 0 || !aligned(a->q, 16) || !aligned(a->k, 16) || !aligned(a->v, 16))
        return false;
    if (a->keys == WEFT_KEYS_NEW) return (a->k_stride | a->v_stride) % 8 == 0;
    return a->pages.page_size % KEYS == 0 && a->pages.page_size < INT32_MAX;
}

/* How many splits fill the machine: whole waves of blocks, as few as do. */
static int splits_for(const weft_attention_args *a, int64_t items, int64_t seq_len, int blocks_per_sm)
{
    if (a->cuda == NULL || items > COUNTERS) return 1;
    const size_t room = a->cuda->workspace_bytes / ((size_t)items * ROWS * ((size_t)a->head_dim_v * 4 + sizeof(float2)));
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

void attention_decode(const weft_attention_args *a, int64_t query_len, void *stream)
{
    Split split = {};
    split.row_tiles = (int)div_up(query_len * least(a->group_size, a->num_heads), ROWS);
    const int64_t items = a->requests * a->num_kv_heads * split.row_tiles;
    int64_t seq_len = a->max_seq_len;
    if (a->keys == WEFT_KEYS_NEW) seq_len = query_len;
    else if (seq_len == 0) seq_len = a->pages.block_table_stride * a->pages.page_size;
    else seq_len = div_up(seq_len, a->pages.context_size) + a->pages.interleave;
    if (a->window > 0) seq_len = least(seq_len, a->window + query_len);
    const bool small = a->head_dim <= 64 && a->head_dim_v <= 64;
    split.splits = splits_for(a, items, seq_len, small ? 4 : 3);
    if (a->cuda != NULL) {
        split.counters = a->cuda->counters;
        split.stats = (float2 *)a->cuda->workspace;
        split.partial = (float *)(split.stats + items * split.splits * ROWS);
    }
    const dim3 grid((unsigned)(split.row_tiles * split.splits), (unsigned)a->num_kv_heads, (unsigned)a->requests + 1);
    void (*kernel)(const weft_attention_args, const Split);
    if (a->dtype == WEFT_BF16) kernel = small ? decode<bf16, 64> : decode<bf16, 128>;
    else kernel = small ? decode<__half, 64> : decode<__half, 128>;
    launch(kernel, grid, DEC_THREADS, 0, stream, *a, split);
}

} // namespace weft
