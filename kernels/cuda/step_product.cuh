/* kernels/cuda/step_product.cuh - one product of the step, as every block does its share of it.
 *
 * The input lies in shared memory, tokens as the tensor cores' columns; teams of warps take turns along k and
 * leave their sums of each tile to one more warp, which adds them up and finishes the tile's rows: bias,
 * rounding, and what was joined to the product (silu of pairs, rotation, keys and values into their
 * pages). */
#pragma once

#include "kernels/cuda/step_feed.cuh"

namespace weft {

/* Shared memory besides the rings. */
struct StepPlaces {
    char *x;        /* a product's input, or what attention shares */
    char *held;     /* shares of residual sums that wait to be written */
    float *cos_sin; /* (2, tokens, head_dim) of this product's tokens, and of the one before */
    float *sums;    /* (STEP_SUMS, warps, tokens, 16) of the warps; or sums over the block */
    int64_t *pages; /* (2, tokens) where keys go, or -1 */
    int *positions; /* (2, tokens) or -1 */
    int angles;     /* elements of half of cos_sin */
};

#ifdef WEFT_HOPPER

/* Packs of 8 elements as the 32-bit words they are: arrays of 16-bit values end up in local memory. */
template <class T> __device__ __forceinline__ uint32_t step_add2(uint32_t a, uint32_t b)
{
    const float2 x = widen_pair<T>(a), y = widen_pair<T>(b);
    return pair<T>(x.x + y.x, x.y + y.y);
}
template <class T> __device__ __forceinline__ uint4 step_add8(uint4 a, uint4 b)
{
#pragma unroll
    for (int i = 0; i < 4; i++) (&a.x)[i] = step_add2<T>((&a.x)[i], (&b.x)[i]);
    return a;
}
template <class T> __device__ __forceinline__ float step_squares8(uint4 a)
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 x = widen_pair<T>((&a.x)[i]);
        sum += x.x * x.x + x.y * x.y;
    }
    return sum;
}
template <class T> __device__ __forceinline__ uint32_t step_scale2(uint32_t a, uint32_t gain, float factor)
{
    const float2 x = widen_pair<T>(a), g = widen_pair<T>(gain);
    return pair<T>(x.x * factor * g.x, x.y * factor * g.y);
}
template <class T> __device__ __forceinline__ uint4 step_scale8(uint4 a, uint4 gain, float factor)
{
#pragma unroll
    for (int i = 0; i < 4; i++) (&a.x)[i] = step_scale2<T>((&a.x)[i], (&gain.x)[i], factor);
    return a;
}
/* Of all threads that compute; part: 8 floats of shared memory. */
__device__ __forceinline__ float step_block_sum(float sum, float *part)
{
    static_assert(STEP_WARPS == 8, "two times four");
    sum = warp_sum(sum);
    if (step_thread() % 32 == 0) part[step_thread() / 32] = sum;
    step_sync();
    const float4 a = *(const float4 *)part, b = *(const float4 *)(part + 4);
    return a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w;
}

/* Bytes between tokens of the input: whole pieces of w, so that what is behind k can be zeros; with 16-bit
 * weights tokens meet no bank twice. */
__device__ __forceinline__ int step_used(int k) { return (2 * k + STEP_PIECE - 1) / STEP_PIECE * STEP_PIECE; }
__device__ __forceinline__ int step_pitch(int k) { return step_used(k) + 64; }

/* Packs of a row that this block writes for all: [first, end). */
struct StepPacks {
    int first, end;
};
__device__ __forceinline__ StepPacks step_mine(int packs)
{
    return {packs * (int)blockIdx.x / (int)gridDim.x, packs * ((int)blockIdx.x + 1) / (int)gridDim.x};
}

/* What this block wrote of n's rows at `rows`, read back. */
template <class T> __device__ __forceinline__ uint32_t step_back_shares(const weft_rms_norm_args &n, const void *rows, int64_t stride)
{
    const StepPacks mine = step_mine((int)n.cols / 8);
    const int each = mine.end - mine.first;
    uint32_t back = 0;
    for (int i = step_thread(); i < (int)n.rows * each; i += STEP_WARPS * 32) back |= step_back((const T *)rows + i / each * stride + 8 * (mine.first + i % each));
    return back;
}

/* Behind instruction `at` of the list: positions, their angles and where their keys go, for who finishes it. The warp
 * that does may still be at the instruction before, so there are two of each. */
__device__ __forceinline__ StepPlaces step_places(const StepPlaces &places, int at)
{
    StepPlaces own = places;
    if (at & 1) own.cos_sin += places.angles, own.pages += STEP_TOKENS, own.positions += STEP_TOKENS;
    return own;
}
/* These come from the host, before the step, and are read before the wait. By the last two warps: the first one looks after it. */
__device__ __forceinline__ void step_aside(const StepProduct &p, const StepPlaces &places)
{
    const int thread = step_thread(), warp = thread / 32, lane = thread % 32, tokens = (int)p.linear.tokens, dim = (int)p.rope.rotary_dim;
    if (p.has_kv && warp == STEP_WARPS - 2)
        for (int t = lane; t < tokens; t += 32) places.pages[t] = place_of(p.kv, t);
    if (p.pairs == PAIRS_ROPE && warp == STEP_WARPS - 1)
        for (int t = 0; t < tokens; t++) {
            const int position = p.rope.positions[t];
            const bool in = position >= 0 && position < p.rope.max_positions;
            if (lane == 0) places.positions[t] = in ? position : -1;
            for (int i = lane; in && i < dim; i += 32) places.cos_sin[t * dim + i] = __ldg(p.rope.cos_sin + (int64_t)position * dim + i);
        }
}

template <class T> struct StepInput {
    __device__ __forceinline__ static void plain(const StepProduct &p, const StepPlaces &places, int tokens)
    {
        const int packs = (int)p.linear.k / 8, pitch = step_pitch((int)p.linear.k), thread = step_thread();
        for (int t = 0; t < tokens; t++)
            for (int i = thread; i < packs; i += STEP_WARPS * 32)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(places.x + t * pitch + 16 * i)),
                             "l"((const uint4 *)((const T *)p.linear.x + t * p.linear.x_stride) + i)
                             : "memory");
        asm volatile("cp.async.wait_all;" ::: "memory");
    }
    /* rms_norm of every token by every block; its share of y and of the residual sum is this block's to write. */
    __device__ __forceinline__ static void normalised(const StepProduct &p, const StepPlaces &places)
    {
        const weft_rms_norm_args n = p.norm; /* a copy: writes through pointers do not touch it */
        const int size = n.rows == 1 ? STEP_WARPS * 32 : 32, thread = step_thread(), me = thread % size; /* threads that share a token */
        const int packs = (int)n.cols / 8, pitch = step_pitch((int)n.cols);
        const StepPacks mine = step_mine(packs);
        const bool sums = n.residual != nullptr, keeps = p.keeps != 0, kept = p.kept != 0;
        for (int t = thread / size; t < (int)n.rows; t += STEP_WARPS * 32 / size) {
            uint4 *row = (uint4 *)(places.x + t * pitch), *held = (uint4 *)places.held + (keeps ? t * packs : t * (mine.end - mine.first) - mine.first);
            const uint4 *x = (const uint4 *)((const T *)n.x + t * n.x_stride), *residual = sums ? (const uint4 *)((const T *)n.residual + t * n.residual_stride) : x;
            const uint4 *gain = (const uint4 *)n.gain;
            uint4 *y = (uint4 *)((T *)n.y + t * n.y_stride);
            uint4 v[STEP_KEPT], r[STEP_KEPT], g[STEP_KEPT];
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < STEP_KEPT; i++) {
                const int pack = min(me + i * size, packs - 1);
                v[i] = __ldcg(x + pack), g[i] = __ldg(gain + pack), r[i] = kept ? held[pack] : __ldcg(residual + pack);
            }
#pragma unroll
            for (int i = 0; i < STEP_KEPT; i++) {
                const int pack = me + i * size;
                if (sums) v[i] = step_add8<T>(v[i], r[i]);
                if (pack < packs) sum += step_squares8<T>(v[i]);
                if (sums && pack < packs && (keeps || (pack >= mine.first && pack < mine.end))) held[pack] = v[i];
            }
            for (int pack = me + STEP_KEPT * size; pack < packs; pack += size) {
                uint4 w = __ldcg(x + pack);
                if (sums) w = step_add8<T>(w, kept ? held[pack] : __ldcg(residual + pack));
                sum += step_squares8<T>(w);
                if (sums && (keeps || (pack >= mine.first && pack < mine.end))) held[pack] = w;
                row[pack] = w;
            }
            sum = warp_sum(sum);
            if (size > 32) {
                float *part = places.sums;
                if (thread % 32 == 0) part[thread / 32] = sum;
                step_sync();
                sum = 0.0f;
                for (int w = 0; w < STEP_WARPS; w++) sum += part[w];
            }
            const float factor = 1.0f / sqrtf(sum / (float)n.cols + n.eps);
#pragma unroll
            for (int i = 0; i < STEP_KEPT; i++) {
                const int pack = me + i * size;
                if (pack >= packs) continue;
                const uint4 w = step_scale8<T>(v[i], g[i], factor);
                row[pack] = w;
                if (pack >= mine.first && pack < mine.end) y[pack] = w;
            }
            for (int pack = me + STEP_KEPT * size; pack < packs; pack += size) {
                const uint4 w = step_scale8<T>(row[pack], __ldg(gain + pack), factor);
                row[pack] = w;
                if (pack >= mine.first && pack < mine.end) y[pack] = w;
            }
        }
    }
    /* normalised() of one row of a pack or two a thread: what no other block writes is read before enter(). */
    template <class Enter> __device__ __forceinline__ static void one_normalised(const StepProduct &p, const StepPlaces &places, Enter enter)
    {
        const weft_rms_norm_args &n = p.norm;
        const int thread = step_thread(), packs = (int)n.cols / 8;
        const bool sums = n.residual != nullptr, kept = p.kept != 0;
        uint4 *row = &step_shared(*(uint4 *)places.x), *held = &step_shared(*(uint4 *)places.held), *y = (uint4 *)n.y;
        const uint4 *x = (const uint4 *)n.x, *residual = (const uint4 *)n.residual, *gain = (const uint4 *)n.gain;
        const StepPacks mine = step_mine(packs);
        const float cols = (float)n.cols, eps = n.eps;
        const bool some[STEP_KEPT] = {thread < packs, thread + STEP_WARPS * 32 < packs};
        uint4 v[STEP_KEPT], r[STEP_KEPT], g[STEP_KEPT];
#pragma unroll
        for (int i = 0; i < STEP_KEPT; i++) {
            const int pack = thread + i * STEP_WARPS * 32;
            v[i] = r[i] = g[i] = make_uint4(0, 0, 0, 0);
            if (some[i]) g[i] = __ldg(gain + pack);
            if (some[i] && kept) r[i] = held[pack];
        }
        enter();
#pragma unroll
        for (int i = 0; i < STEP_KEPT; i++) {
            const int pack = thread + i * STEP_WARPS * 32;
            if (some[i]) v[i] = __ldcg(x + pack);
            if (some[i] && sums && !kept) r[i] = __ldcg(residual + pack);
        }
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < STEP_KEPT; i++) {
            if (sums) v[i] = step_add8<T>(v[i], r[i]);
            sum += step_squares8<T>(v[i]);
        }
        const float factor = rsqrtf(step_block_sum(sum, &step_shared(*places.sums)) / cols + eps);
#pragma unroll
        for (int i = 0; i < STEP_KEPT; i++) {
            const int pack = thread + i * STEP_WARPS * 32;
            if (!some[i]) continue;
            const uint4 w = step_scale8<T>(v[i], g[i], factor);
            row[pack] = w;
            if (sums) held[pack] = v[i];
            if (pack >= mine.first && pack < mine.end) y[pack] = w;
        }
    }
    /* enter() takes a sum over two GPUs too (step_peer.cuh). */
    template <StepHow HOW, class Enter> __device__ __forceinline__ static void take(const StepProduct &p, const StepPlaces &places, Enter enter)
    {
        if (HOW == HOW_ONE && p.has_norm) one_normalised(p, places, enter);
        else enter();
        if (HOW == HOW_ONE && !p.has_norm) plain(p, places, 1);
        if (HOW == HOW_ANY && p.input.group == 0) p.has_norm ? normalised(p, places) : plain(p, places, (int)p.linear.tokens);
        if (HOW == HOW_FAR) return;
        const int tokens = HOW == HOW_ANY ? (int)p.linear.tokens : 1, thread = step_thread();
        const int used = 2 * (int)p.linear.k, pitch = step_pitch((int)p.linear.k), rest = (step_used((int)p.linear.k) - used) / 16;
        for (int i = thread; i < tokens * rest; i += STEP_WARPS * 32)
            *(uint4 *)(places.x + i / rest * pitch + used + 16 * (i % rest)) = make_uint4(0, 0, 0, 0);
    }
};

/* ---- what becomes of the sums ---- */

/* What the finishing warp needs of a product, in registers: read from the instruction for every tile it
 * would take longer than the tile. */
template <class T> struct StepFinish {
    void *y;
    const T *bias;
    T *act, *k_cache, *v_cache;
    const float *cos_sin; /* shared */
    const int64_t *pages; /* shared */
    const int *positions; /* shared */
    int y_stride, act_stride, half, n, rope_rows, k_row, v_row, kv_heads, dim, dim_v, page;
    bool wide, silu, has_kv;

    __device__ __forceinline__ void begin(const StepProduct &p, const StepPlaces &places)
    {
        y = p.linear.y, bias = (const T *)p.linear.bias;
        y_stride = (int)p.linear.y_stride, half = p.half, n = (int)p.linear.n;
        wide = p.linear.y_dtype == WEFT_F32, silu = p.pairs == PAIRS_SILU, has_kv = p.has_kv != 0;
        act = (T *)p.silu.y, act_stride = (int)p.silu.y_stride;
        cos_sin = places.cos_sin, pages = places.pages, positions = places.positions;
        rope_rows = p.rope_rows, k_row = p.k_row, v_row = p.v_row;
        k_cache = (T *)p.kv.k_cache, v_cache = (T *)p.kv.v_cache;
        kv_heads = (int)p.kv.num_kv_heads, dim = (int)p.kv.head_dim, dim_v = (int)p.kv.head_dim_v, page = (int)p.kv.pages.page_size;
    }
    /* These write, and give what they read back. */
    __device__ __forceinline__ uint32_t plain(int t, int row, float value) const
    {
        if (row >= n) return 0;
        if (bias != nullptr) value += widen(bias[row]);
        const int64_t to = (int64_t)t * y_stride + row;
        if (wide) {
            ((float *)y)[to] = value;
            return step_back((float *)y + to);
        }
        ((T *)y)[to] = narrow<T>(value);
        return step_back((T *)y + to);
    }
    /* One element of k or v into its page. */
    __device__ __forceinline__ uint32_t keep(int64_t place, int row, T value) const
    {
        if (row < k_row || place < 0) return 0;
        const bool is_v = row >= v_row;
        const int wide_of = is_v ? dim_v : dim, at = row - (is_v ? v_row : k_row), head = at / wide_of;
        if (head >= kv_heads) return 0;
        T *to = (is_v ? v_cache : k_cache) + (place + head * page) * wide_of + at - head * wide_of;
        *to = value;
        return step_back(to);
    }
    /* Rows `row` and `row + half` of token t. */
    __device__ __forceinline__ uint32_t pair(int t, int row, float v1, float v2) const
    {
        uint32_t back = 0;
        if (bias != nullptr) v1 += widen(bias[row]), v2 += widen(bias[row + half]);
        T y1 = narrow<T>(v1), y2 = narrow<T>(v2);
        if (silu) {
            const float gate = widen(y1);
            T *to = act + (int64_t)t * act_stride + row;
            *to = narrow<T>(gate / (1.0f + expf(-gate)) * widen(y2));
            back = step_back(to);
        } else {
            if (row < rope_rows && positions[t] >= 0) {
                const int j = row % half;
                const float c = cos_sin[t * 2 * half + j], s = cos_sin[t * 2 * half + half + j], x1 = widen(y1), x2 = widen(y2);
                y1 = narrow<T>(x1 * c - x2 * s), y2 = narrow<T>(x2 * c + x1 * s);
            }
            if (has_kv) {
                const int64_t place = pages[t];
                back |= keep(place, row, y1);
                back |= keep(place, row + half, y2);
            }
        }
        T *to = (T *)y + (int64_t)t * y_stride + row;
        to[0] = y1, to[half] = y2;
        return back | step_back(to) | step_back(to + half);
    }
};

/* ---- the tile ---- */

/* The row of a half that lane group g works on: neighbouring groups read from different banks. */
__device__ __forceinline__ int step_lane_row(int g) { return g >> 1 | (g & 1) << 2; }
/* Of the 64 bytes u of half a piece: `lane_at` is the lane's place in those of u = 0, of the lower rows; the upper ones are 1024
 * bytes behind. */
__device__ __forceinline__ uint32_t step_at(uint32_t lane_at, int u) { return (lane_at ^ (u & 1) * 64) + (u >> 1) * 2048; }

/* A lane's input of half a piece where it is far: asked for before the piece is there. Columns behind k count
 * as zeros. */
template <class T> struct StepFar {
    uint4 b[STEP_HALF / 64];
    /* column: of the lane, in the first read; reads are 32 columns apart */
    __device__ __forceinline__ void ask(const T *x, int column, int k)
    {
#pragma unroll
        for (int i = 0; i < STEP_HALF / 64; i++) {
            const int at = column + 32 * i;
            b[i] = at < k ? __ldcg((const uint4 *)(x + at)) : make_uint4(0, 0, 0, 0);
        }
    }
};

/* Half a piece of 16-bit weights. x: this lane's input at its first column. */
template <class T, bool FAR>
__device__ __forceinline__ void step_piece(float (&c)[2][4], uint32_t w, uint32_t lane_at, uint32_t x, const StepFar<T> &far)
{
#pragma unroll
    for (int u0 = 0; u0 < STEP_HALF / 64; u0 += 4) {
        uint4 a0[4], a1[4], b[4];
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const uint32_t at = w + step_at(lane_at, u0 + u);
            a0[u] = step_read(at), a1[u] = step_read(at + 1024);
            b[u] = FAR ? far.b[u0 + u] : step_read(x + 64 * (u0 + u));
        }
#pragma unroll
        for (int u = 0; u < 4; u++) {
            mma<T>(c[0], a0[u].x, a1[u].x, a0[u].y, a1[u].y, b[u].x, b[u].y);
            mma<T>(c[1], a0[u].z, a1[u].z, a0[u].w, a1[u].w, b[u].z, b[u].w);
        }
    }
}

/* The warp that finishes: every tile of this block. turn: tiles finished before; returns those finished then. */
template <class T> __device__ __noinline__ int step_finish(const StepProduct &p, const StepPlaces &places, const StepRing &ring, int turn)
{
    StepFinish<T> f;
    f.begin(p, places);
    const float *sums_at = places.sums;
    const int lane = threadIdx.x % 32, tokens = (int)p.linear.tokens, tiles = p.tiles, half = p.half;
    for (int tile = step_first_tile(p.first); tile < tiles; tile += gridDim.x, turn++) {
        const int buffer = turn % STEP_SUMS, lower = step_lower(tile, half);
        const float *sums = sums_at + buffer * STEP_WARPS * tokens * 16;
        uint32_t back = 0;
        step_barrier_wait(ring.summed + 8 * buffer, turn / STEP_SUMS % 2, ring);
        if (half == 0) {
            for (int i = lane; i < tokens * 16; i += 32) {
                float sum = 0.0f;
#pragma unroll
                for (int w = 0; w < STEP_WARPS; w++) sum += sums[w * tokens * 16 + i];
                back |= f.plain(i / 16, lower + i % 16, sum);
            }
        } else {
            for (int i = lane; i < tokens * 8; i += 32) {
                const float *from = sums + i / 8 * 16 + i % 8;
                float v1 = 0.0f, v2 = 0.0f;
#pragma unroll
                for (int w = 0; w < STEP_WARPS; w++) v1 += from[w * tokens * 16], v2 += from[w * tokens * 16 + 8];
                back |= f.pair(i / 8, lower + i % 8, v1, v2);
            }
        }
        step_arrived(back, ring.zero);
        barrier_arrive(ring.finished + 8 * buffer);
    }
    return turn;
}

/* The same of one token. All blocks wait for the last tile of the last block, so whatever does not hang on the sums
 * comes before they are there, and what follows is short: code that runs once a tile is not in the instruction caches either.
 * Lane i has row i of the tile, i % 16 of it; lanes from 16 on add up half of the warps' sums. Results are written by two. */
template <class T> __device__ __noinline__ int step_finish_one(const StepProduct &its, const StepPlaces &places, const StepRing &its_ring, int turn)
{
    const StepProduct &p = step_shared(its);
    const StepRing &ring = step_shared(its_ring);
    StepFinish<T> f;
    f.begin(p, places);
    const float *sums_at = &step_shared(*places.sums);
    f.cos_sin = &step_shared(*places.cos_sin), f.pages = &step_shared(*places.pages), f.positions = &step_shared(*places.positions);
    const int lane = threadIdx.x % 32, i = lane % 16, tiles = p.tiles, half = p.half;
    const bool pairs = half != 0, second = pairs && i >= 8;
    uint32_t before = 0; /* what the tile before read back */
    for (int tile = step_first_tile(p.first); tile < tiles; tile += gridDim.x, turn++) {
        const int buffer = turn % STEP_SUMS, lower = step_lower(tile, half), row = pairs ? lower + i % 8 + (second ? half : 0) : lower + i;
        const float *sums = sums_at + (buffer * STEP_WARPS + lane / 16) * 16 + i;
        const bool mine = lane < 16 && row < f.n;
        const float bias = f.bias != nullptr && mine ? widen(f.bias[row]) : 0.0f;
        T *act = f.silu && !second ? f.act + row : nullptr, *cache = nullptr;
        int j = 0;
        if (pairs && !f.silu) {
            j = lower % half + i % 8;
            if (f.has_kv && row >= f.k_row) {
                const bool is_v = row >= f.v_row;
                const int wide_of = is_v ? f.dim_v : f.dim, at = row - (is_v ? f.v_row : f.k_row), head = at / wide_of;
                const int64_t place = f.pages[0];
                if (head < f.kv_heads && place >= 0) {
                    cache = (is_v ? f.v_cache : f.k_cache) + (place + (int64_t)head * f.page) * wide_of + at - head * wide_of;
                    asm volatile("prefetch.global.L2 [%0];" ::"l"(cache)); /* less than a sector is written, so the rest comes from memory */
                }
            }
        }
        const bool turns = pairs && !f.silu && f.positions[0] >= 0 && row - (second ? half : 0) < f.rope_rows;
        float c = 1.0f, s = 0.0f;
        if (turns) c = f.cos_sin[j], s = second ? f.cos_sin[half + j] : -f.cos_sin[half + j];
        step_barrier_wait(ring.summed + 8 * buffer, turn / STEP_SUMS % 2, ring);
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < STEP_WARPS / 2; w++) sum += sums[2 * w * 16];
        sum += __shfl_xor_sync(~0u, sum, 16);
        barrier_arrive(ring.finished + 8 * buffer);
        sum += bias;
        float own = widen(narrow<T>(sum));
        const float other = __shfl_xor_sync(~0u, own, 8);
        uint32_t back = 0;
        const float active = __fdividef(own, 1.0f + __expf(-own)) * other;
        if (turns) own = own * c + other * s;
        const uint32_t both = pair<T>(own, __shfl_down_sync(~0u, own, 1)), both_active = pair<T>(active, __shfl_down_sync(~0u, active, 1));
        if (mine && f.wide) back = step_exchange((float *)f.y + row, __float_as_uint(sum));
        if (mine && i % 2 == 0) {
            if (act != nullptr) back |= step_exchange(act, both_active);
            if (cache != nullptr) back |= step_exchange(cache, both);
            if (!f.wide) back |= step_exchange((T *)f.y + row, both);
        }
        step_arrived(before, ring.zero);
        before = back;
    }
    step_arrived(before, ring.zero);
    return turn;
}

/* The warps that compute: every tile of this block. place: the ring's where its first piece lies. confirm(): until
 * what these warps have written has arrived; before the first tile is left to the warp that finishes. */
template <class T, StepHow HOW, class Confirm>
__device__ __forceinline__ void step_tiles(const StepProduct &p, const StepRing &ring, StepPlace &place, int &turn, const StepPlaces &places, Confirm confirm)
{
    bool confirmed = false;
    constexpr bool FAR = HOW == HOW_FAR;
    const int thread = step_thread(), warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4;
    const int tokens = HOW == HOW_ONE || HOW == HOW_ONE_SUM ? 1 : (int)p.linear.tokens;
    const int pieces = (2 * (int)p.linear.k + STEP_PIECE - 1) / STEP_PIECE, r = step_lane_row(g);
    const uint32_t x = step_anew(shared_address(places.x)) + min(g, tokens - 1) * step_pitch((int)p.linear.k) + 16 * q;
    const int team = warp % STEP_TEAMS, second = warp / STEP_TEAMS;
    const uint32_t lane_at = r * 128 + (q ^ r) * 16 + second * (STEP_HALF / 128) * 2048;
    const uint32_t pieces_at = step_anew(ring.pieces);
    float *const sums = &step_shared(*places.sums);
    for (int tile = step_first_tile(p.first); tile < p.tiles; tile += gridDim.x, turn++) {
        float c[2][4] = {};
        StepPlace mine = place;
        mine.advance(team, ring.places);
        for (int piece = team; piece < pieces; piece += STEP_TEAMS) {
            const int half = 2 * piece + second;
            StepFar<T> far;
            if (FAR) far.ask((const T *)p.linear.x + min(g, tokens - 1) * p.linear.x_stride, half * (STEP_HALF / 2) + 8 * q, (int)p.linear.k);
            step_barrier_wait(ring.full + 8 * mine.slot, mine.parity, ring);
            step_piece<T, FAR>(c, pieces_at + mine.slot * STEP_PIECE_BYTES, lane_at, x + half * STEP_HALF, far);
            __syncwarp();
            if (lane == 0) barrier_arrive(ring.empty + 8 * mine.slot);
            mine.advance(STEP_TEAMS, ring.places);
        }
        place.advance(pieces, ring.places);
        const int buffer = turn % STEP_SUMS;
        float *own = sums + (buffer * STEP_WARPS + warp) * tokens * 16 + r;
        if (!confirmed) confirm(), confirmed = true;
        step_barrier_wait(ring.finished + 8 * buffer, turn / STEP_SUMS % 2 ^ 1, ring);
        if (2 * q < tokens) own[32 * q] = c[0][0] + c[1][0], own[32 * q + 8] = c[0][2] + c[1][2];
        if (2 * q + 1 < tokens) own[32 * q + 16] = c[0][1] + c[1][1], own[32 * q + 24] = c[0][3] + c[1][3];
        barrier_arrive(ring.summed + 8 * buffer);
    }
    if (!confirmed) confirm();
}

#endif

} // namespace weft
