/* weft_kernels.h - the operations: one args struct and one function per device.
 *
 * The only door to kernels/cpu and kernels/cuda. C11, without CUDA types. Conventions:
 *   - Pointers are device memory of the device that runs the call. dtype is a field. All
 *     arithmetic accumulates in float32; results are rounded once, to nearest even.
 *   - Strides are in elements. Any size and alignment is legal; the launcher picks a scalar tail.
 *     tokens (rows) == 0 is legal and does nothing. Sizes beyond what a comment states fail with
 *     INVALID.
 *   - CPU: weft_OP_cpu(args, pool), pool may be NULL. CUDA: weft_OP_cuda(args, stream), stream a
 *     cudaStream_t of the current device; it never synchronises (but for the first long product of a
 *     matrix outside a capture: weft_cuda.h), never allocates and is safe to capture. Every pointer in args is then device memory, so values are not checked there:
 *     a token, index, position or block out of range is skipped, never followed.
 *   - `cuda` in args: workspace and library handles of the caller's stream (weft_cuda.h); the CPU
 *     ignores it, NULL is legal and slower.
 *   - "rows" are tokens. x float types: float32, bfloat16, float16. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/pool.h"
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct weft_cuda_context weft_cuda_context;

/* y[t] = w[ids[t] - first] where first <= ids[t] < first + count, else zeros. */
typedef struct weft_embedding_args {
    const void *w;      /* (count, hidden) w_dtype */
    const int32_t *ids; /* (tokens) */
    void *y;            /* (tokens, hidden) y_dtype */
    int64_t tokens, hidden, first, count;
    weft_dtype w_dtype, y_dtype;
} weft_embedding_args;
weft_status weft_embedding_cpu(const weft_embedding_args *args, weft_pool *pool);
weft_status weft_embedding_cuda(const weft_embedding_args *args, void *stream);

/* y[t][i] = sum_j x[t][j] * w[i][j] + bias[i].
 * w: (n, k) row-major in w_dtype: float32, bfloat16, float16, or float8_e4m3 with block scales:
 * w[i][j] stands for e4m3(w[i][j]) * scale[scale_row[i]][(scale_col_phase + j) / 128]; scale_row
 * keeps the global row of each local row, so shards of any phase are right.
 * add: y += instead of y =. k = 0 gives bias alone. */
typedef struct weft_linear_args {
    const void *x;    /* (tokens, k) x_dtype */
    const void *w;    /* (n, k) w_dtype */
    const void *bias; /* (n) bias_dtype, or NULL */
    void *y;          /* (tokens, n) y_dtype */
    const float *scale;       /* (scale rows, scale_stride), fp8 only */
    const int32_t *scale_row; /* (n), fp8 only */
    int64_t tokens, n, k;
    int64_t x_stride, w_stride, y_stride;
    int64_t scale_stride, scale_col_phase;
    weft_dtype x_dtype, w_dtype, bias_dtype, y_dtype;
    int add;
    weft_cuda_context *cuda;
} weft_linear_args;
weft_status weft_linear_cpu(const weft_linear_args *args, weft_pool *pool);
weft_status weft_linear_cuda(const weft_linear_args *args, void *stream);

/* r = x + residual (rounded to x's dtype, written back to residual) when residual is given, else
 * r = x;  y[t][i] = r[t][i] / sqrt(mean_i(r[t][i]^2) + eps) * gain[i].
 * y may be x. */
typedef struct weft_rms_norm_args {
    const void *x;    /* (rows, cols) dtype */
    void *residual;   /* (rows, cols) dtype, or NULL */
    const void *gain; /* (cols) gain_dtype */
    void *y;          /* (rows, cols) dtype */
    int64_t rows, cols, x_stride, residual_stride, y_stride;
    float eps;
    weft_dtype dtype, gain_dtype;
} weft_rms_norm_args;
weft_status weft_rms_norm_cpu(const weft_rms_norm_args *args, weft_pool *pool);
weft_status weft_rms_norm_cuda(const weft_rms_norm_args *args, void *stream);

/* The two halves of an RMSNorm whose statistics span a group (SEMANTICS 5.2).
 * sums:  var[t * var_stride] = sum_i x[t][i]^2 / cols
 * apply: y[t][i] = x[t][i] / sqrt(var[t * var_stride] / world + eps) * gain[i], y may be x. */
typedef struct weft_group_norm_args {
    const void *x;    /* (rows, cols) dtype */
    float *var;       /* one per row, var_stride apart */
    const void *gain; /* (cols) gain_dtype; apply only */
    void *y;          /* (rows, cols) dtype; apply only */
    int64_t rows, cols, x_stride, y_stride, var_stride;
    int world;
    float eps;
    weft_dtype dtype, gain_dtype;
} weft_group_norm_args;
weft_status weft_group_norm_sums_cpu(const weft_group_norm_args *args, weft_pool *pool);
weft_status weft_group_norm_sums_cuda(const weft_group_norm_args *args, void *stream);
weft_status weft_group_norm_apply_cpu(const weft_group_norm_args *args, weft_pool *pool);
weft_status weft_group_norm_apply_cuda(const weft_group_norm_args *args, void *stream);

/* Rotates, in place, the first rotary_dim elements of every head (neox halves):
 * y1 = x1 c - x2 s; y2 = x2 c + x1 s, with x1 the first half and c, s = cos_sin[position]. */
typedef struct weft_rope_args {
    void *x;                  /* (tokens, heads, head_dim) dtype, token t at x + t * token_stride */
    const int32_t *positions; /* (tokens), each in [0, max_positions) */
    const float *cos_sin;     /* (max_positions, rotary_dim): cos of rotary_dim/2, then sin */
    int64_t tokens, heads, head_dim, rotary_dim, token_stride, max_positions;
    weft_dtype dtype;
} weft_rope_args;
weft_status weft_rope_cpu(const weft_rope_args *args, weft_pool *pool);
weft_status weft_rope_cuda(const weft_rope_args *args, void *stream);

/* Where the keys of a request are. Pages: block b of the cache holds page_size tokens of this
 * rank; element (token slot s in page, kv head h, i) is at
 * cache + ((b * num_kv_heads + h) * page_size + s) * dim + i.
 * Position p belongs to this rank when (p / interleave) % context_size == context_rank, and its
 * slot follows from plan/layout.h. */
typedef struct weft_page_layout {
    const int32_t *block_table; /* (requests, block_table_stride) */
    int64_t block_table_stride, page_size;
    int context_size, context_rank, interleave;
} weft_page_layout;

/* Writes k and v of this step's tokens into the cache, those that this rank owns. */
typedef struct weft_kv_write_args {
    const void *k; /* (tokens, num_kv_heads, head_dim) dtype, token_stride apart */
    const void *v; /* (tokens, num_kv_heads, head_dim_v) */
    void *k_cache, *v_cache; /* cache_dtype */
    const int32_t *positions;       /* (tokens), global */
    const int32_t *query_start_loc; /* (requests + 1) */
    weft_page_layout pages;
    int64_t tokens, requests, num_kv_heads, head_dim, head_dim_v, k_stride, v_stride;
    weft_dtype dtype, cache_dtype;
} weft_kv_write_args;
weft_status weft_kv_write_cpu(const weft_kv_write_args *args, weft_pool *pool);
weft_status weft_kv_write_cuda(const weft_kv_write_args *args, void *stream);

/* Attention of a ragged batch, with its log-sum-exp.
 * Request r has query tokens [query_start_loc[r], query_start_loc[r+1]) at the global positions
 * seq_lens[r] - query_len .. seq_lens[r] - 1. Its keys are, by `keys`:
 *   ALL      pages: every position this rank holds below seq_lens[r]; causal limits them
 *   CONTEXT  pages: only positions below seq_lens[r] - query_len
 *   NEW      k, v tensors of this step (dense: (tokens, num_kv_heads, dim)): the request's own tokens
 * A key at global position j is visible to a query at i iff (not causal or j <= i) and
 * (window == 0 or j > i - window). Query head h uses KV head
 * (first_head + h) / group_size - first_kv_head, so a slice may begin inside a group.
 * out[t][h] = sum_j softmax_j(scale * q.k_j) v_j; lse = natural log of the sum of exps.
 * No visible key, and rows behind the last request's (padding): out = 0, lse = -inf. */
typedef enum weft_attention_keys { WEFT_KEYS_ALL, WEFT_KEYS_CONTEXT, WEFT_KEYS_NEW } weft_attention_keys;
typedef struct weft_attention_args {
    const void *q; /* (tokens, num_heads, head_dim), q_stride between tokens */
    const void *k, *v; /* caches (ALL, CONTEXT) in kv_dtype, or tensors of this step (NEW) in kv_dtype */
    void *out;  /* (tokens, num_heads, head_dim_v) dtype, out_stride between tokens */
    float *lse; /* (tokens, num_heads) contiguous, or NULL */
    const int32_t *query_start_loc; /* (requests + 1) */
    const int32_t *seq_lens;        /* (requests), global, this step's tokens included */
    weft_page_layout pages;         /* not for NEW */
    int64_t tokens, requests, q_stride, k_stride, v_stride, out_stride; /* k_, v_stride: NEW only */
    int num_heads, num_kv_heads, head_dim, head_dim_v;
    int group_size, first_head, first_kv_head;
    weft_attention_keys keys;
    int causal, window;
    float scale;
    weft_dtype dtype, kv_dtype; /* dtype: q and out */
    /* CUDA: bounds that the caller knows on the host (0: unknown, slower). Lengths on the device may
     * be anything up to them, so that a captured launch serves longer sequences. Keys in pages below the request's first
     * new token may be read while the operation in front still runs: they are of earlier steps. */
    int64_t max_query_len, max_seq_len;
    weft_cuda_context *cuda;
} weft_attention_args;
weft_status weft_attention_cpu(const weft_attention_args *args, weft_pool *pool);
weft_status weft_attention_cuda(const weft_attention_args *args, void *stream);

/* SEMANTICS 2.4.4. (out, lse) = prefix merged with suffix; lse inputs of +inf or NaN count as -inf;
 * both empty: out = 0, lse = -inf. out may be prefix or suffix; lse_out may be either lse or NULL. */
typedef struct weft_merge_attn_states_args {
    const void *prefix, *suffix; /* (tokens, heads, dim), strides between tokens; dtype */
    const float *prefix_lse, *suffix_lse; /* (tokens, heads) contiguous, natural log */
    void *out;
    float *lse_out;
    int64_t tokens, heads, dim, prefix_stride, suffix_stride, out_stride;
    weft_dtype prefix_dtype, suffix_dtype, out_dtype;
} weft_merge_attn_states_args;
weft_status weft_merge_attn_states_cpu(const weft_merge_attn_states_args *args, weft_pool *pool);
weft_status weft_merge_attn_states_cuda(const weft_merge_attn_states_args *args, void *stream);

/* SEMANTICS 2.4. Combines `parts` partial results of the same tokens and heads by their LSE.
 * base2: the LSEs are base 2. A part with lse -inf (or NaN, +inf) is skipped, its values unread.
 * Rows >= valid_rows are treated as empty: out = 0, lse = -inf. */
typedef struct weft_dcp_combine_args {
    const void *partial; /* (parts, tokens, heads, dim) dtype; part_stride, token_stride, head_stride */
    const float *lse;    /* (parts, tokens, heads); lse_part_stride, lse_token_stride */
    void *out;           /* (tokens, heads, dim) contiguous out_dtype */
    float *lse_out;      /* (tokens, heads) contiguous, same base, or NULL */
    int64_t parts, tokens, heads, dim, valid_rows;
    int64_t part_stride, token_stride, head_stride, lse_part_stride, lse_token_stride;
    int base2;
    weft_dtype dtype, out_dtype;
} weft_dcp_combine_args;
weft_status weft_dcp_combine_cpu(const weft_dcp_combine_args *args, weft_pool *pool);
weft_status weft_dcp_combine_cuda(const weft_dcp_combine_args *args, void *stream);

/* The a2a exchange (SEMANTICS 2.4.2). pack: (tokens, parts * heads, dim) + lse -> send buffer
 * (parts, tokens, heads, dim + lanes) in dtype; lanes = 2 for 16-bit dtypes (low half first), 1 for
 * float32; the LSE's bits are moved, never converted. unpack is weft_dcp_unpack_lse (the LSEs of a
 * received buffer) followed by weft_dcp_combine over it with strides dim + lanes. */
typedef struct weft_dcp_pack_args {
    const void *out;  /* (tokens, parts * heads, dim) contiguous dtype */
    const float *lse; /* (tokens, parts * heads) contiguous */
    void *buffer;     /* (parts, tokens, heads, dim + lanes) dtype */
    float *lse_unpacked; /* unpack: (parts, tokens, heads) contiguous */
    int64_t parts, tokens, heads, dim;
    weft_dtype dtype;
} weft_dcp_pack_args;
weft_status weft_dcp_pack_cpu(const weft_dcp_pack_args *args, weft_pool *pool);
weft_status weft_dcp_pack_cuda(const weft_dcp_pack_args *args, void *stream);
weft_status weft_dcp_unpack_lse_cpu(const weft_dcp_pack_args *args, weft_pool *pool);
weft_status weft_dcp_unpack_lse_cuda(const weft_dcp_pack_args *args, void *stream);

/* The ag_rs exchange: scaled[h][t][i] = out[t][h][i] * b^(lse[t][h] - s[t][h]) in float32, where s
 * is the combined LSE over lses (parts, tokens, heads); 0 where this rank's lse is empty. Also
 * writes s for heads [lse_first, lse_first + lse_heads) to lse_out (tokens, lse_heads). */
typedef struct weft_dcp_scale_args {
    const void *out;   /* (tokens, heads, dim) contiguous dtype */
    const float *lses; /* (parts, tokens, heads) contiguous, rank order */
    float *scaled;     /* (heads, tokens, dim) float32: ready for a reduce_scatter over heads */
    float *lse_out;    /* (tokens, lse_heads), or NULL */
    int64_t parts, part, tokens, heads, dim, lse_first, lse_heads;
    int base2;
    weft_dtype dtype;
} weft_dcp_scale_args;
weft_status weft_dcp_scale_cpu(const weft_dcp_scale_args *args, weft_pool *pool);
weft_status weft_dcp_scale_cuda(const weft_dcp_scale_args *args, void *stream);

/* lse[t][h] = -inf where t >= query_start_loc[requests], or request(t) has local_lens == 0. */
typedef struct weft_mask_empty_args {
    float *lse; /* (tokens, heads) contiguous */
    const int32_t *local_lens, *query_start_loc;
    int64_t tokens, heads, requests;
} weft_mask_empty_args;
weft_status weft_mask_empty_cpu(const weft_mask_empty_args *args, weft_pool *pool);
weft_status weft_mask_empty_cuda(const weft_mask_empty_args *args, void *stream);

/* y[t][i] = silu(x[t][i]) * x[t][cols + i]: gate first, then up. */
typedef struct weft_silu_mul_args {
    const void *x; /* (rows, 2 * cols), x_stride */
    void *y;       /* (rows, cols), y_stride */
    int64_t rows, cols, x_stride, y_stride;
    weft_dtype dtype;
} weft_silu_mul_args;
weft_status weft_silu_mul_cpu(const weft_silu_mul_args *args, weft_pool *pool);
weft_status weft_silu_mul_cuda(const weft_silu_mul_args *args, void *stream);

/* The experts of each token (SEMANTICS 6.1). Scores by `scoring`:
 *   SIGMOID       1 / (1 + exp(-logit))
 *   SOFTMAX       softmax over all experts
 *   SOFTMAX_TOPK  the logits choose; weights are a softmax over the chosen ones
 * A score that is NaN or infinite counts as 0. Chosen are the top_k largest score + bias, ties to
 * the lower id, ids always distinct and in order of choice. Weights are the scores without the
 * bias, divided by their sum (by 1 when that is not above 0) with `renormalize`. */
typedef enum weft_router_scoring {
    WEFT_ROUTER_SIGMOID,
    WEFT_ROUTER_SOFTMAX,
    WEFT_ROUTER_SOFTMAX_TOPK,
    WEFT_ROUTER_SCORING_COUNT
} weft_router_scoring;
typedef struct weft_router_args {
    const float *logits; /* (tokens, experts), logits_stride */
    const float *bias;   /* (experts), or NULL */
    int32_t *ids;        /* (tokens, top_k) contiguous */
    float *weights;      /* (tokens, top_k) contiguous */
    int64_t tokens, experts, logits_stride, top_k; /* 1 <= top_k <= experts <= 65536 */
    weft_router_scoring scoring;
    int renormalize;
} weft_router_args;
weft_status weft_router_cpu(const weft_router_args *args, weft_pool *pool);
weft_status weft_router_cuda(const weft_router_args *args, void *stream);

/* One matrix of each local expert: (local_experts, rows, columns), dense, with the scales of fp8 as
 * in weft_linear_args; scale_row is the same for all experts. */
typedef struct weft_expert_matrix {
    const void *w;
    const float *scale;       /* (local_experts, scale_rows, scale_stride) */
    const int32_t *scale_row; /* (rows) */
    int64_t scale_rows, scale_stride, scale_col_phase;
} weft_expert_matrix;

/* y[t] = sum over the k experts of t that are here of weight * down(silu(gate x[t]) * (up x[t])).
 * Experts [first, first + count) are here; others, and experts without tokens, cost nothing.
 * Everything behind x is float32, rounded once to y; CUDA with 16-bit x may round what lies between (silu * up,
 * and what an expert adds to y) to 16 bits. w_dtype: a float type or float8_e4m3.
 * quantize: what the products take in is rounded to e4m3 with one scale for 128 columns of a token
 * (weft_quantize_groups). */
typedef struct weft_experts_args {
    const void *x;        /* (tokens, hidden) x_dtype, x_stride */
    const int32_t *ids;   /* (tokens, top_k) contiguous; a negative id is nobody */
    const float *weights; /* (tokens, top_k) contiguous */
    weft_expert_matrix up;   /* rows: intermediate of gate, then intermediate of up; columns: hidden */
    weft_expert_matrix down; /* rows: hidden; columns: intermediate */
    void *y;              /* (tokens, hidden) y_dtype, y_stride */
    void *workspace;      /* weft_experts_workspace bytes, 64-byte aligned */
    int64_t tokens, top_k, first, count, hidden, intermediate; /* intermediate: of this rank */
    int64_t x_stride, y_stride;
    weft_dtype x_dtype, w_dtype, y_dtype;
    int quantize;
    weft_cuda_context *cuda;
} weft_experts_args;
/* Bytes for these sizes: of the CPU when `cuda` is NULL, else of a GPU. INVALID when they cannot be counted.
 * Reads sizes only. */
weft_status weft_experts_workspace(const weft_experts_args *args, size_t *bytes);
weft_status weft_experts_cpu(const weft_experts_args *args, weft_pool *pool);
weft_status weft_experts_cuda(const weft_experts_args *args, void *stream);

/* y[t][j] = x[t][j] as float8_e4m3 holds it with the scale amax / 448 of its group of 128 columns
 * (of columns [128 g - phase, 128 (g + 1) - phase)); a group of zeros stays zero. y may be x. */
typedef struct weft_quantize_groups_args {
    const void *x; /* (rows, cols) dtype */
    void *y;       /* (rows, cols) y_dtype */
    int64_t rows, cols, x_stride, y_stride, phase; /* 0 <= phase < 128 */
    weft_dtype dtype, y_dtype;
} weft_quantize_groups_args;
weft_status weft_quantize_groups_cpu(const weft_quantize_groups_args *args, weft_pool *pool);
weft_status weft_quantize_groups_cuda(const weft_quantize_groups_args *args, void *stream);

/* y = a + b (b may be a row of length cols when b_stride == 0). y may be a. */
typedef struct weft_add_args {
    const void *a, *b;
    void *y;
    int64_t rows, cols, a_stride, b_stride, y_stride;
    weft_dtype dtype;
} weft_add_args;
weft_status weft_add_cpu(const weft_add_args *args, weft_pool *pool);
weft_status weft_add_cuda(const weft_add_args *args, void *stream);

/* y[i] = x[indices[i]], whole rows of any dtype. indices in [0, x_rows). */
typedef struct weft_gather_rows_args {
    const void *x;
    const int32_t *indices;
    void *y;
    int64_t count, cols, x_stride, y_stride, x_rows;
    weft_dtype dtype;
} weft_gather_rows_args;
weft_status weft_gather_rows_cpu(const weft_gather_rows_args *args, weft_pool *pool);
weft_status weft_gather_rows_cuda(const weft_gather_rows_args *args, void *stream);

/* Sampling over a shard of the vocabulary (DESIGN 10). For each row the winner of
 * logit / temperature + gumbel(seed, position, id) over ids [first, first + count); temperature 0:
 * the largest logit, no noise. Ties go to the lower id. NaN never wins; a row of NaN gives the
 * lowest id and value -inf.
 * gumbel = -log(-log(u)), u from Philox4x32-10 keyed by the seed with counter
 * (id / 4, position, 0, 0), lane id % 4, u = (x + 0.5) / 2^32; u and both logs in double, the
 * result rounded once to float32. */
typedef struct weft_sample_args {
    const float *logits; /* (rows, count), logits_stride */
    const float *temperature; /* (rows) */
    const uint64_t *seed;     /* (rows) */
    const int32_t *position;  /* (rows): the position of the token to be drawn */
    float *value;             /* (rows) out: the winning score */
    int32_t *id;              /* (rows) out: global id */
    int64_t rows, first, count, logits_stride;
    weft_cuda_context *cuda;
} weft_sample_args;
weft_status weft_sample_cpu(const weft_sample_args *args, weft_pool *pool);
weft_status weft_sample_cuda(const weft_sample_args *args, void *stream);
/* The u above, in (0, 1). */
double weft_sample_uniform(uint64_t seed, int32_t position, int32_t id);

/* The sum of the 64-bit words of `bytes` bytes (a last part of a word counts as filled up with
 * zeros), modulo 2^64: are two copies equal, and how fast can memory be read at all. */
weft_status weft_checksum_cpu(const void *data, int64_t bytes, uint64_t *sum, weft_pool *pool);

/* The name of the CPU instruction set in use: "avx512", "avx2", "scalar". WEFT_CPU_ISA lowers it. */
const char *weft_cpu_isa(void);

#ifdef __cplusplus
}
#endif
