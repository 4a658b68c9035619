/* kernels/cuda/step_run.cu - the persistent kernel of a decode step (step.cuh). */
#include "kernels/cuda/step_peer.cuh"
#include "kernels/cuda/step_rows.cuh"

namespace weft {

enum { STEP_WORDS = (int)(sizeof(StepInstruction) / 8), STEP_THREADS = STEP_WARPS * 32 };
static_assert(sizeof(StepInstruction) % 8 == 0 && STEP_WORDS <= STEP_THREADS, "instructions are copied in words, one a thread");

/* Shared memory: ring | fixed | input | held | cos and sin | sums, from a multiple of 1024 on. */
struct StepSizes {
    int fixed, x, held, cos_sin, sums;
};

/* What every block keeps behind its ring. What lives from one instruction to the next is here, and the
 * parts of the kernel are functions that are not inlined: with this much shared memory there is hardly an
 * L1 left, so a register that the compiler keeps in local memory costs a way to the L2. */
struct StepFixed {
    StepInstruction list[2]; /* this instruction and the next */
    int64_t pages[STEP_TOKENS];
    int positions[STEP_TOKENS];
    StepProgram program;
    StepRing ring;
    StepPlaces places;
    StepPlace place;           /* of the ring, where the next product begins */
    int turn;                  /* tiles so far */
    int at[STEP_WARPS];        /* in the list, of each warp that computes */
    int late;                  /* a residual sum is held: that of late_norm; 2: as a whole */
    unsigned calls[STEP_GROUPS]; /* of each group before this launch */
    unsigned long long target; /* arrivals at the next wait; thread 0's */
    weft_rms_norm_args late_norm;
    alignas(8) unsigned long long full[STEP_MOST_PLACES], empty[STEP_MOST_PLACES], summed[STEP_SUMS], finished[STEP_SUMS], listed, done;
};

#ifdef WEFT_HOPPER

/* Until all blocks are here; what they wrote before is seen behind it. All warps of this one have ended the
 * instruction before. */
__device__ __forceinline__ void step_wait(StepFixed &fixed)
{
    if (step_thread() == 0) {
        unsigned long long seen, target = fixed.target, *arrivals = fixed.program.arrivals;
        int spins = 0;
        uint64_t since = 0;
        if (target == 0) {
            asm volatile("atom.add.release.gpu.global.u64 %0, [%1], %2;" : "=l"(seen) : "l"(arrivals), "l"(1ull) : "memory");
            target = (seen / gridDim.x + 1) * gridDim.x;
        } else asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(arrivals), "l"(1ull) : "memory");
        do {
            asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(arrivals) : "memory");
            if (++spins % STEP_SPINS == 0) since = step_waited(since, fixed.program.patience);
        } while (seen < target);
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(arrivals) : "memory");
        fixed.target = target + gridDim.x;
    }
    step_sync();
}

/* The gains of a norm, which the step does not write: into the L2 while the blocks wait. */
__device__ __forceinline__ void step_ahead(const StepInstruction &in)
{
    if (in.kind != STEP_PRODUCT || !in.product.has_norm) return;
    const int at = 128 * ((int)blockIdx.x + (int)gridDim.x * step_thread()); /* a line each */
    if (at < (int)in.product.norm.cols * 2) asm volatile("prefetch.global.L2 [%0];" ::"l"((const char *)in.product.norm.gain + at));
}

/* The shares of a residual sum that wait in shared memory: there alone, or (whole) in their rows. */
template <class T> __device__ __forceinline__ void step_put_held(const weft_rms_norm_args &n, const char *held, bool whole)
{
    const int packs = (int)n.cols / 8;
    const StepPacks mine = step_mine(packs);
    const int each = mine.end - mine.first;
    for (int i = step_thread(); i < (int)n.rows * each; i += STEP_THREADS) {
        const int pack = mine.first + i % each;
        *(uint4 *)((T *)n.residual + i / each * n.residual_stride + 8 * pack) = *(const uint4 *)(held + 16 * (whole ? i / each * packs + pack : i));
    }
}

/* Before an instruction that must not begin sooner. */
template <class T> __device__ __forceinline__ void step_enter(StepFixed &fixed, const StepInstruction &in)
{
    if (!in.wait) return;
    step_ahead(in);
    step_wait(fixed);
    if (!fixed.late) return;
    step_put_held<T>(fixed.late_norm, fixed.places.held, fixed.late == 2);
    step_sync();
    if (step_thread() == 0) fixed.late = 0;
}

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
        if (!entered) step_enter<T>(fixed, in);
        entered = true;
    };
    for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
        const int part = job % in.parts, item = job / in.parts, tile = item % in.row_tiles, head = item / in.row_tiles % a.num_kv_heads;
        if (job != (int)blockIdx.x) step_sync();
        attend_split<T, STEP_HEAD_DIM, 1, STEP_WARPS>(a, split, tile, part, head, item / in.row_tiles / a.num_kv_heads, s.warps, true, enter,
                                                      ByLast<T, 1, STEP_WARPS>{a, split, s.last});
    }
    enter();
    for (int64_t t = a.query_start_loc[a.requests] + blockIdx.x; t < a.tokens; t += gridDim.x) { /* padding */
        for (int i = threadIdx.x; i < a.num_heads * a.head_dim_v; i += STEP_THREADS) ((T *)a.out)[t * a.out_stride + i] = narrow<T>(0.0f);
        for (int h = threadIdx.x; a.lse != nullptr && h < a.num_heads; h += STEP_THREADS) a.lse[t * a.num_heads + h] = minus_inf();
    }
}

__device__ __forceinline__ const StepGroup &step_group(const StepFixed &fixed, const StepSum &sum) { return fixed.program.groups[sum.group - 1]; }
__device__ __forceinline__ unsigned step_flag(const StepFixed &fixed, const StepSum &sum) { return step_flag(fixed.calls[sum.group - 1], sum.call); }

template <class T> __device__ __noinline__ void step_rows(const StepInstruction &in, float *sums)
{
    switch (in.kind) {
    case STEP_EMBEDDING: step_embedding(in.embedding); break;
    case STEP_GATHER: step_gather<T>(in.gather); break;
    case STEP_NORM: step_norm<T>(in.norm, sums); break;
    case STEP_SILU: step_silu<T>(in.silu); break;
    case STEP_ADD: step_add<T>(in.add); break;
    case STEP_ROPE: step_rope<T>(in.rope); break;
    case STEP_KV_WRITE: step_kv_write<T>(in.kv); break;
    default: break;
    }
}

/* A product's input into shared memory. */
template <class T> __device__ __forceinline__ void step_take(StepFixed &fixed, const StepInstruction &in)
{
    const StepProduct &p = in.product;
    if (p.input.group != 0) {
        step_ahead(in);
        step_summed<T>(p, fixed.places, step_group(fixed, p.input), step_flag(fixed, p.input));
    }
    StepInput<T>::take(p, fixed.places);
}

/* Behind the tiles of a product. */
__device__ __forceinline__ void step_leave(StepFixed &fixed, const StepInstruction &in, const StepPlace &place, int turn)
{
    if (step_thread() != 0) return;
    fixed.place = place, fixed.turn = turn; /* read behind the next sync */
    if (in.late) fixed.late = 1 + in.product.keeps, fixed.late_norm = in.product.norm;
}

template <class T, bool FAR> __device__ __noinline__ void step_product(StepFixed &fixed, const StepInstruction &in)
{
    step_enter<T>(fixed, in);
    step_take<T>(fixed, in);
    StepPlace place = fixed.place;
    int turn = fixed.turn;
    step_sync();
    step_tiles<T, FAR>(in.product, fixed.ring, place, turn, fixed.places);
    step_leave(fixed, in, place, turn);
}

template <class T> __device__ __noinline__ void step_other(StepFixed &fixed, const StepInstruction &in)
{
    if (in.kind == STEP_ATTENTION) {
        step_attention<T>(fixed, in);
    } else {
        step_enter<T>(fixed, in);
        if (in.kind == STEP_SUM) step_sum<T>(in.take, step_group(fixed, in.take.sum), step_flag(fixed, in.take.sum));
        else step_rows<T>(in, fixed.places.sums);
    }
}

/* Behind an instruction: all have ended it, and the next one is in the list. */
__device__ __forceinline__ void step_end(StepFixed &fixed)
{
    const int warp = step_thread() / 32, at = *(volatile int *)&fixed.at[warp];
    step_barrier_wait(fixed.ring.done, at & 1, fixed.ring);
    barrier_arrive(fixed.ring.listed); /* not before: the warp that finishes would go on, and could end the next phase of `done` */
    step_sync();
    if (step_thread() % 32 == 0) fixed.at[warp] = at + 1;
    __syncwarp();
}

/* The list, by the warps that compute. Calls leave nothing in registers, so the loop has nothing there. */
template <class T> __device__ __forceinline__ void step_work(char *memory, int fixed_at)
{
    for (;;) {
        StepFixed &fixed = *(StepFixed *)(memory + step_anew((uint32_t)fixed_at));
        const int i = *(volatile int *)&fixed.at[step_thread() / 32], count = fixed.program.count, word = step_thread();
        if (i >= count) return;
        const StepInstruction &in = fixed.list[i & 1];
        if (word < STEP_WORDS && i + 1 < count)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address((const uint64_t *)&fixed.list[(i + 1) & 1] + word)),
                         "l"((const uint64_t *)(fixed.program.list + i + 1) + word)
                         : "memory");
        if (in.kind != STEP_PRODUCT) step_other<T>(fixed, in);
        else in.product.far ? step_product<T, true>(fixed, in) : step_product<T, false>(fixed, in);
        asm volatile("cp.async.wait_all;" ::: "memory");
        step_end(*(StepFixed *)(memory + step_anew((uint32_t)fixed_at)));
    }
}

/* The list, by the warp that finishes tiles. */
template <class T> __device__ __forceinline__ void step_finish_all(StepFixed &fixed)
{
    const int count = fixed.program.count;
    int turn = 0;
    for (int i = 0; i < count; i++) {
        const StepInstruction &in = fixed.list[i & 1];
        if (in.kind == STEP_PRODUCT) {
            StepFinish<T> finish;
            finish.begin(in.product, fixed.places);
            const StepProduct &p = in.product;
            if (p.sum.group == 0) step_finish<T>(p, finish, fixed.ring, turn, fixed.places.sums);
            else step_send<T>(p, step_group(fixed, p.sum), step_flag(fixed, p.sum), fixed.ring, turn, fixed.places.sums);
        }
        barrier_arrive(fixed.ring.done);
        step_barrier_wait(fixed.ring.listed, i & 1, fixed.ring);
    }
}

#endif

template <class T> __global__ void __launch_bounds__(STEP_THREADS + 64, 1) step_kernel(const __grid_constant__ StepProgram program, const __grid_constant__ StepSizes sizes)
{
#ifdef WEFT_HOPPER
    extern __shared__ __align__(1024) char memory[];
    StepFixed &fixed = *(StepFixed *)(memory + sizes.fixed);
    if (threadIdx.x < STEP_WORDS) ((uint64_t *)&fixed.list[0])[threadIdx.x] = ((const uint64_t *)program.list)[threadIdx.x];
    if (threadIdx.x == 0) {
        fixed.program = program;
        fixed.ring = {shared_address(memory), shared_address(fixed.full), shared_address(fixed.empty), shared_address(fixed.summed), shared_address(fixed.finished),
                      shared_address(&fixed.listed), shared_address(&fixed.done), program.places, program.patience};
        fixed.places = {memory + sizes.x, memory + sizes.held, (float *)(memory + sizes.cos_sin), (float *)(memory + sizes.sums), fixed.pages, fixed.positions};
        fixed.place = {0, 0};
        fixed.turn = fixed.late = 0;
        for (int i = 0; i < STEP_WARPS; i++) fixed.at[i] = 0;
        fixed.target = 0;
        for (int g = 0; g < program.num_groups; g++) fixed.calls[g] = *(volatile unsigned *)program.groups[g].counters;
        for (int i = 0; i < program.places; i++) barrier_init(shared_address(&fixed.full[i]), 1), barrier_init(shared_address(&fixed.empty[i]), 1);
        for (int i = 0; i < STEP_SUMS; i++) barrier_init(shared_address(&fixed.summed[i]), STEP_THREADS), barrier_init(shared_address(&fixed.finished[i]), 32);
        barrier_init(shared_address(&fixed.listed), STEP_THREADS), barrier_init(shared_address(&fixed.done), 32);
        barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < STEP_THREADS) step_work<T>(memory, sizes.fixed);
    else if (threadIdx.x < STEP_THREADS + 32) step_finish_all<T>(fixed);
    else if (threadIdx.x == STEP_THREADS + 32) step_feed(program, fixed.ring);
    if (blockIdx.x == 0 && threadIdx.x == 0) /* behind a wait: all blocks have read what they count from */
        for (int g = 0; g < program.num_groups; g++) *(volatile unsigned *)program.groups[g].counters = step_flag(fixed.calls[g], program.groups[g].calls - 1);
#endif
}

/* ---- host side ---- */

static size_t align_up(size_t bytes) { return (bytes + 127) & ~(size_t)127; }

size_t step_room() { return STEP_SHARED - align_up(sizeof(StepFixed)) - 1024; }

bool step_possible(int device, int blocks)
{
    int major = 0, shared = 0, sms = 0;
    (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    (void)cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    (void)cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    cudaFuncAttributes code = {};
    /* Both: loading is not left to a capture. */
    if (cudaFuncGetAttributes(&code, step_kernel<__half>) != cudaSuccess || cudaFuncGetAttributes(&code, step_kernel<bf16>) != cudaSuccess)
        (void)cudaGetLastError();
    return major == 9 && code.binaryVersion == 90 && shared >= STEP_SHARED && blocks <= sms;
}

void step_launch(const StepProgram &program, int blocks, weft_dtype dtype, void *stream)
{
    StepSizes sizes;
    sizes.fixed = program.places * STEP_PIECE_BYTES;
    sizes.x = sizes.fixed + (int)align_up(sizeof(StepFixed));
    sizes.held = sizes.x + (int)align_up((size_t)program.x_bytes);
    sizes.cos_sin = sizes.held + (int)align_up((size_t)program.held_bytes);
    sizes.sums = sizes.cos_sin + (int)align_up((size_t)program.cos_sin_bytes);
    const int bytes = sizes.sums + (int)align_up((size_t)program.sums_bytes);
    void (*kernel)(const StepProgram, const StepSizes) = dtype == WEFT_BF16 ? step_kernel<bf16> : step_kernel<__half>;
    (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    cudaLaunchConfig_t config = {};
    config.gridDim = (unsigned)blocks;
    config.blockDim = STEP_THREADS + 64;
    config.dynamicSmemBytes = (size_t)bytes;
    config.stream = (cudaStream_t)stream;
    cudaLaunchAttribute together = {}; /* all blocks at once, or none */
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    config.attrs = &together;
    config.numAttrs = 1;
    (void)cudaLaunchKernelEx(&config, kernel, program, sizes);
}

} // namespace weft
