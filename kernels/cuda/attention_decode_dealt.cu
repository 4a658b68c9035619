/* kernels/cuda/attention_decode_dealt.cu - attention of few queries over many keys in pages, on Hopper.
 *
 * The keys of all requests and KV heads ("items"), counted in groups of 16, are dealt to one block on each
 * multiprocessor in equal shares, whatever the requests' lengths are. One warp feeds a ring in shared memory: a unit
 * is four groups, and each group's keys and values are one box of the tensor copy engine, since a group lies in one page.
 * The first units are on their way before the kernel in front has ended: it writes only this step's keys. The
 * other warps take a group of each unit, as attention_decode.cuh takes tiles; with more than 16 rows to a KV head there are
 * as many sets of such warps ("teams") as tiles of 16 rows, and a unit serves all of them. A second kernel puts together what
 * several blocks have of an item: one block alone would take longer to read their sums than many do.
 *
 * Row i of a product is key i ^ 4 (i % 2) of its group: with pieces stored permuted (hopper.cuh), the 8 lanes that read
 * at once, keys of neighbouring rows or values of every second one, then meet no bank twice. */
#include "kernels/cuda/attention_decode_dealt.cuh"

#ifdef WEFT_CUDA_HOPPER

namespace weft {

#ifdef WEFT_HOPPER

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

/* The end of a piece: the team's warps together. */
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
            (void)put<T>(a, p, mine, d, y.x * by, y.y * by, Unasked());
            if (d == 0) (void)put_lse(a, p, mine, stats.x, stats.y, Unasked());
        }
    }
    named_sync(1 + team, F::TEAM);
}

/* A team's rows of an item, and which keys all of them see. */
template <class T, class F> struct Team {
    Place p;
    Rows<F::DIM, F::NT> s;
    int low_last, high_first, high;
    __device__ __forceinline__ void begin(const weft_attention_args &a, const Unit &u)
    {
        p.heads = heads_of(a, u.kv_head, p.first_head);
        p.first_token = u.first_token;
        p.row0 = threadIdx.x / F::TEAM * 8 * F::NT;
        p.rows = min(8 * F::NT, p.heads * u.queries - p.row0);
        if (p.rows <= 0) return;
        int low;
        read_queries<T>(a, p, s);
        visible(a, u.keys, p.row0 / p.heads, low, high_first);
        visible(a, u.keys, (p.row0 + p.rows - 1) / p.heads, low_last, high);
        bound_rows(a, p, u.keys, s);
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
    if (room.first.queries == 0) return;
    Team<T, F> t;
    t.begin(a, room.first);
    for (;;) {
        Unit u;
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
        /* The next piece's queries are on their way while this one ends: what memory has to answer takes long while it is busy. */
        Team<T, F> next;
        if (!(u.flags & END)) {
            barrier_wait(shared_address(&room.full[stage]), parity);
            next.begin(a, room.units[stage]);
        }
        if (t.p.rows > 0) finish<T, F>(a, dealt, u, t.p, t.s, room);
        if (u.flags & END) return;
        t = next;
    }
}

#endif /* WEFT_HOPPER */

template <class T, class F>
__global__ void __launch_bounds__(F::THREADS, 1) decode_dealt(const weft_attention_args a, const Dealt dealt, const __grid_constant__ Caches caches)
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
        if (threadIdx.x / 32 == F::WARPS) feed<F>(a, dealt, caches, room);
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

enum { ROWS_AT_ONCE = 4 /* of a block, a warp each */, PARTS_AHEAD = 8 /* on their way at once */ };

/* What blocks have of the item that block blockIdx.x begins. form_rows: of all teams. */
template <class T, int DIM>
__global__ void __launch_bounds__(ROWS_AT_ONCE * 32) put_together(const weft_attention_args a, const Dealt dealt, int form_rows)
{
    dependency_wait();
    const int row = blockIdx.y * ROWS_AT_ONCE + threadIdx.x / 32, lane = threadIdx.x % 32, own = DIM / 32 * lane;
    const int4 span = __ldcg((const int4 *)&dealt.spans[blockIdx.x]); /* parts, request, kv_head */
    if (span.x == 0) return;
    Place p = {};
    p.heads = heads_of(a, span.z, p.first_head);
    p.first_token = a.query_start_loc[span.y];
    if (row >= p.heads * (a.query_start_loc[span.y + 1] - p.first_token)) return;
    auto at = [&](int part) { return (int64_t)(2 * ((int)blockIdx.x + part) + (part == 0)) * form_rows + row; };
    float max = minus_inf(), sum = 0.0f, y[DIM / 32] = {};
    for (int s = lane; s < span.x; s += 32) max = fmaxf(max, __ldcg(&dealt.stats[at(s)]).x);
    for (int d = 16; d > 0; d /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, d));
    const float base = max == minus_inf() ? 0.0f : max;
    for (int s0 = 0; s0 < span.x; s0 += 32) {
        float weight = 0.0f;
        if (s0 + lane < span.x) {
            const float2 stats = __ldcg(&dealt.stats[at(s0 + lane)]);
            weight = exp2f(stats.x - base);
            sum += weight * stats.y;
        }
        for (int s = s0; s < min(s0 + 32, span.x); s += PARTS_AHEAD) {
            float2 v[PARTS_AHEAD][DIM / 64];
#pragma unroll
            for (int j = 0; j < PARTS_AHEAD; j++)
#pragma unroll
                for (int i = 0; i < DIM / 64; i++) v[j][i] = __ldcg((const float2 *)&dealt.partial[at(min(s + j, span.x - 1)) * DIM + own] + i);
#pragma unroll
            for (int j = 0; j < PARTS_AHEAD; j++) {
                const float w = __shfl_sync(~0u, weight, s - s0 + j);
#pragma unroll
                for (int i = 0; i < DIM / 64; i++) y[2 * i] += w * v[j][i].x, y[2 * i + 1] += w * v[j][i].y;
            }
        }
    }
    sum = warp_sum(sum);
    const float by = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int i = 0; i < DIM / 32; i += 2) (void)put<T>(a, p, row, own + i, y[i] * by, y[i + 1] * by, Unasked());
    if (lane == 0) (void)put_lse(a, p, row, max, sum, Unasked());
}

/* ---- host side ---- */

/* Keys or values: as many rows as coordinates reach, since how many pages there are is not said. */
template <class F> static bool encode(CUtensorMap *map, weft_dtype dtype, const void *base)
{
    return tensor_map(map, dtype, base, {64, INT32_MAX, F::DIM / 64}, {2 * F::DIM, 128}, {64, KEYS, F::DIM / 64});
}

template <class T, class F> static bool launch_dealt(const weft_attention_args *a, int64_t groups, void *stream)
{
    /* As many blocks to each item, if few are left over: a block that changes items falls behind for good while memory is busy. */
    const int64_t items = a->requests * a->num_kv_heads, even = a->cuda->sms / items * items;
    const int64_t blocks = least(20 * even >= 19 * a->cuda->sms ? even : a->cuda->sms, groups), rows = blocks * 2 * F::ROWS;
    const size_t shared = sizeof(typename F::Room) + 1024;
    if (shared > (size_t)a->cuda->shared || (size_t)rows * (F::DIM * 4 + sizeof(float2)) + (size_t)blocks * sizeof(Span) > a->cuda->workspace_bytes)
        return false;
    Caches caches;
    if (!encode<F>(&caches.k, a->dtype, a->k) || !encode<F>(&caches.v, a->dtype, a->v)) return false;
    Dealt dealt;
    dealt.partial = (float *)a->cuda->workspace;
    dealt.stats = (float2 *)(dealt.partial + rows * F::DIM);
    dealt.spans = (Span *)(dealt.stats + rows);
    (void)cudaFuncSetAttribute(decode_dealt<T, F>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    launch(decode_dealt<T, F>, (unsigned)blocks, F::THREADS, shared, stream, *a, dealt, caches);
    launch(put_together<T, F::DIM>, dim3((unsigned)blocks, F::ROWS / ROWS_AT_ONCE), ROWS_AT_ONCE * 32, 0, stream, *a, dealt, (int)F::ROWS);
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
