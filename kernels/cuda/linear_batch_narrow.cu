/* kernels/cuda/linear_batch_narrow.cu - products of up to 32 tokens with so few rows of w that tiles of 128 of them leave multiprocessors
 * idle, on Hopper GPUs: tiles (linear_batch_tokens.cuh) of 48 rows, so that queries, keys and values of common models are one on each multiprocessor. */
#include "kernels/cuda/linear_batch_tokens.cuh"

#ifdef WEFT_CUDA_HOPPER

namespace weft {

template <class T> struct NarrowForm {
    enum { EACH = 24, CHUNKS = BATCH_CHUNKS, ROWS = 2 * EACH };
    typedef TokensRoom Room;
#ifdef WEFT_HOPPER
    static __device__ __forceinline__ void copy(uint32_t to, const BatchJob &job, int tile, int unit, uint32_t barrier, uint64_t policy)
    {
        copy_box_once(to, &job.w, 0, tile * ROWS, unit * CHUNKS, barrier, policy);
    }
    static __device__ __forceinline__ void begin(const BatchJob &, Room &, int) {}
    /* c: as in gates_end, of this warpgroup's rows. */
    static __device__ __forceinline__ void end(const BatchJob &job, Room &room, int tile, const float (&c)[EACH / 2])
    {
        const weft_linear_args &a = job.a;
        const int side = threadIdx.x / 128, first_token = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        const int64_t first = (int64_t)tile * ROWS + side * EACH + threadIdx.x % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int token = first_token + 8 * h;
            if (token >= a.tokens) continue;
            const float factor = job.norm.rows > 0 ? room.factor[token] : 1.0f;
            T *y = (T *)a.y + token * a.y_stride + first;
#pragma unroll
            for (int j = 0; j < EACH / 8; j++)
                if (first + 8 * j < a.n) *(uint32_t *)(y + 8 * j) = pair<T>(c[4 * j + 2 * h] * factor, c[4 * j + 2 * h + 1] * factor);
        }
    }
#endif
};

bool batch_narrow(BatchJob &job, int columns, int blocks, void *stream)
{
    typedef NarrowForm<bf16> Form;
    const weft_linear_args &a = job.a;
    const int64_t tiles = div_up(a.n, Form::ROWS);
    if (tiles <= blocks || tiles > a.cuda->sms || a.bias != NULL || a.add || a.y_dtype != a.x_dtype || (a.n | a.y_stride) % 2 != 0 || !aligned(a.y, 4)) return false;
    if (!tensor_map(&job.w, a.w_dtype, a.w, {BATCH_K, a.n, a.k / BATCH_K}, {2 * a.w_stride, 2 * BATCH_K}, {BATCH_K, Form::ROWS, Form::CHUNKS})) return false;
    job.tiles = (int)tiles;
    if (a.x_dtype == WEFT_BF16) launch_by_tokens<bf16, NarrowForm<bf16>>(job, columns, stream);
    else launch_by_tokens<__half, NarrowForm<__half>>(job, columns, stream);
    return true;
}

} // namespace weft

#endif
