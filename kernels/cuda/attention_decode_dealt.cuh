/* kernels/cuda/attention_decode_dealt.cuh - how attention_decode_dealt.cu deals keys to blocks, and the warp of each block that
 * fetches them. */
#pragma once

#include "kernels/cuda/attention_decode.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tensor_map.cuh"

namespace weft {

enum { UNIT = 4 /* groups of KEYS keys */ };
enum { LAST = 1 << 4, END = 1 << 5 }; /* unit of a piece; of the block's share */

/* An item that a block begins and leaves unfinished to the next ones: how many blocks have it, 0: there is none. */
struct alignas(16) Span {
    int parts, request, kv_head;
};

/* Sums of such items. Of a block: what it has of the item begun in front of it (place 0 of its two), and of its span (1). */
struct Dealt {
    float *partial; /* (blocks, 2, rows of all teams, dim): sums of values, not yet divided */
    float2 *stats;  /* (blocks, 2, rows): largest score (base 2), sum */
    Span *spans;    /* (blocks) */
};

struct Caches {
    CUtensorMap k, v; /* (dim / 64, rows of pages, 64) */
};

/* What the feeding warp says of a unit; of a piece's request, so that nobody has to ask memory while it is busy. */
struct alignas(16) Unit {
    int flags; /* and bit j: group j is there */
    int key;   /* the first one, counted as the request's keys on this rank */
    int first_token, queries, kv_head;
    KeyRange keys;
    int parts, place; /* how many blocks have the item; where the sums go if it is not the only one */
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
        Unit first; /* of the first piece, said before its keys come; without queries: there is none */
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

/* A request, one for each lane. */
struct Known {
    int begin;  /* its first group in the list, in which its KV heads follow one another */
    int groups; /* of one KV head; 1 where it has queries and no keys, so that they get an answer */
    int low, high, old; /* keys that its queries see, low a multiple of KEYS; keys of earlier steps */
    int first_token, queries;
    KeyRange keys;
};

struct Requests {
    const weft_attention_args &a;
    int chunk, base, end; /* lane l knows request chunk + l; their groups in the list are [base, end) */
    Known mine;
    __device__ __forceinline__ void look(int from, int before)
    {
        chunk = from, base = before;
        const int r = from + threadIdx.x % 32;
        mine = {};
        if (r < a.requests) {
            mine.first_token = a.query_start_loc[r];
            mine.queries = a.query_start_loc[r + 1] - mine.first_token;
            if (mine.queries > 0) {
                mine.keys = keys_of(a, r);
                int first_high, last_low;
                visible(a, mine.keys, 0, mine.low, first_high);
                visible(a, mine.keys, mine.queries - 1, last_low, mine.high);
                mine.low = mine.low / KEYS * KEYS;
                mine.groups = max(1, (mine.high - mine.low + KEYS - 1) / KEYS);
                mine.old = page_local_len(a.pages, mine.keys.first_position);
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
    int request, kv_head, low, high, old, first_token, queries;
    KeyRange keys;
    int at, to, parts, place;
    __device__ __forceinline__ Unit unit(int flags, int key) const { return {flags, key, first_token, queries, kv_head, keys, parts, place}; }
};

/* A block's share, piece by piece: first the item that it leaves unfinished, then the one begun in front of it, then whole
 * items. */
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
        p.first_token = __shfl_sync(~0u, known.first_token, lane), p.queries = __shfl_sync(~0u, known.queries, lane);
        p.keys = {__shfl_sync(~0u, known.keys.first_position, lane), __shfl_sync(~0u, known.keys.count, lane)};
        const int item = first + p.kv_head * groups, behind = item + groups;
        if (tail) {
            tail = false;
            if (behind <= to) return next(p); /* the last item is whole, or finished here */
        }
        p.at = max(item, from) - item, p.to = min(behind, to) - item;
        p.parts = shares.block_of(behind - 1) - shares.block_of(item) + 1;
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

template <class F> __device__ __forceinline__ void feed(const weft_attention_args &a, const Dealt &dealt, const Caches &caches, typename F::Room &room)
{
    const int lane = threadIdx.x % 32, group = lane / 2; /* lanes 0 to 7: keys and values of a unit's groups */
    const CUtensorMap *map = lane % 2 ? &caches.v : &caches.k;
    if (lane < 2) map_prefetch(map);
    Share share(a);
    Piece piece = {};
    Batch batch;
    bool more = share.next(piece), waited = false;
    const Span span = {more && piece.place == 1 && piece.parts > 1 ? piece.parts : 0, piece.request, piece.kv_head};
    int stage = 0;
    uint32_t parity = 1;
    if (lane == 0) {
        room.first = piece.unit(0, 0);
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
                room.units[stage] = p.unit(present | (last ? LAST : 0) | (last && !more ? END : 0), key);
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
    if (lane == 0) dealt.spans[blockIdx.x] = span;
}

#endif /* WEFT_HOPPER */

} // namespace weft
