/* kernels/cuda/experts_stream.cu - the experts of up to 8 tokens, at the speed of memory: two launches.
 *
 *     up     act[pair] = silu(gate x) * (up x)      items: (expert, 8 rows of gate and the same of up)
 *     down   y[token] = sum of weight * down act    tiles: 8 rows, all experts one behind the other
 *
 * Each block finds out by itself which experts have tokens: the pairs (token, choice) are few. Every weight is
 * read once, whatever the number of tokens (stream.cuh). One block of each kernel fits on a multiprocessor, so
 * `down` starts under the end of `up` and has its first weights in shared memory when that has ended. Sums run
 * over warps in a fixed order. */
#include "kernels/cuda/experts_chosen.cuh"
#include "kernels/cuda/stream.cuh"

namespace weft {

enum {
    UP_DEPTH = 5,
    DOWN_ROWS = 8,
    DOWN_DEPTH = 10
};

struct UpShared {
    Chosen chosen;
    ItemSums sums[2];
};

/* The items of `up`: (expert, tile), tile after tile. A tile is 8 rows of gate and the same of up. */
template <class W> struct UpItem {
    const weft_experts_args &a;
    const Chosen &chosen;
    int width, tiles, bytes, phase, slot, tile;
    __device__ __forceinline__ UpItem(const weft_experts_args &args, const Chosen &c, const Row<W> &row)
        : a(args), chosen(c), width((int)args.intermediate), tiles((width + 7) / 8), bytes(row.bytes), phase(row.phase), slot(0), tile(blockIdx.x)
    {
        wrap();
    }
    __device__ __forceinline__ void wrap()
    {
        while (tile >= tiles) tile -= tiles, slot++;
    }
    __device__ __forceinline__ bool there() const { return slot < chosen.count; }
    __device__ __forceinline__ void advance()
    {
        tile += gridDim.x;
        wrap();
    }
    __device__ __forceinline__ int row_of(int r) const { return min(tile * 8 + r % 8, width - 1) + (r >= 8 ? width : 0); }
    __device__ __forceinline__ int hint() const { return sizeof(W) == 1 ? __ldg(a.up.scale_row + row_of(threadIdx.x % 16)) : 0; }
    __device__ __forceinline__ Rows<16> rows(int scale_row) const
    {
        const int64_t expert = chosen.expert[slot];
        const char *w = (const char *)a.up.w + expert * 2 * width * bytes - phase;
        Rows<16> rows;
#pragma unroll
        for (int i = 0; i < 4; i++) rows.weights[i] = w + (int64_t)row_of(4 * i + threadIdx.x % 32 / 8) * bytes;
        rows.scales = sizeof(W) == 1 ? scales_of(a.up, expert, scale_row) : nullptr;
        return rows;
    }
};

template <class W, class T> __global__ void __launch_bounds__(ST_THREADS, 1) stream_up(const weft_experts_args a, float *act)
{
    extern __shared__ __align__(128) char data[];
    __shared__ UpShared s;
    const Row<W> row(a.up.scale_col_phase, a.hidden);
    const int width = (int)a.intermediate, tokens = (int)a.tokens;
    dependency_wait();
    choose_experts(a, s.chosen);
    UpItem<W> item(a, s.chosen, row);
    ItemStream<W, T, UP_DEPTH, UpItem<W>> stream(data, row, item);
    char *x = data + Ring<W, 16, UP_DEPTH>::BYTES;
    float *factor = (float *)(x + tokens * row.pitch());
    pack_rows<W, T>(x, factor, 1, ST_TOKENS, row, tokens, a.quantize,
                    [&](float(&v)[4], int i, int j) { load_four(v, a.x, a.x_dtype, i * a.x_stride + j); }, [](int) { return false; });
    __syncthreads();
    const int t = threadIdx.x % 8, r = threadIdx.x / 8;
    for (int side = 0; item.there(); item.advance(), side ^= 1) {
        float sum[2][2];
        stream.multiply(sum, x, factor, tokens);
        s.sums[side].put(sum);
        __syncthreads();
        if (r < 8 && t < tokens && item.tile * 8 + r < width && s.chosen.tokens[item.slot] >> t & 1) {
            const float gate = s.sums[side].of(r, t), up = s.sums[side].of(8 + r, t);
            act[(int64_t)s.chosen.pair[item.slot][t] * width + item.tile * 8 + r] = gate / (1.0f + expf(-gate)) * up;
        }
    }
}

struct DownShared {
    Chosen chosen;
    alignas(16) float sum[2][ST_WARPS][ST_TOKENS * 8];
};

/* A warp's units of each tile: `begin` to `end` of the blocks of all chosen experts, one expert behind the other. */
template <class W> struct DownStream {
    Ring<W, DOWN_ROWS, DOWN_DEPTH> ring;
    const weft_experts_args &a;
    const Chosen &chosen;
    const Row<W> &row;
    int begin, end, tiles;
    int tile, unit, slot, block; /* of the next unit to fetch */
    Rows<DOWN_ROWS> rows;
    __device__ __forceinline__ DownStream(char *data, const weft_experts_args &args, const Chosen &c, const Row<W> &shape)
        : ring(data), a(args), chosen(c), row(shape), tiles((int)((args.hidden + 7) / 8)), tile(blockIdx.x), rows()
    {
        const int units = c.count * shape.blocks, warp = threadIdx.x / 32;
        begin = units * warp / ST_WARPS, end = units * (warp + 1) / ST_WARPS;
        if (begin == end) tile = tiles;
        rewind();
        for (int i = 0; i < DOWN_DEPTH - 1; i++) fetch();
    }
    __device__ __forceinline__ void rewind()
    {
        unit = begin, slot = begin / row.blocks, block = begin % row.blocks;
        if (tile < tiles) locate();
    }
    __device__ __forceinline__ void locate()
    {
        const int lane = threadIdx.x % 32, hidden = (int)a.hidden;
        const int64_t expert = chosen.expert[slot];
#pragma unroll
        for (int i = 0; i < DOWN_ROWS / 4; i++)
            rows.weights[i] = (const char *)a.down.w + (expert * hidden + min(tile * 8 + 4 * i + lane / 8, hidden - 1)) * row.bytes - row.phase;
        if (sizeof(W) == 1) rows.scales = scales_of(a.down, expert, __ldg(a.down.scale_row + min(tile * 8 + lane % 8, hidden - 1)));
    }
    __device__ __forceinline__ void fetch()
    {
        ring.fetch(rows, row, block, tile < tiles);
        if (tile >= tiles) return;
        if (++unit == end) {
            tile += gridDim.x;
            rewind();
        } else if (++block == row.blocks) {
            block = 0, slot++;
            locate();
        }
    }
};

template <class W, class T> __global__ void __launch_bounds__(ST_THREADS, 1) stream_down(const weft_experts_args a, const float *act)
{
    extern __shared__ __align__(128) char data[];
    __shared__ DownShared s;
    const Row<W> row(a.down.scale_col_phase, a.intermediate);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, tokens = (int)a.tokens;
    const int pairs = (int)(a.tokens * a.top_k), hidden = (int)a.hidden;
    /* `up` has waited for the kernels in front of it before it let this one start: the choice is there. */
    choose_experts(a, s.chosen);
    DownStream<W> stream(data, a, s.chosen, row);
    dependency_wait();
    char *packed = data + Ring<W, DOWN_ROWS, DOWN_DEPTH>::BYTES;
    float *factor = (float *)(packed + pairs * row.pitch());
    pack_rows<W, T>(packed, factor, row.groups, 1, row, pairs, a.quantize,
                    [&](float(&v)[4], int i, int j) { load_four(v, act, WEFT_F32, (int64_t)i * row.columns + j); },
                    [&](int i) { return s.chosen.key[i] < 0; });
    __syncthreads();
    const int t = threadIdx.x / 8, r = threadIdx.x % 8;
    int side = 0;
    for (int tile = blockIdx.x; tile < stream.tiles; tile += gridDim.x, side ^= 1) {
        float sum[2] = {};
        int slot = stream.begin / row.blocks, block = stream.begin % row.blocks;
        for (int unit = stream.begin; unit < stream.end; unit++) {
            uint4 w[1][2];
            const float *scales = stream.ring.take(w);
            const float by0 = sizeof(W) == 1 ? scales[2 * q] : 1.0f, by1 = sizeof(W) == 1 ? scales[2 * q + 1] : 1.0f;
            const bool token = s.chosen.tokens[slot] >> g & 1;
            const int p = token ? s.chosen.pair[slot][g] : 0;
            const float f = token ? factor[p * row.groups + block * Row<W>::COLUMNS / 128] * s.chosen.weight[p] : 0.0f;
            const T *x = (const T *)(packed + p * row.pitch()) + block * Row<W>::COLUMNS + q * Row<W>::CHUNK;
            float part[2][4] = {};
#pragma unroll
            for (int c = 0; c < 2; c++) {
                Product<W, T> product;
                product.take(x + 4 * c * Row<W>::CHUNK, token);
                product.tokens_first(part[c], w[0][c]);
            }
            stream.fetch();
            sum[0] = fmaf(part[0][0] + part[1][0], by0 * f, sum[0]);
            sum[1] = fmaf(part[0][1] + part[1][1], by1 * f, sum[1]);
            if (++block == row.blocks) block = 0, slot++;
        }
        *(float2 *)&s.sum[side][warp][2 * lane] = make_float2(sum[0], sum[1]);
        __syncthreads();
        if (t >= tokens || tile * 8 + r >= hidden) continue;
        float y = 0.0f;
#pragma unroll
        for (int i = 0; i < ST_WARPS; i++) y += s.sum[side][i][threadIdx.x];
        store(a.y, a.y_dtype, t * a.y_stride + tile * 8 + r, y);
    }
}

template <class W> static size_t up_bytes(const weft_experts_args *a)
{
    return (size_t)(Ring<W, 16, UP_DEPTH>::BYTES + Row<W>(a->up.scale_col_phase, a->hidden).packed(a->tokens));
}
template <class W> static size_t down_bytes(const weft_experts_args *a)
{
    return (size_t)(Ring<W, DOWN_ROWS, DOWN_DEPTH>::BYTES + Row<W>(a->down.scale_col_phase, a->intermediate).packed(a->tokens * a->top_k));
}

template <class W> static bool shapes_fit(const weft_experts_args *a)
{
    const int64_t whole = 16 / (int64_t)sizeof(W);
    if ((a->hidden | a->intermediate) % whole != 0 || a->intermediate == 0 || (a->up.scale_col_phase | a->down.scale_col_phase) % 16 != 0) return false;
    if (a->hidden > 65536 || a->intermediate > 65536) return false;
    return up_bytes<W>(a) + sizeof(UpShared) <= (size_t)a->cuda->shared && down_bytes<W>(a) + sizeof(DownShared) <= (size_t)a->cuda->shared;
}

bool stream_fits(const weft_experts_args *a)
{
    if (a->cuda == NULL || a->tokens > ST_TOKENS || a->tokens * a->top_k > CHOSEN_PAIRS || a->count == 0) return false;
    if (a->x_dtype == WEFT_F32 || !aligned(a->x, 8) || a->x_stride % 4 != 0 || !aligned(a->up.w, 16) || !aligned(a->down.w, 16)) return false;
    if (a->w_dtype == WEFT_F8E4M3) return shapes_fit<uint8_t>(a);
    return a->w_dtype == a->x_dtype && a->up.scale_col_phase == 0 && a->down.scale_col_phase == 0 && shapes_fit<bf16>(a);
}

template <class W, class T> static void start(const weft_experts_args *a, float *act, void *stream)
{
    (void)cudaFuncSetAttribute(stream_up<W, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)up_bytes<W>(a));
    (void)cudaFuncSetAttribute(stream_down<W, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)down_bytes<W>(a));
    launch(stream_up<W, T>, (unsigned)a->cuda->sms, ST_THREADS, up_bytes<W>(a), stream, *a, act);
    launch(stream_down<W, T>, (unsigned)least(a->cuda->sms, div_up(a->hidden, 8)), ST_THREADS, down_bytes<W>(a), stream, *a, (const float *)act);
}

void stream_experts(const weft_experts_args *a, float *act, void *stream)
{
    if (a->w_dtype == WEFT_F8E4M3) start<uint8_t, __half>(a, act, stream);
    else if (a->w_dtype == WEFT_BF16) start<bf16, bf16>(a, act, stream);
    else start<__half, __half>(a, act, stream);
}

} // namespace weft
