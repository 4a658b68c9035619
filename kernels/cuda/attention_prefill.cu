/* kernels/cuda/attention_prefill.cu - attention of many queries, on the tensor cores.
 *
 * A block takes 64 queries of one head, 16 for each warp, and walks over the keys in tiles of 64.
 * K of the next tile is copied while this one's values are multiplied, V while its scores are.
 * Rows of a tile lie in shared memory with their 16-byte pieces permuted (piece ^ row % 8), so
 * that eight rows of one piece never meet in a bank. */
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/mma.cuh"

namespace weft {

enum { QUERIES = 64, TILE_KEYS = 64, PRE_WARPS = 4, PRE_THREADS = PRE_WARPS * 32 };

static constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;

/* 16 bytes into shared memory; zeros when there is nothing to copy. */
__device__ __forceinline__ void copy16(uint32_t to, const void *from, bool there)
{
    const int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int OPEN> __device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory"); }

__device__ __forceinline__ void matrices(uint32_t (&r)[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void matrices_turned(uint32_t (&r)[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

/* Address of 16-byte piece `piece` of row `row` of a tile with DIM elements a row. */
template <int DIM> __device__ __forceinline__ uint32_t piece_at(uint32_t tile, int row, int piece)
{
    return tile + (uint32_t)(row * (DIM * 2) + ((piece ^ (row & 7)) << 4));
}

/* Keys [key0, key0 + 64) of k or v; those outside [low, high) and dims beyond dim are zeros. */
template <class T, int DIM>
__device__ __forceinline__ void copy_keys(const weft_attention_args &a, uint32_t tile, const T *base, int r, int g, int key0, int low, int high,
                                          int64_t stride, int dim)
{
    constexpr int PIECES = DIM / 8, STEP = PRE_THREADS / PIECES;
    const int piece = threadIdx.x % PIECES, row0 = threadIdx.x / PIECES;
#pragma unroll
    for (int i = 0; i < TILE_KEYS / STEP; i++) {
        const int row = row0 + i * STEP, key = key0 + row;
        bool there = key >= low && key < high && piece * 8 < dim;
        int64_t from = there ? key_row(a, r, g, key, stride, dim) : 0;
        there = there && from >= 0;
        copy16(piece_at<DIM>(tile, row, piece), base + (there ? from + piece * 8 : 0), there);
    }
}

/* The request and first query of block number `number`; false behind the last. */
__device__ static bool find_block(const weft_attention_args &a, int number, int &request, int &query0)
{
    const int lane = threadIdx.x % 32;
    for (int first = 0; first < a.requests; first += 32) {
        const int r = first + lane;
        const int blocks = r < a.requests ? (a.query_start_loc[r + 1] - a.query_start_loc[r] + QUERIES - 1) / QUERIES : 0;
        int before = blocks;
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(~0u, before, d);
            if (lane >= d) before += other;
        }
        const unsigned hit = __ballot_sync(~0u, number < before);
        if (hit != 0) {
            const int at = __ffs(hit) - 1;
            request = first + at;
            const int end = __shfl_sync(~0u, before, at);
            query0 = (end - 1 - number) * QUERIES; /* the last queries, which see most keys, first */
            return true;
        }
        number -= __shfl_sync(~0u, before, 31);
    }
    return false;
}

template <class T, int DIM> __global__ void __launch_bounds__(PRE_THREADS, 3) prefill(const weft_attention_args a)
{
    extern __shared__ __align__(128) char room[];
    dependency_wait();
    const int h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    int r, query0;
    if (!find_block(a, blockIdx.y, r, query0)) return;
    const int first_token = a.query_start_loc[r], queries = min(QUERIES, a.query_start_loc[r + 1] - first_token - query0);
    const int kv_head = (a.first_head + h) / a.group_size - a.first_kv_head;
    const KeyRange keys = keys_of(a, r);
    const uint32_t q_tile = (uint32_t)__cvta_generic_to_shared(room), k_tile = q_tile + QUERIES * DIM * 2, v_tile = k_tile + TILE_KEYS * DIM * 2;
    int low, high, low_last, high_first;
    visible(a, keys, query0, low, high_first);
    visible(a, keys, query0 + queries - 1, low_last, high);
    const int64_t k_stride = a.k_stride, v_stride = a.v_stride;
    {
        constexpr int PIECES = DIM / 8;
        for (int i = threadIdx.x; i < QUERIES * PIECES; i += PRE_THREADS) {
            const int row = i / PIECES, piece = i % PIECES;
            const bool there = row < queries && piece * 8 < a.head_dim;
            const T *from = (const T *)a.q + (int64_t)(first_token + query0 + (there ? row : 0)) * a.q_stride + (int64_t)h * a.head_dim;
            copy16(piece_at<DIM>(q_tile, row, piece), from + (there ? piece * 8 : 0), there);
        }
    }
    int key0 = low / TILE_KEYS * TILE_KEYS;
    if (key0 < high) copy_keys<T, DIM>(a, k_tile, (const T *)a.k, r, kv_head, key0, low, high, k_stride, a.head_dim);
    copies_end();

    int lows[2], highs[2];
#pragma unroll
    for (int half = 0; half < 2; half++) visible(a, keys, query0 + min(warp * 16 + g + 8 * half, queries - 1), lows[half], highs[half]);
    float out[DIM / 8][4] = {}, max[2] = {minus_inf(), minus_inf()}, sum[2] = {0.0f, 0.0f};
    uint32_t qf[DIM / 16][4];
    bool first = true;
    const float scale = a.scale * log2_e;
    for (; key0 < high; key0 += TILE_KEYS) {
        copy_keys<T, DIM>(a, v_tile, (const T *)a.v, r, kv_head, key0, low, high, v_stride, a.head_dim_v);
        copies_end();
        copies_wait<1>(); /* K is here */
        __syncthreads();
        if (first) {
#pragma unroll
            for (int c = 0; c < DIM / 16; c++)
                matrices(qf[c], piece_at<DIM>(q_tile, warp * 16 + lane % 16, 2 * c + lane / 16));
            first = false;
        }
        float s[TILE_KEYS / 8][4] = {};
#pragma unroll
        for (int c = 0; c < DIM / 16; c++)
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 16; n++) {
                uint32_t b[4]; /* keys 16 n .. + 8: b[0], b[1]; the next 8: b[2], b[3] */
                matrices(b, piece_at<DIM>(k_tile, 16 * n + lane % 8 + (lane / 16) * 8, 2 * c + (lane / 8) % 2));
                mma<T>(s[2 * n], qf[c][0], qf[c][1], qf[c][2], qf[c][3], b[0], b[1]);
                mma<T>(s[2 * n + 1], qf[c][0], qf[c][1], qf[c][2], qf[c][3], b[2], b[3]);
            }
        __syncthreads(); /* all have read K */
        if (key0 + TILE_KEYS < high) copy_keys<T, DIM>(a, k_tile, (const T *)a.k, r, kv_head, key0 + TILE_KEYS, low, high, k_stride, a.head_dim);
        copies_end();

        if (key0 < low_last || key0 + TILE_KEYS > high_first)
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int column = key0 + 8 * n + 2 * q + i % 2;
                    if (column < lows[i / 2] || column >= highs[i / 2]) s[n][i] = minus_inf();
                }
        float ratio[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = max[half];
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 8; n++) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float base = top == minus_inf() ? 0.0f : top * scale;
            ratio[half] = exp2f(max[half] * scale - base);
            max[half] = top;
            float part = 0.0f;
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s[n][i] = exp2f(fmaf(s[n][i], scale, -base));
                    part += s[n][i];
                }
            sum[half] = sum[half] * ratio[half] + part;
        }
#pragma unroll
        for (int d = 0; d < DIM / 8; d++) out[d][0] *= ratio[0], out[d][1] *= ratio[0], out[d][2] *= ratio[1], out[d][3] *= ratio[1];
        copies_wait<1>(); /* V is here */
        __syncthreads();
#pragma unroll
        for (int c = 0; c < TILE_KEYS / 16; c++) {
            const uint32_t a0 = pair<T>(s[2 * c][0], s[2 * c][1]), a1 = pair<T>(s[2 * c][2], s[2 * c][3]);
            const uint32_t a2 = pair<T>(s[2 * c + 1][0], s[2 * c + 1][1]), a3 = pair<T>(s[2 * c + 1][2], s[2 * c + 1][3]);
#pragma unroll
            for (int d = 0; d < DIM / 16; d++) {
                uint32_t b[4]; /* dims 16 d .. + 8: b[0], b[1]; the next 8: b[2], b[3] */
                matrices_turned(b, piece_at<DIM>(v_tile, 16 * c + lane % 16, 2 * d + lane / 16));
                mma<T>(out[2 * d], a0, a1, a2, a3, b[0], b[1]);
                mma<T>(out[2 * d + 1], a0, a1, a2, a3, b[2], b[3]);
            }
        }
        __syncthreads(); /* all have read V */
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = warp * 16 + g + 8 * half;
        sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
        sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
        if (row >= queries) continue;
        const int64_t t = first_token + query0 + row;
        const float by = sum[half] == 0.0f ? 0.0f : 1.0f / sum[half];
        T *to = (T *)a.out + t * a.out_stride + (int64_t)h * a.head_dim_v;
#pragma unroll
        for (int d = 0; d < DIM / 8; d++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (8 * d + 2 * q + i < a.head_dim_v) to[8 * d + 2 * q + i] = narrow<T>(out[d][2 * half + i] * by);
        if (a.lse != nullptr && q == 0) a.lse[t * a.num_heads + h] = sum[half] == 0.0f ? minus_inf() : (max[half] * scale + log2f(sum[half])) * ln_2;
    }
}

void attention_prefill(const weft_attention_args *a, void *stream)
{
    const bool small = a->head_dim <= 64 && a->head_dim_v <= 64;
    const size_t shared = (size_t)(QUERIES + 2 * TILE_KEYS) * (small ? 64 : 128) * 2;
    /* Each request's last block may be partly empty. */
    const dim3 grid((unsigned)a->num_heads, (unsigned)(a->tokens / QUERIES + a->requests));
    void (*kernel)(const weft_attention_args);
    if (a->dtype == WEFT_BF16) kernel = small ? prefill<bf16, 64> : prefill<bf16, 128>;
    else kernel = small ? prefill<__half, 64> : prefill<__half, 128>;
    launch(kernel, grid, PRE_THREADS, shared, stream, *a);
}

} // namespace weft
