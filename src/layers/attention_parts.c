/* layers/attention_parts.c - checks and arguments of an attention call. */
#include "layers/attention_parts.h"

#include <inttypes.h>
#include <math.h>

enum { MAX_HEADS = 65536, MAX_HEAD_SIZE = 65536 };

weft_status weft__attention_shape_check(weft__attention_shape *s, const char *what)
{
    if (s->num_heads < 1 || s->num_heads > MAX_HEADS || s->num_kv_heads < 1 || s->num_kv_heads > MAX_HEADS)
        return weft_fail(WEFT_INVALID, "%s needs 1 to %d heads and key heads, got %d and %d", what, MAX_HEADS, s->num_heads,
                         s->num_kv_heads);
    if (s->num_heads % s->num_kv_heads != 0)
        return weft_fail(WEFT_INVALID, "%s: %d query heads do not divide over %d key heads", what, s->num_heads, s->num_kv_heads);
    if (s->head_size < 1 || s->head_size > MAX_HEAD_SIZE || s->v_head_size < 1 || s->v_head_size > MAX_HEAD_SIZE)
        return weft_fail(WEFT_INVALID, "%s needs head sizes from 1 to %d, got %d and %d", what, MAX_HEAD_SIZE, s->head_size,
                         s->v_head_size);
    if (s->sliding_window < 0) return weft_fail(WEFT_INVALID, "%s: negative sliding window %d", what, s->sliding_window);
    if (!isfinite(s->scale) || s->scale < 0) return weft_fail(WEFT_INVALID, "%s: scale %g, wanted above 0", what, (double)s->scale);
    if (s->scale == 0) s->scale = 1.0f / sqrtf((float)s->head_size);
    return WEFT_OK;
}

static weft_status check_rows(const char *name, const weft_tensor *x, int64_t tokens, int heads, int size, weft_dtype dtype)
{
    char text[128];
    WEFT_TRY(weft_tensor_check(x));
    if (x->ndim != 2 || x->shape[0] != tokens || x->shape[1] != (int64_t)heads * size || x->dtype != dtype)
        return weft_fail(WEFT_INVALID, "%s must be %s[%" PRId64 ", %d * %d], got %s", name, weft_dtype_name(dtype), tokens, heads, size,
                         weft_tensor_describe(x, text, sizeof text));
    if (x->shape[1] > 1 && x->stride[1] != 1)
        return weft_fail(WEFT_INVALID, "%s must have the elements of a row side by side, got a stride of %" PRId64, name, x->stride[1]);
    return WEFT_OK;
}

weft_status weft__attention_inputs_check(const weft__attention_shape *s, const weft_tensor *q, const weft_tensor *k,
                                         const weft_tensor *v, const weft_step *step)
{
    WEFT_TRY(weft_step_ready(step));
    int64_t tokens = step->header->num_tokens;
    if (q->dtype != WEFT_F32 && q->dtype != WEFT_BF16 && q->dtype != WEFT_F16)
        return weft_fail(WEFT_INVALID, "queries must be float32, bfloat16 or float16, got %s", weft_dtype_name(q->dtype));
    WEFT_TRY(check_rows("q", q, tokens, s->num_heads, s->head_size, q->dtype));
    WEFT_TRY(check_rows("k", k, tokens, s->num_kv_heads, s->head_size, q->dtype));
    return check_rows("v", v, tokens, s->num_kv_heads, s->v_head_size, q->dtype);
}

weft_attention_args weft__attention_args_new(const weft_rank *rank, const weft__attention_shape *s, const weft_tensor *q,
                                             const weft_tensor *k, const weft_tensor *v, const weft_step *step)
{
    const weft_step_arrays arrays = weft_step_arrays_of(step);
    return (weft_attention_args){
        .q = q->data,
        .k = k->data,
        .v = v->data,
        .query_start_loc = arrays.query_start_loc,
        .seq_lens = arrays.seq_lens,
        .tokens = step->header->num_tokens,
        .requests = arrays.requests,
        .q_stride = q->stride[0],
        .k_stride = k->stride[0],
        .v_stride = v->stride[0],
        .out_stride = (int64_t)s->num_heads * s->v_head_size,
        .num_heads = s->num_heads,
        .num_kv_heads = s->num_kv_heads,
        .head_dim = s->head_size,
        .head_dim_v = s->v_head_size,
        .group_size = s->num_heads / s->num_kv_heads,
        .keys = WEFT_KEYS_NEW,
        .causal = 1,
        .window = s->sliding_window,
        .scale = s->scale,
        .dtype = q->dtype,
        .kv_dtype = k->dtype,
        .max_query_len = arrays.max_query_len,
        .max_seq_len = arrays.max_seq_len,
        .cuda = weft_run_context(rank),
    };
}
