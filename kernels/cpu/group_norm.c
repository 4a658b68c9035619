/* kernels/cpu/group_norm.c - the two halves of an RMSNorm whose statistics span a group. */
#include <math.h>

#include "kernels/cpu/cpu.h"

typedef struct {
    const weft_group_norm_args *args;
    const weft_isa_table *isa;
} norm_job;

static void sum_rows(void *context, int part, int parts)
{
    const norm_job *job = context;
    const weft_group_norm_args *a = job->args;
    float x[WEFT_BLOCK];
    long begin, end;
    weft_pool_range(a->rows, 1, part, parts, &begin, &end);
    for (long row = begin; row < end; row++) {
        float sum = 0.0f;
        for (int64_t i = 0; i < a->cols; i += WEFT_BLOCK) {
            int64_t n = weft__min(WEFT_BLOCK, a->cols - i);
            job->isa->widen(x, weft__at(a->x, a->dtype, row * a->x_stride + i), a->dtype, n);
            sum += job->isa->sum_squares(x, n);
        }
        a->var[row * a->var_stride] = a->cols > 0 ? sum / (float)a->cols : 0.0f;
    }
}

static void apply_rows(void *context, int part, int parts)
{
    const norm_job *job = context;
    const weft_group_norm_args *a = job->args;
    const weft_isa_table *isa = job->isa;
    float x[WEFT_BLOCK], gain[WEFT_BLOCK];
    long begin, end;
    weft_pool_range(a->rows, 1, part, parts, &begin, &end);
    for (long row = begin; row < end; row++) {
        float factor = 1.0f / sqrtf(a->var[row * a->var_stride] / (float)a->world + a->eps);
        for (int64_t i = 0; i < a->cols; i += WEFT_BLOCK) {
            int64_t n = weft__min(WEFT_BLOCK, a->cols - i);
            isa->widen(x, weft__at(a->x, a->dtype, row * a->x_stride + i), a->dtype, n);
            isa->widen(gain, weft__at(a->gain, a->gain_dtype, i), a->gain_dtype, n);
            isa->scale_gain(x, factor, gain, n);
            isa->narrow(weft__at_mut(a->y, a->dtype, row * a->y_stride + i), a->dtype, x, n);
        }
    }
}

static weft_pool *pool_for(const weft_group_norm_args *a, weft_pool *pool)
{
    return a->rows * a->cols < 32768 ? NULL : pool;
}

weft_status weft_group_norm_sums_cpu(const weft_group_norm_args *a, weft_pool *pool)
{
    WEFT_TRY(weft__check_group_norm(a, 0));
    norm_job job = {a, weft__isa()};
    if (a->rows > 0) weft_pool_run(pool_for(a, pool), sum_rows, &job);
    return WEFT_OK;
}

weft_status weft_group_norm_apply_cpu(const weft_group_norm_args *a, weft_pool *pool)
{
    WEFT_TRY(weft__check_group_norm(a, 1));
    norm_job job = {a, weft__isa()};
    if (a->rows > 0 && a->cols > 0) weft_pool_run(pool_for(a, pool), apply_rows, &job);
    return WEFT_OK;
}
