/* kernels/cuda/step_run.cu - the persistent kernel of a decode step (step.cuh). */
#include "kernels/cuda/step_attention.cuh"
#include "kernels/cuda/step_peer.cuh"
#include "kernels/cuda/step_rows.cuh"

namespace weft {

/* Shared memory: ring | fixed | input | held | cos and sin | sums, from a multiple of 1024 on. */
struct StepSizes {
    int fixed, x, held, cos_sin, sums;
};

#ifdef WEFT_HOPPER

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
template <class T, StepHow HOW> __device__ __forceinline__ void step_take(StepFixed &fixed, const StepInstruction &in)
{
    const StepProduct &p = in.product;
    StepInput<T>::template take<HOW>(p, fixed.places, [&] {
        step_enter(fixed, in);
        if (HOW == HOW_ONE_SUM) {
            step_await(step_group(fixed, p.input), step_flag(fixed, p.input), (int)p.norm.cols / 4);
            step_one_summed<T>(p, fixed.places, step_group(fixed, p.input), step_flag(fixed, p.input));
        }
        if (HOW != HOW_ANY || p.input.group == 0) return;
        step_ahead(in);
        step_summed<T>(p, fixed.places, step_group(fixed, p.input), step_flag(fixed, p.input));
    });
}

/* Whether the warp that finishes arrives at the next wait for its block. */
__device__ __forceinline__ bool step_arrives(const StepInstruction &in)
{
    return in.arrive && step_first_tile(in.product.first) < in.product.tiles;
}

/* Behind the tiles of a product. */
__device__ __forceinline__ void step_leave(StepFixed &fixed, const StepInstruction &in, const StepPlace &place, int turn)
{
    if (step_thread() != 0) return;
    fixed.place = place, fixed.turn = turn; /* read behind the next sync */
    fixed.arrived = step_arrives(in);
    if (in.late) fixed.whole = in.product.keeps, fixed.late_norm = in.product.norm;
}

template <class T, StepHow HOW> __device__ __noinline__ void step_product(StepFixed &its_fixed, const StepInstruction &its_in)
{
    StepFixed &fixed = step_shared(its_fixed);
    const StepInstruction &in = step_shared(its_in);
    step_aside(in.product, step_places(fixed.places, *(volatile int *)&fixed.at[step_thread() / 32]));
    step_take<T, HOW>(fixed, in);
    StepPlace place = fixed.place;
    int turn = fixed.turn;
    step_sync();
    if (step_thread() == 0) step_set_in_flight(&fixed.in_flight, fixed.program.in_flight);
    if ((HOW == HOW_ONE || HOW == HOW_ONE_SUM) && in.fetches) step_fetch(fixed, in.product.kv);
    step_tiles<T, HOW>(in.product, fixed.ring, place, turn, fixed.places, [&] {
        const StepProduct &p = in.product;
        if (p.has_norm) step_arrived(step_back_shares<T>(p.norm, p.norm.y, p.norm.y_stride), fixed.ring.zero);
        if (HOW != HOW_ONE && HOW != HOW_FAR && p.input.group != 0) step_arrived(step_back_shares<T>(p.norm, p.norm.x, p.norm.x_stride), fixed.ring.zero);
        if (in.puts) step_put<T>(fixed);
    });
    step_leave(fixed, in, place, turn);
}

template <class T> __device__ __noinline__ void step_other(StepFixed &fixed, const StepInstruction &in)
{
    if (in.kind == STEP_ATTENTION) {
        if (!in.few || !step_attend_few<T>(fixed, in)) step_attention<T>(fixed, in);
    } else {
        step_enter(fixed, in);
        if (in.puts) step_put<T>(fixed);
        if (in.kind == STEP_SUM) step_sum<T>(in.take, step_group(fixed, in.take.sum), step_flag(fixed, in.take.sum));
        else step_rows<T>(in, fixed.places.sums);
        __threadfence();
    }
}

/* Behind an instruction: all have ended it, and the next one is in the list. */
__device__ __forceinline__ void step_end(StepFixed &fixed)
{
    step_sync();
    if (step_thread() == 0) {
        const StepInstruction &in = fixed.list[*(volatile int *)&fixed.at[0] % STEP_LISTED];
        if (in.kind != STEP_PRODUCT && in.arrive) {
            step_arrive(fixed);
            fixed.arrived = 1;
        }
    }
    if (step_thread() % 32 == 0) ++*(volatile int *)&fixed.at[step_thread() / 32];
    __syncwarp();
}

/* The list, by the warps that compute. Calls leave nothing in registers, so the loop has nothing there. */
template <class T> __device__ __forceinline__ void step_work(char *memory, int fixed_at)
{
    for (;;) {
        StepFixed &fixed = *(StepFixed *)(memory + step_anew((uint32_t)fixed_at));
        const int i = *(volatile int *)&fixed.at[step_thread() / 32], count = fixed.program.count, word = step_thread();
        if (i >= count) return;
        const StepInstruction &in = fixed.list[i % STEP_LISTED];
        if (word < STEP_WORDS && i + 1 < count)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address((const uint64_t *)&fixed.list[(i + 1) % STEP_LISTED] + word)),
                         "l"((const uint64_t *)(fixed.program.list + i + 1) + word)
                         : "memory");
        if (in.kind != STEP_PRODUCT) step_other<T>(fixed, in);
        else if (in.product.how == HOW_ONE) step_product<T, HOW_ONE>(fixed, in);
        else if (in.product.how == HOW_ONE_SUM) step_product<T, HOW_ONE_SUM>(fixed, in);
        else if (in.product.how == HOW_ANY) step_product<T, HOW_ANY>(fixed, in);
        else step_product<T, HOW_FAR>(fixed, in);
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
        const StepInstruction &in = fixed.list[i % STEP_LISTED];
        step_barrier_wait(fixed.ring.entered, i & 1, fixed.ring); /* it is in the list, and what is put aside for it is there */
        if (in.kind == STEP_PRODUCT) {
            const StepProduct &p = in.product;
            const StepPlaces places = step_places(fixed.places, i);
            if (p.sum.group != 0) turn = step_send<T>(p, step_group(fixed, p.sum), step_flag(fixed, p.sum), fixed.ring, turn, places.sums);
            else if (p.twos) turn = step_finish_one<T>(p, places, fixed.ring, turn);
            else turn = step_finish<T>(p, places, fixed.ring, turn);
            __syncwarp();
            if (threadIdx.x % 32 == 0 && step_arrives(in)) step_arrive(fixed);
        }
        barrier_arrive(fixed.ring.done);
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
                      shared_address(&fixed.entered), shared_address(&fixed.done), program.places, 0, program.patience};
        fixed.places = {memory + sizes.x, memory + sizes.held, (float *)(memory + sizes.cos_sin), (float *)(memory + sizes.sums), fixed.pages, fixed.positions, program.cos_sin_bytes / 8};
        fixed.place = {0, 0};
        fixed.turn = fixed.whole = fixed.arrived = 0;
        fixed.in_flight = program.in_flight;
        for (int i = 0; i < STEP_WARPS; i++) fixed.at[i] = 0;
        /* Nobody is past the first wait before this block arrives there. */
        fixed.target = (*(volatile unsigned long long *)program.arrivals / gridDim.x + 1) * gridDim.x;
        for (int g = 0; g < program.num_groups; g++) fixed.calls[g] = *(volatile unsigned *)program.groups[g].counters;
        for (int i = 0; i < program.places; i++) barrier_init(shared_address(&fixed.full[i]), 1), barrier_init(shared_address(&fixed.empty[i]), STEP_WARPS / STEP_TEAMS);
        for (int i = 0; i < STEP_SUMS; i++) barrier_init(shared_address(&fixed.summed[i]), STEP_THREADS), barrier_init(shared_address(&fixed.finished[i]), 32);
        barrier_init(shared_address(&fixed.entered), STEP_THREADS), barrier_init(shared_address(&fixed.done), 32);
        barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < STEP_THREADS) step_work<T>(memory, sizes.fixed);
    else if (threadIdx.x < STEP_THREADS + 32) step_finish_all<T>(fixed);
    else if (threadIdx.x == STEP_THREADS + 32) step_feed(program, fixed.ring, &fixed.in_flight);
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
    launch_at_once(kernel, blocks, STEP_THREADS + 64, bytes, stream, program, sizes);
}

} // namespace weft
