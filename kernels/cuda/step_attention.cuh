/* kernels/cuda/step_attention.cuh - decode attention in a step: parts of the keys to the blocks, and how their sums come together. */
#pragma once

#include "kernels/cuda/step_block.cuh"

namespace weft {

#ifdef WEFT_HOPPER

/* ByLast without fences. */
template <class T> struct StepJoin {
    enum { FEW = 16 };
    const weft_attention_args &a;
    const Split &split;
    typename ByLast<T, 1, STEP_WARPS>::Shared &shared;
    uint32_t zero;
    __device__ __forceinline__ void leave(int) const {}
    __device__ __forceinline__ void keep(int64_t item, int part, int row, int d, float2 values, float2 stats) const
    {
        const int64_t at = (item * split.splits + part) * 8 + row;
        float2 *to = (float2 *)&split.partial[at * a.head_dim_v + d];
        uint32_t of_stats = 0;
        *to = values;
        if (d == 0) split.stats[at] = stats, of_stats = step_back(&split.stats[at].y);
        arrived(step_back(&to->y) | of_stats);
    }
    __device__ __forceinline__ void merge(const Place &p, int64_t item, int, int splits) const
    {
        step_sync();
        if (threadIdx.x == 0) { /* back to zero with the last one */
            unsigned before;
            asm volatile("atom.inc.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(&split.counters[item]), "r"((unsigned)splits - 1) : "memory");
            shared.last = before == (unsigned)splits - 1;
        }
        step_sync();
        if (!shared.last) return;
        if (splits <= FEW) merge_few(p, item, splits);
        else merge_splits<T, 8, STEP_WARPS>(a, split, p, item, splits, shared.weights, shared.sums, *this);
    }
    /* merge_splits() with everything on its way at once. */
    __device__ __forceinline__ void merge_few(const Place &p, int64_t item, int splits) const
    {
        const int twos = a.head_dim_v / 2;
        const float2 *stats_at = split.stats + item * split.splits * 8;
        const float *partial = split.partial + item * split.splits * 8 * a.head_dim_v;
        for (int i = threadIdx.x; i < p.rows * twos; i += STEP_THREADS) {
            const int row = i / twos, d = i % twos * 2;
            float2 stats[FEW], values[FEW];
#pragma unroll
            for (int s = 0; s < FEW; s++) {
                stats[s] = s < splits ? __ldcg(stats_at + s * 8 + row) : make_float2(minus_inf(), 0.0f);
                values[s] = s < splits ? __ldcg((const float2 *)&partial[(s * 8 + row) * a.head_dim_v + d]) : make_float2(0.0f, 0.0f);
            }
            arrived(put_joined<T>(a, p, row, d, stats, values, *this));
        }
    }
    template <class To> __device__ __forceinline__ uint32_t back(const To *to) const { return step_back(to); }
    __device__ __forceinline__ void arrived(uint32_t back) const { step_arrived(back, zero); }
};

/* Not inlined, as the small operations: their registers are not the products'. */
template <class T> __device__ __noinline__ void step_attention(StepFixed &fixed, const StepInstruction &in)
{
    const weft_attention_args &a = in.attention;
    StepAttention<T> &s = *(StepAttention<T> *)fixed.places.x;
    Split split;
    split.row_tiles = in.row_tiles, split.splits = in.parts;
    split.counters = fixed.program.counters;
    split.stats = (float2 *)fixed.program.partial;
    split.partial = (float *)(split.stats + (int64_t)a.requests * a.num_kv_heads * in.row_tiles * in.parts * 8);
    const int jobs = (int)a.requests * a.num_kv_heads * in.row_tiles * in.parts;
    bool entered = false;
    auto enter = [&] {
        if (!entered) step_enter(fixed, in);
        entered = true;
        /* Keys may share a sector with what was read before: nothing of it is to come from the L1. */
        if (a.keys == WEFT_KEYS_NEW || (a.head_dim | a.head_dim_v) % 16 != 0) step_forget(fixed);
    };
    for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
        const int part = job % in.parts, item = job / in.parts, tile = item % in.row_tiles, head = item / in.row_tiles % a.num_kv_heads;
        if (job != (int)blockIdx.x) step_sync();
        attend_split<T, STEP_HEAD_DIM, 1, STEP_WARPS>(a, split, tile, part, head, item / in.row_tiles / a.num_kv_heads, s.warps, true, enter,
                                                      StepJoin<T>{a, split, s.last, fixed.ring.zero});
    }
    enter();
    bool padding = false;
    for (int64_t t = a.query_start_loc[a.requests] + blockIdx.x; t < a.tokens; t += gridDim.x) {
        for (int i = threadIdx.x; i < a.num_heads * a.head_dim_v; i += STEP_THREADS) ((T *)a.out)[t * a.out_stride + i] = narrow<T>(0.0f);
        for (int h = threadIdx.x; a.lse != nullptr && h < a.num_heads; h += STEP_THREADS) a.lse[t * a.num_heads + h] = minus_inf();
        padding = true;
    }
    if (padding) __threadfence();
}

/* The part of this block, from what the host has written; what depends on the keys' place alone, and so serves every layer of a
 * step. By all lanes of a warp. */
static __device__ __noinline__ void step_find_part(const weft_attention_args &a, int parts, StepPart &to)
{
    const KeyRange keys = keys_of(a, 0);
    StepPart p;
    visible(a, keys, 0, p.low, p.high);
    const int from = p.low / KEYS * KEYS, step = KEYS * STEP_WARPS, warp = step_thread() / 32;
    p.splits = max(1, (p.high - from + step - 1) / step);
    p.part = blockIdx.x % parts, p.head = blockIdx.x / parts, p.first_head = 0;
    p.rows = p.head < a.num_kv_heads && p.part < p.splits ? heads_of(a, p.head, p.first_head) : 0;
    p.key = from + p.part * step + warp * KEYS;
    p.left = min(p.high, from + (p.part + 1) * step) - p.key;
    p.old = min(p.left, page_local_len(a.pages, keys.first_position) - p.key);
    p.row = -1;
    if (p.splits <= parts && p.rows > 0 && p.left > 0) {
        Walk walk;
        walk.begin(a, 0, p.key, step);
        p.row = walk.row(a, p.head, 0);
    }
    if (threadIdx.x % 32 == 0) to = p;
    __syncwarp();
}

/* 16 bytes of a warp's values in shared memory: of key `row`, in an order in which lanes do not meet in banks. */
__device__ __forceinline__ uint32_t step_value(uint32_t values, int row, int pack) { return values + row * 256 + (pack ^ (row >> 1 & 3) * 2) * 16; }
/* Values of the warp's keys [from, count) there, and zeros for those from `rest` on. */
template <int DIM, class T> __device__ __forceinline__ void step_values(uint32_t values, const T *v, int from, int count, int rest)
{
    static_assert(DIM == 128, "16 packs of a key");
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const int i = (int)threadIdx.x % 32 + 32 * n, row = i / 16, pack = i % 16;
        const bool in = row >= from && row < count;
        if (in || row >= rest)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(step_value(values, row, pack)), "l"(v + (in ? row * DIM + 8 * pack : 0)), "r"(in ? 16 : 0) : "memory");
    }
}

/* What another part of the item has sent: two numbers, each with the flag of this instruction. */
__device__ __forceinline__ void step_send(uint4 *to, float x, float y, unsigned flag)
{
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(to), "r"(__float_as_uint(x)), "r"(flag), "r"(__float_as_uint(y)) : "memory");
}
__device__ __forceinline__ bool step_came(const uint4 *from, float2 &v, unsigned flag)
{
    uint4 p;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(p.x), "=r"(p.y), "=r"(p.z), "=r"(p.w) : "l"(from) : "memory");
    v = make_float2(__uint_as_float(p.x), __uint_as_float(p.z));
    return p.y == flag && p.w == flag;
}

/* What the parts of a KV head have of 32 pairs of values, a pair a lane: statistics of its row, then the pair. Pairs are those
 * that this block puts together: shares w of 32, w % min(splits, warps) == part, of every STEP_THREADS pairs. */
struct StepMeeting {
    int shares, turns; /* of this block; times that STEP_THREADS pairs go into all rows */
    __device__ __forceinline__ StepMeeting(const StepPart &p)
    {
        const int apart = min(p.splits, (int)STEP_WARPS);
        shares = p.part < apart ? (STEP_WARPS - 1 - p.part) / apart + 1 : 0, turns = (p.rows * (STEP_HEAD_DIM / 2) + STEP_THREADS - 1) / STEP_THREADS;
    }
    /* The same for all blocks: by the most rows that a KV head may have. Not for more than 65 parts (8320 keys) of 4 rows, 32 of 8: those
     * are left to step_attention(). */
    __device__ __forceinline__ static bool has_room(const weft_attention_args &a, int splits)
    {
        const int turns = ((int)min((int64_t)a.group_size, (int64_t)a.num_heads) * (STEP_HEAD_DIM / 2) + STEP_THREADS - 1) / STEP_THREADS;
        const int apart = min(splits, (int)STEP_WARPS), shares = (STEP_WARPS - 1) / apart + 1;
        return turns * shares * splits * 32 * (int)sizeof(float4) <= (int)sizeof(Joined<STEP_HEAD_DIM, 1, STEP_WARPS>::out);
    }
    /* The first pair of place n. */
    __device__ __forceinline__ static int pair_of(const StepPart &p, int n, int shares)
    {
        return n / shares * STEP_THREADS + (p.part + n % shares * min(p.splits, (int)STEP_WARPS)) * 32;
    }
};

/* The packets of the other parts into shared memory, where a place has 32 numbers of each part; a warp for each. */
__device__ __forceinline__ void step_collect(const StepFixed &fixed, const StepPart &p, const StepMeeting &m, float4 *meet, const uint4 *packets, int stride, unsigned flag)
{
    const int lane = step_thread() % 32, count = m.shares * m.turns * p.splits;
    for (int n = step_thread() / 32; n < count; n += STEP_WARPS) {
        const int part = n % p.splits, i = StepMeeting::pair_of(p, n / p.splits, m.shares) + lane, row = i / (STEP_HEAD_DIM / 2), two = i % (STEP_HEAD_DIM / 2);
        if (part == p.part || row >= p.rows) continue;
        const uint4 *from = packets + part * stride + row * (STEP_HEAD_DIM / 2 + 2);
        float2 stats, y;
        uint64_t since = 0;
        for (int turn = 1; !(step_came(from + STEP_HEAD_DIM / 2 + two / 32, stats, flag) & step_came(from + two, y, flag)); turn++)
            if (turn % (1 << 12) == 0) since = step_waited(since, fixed.program.patience);
        meet[n * 32 + lane] = make_float4(stats.x, stats.y, y.x, y.y);
    }
}

/* The sum of the parts of one pair, which lie 32 apart. */
__device__ __forceinline__ float4 step_joined(const float4 *meet, int splits)
{
    enum { AT_ONCE = 8 };
    float4 all = make_float4(minus_inf(), 0.0f, 0.0f, 0.0f);
    for (int first = 0; first < splits; first += AT_ONCE) {
        float4 v[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) v[n] = first + n < splits ? meet[(first + n) * 32] : make_float4(minus_inf(), 0.0f, 0.0f, 0.0f);
        float max = all.x;
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) max = fmaxf(max, v[n].x);
        const float base = max == minus_inf() ? 0.0f : max, kept = exp2f(all.x - base);
        all = make_float4(max, all.y * kept, all.z * kept, all.w * kept);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const float by = exp2f(v[n].x - base);
            all.y += by * v[n].y, all.z += by * v[n].z, all.w += by * v[n].w;
        }
    }
    return all;
}

/* What the warp will read of the cache that this product adds to, into the L2, a line a lane: asked for while the blocks have weights to
 * multiply, and there when they wait for one another. */
__device__ __forceinline__ void step_fetch(const StepFixed &fixed, const weft_kv_write_args &kv)
{
    const StepPart &p = fixed.parts[step_thread() / 32];
    const int at = step_thread() % 32 * 64; /* elements */
    if (p.row < 0 || at >= min(p.old, (int)KEYS) * STEP_HEAD_DIM) return;
    asm volatile("prefetch.global.L2 [%0];" ::"l"((const uint16_t *)kv.k_cache + p.row * STEP_HEAD_DIM + at));
    asm volatile("prefetch.global.L2 [%0];" ::"l"((const uint16_t *)kv.v_cache + p.row * STEP_HEAD_DIM + at));
}

/* Attention of one token with 128 dims, by parts of up to 16 keys a warp. Everybody waits for it, so it is short, and the
 * parts of a KV head give one another their sums in packets that say themselves when they are there. False: nothing is done. */
template <class T> __device__ __noinline__ bool step_attend_few(StepFixed &its_fixed, const StepInstruction &its_in)
{
    StepFixed &fixed = step_shared(its_fixed);
    const StepInstruction &in = step_shared(its_in);
    constexpr int DIM = STEP_HEAD_DIM, TWOS = DIM / 2, MOST_TURNS = 8 * TWOS / STEP_THREADS;
    const weft_attention_args &a = in.attention;
    Joined<DIM, 1, STEP_WARPS> &s = step_shared(*(Joined<DIM, 1, STEP_WARPS> *)fixed.places.x);
    const int thread = step_thread(), lane = thread % 32, g = lane / 4, q = lane % 4;
    const StepPart &p = fixed.parts[thread / 32];
    if (!in.again) step_find_part(a, in.parts, fixed.parts[thread / 32]);
    if (p.splits > in.parts || !StepMeeting::has_room(a, p.splits)) return false; /* more than a tile of keys for each warp */
    const bool some = p.row >= 0;
    const int left = p.left, old = p.old; /* keys, and of those the ones that the step does not write */
    const T *k = (const T *)a.k + p.row * DIM, *v = (const T *)a.v + p.row * DIM;
    const uint32_t values = shared_address(&s.out[thread / 32]); /* where the warp's sums go later */
    /* Keys into registers, values into shared memory: those of before ahead of the wait, the new ones behind it. */
    uint4 kf[2][DIM / 32];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int c = 0; c < DIM / 32; c++) kf[j][c] = read16(k + (8 * j + g) * DIM + 32 * c + 8 * q, some && 8 * j + g < old);
    if (some) step_values<DIM>(values, v, 0, old, left);
    step_enter(fixed, in);
    if (p.rows <= 0) return true;
    Rows<DIM, 1> own;
#pragma unroll
    for (int e = 0; e < 2; e++) own.max[0][e] = minus_inf(), own.sum[0][e] = 0.0f, own.low[0][e] = p.low, own.high[0][e] = p.high;
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) own.out[0][i][0] = own.out[0][i][1] = own.out[0][i][2] = own.out[0][i][3] = 0.0f;
    if (some) {
        const T *query = (const T *)a.q + (int64_t)(p.first_head + g) * DIM + 8 * q;
        float scores[1][4];
#pragma unroll
        for (int c = 0; c < DIM / 32; c++) own.q[0][c] = g < p.rows ? __ldcg((const uint4 *)(query + 32 * c)) : make_uint4(0, 0, 0, 0);
        if (old < left) {
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int c = 0; c < DIM / 32; c++)
                    if (8 * j + g >= old && 8 * j + g < left) kf[j][c] = __ldcg((const uint4 *)(k + (8 * j + g) * DIM + 32 * c + 8 * q));
            step_values<DIM>(values, v, max(old, 0), left, KEYS);
        }
        score<T, DIM, 1>(scores, own, kf);
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
        uint4 vf[DIM / 64][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int h = 0; h < DIM / 64; h++) vf[h][i] = step_read(step_value(values, 2 * q + (i & 1) + (i & 2) * 4, 8 * h + g));
        weigh<T, DIM, 1, true>(own, scores, vf, p.key + g, p.key + g + 8, p.key < p.low || p.key + KEYS > p.high, a.scale * log2_e);
    }
    step_sync(); /* the values of a warp lie where its sums will */
    put_warp(s, own, p.rows, thread / 32);
    step_sync();
    /* Of the rows' values each warp has 32 pairs, one of the parts puts them together, and the others send it theirs. */
    const int stride = (int)min((int64_t)a.group_size, (int64_t)a.num_heads) * (TWOS + 2); /* packets of a part: for each row its values, and its statistics for each of two warps */
    uint4 *packets = fixed.program.packets + (p.head * in.parts) * stride;
    const unsigned flag = 2 * (unsigned)fixed.target; /* linear_fp8_run.cu has the odd ones */
    const StepMeeting m(p);
    const bool puts = thread / 32 % min(p.splits, (int)STEP_WARPS) == p.part;
    float4 mine[MOST_TURNS] = {}; /* of this part, where the block puts them together */
#pragma unroll
    for (int turn = 0; turn < MOST_TURNS; turn++) {
        const int i = thread + turn * STEP_THREADS, row = i / TWOS, two = i % TWOS;
        if (row >= p.rows) continue;
        float weight[STEP_WARPS];
        const float2 stats = row_stats(s, row, weight), y = row_values(s, row, 2 * two, weight);
        mine[turn] = make_float4(stats.x, stats.y, y.x, y.y);
        if (puts) continue;
        uint4 *packet = packets + p.part * stride + row * (TWOS + 2);
        step_send(packet + two, y.x, y.y, flag);
        if (two % 32 == 0) step_send(packet + TWOS + two / 32, stats.x, stats.y, flag);
    }
    if (m.shares == 0) return true;
    float4 *meet = (float4 *)&s.out;
    step_sync(); /* what the warps had is read */
    if (puts)
#pragma unroll
        for (int turn = 0; turn < MOST_TURNS; turn++) meet[((turn * m.shares + thread / 32 / min(p.splits, (int)STEP_WARPS)) * p.splits + p.part) * 32 + lane] = mine[turn];
    step_collect(fixed, p, m, meet, packets, stride, flag);
    step_sync();
    for (int n = thread / 32; n < m.shares * m.turns; n += STEP_WARPS) {
        const int i = StepMeeting::pair_of(p, n, m.shares) + lane, row = i / TWOS, two = i % TWOS;
        if (row >= p.rows) continue;
        const float4 all = step_joined(meet + n * p.splits * 32 + lane, p.splits);
        const float by = all.y == 0.0f ? 0.0f : __fdividef(1.0f, all.y);
        uint32_t back = step_exchange((T *)a.out + (int64_t)(p.first_head + row) * DIM + 2 * two, pair<T>(all.z * by, all.w * by));
        if (two == 0 && a.lse != nullptr) back |= step_exchange(a.lse + p.first_head + row, __float_as_uint(all.y == 0.0f ? minus_inf() : (all.x + log2f(all.y)) * ln_2));
        step_arrived(back, fixed.ring.zero);
    }
    return true;
}

#endif

} // namespace weft
