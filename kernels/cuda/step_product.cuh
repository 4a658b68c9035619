/* kernels/cuda/step_product.cuh - one product of the step, as every block does its share of it.
 *
 * The input lies in shared memory, tokens as the tensor cores' columns; warps take turns along k and
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
    float *cos_sin; /* (tokens, head_dim) of this product's tokens */
    float *sums;    /* (STEP_SUMS, warps, tokens, 16) of the warps; or sums over the block */
    int64_t *pages; /* (tokens) where keys go, or -1 */
    int *positions; /* (tokens) or -1 */
};

#ifdef WEFT_HOPPER

enum { STEP_KEPT = 2 }; /* packs of a row that a thread keeps between the sum and the scaling */

/* Packs of 8 elements as the 32-bit words they are: arrays of 16-bit values end up in local memory. */
template <class T> __device__ __forceinline__ uint4 step_add8(uint4 a, uint4 b)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 x = widen_pair<T>((&a.x)[i]), y = widen_pair<T>((&b.x)[i]);
        (&a.x)[i] = pair<T>(x.x + y.x, x.y + y.y);
    }
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
template <class T> __device__ __forceinline__ uint4 step_scale8(uint4 a, uint4 gain, float factor)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 x = widen_pair<T>((&a.x)[i]), g = widen_pair<T>((&gain.x)[i]);
        (&a.x)[i] = pair<T>(x.x * factor * g.x, x.y * factor * g.y);
    }
    return a;
}

/* Bytes between tokens of the input: whole pieces of w, so that what is behind k can be zeros; with 16-bit
 * weights tokens meet no bank twice. */
__device__ __forceinline__ int step_used(int k) { return (2 * k + 1023) / 1024 * 1024; }
__device__ __forceinline__ int step_pitch(int k) { return step_used(k) + 64; }

/* Packs of a row that this block writes for all: [first, end). */
struct StepPacks {
    int first, end;
};
__device__ __forceinline__ StepPacks step_mine(int packs)
{
    return {packs * (int)blockIdx.x / (int)gridDim.x, packs * ((int)blockIdx.x + 1) / (int)gridDim.x};
}

template <class T> struct StepInput {
    __device__ __forceinline__ static void plain(const StepProduct &p, const StepPlaces &places)
    {
        const int packs = (int)p.linear.k / 8, pitch = step_pitch((int)p.linear.k), thread = step_thread();
        for (int t = 0; t < (int)p.linear.tokens; t++)
#pragma unroll 4
            for (int i = thread; i < packs; i += STEP_WARPS * 32)
                *(uint4 *)(places.x + t * pitch + 16 * i) = __ldcg((const uint4 *)((const T *)p.linear.x + t * p.linear.x_stride) + i);
    }
    /* rms_norm of every token by every block; its share of y and of the residual sum is this block's to write. */
    __device__ __forceinline__ static void normalised(const StepProduct &p, const StepPlaces &places)
    {
        const weft_rms_norm_args n = p.norm; /* a copy: writes through pointers do not touch it */
        const int size = n.rows == 1 ? STEP_WARPS * 32 : 32, thread = step_thread(), me = thread % size; /* threads that share a token */
        const int packs = (int)n.cols / 8, pitch = step_pitch((int)n.cols);
        const StepPacks mine = step_mine(packs);
        const bool sums = n.residual != nullptr;
        for (int t = thread / size; t < (int)n.rows; t += STEP_WARPS * 32 / size) {
            uint4 *row = (uint4 *)(places.x + t * pitch), *held = (uint4 *)places.held + t * (mine.end - mine.first) - mine.first;
            const uint4 *x = (const uint4 *)((const T *)n.x + t * n.x_stride), *residual = sums ? (const uint4 *)((const T *)n.residual + t * n.residual_stride) : x;
            const uint4 *gain = (const uint4 *)n.gain;
            uint4 *y = (uint4 *)((T *)n.y + t * n.y_stride);
            uint4 v[STEP_KEPT], r[STEP_KEPT], g[STEP_KEPT];
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < STEP_KEPT; i++) {
                const int pack = min(me + i * size, packs - 1);
                v[i] = __ldcg(x + pack), g[i] = __ldg(gain + pack), r[i] = __ldcg(residual + pack);
            }
#pragma unroll
            for (int i = 0; i < STEP_KEPT; i++) {
                const int pack = me + i * size;
                if (sums) v[i] = step_add8<T>(v[i], r[i]);
                if (pack < packs) sum += step_squares8<T>(v[i]);
                if (sums && pack >= mine.first && pack < mine.end) held[pack] = v[i];
            }
            for (int pack = me + STEP_KEPT * size; pack < packs; pack += size) {
                uint4 w = __ldcg(x + pack);
                if (sums) w = step_add8<T>(w, __ldcg(residual + pack));
                sum += step_squares8<T>(w);
                if (sums && pack >= mine.first && pack < mine.end) held[pack] = w;
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
    __device__ __forceinline__ static void take(const StepProduct &p, const StepPlaces &places)
    {
        if (p.input.group != 0) {} /* step_peer.cuh has done it */
        else if (p.has_norm) normalised(p, places);
        else if (!p.far) plain(p, places);
        const int tokens = (int)p.linear.tokens, thread = step_thread(), warp = thread / 32, lane = thread % 32;
        const int used = 2 * (int)p.linear.k, pitch = step_pitch((int)p.linear.k), rest = p.far ? 0 : (step_used((int)p.linear.k) - used) / 16;
        for (int i = thread; i < tokens * rest; i += STEP_WARPS * 32)
            *(uint4 *)(places.x + i / rest * pitch + used + 16 * (i % rest)) = make_uint4(0, 0, 0, 0);
        if (p.pairs == PAIRS_ROPE)
            for (int t = warp; t < tokens; t += STEP_WARPS) {
                const int position = p.rope.positions[t], dim = (int)p.rope.rotary_dim;
                const bool in = position >= 0 && position < p.rope.max_positions;
                if (lane == 0) places.positions[t] = in ? position : -1;
                for (int i = lane; in && i < dim; i += 32) places.cos_sin[t * dim + i] = __ldg(p.rope.cos_sin + (int64_t)position * dim + i);
            }
        if (p.has_kv && warp == STEP_WARPS - 1)
            for (int t = lane; t < tokens; t += 32) places.pages[t] = place_of(p.kv, t);
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
    __device__ __forceinline__ void plain(int t, int row, float value) const
    {
        if (row >= n) return;
        if (bias != nullptr) value += widen(bias[row]);
        const int64_t to = (int64_t)t * y_stride + row;
        if (wide) ((float *)y)[to] = value;
        else ((T *)y)[to] = narrow<T>(value);
    }
    /* One element of k or v into its page. */
    __device__ __forceinline__ void keep(int64_t place, int row, T value) const
    {
        if (row < k_row || place < 0) return;
        const bool is_v = row >= v_row;
        const int wide_of = is_v ? dim_v : dim, at = row - (is_v ? v_row : k_row), head = at / wide_of;
        if (head < kv_heads) (is_v ? v_cache : k_cache)[(place + head * page) * wide_of + at - head * wide_of] = value;
    }
    /* Rows `row` and `row + half` of token t. */
    __device__ __forceinline__ void pair(int t, int row, float v1, float v2) const
    {
        if (bias != nullptr) v1 += widen(bias[row]), v2 += widen(bias[row + half]);
        T y1 = narrow<T>(v1), y2 = narrow<T>(v2);
        if (silu) {
            const float gate = widen(y1);
            act[(int64_t)t * act_stride + row] = narrow<T>(gate / (1.0f + expf(-gate)) * widen(y2));
        } else {
            if (row < rope_rows && positions[t] >= 0) {
                const int j = row % half;
                const float c = cos_sin[t * 2 * half + j], s = cos_sin[t * 2 * half + half + j], x1 = widen(y1), x2 = widen(y2);
                y1 = narrow<T>(x1 * c - x2 * s), y2 = narrow<T>(x2 * c + x1 * s);
            }
            if (has_kv) {
                const int64_t place = pages[t];
                keep(place, row, y1);
                keep(place, row + half, y2);
            }
        }
        T *to = (T *)y + (int64_t)t * y_stride + row;
        to[0] = y1, to[half] = y2;
    }
};

/* ---- the tile ---- */

/* The row of a half that lane group g works on: neighbouring groups read from different banks. */
__device__ __forceinline__ int step_lane_row(int g) { return g >> 1 | (g & 1) << 2; }
/* Of the 64 bytes u of a piece: `lane_at` is the lane's place in those of u = 0. */
__device__ __forceinline__ uint32_t step_at(uint32_t lane_at, int u) { return (lane_at ^ (u & 1) * 64) + (u >> 1) * 1024; }

/* A lane's input of one piece where it is far: asked for before the piece is there. Columns behind k count
 * as zeros. */
template <class T> struct StepFar {
    uint4 b[STEP_PIECE / 64];
    /* column: of the lane, in the piece's first read; reads are 32 columns apart */
    __device__ __forceinline__ void ask(const T *x, int column, int k)
    {
#pragma unroll
        for (int i = 0; i < STEP_PIECE / 64; i++) {
            const int at = column + 32 * i;
            b[i] = at < k ? __ldcg((const uint4 *)(x + at)) : make_uint4(0, 0, 0, 0);
        }
    }
};

/* One piece of 16-bit weights. x: this lane's input at the piece's first column. */
template <class T, bool FAR>
__device__ __forceinline__ void step_piece(float (&c)[2][4], uint32_t w, uint32_t lane_at, uint32_t x, const StepFar<T> &far)
{
#pragma unroll
    for (int u0 = 0; u0 < STEP_PIECE / 64; u0 += 4) {
        uint4 a0[4], a1[4], b[4];
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const uint32_t at = w + step_at(lane_at, u0 + u);
            a0[u] = step_read(at), a1[u] = step_read(at + STEP_PIECE_BYTES / 2);
            b[u] = FAR ? far.b[u0 + u] : step_read(x + 64 * (u0 + u));
        }
#pragma unroll
        for (int u = 0; u < 4; u++) {
            mma<T>(c[0], a0[u].x, a1[u].x, a0[u].y, a1[u].y, b[u].x, b[u].y);
            mma<T>(c[1], a0[u].z, a1[u].z, a0[u].w, a1[u].w, b[u].z, b[u].w);
        }
    }
}

/* The warp that finishes: every tile of this block. turn: tiles finished before. */
template <class T> __device__ __forceinline__ void step_finish(const StepProduct &p, const StepFinish<T> &f, const StepRing &ring, int &turn, const float *sums_at)
{
    const int lane = threadIdx.x % 32, tokens = (int)p.linear.tokens, tiles = p.tiles, half = p.half;
    for (int tile = step_first_tile(p.first); tile < tiles; tile += gridDim.x, turn++) {
        const int buffer = turn % STEP_SUMS, lower = step_lower(tile, half);
        const float *sums = sums_at + buffer * STEP_WARPS * tokens * 16;
        step_barrier_wait(ring.summed + 8 * buffer, turn / STEP_SUMS % 2, ring);
        if (half == 0) {
            for (int i = lane; i < tokens * 16; i += 32) {
                float sum = 0.0f;
#pragma unroll
                for (int w = 0; w < STEP_WARPS; w++) sum += sums[w * tokens * 16 + i];
                f.plain(i / 16, lower + i % 16, sum);
            }
        } else {
            for (int i = lane; i < tokens * 8; i += 32) {
                const float *from = sums + i / 8 * 16 + i % 8;
                float v1 = 0.0f, v2 = 0.0f;
#pragma unroll
                for (int w = 0; w < STEP_WARPS; w++) v1 += from[w * tokens * 16], v2 += from[w * tokens * 16 + 8];
                f.pair(i / 8, lower + i % 8, v1, v2);
            }
        }
        barrier_arrive(ring.finished + 8 * buffer);
    }
}

/* The warps that compute: every tile of this block. place: the ring's where its first piece lies. */
template <class T, bool FAR>
__device__ __forceinline__ void step_tiles(const StepProduct &p, const StepRing &ring, StepPlace &place, int &turn, const StepPlaces &places)
{
    const int thread = step_thread(), warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4, tokens = (int)p.linear.tokens;
    const int pieces = (2 * (int)p.linear.k + STEP_PIECE - 1) / STEP_PIECE, r = step_lane_row(g);
    const uint32_t x = step_anew(shared_address(places.x)) + min(g, tokens - 1) * step_pitch((int)p.linear.k) + 16 * q;
    const uint32_t lane_at = r * 128 + (q ^ r) * 16;
    const uint32_t pieces_at = step_anew(ring.pieces);
    for (int tile = step_first_tile(p.first); tile < p.tiles; tile += gridDim.x, turn++) {
        float c[2][4] = {};
        StepPlace mine = place;
        mine.advance(warp, ring.places);
        for (int piece = warp; piece < pieces; piece += STEP_WARPS) {
            StepFar<T> far;
            if (FAR) far.ask((const T *)p.linear.x + min(g, tokens - 1) * p.linear.x_stride, piece * (STEP_PIECE / 2) + 8 * q, (int)p.linear.k);
            step_barrier_wait(ring.full + 8 * mine.slot, mine.parity, ring);
            step_piece<T, FAR>(c, pieces_at + mine.slot * STEP_PIECE_BYTES, lane_at, x + piece * STEP_PIECE, far);
            __syncwarp();
            if (lane == 0) barrier_arrive(ring.empty + 8 * mine.slot);
            mine.advance(STEP_WARPS, ring.places);
        }
        place.advance(pieces, ring.places);
        const int buffer = turn % STEP_SUMS;
        float *own = places.sums + (buffer * STEP_WARPS + warp) * tokens * 16 + r;
        step_barrier_wait(ring.finished + 8 * buffer, turn / STEP_SUMS % 2 ^ 1, ring);
        if (2 * q < tokens) own[32 * q] = c[0][0] + c[1][0], own[32 * q + 8] = c[0][2] + c[1][2];
        if (2 * q + 1 < tokens) own[32 * q + 16] = c[0][1] + c[1][1], own[32 * q + 24] = c[0][3] + c[1][3];
        barrier_arrive(ring.summed + 8 * buffer);
    }
}

#endif

} // namespace weft
