/* kernels/cuda/linear_batch_tokens.cuh - products of up to 32 tokens whose tiles one block has with all their columns, on Hopper GPUs.
 *
 * Tokens are the tensor cores' rows, 64 of them whatever their number, and rows of w the columns: a tile may then have any eight
 * rows, so that each multiprocessor has one of about the same size, and nothing is to be joined. Each of two warpgroups has half of
 * a tile's rows. A unit is a tile's next columns: x's of all tokens in a place of the ring, then w's, chunk by chunk of 64.
 *
 * A Form says what a tile is: EACH, rows of a warpgroup; CHUNKS of a unit; Room, what is behind the ring, with parts, factor, full, empty and
 * ready; copy(), which asks for a unit's weights; begin() and end() of a tile. The products read 64 rows of x: those behind its tokens
 * are what lies behind, whose sums nobody reads. */
#pragma once

#include "kernels/cuda/linear_batch_ends.cuh"

#ifdef WEFT_CUDA_HOPPER

namespace weft {

enum { TOKENS_MOST = 16 /* places */ };

/* Behind the ring, at least. */
struct TokensRoom {
    float parts[BATCH_SUMMING], factor[64];
    uint64_t full[TOKENS_MOST], empty[TOKENS_MOST], ready;
};

template <class Form> struct TokensRing {
    enum {
        CHUNK = 2 * Form::EACH * BATCH_K * 2, /* bytes of a chunk of w */
        W_BYTES = Form::CHUNKS * CHUNK,
        BYTES = BATCH_SHARED - 1024 - ((int)sizeof(typename Form::Room) + 1023) / 1024 * 1024
    };
    static __host__ __device__ __forceinline__ uint32_t x_bytes(int columns) { return (uint32_t)(Form::CHUNKS * columns * BATCH_K * 2); }
};

#ifdef WEFT_HOPPER

template <class T, class Form> __device__ __forceinline__ void tokens_sum(const BatchJob &job, typename Form::Room &room, uint32_t ring, int columns, int depth)
{
    typedef TokensRing<Form> Ring;
    const uint32_t full = shared_address(room.full), empty = shared_address(room.empty), x_chunk = (uint32_t)columns * BATCH_K * 2;
    const uint32_t unit_bytes = Ring::x_bytes(columns) + Ring::W_BYTES;
    const int side = threadIdx.x / 128;
    float c[Form::EACH / 2];
    BatchSquares squares;
    dependency_wait_only();
    const bool front = job.norm.rows > 0;
    if (front) squares.ask(job, columns);
    for (int tile = blockIdx.x, place = 0, parity = 0; tile < job.tiles; tile += gridDim.x) {
        Form::begin(job, room, tile);
        for (int unit = 0; unit < job.units; unit++) {
            barrier_wait(full + 8 * place, parity);
            const uint32_t at = ring + place * unit_bytes;
            products_begin();
#pragma unroll
            for (int i = 0; i < Form::CHUNKS * BATCH_K / 16; i++) {
                const int chunk = i / (BATCH_K / 16), step = 2 * (i % (BATCH_K / 16));
                const uint64_t x = tile_descriptor(at + chunk * x_chunk, 0), w = tile_descriptor(at + Form::CHUNKS * x_chunk + chunk * Ring::CHUNK + side * (Ring::CHUNK / 2), 0);
                product_shared<T, Form::EACH>(c, x + step, w + step, unit > 0 || i > 0);
            }
            products_commit();
            if (unit > 0) {
                products_wait<1>();
                if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * (place == 0 ? depth - 1 : place - 1));
            }
            if (++place == depth) place = 0, parity ^= 1;
        }
        products_wait<0>();
        hold(c);
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * (place == 0 ? depth - 1 : place - 1));
        if (tile == (int)blockIdx.x && front) squares.factors(job, room, columns);
        Form::end(job, room, tile, c);
    }
}

/* The two threads that fetch. */
template <class Form> __device__ __forceinline__ void tokens_fetch(const BatchJob &job, typename Form::Room &room, uint32_t ring, int columns, int depth)
{
    typedef TokensRing<Form> Ring;
    const uint32_t full = shared_address(room.full), empty = shared_address(room.empty), ready = shared_address(&room.ready);
    const uint32_t x_bytes = Ring::x_bytes(columns), unit_bytes = x_bytes + Ring::W_BYTES;
    const int units = (job.tiles > (int)blockIdx.x ? (job.tiles - 1 - (int)blockIdx.x) / (int)gridDim.x + 1 : 0) * job.units;
    int unit = 0, tile = blockIdx.x;
    if (threadIdx.x == BATCH_WEIGHTS) {
        const uint64_t policy = streamed();
        batch_feed_weights(units, depth, Ring::W_BYTES >> 10, empty, ready, [&](int place) {
            barrier_expect(full + 8 * place, Ring::W_BYTES);
            Form::copy(ring + place * unit_bytes + x_bytes, job, tile, unit, full + 8 * place, policy);
            if (++unit == job.units) unit = 0, tile += gridDim.x;
        });
    } else {
        batch_feed_inputs(units, depth, empty, ready, [&](int place) {
            barrier_expect(full + 8 * place, x_bytes);
            copy_box(ring + place * unit_bytes, &job.x, 0, 0, unit * Form::CHUNKS, full + 8 * place);
            if (++unit == job.units) unit = 0;
        });
    }
}

#endif

template <class T, class Form> __global__ void __launch_bounds__(BATCH_THREADS, 1) rows_by_tokens(const __grid_constant__ BatchJob job, const int columns, const int depth)
{
#ifdef WEFT_HOPPER
    extern __shared__ char raw[];
    char *ring = raw + (1024 - (shared_address(raw) & 1023)) % 1024;
    typename Form::Room &room = *(typename Form::Room *)(ring + TokensRing<Form>::BYTES);
    if (threadIdx.x == BATCH_WEIGHTS) {
        map_prefetch(&job.w);
        map_prefetch(&job.x);
        for (int i = 0; i < depth; i++) {
            barrier_init(shared_address(&room.full[i]), 2);
            barrier_init(shared_address(&room.empty[i]), BATCH_SUMMING / 32);
        }
        barrier_init(shared_address(&room.ready), 1);
        barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < BATCH_SUMMING) tokens_sum<T, Form>(job, room, shared_address(ring), columns, depth);
    else if (threadIdx.x == BATCH_WEIGHTS || threadIdx.x == BATCH_INPUTS) tokens_fetch<Form>(job, room, shared_address(ring), columns, depth);
    else if (threadIdx.x >= BATCH_NORMS && threadIdx.x < BATCH_INPUTS) {
        dependency_wait_only();
        if (job.norm.rows > 0) batch_normed<T>(job, columns);
    }
#endif
}

/* ---- host side; job.x comes in boxes of CHUNKS chunks, of `columns` tokens ---- */

template <class T, class Form> static void launch_by_tokens(BatchJob &job, int columns, void *stream)
{
    typedef TokensRing<Form> Ring;
    job.units = (int)div_up(job.a.k, Form::CHUNKS * BATCH_K);
    void (*kernel)(const BatchJob, int, int) = rows_by_tokens<T, Form>;
    (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BATCH_SHARED);
    const int depth = (int)least(TOKENS_MOST, Ring::BYTES / (Ring::x_bytes(columns) + Ring::W_BYTES));
    launch(kernel, (unsigned)least(job.tiles, job.a.cuda->sms), BATCH_THREADS, BATCH_SHARED, stream, job, columns, depth);
}

} // namespace weft

#endif
