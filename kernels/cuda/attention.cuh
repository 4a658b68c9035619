/* kernels/cuda/attention.cuh - what the attention kernels share: who sees what, and where keys lie. */
#pragma once

#include "kernels/cuda/cuda.cuh"

namespace weft {

bool attention_mma_fits(const weft_attention_args *a);
/* query_len: no request has more. Clears the tokens behind the last request, as the two others do not. */
void attention_decode(const weft_attention_args *a, int64_t query_len, void *stream);
/* Whether one block has all keys of a request and KV head there. */
bool attention_whole(const weft_attention_args *a, int64_t query_len);
/* The same for long pages on Hopper GPUs; seq_len: no request has more keys here. False where this GPU or these sizes are
 * not for it: nothing is launched then. */
bool attention_decode_dealt(const weft_attention_args *a, int64_t query_len, int64_t seq_len, void *stream);
void attention_prefill(const weft_attention_args *a, void *stream);
/* For Hopper GPUs. False where this GPU or these sizes are not for it: nothing is launched then. */
bool attention_prefill_wgmma(const weft_attention_args *a, void *stream);
void attention_any(const weft_attention_args *a, void *stream);

/* Whether weft_rope_cuda, weft_kv_write_cuda and weft_attention_cuda, one behind the other, can be one kernel: whole items, whose
 * q, k and v a product has left side by side, one token of each request. */
bool attention_rotates(const weft_rope_args *rope, const weft_kv_write_args *kv, const weft_attention_args *a);
/* That kernel, with the results of the three, bit for bit. */
void rotate_and_attend(const weft_rope_args *rope, const weft_attention_args *a, void *stream);

struct KeyRange {
    int first_position; /* global position of the request's first new token */
    int count;          /* keys that this rank holds */
};

__device__ __forceinline__ KeyRange keys_of(const weft_attention_args &a, int r)
{
    const int query = a.query_start_loc[r + 1] - a.query_start_loc[r], context = a.seq_lens[r] - query;
    if (a.keys == WEFT_KEYS_NEW) return {context, query};
    int count = page_local_len(a.pages, a.keys == WEFT_KEYS_ALL ? context + query : context);
    const int64_t most = a.pages.block_table_stride * a.pages.page_size;
    return {context, count > most ? (int)most : count};
}

/* The keys [low, high) that query i of a request sees. */
__device__ __forceinline__ void visible(const weft_attention_args &a, const KeyRange &keys, int i, int &low, int &high)
{
    const int position = keys.first_position + i;
    int begin = a.window > 0 ? max(0, position - a.window + 1) : 0, end = position + 1;
    if (a.keys == WEFT_KEYS_NEW) {
        begin = max(0, begin - keys.first_position);
        end -= keys.first_position;
    } else {
        begin = page_local_len(a.pages, begin);
        end = page_local_len(a.pages, end);
    }
    high = a.causal ? min(end, keys.count) : keys.count;
    low = min(begin, high);
}

/* Query heads of local KV head g: [first, first + count); returns count. */
__device__ __forceinline__ int heads_of(const weft_attention_args &a, int g, int &first)
{
    const int begin = (a.first_kv_head + g) * a.group_size - a.first_head, end = begin + a.group_size;
    first = max(0, begin);
    return min(end, a.num_heads) - first;
}

/* Row of key `key` of request r and KV head g, in elements from the base of k (or v); -1 when its
 * page has no block. stride: k_stride or v_stride, dim: of a row. */
__device__ __forceinline__ int64_t key_row(const weft_attention_args &a, int r, int g, int key, int64_t stride, int dim)
{
    if (a.keys == WEFT_KEYS_NEW) return (int64_t)(a.query_start_loc[r] + key) * stride + (int64_t)g * dim;
    const int page = (int)a.pages.page_size, entry = key / page;
    const int64_t block = a.pages.block_table[r * a.pages.block_table_stride + entry];
    return block < 0 ? -1 : ((block * a.num_kv_heads + g) * page + key % page) * dim;
}

/* Tokens behind the last request have no keys. Block `part` of `parts` clears its share by some of its threads. */
__device__ __forceinline__ void clear_padding(const weft_attention_args &a, int part, int parts, int thread, int threads)
{
    for (int64_t t = (a.requests > 0 ? a.query_start_loc[a.requests] : 0) + part; t < a.tokens; t += parts) {
        for (int i = thread; i < a.num_heads * a.head_dim_v; i += threads) store(a.out, a.dtype, t * a.out_stride + i, 0.0f);
        for (int h = thread; a.lse != nullptr && h < a.num_heads; h += threads) a.lse[t * a.num_heads + h] = minus_inf();
    }
}

} // namespace weft
