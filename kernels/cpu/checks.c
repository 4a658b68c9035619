/* kernels/cpu/checks.c - what the operations of every device ask of their arguments. */
#include <inttypes.h>

#include "kernels/cpu/cpu.h"

weft_status weft__check_sizes(const char *op, const char *names, const int64_t *sizes, int count)
{
    for (int i = 0; i < count; i++)
        if (sizes[i] < 0)
            return weft_fail(WEFT_INVALID, "%s: sizes (%s) must not be negative, number %d is %" PRId64, op, names, i + 1, sizes[i]);
    return WEFT_OK;
}

weft_status weft__check_float(const char *op, const char *name, weft_dtype dtype)
{
    if (weft__is_float(dtype)) return WEFT_OK;
    return weft_fail(WEFT_INVALID, "%s: %s must be float32, bfloat16 or float16, got %s", op, name,
                     (unsigned)dtype < WEFT_DTYPE_COUNT ? weft_dtype_name(dtype) : "an unknown dtype");
}

weft_status weft__check_ragged(const char *op, const int32_t *query_start_loc, const int32_t *seq_lens, int64_t requests,
                               int64_t tokens)
{
    if (query_start_loc[0] != 0) return weft_fail(WEFT_INVALID, "%s: query_start_loc must begin with 0, got %d", op, query_start_loc[0]);
    for (int64_t r = 0; r < requests; r++) {
        int32_t begin = query_start_loc[r], end = query_start_loc[r + 1];
        if (end < begin || end > tokens)
            return weft_fail(WEFT_INVALID, "%s: request %" PRId64 " has tokens %d to %d of %" PRId64, op, r, begin, end, tokens);
        if (seq_lens != NULL && seq_lens[r] < end - begin)
            return weft_fail(WEFT_INVALID, "%s: request %" PRId64 " has %d new tokens but a sequence length of %d", op, r,
                             end - begin, seq_lens[r]);
    }
    return WEFT_OK;
}

weft_status weft__check_pages(const char *op, const weft_page_layout *p)
{
    if (p->context_size < 1 || p->context_rank < 0 || p->context_rank >= p->context_size)
        return weft_fail(WEFT_INVALID, "%s: context rank %d of %d", op, p->context_rank, p->context_size);
    if (p->interleave < 1 || p->page_size < 1 || p->page_size % p->interleave != 0)
        return weft_fail(WEFT_INVALID, "%s: a page of %" PRId64 " tokens is no multiple of the interleave %d", op, p->page_size,
                         p->interleave);
    if (p->block_table_stride < 0) return weft_fail(WEFT_INVALID, "%s: a block table cannot have a negative width", op);
    return WEFT_OK;
}

weft_status weft__check_heads(const weft_attention_args *a)
{
    if (a->num_heads < 0 || a->num_kv_heads < 0 || a->group_size < 1 || a->first_head < 0 || a->first_kv_head < 0 || a->window < 0)
        return weft_fail(WEFT_INVALID, "attention: heads %d, KV heads %d, group size %d, first heads %d and %d, window %d", a->num_heads,
                         a->num_kv_heads, a->group_size, a->first_head, a->first_kv_head, a->window);
    if (a->head_dim < 1 || a->head_dim > WEFT_MAX_HEAD_DIM || a->head_dim_v < 1 || a->head_dim_v > WEFT_MAX_HEAD_DIM)
        return weft_fail(WEFT_INVALID, "attention: head_dim must be from 1 to %d, got %d and %d", WEFT_MAX_HEAD_DIM, a->head_dim, a->head_dim_v);
    if (a->num_heads == 0) return WEFT_OK;
    int64_t low = a->first_head / a->group_size - a->first_kv_head;
    int64_t high = ((int64_t)a->first_head + a->num_heads - 1) / a->group_size - a->first_kv_head;
    if (low < 0 || high >= a->num_kv_heads)
        return weft_fail(WEFT_INVALID, "attention: heads %d to %d need KV heads %" PRId64 " to %" PRId64 " of %d here", a->first_head,
                         a->first_head + a->num_heads - 1, low, high, a->num_kv_heads);
    return WEFT_OK;
}

weft_status weft__check_linear(const weft_linear_args *a)
{
    const int64_t sizes[] = {a->tokens, a->n, a->k, a->x_stride, a->w_stride, a->y_stride, a->scale_col_phase};
    WEFT_TRY(weft__check_sizes("linear", "tokens, n, k, x_stride, w_stride, y_stride, scale_col_phase", sizes, 7));
    WEFT_TRY(weft__check_float("linear", "x", a->x_dtype));
    WEFT_TRY(weft__check_float("linear", "y", a->y_dtype));
    if (a->bias != NULL) WEFT_TRY(weft__check_float("linear", "bias", a->bias_dtype));
    if (a->w_dtype != WEFT_F8E4M3) return weft__check_float("linear", "w", a->w_dtype);
    if (a->scale == NULL || a->scale_row == NULL)
        return weft_fail(WEFT_INVALID, "linear: float8_e4m3 weights need scale and scale_row");
    int64_t columns = (a->scale_col_phase + a->k + 127) / 128;
    if (a->k > 0 && a->scale_stride < columns)
        return weft_fail(WEFT_INVALID, "linear: %" PRId64 " columns from phase %" PRId64 " need %" PRId64
                         " scales a row, there are %" PRId64, a->k, a->scale_col_phase, columns, a->scale_stride);
    return WEFT_OK;
}

weft_status weft__check_expert_matrix(const weft_expert_matrix *m, const char *name, int64_t columns, weft_dtype dtype)
{
    if (dtype != WEFT_F8E4M3) return WEFT_OK;
    if (m->scale == NULL || m->scale_row == NULL)
        return weft_fail(WEFT_INVALID, "experts: float8_e4m3 weights of %s need scale and scale_row", name);
    int64_t needed = (m->scale_col_phase + columns + 127) / 128;
    if (m->scale_col_phase < 0 || m->scale_rows < 0 || (columns > 0 && m->scale_stride < needed))
        return weft_fail(WEFT_INVALID, "experts: %s needs %" PRId64 " scales a row, there are %" PRId64, name, needed, m->scale_stride);
    return WEFT_OK;
}

weft_status weft__check_group_norm(const weft_group_norm_args *a, int apply)
{
    const int64_t sizes[] = {a->rows, a->cols};
    WEFT_TRY(weft__check_sizes("group_norm", "rows, cols", sizes, 2));
    WEFT_TRY(weft__check_float("group_norm", "x", a->dtype));
    if (apply) WEFT_TRY(weft__check_float("group_norm", "gain", a->gain_dtype));
    if (apply && a->world < 1) return weft_fail(WEFT_INVALID, "group_norm: a group has at least 1 rank, got %d", a->world);
    return WEFT_OK;
}

weft_status weft__check_router(const weft_router_args *a)
{
    const int64_t sizes[] = {a->tokens, a->experts, a->logits_stride, a->top_k};
    WEFT_TRY(weft__check_sizes("router", "tokens, experts, logits_stride, top_k", sizes, 4));
    if (a->experts < 1 || a->experts > WEFT_MAX_EXPERTS)
        return weft_fail(WEFT_INVALID, "router: from 1 to %d experts, got %" PRId64, WEFT_MAX_EXPERTS, a->experts);
    if (a->top_k < 1 || a->top_k > a->experts)
        return weft_fail(WEFT_INVALID, "router: cannot choose %" PRId64 " of %" PRId64 " experts", a->top_k, a->experts);
    if ((unsigned)a->scoring >= WEFT_ROUTER_SCORING_COUNT) return weft_fail(WEFT_INVALID, "router: unknown scoring %d", (int)a->scoring);
    return WEFT_OK;
}
