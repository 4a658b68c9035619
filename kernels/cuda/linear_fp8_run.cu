/* kernels/cuda/linear_fp8_run.cu - many products of e4m3 weights of one token, and the attention between them, as one launch.
 *
 * Launched one by one, a product's first weights are asked for when its blocks have begun, and those begin when the blocks in
 * front have ended: memory idles for 2 us each time, and for 8 around attention. Here a block stays on each multiprocessor, and the
 * thread that asks for weights goes on from product to product as long as there are places in the ring.
 *
 *     4 warpgroups   multiply (linear_fp8.cu says how)
 *     a thread       asks for pieces, a warp for their scales; a warp finishes items
 *     a warpgroup    attends; keys of earlier steps are asked for while the product in front still runs
 *
 * Every result is written by an exchange, which gives back what was there once it has been performed at the L2. When all of a block's
 * are there, it counts itself; whoever needs them looks at that counter, and reads them past the L1. A fence
 * would also wait for all weights that the multiprocessor has on their way. */
#include "kernels/cuda/linear_fp8_run_attend.cuh"

namespace weft {

static const int64_t run_fixed = 32 << 10; /* of shared memory, besides the ring and the activations */

#ifdef WEFT_HOPPER

/* Job j on its way into its slot, by a warp. */
__device__ __forceinline__ void run_load(const Fp8Run &run, RunShared &s, int j)
{
    static_assert(sizeof(Fp8Job) % 16 == 0, "jobs are copied in 16 bytes");
    const char *from = (const char *)&run.jobs[j];
    const uint32_t to = shared_address(&s.slots[j % RUN_SLOTS]);
    for (int i = threadIdx.x % 32 * 16; i < (int)sizeof(Fp8Job); i += 32 * 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&s.loaded[j % RUN_SLOTS])) : "memory");
}
__device__ __forceinline__ const Fp8Job &run_job(RunShared &s, int j)
{
    barrier_wait(shared_address(&s.loaded[j % RUN_SLOTS]), j / RUN_SLOTS % 2);
    return s.slots[j % RUN_SLOTS];
}
/* The block's item of number `turn`, once the feeder has told. */
__device__ __forceinline__ int run_item(const RunShared &s, int turn)
{
    barrier_wait(shared_address(&s.told[turn % F8_TOLD]), turn / F8_TOLD % 2);
    return s.item[turn % F8_TOLD];
}

/* Asks for all pieces of all jobs, by one thread, and tells which the items are, one in advance. */
__device__ __forceinline__ void run_pieces(const Fp8Run &run, Fp8Ring &ring, RunShared &s)
{
    const uint64_t policy = streamed();
    const int blocks = gridDim.x;
    int turn = 0, ahead = run.in_flight;
    Fp8Place behind = {0, 0};
    auto tell = [&](int item) {
        s.item[turn % F8_TOLD] = item;
        barrier_arrive(shared_address(&s.told[turn++ % F8_TOLD]));
    };
    for (int j = 0; j < run.num_jobs; j++) {
        const Fp8Job &job = run_job(s, j);
        const CUtensorMap *map = &run.jobs[j].map;
        const Fp8End end = job.end;
        const int pieces = fp8_pieces(job.a.k), apart = job.apart, items = job.items, dealt = job.dealt, first = dealt * blocks;
        int item = (int)blockIdx.x < items ? (int)blockIdx.x : -1;
        map_prefetch(map);
        tell(item);
        for (int own = 1; item >= 0; own++) {
            int next = item + blocks;
            if (own >= dealt && first < items) {
                const int number = (int)atomicAdd(job.drawn, 1u);
                if (number == items - first + blocks - 1) *job.drawn = 0; /* the last of all */
                next = first + number;
            }
            if (next >= items) next = -1;
            tell(next);
            const int row = row_of(job, item, end), low = row % apart, block = row / apart;
            for (int piece = 0; piece < pieces; piece++) {
                uint32_t to, barrier;
                if (ahead > 0) ahead--;
                else { /* until the piece that many in front is there */
                    barrier_wait(ring.full + 8 * behind.slot, behind.parity);
                    behind.advance(1, ring.places);
                }
                ring.claim(to, barrier, FP8_PIECE_BYTES);
                fp8_copy_two(to, map, low, piece * FP8_SEGMENTS, block, barrier, policy);
            }
            item = next;
        }
    }
}

/* Brings the scales of all pieces. */
__device__ __forceinline__ void run_scales(const Fp8Run &run, Fp8Ring &ring, RunShared &s)
{
    const int segment = threadIdx.x % FP8_SEGMENTS;
    for (int j = 0, turn = 0; j < run.num_jobs; j++) {
        const Fp8Job &job = run_job(s, j);
        const Fp8End end = job.end;
        const float *scale = job.a.scale;
        const int64_t stride = job.a.scale_stride, phase = job.a.scale_col_phase / 128 + segment;
        const int pieces = fp8_pieces(job.a.k), count = (int)job.a.k / 128;
        ItemScales of;
        int item = run_item(s, turn++);
        ask_hints(job, max(item, 0), end, of);
        while (item >= 0) {
            for (int h = 0; h < 2; h++) of.at[h] = scale + of.hint[h] * stride + phase;
            item = run_item(s, turn++);
            ask_hints(job, max(item, 0), end, of);
            for (int piece = 0; piece < pieces; piece++) {
                const int at = piece * FP8_SEGMENTS;
                ring.bring_scales(scale, [&](int h) { return at + segment < count ? of.at[h] + at : nullptr; });
            }
        }
        if (threadIdx.x % 32 == 0) (void)atomicExch_block(&s.scaled, j + 1);
    }
}

/* Angles and places of heads, of the host's arrays alone, by a warp. A token without a place in the table is not turned. */
__device__ __forceinline__ void run_heads(const Fp8Job &job, RunHeads &heads)
{
    const int lane = threadIdx.x % 32, half = job.apart, position = job.rope.positions[0];
    const bool known = position >= 0 && position < job.rope.max_positions;
#pragma unroll 4
    for (int i = lane; i < 2 * half; i += 32)
        heads.turns[i] = known ? __ldg(job.rope.cos_sin + (int64_t)position * 2 * half + i) : i < half ? 1.0f : 0.0f;
    if (lane == 0) heads.kept = job.pages.tokens > 0 ? place_of(job.pages, 0) : -1;
    __syncwarp();
}

/* Where an item's results go, and what they are made of beside its sums. By a warp, of which 16 lanes have a row each: of pairs 8 first
 * ones, then their mates. Neighbours write together, the even ones y, the odd ones what comes of it. */
struct RunEnd {
    float bias, cos, sin;
    bool turned; /* by cos and sin */
    unsigned short before; /* the residual */
    bf16 *to;
};
__device__ __forceinline__ RunEnd run_end(const Fp8Job &job, const RunHeads &heads, int item, Fp8End end)
{
    const weft_linear_args &a = job.a;
    const int lane = threadIdx.x % 32, r = lane % 16, half = job.apart;
    const int first = row_of(job, item, end) + (end == END_PLAIN ? r : r % 8), row = first + (end != END_PLAIN && r >= 8 ? half : 0);
    const bool odd = lane % 2 == 1;
    RunEnd e = {0.0f, 1.0f, 0.0f, false, 0, odd ? nullptr : (bf16 *)a.y + row};
    if (a.bias != nullptr) e.bias = load(a.bias, a.bias_dtype, row);
    if (end == END_PLAIN) {
        if (job.residual == nullptr) return e;
        e.before = __ldcg((const unsigned short *)job.residual + row);
        if (odd) e.to = job.residual + row - 1;
    } else if (end == END_SILU) {
        if (odd && r < 8) e.to = (bf16 *)job.silu.y + row - 1;
    } else {
        if (first < job.rope.heads * 2 * half) {
            const int at = first % (2 * half);
            e.turned = true;
            e.cos = heads.turns[at], e.sin = r < 8 ? -heads.turns[half + at] : heads.turns[half + at];
        }
        if (odd && job.pages.tokens > 0 && heads.kept >= 0 && row >= job.k_row) {
            const bool value = row >= job.v_row;
            const int dim = (int)(value ? job.pages.head_dim_v : job.pages.head_dim), i = row - 1 - (value ? job.v_row : job.k_row);
            e.to = (bf16 *)(value ? job.pages.v_cache : job.pages.k_cache) + (heads.kept + i / dim * job.pages.pages.page_size) * dim + i % dim;
        }
    }
    return e;
}
/* Gives what comes back of the exchange. */
__device__ __forceinline__ uint32_t run_finish(const Fp8Sums<1, F8_GROUPS> &sums, const RunEnd &e, Fp8End end)
{
    const int lane = threadIdx.x % 32;
    float v = rounded(sums.of(lane % 16, 0) + e.bias), second = v;
    const float mate = __shfl_xor_sync(~0u, v, 8);
    if (end == END_PLAIN) second = v + __uint_as_float((uint32_t)e.before << 16);
    else if (end == END_SILU) second = v / (1.0f + expf(-v)) * mate;
    else if (e.turned) second = v = rounded(v * e.cos + mate * e.sin);
    const float mine = lane % 2 == 0 ? v : second, give = lane % 2 == 0 ? second : v, neighbour = __shfl_xor_sync(~0u, give, 1);
    if (lane >= 16 || e.to == nullptr) return 0;
    return step_exchange(e.to, lane % 2 == 0 ? pair<bf16>(mine, neighbour) : pair<bf16>(neighbour, mine));
}

/* The block's share of what a norm writes: elements [from, to). */
__device__ __forceinline__ void run_share(const Fp8Job &job, int &from, int &to)
{
    const unsigned eights = job.norm.cols > 0 ? (unsigned)job.a.k / 8 : 0;
    from = (int)(eights * blockIdx.x / gridDim.x) * 8, to = (int)(eights * (blockIdx.x + 1) / gridDim.x) * 8;
}

/* Finishes all items of all jobs, and counts the block behind each job, by a warp. */
__device__ __forceinline__ void run_finish_all(const Fp8Run &run, RunShared &s)
{
    const int lane = threadIdx.x % 32;
    for (int j = 0, turn = 0; j < run.num_jobs; j++) {
        const Fp8Job &job = run_job(s, j);
        const Fp8End end = job.end;
        if (end == END_HEADS) run_heads(job, s.heads);
        int from, to;
        run_share(job, from, to);
        uint32_t last = 0, all = 0;
        bool read = false;
        for (int item = 0; item >= 0; turn++) {
            const int at = turn % RUN_SUMS;
            RunEnd e = {};
            item = run_item(s, turn);
            if (item >= 0) e = run_end(job, s.heads, item, end);
            barrier_wait(shared_address(&s.summed[at]), turn / RUN_SUMS % 2);
            all |= last;
            last = item >= 0 ? run_finish(s.sums[at], e, end) : 0;
            barrier_arrive(shared_address(&s.finished[at]));
            /* The share of the norm's result has arrived when it can be read back. */
            for (int i = from + 8 * lane; !read && i < to; i += 8 * 32) all |= step_back((const float *)((const bf16 *)job.norm.y + i));
            read = true;
        }
        const uint32_t nothing = __reduce_or_sync(~0u, (all | last) & run.zero);
        if (lane == 0) run_count(run.products, nothing);
    }
}

/* The input of a product into parts, behind wait(), by all that multiply. */
template <class Wait> __device__ __forceinline__ void run_take(const Fp8Job &job, const Fp8Input<1, F8_GROUPS> &in, bf16 *gains, RunShared &s, Wait wait)
{
    const bool normed = job.norm.cols > 0;
    int from, to;
    run_share(job, from, to);
    if (normed) in.each([&](int piece) { in.copy16(shared_address(gains + in.column(piece)), (const bf16 *)job.norm.gain + in.column(piece)); });
    wait();
    in.ask(normed ? job.norm.x : job.a.x, 0);
    in.arrived();
    float by[1] = {};
    if (normed) norm_factors(job, in, s.squares, by);
    in.split(false, [&](uint4 &eight, int, int column) {
        if (normed) norm_eight(job, eight, gains, by[0], 0, column, column >= from && column < to);
    });
}
/* The same of up to RUN_SHORT pieces: a thread has eight values at most, which stay in its registers. */
enum { RUN_SHORT = 2 * F8_GROUPS };
template <class Wait> __device__ __forceinline__ void run_take_short(const Fp8Job &job, const Fp8Input<1, F8_GROUPS> &in, RunShared &s, Wait wait)
{
    const bool normed = job.norm.cols > 0;
    const int piece = threadIdx.x / 64, column = in.column(piece);
    const bool in_row = piece < in.pieces && column < in.columns;
    const bf16 *x = (const bf16 *)(normed ? job.norm.x : job.a.x) + column;
    uint4 gain = make_uint4(0, 0, 0, 0), eight = gain;
    if (normed && in_row) gain = __ldg((const uint4 *)((const bf16 *)job.norm.gain + column));
    const float cols = (float)in.columns, eps = job.norm.eps;
    int from, to;
    run_share(job, from, to);
    wait();
    if (in_row) eight = __ldcg((const uint4 *)x);
    if (normed) {
        float v[8], g[8], sum = 0.0f;
        fp8_widen(eight, v);
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(v[i], v[i], sum);
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) s.squares[0][threadIdx.x / 32] = sum;
        named_sync(1, F8_THREADS);
        float all = 0.0f;
#pragma unroll
        for (int w = 0; w < F8_WARPS; w++) all += s.squares[0][w];
        const float by = 1.0f / sqrtf(all / cols + eps);
        fp8_widen(gain, g);
#pragma unroll
        for (int i = 0; i < 4; i++) (&eight.x)[i] = pair<bf16>(v[2 * i] * by * g[2 * i], v[2 * i + 1] * by * g[2 * i + 1]);
        if (column >= from && column < to) *(uint4 *)((bf16 *)job.norm.y + column) = eight;
    }
    if (piece < in.pieces) {
        uint2 part, finer;
        const float by = fp8_split(eight, part, finer);
        fp8_put(in.input + piece * FP8_INPUT_BYTES, in.segment(), part, finer);
        if (threadIdx.x % 16 == 0) in.factors[piece * FP8_SEGMENTS + in.segment()] = by;
    }
    writes_visible();
    named_sync(1, F8_THREADS);
}

/* All jobs, by the warps that multiply. */
__device__ __forceinline__ void run_walk(const Fp8Run &run, const Fp8Ring &ring, char *input, RunShared &s)
{
    const int warp = threadIdx.x / 32;
    Fp8Walk<1, F8_GROUPS> walk(ring, 0, input, (const float *)input);
    int turn = 0, attends = 0;
    for (int j = 0; j < run.num_jobs; j++) {
        const Fp8Job &job = run_job(s, j);
        const weft_linear_args &a = job.a;
        if (warp == 1 && j + 2 < run.num_jobs) {
            if (threadIdx.x % 32 == 0)
                while (atomicAdd_block(&s.scaled, 0) < j - 1) {} /* in a block without items nothing else waits for that warp */
            __syncwarp();
            run_load(run, s, j + 2);
        }
        const int pieces = fp8_pieces(a.k);
        float *factors = (float *)(input + pieces * FP8_INPUT_BYTES);
        const Fp8Input<1, F8_GROUPS> in(input, factors, 1, (int)a.k);
        walk.begin(pieces, factors);
        auto wait = [&] {
            if (threadIdx.x == 0) {
                if (job.attends > attends) run_wait(run, run.attended, s.attended + (unsigned long long)job.attends * gridDim.x);
                else run_wait(run, run.products, s.products + (unsigned long long)j * gridDim.x);
            }
            attends = job.attends;
            named_sync(1, F8_THREADS);
        };
        named_sync(1, F8_THREADS); /* the input of the job before has been multiplied */
        if (pieces <= RUN_SHORT) run_take_short(job, in, s, wait);
        else run_take(job, in, (bf16 *)(factors + pieces * FP8_SEGMENTS), s, wait);
        for (int item = 0; item >= 0; turn++) {
            const int at = turn % RUN_SUMS;
            item = run_item(s, turn);
            float sum[1];
            if (item >= 0) walk.item(sum);
            barrier_wait(shared_address(&s.finished[at]), turn / RUN_SUMS % 2 ^ 1);
            if (item >= 0) s.sums[at].put(sum, walk.own);
            barrier_arrive(shared_address(&s.summed[at]));
        }
    }
}

#endif

__global__ void __launch_bounds__(RUN_THREADS, 1) fp8_run(const __grid_constant__ Fp8Run run)
{
#ifdef WEFT_HOPPER
    extern __shared__ __align__(1024) char data[];
    __shared__ RunShared s;
    Fp8Ring ring(data, s.places, run.places);
    if (threadIdx.x == 0) {
        for (int i = 0; i < F8_TOLD; i++) barrier_init(shared_address(&s.told[i]), 1);
        for (int i = 0; i < RUN_SLOTS; i++) barrier_init(shared_address(&s.loaded[i]), 32);
        for (int i = 0; i < RUN_SUMS; i++) barrier_init(shared_address(&s.summed[i]), F8_THREADS), barrier_init(shared_address(&s.finished[i]), 32);
        ring.init();
        s.scaled = 0;
        /* Nobody has counted more than once per instruction, and this block not yet. */
        s.products = *(volatile unsigned long long *)run.products / gridDim.x * gridDim.x;
        s.attended = *(volatile unsigned long long *)run.attended / gridDim.x * gridDim.x;
    }
    __syncthreads();
    const int other = (int)threadIdx.x / 32 - RUN_OTHERS / 32;
    if (other < 0) {
        registers_down<56>();
        if (threadIdx.x < 32)
            for (int j = 0; j < 2 && j < run.num_jobs; j++) run_load(run, s, j);
        run_walk(run, ring, data + run.places * FP8_PIECE_BYTES, s);
    } else if (other < 4) {
        registers_down<56>();
        if (threadIdx.x == RUN_OTHERS) run_pieces(run, ring, s);
        else if (other == 2) run_scales(run, ring, s);
        else if (other == 3) run_finish_all(run, s);
    } else {
        registers_up<200>();
        run_attend(run, s);
    }
#endif
}

/* ---- host side ---- */

int64_t fp8_run_input(const Fp8Job &job)
{
    return fp8_pieces(job.a.k) * (int64_t)(FP8_INPUT_BYTES + FP8_SEGMENTS * 4) + (job.norm.cols > 0 ? 2 * job.a.k : 0);
}

int fp8_run_places(const Fp8Job &job) { return fp8_places(job.a.cuda->shared - run_fixed - fp8_run_input(job), F8_MOST, F8_GROUPS); }

bool fp8_run_takes(const Fp8Job &job)
{
    const weft_linear_args &a = job.a;
    if (!job.paired || a.tokens != 1 || a.y_dtype != WEFT_BF16 || a.add || a.n % 16 != 0 || !aligned(a.y, 4) || !aligned(job.residual, 4)) return false;
    if (job.norm.cols > 0 && (!aligned(job.norm.y, 16) || !aligned(job.norm.x, 16))) return false;
    if (job.end == END_SILU && !aligned(job.silu.y, 4)) return false;
    if (job.end == END_HEADS && (job.apart > 128 || (job.pages.tokens > 0 && (job.pages.head_dim_v % 2 != 0 || !aligned(job.pages.k_cache, 4) || !aligned(job.pages.v_cache, 4)))))
        return false;
    return fp8_run_places(job) >= 2 * F8_LEAST;
}

bool fp8_run_takes(const weft_attention_args *a, int blocks, int *parts, int *rows)
{
    if (a->requests != 1 || a->tokens != 1 || a->dtype != WEFT_BF16 || a->head_dim != RUN_DIM || a->head_dim_v != RUN_DIM || a->keys == WEFT_KEYS_NEW) return false;
    if (a->num_kv_heads < 1 || a->num_kv_heads > blocks || least(a->group_size, a->num_heads) > RUN_ROWS || !attention_mma_fits(a)) return false;
    if (a->max_seq_len < 1 || a->max_seq_len > RUN_KEYS || a->pages.context_size != 1) return false;
    *rows = (int)least(a->group_size, a->num_heads);
    *parts = (int)least(least(RUN_PARTS, blocks / a->num_kv_heads), STEP_PACKETS / ((int64_t)a->num_kv_heads * *rows * RUN_PACKETS));
    return *parts >= 1;
}

bool fp8_run_possible()
{
    cudaFuncAttributes code = {};
    if (cudaFuncGetAttributes(&code, fp8_run) == cudaSuccess) return code.binaryVersion == 90 && (int64_t)code.sharedSizeBytes <= run_fixed;
    (void)cudaGetLastError();
    return false;
}

void fp8_run_launch(const Fp8Run &run, int blocks, int shared, void *stream)
{
    launch_at_once(fp8_run, blocks, RUN_THREADS, shared, stream, run);
}

} // namespace weft
