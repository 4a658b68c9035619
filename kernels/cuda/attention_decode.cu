/* kernels/cuda/attention_decode.cu - attention of few queries over many keys.
 *
 * The columns of a tile are the (query, head) pairs of one request that share a KV head, 8 or 16 of
 * them ("rows" of the result); the keys are cut over blocks (splits) and over the warps of a block,
 * 16 keys at a time. Scores are S = K Q and values O = V^T P, so that K and V are the tensor cores'
 * first operand. Both are read once, 16 bytes a lane, straight into its fragments: for K a lane holds
 * 8 neighbouring dims of two keys, for V of four keys, so the inner order is permuted and rows g and
 * g + 8 of output tile (h, t) are dims 64 h + 8 g + 2 t and the next. The splits of an item are merged
 * by its block that ends last or, where they are few, by all of its blocks: they are then one cluster and
 * read each other's shared memory. More rows than 16 are tiles that each read all keys; on Hopper attention_decode_dealt.cu
 * takes those. In a recorded step attention_decode_rotate.cu does the same for whole items, and rotation and writes into pages with it. */
#include "kernels/cuda/attention_decode.cuh"

namespace weft {

enum { CLUSTER_SPLITS = 16, SHORT_KEYS = 512, WIDE_KEYS = 4096 };

/* What a block of a cluster shows to the others: the sums of its split. */
template <int R, int DIM> struct Shown {
    float2 values[R][DIM / 2], stats[R];
};

__device__ __forceinline__ void cluster_sync()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/* What block `rank` of the cluster has where this one has *p. */
__device__ __forceinline__ float2 shown_by(const float2 *p, int rank)
{
    float2 v = *p;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((uint32_t)__cvta_generic_to_shared(p)), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
#endif
    return v;
}

/* Puts the splits of an item together in all of its blocks, which are a cluster, each its share of the rows' elements. */
template <class T, int NT, int DIM> struct ByCluster {
    using Shared = Shown<8 * NT, DIM>;
    const weft_attention_args &a;
    Shared &shown;
    __device__ __forceinline__ void leave(int splits) const
    {
        if (splits > 1) cluster_sync(), cluster_sync(); /* as often as the others */
    }
    __device__ __forceinline__ void keep(int64_t, int, int row, int d, float2 values, float2 stats) const
    {
        shown.values[row][d / 2] = values;
        if (d == 0) shown.stats[row] = stats;
    }
    __device__ __forceinline__ void merge(const Place &p, int64_t, int part, int splits) const
    {
        cluster_sync();
        const int twos = a.head_dim_v / 2;
        for (int i = part + splits * threadIdx.x; i < p.rows * twos; i += splits * DEC_THREADS) {
            const int row = i / twos, two = i % twos;
            float2 stats[CLUSTER_SPLITS], values[CLUSTER_SPLITS];
#pragma unroll
            for (int s = 0; s < CLUSTER_SPLITS; s++)
                if (s < splits) stats[s] = shown_by(&shown.stats[row], s), values[s] = shown_by(&shown.values[row][two], s);
                else stats[s] = make_float2(minus_inf(), 0.0f), values[s] = make_float2(0.0f, 0.0f);
            (void)put_joined<T>(a, p, row, 2 * two, stats, values, *this);
        }
        cluster_sync(); /* no block ends while others read it */
    }
    template <class To> __device__ __forceinline__ uint32_t back(const To *) const { return 0; }
    __device__ __forceinline__ void arrived(uint32_t) const {}
};

/* CLUSTER: the blocks of an item, split.splits neighbours, are a cluster. */
/* On a multiprocessor at once, as far as registers go. */
template <int NT, int WARPS> constexpr int decode_blocks = NT == 1 ? 12 / WARPS : 2;

template <class T, int DIM, int NT, bool CLUSTER, int WARPS = DEC_WARPS>
__global__ void __launch_bounds__(WARPS * 32, decode_blocks<NT, WARPS>) decode(const weft_attention_args a, const Split split)
{
    __shared__ Joined<DIM, NT, WARPS> warps;
    const int tile = CLUSTER ? blockIdx.x / split.splits : blockIdx.x % split.row_tiles;
    const int part = CLUSTER ? blockIdx.x % split.splits : blockIdx.x / split.row_tiles, kv_head = blockIdx.y, r = blockIdx.z;
    if (r == a.requests) { /* one block more, for the tokens behind the last request */
        dependency_wait();
        if (blockIdx.x == 0 && kv_head == 0) clear_padding(a, 0, 1, threadIdx.x, WARPS * 32);
        return;
    }
    /* Before the wait come lengths and tables, which are the host's, and keys of earlier steps: the kernels in front that may
     * still run are of this one. */
    auto enter = [] { dependency_wait(); };
    if constexpr (CLUSTER) {
        using Join = ByCluster<T, NT, DIM>;
        __shared__ typename Join::Shared shared;
        attend_split<T, DIM, NT, WARPS>(a, split, tile, part, kv_head, r, warps, true, enter, Join{a, shared});
    } else {
        using Join = ByLast<T, NT, WARPS>;
        __shared__ typename Join::Shared shared;
        attend_split<T, DIM, NT, WARPS>(a, split, tile, part, kv_head, r, warps, true, enter, Join{a, split, shared});
    }
}

bool attention_mma_fits(const weft_attention_args *a)
{
    if (!(a->scale > 0.0f) || a->dtype == WEFT_F32 || a->dtype != a->kv_dtype || a->head_dim > 128 || a->head_dim_v > 128) return false;
    if ((a->head_dim | a->head_dim_v) % 8 != 0 || a->q_stride % 8 != 0 || a->out_stride % 2 != 0 || !aligned(a->out, 4) || !aligned(a->q, 16) || !aligned(a->k, 16) || !aligned(a->v, 16))
        return false;
    if (a->keys == WEFT_KEYS_NEW) return (a->k_stride | a->v_stride) % 8 == 0;
    return a->pages.page_size % KEYS == 0 && a->pages.page_size < INT32_MAX;
}

/* How many splits fill the machine. */
static int splits_for(const weft_attention_args *a, int64_t items, int64_t seq_len, int rows, int blocks_per_sm)
{
    if (a->cuda == NULL || items > COUNTERS) return 1;
    const size_t room = a->cuda->workspace_bytes / ((size_t)items * (size_t)rows * ((size_t)a->head_dim_v * 4 + sizeof(float2)));
    const int64_t limit = least(least(MAX_SPLITS, (int64_t)room), div_up(seq_len, KEYS * DEC_WARPS));
    const int64_t places = (int64_t)a->cuda->sms * blocks_per_sm;
    /* Many short items even out as they are. */
    if (items >= 4 * places && seq_len <= SHORT_KEYS) return 1;
    return splits_that_fill(items, places, limit);
}

/* Items that need not be cut: two blocks of 6 warps on each multiprocessor, which together have as many keys on their way as three of 4. Not
 * where one request may be much longer than the others: its blocks would end last. */
static bool wide_blocks_fill(const weft_attention_args *a, int64_t items, int64_t seq_len)
{
    if (a->cuda == NULL || seq_len > WIDE_KEYS) return false;
    const int64_t places = 2 * a->cuda->sms, turns = div_up(items, places);
    return 20 * items >= 19 * turns * places;
}

template <class T, int DIM, int NT> static void launch_decode(const weft_attention_args *a, int64_t query_len, int64_t seq_len, void *stream)
{
    Split split = {};
    split.row_tiles = (int)div_up(query_len * least(a->group_size, a->num_heads), 8 * NT);
    const int64_t items = a->requests * a->num_kv_heads * split.row_tiles;
    const int64_t steps = div_up(seq_len, KEYS * DEC_WARPS);
    /* Few keys of few requests: a cluster for each item, all of them at once. Large clusters do not fill a
     * machine evenly, so not for more. */
    if (a->cuda != NULL && steps > 1 && steps <= 2 * CLUSTER_SPLITS && items * CLUSTER_SPLITS <= a->cuda->sms) {
        split.splits = (int)least(steps, CLUSTER_SPLITS);
        const dim3 grid((unsigned)(split.row_tiles * split.splits), (unsigned)a->num_kv_heads, (unsigned)a->requests + 1);
        keep_l1(decode<T, DIM, NT, true>, decode_blocks<NT, DEC_WARPS>);
        if (launch_cluster(decode<T, DIM, NT, true>, grid, DEC_THREADS, split.splits, stream, *a, split)) return;
    }
    const dim3 whole((unsigned)split.row_tiles, (unsigned)a->num_kv_heads, (unsigned)a->requests + 1);
    if constexpr (NT == 1)
        if (wide_blocks_fill(a, items, seq_len)) {
            split.splits = 1;
            keep_l1(decode<T, DIM, NT, false, WIDE_WARPS>, decode_blocks<NT, WIDE_WARPS>);
            launch(decode<T, DIM, NT, false, WIDE_WARPS>, whole, WIDE_WARPS * 32, 0, stream, *a, split);
            return;
        }
    split.splits = splits_for(a, items, seq_len, 8 * NT, decode_blocks<NT, DEC_WARPS>);
    if (a->cuda != NULL) {
        split.counters = a->cuda->counters;
        split.stats = (float2 *)a->cuda->workspace;
        split.partial = (float *)(split.stats + items * split.splits * 8 * NT);
    }
    const dim3 grid((unsigned)(split.row_tiles * split.splits), (unsigned)a->num_kv_heads, (unsigned)a->requests + 1);
    keep_l1(decode<T, DIM, NT, false>, decode_blocks<NT, DEC_WARPS>);
    launch(decode<T, DIM, NT, false>, grid, DEC_THREADS, 0, stream, *a, split);
}

/* No request has more keys here. */
static int64_t most_keys(const weft_attention_args *a, int64_t query_len)
{
    int64_t seq_len = a->max_seq_len;
    if (a->keys == WEFT_KEYS_NEW) seq_len = query_len;
    else if (seq_len == 0) seq_len = a->pages.block_table_stride * a->pages.page_size;
    else seq_len = div_up(seq_len, a->pages.context_size) + a->pages.interleave;
    return a->window > 0 ? least(seq_len, a->window + query_len) : seq_len;
}

bool attention_whole(const weft_attention_args *a, int64_t query_len)
{
    return query_len * least(a->group_size, a->num_heads) <= 8 && wide_blocks_fill(a, a->requests * a->num_kv_heads, most_keys(a, query_len));
}

void attention_decode(const weft_attention_args *a, int64_t query_len, void *stream)
{
    const int64_t seq_len = most_keys(a, query_len);
    if (attention_decode_dealt(a, query_len, seq_len, stream)) return;
    const bool small = a->head_dim <= 64 && a->head_dim_v <= 64, eight = query_len * least(a->group_size, a->num_heads) <= 8;
    auto run = [&](auto tag) {
        using T = decltype(tag);
        if (small && eight) launch_decode<T, 64, 1>(a, query_len, seq_len, stream);
        else if (small) launch_decode<T, 64, 2>(a, query_len, seq_len, stream);
        else if (eight) launch_decode<T, 128, 1>(a, query_len, seq_len, stream);
        else launch_decode<T, 128, 2>(a, query_len, seq_len, stream);
    };
    if (a->dtype == WEFT_BF16) run(bf16());
    else run(__half());
}

} // namespace weft
