/* kernels/cuda/linear_fp8.cu - products of e4m3 weights and up to 8 tokens of bfloat16 on Hopper (fp8.cuh).
 *
 * One block on each multiprocessor, and never two, takes turns at 16 rows of w. A thread of its own asks for them
 * before the kernel in front has ended. */
#include "kernels/cuda/fp8_stream.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/tensor_map.cuh"

namespace weft {

enum {
    F8_PLACES = 8,        /* of a ring */
    F8_LEAST = 6,
    F8_SHARED = 116 << 10 /* at least, so that a multiprocessor never takes two blocks of a product */
};

static const int64_t fixed_bytes = 10 << 10; /* of shared memory, besides the ring and the activations */

/* Activations and their factors. */
static int64_t input_bytes(const weft_linear_args *a)
{
    return fp8_padded(a->tokens) * (int64_t)fp8_pieces(a->k) * (FP8_INPUT_BYTES + FP8_SEGMENTS * 4);
}

#ifdef WEFT_HOPPER

struct ProductShared {
    Fp8Barriers barriers;
    Fp8Sums sums[2];
};

/* Scales of a lane (Fp8Scales); items are tiles. */
struct ProductScales {
    const weft_linear_args &a;
    Fp8Lane lane;
    const float *row;
    __device__ __forceinline__ int hint(int tile) const { return __ldg(a.scale_row + min(16 * tile + lane.row, (int)a.n - 1)); }
    __device__ __forceinline__ void begin(int, int hint) { row = a.scale + hint * a.scale_stride + a.scale_col_phase / 128 + lane.segment; }
    __device__ __forceinline__ const float *at(int piece) const
    {
        return (piece * FP8_SEGMENTS + lane.segment) * 128 < (int)a.k ? row + piece * FP8_SEGMENTS : nullptr;
    }
};

#endif

template <int TOKENS> __global__ void __launch_bounds__(F8_THREADS + 32, 1) fp8_rows(const __grid_constant__ CUtensorMap map, const weft_linear_args a, int places)
{
#ifdef WEFT_HOPPER
    extern __shared__ __align__(1024) char data[];
    __shared__ ProductShared s;
    const int pieces = fp8_pieces(a.k), tiles = (int)((a.n + 15) / 16), tokens = (int)a.tokens;
    const bool feeder = threadIdx.x >= F8_THREADS;
    Fp8Ring ring(data, s.barriers, places, feeder);
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    if (feeder) {
        if (threadIdx.x != F8_THREADS) return;
        const uint64_t policy = fp8_policy();
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
            for (int piece = 0; piece < pieces; piece++) {
                uint32_t to, barrier;
                ring.claim(to, barrier, FP8_PIECE_BYTES);
                fp8_copy(to, &map, 16 * tile, piece * FP8_SEGMENTS, barrier, policy);
                fp8_copy(to + FP8_PIECE_BYTES / 2, &map, 16 * tile + 8, piece * FP8_SEGMENTS, barrier, policy);
            }
        return;
    }
    char *input = data + places * FP8_PIECE_BYTES;
    float *factors = (float *)(input + TOKENS * pieces * FP8_INPUT_BYTES);
    const ProductScales from = {a, Fp8Lane(threadIdx.x), nullptr};
    const Fp8Scales<ProductScales> scales(from, threadIdx.x, blockIdx.x, pieces, tiles, from.hint(blockIdx.x), from.hint(blockIdx.x + gridDim.x));
    Fp8Walk<TOKENS, ProductScales> walk(ring, scales, input, factors);
    dependency_wait();
    fp8_split_tokens(input, factors, tokens, TOKENS, (int)a.k, false, [&](int t, int j) { return *(const uint4 *)((const bf16 *)a.x + t * a.x_stride + j); });
    named_sync(1, F8_THREADS);
    const int t = threadIdx.x / 16, r = threadIdx.x % 16;
    int side = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, side ^= 1) {
        float sum[TOKENS];
        walk.item(sum);
        s.sums[side].put(sum, walk.own);
        named_sync(1, F8_THREADS);
        if (t < tokens && 16 * (int64_t)tile + r < a.n) finish(a, t, 16 * (int64_t)tile + r, s.sums[side].of(r, t));
    }
#endif
}

static bool fits(const weft_linear_args *a)
{
#ifdef WEFT_CUDA_HOPPER
    if (a->cuda == NULL || !a->cuda->hopper || a->tokens > F8_TOKENS || a->x_dtype != WEFT_BF16 || a->n >= 1 << 30 || a->k % 128 != 0) return false;
    return F8_LEAST * FP8_PIECE_BYTES + input_bytes(a) + fixed_bytes <= a->cuda->shared;
#else
    return false;
#endif
}

template <int TOKENS> static void start(const CUtensorMap &map, const weft_linear_args *a, int places, void *stream)
{
    const size_t bytes = (size_t)most(places * (int64_t)FP8_PIECE_BYTES + input_bytes(a), F8_SHARED);
    (void)cudaFuncSetAttribute(fp8_rows<TOKENS>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    launch(fp8_rows<TOKENS>, (unsigned)least(a->cuda->sms, div_up(a->n, 16)), F8_THREADS + 32, bytes, stream, map, *a, places);
}

bool fp8_product(const weft_linear_args *a, void *stream)
{
    CUtensorMap map;
    if (!fits(a) || !rows_map(&map, a->w, a->n, a->k, a->w_stride, FP8_SEGMENTS)) return false;
    const int places = fp8_places(a->cuda->shared - fixed_bytes - input_bytes(a), F8_PLACES);
    switch (fp8_padded(a->tokens)) {
    case 1: start<1>(map, a, places, stream); break;
    case 2: start<2>(map, a, places, stream); break;
    case 4: start<4>(map, a, places, stream); break;
    default: start<8>(map, a, places, stream);
    }
    return true;
}

} // namespace weft
