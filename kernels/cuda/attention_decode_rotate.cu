/* kernels/cuda/attention_decode_rotate.cu - a decode step's rotary embedding, its writes into the pages and its attention in one kernel.
 *
 * Where items of attention need not be cut (attention_decode.cu), one block has all keys of a (request, KV head), and so all that
 * reads the request's new key and value of that head. It takes them, and the queries of its heads, straight from the product of q, k
 * and v: each of its first threads turns 8 pairs of a head. Queries go to the block's warps through shared memory; all that is turned also
 * to where weft_rope_cuda and weft_kv_write_cuda put it, keys and values in time for the tile that has the new key.
 *
 * The step's critical path is from the end of the product in front to the first scores. So what hangs on the host's arrays alone comes
 * before the wait, in two trips to memory: lengths, positions and the block of each warp's first keys, then those keys and the angles. */
#include "kernels/cuda/attention_decode.cuh"
#include "kernels/cuda/linear_batch.cuh"

namespace weft {

struct Angles {
    const int32_t *positions; /* (tokens) */
    const float *cos_sin;     /* (max_positions, head_dim): cosines, sines */
    int64_t max_positions;
};

/* Rows that reach the tensor cores' fragments without a bank met twice. */
template <class T, int DIM> struct Queries {
    alignas(16) T row[8][DIM + 32];
};

/* What a thread has of a token's new rows of one KV head: a pack of a row's first half and its mate. Rows: the group's queries, key, value. */
template <class T, int DIM> struct NewRows {
    enum { PACKS = DIM / 16 /* of half a row */ };
    typedef Pack<T, 8> Eight;
    int row, at, block, offset; /* block, offset: of key and value in the pages; block -1: none */
    bool turns;
    Pack<float, 8> cos, sin;
    /* Of the host's arrays alone; nothing here waits for memory. table: the request's, NULL without one. */
    __device__ __forceinline__ void look_up(const weft_attention_args &a, const Angles &angles, int position, const int32_t *table)
    {
        row = threadIdx.x / PACKS, at = threadIdx.x % PACKS * 8;
        turns = row <= a.group_size && position >= 0 && position < angles.max_positions;
        block = -1, offset = 0;
        if (turns) {
            const float *from = angles.cos_sin + (int64_t)position * DIM + at;
            cos = *(const Pack<float, 8> *)from, sin = *(const Pack<float, 8> *)(from + DIM / 2);
        }
        if (row < a.group_size || row > a.group_size + 1 || table == nullptr || position < 0) return;
        const int page = (int)a.pages.page_size, entry = position / page;
        offset = position % page;
        if (entry < a.pages.block_table_stride) block = table[entry];
    }
    __device__ __forceinline__ void turn(const weft_attention_args &a, int64_t token, int kv_head, Queries<T, DIM> &queries) const
    {
        const int group = a.group_size;
        if (row > group + 1) return;
        const int head = row < group ? kv_head * group + row : a.num_heads + (row == group ? 0 : a.num_kv_heads) + kv_head;
        T *from = (T *)a.q + token * a.q_stride + head * DIM + at;
        uint4 low = __ldcg((const uint4 *)from), high = __ldcg((const uint4 *)(from + DIM / 2));
        T *to = (T *)(row == group ? a.k : a.v) + (((int64_t)block * a.num_kv_heads + kv_head) * a.pages.page_size + offset) * DIM + at;
        if (turns) rotate_pairs(*(Eight *)&low, *(Eight *)&high, cos, sin);
        if (row < group) *(uint4 *)&queries.row[row][at] = low, *(uint4 *)&queries.row[row][at + DIM / 2] = high;
        else if (block >= 0) *(uint4 *)to = low, *(uint4 *)(to + DIM / 2) = high;
        if (turns) *(uint4 *)from = low, *(uint4 *)(from + DIM / 2) = high;
    }
};

/* Tokens behind the last request are turned too, and have no place. */
template <class T, int DIM> __device__ __forceinline__ void turn_padding(const weft_attention_args &a, const Angles &angles, int kv_head, Queries<T, DIM> &queries)
{
    for (int64_t t = a.query_start_loc[a.requests]; t < a.tokens; t++) {
        NewRows<T, DIM> rows;
        rows.look_up(a, angles, angles.positions[t], nullptr);
        rows.turn(a, t, kv_head, queries);
    }
}

template <class T, int DIM> __global__ void __launch_bounds__(WIDE_WARPS * 32, 12 / WIDE_WARPS) decode_rotate(const weft_attention_args a, const Angles angles)
{
    enum { STEP = KEYS * WIDE_WARPS };
    __shared__ Joined<DIM, 1, WIDE_WARPS> warps;
    __shared__ Queries<T, DIM> queries;
    const int kv_head = blockIdx.x, r = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    if (r == a.requests) { /* one row of blocks more, for the tokens behind the last request */
        dependency_wait();
        turn_padding(a, angles, kv_head, queries);
        if (kv_head == 0) clear_padding(a, 0, 1, threadIdx.x, WIDE_WARPS * 32);
        return;
    }

    /* The host's numbers come in one trip, a lane each. The position is that of a request without gaps in front of it; others look again. */
    const int32_t *table = a.pages.block_table + r * a.pages.block_table_stride;
    const int page = (int)a.pages.page_size;
    int key = warp * KEYS, entry = key / page, offset = key % page;
    const int32_t *asked = a.query_start_loc + r + (lane > 0);
    if (lane == 2) asked = a.seq_lens + r;
    if (lane == 3) asked = angles.positions + min(r, (int)a.tokens - 1);
    if (lane == 4) asked = table + min(entry, (int)a.pages.block_table_stride - 1);
    const int number = *asked;
    auto of_lane = [&](int i) { return __shfl_sync(~0u, number, i); };
    const int first = of_lane(0), behind = of_lane(1), length = of_lane(2), block = of_lane(4);
    int position = of_lane(3);
    const bool empty = behind <= first;
    if (first != r && !empty) position = angles.positions[first];
    NewRows<T, DIM> rows;
    rows.look_up(a, angles, position, table);

    const int entry_step = STEP / page, offset_step = STEP % page;
    const int64_t room = a.pages.block_table_stride * page;
    const int end = empty ? 0 : length > room ? (int)room : length;
    const T *k = (const T *)a.k, *v = (const T *)a.v;
    auto row_of = [&](int block) { return key < end && block >= 0 ? (((int64_t)block * a.num_kv_heads + kv_head) * page + offset) * DIM : -1; };
    int64_t row = row_of(block);
    uint4 kf[2][DIM / 32], vf[DIM / 64][4];
    const bool old = min(key + KEYS, end) < length; /* none of the first keys is this step's */
    if (old && row >= 0) {
        read_keys<T, DIM>(kf, k + row, DIM, DIM, end - key);
        read_values<T, DIM>(vf, v + row, DIM, DIM, end - key);
    }
    dependency_wait();
    if (empty) return;
    rows.turn(a, first, kv_head, queries);
    __syncthreads();
    if (!old && row >= 0) {
        read_keys<T, DIM>(kf, k + row, DIM, DIM, end - key);
        read_values<T, DIM>(vf, v + row, DIM, DIM, end - key);
    }

    Rows<DIM, 1> s;
#pragma unroll
    for (int c = 0; c < DIM / 32; c++) s.q[0][c] = g < a.group_size ? *(const uint4 *)&queries.row[g][32 * c + 8 * q] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int e = 0; e < 2; e++) s.low[0][e] = 0, s.high[0][e] = end, s.max[0][e] = minus_inf(), s.sum[0][e] = 0.0f;
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) s.out[0][i][0] = s.out[0][i][1] = s.out[0][i][2] = s.out[0][i][3] = 0.0f;
    const float scale = a.scale * log2_e;
    while (key < end) {
        const int64_t here = row;
        const int now = key;
        key += STEP;
        entry += entry_step, offset += offset_step;
        if (offset >= page) offset -= page, entry++;
        row = key < end ? row_of(table[entry]) : -1;
        float scores[1][4];
        if (here >= 0) score<T, DIM, 1>(scores, s, kf);
        if (row >= 0) read_keys<T, DIM>(kf, k + row, DIM, DIM, end - key);
        if (here >= 0) weigh<T, DIM, 1>(s, scores, vf, now + g, now + g + 8, now + KEYS > end, scale);
        if (row >= 0) read_values<T, DIM>(vf, v + row, DIM, DIM, end - key);
    }
    put_warp(warps, s, a.group_size, warp);
    __syncthreads();
    const Place p = {first, kv_head * a.group_size, 8, 0, a.group_size}; /* 8: rows of a tile are heads of one token */
    for (int i = threadIdx.x; i < a.group_size * (DIM / 2); i += WIDE_WARPS * 32) {
        const int mine = i / (DIM / 2), d = i % (DIM / 2) * 2;
        float weight[WIDE_WARPS];
        const float2 stats = row_stats(warps, mine, weight), y = row_values(warps, mine, d, weight);
        const float by = stats.y == 0.0f ? 0.0f : 1.0f / stats.y;
        (void)put<T>(a, p, mine, d, y.x * by, y.y * by, Unasked());
        if (d == 0) (void)put_lse(a, p, mine, stats.x, stats.y, Unasked());
    }
}

/* ---- host side ---- */

bool attention_rotates(const weft_rope_args *rope, const weft_kv_write_args *kv, const weft_attention_args *a)
{
    const weft_page_layout &p = a->pages, &w = kv->pages;
    const int64_t dim = rope->head_dim, heads = a->num_heads, group = a->group_size;
    if (!side_by_side(rope, kv) || (dim != 64 && dim != 128) || a->head_dim != dim || a->head_dim_v != dim || group < 1 || group > 8) return false;
    /* One new token of each request at most, of whole groups. */
    if (a->tokens != rope->tokens || a->requests != kv->requests || (a->max_query_len != 1 && a->tokens != 1) || a->requests > 65534) return false;
    if (heads != group * a->num_kv_heads || a->num_kv_heads != kv->num_kv_heads || rope->heads != heads + a->num_kv_heads || a->num_kv_heads < 1 ||
        a->first_kv_head < 0 || a->first_head != group * a->first_kv_head)
        return false;
    /* The same tensors and pages. */
    if (a->q != rope->x || (a->q_stride != rope->token_stride && a->tokens > 1) || a->k != kv->k_cache || a->v != kv->v_cache || a->dtype != rope->dtype) return false;
    if (a->query_start_loc != kv->query_start_loc || a->keys != WEFT_KEYS_ALL || a->window != 0 || p.context_size != 1 || w.context_size != 1 ||
        p.context_rank != 0 || p.page_size < 1 || p.interleave < 1 || p.page_size % p.interleave != 0)
        return false;
    if (p.block_table != w.block_table || p.block_table_stride != w.block_table_stride || p.page_size != w.page_size || p.block_table_stride < 1 || p.block_table_stride > INT32_MAX) return false;
    /* No block reads what another one writes. */
    const int64_t x_bytes = ((a->tokens - 1) * a->q_stride + (heads + 2 * a->num_kv_heads) * dim) * 2;
    if (overlap(a->out, ((a->tokens - 1) * a->out_stride + heads * dim) * 2, a->q, x_bytes) || overlap(a->lse, a->tokens * heads * 4, a->q, x_bytes)) return false;
    return attention_mma_fits(a) && attention_whole(a, 1);
}

template <class T, int DIM> static void launch_rotate(const weft_rope_args *rope, const weft_attention_args *a, void *stream)
{
    const Angles angles = {rope->positions, rope->cos_sin, rope->max_positions};
    keep_l1(decode_rotate<T, DIM>, 12 / WIDE_WARPS);
    launch(decode_rotate<T, DIM>, dim3((unsigned)a->num_kv_heads, (unsigned)a->requests + 1), WIDE_WARPS * 32, 0, stream, *a, angles);
}

void rotate_and_attend(const weft_rope_args *rope, const weft_attention_args *a, void *stream)
{
    auto run = [&](auto tag) {
        using T = decltype(tag);
        if (a->head_dim == 64) launch_rotate<T, 64>(rope, a, stream);
        else launch_rotate<T, 128>(rope, a, stream);
    };
    if (a->dtype == WEFT_BF16) run(bf16());
    else run(__half());
}

} // namespace weft
