/* kernels/cuda/linear_fp8_run_attend.cuh - what a block of linear_fp8_run.cu keeps, and attention of one token by one of its warpgroups. */
#pragma once

#include "kernels/cuda/linear_fp8_run.cuh"
#include "kernels/cuda/step_attention.cuh"

namespace weft {

enum {
    RUN_SLOTS = 4, /* jobs that are known: those at which the warps are, and the next */
    RUN_SUMS = 4,  /* items whose sums wait to be finished */
    RUN_OTHERS = F8_THREADS,       /* the first thread of the warps that bring and finish */
    RUN_ATTEND = F8_THREADS + 128, /* of those that attend */
    RUN_THREADS = RUN_ATTEND + DEC_THREADS
};

#ifdef WEFT_HOPPER

/* What is known of a token's heads. */
struct RunHeads {
    int64_t kept; /* its place in the pages; -1: none */
    float turns[256]; /* cosines, then sines */
};

struct RunShared {
    Fp8Places places;
    Fp8Job slots[RUN_SLOTS];
    RunHeads heads;
    unsigned long long loaded[RUN_SLOTS]; /* barriers */
    unsigned long long told[F8_TOLD];                        /* barriers */
    int item[F8_TOLD];                                       /* the block's items in turn, -1 behind the last of a job */
    unsigned long long summed[RUN_SUMS], finished[RUN_SUMS]; /* barriers */
    Fp8Sums<1, F8_GROUPS> sums[RUN_SUMS];
    alignas(16) float squares[1][F8_WARPS];
    Fp8Attend attend;
    alignas(16) Joined<RUN_DIM, 1, DEC_WARPS> warps;
    unsigned long long products, attended; /* arrivals before this launch */
    int scaled; /* jobs whose scales have been asked for */
    int never;
};

/* Until what an exchange or a read gave back is there. */
__device__ __forceinline__ void run_arrived(RunShared &s, uint32_t back, uint32_t zero)
{
    if ((back & zero) != 0) s.never = 1;
}
/* Whoever looks for the `turn`th time, from 1: does not come back from a wait that is broken. */
__device__ __forceinline__ void run_looked(int turn, uint64_t &since, uint64_t patience)
{
    if (turn % (1 << 12) == 0) since = step_waited(since, patience);
}
__device__ __forceinline__ void run_wait(const Fp8Run &run, const unsigned long long *arrivals, unsigned long long target)
{
    unsigned long long seen;
    uint64_t since = 0;
    for (int turn = 1;; turn++) {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(arrivals) : "memory");
        if (seen >= target) return;
        run_looked(turn, since, run.patience);
    }
}
__device__ __forceinline__ void run_count(unsigned long long *arrivals, uint32_t nothing)
{
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(arrivals), "l"(1ull + nothing) : "memory");
}

enum { RUN_TILE = KEYS * DEC_WARPS, RUN_TWOS = RUN_DIM / 2 };

/* Where a block's part of a KV head's keys is, and its packets: (KV heads, parts, rows, RUN_PACKETS). */
struct RunPart {
    int rows, first_head, low, high, from, to; /* keys [from, to) of those that are seen, [low, high) */
    int splits, log; /* log: of the power of two that splits do not exceed */
};
/* As many parts as there are tiles, up to `parts`, which then differ by KEYS keys; the new ones are in one of the smaller parts. */
__device__ __forceinline__ RunPart run_part(const weft_attention_args &a, int parts, int part, int head)
{
    RunPart p;
    p.rows = head < a.num_kv_heads && a.query_start_loc[1] > 0 ? heads_of(a, head, p.first_head) : 0;
    visible(a, keys_of(a, 0), 0, p.low, p.high);
    const int low = p.low / KEYS * KEYS, units = max(0, (p.high - low + KEYS - 1) / KEYS);
    p.splits = min(parts, max(1, (units + DEC_WARPS - 1) / DEC_WARPS)), p.log = 32 - __clz(p.splits - 1);
    const int each = units / p.splits, larger = units % p.splits;
    p.from = low + (part * each + min(part, larger)) * KEYS, p.to = min(p.high, p.from + (each + (part < larger)) * KEYS);
    if (part >= p.splits) p.rows = 0;
    return p;
}

__device__ __forceinline__ int run_attender() { return (int)threadIdx.x - RUN_ATTEND; }
__device__ __forceinline__ void run_attend_sync() { named_sync(2, DEC_THREADS); }

/* The parts of a KV head give one another their sums in packets; each puts together its share of the pairs of values, 16 neighbours at a time.
 * part_0: packets of the first part. */
__device__ __forceinline__ void run_join(const weft_attention_args &a, const Fp8Run &run, RunShared &s, const RunPart &p, int part, uint4 *part_0, unsigned flag)
{
    static_assert(RUN_PARTS <= 32 && RUN_TWOS % 16 == 0, "the parts of a pair meet in a warp");
    const int thread = run_attender(), stride = run.rows * RUN_PACKETS;
    uint4 *own = part_0 + part * stride;
    uint32_t back = 0;
    for (int i = thread; i < p.rows * RUN_TWOS; i += DEC_THREADS) {
        const int row = i / RUN_TWOS, two = i % RUN_TWOS;
        float weight[DEC_WARPS];
        const float2 stats = row_stats(s.warps, row, weight), y = row_values(s.warps, row, 2 * two, weight);
        step_send(own + row * RUN_PACKETS + two, y.x, y.y, flag);
        if (two == 0) step_send(own + row * RUN_PACKETS + RUN_TWOS, stats.x, stats.y, flag);
    }
    /* A pair of values, of two a thread, is put together by as many neighbours as there are parts, or the next power of two. */
    const int width = 1 << p.log, of = thread % width, apart = DEC_THREADS >> p.log, pairs = (p.rows * (RUN_TWOS / 16) - part + p.splits - 1) / p.splits * 16;
    const uint4 *from = part_0 + min(of, p.splits - 1) * stride;
    for (int base = 0; base < pairs; base += 2 * apart) {
        int row[2], two[2];
        float2 v[2], stats[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int own = min(base + (thread >> p.log) + n * apart, pairs - 1), i = (part + own / 16 * p.splits) * 16 + own % 16;
            row[n] = i / RUN_TWOS, two[n] = i % RUN_TWOS;
        }
        bool here;
        uint64_t since = 0;
        for (int turn = 1;; turn++) {
            here = true;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                here &= step_came(from + row[n] * RUN_PACKETS + two[n], v[n], flag);
                here &= step_came(from + row[n] * RUN_PACKETS + RUN_TWOS, stats[n], flag);
            }
            if (here) break;
            run_looked(turn, since, run.patience);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (of >= p.splits) stats[n] = make_float2(minus_inf(), 0.0f);
            float max = stats[n].x;
            for (int d = width / 2; d > 0; d /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, d));
            const float weight = max == minus_inf() ? 0.0f : exp2f(stats[n].x - max);
            float sum[3] = {weight * stats[n].y, weight * v[n].x, weight * v[n].y};
            for (int d = width / 2; d > 0; d /= 2)
#pragma unroll
                for (int i = 0; i < 3; i++) sum[i] += __shfl_xor_sync(~0u, sum[i], d);
            const int h = p.first_head + row[n];
            const float by = sum[0] == 0.0f ? 0.0f : 1.0f / sum[0];
            if (of != 0 || base + (thread >> p.log) + n * apart >= pairs) continue;
            back |= step_exchange((bf16 *)a.out + h * RUN_DIM + 2 * two[n], pair<bf16>(sum[1] * by, sum[2] * by));
            if (two[n] == 0 && a.lse != nullptr) back |= step_exchange(a.lse + h, __float_as_uint(sum[0] == 0.0f ? minus_inf() : (max + log2f(sum[0])) * ln_2));
        }
    }
    run_arrived(s, back, run.zero);
}

/* One instruction of attention, by a warpgroup; enter() is called once, before anything is read that the launch writes. */
template <class Enter> __device__ __forceinline__ void run_attend_one(const weft_attention_args &a, const Fp8Run &run, RunShared &s, int part, int head, unsigned flag, Enter enter)
{
    const int thread = run_attender(), warp = thread / 32, g = thread % 32 / 4;
    const RunPart p = run_part(a, run.parts, part, head);
    if (p.rows <= 0) return enter();
    const int64_t before = keys_of(a, 0).first_position; /* of the launch's own keys */
    const bf16 *k = (const bf16 *)a.k, *v = (const bf16 *)a.v;
    int key = p.from + warp * KEYS;
    Walk walk;
    walk.begin(a, 0, key, RUN_TILE);
    auto find = [&](int at) {
        const int64_t row = at < p.to ? walk.row(a, head, 0) : -1;
        walk.advance();
        return row;
    };
    /* The warp's first two tiles are on their way before it waits, so that with 2 * RUN_PARTS * RUN_TILE keys it waits no second time:
     * in registers, but for the second one's values, which lie where the warp's sums will. */
    uint4 kf[2][2][RUN_DIM / 32], vf[RUN_DIM / 64][4];
    const uint32_t values = shared_address(&s.warps.out[warp]);
    int64_t row = find(key);
    const int64_t second = find(key + RUN_TILE);
    auto read = [&](int at) {
        if (row < 0) return;
        read_keys<bf16, RUN_DIM>(kf[0], k + row * RUN_DIM, RUN_DIM, RUN_DIM, p.to - at);
        read_values<bf16, RUN_DIM>(vf, v + row * RUN_DIM, RUN_DIM, RUN_DIM, p.to - at);
    };
    auto read_second = [&] {
        const int left = p.to - key - RUN_TILE;
        if (second < 0) return;
        read_keys<bf16, RUN_DIM>(kf[1], k + second * RUN_DIM, RUN_DIM, RUN_DIM, left);
        step_values<RUN_DIM>(values, v + second * RUN_DIM, 0, left, left);
    };
    const bool old = min(key + KEYS, p.to) <= before, both = min(key + RUN_TILE + KEYS, p.to) <= before;
    if (old) read(key);
    if (both) read_second();
    const float scale = a.scale * log2_e;
    const bf16 *query = (const bf16 *)a.q + (int64_t)(p.first_head + g) * RUN_DIM + 8 * (thread % 4);
    enter();
    Rows<RUN_DIM, 1> own;
#pragma unroll
    for (int c = 0; c < RUN_DIM / 32; c++) own.q[0][c] = g < p.rows ? __ldcg((const uint4 *)(query + 32 * c)) : make_uint4(0, 0, 0, 0);
    if (!old) read(key);
    if (!both) read_second();
#pragma unroll
    for (int e = 0; e < 2; e++) own.max[0][e] = minus_inf(), own.sum[0][e] = 0.0f, own.low[0][e] = p.low, own.high[0][e] = p.high;
#pragma unroll
    for (int i = 0; i < RUN_DIM / 16; i++) own.out[0][i][0] = own.out[0][i][1] = own.out[0][i][2] = own.out[0][i][3] = 0.0f;
    float scores[1][4];
    auto masked = [&](int at) { return at < p.low || at + KEYS > p.high; };
    for (int step = 2 * RUN_TILE; key < p.to; key += step, step = RUN_TILE) {
        const bool here = row >= 0;
        const int next = key + step;
        row = find(next);
        if (here) score<bf16, RUN_DIM, 1>(scores, own, kf[0]);
        if (row >= 0) read_keys<bf16, RUN_DIM>(kf[0], k + row * RUN_DIM, RUN_DIM, RUN_DIM, p.to - next);
        if (here) weigh<bf16, RUN_DIM, 1>(own, scores, vf, key + g, key + g + 8, masked(key), scale);
        if (row >= 0) read_values<bf16, RUN_DIM>(vf, v + row * RUN_DIM, RUN_DIM, RUN_DIM, p.to - next);
        if (step == RUN_TILE || second < 0) continue;
        const int at = key + RUN_TILE;
        uint4 of_shared[RUN_DIM / 64][4];
        score<bf16, RUN_DIM, 1>(scores, own, kf[1]);
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int h = 0; h < RUN_DIM / 64; h++) of_shared[h][i] = step_read(step_value(values, 2 * (thread % 4) + (i & 1) + (i & 2) * 4, 8 * h + g));
        weigh<bf16, RUN_DIM, 1>(own, scores, of_shared, at + g, at + g + 8, masked(at), scale);
        __syncwarp(); /* before the warp's sums come there */
    }
    uint4 *part_0 = run.packets + (int64_t)head * run.parts * run.rows * RUN_PACKETS;
    put_warp(s.warps, own, p.rows, warp);
    run_attend_sync();
    run_join(a, run, s, p, part, part_0, flag);
}

/* All attention. */
__device__ __forceinline__ void run_attend(const Fp8Run &run, RunShared &s)
{
    const int thread = run_attender(), part = blockIdx.x % run.parts, head = blockIdx.x / run.parts;
    for (int i = 0; i < run.num_attends; i++) {
        if (thread < (int)sizeof(Fp8Attend) / 16) ((uint4 *)&s.attend)[thread] = __ldg((const uint4 *)&run.attends[i] + thread);
        run_attend_sync();
        const weft_attention_args &a = s.attend.a;
        const unsigned long long target = s.products + (unsigned long long)s.attend.after * gridDim.x;
        run_attend_one(a, run, s, part, head, 2 * (unsigned)target + 1, [&] { /* the step of other weights has the even flags (step_attention.cuh) */
            if (thread == 0) run_wait(run, run.products, target);
            run_attend_sync();
        });
        if (blockIdx.x == 0 && a.query_start_loc[1] < 1) {
            clear_padding(a, 0, 1, thread, DEC_THREADS);
            __threadfence();
        }
        run_attend_sync();
        if (thread == 0) run_count(run.attended, 0);
    }
}

#endif

} // namespace weft
