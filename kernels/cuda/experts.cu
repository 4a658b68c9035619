/* kernels/cuda/experts.cu - the experts of a rank over their tokens.
 *
 * The (token, choice) pairs are sorted by expert and worked off in rounds of at most ROUND_PAIRS;
 * the host knows how many pairs there can be, the device how many there are:
 *
 *     sort     order, ends and places of all pairs             one block
 *     cut      the round's segments: pairs of one expert       one block
 *     gather   x of each pair, float32                         per (pair, 128 columns)
 *     product  gate and up of each segment                     per (segment, rows)
 *     silu     silu(gate) * up                                 per (pair, 128 columns)
 *     product  down of each segment
 *     sum      y or the running sum of each token, experts ascending
 *
 * Short segments stream the weights past them, one row a warp; long ones are multiplied in tiles. */
#include <inttypes.h>

#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/quantize.cuh"
#include "kernels/cuda/tile.cuh"

namespace weft {

enum { ROUND_PAIRS = 1024, SORT_THREADS = 1024, EX_WARPS = 8, EX_ROWS = 2, EX_PAIRS = 4, STREAM_PAIRS = 16, EX_ALIGN = 64 };

struct Segment {
    int expert, first, count; /* pairs [first, first + count) of the round */
};

struct Experts {
    weft_experts_args a;
    int32_t *order, *place;   /* pairs by expert; where each pair is in order, -1: not here */
    unsigned long long *ends; /* (count): where each expert's pairs end in order */
    Segment *segments;        /* of the round, then empty ones up to most_segments */
    float *acc, *x, *both, *act, *out;
    int64_t first_pair;
    int first_round, last_round, most_segments;
};

__global__ void __launch_bounds__(SORT_THREADS) sort_pairs(const Experts w)
{
    dependency_wait();
    const weft_experts_args &a = w.a;
    const int pairs = (int)(a.tokens * a.top_k), count = (int)a.count, lane = threadIdx.x % 32;
    for (int e = threadIdx.x; e < count; e += SORT_THREADS) w.ends[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += SORT_THREADS) {
        const int e = local_expert(a, a.ids[p]);
        if (e >= 0) atomicAdd(&w.ends[e], 1ull);
    }
    __syncthreads();
    if (threadIdx.x < 32) { /* counts into starts */
        unsigned before = 0;
        for (int e0 = 0; e0 < count; e0 += 32) {
            const int e = e0 + lane;
            const unsigned own = e < count ? (unsigned)*(volatile unsigned long long *)&w.ends[e] : 0;
            unsigned sum = own;
            for (int d = 1; d < 32; d *= 2) {
                const unsigned other = __shfl_up_sync(~0u, sum, d);
                if (lane >= d) sum += other;
            }
            if (e < count) w.ends[e] = before + sum - own;
            before += __shfl_sync(~0u, sum, 31);
        }
    }
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += SORT_THREADS) {
        const int e = local_expert(a, a.ids[p]);
        int at = -1;
        if (e >= 0) {
            at = (int)atomicAdd(&w.ends[e], 1ull);
            w.order[at] = p;
        }
        w.place[p] = at;
    }
}

__global__ void __launch_bounds__(32) cut_segments(const Experts w)
{
    dependency_wait();
    const int count = (int)w.a.count, lane = threadIdx.x;
    const int64_t end = w.first_pair + ROUND_PAIRS;
    int found = 0;
    for (int e0 = 0; e0 < count; e0 += 32) {
        const int e = e0 + lane;
        int64_t first = 0, last = 0;
        if (e < count) {
            first = max((int64_t)(e > 0 ? w.ends[e - 1] : 0), w.first_pair);
            last = min((int64_t)w.ends[e], end);
        }
        const unsigned mask = __ballot_sync(~0u, last > first);
        if (last > first) w.segments[found + __popc(mask & ((1u << lane) - 1))] = {e, (int)(first - w.first_pair), (int)(last - first)};
        found += __popc(mask);
    }
    for (int i = found + lane; i < w.most_segments; i += 32) w.segments[i] = {0, 0, 0};
}

__device__ __forceinline__ int round_pairs(const Experts &w)
{
    const int64_t left = (w.a.count > 0 ? (int64_t)w.ends[w.a.count - 1] : 0) - w.first_pair;
    return (int)max((int64_t)0, min(left, (int64_t)ROUND_PAIRS));
}

/* The columns of a group, phase counted in; four a lane. */
template <class F> __device__ __forceinline__ void each_column(int64_t group, int64_t phase, int64_t cols, F f)
{
    const int64_t first = group * 128 - phase, begin = first < 0 ? 0 : first, end = min(first + 128, cols);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int64_t j = begin + threadIdx.x % 32 + 32 * i;
        f(i, j, j < end);
    }
}

__global__ void gather_pairs(const Experts w)
{
    dependency_wait();
    const weft_experts_args &a = w.a;
    const int p = blockIdx.x;
    if (p >= round_pairs(w)) return;
    const int64_t token = w.order[w.first_pair + p] / a.top_k, phase = a.up.scale_col_phase % 128, groups = (phase + a.hidden + 127) / 128;
    float *to = w.x + p * a.hidden;
    for (int64_t g = threadIdx.x / 32; g < groups; g += blockDim.x / 32) {
        float v[4];
        each_column(g, phase, a.hidden, [&](int i, int64_t j, bool in) { v[i] = in ? load(a.x, a.x_dtype, token * a.x_stride + j) : 0.0f; });
        if (a.quantize) quantize_group(v);
        each_column(g, phase, a.hidden, [&](int i, int64_t j, bool in) { if (in) to[j] = v[i]; });
    }
}

__global__ void activate_pairs(const Experts w)
{
    dependency_wait();
    const weft_experts_args &a = w.a;
    const int p = blockIdx.x;
    if (p >= round_pairs(w)) return;
    const int64_t width = a.intermediate, phase = a.down.scale_col_phase % 128, groups = (phase + width + 127) / 128;
    const float *gate = w.both + p * 2 * width, *up = gate + width;
    float *to = w.act + p * width;
    for (int64_t g = threadIdx.x / 32; g < groups; g += blockDim.x / 32) {
        float v[4];
        each_column(g, phase, width, [&](int i, int64_t j, bool in) { v[i] = in ? gate[j] / (1.0f + expf(-gate[j])) * up[j] : 0.0f; });
        if (a.quantize) quantize_group(v);
        each_column(g, phase, width, [&](int i, int64_t j, bool in) { if (in) to[j] = v[i]; });
    }
}

/* One of the two products: to[p] = in[p] w^T for the pairs of every segment. */
struct Product {
    const void *w;
    const float *scale;
    const int32_t *scale_row;
    const float *in;
    float *to;
    const Segment *segments;
    int64_t rows, columns, scale_rows, scale_stride, phase;
    int w_dtype;
};

template <class W> __device__ __forceinline__ float wide(W w) { return widen(w); }
template <> __device__ __forceinline__ float wide<uint8_t>(uint8_t w) { return widen_e4m3(w); }

template <class W, int N> __device__ __forceinline__ void unpack(float (&v)[N], const Pack<W, N> &p)
{
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = wide(p.v[i]);
}
/* Sixteen e4m3: by bits, through half pairs that hold them exactly. */
__device__ __forceinline__ void unpack(float (&v)[16], const Pack<uint8_t, 16> &p)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t low, high;
        widen_e4m3_pairs(((const uint32_t *)p.v)[i], low, high, __half());
        const float2 a = __half22float2(*(const __half2 *)&low), b = __half22float2(*(const __half2 *)&high);
        v[4 * i] = a.x, v[4 * i + 1] = a.y, v[4 * i + 2] = b.x, v[4 * i + 3] = b.y;
    }
}

/* A warp takes EX_ROWS rows, EX_PAIRS pairs at a time; N weights of a row in one load. */
template <class W, int N> __global__ void __launch_bounds__(EX_WARPS * 32) stream_segments(const Product m)
{
    dependency_wait();
    const Segment s = m.segments[blockIdx.y];
    if (s.count == 0 || s.count > STREAM_PAIRS) return;
    const int lane = threadIdx.x % 32, k = (int)m.columns;
    const int64_t row0 = ((int64_t)blockIdx.x * EX_WARPS + threadIdx.x / 32) * EX_ROWS;
    if (row0 >= m.rows) return;
    const W *w[EX_ROWS];
    const float *scale[EX_ROWS];
#pragma unroll
    for (int r = 0; r < EX_ROWS; r++) {
        const int64_t row = min(row0 + r, m.rows - 1);
        w[r] = (const W *)m.w + (s.expert * m.rows + row) * m.columns;
        scale[r] = sizeof(W) == 1 ? m.scale + (s.expert * m.scale_rows + m.scale_row[row]) * m.scale_stride : nullptr;
    }
    for (int pair0 = 0; pair0 < s.count; pair0 += EX_PAIRS) {
        const int pairs = min((int)EX_PAIRS, s.count - pair0);
        const float *x = m.in + (int64_t)(s.first + pair0) * m.columns;
        float sum[EX_ROWS][EX_PAIRS] = {};
#pragma unroll 2
        for (int j = lane * N; j < k; j += 32 * N) {
            Pack<W, N> p[EX_ROWS];
            float weights[EX_ROWS][N], factor[EX_ROWS];
#pragma unroll
            for (int r = 0; r < EX_ROWS; r++) {
                p[r] = *(const Pack<W, N> *)(w[r] + j);
                /* a pack never crosses a block of scales: N divides the phase, or is 1 */
                factor[r] = sizeof(W) == 1 ? scale[r][(m.phase + j) / 128] : 1.0f;
            }
#pragma unroll
            for (int r = 0; r < EX_ROWS; r++) unpack(weights[r], p[r]);
#pragma unroll
            for (int t = 0; t < EX_PAIRS; t++) {
                if (t >= pairs) break;
                constexpr int F = N % 4 == 0 ? 4 : 1;
                float part[EX_ROWS] = {};
#pragma unroll
                for (int i = 0; i < N; i += F) {
                    const Pack<float, F> value = *(const Pack<float, F> *)(x + t * m.columns + j + i);
#pragma unroll
                    for (int f = 0; f < F; f++)
#pragma unroll
                        for (int r = 0; r < EX_ROWS; r++) part[r] = fmaf(weights[r][i + f], value.v[f], part[r]);
                }
#pragma unroll
                for (int r = 0; r < EX_ROWS; r++) sum[r][t] = fmaf(part[r], factor[r], sum[r][t]);
            }
        }
#pragma unroll
        for (int r = 0; r < EX_ROWS; r++)
#pragma unroll
            for (int t = 0; t < EX_PAIRS; t++) {
                if (t >= pairs) break;
                const float y = warp_sum(sum[r][t]);
                if (lane == 0 && row0 + r < m.rows) m.to[(int64_t)(s.first + pair0 + t) * m.rows + row0 + r] = y;
            }
    }
}

template <class W> __global__ void __launch_bounds__(TILE_THREADS, 4) tile_segments(const Product m)
{
    dependency_wait();
    const Segment s = m.segments[blockIdx.y];
    const int pair0 = blockIdx.z * TILE;
    if (s.count <= STREAM_PAIRS || pair0 >= s.count) return;
    const int64_t row0 = (int64_t)blockIdx.x * TILE;
    plain_tile(
        m.columns, [&](int pair, int64_t k) { return pair0 + pair < s.count ? m.in[(int64_t)(s.first + pair0 + pair) * m.columns + k] : 0.0f; },
        [&](int r, int64_t k) {
            const int64_t row = row0 + r;
            if (row >= m.rows) return 0.0f;
            const float weight = wide(((const W *)m.w)[(s.expert * m.rows + row) * m.columns + k]);
            return sizeof(W) > 1 ? weight : weight * m.scale[(s.expert * m.scale_rows + m.scale_row[row]) * m.scale_stride + (m.phase + k) / 128];
        },
        [&](int pair, int r, float sum) {
            if (pair0 + pair < s.count && row0 + r < m.rows) m.to[(int64_t)(s.first + pair0 + pair) * m.rows + row0 + r] = sum;
        });
}

/* A token's choices that are in the round, experts ascending. */
__global__ void sum_tokens(const Experts w)
{
    dependency_wait();
    const weft_experts_args &a = w.a;
    const int64_t t = blockIdx.x, end = w.first_pair + ROUND_PAIRS;
    const int k = (int)a.top_k;
    for (int64_t j = (int64_t)blockIdx.y * blockDim.x + threadIdx.x; j < a.hidden; j += (int64_t)gridDim.y * blockDim.x) {
        float y = w.first_round ? 0.0f : w.acc[t * a.hidden + j];
        for (int64_t last = -1;;) { /* places are in the order of experts */
            int64_t at = INT64_MAX;
            int choice = 0;
            for (int c = 0; c < k; c++) {
                const int64_t place = w.place[t * k + c];
                if (place > last && place < at) at = place, choice = c;
            }
            if (at == INT64_MAX) break;
            last = at;
            if (at >= w.first_pair && at < end) y = fmaf(a.weights[t * k + choice], w.out[(at - w.first_pair) * a.hidden + j], y);
        }
        if (w.last_round) store(a.y, a.y_dtype, t * a.y_stride + j, y);
        else w.acc[t * a.hidden + j] = y;
    }
}

template <class W> static void multiply_as(const Product &m, int64_t segments, int64_t pairs, void *stream)
{
    constexpr int N = 16 / sizeof(W);
    const dim3 grid((unsigned)div_up(m.rows, EX_WARPS * EX_ROWS), (unsigned)segments);
    const bool packs = m.columns % N == 0 && m.phase % N == 0 && aligned(m.w, N * sizeof(W));
    launch(packs ? stream_segments<W, N> : stream_segments<W, 1>, grid, EX_WARPS * 32, 0, stream, m);
    if (pairs > STREAM_PAIRS)
        launch(tile_segments<W>, dim3((unsigned)div_up(m.rows, TILE), (unsigned)segments, (unsigned)div_up(pairs, TILE)), TILE_THREADS, 0, stream, m);
}

/* most: pairs that one expert can have. */
static void multiply(const Experts &w, const weft_expert_matrix &x, int64_t rows, int64_t columns, const float *in, float *to, int64_t segments,
                     int64_t most_pairs, void *stream)
{
    if (rows == 0) return;
    const Product m = {x.w, x.scale, x.scale_row, in, to, w.segments, rows, columns, x.scale_rows, x.scale_stride, x.scale_col_phase, w.a.w_dtype};
    if (w.a.w_dtype == WEFT_F8E4M3) multiply_as<uint8_t>(m, segments, most_pairs, stream);
    else by_float(w.a.w_dtype, [&](auto tag) { multiply_as<decltype(tag)>(m, segments, most_pairs, stream); });
}

/* The parts of the workspace: none larger than weft_experts_workspace counts for the CPU. */
static void lay_out(Experts *w)
{
    const weft_experts_args *a = &w->a;
    const int64_t pairs = a->tokens * a->top_k, round = least(pairs, ROUND_PAIRS);
    char *at = (char *)a->workspace;
    auto take = [&](int64_t bytes) {
        char *p = at;
        at += div_up(bytes, EX_ALIGN) * EX_ALIGN;
        return p;
    };
    w->order = (int32_t *)take(pairs * 8);
    w->place = w->order + pairs;
    w->ends = (unsigned long long *)take((a->count + 1) * 8);
    w->segments = (Segment *)take(round * (int64_t)sizeof(Segment));
    w->acc = (float *)take(a->tokens * a->hidden * 4);
    w->x = (float *)take(round * a->hidden * 4);
    w->both = (float *)take(round * 2 * a->intermediate * 4);
    w->act = (float *)take(round * a->intermediate * 4);
    w->out = (float *)take(round * a->hidden * 4);
}

} // namespace weft

using namespace weft;

extern "C" weft_status weft_experts_cuda(const weft_experts_args *a, void *stream)
{
    size_t bytes = 0;
    WEFT_TRY(weft_experts_workspace(a, &bytes));
    WEFT_TRY(weft__check_float("experts", "x", a->x_dtype));
    WEFT_TRY(weft__check_float("experts", "y", a->y_dtype));
    if (a->w_dtype != WEFT_F8E4M3) WEFT_TRY(weft__check_float("experts", "weights", a->w_dtype));
    WEFT_TRY(weft__check_expert_matrix(&a->up, "gate and up", a->hidden, a->w_dtype));
    WEFT_TRY(weft__check_expert_matrix(&a->down, "down", a->intermediate, a->w_dtype));
    if (a->tokens == 0 || a->hidden == 0) return WEFT_OK;
    Experts w = {};
    w.a = *a;
    lay_out(&w);
    if (fp8_experts(a, w.act, stream)) return launched("experts");
    if (stream_fits(a)) {
        stream_experts(a, w.act, stream);
        return launched("experts");
    }
    if (tiles_fit(a)) {
        tile_experts(a, stream);
        return launched("experts");
    }
    const int64_t pairs = a->tokens * a->top_k, rounds = most(1, div_up(pairs, ROUND_PAIRS));
    launch(sort_pairs, 1, SORT_THREADS, 0, stream, w);
    for (int64_t i = 0; i < rounds; i++) {
        w.first_pair = i * ROUND_PAIRS;
        w.first_round = i == 0, w.last_round = i == rounds - 1;
        const int64_t some = least(ROUND_PAIRS, pairs - w.first_pair), segments = least(some, a->count);
        const int64_t most_pairs = least(some, a->tokens);
        w.most_segments = (int)segments;
        if (segments > 0) {
            launch(cut_segments, 1, 32, 0, stream, w);
            launch(gather_pairs, (unsigned)some, 256, 0, stream, w);
            multiply(w, a->up, 2 * a->intermediate, a->hidden, w.x, w.both, segments, most_pairs, stream);
            if (a->intermediate > 0) launch(activate_pairs, (unsigned)some, 256, 0, stream, w);
            multiply(w, a->down, a->hidden, a->intermediate, w.act, w.out, segments, most_pairs, stream);
        }
        launch(sum_tokens, dim3((unsigned)a->tokens, (unsigned)(a->tokens < 64 ? div_up(a->hidden, 256) : 1)), 256, 0, stream, w);
    }
    return launched("experts");
}
