/* kernels/cuda/linear_fp8.cu - products of e4m3 weights and up to 8 tokens of bfloat16 on Hopper (fp8.cuh).
 *
 * One block on each multiprocessor, and never two, takes turns at items of 16 rows of w. A thread of its own asks for them
 * before the kernel in front has ended. Memory serves some multiprocessors 10% faster than others: the first items are dealt
 * out, the rest are drawn. A norm in front of the product is done by every block for itself, each of which
 * writes its share of the result. What is done with pairs of results (silu, rotation) makes an item of 8 rows and the
 * 8 rows of their mates. */
#include "kernels/cuda/linear_fp8_job.cuh"
#include "kernels/cuda/tensor_map.cuh"

namespace weft {

enum {
    F8_PLACES = 16,        /* of a ring */
    F8_SHARED = 116 << 10, /* at least, so that a multiprocessor never takes two blocks of a product */
    F8_HEAD = 256          /* elements of a head that is rotated, at most */
};

static const int64_t fixed_bytes = 24 << 10; /* of shared memory, besides the ring and the activations */

/* Activations, their factors and, with a norm, its gains. */
static int64_t input_bytes(const weft_linear_args *a, bool norm)
{
    return fp8_padded(a->tokens) * (int64_t)fp8_pieces(a->k) * (FP8_INPUT_BYTES + FP8_SEGMENTS * 4) + (norm ? 2 * a->k : 0);
}

#ifdef WEFT_HOPPER

template <int TOKENS, int END> struct ProductShared {
    Fp8Places places;
    unsigned long long known; /* barrier: angles and places */
    Fp8Sums<TOKENS, F8_GROUPS> sums[2];
    unsigned long long told[F8_TOLD]; /* barriers */
    int item[F8_TOLD];                /* the block's items in turn, -1 behind the last */
    alignas(16) float squares[TOKENS][F8_WARPS];
    int64_t kept[TOKENS];                                                   /* of tokens in the pages */
    float turns[END == END_HEADS ? TOKENS : 1][END == END_HEADS ? F8_HEAD : 1]; /* of tokens: cosines, then sines */
};

/* The block's item of number `turn`, once the feeder has told. */
template <int TOKENS, int END> __device__ __forceinline__ int item_of(const ProductShared<TOKENS, END> &s, int turn)
{
    barrier_wait(shared_address(&s.told[turn % F8_TOLD]), turn / F8_TOLD % 2);
    return s.item[turn % F8_TOLD];
}

/* Angles and places of the tokens, of the host's arrays alone, by one warp. A token without a place in the table is not turned. */
template <int TOKENS, int END> __device__ __forceinline__ void look_up(const Fp8Job &job, ProductShared<TOKENS, END> &s)
{
    const int tokens = (int)job.a.tokens, half = job.apart, lane = threadIdx.x % 32;
    for (int t = 0; t < tokens; t++) {
        const int position = job.rope.positions[t];
        const bool known = position >= 0 && position < job.rope.max_positions;
#pragma unroll 4
        for (int i = lane; i < 2 * half; i += 32)
            s.turns[t][i] = known ? __ldg(job.rope.cos_sin + (int64_t)position * 2 * half + i) : i < half ? 1.0f : 0.0f;
    }
    if (lane < tokens) s.kept[lane] = job.pages.tokens > 0 ? place_of(job.pages, lane) : -1;
    barrier_arrive(shared_address(&s.known));
}

/* Brings the scales of all pieces, and looks up what is known of heads while the ring is full. */
template <int TOKENS, int END> __device__ __forceinline__ void bring_all_scales(const Fp8Job &job, Fp8Ring &ring, ProductShared<TOKENS, END> &s)
{
    const weft_linear_args &a = job.a;
    const int pieces = fp8_pieces(a.k), segment = threadIdx.x % FP8_SEGMENTS, count = (int)a.k / 128;
    ItemScales of;
    int item = blockIdx.x;
    ask_hints(job, item, (Fp8End)END, of);
    for (int turn = 1; item >= 0; turn++) {
        for (int h = 0; h < 2; h++) of.at[h] = a.scale + of.hint[h] * a.scale_stride + a.scale_col_phase / 128 + segment;
        item = item_of(s, turn);
        ask_hints(job, max(item, 0), (Fp8End)END, of);
        for (int piece = 0; piece < pieces; piece++) {
            const int at = piece * FP8_SEGMENTS;
            ring.bring_scales(a.scale, [&](int h) { return at + segment < count ? of.at[h] + at : nullptr; });
            if (END == END_HEADS && turn == 1 && piece == min(pieces, ring.places) - 1) look_up(job, s);
        }
    }
}

/* Asks for the pieces of all items, and tells which they are, one in advance. */
template <int TOKENS, int END> __device__ __forceinline__ void bring_all_pieces(const Fp8Job &job, Fp8Ring &ring, ProductShared<TOKENS, END> &s)
{
    const uint64_t policy = streamed();
    const int pieces = fp8_pieces(job.a.k), blocks = gridDim.x, first = job.dealt * blocks;
    auto tell = [&](int turn, int item) {
        s.item[turn % F8_TOLD] = item;
        barrier_arrive(shared_address(&s.told[turn % F8_TOLD]));
    };
    int item = blockIdx.x;
    tell(0, item);
    for (int turn = 1; item >= 0; turn++) {
        int next = item + blocks;
        if (turn >= job.dealt && first < job.items) {
            if (turn == job.dealt) dependency_wait_only(); /* others may still draw from there */
            const int number = (int)atomicAdd(job.drawn, 1u);
            if (number == job.items - first + blocks - 1) *job.drawn = 0; /* the last of all */
            next = first + number;
        }
        tell(turn, next < job.items ? next : -1);
        const int row = row_of(job, item, (Fp8End)END), low = row % job.apart, block = row / job.apart;
        for (int piece = 0; piece < pieces; piece++) {
            uint32_t to, barrier;
            ring.claim(to, barrier, FP8_PIECE_BYTES);
            if (job.paired) { /* a copy takes its thread as long whatever its size */
                fp8_copy_two(to, &job.map, low, piece * FP8_SEGMENTS, block, barrier, policy);
                continue;
            }
            fp8_copy(to, &job.map, row, piece * FP8_SEGMENTS, barrier, policy);
            fp8_copy(to + FP8_PIECE_BYTES / 2, &job.map, row + job.apart, piece * FP8_SEGMENTS, barrier, policy);
        }
        item = next < job.items ? next : -1;
    }
}

/* An item's sums of token t into results; r: row of 8, or of 16 where there are no pairs. */
template <int TOKENS, int END>
__device__ __forceinline__ void finish_item(const Fp8Job &job, const ProductShared<TOKENS, END> &s, const Fp8Sums<TOKENS, F8_GROUPS> &sums, int item, int t, int r, float residual)
{
    const int row = row_of(job, item, (Fp8End)END) + r, mate = row + job.apart;
    const weft_linear_args &a = job.a;
    if constexpr (END == END_PLAIN) {
        if (row >= a.n) return;
        const float v = sums.of(r, t);
        finish(a, t, row, v);
        if (job.residual != nullptr)
            job.residual[t * job.residual_stride + row] = narrow<bf16>(rounded(v + (a.bias != nullptr ? load(a.bias, a.bias_dtype, row) : 0.0f)) + residual);
        return;
    }
    float first = sums.of(r, t), second = sums.of(8 + r, t);
    if (a.bias != nullptr) first += load(a.bias, a.bias_dtype, row), second += load(a.bias, a.bias_dtype, mate);
    first = rounded(first), second = rounded(second);
    bf16 *y = (bf16 *)a.y + t * a.y_stride;
    if constexpr (END == END_SILU) {
        y[row] = narrow<bf16>(first), y[mate] = narrow<bf16>(second);
        ((bf16 *)job.silu.y)[t * job.silu.y_stride + row] = narrow<bf16>(first / (1.0f + expf(-first)) * second);
    } else {
        const int half = job.apart, at = row % (2 * half);
        barrier_wait(shared_address(&s.known), 0);
        if (row < job.rope.heads * 2 * half) {
            const float cos = s.turns[t][at], sin = s.turns[t][half + at], x = first;
            first = x * cos - second * sin, second = second * cos + x * sin;
        }
        y[row] = narrow<bf16>(first), y[mate] = narrow<bf16>(second);
        if (job.pages.tokens == 0 || s.kept[t] < 0) return;
        auto keep = [&](int of, float v) {
            if (of < job.k_row) return;
            const bool value = of >= job.v_row;
            const int dim = (int)(value ? job.pages.head_dim_v : job.pages.head_dim), i = of - (value ? job.v_row : job.k_row);
            bf16 *cache = (bf16 *)(value ? job.pages.v_cache : job.pages.k_cache);
            cache[(s.kept[t] + i / dim * job.pages.pages.page_size) * dim + i % dim] = narrow<bf16>(v);
        };
        keep(row, first), keep(mate, second);
    }
}

#endif

template <int TOKENS, int END> __global__ void __launch_bounds__(F8_THREADS + 64, TOKENS == 1 ? 2 : 1) fp8_rows(const __grid_constant__ Fp8Job job)
{
#ifdef WEFT_HOPPER
    extern __shared__ __align__(1024) char data[];
    __shared__ ProductShared<TOKENS, END> s;
    const weft_linear_args &a = job.a;
    const int pieces = fp8_pieces(a.k), tokens = (int)a.tokens;
    Fp8Ring ring(data, s.places, job.places);
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.known), 32);
        for (int i = 0; i < F8_TOLD; i++) barrier_init(shared_address(&s.told[i]), 1);
        ring.init();
    }
    __syncthreads();
    if (threadIdx.x >= F8_THREADS) {
        if (threadIdx.x >= F8_THREADS + 32) bring_all_scales(job, ring, s);
        else if (threadIdx.x == F8_THREADS) bring_all_pieces(job, ring, s);
        return;
    }
    char *input = data + job.places * FP8_PIECE_BYTES;
    float *factors = (float *)(input + TOKENS * pieces * FP8_INPUT_BYTES);
    bf16 *gains = (bf16 *)(factors + TOKENS * pieces * FP8_SEGMENTS);
    const Fp8Input<TOKENS, F8_GROUPS> in(input, factors, tokens, (int)a.k);
    const bool normed = job.norm.cols > 0;
    if (normed) in.each([&](int piece) { in.copy16(shared_address(gains + in.column(piece)), (const bf16 *)job.norm.gain + in.column(piece)); });
    Fp8Walk<TOKENS, F8_GROUPS> walk(ring, pieces, input, factors);
    const unsigned eights = (unsigned)a.k / 8; /* of a token: the block's share of what a norm writes */
    int own_from = (int)(eights * blockIdx.x / gridDim.x) * 8, own_to = (int)(eights * (blockIdx.x + 1) / gridDim.x) * 8;
    asm volatile("" : "+r"(own_from), "+r"(own_to)); /* before the wait */
    dependency_wait();
    in.ask(normed ? job.norm.x : a.x, normed ? job.norm.x_stride : a.x_stride);
    in.arrived();
    float by[TOKENS] = {};
    if (normed) norm_factors(job, in, s.squares, by);
    in.split(false, [&](uint4 &eight, int token, int column) {
        if (normed) norm_eight(job, eight, gains, by[token], token, column, column >= own_from && column < own_to);
    });
    constexpr int ROWS = END == END_PLAIN ? 16 : 8; /* of an item that a thread of each finishes */
    const int t = threadIdx.x / ROWS, r = threadIdx.x % ROWS;
    for (int turn = 0, item = blockIdx.x; item >= 0; turn++) {
        const int side = turn % 2;
        float residual = 0.0f, sum[TOKENS];
        if (END == END_PLAIN && job.residual != nullptr && t < tokens && 16 * item + r < a.n) residual = widen(job.residual[t * job.residual_stride + 16 * item + r]);
        walk.item(sum);
        s.sums[side].put(sum, walk.own);
        named_sync(1, F8_THREADS);
        if (t < tokens) finish_item<TOKENS, END>(job, s, s.sums[side], item, t, r, residual);
        item = item_of(s, turn + 1);
    }
#endif
}

bool fp8_fits(const weft_linear_args *a, bool norm)
{
#ifdef WEFT_CUDA_HOPPER
    if (a->cuda == NULL || !a->cuda->hopper || a->tokens < 1 || a->tokens > F8_TOKENS || a->x_dtype != WEFT_BF16 || a->w_dtype != WEFT_F8E4M3) return false;
    if (!skinny_fits(a) || a->n < 1 || a->n >= 1 << 30 || a->k < 1 || a->k % 128 != 0) return false;
    return F8_LEAST * FP8_PIECE_BYTES + input_bytes(a, norm) + fixed_bytes <= a->cuda->shared;
#else
    return false;
#endif
}

template <int TOKENS, int END> static void start(Fp8Job &job, void *stream)
{
    const weft_linear_args *a = &job.a;
    const bool norm = job.norm.cols > 0;
    job.places = fp8_places(a->cuda->shared - fixed_bytes - input_bytes(a, norm), F8_PLACES, F8_GROUPS);
    job.dealt = fp8_dealt(job, job.places);
    job.drawn = a->cuda->counters;
    const size_t bytes = (size_t)most(job.places * (int64_t)FP8_PIECE_BYTES + input_bytes(a, norm), F8_SHARED);
    (void)cudaFuncSetAttribute(fp8_rows<TOKENS, END>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    launch(fp8_rows<TOKENS, END>, (unsigned)least(a->cuda->sms, job.items), F8_THREADS + 64, bytes, stream, job);
}

template <int END> static void by_tokens(Fp8Job &job, void *stream)
{
    switch (fp8_padded(job.a.tokens)) {
    case 1: start<1, END>(job, stream); break;
    case 2: start<2, END>(job, stream); break;
    case 4: start<4, END>(job, stream); break;
    default: start<8, END>(job, stream);
    }
}

bool fp8_job(const weft_linear_args *a, const Fp8Joins &joins, Fp8Job *to)
{
    Fp8Job job;
    memset(&job, 0, sizeof job);
    if (!fp8_fits(a, joins.norm != NULL)) return false;
    job.a = *a;
    if (joins.norm != NULL) job.norm = *joins.norm;
    job.residual = (bf16 *)joins.residual, job.residual_stride = joins.residual_stride;
    job.end = END_PLAIN, job.items = (int)div_up(a->n, 16), job.apart = 8;
    if (joins.silu != NULL) {
        job.silu = *joins.silu;
        job.end = END_SILU, job.items = (int)(a->n / 16), job.apart = (int)(a->n / 2);
    } else if (joins.rope != NULL) {
        job.rope = *joins.rope;
        job.end = END_HEADS, job.items = (int)(a->n / 16), job.apart = (int)(job.rope.head_dim / 2);
        if (joins.pages != NULL) {
            job.pages = *joins.pages;
            job.k_row = (int)(((const bf16 *)job.pages.k) - (const bf16 *)a->y), job.v_row = (int)(((const bf16 *)job.pages.v) - (const bf16 *)a->y);
        }
    }
    job.paired = a->n % job.apart == 0;
    if (job.paired ? !pairs_map(&job.map, a->w, a->n, a->k, a->w_stride, job.apart, FP8_SEGMENTS) : !rows_map(&job.map, a->w, a->n, a->k, a->w_stride, FP8_SEGMENTS))
        return false;
    *to = job;
    return true;
}

bool fp8_product(const weft_linear_args *a, const Fp8Joins &joins, void *stream)
{
    Fp8Job job;
    if (!fp8_job(a, joins, &job)) return false;
    if (job.end == END_SILU) by_tokens<END_SILU>(job, stream);
    else if (job.end == END_HEADS) by_tokens<END_HEADS>(job, stream);
    else by_tokens<END_PLAIN>(job, stream);
    return true;
}

} // namespace weft
