/* kernels/cuda/attention_prefill_wgmma.cu - attention of many queries on Hopper.
 *
 * A block stays on its multiprocessor and takes items from a queue: some tokens of one request and the query
 * heads (a "unit") that share a KV head, 192 rows (token, head) in all. One warp drives the copy engine: an
 * item's queries, then tiles of 128 keys and their values into rings of two stages. Three warpgroups own 64
 * rows each and run at their own pace, so that the exponentials of one lie under the products of the others;
 * a warpgroup multiplies the first half of a tile's values while it still computes the weights of the second.
 * Tiles go from the last to the first, so the masked ones come first. */
#include "kernels/cuda/attention_prefill_wgmma.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/tensor_map.cuh"

#ifdef WEFT_CUDA_HOPPER

namespace weft {

#ifdef WEFT_HOPPER

static constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;

__device__ __forceinline__ float power_of_2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* What a thread keeps of its two rows (g and g + 8 of its warp's 16) over the tiles. */
template <int DIM> struct Sums {
    float out[DIM / 2], max[2], sum[2];
};

__device__ __forceinline__ RowPlace row_of(const Job &job, const Item &item, int row)
{
    RowPlace r;
    const int token = row / job.unit_heads;
    visible(job.a, keys_of(job.a, item.request), item.query0 + min(token, item.queries - 1), r.from, r.to);
    r.token = token < item.queries ? item.first_token + item.query0 + token : -1;
    r.head = item.unit * job.unit_heads + row % job.unit_heads;
    return r;
}

/* Scores of keys that a row does not see do not count. rows: of the thread's two, 8 apart. */
__device__ __forceinline__ void mask(float (&s)[KEYS / 2], const RowPlace *rows, int key0)
{
    const int column = key0 + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int from = rows[8 * half].from - column, to = rows[8 * half].to - column;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (8 * n + e < from || 8 * n + e >= to) s[4 * n + 2 * half + e] = minus_inf();
    }
}

/* The rows' new maxima. base: what to subtract from scaled scores; ratio: what the old sums are worth now. */
template <int DIM>
__device__ __forceinline__ void raise(Sums<DIM> &t, const float (&s)[KEYS / 2], float scale, float (&base)[2], float (&ratio)[2])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = t.max[half];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) top = fmaxf(top, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        base[half] = top == minus_inf() ? 0.0f : top * scale;
        ratio[half] = power_of_2(fmaf(t.max[half], scale, -base[half]));
        t.max[half] = top;
        t.sum[half] *= ratio[half];
    }
}

/* Scores of 16 keys from 16 c as weights: the first operand of a product, and into the sums. */
template <class T, int DIM>
__device__ __forceinline__ void weigh(Sums<DIM> &t, uint32_t (&p)[4], const float (&s)[KEYS / 2], int c, float scale, const float (&base)[2])
{
#pragma unroll
    for (int i = 0; i < 4; i++) { /* row g, g + 8; the next 8 keys */
        const float x = power_of_2(fmaf(s[8 * c + 2 * i], scale, -base[i % 2])), y = power_of_2(fmaf(s[8 * c + 2 * i + 1], scale, -base[i % 2]));
        t.sum[i % 2] += x + y;
        p[i] = pair<T>(x, y);
    }
}

template <int DIM> __device__ __forceinline__ void rescale(Sums<DIM> &t, const float (&ratio)[2])
{
    if (__all_sync(~0u, ratio[0] == 1.0f && ratio[1] == 1.0f)) return; /* most tiles of long rows raise no maximum */
#pragma unroll
    for (int d = 0; d < DIM / 8; d++)
#pragma unroll
        for (int i = 0; i < 4; i++) t.out[4 * d + i] *= ratio[i / 2];
}

/* q, k, v: descriptors of the tiles. */
template <class T, int DIM> __device__ __forceinline__ void scores_begin(float (&s)[KEYS / 2], uint64_t q, uint64_t k)
{
#pragma unroll
    for (int c = 0; c < DIM / 16; c++) product_shared<T, KEYS>(s, q + (c / 4 * 8192 + c % 4 * 32) / 16, k + (c / 4 * KEYS * 128 + c % 4 * 32) / 16, c > 0);
    products_commit();
}

template <class T, int DIM> __device__ __forceinline__ void put_rows(const weft_attention_args &a, const RowPlace *rows, Sums<DIM> &t, float scale)
{
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = t.sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const RowPlace r = rows[8 * half];
        if (r.token < 0) continue;
        const float by = sum == 0.0f ? 0.0f : 1.0f / sum;
        T *to = (T *)a.out + r.token * a.out_stride + (int64_t)r.head * a.head_dim_v + 2 * q;
#pragma unroll
        for (int d = 0; d < DIM / 8; d++)
            if (8 * d < a.head_dim_v) *(uint32_t *)(to + 8 * d) = pair<T>(t.out[4 * d + 2 * half] * by, t.out[4 * d + 2 * half + 1] * by);
        if (a.lse != nullptr && q == 0)
            a.lse[(int64_t)r.token * a.num_heads + r.head] = sum == 0.0f ? minus_inf() : (t.max[half] * scale + log2f(sum)) * ln_2;
    }
}

/* This warp needs a place of shared memory no more. */
__device__ __forceinline__ void leave(uint64_t *barrier)
{
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(barrier));
}

/* The item, read by the lane whose arrival at q_empty says that it has been read. */
__device__ __forceinline__ Item item_of(const Item &shared)
{
    Item item = {};
    if (threadIdx.x % 32 == 0) item = shared;
    int *words = (int *)&item;
#pragma unroll
    for (int i = 0; i < (int)(sizeof(Item) / sizeof(int)); i++) words[i] = __shfl_sync(~0u, words[i], 0);
    return item;
}

template <class T, int DIM>
__device__ __forceinline__ void multiply_items(const Job &job, Room<DIM> &room, int group)
{
    const weft_attention_args &a = job.a;
    const int lane = threadIdx.x % 128, row0 = group * 64 + lane / 32 * 16 + lane % 32 / 4;
    constexpr int tile_step = Room<DIM>::tile_bytes / 16;
    const uint64_t q = tile_descriptor(shared_address(room.q) + group * (DIM / 64) * 8192, 0);
    const uint64_t k_first = tile_descriptor(shared_address(room.k), 0), v_first = tile_descriptor(shared_address(room.v), KEYS * 128);
    const float scale = a.scale * log2_e;
    RowPlace *rows = room.rows + row0;
    Turn turn;
    uint32_t q_phase = 0;
    for (;;) {
        barrier_wait(shared_address(&room.q_full), q_phase);
        q_phase ^= 1;
        const Item item = item_of(room.item);
        if (item.request < 0) return;
        __syncwarp(); /* the last item's rows have been read */
        rows[0] = row_of(job, item, row0), rows[8] = row_of(job, item, row0 + 8);
        /* Keys that every row of the warpgroup sees. */
        const int all_from = row_of(job, item, group * 64 + 63).from, all_to = row_of(job, item, group * 64).to, tiles = item.tiles;
        int key0 = (item.first_tile + tiles - 1) * KEYS;
        Sums<DIM> t;
#pragma unroll
        for (int d = 0; d < DIM / 2; d++) t.out[d] = 0.0f;
        t.max[0] = t.max[1] = minus_inf(), t.sum[0] = t.sum[1] = 0.0f;
        float s[KEYS / 2], base[2], ratio[2];
        uint32_t p[KEYS / 16][4];
        for (int i = 1; i <= tiles; i++, key0 -= KEYS, turn.next()) {
            barrier_wait(shared_address(&room.k_full[turn.stage]), turn.phase);
            products_begin();
            hold(s);
            scores_begin<T, DIM>(s, q, k_first + turn.stage * tile_step);
            products_wait<0>();
            hold(s);
            leave(&room.k_empty[turn.stage]);
            if (i == tiles) leave(&room.q_empty);
            if (key0 < all_from || key0 + KEYS > all_to) mask(s, rows, key0);
            raise(t, s, scale, base, ratio);
            rescale(t, ratio);
            barrier_wait(shared_address(&room.v_full[turn.stage]), turn.phase);
            /* The values of the first keys are being multiplied while the next weights are computed. */
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
#pragma unroll
                for (int c = KEYS / 16 / PARTS * part; c < KEYS / 16 / PARTS * (part + 1); c++) weigh<T>(t, p[c], s, c, scale, base);
                products_begin();
                hold(t.out);
#pragma unroll
                for (int c = KEYS / 16 / PARTS * part; c < KEYS / 16 / PARTS * (part + 1); c++)
                    product_registers<T, DIM>(t.out, p[c], v_first + turn.stage * tile_step + c * 2048 / 16);
                products_commit();
            }
            products_wait<0>();
            hold(t.out);
            leave(&room.v_empty[turn.stage]);
        }
        if (tiles == 0) {
            __syncwarp();
            leave(&room.q_empty);
        }
        put_rows<T, DIM>(a, rows, t, scale);
    }
}

#endif /* WEFT_HOPPER */

template <class T, int DIM>
__global__ void __launch_bounds__(THREADS, 1) prefill_wgmma(const __grid_constant__ Job job)
{
#ifdef WEFT_HOPPER
    extern __shared__ char unaligned[];
    Room<DIM> &room = *(Room<DIM> *)(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&room.q_full), 1);
        barrier_init(shared_address(&room.q_empty), 4 * GROUPS);
        barrier_init(shared_address(&room.v_here), 1);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&room.k_full[i]), 1);
            barrier_init(shared_address(&room.k_empty[i]), 4 * GROUPS);
            barrier_init(shared_address(&room.v_full[i]), 1);
            barrier_init(shared_address(&room.v_empty[i]), 4 * GROUPS);
        }
        barriers_ready();
    }
    __syncthreads();
    dependency_wait();
    if (group == 0) {
        registers_down<32>();
        if (threadIdx.x < 32) copy_items<DIM>(job, room);
    } else {
        registers_up<160>();
        multiply_items<T, DIM>(job, room, group - 1);
    }
#endif
}

/* ---- host side ---- */

/* base: (rows, heads, dim), row_stride between rows; copies bring box_rows x box_heads x 64 dims. */
static bool encode(CUtensorMap *map, weft_dtype dtype, const void *base, int64_t dim, int64_t heads, int64_t rows, int64_t row_stride, int box_heads,
                   int box_rows)
{
    return tensor_map(map, dtype, base, {dim, heads, rows}, {2 * dim, 2 * row_stride}, {64, box_heads, box_rows});
}

/* The largest power of two up to `most` that divides both. */
static int common_power(int64_t a, int64_t b, int most)
{
    int p = 1;
    while (p < most && a % (2 * p) == 0 && b % (2 * p) == 0) p *= 2;
    return p;
}

template <class T, int DIM>
static bool launch_wgmma(const weft_attention_args *a, int sms, void *stream)
{
    const bool fresh = a->keys == WEFT_KEYS_NEW;
    Job job;
    job.a = *a;
    job.queue = a->cuda != NULL ? a->cuda->counters : NULL;
    job.unit_heads = common_power(a->group_size, common_power(a->first_head, a->num_heads, 64), 64);
    job.units = a->num_heads / job.unit_heads;
    job.box = fresh ? KEYS : common_power(a->pages.page_size, KEYS, KEYS);
    if (KEYS / job.box > 32) return false; /* a lane for each copy */
    /* How many pages there are is not said: as many rows as coordinates reach. */
    const int64_t heads = fresh ? a->num_kv_heads : 1, rows = fresh ? a->tokens : INT32_MAX;
    if (!encode(&job.q, a->dtype, a->q, a->head_dim, a->num_heads, a->tokens, a->q_stride, job.unit_heads, 64 / job.unit_heads) ||
        !encode(&job.k, a->dtype, a->k, a->head_dim, heads, rows, fresh ? a->k_stride : a->head_dim, 1, job.box) ||
        !encode(&job.v, a->dtype, a->v, a->head_dim_v, heads, rows, fresh ? a->v_stride : a->head_dim_v, 1, job.box))
        return false;
    /* Keys and values of a section take half of the L2. */
    const int64_t head_bytes = (a->max_seq_len > 0 ? a->max_seq_len : a->tokens) * (a->head_dim + a->head_dim_v) * 2;
    const int64_t kv_heads = most(1, ((int64_t)24 << 20) / most(1, head_bytes));
    job.section = (int)most(1, least(job.units, kv_heads * most(1, a->group_size / job.unit_heads)));
    const int64_t step = ROWS / job.unit_heads, items = (a->tokens / step + a->requests) * job.units;
    auto kernel = prefill_wgmma<T, DIM>;
    const size_t shared = sizeof(Room<DIM>) + 1024;
    (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    launch(kernel, (unsigned)least(sms, items), THREADS, shared, stream, job);
    return true;
}

} // namespace weft

#endif /* WEFT_CUDA_HOPPER */

namespace weft {

bool attention_prefill_wgmma(const weft_attention_args *a, void *stream)
{
#ifdef WEFT_CUDA_HOPPER
    int device = 0, major = 0, minor = 0, sms = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess || major != 9 || minor != 0)
        return false;
    const bool small = a->head_dim <= 64 && a->head_dim_v <= 64;
    if (a->dtype == WEFT_BF16)
        return small ? launch_wgmma<bf16, 64>(a, sms, stream) : launch_wgmma<bf16, 128>(a, sms, stream);
    return small ? launch_wgmma<__half, 64>(a, sms, stream) : launch_wgmma<__half, 128>(a, sms, stream);
#else
    return false;
#endif
}

} // namespace weft
