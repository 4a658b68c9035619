/* kernels/cuda/rope.cu - rotary embedding, and keys and values into the pages. */
#include <inttypes.h>

#include "kernels/cuda/linear_batch.cuh"

namespace weft {

/* One block a token; a thread rotates N neighbouring pairs at a time. Positions and the table come from the
 * host: what the first pairs need of them is read while the kernel before still runs. */
template <class T, int N> __global__ void rotate(const weft_rope_args a)
{
    const int64_t t = blockIdx.x;
    const int half = (int)a.rotary_dim / 2, packs = half / N, all = (int)a.heads * packs, position = a.positions[t];
    const bool known = position >= 0 && position < a.max_positions;
    const float *table = a.cos_sin + (int64_t)position * a.rotary_dim;
    Pack<float, N> cos, sin;
    auto look_up = [&](int i) {
        cos = *(const Pack<float, N> *)(table + i % packs * N);
        sin = *(const Pack<float, N> *)(table + half + i % packs * N);
    };
    if (known && (int)threadIdx.x < all) look_up(threadIdx.x);
    dependency_wait();
    if (!known) return;
    T *x = (T *)a.x + t * a.token_stride;
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
        T *head = x + (int64_t)(i / packs) * a.head_dim + i % packs * N;
        Pack<T, N> x1 = *(Pack<T, N> *)head, x2 = *(Pack<T, N> *)(head + half);
        if (i != (int)threadIdx.x) look_up(i);
        rotate_pairs(x1, x2, cos, sin);
        *(Pack<T, N> *)head = x1;
        *(Pack<T, N> *)(head + half) = x2;
    }
}

/* N > 1: k, v and caches are of type T and rows are whole packs. */
template <class T, int N>
__device__ __forceinline__ void write_rows(const weft_kv_write_args &a, const void *from, void *cache, int64_t place, int dim)
{
    const int packs = dim / N;
    for (int i = threadIdx.x; i < (int)a.num_kv_heads * packs; i += blockDim.x) {
        const int h = i / packs;
        const int64_t to = (place + h * a.pages.page_size) * dim + (i % packs) * N;
        if (N > 1) ((Pack<T, N> *)cache)[to / N] = ((const Pack<T, N> *)from)[i];
        else store(cache, a.cache_dtype, to, widen(((const T *)from)[i]));
    }
}

template <class T, int N> __global__ void kv_write(const weft_kv_write_args a)
{
    const int64_t t = blockIdx.x, place = place_of(a, t); /* of the host's arrays alone */
    dependency_wait();
    if (place < 0) return;
    write_rows<T, N>(a, (const T *)a.k + t * a.k_stride, a.k_cache, place, (int)a.head_dim);
    write_rows<T, N>(a, (const T *)a.v + t * a.v_stride, a.v_cache, place, (int)a.head_dim_v);
}

/* Both for products of a batch: whole heads of q, k and v side by side. One block a token. */
template <class T> __global__ void rotate_into_pages(const weft_rope_args a, const weft_kv_write_args pages, const int key_head, const int value_head)
{
    enum { N = 8 };
    const int64_t t = blockIdx.x, place = place_of(pages, t);
    const int dim = (int)a.head_dim, half = dim / 2, packs = half / N, all = (int)a.heads * packs, position = a.positions[t];
    const int values = (int)pages.num_kv_heads * (dim / N);
    const bool known = position >= 0 && position < a.max_positions;
    const float *table = a.cos_sin + (int64_t)position * dim;
    Pack<float, N> cos, sin;
    auto look_up = [&](int i) {
        cos = *(const Pack<float, N> *)(table + i % packs * N);
        sin = *(const Pack<float, N> *)(table + half + i % packs * N);
    };
    if (known && (int)threadIdx.x < all) look_up(threadIdx.x);
    dependency_wait();
    T *x = (T *)a.x + t * a.token_stride;
    auto in_cache = [&](void *cache, int head, int at) { return (Pack<T, N> *)((T *)cache + (place + head * pages.pages.page_size) * dim + at); };
    for (int i = threadIdx.x; i < all + values; i += blockDim.x) {
        if (i >= all) {
            const int head = (i - all) / (dim / N), at = (i - all) % (dim / N) * N;
            if (place >= 0) *in_cache(pages.v_cache, head, at) = *(const Pack<T, N> *)(x + (int64_t)(value_head + head) * dim + at);
            continue;
        }
        const int head = i / packs, at = i % packs * N;
        T *from = x + (int64_t)head * dim + at;
        Pack<T, N> x1 = *(Pack<T, N> *)from, x2 = *(Pack<T, N> *)(from + half);
        if (known) {
            if (i != (int)threadIdx.x) look_up(i);
            rotate_pairs(x1, x2, cos, sin);
            *(Pack<T, N> *)from = x1;
            *(Pack<T, N> *)(from + half) = x2;
        }
        if (head < key_head || place < 0) continue;
        *in_cache(pages.k_cache, head - key_head, at) = x1;
        *in_cache(pages.k_cache, head - key_head, at + half) = x2;
    }
}

bool side_by_side(const weft_rope_args *a, const weft_kv_write_args *p)
{
    const int64_t dim = a->head_dim, row = dim * 2, k = (const char *)p->k - (const char *)a->x, v = (const char *)p->v - (const char *)a->x;
    if (a->dtype == WEFT_F32 || p->dtype != a->dtype || p->cache_dtype != a->dtype || p->tokens != a->tokens || p->requests == 0 || a->tokens == 0) return false;
    if (a->rotary_dim != dim || p->head_dim != dim || p->head_dim_v != dim || dim % 16 != 0 || a->token_stride % 8 != 0 || a->heads < p->num_kv_heads) return false;
    if (k != (a->heads - p->num_kv_heads) * row || v != a->heads * row || (a->tokens > 1 && (p->k_stride != a->token_stride || p->v_stride != a->token_stride))) return false;
    return aligned(a->x, 16) && aligned(a->cos_sin, 32) && aligned(p->k_cache, 16) && aligned(p->v_cache, 16);
}

bool rope_into_pages(const weft_rope_args *a, const weft_kv_write_args *p, void *stream)
{
    if (!side_by_side(a, p)) return false;
    const unsigned threads = (unsigned)least(512, div_up(a->heads * a->head_dim / 16 + p->num_kv_heads * a->head_dim / 8, 32) * 32);
    const int keys = (int)(a->heads - p->num_kv_heads), values = (int)a->heads;
    if (a->dtype == WEFT_BF16) launch(rotate_into_pages<bf16>, (unsigned)a->tokens, threads, 0, stream, *a, *p, keys, values);
    else launch(rotate_into_pages<__half>, (unsigned)a->tokens, threads, 0, stream, *a, *p, keys, values);
    return true;
}

} // namespace weft

using namespace weft;

extern "C" weft_status weft_rope_cuda(const weft_rope_args *a, void *stream)
{
    const int64_t sizes[] = {a->tokens, a->heads, a->head_dim, a->rotary_dim, a->max_positions};
    WEFT_TRY(weft__check_sizes("rope", "tokens, heads, head_dim, rotary_dim, max_positions", sizes, 5));
    WEFT_TRY(weft__check_float("rope", "x", a->dtype));
    if (a->rotary_dim % 2 != 0 || a->rotary_dim > a->head_dim)
        return weft_fail(WEFT_INVALID, "rope: rotary_dim must be even and at most head_dim, got %" PRId64 " of %" PRId64, a->rotary_dim,
                         a->head_dim);
    if (a->tokens == 0 || a->rotary_dim == 0 || a->heads == 0) return WEFT_OK;
    by_float(a->dtype, [&](auto tag) {
        using T = decltype(tag);
        constexpr int N = 16 / sizeof(T);
        const bool packs = (a->rotary_dim / 2 | a->head_dim | a->token_stride) % N == 0 && aligned(a->x, 16) && aligned(a->cos_sin, 4 * N);
        const unsigned threads = (unsigned)least(512, div_up(a->heads * a->rotary_dim / 2 / (packs ? N : 1), 32) * 32);
        if (packs) launch(rotate<T, N>, (unsigned)a->tokens, threads, 0, stream, *a);
        else launch(rotate<T, 1>, (unsigned)a->tokens, threads, 0, stream, *a);
    });
    return launched("rope");
}

extern "C" weft_status weft_kv_write_cuda(const weft_kv_write_args *a, void *stream)
{
    const int64_t sizes[] = {a->tokens, a->requests, a->num_kv_heads, a->head_dim, a->head_dim_v};
    WEFT_TRY(weft__check_sizes("kv_write", "tokens, requests, num_kv_heads, head_dim, head_dim_v", sizes, 5));
    WEFT_TRY(weft__check_float("kv_write", "k and v", a->dtype));
    WEFT_TRY(weft__check_float("kv_write", "the cache", a->cache_dtype));
    WEFT_TRY(weft__check_pages("kv_write", &a->pages));
    if (a->requests == 0 || a->tokens == 0 || a->num_kv_heads == 0) return WEFT_OK;
    by_float(a->dtype, [&](auto tag) {
        using T = decltype(tag);
        constexpr int N = 16 / sizeof(T);
        bool packs = a->dtype == a->cache_dtype && (a->head_dim | a->head_dim_v | a->k_stride | a->v_stride) % N == 0 &&
                     aligned(a->k, 16) && aligned(a->v, 16) && aligned(a->k_cache, 16) && aligned(a->v_cache, 16);
        const int64_t items = a->num_kv_heads * most(a->head_dim, a->head_dim_v) / (packs ? N : 1);
        const unsigned threads = (unsigned)least(256, div_up(most(items, 1), 32) * 32);
        if (packs) launch(kv_write<T, N>, (unsigned)a->tokens, threads, 0, stream, *a);
        else launch(kv_write<T, 1>, (unsigned)a->tokens, threads, 0, stream, *a);
    });
    return launched("kv_write");
}
