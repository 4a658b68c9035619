/* kernels/cuda/experts_fp8.cu - the experts of up to 8 tokens, e4m3 weights, on Hopper (fp8.cuh): two launches.
 *
 *     up     act[pair] = silu(gate x) * (up x)      items: (expert, 8 rows of gate and the same of up)
 *     down   y[token] = sum of weight * down act    items: 8 rows of all experts, one behind the other
 *
 * Each block finds out by itself which experts have tokens. Every weight is read once, whatever the number of
 * tokens. Where there is room one block of each kernel fits on a multiprocessor: then `down` has its first weights
 * in shared memory when `up` has ended. A piece of `down` is 8 rows of twice as many columns as one of `up`. */
#include "kernels/cuda/experts_chosen.cuh"
#include "kernels/cuda/fp8_stream.cuh"
#include "kernels/cuda/tensor_map.cuh"

namespace weft {

enum {
    EX_GROUPS = 4, /* warpgroups that multiply; two warps more feed them */
    EX_WARPS = EX_GROUPS * 4,
    EX_THREADS = EX_GROUPS * 128,
    EX_PLACES = 12, /* of a ring, at most */
    EX_LEAST = 4,
    /* Of up to EX_MEET tokens a block of `up` lets `down` come when it has so many pieces left to ask for: sooner, the weights of `down` would hold up its own;
     * where they do not meet, the sooner the better. */
    EX_MEET = 2,
    EX_LEFT = 8,
    EX_WIDE = 2 * FP8_SEGMENTS,             /* segments in a piece of `down` */
    EX_ACT_BYTES = 2 * FP8_INPUT_BYTES      /* of a pair in such a piece: 16 rows of 128 bytes */
};

/* Shared memory besides the rings, bytes. */
static int64_t up_input(const weft_experts_args *a)
{
    return fp8_padded(a->tokens) * (int64_t)fp8_pieces(a->hidden) * (FP8_INPUT_BYTES + FP8_SEGMENTS * 4);
}
static __host__ __device__ int wide_pieces(int64_t columns) { return (int)((columns + EX_WIDE * 128 - 1) / (EX_WIDE * 128)); }
/* One pair more: they are multiplied two at a time. */
static int64_t down_input(const weft_experts_args *a)
{
    return (a->tokens * a->top_k + 1) * wide_pieces(a->intermediate) * (int64_t)(EX_ACT_BYTES + EX_WIDE * 4);
}

#ifdef WEFT_HOPPER

template <int TOKENS> struct UpShared {
    Fp8Places places;
    unsigned long long known; /* barrier: which experts they are, where the feeder's warp finds out */
    Chosen chosen;
    Fp8Sums<TOKENS, EX_GROUPS> sums[2];
};

/* The scales of all items, (expert, tile), tile after tile. hint: the scale rows of entries lane and lane + 32 of the first. */
__device__ __forceinline__ void up_hints(const weft_experts_args &a, int item, int tiles, int (&hint)[2])
{
    const int width = (int)a.intermediate, row = item % tiles * 8 + threadIdx.x % 32 / 4, last = 2 * width - 1;
    hint[0] = __ldg(a.up.scale_row + min(row, last)), hint[1] = __ldg(a.up.scale_row + min(row + width, last));
}
__device__ __forceinline__ void up_scales(const weft_experts_args &a, const Chosen &chosen, Fp8Ring &ring, int tiles, int (&hint)[2])
{
    const int pieces = fp8_pieces(a.hidden), items = chosen.count * tiles, segment = threadIdx.x % FP8_SEGMENTS, count = (int)a.hidden / 128;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const float *at[2];
        for (int h = 0; h < 2; h++) at[h] = scales_of(a.up, chosen.expert[item / tiles], hint[h]) + segment;
        up_hints(a, item + gridDim.x, tiles, hint);
        for (int piece = 0; piece < pieces; piece++)
            ring.bring_scales(a.up.scale, [&](int h) { return piece * FP8_SEGMENTS + segment < count ? at[h] + piece * FP8_SEGMENTS : nullptr; });
    }
}

#endif

template <int TOKENS> __global__ void __launch_bounds__(EX_THREADS + 64, TOKENS == 1 ? 2 : 1) fp8_up(const __grid_constant__ CUtensorMap map, const weft_experts_args a, float *act, int places)
{
#ifdef WEFT_HOPPER
    extern __shared__ __align__(1024) char data[];
    __shared__ UpShared<TOKENS> s;
    const int pieces = fp8_pieces(a.hidden), width = (int)a.intermediate, tiles = (width + 7) / 8, tokens = (int)a.tokens;
    Fp8Ring ring(data, s.places, places);
    const uint32_t known = shared_address(&s.known);
    if (threadIdx.x == 0) {
        barrier_init(known, 32);
        ring.init();
    }
    __syncthreads();
    const bool alone = one_chooses(a); /* then the feeder's warp does it, beside the others */
    char *input = data + places * FP8_PIECE_BYTES;
    float *factors = (float *)(input + TOKENS * pieces * FP8_INPUT_BYTES);
    int hint[2]; /* of the warp that brings scales, whatever is chosen */
    if (threadIdx.x >= EX_THREADS + 32) up_hints(a, blockIdx.x, tiles, hint);
    if (threadIdx.x == EX_THREADS) map_prefetch(&map);
    dependency_wait_only();
    if (TOKENS > EX_MEET) dependency_release();
    if (!alone) choose_experts(a, s.chosen);
    if (threadIdx.x >= EX_THREADS + 32) {
        if (alone) barrier_wait(known, 0);
        up_scales(a, s.chosen, ring, tiles, hint);
        return;
    }
    if (threadIdx.x >= EX_THREADS) {
        if (alone) {
            choose_of_one(a, s.chosen, false);
            __syncwarp();
            barrier_arrive(known);
        }
        if (threadIdx.x != EX_THREADS) return;
        const int items = s.chosen.count * tiles;
        const uint64_t policy = streamed();
        int left = items > (int)blockIdx.x ? ((items - 1 - (int)blockIdx.x) / (int)gridDim.x + 1) * pieces : 0;
        if (TOKENS <= EX_MEET && left <= EX_LEFT) dependency_release();
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            const int block = s.chosen.expert[item / tiles] * 2, low = item % tiles * 8;
            for (int piece = 0; piece < pieces; piece++) {
                uint32_t to, barrier;
                ring.claim(to, barrier, FP8_PIECE_BYTES);
                fp8_copy_two(to, &map, low, piece * FP8_SEGMENTS, block, barrier, policy);
                if (--left == EX_LEFT && TOKENS <= EX_MEET) dependency_release();
            }
        }
        return;
    }
    const Fp8Input<TOKENS, EX_GROUPS> in(input, factors, tokens, (int)a.hidden);
    in.ask(a.x, a.x_stride);
    in.arrived();
    in.split(a.quantize, [](uint4 &, int, int) {});
    if (alone) barrier_wait(known, 0);
    const int items = s.chosen.count * tiles;
    Fp8Walk<TOKENS, EX_GROUPS> walk(ring, pieces, input, factors);
    const int t = threadIdx.x / 8, r = threadIdx.x % 8;
    int side = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x, side ^= 1) {
        float sum[TOKENS];
        walk.item(sum);
        s.sums[side].put(sum, walk.own);
        named_sync(1, EX_THREADS);
        const int slot = item / tiles, row = item % tiles * 8 + r;
        if (t < tokens && row < width && s.chosen.tokens[slot] >> t & 1) {
            const float gate = s.sums[side].of(r, t), up = s.sums[side].of(8 + r, t);
            act[(int64_t)s.chosen.pair[slot][t] * width + row] = gate / (1.0f + expf(-gate)) * up;
        }
    }
#endif
}

#ifdef WEFT_HOPPER

template <int TOKENS> struct DownShared {
    Fp8Places places;
    Chosen chosen;
    int here;                     /* pairs */
    uint16_t place[CHOSEN_PAIRS]; /* of a slot's first pair among all that are here */
    uint16_t order[CHOSEN_PAIRS]; /* these: F8_TOKENS * slot + token */
    float sums[2][EX_WARPS][TOKENS][8];
};

/* A lane of a piece of `down`: Fp8Lane with the second halves of its rows as more segments. */
struct DownLane {
    int segment, row; /* in a piece; in an item */
    bool used, second, odd;
    __device__ __forceinline__ DownLane()
        : segment(threadIdx.x / 64 % 2 * FP8_SEGMENTS + threadIdx.x % 4), row(threadIdx.x % 32 / 4), used(Fp8Lane(threadIdx.x).used),
          second(segment >= FP8_SEGMENTS), odd(segment % 2)
    {
    }
    /* Where among a piece's scales that of the lane is. */
    __device__ __forceinline__ int entry() const { return segment / FP8_SEGMENTS * 32 + 4 * row + segment % FP8_SEGMENTS; }
    /* d: eight of a pair. */
    __device__ __forceinline__ float sum(const float *d) const
    {
        const float first = second ? odd ? d[6] : d[4] : odd ? d[2] : d[0], finer = second ? odd ? d[7] : d[5] : odd ? d[3] : d[1];
        return fmaf(finer, 0.0625f, first);
    }
};

/* The scales of all items. */
__device__ __forceinline__ void down_scales(const weft_experts_args &a, const Chosen &chosen, Fp8Ring &ring, int tiles, int pieces)
{
    const int lane = threadIdx.x % 32, each = wide_pieces(a.intermediate), last = (int)a.hidden - 1, count = (int)a.intermediate / 128;
    const int expert_scales = (int)(a.down.scale_rows * a.down.scale_stride);
    int hint = __ldg(a.down.scale_row + min((int)blockIdx.x * 8 + lane / 4, last));
    for (int item = blockIdx.x; item < tiles; item += gridDim.x) {
        const float *row = scales_of(a.down, 0, hint);
        hint = __ldg(a.down.scale_row + min((item + (int)gridDim.x) * 8 + lane / 4, last));
        for (int piece = 0; piece < pieces; piece++) {
            const int slot = each == 1 ? piece : piece / each, part = (piece - slot * each) * EX_WIDE + lane % FP8_SEGMENTS;
            const float *at = row + (int64_t)chosen.expert[slot] * expert_scales + part;
            ring.bring_scales(a.down.scale, [&](int h) { return part + FP8_SEGMENTS * h < count ? at + FP8_SEGMENTS * h : nullptr; });
        }
    }
}

/* The pairs that are here, by expert. A thread for each slot. */
template <int TOKENS> __device__ __forceinline__ void order_pairs(DownShared<TOKENS> &s)
{
    const int slot = threadIdx.x;
    if (slot >= s.chosen.count) return;
    int at = 0;
    for (int i = 0; i < slot; i++) at += __popc(s.chosen.tokens[i]);
    s.place[slot] = (uint16_t)at;
    for (unsigned rest = s.chosen.tokens[slot]; rest != 0; rest &= rest - 1) s.order[at++] = (uint16_t)(F8_TOKENS * slot + __ffs(rest) - 1);
    if (slot == s.chosen.count - 1) s.here = at;
}

/* What `up` has left, in parts: of each piece of an expert its pairs one behind the other. */
template <int TOKENS> __device__ __forceinline__ void split_act(const weft_experts_args &a, const float *act, const DownShared<TOKENS> &s, char *input, float *factors)
{
    enum { AT_ONCE = 4, STEP = EX_WARPS };
    /* A warp takes two segments of a pair, or one and nothing. */
    const int lane = threadIdx.x % 16, side = threadIdx.x / 16 % 2, each = wide_pieces(a.intermediate), width = (int)a.intermediate;
    const int twos = (width / 128 + 1) / 2, all = s.chosen.count > 0 ? s.here * twos : 0;
    for (int item0 = threadIdx.x / 32; item0 < all; item0 += AT_ONCE * STEP) {
        float4 low[AT_ONCE], high[AT_ONCE];
        int pair[AT_ONCE], to[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const bool in = item0 + i * STEP < all; /* else nothing is read: all blocks would read the same */
            const int item = in ? item0 + i * STEP : 0, at = item / twos, segment = item % twos * 2 + side, slot = s.order[at] / F8_TOKENS;
            const int count = __popc(s.chosen.tokens[slot]), first = s.place[slot];
            pair[i] = s.chosen.pair[slot][s.order[at] % F8_TOKENS];
            to[i] = ((first * each + segment / EX_WIDE * count + at - first) * EX_WIDE) + segment % EX_WIDE;
            const float4 *from = (const float4 *)(act + (int64_t)pair[i] * width + segment * 128 + 8 * lane), zero = make_float4(0, 0, 0, 0);
            low[i] = in && segment * 128 < width ? __ldcg(from) : zero, high[i] = in && segment * 128 < width ? __ldcg(from + 1) : zero;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (item0 + i * STEP >= all) break;
            float v[8] = {low[i].x, low[i].y, low[i].z, low[i].w, high[i].x, high[i].y, high[i].z, high[i].w};
            uint2 part, finer;
            const float by = fp8_split(v, a.quantize, part, finer);
            fp8_put(input + to[i] / EX_WIDE * EX_ACT_BYTES, to[i] % EX_WIDE, part, finer);
            if (lane == 0) factors[to[i]] = by * s.chosen.weight[pair[i]];
        }
    }
    writes_visible();
}

#endif

template <int TOKENS> __global__ void __launch_bounds__(EX_THREADS + 64, TOKENS == 1 ? 2 : 1) fp8_down(const __grid_constant__ CUtensorMap map, const weft_experts_args a, const float *act, int places)
{
#ifdef WEFT_HOPPER
    extern __shared__ __align__(1024) char data[];
    __shared__ DownShared<TOKENS> s;
    const int hidden = (int)a.hidden, tiles = (hidden + 7) / 8, tokens = (int)a.tokens, segments = (int)a.intermediate / 128;
    Fp8Ring ring(data, s.places, places);
    if (threadIdx.x == 0) ring.init();
    /* `up` has waited for the kernels in front of it before it let this one start: the choice is there. */
    choose_experts(a, s.chosen);
    const int each = wide_pieces(a.intermediate), pieces = s.chosen.count * each;
    if (threadIdx.x >= EX_THREADS) {
        if (threadIdx.x >= EX_THREADS + 32) down_scales(a, s.chosen, ring, tiles, pieces);
        if (threadIdx.x != EX_THREADS) return;
        const uint64_t policy = streamed();
        for (int item = blockIdx.x; item < tiles; item += gridDim.x)
            for (int piece = 0; piece < pieces; piece++) {
                uint32_t to, barrier;
                ring.claim(to, barrier, min(segments, (int)EX_WIDE) * 1024);
                fp8_copy(to, &map, s.chosen.expert[piece / each] * hidden + item * 8, piece % each * EX_WIDE, barrier, policy);
            }
        return;
    }
    order_pairs(s);
    char *input = data + places * FP8_PIECE_BYTES;
    float *factors = (float *)(input + (tokens * (int)a.top_k + 1) * each * EX_ACT_BYTES);
    const DownLane own;
    dependency_wait();
    named_sync(1, EX_THREADS);
    split_act(a, act, s, input, factors);
    named_sync(1, EX_THREADS);
    const uint32_t x = fp8_low(shared_address(input)), w = fp8_low(ring.data);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = threadIdx.x / 8, r = threadIdx.x % 8;
    Fp8Place mine = {0, 0};
    int side = 0, piece = fp8_group();
    mine.advance(piece, places);
    for (int item = blockIdx.x; item < tiles; item += gridDim.x, side ^= 1) {
        float sum[TOKENS] = {};
        auto one = [&] {
            enum { AT_ONCE = TOKENS == 1 ? 1 : 2 };
            const int slot = each == 1 ? piece : piece / each, part = piece - slot * each;
            unsigned rest = TOKENS == 1 ? 1u : s.chosen.tokens[slot];
            const int count = TOKENS == 1 ? 1 : __popc(rest);
            int at = TOKENS == 1 ? piece : s.place[slot] * each + part * count;
            const bool there = (part * EX_WIDE + own.segment) * 128 < (int)a.intermediate;
            barrier_wait(ring.full + 8 * mine.slot, mine.parity);
            const float scale = s.places.scales[mine.slot][own.entry()];
            for (int j = 0; j < count; j += AT_ONCE, at += AT_ONCE) {
                float d[8 * AT_ONCE], f[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) f[i] = factors[(at + i) * EX_WIDE + own.segment];
                fp8_multiply<16 * AT_ONCE>(d, w + mine.slot * (FP8_PIECE_BYTES / 16), x + at * (EX_ACT_BYTES / 16), fp8_high(1024));
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    const float y = there && rest != 0 ? scale * f[i] * own.sum(d + 8 * i) : 0.0f;
                    if (TOKENS == 1) sum[0] += y;
                    else
#pragma unroll
                        for (int k = 0; k < TOKENS; k++) sum[k] += (rest & -rest) == 1u << k ? y : 0.0f;
                    rest &= rest - 1;
                }
            }
            barrier_arrive(ring.empty + 8 * mine.slot);
            mine.advance(EX_GROUPS, places);
        };
        for (; piece < pieces; piece += EX_GROUPS) one();
        piece -= pieces;
#pragma unroll
        for (int k = 0; k < TOKENS; k++) {
            const float both = sum[k] + __shfl_xor_sync(~0u, sum[k], 1);
            if (own.used && lane % 2 == 0) s.sums[side][warp][k][lane / 4] = both;
        }
        named_sync(1, EX_THREADS);
        if (t >= tokens || item * 8 + r >= hidden) continue;
        float y = 0.0f;
#pragma unroll
        for (int i = 0; i < EX_WARPS; i++) y += s.sums[side][i][t][r];
        store(a.y, a.y_dtype, t * a.y_stride + item * 8 + r, y);
    }
#endif
}

/* ---- host side ---- */

struct Places {
    int up, down;
};
/* Both kernels on a multiprocessor, or each alone; none: they do not fit. */
static Places places_of(const weft_experts_args *a)
{
    const int64_t fixed = (int64_t)(15 + fp8_padded(a->tokens)) << 10, room = a->cuda->shared + (1 << 10), up = up_input(a) + fixed, down = down_input(a) + fixed;
    const int both = fp8_places((room - up - down) / 2, EX_PLACES, EX_GROUPS);
    if (both >= EX_LEAST) return {both, fp8_places(room - up - down - both * (int64_t)FP8_PIECE_BYTES, EX_PLACES, EX_GROUPS)};
    const Places alone = {fp8_places(a->cuda->shared - up, EX_PLACES, EX_GROUPS), fp8_places(a->cuda->shared - down, EX_PLACES, EX_GROUPS)};
    return alone.up >= EX_LEAST && alone.down >= EX_LEAST ? alone : Places{0, 0};
}

static bool fits(const weft_experts_args *a)
{
#ifdef WEFT_CUDA_HOPPER
    if (a->cuda == NULL || !a->cuda->hopper || a->w_dtype != WEFT_F8E4M3 || a->x_dtype != WEFT_BF16) return false;
    if (a->tokens > F8_TOKENS || a->tokens * a->top_k > CHOSEN_PAIRS || a->count == 0 || a->intermediate == 0) return false;
    if ((a->hidden | a->intermediate | a->up.scale_col_phase | a->down.scale_col_phase) % 128 != 0 || a->x_stride % 8 != 0) return false;
    if (!aligned(a->x, 16) || !aligned(a->up.w, 16) || !aligned(a->down.w, 16) || a->hidden > 65536 || a->intermediate > 65536) return false;
    if (a->count * most(2 * a->intermediate, a->hidden) >= (int64_t)1 << 30) return false;
    return places_of(a).up > 0;
#else
    return false;
#endif
}

template <int TOKENS> static void start(const CUtensorMap &up, const CUtensorMap &down, const weft_experts_args *a, float *act, void *stream)
{
    const Places places = places_of(a);
    const size_t up_bytes = (size_t)(places.up * (int64_t)FP8_PIECE_BYTES + up_input(a)), down_bytes = (size_t)(places.down * (int64_t)FP8_PIECE_BYTES + down_input(a));
    (void)cudaFuncSetAttribute(fp8_up<TOKENS>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)up_bytes);
    (void)cudaFuncSetAttribute(fp8_down<TOKENS>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)down_bytes);
    /* Else a multiprocessor gives `up` no more than it needs, and `down` cannot come before it has ended. */
    (void)cudaFuncSetAttribute(fp8_up<TOKENS>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    (void)cudaFuncSetAttribute(fp8_down<TOKENS>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    launch(fp8_up<TOKENS>, (unsigned)a->cuda->sms, EX_THREADS + 64, up_bytes, stream, up, *a, act, places.up);
    launch(fp8_down<TOKENS>, (unsigned)least(a->cuda->sms, div_up(a->hidden, 8)), EX_THREADS + 64, down_bytes, stream, down, *a, (const float *)act, places.down);
}

bool fp8_experts(const weft_experts_args *a, float *act, void *stream)
{
    CUtensorMap up, down;
    const int64_t wide = least(EX_WIDE, a->intermediate / 128);
    if (!fits(a) || !pairs_map(&up, a->up.w, a->count * 2 * a->intermediate, a->hidden, a->hidden, a->intermediate, FP8_SEGMENTS) ||
        !rows_map(&down, a->down.w, a->count * a->hidden, a->intermediate, a->intermediate, (int)wide))
        return false;
    switch (fp8_padded(a->tokens)) {
    case 1: start<1>(up, down, a, act, stream); break;
    case 2: start<2>(up, down, a, act, stream); break;
    case 4: start<4>(up, down, a, act, stream); break;
    default: start<8>(up, down, a, act, stream);
    }
    return true;
}

} // namespace weft
