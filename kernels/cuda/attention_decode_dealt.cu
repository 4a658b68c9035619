/* kernels/cuda/attention_decode_dealt.cu - attention of few queries over many keys in pages, on Hopper.
 *
 * The keys of all requests and KV heads ("items"), counted in groups of 16, are dealt to one block on each
 * multiprocessor in equal shares, whatever the requests' lengths are. One warp feeds a ring in shared memory: a unit
 * is four groups, and each group's keys and values are one box of the tensor copy engine, since a group lies in one page.
 * The first units are on their way before the kernel in front has ended: it writes only this step's keys. The
 * other warps take a group of each unit, as attention_decode.cuh takes tiles; with more than 16 rows to a KV head there are
 * as many sets of such warps ("teams") as tiles of 16 rows, and a unit serves all of them.
 *
 * Row i of a product is key i ^ 4 (i % 2) of its group: with pieces stored permuted (hopper.cuh), the 8 lanes that read
 * at once, keys of neighbouring rows or values of every second one, then meet no bank twice. */
#include "kernels/cuda/attention_decode.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tensor_map.cuh"

#ifdef WEFT_CUDA_HOPPER

namespace weft {

enum { UNIT = 4 /* groups of KEYS keys */ };
enum { LAST = 1 << 4, END = 1 << 5 }; /* unit of a piece; of the block's share */

/* Sums of items that several blocks share. Of a block: what it has of the item begun in front of it (place 0 of its two), and
 * of the one that it leaves unfinished to the next (1). */
struct Dealt {
    float *partial; /* (blocks, 2, rows of all teams, dim_v): sums of values, not yet divided */
    float2 *stats;  /* (blocks, 2, rows): largest score (base 2), sum */
    unsigned *counters; /* (blocks, teams): of the item that a block begins and does not finish */
    CUtensorMap k, v;   /* (dim / 64, rows of pages, 64) */
};

/* What the feeding warp says of a unit. */
struct alignas(16) Unit {
    int flags; /* and bit j: group j is there */
    int request, kv_head, key; /* key: the first one, counted as the request's keys on this rank */
    int first_block, parts;    /* of the item: how many blocks from which on have it */
    int place;
};

template <int DIM_, int TEAMS_> struct Form {
    enum {
        DIM = DIM_,
        NT = 2,
        TEAMS = TEAMS_,
        WARPS = 8,
        TEAM_WARPS = WARPS / TEAMS,
        TEAM = TEAM_WARPS * 32,
        TURNS = TEAMS == 1 ? 2 : 1, /* a team's warps take turns at units, so many at once */
        KEY_WARPS = TEAM_WARPS / TURNS,
        /* Three warpgroups, the feeding warp in the last, which gives registers to those that multiply: with 9 warps three would
         * share a quarter of the registers and have no more than 168 for each thread. */
        THREADS = WARPS * 32 + 128,
        ROWS = 8 * NT * TEAMS,
        HALF = KEYS * 128,       /* bytes of a group's 64 dims */
        GROUP = DIM / 64 * HALF, /* of keys, or of values */
        STAGES = DIM == 64 ? 8 : 4
    };
    using Sums = Joined<DIM, NT, TEAM_WARPS>;
    struct Room {
        char ring[STAGES][2][UNIT][GROUP]; /* begins at a multiple of 1024 */
        Unit units[STAGES];
        Sums sums[TEAMS];
        uint64_t full[STAGES], empty[STAGES], started;
        int request, kv_head; /* of the first piece, said before its keys come; -1: there is none */
        bool last[TEAMS];
    };
};

#ifdef WEFT_HOPPER

/* The list of all groups in shares; no block but the last ones is without. */
struct Shares {
    int total, blocks;
    __device__ __forceinline__ explicit Shares(int groups) : total(groups), blocks(min(groups, (int)gridDim.x)) {}
    __device__ __forceinline__ int begin(int block) const { return block < blocks ? (int)((int64_t)total * block / blocks) : total; }
    __device__ __forceinline__ int block_of(int group) const { return (int)((((int64_t)group + 1) * blocks - 1) / total); }
};

/* ---- the feeding warp ---- */

/* A request, one for each lane. */
struct Known {
    int begin;  /* its first group in the list, in which its KV heads follow one another */
    int groups; /* of one KV head; 1 where it has queries and no keys, so that they get an answer */
    int low, high, old; /* keys that its queries see, low a multiple of KEYS; keys of earlier steps */
};

struct Requests {
    const weft_attention_args &a;
    int chunk, base, end; /* lane l knows request chunk + l; their groups in the list are [base, end) */
    Known mine;
    __device__ __forceinline__ void look(int from, int before)
    {
        chunk = from, base = before;
        const int r = from + threadIdx.x % 32;
        mine = {0, 0, 0, 0, 0};
        if (r < a.requests) {
            const int queries = a.query_start_loc[r + 1] - a.query_start_loc[r];
            if (queries > 0) {
                const KeyRange keys = keys_of(a, r);
                int first_high, last_low;
                visible(a, keys, 0, mine.low, first_high);
                visible(a, keys, queries - 1, last_low, mine.high);
                mine.low = mine.low / KEYS * KEYS;
                mine.groups = max(1, (mine.high - mine.low + KEYS - 1) / KEYS);
                mine.old = page_local_len(a.pages, keys.first_position);
            }
        }
        const int all = mine.groups * a.num_kv_heads;
        int sum = all;
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(~0u, sum, d);
            if ((int)threadIdx.x % 32 >= d) sum += other;
        }
        mine.begin = before + sum - all;
        end = before + __shfl_sync(~0u, sum, 31);
    }
    __device__ __forceinline__ explicit Requests(const weft_attention_args &args) : a(args) { look(0, 0); }
    __device__ __forceinline__ int total()
    {
        while (chunk + 32 < a.requests) look(chunk + 32, end);
        return end;
    }
    /* The lane that knows whose a group of the list is. */
    __device__ __forceinline__ int find(int group)
    {
        if (group < base) look(0, 0);
        while (group >= end) look(chunk + 32, end);
        return __ffs(__ballot_sync(~0u, group >= mine.begin && group < mine.begin + mine.groups * a.num_kv_heads)) - 1;
    }
};

/* Groups [at, to) of one item are still to be fetched. */
struct Piece {
    int request, kv_head, low, high, old;
    int at, to, first_block, parts, place;
};

/* A block's share, piece by piece: first the item that it leaves unfinished, then the one begun in front of it, so that what
 * must be put together with other blocks' sums is done early; then whole items. */
struct Share {
    Requests requests;
    const Shares shares;
    int from, to, begin;
    bool tail; /* the unfinished item comes next */
    __device__ __forceinline__ explicit Share(const weft_attention_args &a) : requests(a), shares(requests.total()), tail(true)
    {
        begin = from = shares.begin(blockIdx.x);
        to = shares.begin(blockIdx.x + 1);
    }
    __device__ __forceinline__ bool next(Piece &p)
    {
        if (from >= to) return false;
        const int group = tail ? to - 1 : from, lane = requests.find(group);
        const Known &known = requests.mine;
        const int groups = __shfl_sync(~0u, known.groups, lane), first = __shfl_sync(~0u, known.begin, lane);
        p.request = requests.chunk + lane;
        p.kv_head = (group - first) / groups;
        p.low = __shfl_sync(~0u, known.low, lane), p.high = __shfl_sync(~0u, known.high, lane), p.old = __shfl_sync(~0u, known.old, lane);
        const int item = first + p.kv_head * groups, behind = item + groups;
        if (tail) {
            tail = false;
            if (behind <= to) return next(p); /* the last item is whole, or finished here */
        }
        p.at = max(item, from) - item, p.to = min(behind, to) - item;
        p.first_block = shares.block_of(item), p.parts = shares.block_of(behind - 1) - p.first_block + 1;
        p.place = item >= begin;
        if (behind > to) to = max(item, from);
        else from = behind;
        return true;
    }
};

/* The pages of up to 32 groups of a piece, one for each lane. */
struct Batch {
    Piece p; /* before these groups */
    int count, block, offset;
    __device__ __forceinline__ void look(const weft_attention_args &a, Piece &from)
    {
        p = from;
        count = min(32, p.to - p.at);
        const int lane = threadIdx.x % 32, key = p.low + (p.at + lane) * KEYS, page = (int)a.pages.page_size;
        block = -1, offset = key % page;
        if (lane < count && key < p.high) block = a.pages.block_table[p.request * a.pages.block_table_stride + key / page];
        from.at += count;
    }
};

template <class F> __device__ __forceinline__ void feed(const weft_attention_args &a, const Dealt &dealt, typename F::Room &room)
{
    const int lane = threadIdx.x % 32, group = lane / 2; /* lanes 0 to 7: keys and values of a unit's groups */
    const CUtensorMap *map = lane % 2 ? &dealt.v : &dealt.k;
    if (lane < 2) map_prefetch(map);
    Share share(a);
    Piece piece;
    Batch batch;
    bool more = share.next(piece), waited = false;
    int stage = 0;
    uint32_t parity = 1;
    if (lane == 0) {
        room.request = more ? piece.request : -1, room.kv_head = piece.kv_head;
        barrier_arrive(shared_address(&room.started));
    }
    if (more) batch.look(a, piece);
    while (more) {
        /* The next batch's pages are asked for before this one's copies. */
        Batch next;
        if (piece.at == piece.to) more = share.next(piece);
        if (more) next.look(a, piece);
        const Piece &p = batch.p;
        for (int u = 0; u < batch.count; u += UNIT) {
            const int here = min((int)UNIT, batch.count - u), key = p.low + (p.at + u) * KEYS;
            if (!waited && min(key + here * KEYS, p.high) > p.old) {
                dependency_wait();
                waited = true;
            }
            const int block = __shfl_sync(~0u, batch.block, u + group);
            const int offset = __shfl_sync(~0u, batch.offset, u + group);
            const bool there = group < here && block >= 0;
            const unsigned copies = __ballot_sync(~0u, there), pairs = copies & 0x55;
            const int present = (pairs & 1) | (pairs >> 1 & 2) | (pairs >> 2 & 4) | (pairs >> 3 & 8);
            barrier_wait(shared_address(&room.empty[stage]), parity);
            if (lane == 0) {
                const bool last = p.at + u + here == p.to;
                room.units[stage] = {present | (last ? LAST : 0) | (last && !more ? END : 0),
                                     p.request, p.kv_head, key, p.first_block, p.parts, p.place};
                barrier_expect(shared_address(&room.full[stage]), __popc(present) * 2 * F::GROUP);
            }
            __syncwarp();
            if (there && lane < 2 * UNIT)
                copy_box(shared_address(room.ring[stage][lane % 2][group]), map, 0, (block * a.num_kv_heads + p.kv_head) * (int)a.pages.page_size + offset, 0,
                         shared_address(&room.full[stage]));
            if (++stage == F::STAGES) stage = 0, parity ^= 1;
        }
        batch = next;
    }
    if (!waited) dependency_wait();
}

/* ---- the other warps ---- */

/* The key of a group that row i of a product is. */
__device__ __forceinline__ int key_of(int i) { return i ^ i % 2 * 4; }

/* Where a lane's keys and values lie in a group, in bytes. */
struct Lane {
    int k[2], v[2]; /* 16 bytes of row g, of even and of odd 32 dims; of rows 2q and 2q + 1 */
    __device__ __forceinline__ Lane()
    {
        const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
        for (int i = 0; i < 2; i++) {
            k[i] = key_of(g) * 128 + ((4 * i + q) ^ key_of(g)) * 16;
            v[i] = key_of(2 * q + i) * 128 + (g ^ key_of(2 * q + i)) * 16;
        }
    }
};

/* A group of keys and values, the first of them `key`. high: keys from there on may be anything. */
template <class T, class F>
__device__ __forceinline__ void take_group(Rows<F::DIM, F::NT> &s, const char *keys, const char *values, const Lane &lane, int key, int high, bool masked,
                                           float scale)
{
    enum { DIM = F::DIM, NT = F::NT };
    uint4 k[2][DIM / 32], v[DIM / 64][4];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int c = 0; c < DIM / 32; c++) k[j][c] = *(const uint4 *)(keys + lane.k[c % 2] + c / 2 * F::HALF + j * 8 * 128);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int h = 0; h < DIM / 64; h++) v[h][i] = *(const uint4 *)(values + lane.v[i % 2] + h * F::HALF + i / 2 * 8 * 128);
    float scores[NT][4];
    score<T, DIM, NT>(scores, s, k);
    const int k0 = key + key_of(threadIdx.x % 32 / 4);
    if (masked) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (key + key_of(2 * (threadIdx.x % 4) + i % 2) + i / 2 * 8 < high) continue;
#pragma unroll
            for (int h = 0; h < DIM / 64; h++) v[h][i] = make_uint4(0, 0, 0, 0);
        }
    }
    weigh<T, DIM, NT>(s, scores, v, k0, k0 + 8, masked, scale);
}

/* All blocks' sums of an item together, by the team whose block comes last. */
template <class T, class F>
__device__ __forceinline__ void put_together(const weft_attention_args &a, const Dealt &dealt, const Unit &u, const Place &p, typename F::Sums &room)
{
    enum { R = 8 * F::NT, EACH = (R + F::TEAM_WARPS - 1) / F::TEAM_WARPS };
    float *weights = &room.out[0][0][0], *sums = weights + u.parts * R;
    const int thread = threadIdx.x % F::TEAM, warp = thread / 32, lane = threadIdx.x % 32, fours = F::DIM / 4;
    auto at = [&](int part, int row) { return (int64_t)(part == 0 ? 2 * u.first_block + 1 : 2 * (u.first_block + part)) * F::ROWS + p.row0 + row; };
    float2 own[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int row = warp + i * F::TEAM_WARPS;
        own[i] = make_float2(minus_inf(), 0.0f);
        if (row < p.rows && lane < u.parts) own[i] = __ldcg(&dealt.stats[at(lane, row)]);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int row = warp + i * F::TEAM_WARPS;
        if (row >= p.rows) break;
        float max = own[i].x;
        for (int s = lane + 32; s < u.parts; s += 32) max = fmaxf(max, __ldcg(&dealt.stats[at(s, row)]).x);
        for (int d = 16; d > 0; d /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, d));
        const float base = max == minus_inf() ? 0.0f : max;
        float sum = 0.0f;
        for (int s = lane; s < u.parts; s += 32) {
            const float2 its = s < 32 ? own[i] : __ldcg(&dealt.stats[at(s, row)]);
            const float weight = exp2f(its.x - base);
            weights[s * R + row] = weight;
            sum += weight * its.y;
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            sums[row] = sum;
            put_lse(a, p, row, max, sum);
        }
    }
    named_sync(1 + threadIdx.x / F::TEAM, F::TEAM);
    /* AT_ONCE elements of AHEAD parts are on their way at once: there is nothing else to do for this multiprocessor. */
    enum { AT_ONCE = 4, AHEAD = 6 };
    for (int i0 = thread; i0 < p.rows * fours; i0 += AT_ONCE * F::TEAM) {
        float4 y[AT_ONCE] = {};
        for (int s0 = 0; s0 < u.parts; s0 += AHEAD) {
            float4 v[AT_ONCE][AHEAD];
#pragma unroll
            for (int s = 0; s < AHEAD; s++) {
                const float4 *from = (const float4 *)(dealt.partial + at(min(s0 + s, u.parts - 1), 0) * F::DIM);
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) v[k][s] = __ldcg(from + min(i0 + k * F::TEAM, p.rows * fours - 1));
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
                for (int s = 0; s < AHEAD; s++) {
                    const int row = min(i0 + k * F::TEAM, p.rows * fours - 1) / fours;
                    const float w = s0 + s < u.parts ? weights[(s0 + s) * R + row] : 0.0f;
                    y[k].x += w * v[k][s].x, y[k].y += w * v[k][s].y, y[k].z += w * v[k][s].z, y[k].w += w * v[k][s].w;
                }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int i = i0 + k * F::TEAM, row = i / fours, d = i % fours * 4;
            if (i >= p.rows * fours) break;
            const float by = sums[row] == 0.0f ? 0.0f : 1.0f / sums[row];
            put<T>(a, p, row, d, y[k].x * by, y[k].y * by);
            put<T>(a, p, row, d + 2, y[k].z * by, y[k].w * by);
        }
    }
}

/* The end of a piece: the team's warps together, then, where other blocks have keys of the item, with theirs. */
template <class T, class F>
__device__ __forceinline__ void finish(const weft_attention_args &a, const Dealt &dealt, const Unit &u, const Place &p, Rows<F::DIM, F::NT> &s,
                                       typename F::Room &room)
{
    const int team = threadIdx.x / F::TEAM, thread = threadIdx.x % F::TEAM, twos = F::DIM / 2;
    typename F::Sums &joined = room.sums[team];
    put_warp(joined, s, p.rows, thread / 32);
    named_sync(1 + team, F::TEAM);
    for (int i = thread; i < p.rows * twos; i += F::TEAM) {
        const int mine = i / twos, d = i % twos * 2;
        float weight[F::TEAM_WARPS];
        const float2 stats = row_stats(joined, mine, weight), y = row_values(joined, mine, d, weight);
        if (u.parts > 1) {
            const int64_t at = (int64_t)(2 * blockIdx.x + u.place) * F::ROWS + p.row0 + mine;
            *(float2 *)&dealt.partial[at * F::DIM + d] = y;
            if (d == 0) dealt.stats[at] = stats;
        } else {
            const float by = stats.y == 0.0f ? 0.0f : 1.0f / stats.y;
            put<T>(a, p, mine, d, y.x * by, y.y * by);
            if (d == 0) put_lse(a, p, mine, stats.x, stats.y);
        }
    }
    named_sync(1 + team, F::TEAM);
    if (u.parts == 1) return;
    unsigned *counter = &dealt.counters[u.first_block * F::TEAMS + team];
    if (thread == 0) { /* orders the writes of the team, which the barrier has gathered, before the count */
        unsigned before;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        room.last[team] = before == (unsigned)u.parts - 1;
    }
    named_sync(1 + team, F::TEAM);
    if (!room.last[team]) return;
    put_together<T, F>(a, dealt, u, p, joined);
    named_sync(1 + team, F::TEAM);
    if (thread == 0) *counter = 0;
}

/* A team's rows of an item, and which keys all of them see. */
template <class T, class F> struct Team {
    Place p;
    Rows<F::DIM, F::NT> s;
    int low_last, high_first, high;
    __device__ __forceinline__ void begin(const weft_attention_args &a, int request, int kv_head)
    {
        p.heads = heads_of(a, kv_head, p.first_head);
        p.first_token = a.query_start_loc[request];
        p.row0 = threadIdx.x / F::TEAM * 8 * F::NT;
        p.rows = min(8 * F::NT, p.heads * (a.query_start_loc[request + 1] - p.first_token) - p.row0);
        if (p.rows <= 0) return;
        const KeyRange keys = keys_of(a, request);
        int low;
        visible(a, keys, p.row0 / p.heads, low, high_first);
        visible(a, keys, (p.row0 + p.rows - 1) / p.heads, low_last, high);
        begin_rows<T>(a, p, keys, s);
    }
};

template <class T, class F> __device__ __forceinline__ void take_units(const weft_attention_args &a, const Dealt &dealt, typename F::Room &room)
{
    const int warp = threadIdx.x / 32 % F::TEAM_WARPS;
    const Lane lane;
    const float scale = a.scale * log2_e;
    int stage = 0, turn = warp / F::KEY_WARPS;
    uint32_t parity = 0;
    dependency_wait();
    barrier_wait(shared_address(&room.started), 0);
    int request = room.request, kv_head = room.kv_head;
    if (request < 0) return;
    for (;;) {
        Team<T, F> t;
        Unit u;
        t.begin(a, request, kv_head);
        do {
            barrier_wait(shared_address(&room.full[stage]), parity);
            u = room.units[stage];
            if (turn == 0 && t.p.rows > 0) {
#pragma unroll 1
                for (int group = warp % F::KEY_WARPS; group < UNIT; group += F::KEY_WARPS) {
                    if (!(u.flags >> group & 1)) continue;
                    const int key = u.key + group * KEYS;
                    take_group<T, F>(t.s, room.ring[stage][0][group], room.ring[stage][1][group], lane, key, t.high,
                                     key < t.low_last || key + KEYS > t.high_first, scale);
                }
            }
            turn = turn == 0 ? F::TURNS - 1 : turn - 1;
            barrier_arrive(shared_address(&room.empty[stage]));
            if (++stage == F::STAGES) stage = 0, parity ^= 1;
        } while (!(u.flags & LAST));
        if (t.p.rows > 0) finish<T, F>(a, dealt, u, t.p, t.s, room);
        if (u.flags & END) return;
        barrier_wait(shared_address(&room.full[stage]), parity);
        request = room.units[stage].request, kv_head = room.units[stage].kv_head;
    }
}

#endif /* WEFT_HOPPER */

template <class T, class F> __global__ void __launch_bounds__(F::THREADS, 1) decode_dealt(const weft_attention_args a, const __grid_constant__ Dealt dealt)
{
#ifdef WEFT_HOPPER
    extern __shared__ char unaligned[];
    typename F::Room &room = *(typename F::Room *)(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&room.started), 1);
        for (int i = 0; i < F::STAGES; i++) {
            barrier_init(shared_address(&room.full[i]), 1);
            barrier_init(shared_address(&room.empty[i]), F::WARPS * 32);
        }
        barriers_ready();
    }
    __syncthreads();
    if (__shfl_sync(~0u, threadIdx.x / 128, 0) == F::WARPS / 4) {
        registers_down<104>();
        if (threadIdx.x / 32 == F::WARPS) feed<F>(a, dealt, room);
        if (threadIdx.x / 32 == F::WARPS + 1) {
            dependency_wait();
            clear_padding(a, blockIdx.x, gridDim.x, threadIdx.x % 32, 32);
        }
    } else {
        registers_up<200>();
        take_units<T, F>(a, dealt, room);
    }
#endif
}

/* ---- host side ---- */

/* Keys or values: as many rows as coordinates reach, since how many pages there are is not said. */
template <class F> static bool encode(CUtensorMap *map, weft_dtype dtype, const void *base)
{
    return tensor_map(map, dtype, base, {64, INT32_MAX, F::DIM / 64}, {2 * F::DIM, 128}, {64, KEYS, F::DIM / 64});
}

template <class T, class F> static bool launch_dealt(const weft_attention_args *a, int64_t groups, void *stream)
{
    /* Weights of all parts of an item have to fit where a team's sums were. */
    const int64_t blocks = least(least(a->cuda->sms, F::TEAM_WARPS * F::DIM), groups), rows = blocks * 2 * F::ROWS;
    const size_t shared = sizeof(typename F::Room) + 1024;
    if (shared > (size_t)a->cuda->shared || (size_t)rows * ((size_t)a->head_dim_v * 4 + sizeof(float2)) > a->cuda->workspace_bytes ||
        blocks * F::TEAMS > COUNTERS)
        return false;
    Dealt dealt;
    dealt.counters = a->cuda->counters;
    dealt.stats = (float2 *)a->cuda->workspace;
    dealt.partial = (float *)(dealt.stats + rows);
    if (!encode<F>(&dealt.k, a->dtype, a->k) || !encode<F>(&dealt.v, a->dtype, a->v)) return false;
    (void)cudaFuncSetAttribute(decode_dealt<T, F>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    launch(decode_dealt<T, F>, (unsigned)blocks, F::THREADS, shared, stream, *a, dealt);
    return true;
}

template <class T, int DIM> static bool launch_rows(const weft_attention_args *a, int64_t rows, int64_t groups, void *stream)
{
    if (rows <= 16) return launch_dealt<T, Form<DIM, 1>>(a, groups, stream);
    if (rows <= 32) return launch_dealt<T, Form<DIM, 2>>(a, groups, stream);
    return launch_dealt<T, Form<DIM, 4>>(a, groups, stream);
}

} // namespace weft

#endif /* WEFT_CUDA_HOPPER */

namespace weft {

bool attention_decode_dealt(const weft_attention_args *a, int64_t query_len, int64_t seq_len, void *stream)
{
#ifdef WEFT_CUDA_HOPPER
    if (a->cuda == NULL || !a->cuda->hopper || a->keys == WEFT_KEYS_NEW || a->requests == 0) return false;
    const int64_t rows = query_len * least(a->group_size, a->num_heads), groups = a->requests * a->num_kv_heads * div_up(seq_len, KEYS);
    if (rows > 64 || groups > INT32_MAX || a->head_dim != a->head_dim_v || (a->head_dim != 64 && a->head_dim != 128)) return false;
    /* Where the other kernel reads all keys once too, it is the faster one with up to 8 rows, and with up to 16 of many items. */
    if (rows <= 8 || (rows <= 16 && a->requests * a->num_kv_heads > a->cuda->sms)) return false;
    auto run = [&](auto tag) {
        using T = decltype(tag);
        return a->head_dim == 64 ? launch_rows<T, 64>(a, rows, groups, stream) : launch_rows<T, 128>(a, rows, groups, stream);
    };
    return a->dtype == WEFT_BF16 ? run(bf16()) : run(__half());
#else
    return false;
#endif
}

} // namespace weft
