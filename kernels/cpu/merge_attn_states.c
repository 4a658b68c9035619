/* kernels/cpu/merge_attn_states.c - two partial attention results of the same queries, by LSE. */
#include <math.h>

#include "kernels/cpu/cpu.h"

typedef struct {
    const weft_merge_attn_states_args *args;
    const weft_isa_table *isa;
} merge_job;

static float clean(float lse)
{
    return isnan(lse) || lse == INFINITY ? -INFINITY : lse;
}

/* out = prefix * p + suffix * s for one head; an operand of weight 0 is not read. */
static void blend(const merge_job *job, int64_t token, int64_t head, float p, float s)
{
    const weft_merge_attn_states_args *a = job->args;
    const weft_isa_table *isa = job->isa;
    float x[WEFT_BLOCK], y[WEFT_BLOCK];
    for (int64_t i = 0; i < a->dim; i += WEFT_BLOCK) {
        int64_t n = weft__min(WEFT_BLOCK, a->dim - i), at = head * a->dim + i;
        for (int64_t j = 0; j < n; j++) y[j] = 0.0f;
        if (p != 0.0f) {
            isa->widen(x, weft__at(a->prefix, a->prefix_dtype, token * a->prefix_stride + at), a->prefix_dtype, n);
            isa->axpy(y, x, p, n);
        }
        if (s != 0.0f) {
            isa->widen(x, weft__at(a->suffix, a->suffix_dtype, token * a->suffix_stride + at), a->suffix_dtype, n);
            isa->axpy(y, x, s, n);
        }
        isa->narrow(weft__at_mut(a->out, a->out_dtype, token * a->out_stride + at), a->out_dtype, y, n);
    }
}

static void merge_tokens(void *context, int part, int parts)
{
    const merge_job *job = context;
    const weft_merge_attn_states_args *a = job->args;
    long begin, end;
    weft_pool_range(a->tokens, 1, part, parts, &begin, &end);
    for (long t = begin; t < end; t++)
        for (int64_t h = 0; h < a->heads; h++) {
            float prefix = clean(a->prefix_lse[t * a->heads + h]), suffix = clean(a->suffix_lse[t * a->heads + h]);
            float max = prefix > suffix ? prefix : suffix, p = 0.0f, s = 0.0f, lse = -INFINITY;
            if (max != -INFINITY) {
                p = expf(prefix - max);
                s = expf(suffix - max);
                float z = p + s;
                p /= z;
                s /= z;
                lse = logf(z) + max;
            }
            blend(job, t, h, p, s);
            if (a->lse_out != NULL) a->lse_out[t * a->heads + h] = lse;
        }
}

weft_status weft_merge_attn_states_cpu(const weft_merge_attn_states_args *a, weft_pool *pool)
{
    const int64_t sizes[] = {a->tokens, a->heads, a->dim};
    WEFT_TRY(weft__check_sizes("merge_attn_states", "tokens, heads, dim", sizes, 3));
    WEFT_TRY(weft__check_float("merge_attn_states", "prefix", a->prefix_dtype));
    WEFT_TRY(weft__check_float("merge_attn_states", "suffix", a->suffix_dtype));
    WEFT_TRY(weft__check_float("merge_attn_states", "out", a->out_dtype));
    merge_job job = {a, weft__isa()};
    if (a->tokens > 0) weft_pool_run(a->tokens * a->heads * a->dim < 32768 ? NULL : pool, merge_tokens, &job);
    return WEFT_OK;
}
