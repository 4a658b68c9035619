/* kernels/cuda/attention_prefill.cu - attention of many queries, on the tensor cores.
 *
 * A block takes 128 queries of one head, 32 for each warp, and walks over the keys in tiles of 64.
 * K of the next tile is copied while this one's values are multiplied, V while its scores are.
 * Rows of a tile lie in shared memory with their 16-byte pieces permuted (piece ^ row % 8), so
 * that eight rows of one piece never meet in a bank. */
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/mma.cuh"

namespace weft {

enum { QUERIES = 128, TILE_KEYS = 64, PRE_WARPS = 4, PRE_THREADS = PRE_WARPS * 32 };

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
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}
__device__ __forceinline__ void matrices_turned(uint32_t (&r)[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}

/* Address of 16-byte piece `piece` of row `row` of a tile with DIM elements a row. */
template <int DIM> __device__ __forceinline__ uint32_t piece_at(uint32_t tile, int row, int piece)
{
    return tile + (uint32_t)(row * (DIM * 2) + ((piece ^ (row & 7)) << 4));
}

/* Where the keys of a tile lie: row numbers of k and v, -1 for those outside [low, high). */
__device__ __forceinline__ void place_keys(const weft_attention_args &a, int64_t (&rows)[TILE_KEYS], int r, int g, int key0, int low, int high)
{
    if (threadIdx.x >= TILE_KEYS) return;
    const int key = key0 + threadIdx.x;
    int64_t row = -1;
    if (key >= low && key < high) row = a.keys == WEFT_KEYS_NEW ? a.query_start_loc[r] + key : key_row(a, r, g, key, 0, 1);
    rows[threadIdx.x] = row;
}

/* A tile of k or v; keys that are not there and dims beyond dim are zeros. */
template <class T, int DIM>
__device__ __forceinline__ void copy_keys(uint32_t tile, const T *base, const int64_t (&rows)[TILE_KEYS], int64_t stride, int dim)
{
    constexpr int PIECES = DIM / 8, STEP = PRE_THREADS / PIECES;
    const int piece = threadIdx.x % PIECES, row0 = threadIdx.x / PIECES;
#pragma unroll
    for (int i = 0; i < TILE_KEYS / STEP; i++) {
        const int row = row0 + i * STEP;
        const int64_t from = rows[row];
        const bool there = from >= 0 && piece * 8 < dim;
        copy16(piece_at<DIM>(tile, row, piece), base + (there ? from * stride + piece * 8 : 0), there);
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

enum { MT = 2 }; /* tiles of 16 queries a warp has */

template <class T, int DIM> struct Tile {
    float out[MT][DIM / 8][4], max[MT][2], sum[MT][2];
};

/* s = Q K for the warp's queries and a tile of keys */
template <class T, int DIM>
__device__ __forceinline__ void scores(float (&s)[MT][TILE_KEYS / 8][4], uint32_t q_tile, uint32_t k_tile)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 8; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
#pragma unroll
    for (int c = 0; c < DIM / 16; c++) {
        uint32_t q[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) matrices(q[m], piece_at<DIM>(q_tile, (warp * MT + m) * 16 + lane % 16, 2 * c + lane / 16));
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 16; n++) {
            uint32_t b[4]; /* keys 16 n .. + 8: b[0], b[1]; the next 8: b[2], b[3] */
            matrices(b, piece_at<DIM>(k_tile, 16 * n + lane % 8 + (lane / 16) * 8, 2 * c + (lane / 8) % 2));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma<T>(s[m][2 * n], q[m][0], q[m][1], q[m][2], q[m][3], b[0], b[1]);
                mma<T>(s[m][2 * n + 1], q[m][0], q[m][1], q[m][2], q[m][3], b[2], b[3]);
            }
        }
    }
}

/* Scores into weights under the rows' new maxima; the old sums are scaled. */
template <class T, int DIM> __device__ __forceinline__ void softmax(Tile<T, DIM> &t, float (&s)[MT][TILE_KEYS / 8][4], float scale)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = t.max[m][half];
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 8; n++) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float base = top == minus_inf() ? 0.0f : top * scale, ratio = exp2f(t.max[m][half] * scale - base);
            t.max[m][half] = top;
            float part = 0.0f;
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s[m][n][i] = exp2f(fmaf(s[m][n][i], scale, -base));
                    part += s[m][n][i];
                }
            t.sum[m][half] = t.sum[m][half] * ratio + part;
#pragma unroll
            for (int d = 0; d < DIM / 8; d++) t.out[m][d][2 * half] *= ratio, t.out[m][d][2 * half + 1] *= ratio;
        }
}

template <class T, int DIM>
__device__ __forceinline__ void add_values(Tile<T, DIM> &t, const float (&s)[MT][TILE_KEYS / 8][4], uint32_t v_tile)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < TILE_KEYS / 16; c++) {
        uint32_t p[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
            p[m][0] = pair<T>(s[m][2 * c][0], s[m][2 * c][1]), p[m][1] = pair<T>(s[m][2 * c][2], s[m][2 * c][3]);
            p[m][2] = pair<T>(s[m][2 * c + 1][0], s[m][2 * c + 1][1]), p[m][3] = pair<T>(s[m][2 * c + 1][2], s[m][2 * c + 1][3]);
        }
#pragma unroll
        for (int d = 0; d < DIM / 16; d++) {
            uint32_t b[4]; /* dims 16 d .. + 8: b[0], b[1]; the next 8: b[2], b[3] */
            matrices_turned(b, piece_at<DIM>(v_tile, 16 * c + lane % 16, 2 * d + lane / 16));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma<T>(t.out[m][2 * d], p[m][0], p[m][1], p[m][2], p[m][3], b[0], b[1]);
                mma<T>(t.out[m][2 * d + 1], p[m][0], p[m][1], p[m][2], p[m][3], b[2], b[3]);
            }
        }
    }
}

template <class T, int DIM> __global__ void __launch_bounds__(PRE_THREADS, 2) prefill(const weft_attention_args a)
{
    extern __shared__ __align__(128) char room[];
    __shared__ int64_t rows[2][TILE_KEYS];
    dependency_wait();
    const int h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    int r, query0;
    if (!find_block(a, blockIdx.y, r, query0)) return;
    const int first_token = a.query_start_loc[r], queries = min((int)QUERIES, a.query_start_loc[r + 1] - first_token - query0);
    const int kv_head = (a.first_head + h) / a.group_size - a.first_kv_head;
    const KeyRange keys = keys_of(a, r);
    const uint32_t q_tile = (uint32_t)__cvta_generic_to_shared(room), k_tile = q_tile + QUERIES * DIM * 2, v_tile = k_tile + TILE_KEYS * DIM * 2;
    int low, high, low_last, high_first;
    visible(a, keys, query0, low, high_first);
    visible(a, keys, query0 + queries - 1, low_last, high);
    const bool fresh = a.keys == WEFT_KEYS_NEW;
    const int64_t k_stride = fresh ? a.k_stride : a.head_dim, v_stride = fresh ? a.v_stride : a.head_dim_v;
    const T *k = (const T *)a.k + (fresh ? kv_head * a.head_dim : 0), *v = (const T *)a.v + (fresh ? kv_head * a.head_dim_v : 0);
    constexpr int PIECES = DIM / 8;
    for (int i = threadIdx.x; i < QUERIES * PIECES; i += PRE_THREADS) {
        const int row = i / PIECES, piece = i % PIECES;
        const bool there = row < queries && piece * 8 < a.head_dim;
        const T *from = (const T *)a.q + (int64_t)(first_token + query0 + (there ? row : 0)) * a.q_stride + (int64_t)h * a.head_dim;
        copy16(piece_at<DIM>(q_tile, row, piece), from + (there ? piece * 8 : 0), there);
    }
    int key0 = low / TILE_KEYS * TILE_KEYS, turn = 0;
    place_keys(a, rows[0], r, kv_head, key0, low, high);
    __syncthreads();
    copy_keys<T, DIM>(k_tile, k, rows[0], k_stride, a.head_dim);
    copies_end();

    Tile<T, DIM> t;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int d = 0; d < DIM / 8; d++) t.out[m][d][0] = t.out[m][d][1] = t.out[m][d][2] = t.out[m][d][3] = 0.0f;
        t.max[m][0] = t.max[m][1] = minus_inf(), t.sum[m][0] = t.sum[m][1] = 0.0f;
    }
    const float scale = a.scale * log2_e;
    for (; key0 < high; key0 += TILE_KEYS, turn ^= 1) {
        copy_keys<T, DIM>(v_tile, v, rows[turn], v_stride, a.head_dim_v);
        copies_end();
        place_keys(a, rows[turn ^ 1], r, kv_head, key0 + TILE_KEYS, low, high);
        copies_wait<1>(); /* K is here */
        __syncthreads();
        float s[MT][TILE_KEYS / 8][4];
        scores<T, DIM>(s, q_tile, k_tile);
        __syncthreads(); /* all have read K */
        if (key0 + TILE_KEYS < high) copy_keys<T, DIM>(k_tile, k, rows[turn ^ 1], k_stride, a.head_dim);
        copies_end();
        if (key0 < low_last || key0 + TILE_KEYS > high_first)
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int from, to;
                    visible(a, keys, query0 + min((warp * MT + m) * 16 + g + 8 * half, queries - 1), from, to);
#pragma unroll
                    for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const int column = key0 + 8 * n + 2 * q + e;
                            if (column < from || column >= to) s[m][n][2 * half + e] = minus_inf();
                        }
                }
        softmax<T, DIM>(t, s, scale);
        copies_wait<1>(); /* V is here */
        __syncthreads();
        add_values<T, DIM>(t, s, v_tile);
        __syncthreads(); /* all have read V */
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = (warp * MT + m) * 16 + g + 8 * half;
            float sum = t.sum[m][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (row >= queries) continue;
            const int64_t token = first_token + query0 + row;
            const float by = sum == 0.0f ? 0.0f : 1.0f / sum;
            T *to = (T *)a.out + token * a.out_stride + (int64_t)h * a.head_dim_v + 2 * q;
#pragma unroll
            for (int d = 0; d < DIM / 8; d++)
                if (8 * d < a.head_dim_v) *(uint32_t *)(to + 8 * d) = pair<T>(t.out[m][d][2 * half] * by, t.out[m][d][2 * half + 1] * by);
            if (a.lse != nullptr && q == 0) a.lse[token * a.num_heads + h] = sum == 0.0f ? minus_inf() : (t.max[m][half] * scale + log2f(sum)) * ln_2;
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
    (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    launch(kernel, grid, PRE_THREADS, shared, stream, *a);
}

} // namespace weft
