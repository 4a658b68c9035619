/* kernels/cuda/experts_stream.cu - the experts of up to 8 tokens, at the speed of memory: two launches.
 *
 *     up     act[pair] = silu(gate x) * (up x)      items: (expert, 8 rows of gate and the same of up)
 *     down   y[token] = sum of weight * down act    blocks: 8 rows, all experts one behind the other
 *
 * Each block finds out by itself which experts have tokens: the pairs (token, choice) are few. Every
 * weight is read once, whatever the number of tokens: tokens are the rows of the tensor cores' tile,
 * weights its columns. A block of 128 bytes of a row is one warp's work at a time; fp8 weights become
 * half precision exactly, and what they are multiplied with is half precision times a power of two for
 * each 128 columns (or their e4m3 scale, where activations are rounded), so no value is too large.
 *
 * `up` has one block on each multiprocessor: a warp feeds a ring of shared memory by bulk copies, eight
 * multiply. `down` starts under the end of `up` and has its weights in registers when that has ended.
 * Sums run over warps in a fixed order. */
#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/stream.cuh"

namespace weft {

enum {
    ST_PAIRS = 256,
    ST_AHEAD = 3,         /* blocks in one piece of `down` */
    ST_SHARED = 208 << 10 /* of a multiprocessor's shared memory */
};

/* Which experts have tokens here, ascending. */
struct Chosen {
    int count;
    int expert[ST_PAIRS];
    float weight[ST_PAIRS];           /* of pairs */
    uint8_t tokens[ST_PAIRS];         /* bits */
    uint8_t pair[ST_PAIRS][ST_TOKENS]; /* of a token there */
    int key[ST_PAIRS];
    uint8_t first[ST_PAIRS];
};

/* All threads of the block, at least ST_PAIRS. An expert that a token names twice has both weights. */
__device__ static void choose_experts(const weft_experts_args &a, Chosen &c)
{
    const int p = threadIdx.x, top = (int)a.top_k, pairs = (int)(a.tokens * a.top_k);
    const int key = p < pairs ? local_expert(a, a.ids[p]) : -1;
    float weight = key >= 0 ? a.weights[p] : 0.0f;
    if (p < ST_PAIRS) c.key[p] = key, c.tokens[p] = 0;
    __syncthreads();
    bool first = key >= 0, owner = first; /* the first pair of its expert; of its expert in its token */
    for (int i = 0; first && i < p; i++) first = c.key[i] != key;
    for (int i = p / top * top; owner && i < p; i++) owner = c.key[i] != key;
    for (int i = p + 1; owner && i < (p / top + 1) * top; i++)
        if (c.key[i] == key) weight += a.weights[i];
    if (p < ST_PAIRS) c.first[p] = first, c.weight[p] = weight;
    const int count = __syncthreads_count(first);
    if (p == 0) c.count = count;
    if (owner) {
        int slot = 0;
        for (int i = 0; i < pairs; i++) slot += c.first[i] && c.key[i] < key;
        if (first) c.expert[slot] = key;
        c.pair[slot][p / top] = (uint8_t)p;
        atomicOr((unsigned *)&c.tokens[slot & ~3], 1u << (slot % 4 * 8 + p / top));
    }
    __syncthreads();
}

enum { UP_ROWS = 16 }; /* 8 of gate and the same of up */
typedef Ring<UP_ROWS> UpRing;

struct UpShared {
    Chosen chosen;
    RingBarriers barriers;
    alignas(16) float sum[2][ST_WARPS][2][ST_TOKENS * 8];
};

/* What a scale needs to be found: the row of scales of a weight row, in one expert. */
__device__ __forceinline__ float scale_at(const weft_expert_matrix &m, int expert, int64_t row_offset, int block)
{
    return __ldg(m.scale + (int64_t)expert * m.scale_rows * m.scale_stride + row_offset + block);
}

template <class W, class T> __global__ void __launch_bounds__((ST_WARPS + 1) * 32, 1) stream_up(const weft_experts_args a, float *act, int stages)
{
#ifdef WEFT_HOPPER
    extern __shared__ __align__(128) char data[];
    __shared__ UpShared s;
    const Row<W> row(a.up.scale_col_phase, a.hidden);
    const int warp = threadIdx.x / 32, width = (int)a.intermediate, tokens = (int)a.tokens, tiles = (width + 7) / 8;
    char *x = data + stages * UpRing::BYTES;
    float *factor = (float *)(x + tokens * row.pitch());
    UpRing ring = ring_open<W, UP_ROWS>(data, s.barriers, stages);
    dependency_wait();
    choose_experts(a, s.chosen);
    const int items = s.chosen.count * tiles;
    if (warp == ST_WARPS) {
        ring_fill<W, UP_ROWS>(ring, row, items, [&](int item, int r) -> StreamRow {
            const int64_t expert = s.chosen.expert[item / tiles];
            const int at = min(item % tiles * 8 + r % 8, width - 1) + (r >= 8 ? width : 0);
            const float *scales = nullptr;
            if (sizeof(W) == 1)
                scales = a.up.scale + (expert * a.up.scale_rows + a.up.scale_row[at]) * a.up.scale_stride + a.up.scale_col_phase / 128;
            return {(const char *)a.up.w + (expert * 2 * width + at) * row.bytes, scales};
        });
        return;
    }
    for (int i = warp; i < tokens * row.groups; i += ST_WARPS) {
        const int t = i / row.groups, group = i % row.groups, skip = 128 * group - row.phase;
        pack_group((T *)(x + t * row.pitch()) + 128 * group, factor + i, -skip, row.columns - skip, a.quantize, [&](float(&v)[4], int j) {
            load_four(v, a.x, a.x_dtype, t * a.x_stride + skip + j);
        });
    }
    named_sync(1, ST_WARPS * 32);
    const int lane = threadIdx.x % 32, t = threadIdx.x / 8, r = threadIdx.x % 8;
    int side = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x, side ^= 1) {
        float sum[2][2];
        ring_multiply<W, T, UP_ROWS>(ring, row, x, factor, tokens, sum);
#pragma unroll
        for (int n = 0; n < 2; n++) *(float2 *)&s.sum[side][warp][n][2 * lane] = make_float2(sum[n][0], sum[n][1]);
        named_sync(1, ST_WARPS * 32);
        const int row0 = item % tiles * 8;
        if (t < tokens && row0 + r < width && s.chosen.tokens[item / tiles] >> t & 1) {
            float gate = 0.0f, up = 0.0f;
#pragma unroll
            for (int i = 0; i < ST_WARPS; i++) gate += s.sum[side][i][0][threadIdx.x], up += s.sum[side][i][1][threadIdx.x];
            act[(int64_t)s.chosen.pair[item / tiles][t] * width + row0 + r] = gate / (1.0f + expf(-gate)) * up;
        }
    }
#endif
}

/* Blocks of consecutive weights on their way: 8 rows of an expert, 128 bytes of each. */
template <class W> struct Pieces {
    uint4 w[ST_AHEAD][2];
    float by[ST_AHEAD][2];
};

struct DownShared {
    Chosen chosen;
    alignas(16) float sum[ST_WARPS][ST_TOKENS * 8];
};

template <class W, class T> __global__ void __launch_bounds__(ST_WARPS * 32, 2) stream_down(const weft_experts_args a, const float *act)
{
    extern __shared__ __align__(128) char packed[];
    __shared__ DownShared s;
    const Row<W> row(a.down.scale_col_phase, a.intermediate);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, tokens = (int)a.tokens;
    const int pairs = (int)(a.tokens * a.top_k), hidden = (int)a.hidden, row0 = blockIdx.x * 8;
    /* The kernel in front has waited for the router, and has come to its end or let this one start after that. */
    choose_experts(a, s.chosen);
    const int units = s.chosen.count * row.blocks, begin = units * warp / ST_WARPS, end = units * (warp + 1) / ST_WARPS;
    const char *own_row = (const char *)a.down.w + (int64_t)min(row0 + g, hidden - 1) * row.bytes - row.phase + 16 * q;
    int64_t scales[2] = {};
    if (sizeof(W) == 1)
#pragma unroll
        for (int i = 0; i < 2; i++) scales[i] = a.down.scale_row[min(row0 + 2 * q + i, hidden - 1)] * a.down.scale_stride + a.down.scale_col_phase / 128;
    int slot = begin / row.blocks, block = begin % row.blocks; /* of the next unit to fetch */
    int left = end - begin;
    auto take = [&](Pieces<W> &p) {
#pragma unroll
        for (int i = 0; i < ST_AHEAD; i++) {
            const bool some = i < left;
            const int expert = some ? s.chosen.expert[slot] : 0;
            const char *w = own_row + (int64_t)expert * hidden * row.bytes + block * ST_BLOCK;
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int at = block * ST_BLOCK + 64 * c + 16 * q;
                p.w[i][c] = stream_in(w + 64 * c, some && at >= row.phase && at < row.phase + row.bytes);
            }
#pragma unroll
            for (int k = 0; k < 2; k++) p.by[i][k] = sizeof(W) == 1 && some ? scale_at(a.down, expert, scales[k], block) : 1.0f;
            if (some && ++block == row.blocks) block = 0, slot++;
        }
        left -= ST_AHEAD;
    };
    Pieces<W> now, next;
    take(now);
    take(next);
    dependency_wait();
    float *factor = (float *)(packed + pairs * row.pitch());
    for (int i = warp; i < pairs * row.groups; i += ST_WARPS) {
        const int p = i / row.groups, group = i % row.groups, skip = 128 * group - row.phase;
        if (s.chosen.key[p] < 0) continue;
        pack_group((T *)(packed + p * row.pitch()) + 128 * group, factor + i, -skip, row.columns - skip, a.quantize, [&](float(&v)[4], int j) {
            load_four(v, act, WEFT_F32, (int64_t)p * row.columns + skip + j);
        });
    }
    __syncthreads();
    float sum[2] = {};
    int at_slot = begin / row.blocks, at_block = begin % row.blocks;
    for (int unit = begin; unit < end; unit += ST_AHEAD) {
#pragma unroll
        for (int i = 0; i < ST_AHEAD; i++) {
            if (unit + i >= end) break;
            const bool token = g < tokens && s.chosen.tokens[at_slot] >> g & 1;
            const int p = token ? s.chosen.pair[at_slot][g] : 0;
            const T *x = (const T *)(packed + p * row.pitch()) + at_block * Row<W>::COLUMNS;
            float part[4] = {};
#pragma unroll
            for (int c = 0; c < 2; c++) {
                Step<W, T> step;
                step.take(x + (4 * c + q) * Row<W>::CHUNK, token);
                step.multiply(part, now.w[i][c]);
            }
            const float f = token ? factor[p * row.groups + at_block * Row<W>::COLUMNS / 128] * s.chosen.weight[p] : 0.0f;
#pragma unroll
            for (int k = 0; k < 2; k++) sum[k] = fmaf(part[k], now.by[i][k] * f, sum[k]);
            if (++at_block == row.blocks) at_block = 0, at_slot++;
        }
        now = next;
        take(next);
    }
    *(float2 *)&s.sum[warp][g * 8 + 2 * q] = make_float2(sum[0], sum[1]);
    __syncthreads();
    const int t = threadIdx.x / 8, r = threadIdx.x % 8;
    if (t >= tokens || row0 + r >= hidden) return;
    float y = 0.0f;
#pragma unroll
    for (int i = 0; i < ST_WARPS; i++) y += s.sum[i][threadIdx.x];
    store(a.y, a.y_dtype, t * a.y_stride + row0 + r, y);
}

static size_t packed_bytes(int64_t rows, int64_t pitch, int64_t groups) { return (size_t)(rows * (pitch + groups * 4)); }

template <class W> static int up_stages(const weft_experts_args *a)
{
    const Row<W> row(a->up.scale_col_phase, a->hidden);
    const int64_t left = (int64_t)ST_SHARED - (int64_t)packed_bytes(a->tokens, row.pitch(), row.groups) - (int64_t)sizeof(UpShared);
    return (int)least(left / UpRing::BYTES, ST_STAGES_MOST);
}

template <class W> static bool shapes_fit(const weft_experts_args *a)
{
    const int64_t whole = 16 / (int64_t)sizeof(W);
    if ((a->hidden | a->intermediate) % whole != 0 || a->intermediate == 0 || (a->up.scale_col_phase | a->down.scale_col_phase) % 16 != 0) return false;
    if (a->hidden > 65536 || a->intermediate > 65536) return false;
    const Row<W> down(a->down.scale_col_phase, a->intermediate);
    const int64_t pairs = a->tokens * a->top_k;
    return up_stages<W>(a) >= ST_STAGES_LEAST && packed_bytes(pairs, down.pitch(), down.groups) + sizeof(DownShared) <= ST_SHARED;
}

bool stream_fits(const weft_experts_args *a)
{
#ifdef WEFT_CUDA_DEPENDENT_LAUNCH
    if (a->cuda == NULL || a->tokens > ST_TOKENS || a->tokens * a->top_k > ST_PAIRS || a->count == 0) return false;
    if (a->x_dtype == WEFT_F32 || !aligned(a->x, 8) || a->x_stride % 4 != 0 || !aligned(a->up.w, 16) || !aligned(a->down.w, 16)) return false;
    if (a->w_dtype == WEFT_F8E4M3) return shapes_fit<uint8_t>(a);
    return a->w_dtype == a->x_dtype && a->up.scale_col_phase == 0 && a->down.scale_col_phase == 0 && shapes_fit<bf16>(a);
#else
    return false;
#endif
}

template <class W, class T> static void start(const weft_experts_args *a, float *act, void *stream)
{
    const Row<W> up(a->up.scale_col_phase, a->hidden), down(a->down.scale_col_phase, a->intermediate);
    const int stages = up_stages<W>(a);
    const size_t up_bytes = (size_t)stages * UpRing::BYTES + packed_bytes(a->tokens, up.pitch(), up.groups);
    const size_t down_bytes = packed_bytes(a->tokens * a->top_k, down.pitch(), down.groups);
    (void)cudaFuncSetAttribute(stream_up<W, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)up_bytes);
    (void)cudaFuncSetAttribute(stream_down<W, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)down_bytes);
    launch(stream_up<W, T>, (unsigned)a->cuda->sms, (ST_WARPS + 1) * 32, up_bytes, stream, *a, act, stages);
    launch(stream_down<W, T>, (unsigned)div_up(a->hidden, 8), ST_WARPS * 32, down_bytes, stream, *a, act);
}

void stream_experts(const weft_experts_args *a, float *act, void *stream)
{
    if (a->w_dtype == WEFT_F8E4M3) start<uint8_t, __half>(a, act, stream);
    else if (a->w_dtype == WEFT_BF16) start<bf16, bf16>(a, act, stream);
    else start<__half, __half>(a, act, stream);
}

} // namespace weft
