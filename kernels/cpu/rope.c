/* kernels/cpu/rope.c - rotary embedding in neox halves, in place. */
#include <inttypes.h>

#include "kernels/cpu/cpu.h"

enum { MAX_HEAD_DIM = WEFT_BLOCK };

typedef struct {
    const weft_rope_args *args;
    const weft_isa_table *isa;
} rope_job;

static void rotate_tokens(void *context, int part, int parts)
{
    const rope_job *job = context;
    const weft_rope_args *a = job->args;
    const weft_isa_table *isa = job->isa;
    const int64_t half = a->rotary_dim / 2;
    float x[MAX_HEAD_DIM];
    long begin, end;
    weft_pool_range(a->tokens, 1, part, parts, &begin, &end);
    for (long t = begin; t < end; t++) {
        const float *cos = a->cos_sin + (int64_t)a->positions[t] * a->rotary_dim;
        for (int64_t h = 0; h < a->heads; h++) {
            void *head = weft__at_mut(a->x, a->dtype, t * a->token_stride + h * a->head_dim);
            isa->widen(x, head, a->dtype, a->rotary_dim);
            isa->rotate(x, x + half, cos, cos + half, half);
            isa->narrow(head, a->dtype, x, a->rotary_dim);
        }
    }
}

weft_status weft_rope_cpu(const weft_rope_args *a, weft_pool *pool)
{
    const int64_t sizes[] = {a->tokens, a->heads, a->head_dim, a->rotary_dim, a->max_positions};
    WEFT_TRY(weft__check_sizes("rope", "tokens, heads, head_dim, rotary_dim, max_positions", sizes, 5));
    WEFT_TRY(weft__check_float("rope", "x", a->dtype));
    if (a->rotary_dim % 2 != 0 || a->rotary_dim > a->head_dim || a->head_dim > MAX_HEAD_DIM)
        return weft_fail(WEFT_INVALID,
                         "rope: rotary_dim must be even and at most head_dim (which is at most %d), got %" PRId64 " of %" PRId64,
                         MAX_HEAD_DIM, a->rotary_dim, a->head_dim);
    for (int64_t t = 0; t < a->tokens; t++)
        if (a->positions[t] < 0 || a->positions[t] >= a->max_positions)
            return weft_fail(WEFT_INVALID, "rope: position %d of token %" PRId64 " is outside the table of %" PRId64 " positions",
                             a->positions[t], t, a->max_positions);
    rope_job job = {a, weft__isa()};
    if (a->tokens > 0 && a->rotary_dim > 0)
        weft_pool_run(a->tokens * a->heads * a->rotary_dim < 32768 ? NULL : pool, rotate_tokens, &job);
    return WEFT_OK;
}
