/* kernels/cpu/rms_norm.c - RMSNorm, with the residual sum in front of it when asked. */
#include <math.h>

#include "kernels/cpu/cpu.h"

typedef struct {
    const weft_rms_norm_args *args;
    const weft_isa_table *isa;
} norm_job;

/* r = x + residual, rounded and written back; the sum of squares of the rounded values. */
static float sum_row(const weft_rms_norm_args *a, const weft_isa_table *isa, int64_t row)
{
    float r[WEFT_BLOCK], add[WEFT_BLOCK], sum = 0.0f;
    for (int64_t i = 0; i < a->cols; i += WEFT_BLOCK) {
        int64_t n = weft__min(WEFT_BLOCK, a->cols - i);
        isa->widen(r, weft__at(a->x, a->dtype, row * a->x_stride + i), a->dtype, n);
        if (a->residual != NULL) {
            void *residual = weft__at_mut(a->residual, a->dtype, row * a->residual_stride + i);
            isa->widen(add, residual, a->dtype, n);
            isa->add(r, add, n);
            isa->narrow(residual, a->dtype, r, n);
            isa->widen(r, residual, a->dtype, n);
        }
        sum += isa->sum_squares(r, n);
    }
    return sum;
}

static void norm_rows(void *context, int part, int parts)
{
    const norm_job *job = context;
    const weft_rms_norm_args *a = job->args;
    const weft_isa_table *isa = job->isa;
    float r[WEFT_BLOCK], gain[WEFT_BLOCK];
    long begin, end;
    weft_pool_range(a->rows, 1, part, parts, &begin, &end);
    for (long row = begin; row < end; row++) {
        float factor = 1.0f / sqrtf(sum_row(a, isa, row) / (float)a->cols + a->eps);
        for (int64_t i = 0; i < a->cols; i += WEFT_BLOCK) {
            int64_t n = weft__min(WEFT_BLOCK, a->cols - i);
            const void *from = a->residual != NULL ? weft__at(a->residual, a->dtype, row * a->residual_stride + i)
                                                   : weft__at(a->x, a->dtype, row * a->x_stride + i);
            isa->widen(r, from, a->dtype, n);
            isa->widen(gain, weft__at(a->gain, a->gain_dtype, i), a->gain_dtype, n);
            isa->scale_gain(r, factor, gain, n);
            isa->narrow(weft__at_mut(a->y, a->dtype, row * a->y_stride + i), a->dtype, r, n);
        }
    }
}

weft_status weft_rms_norm_cpu(const weft_rms_norm_args *a, weft_pool *pool)
{
    const int64_t sizes[] = {a->rows, a->cols};
    WEFT_TRY(weft__check_sizes("rms_norm", "rows, cols", sizes, 2));
    WEFT_TRY(weft__check_float("rms_norm", "x", a->dtype));
    WEFT_TRY(weft__check_float("rms_norm", "gain", a->gain_dtype));
    norm_job job = {a, weft__isa()};
    if (a->rows > 0 && a->cols > 0) weft_pool_run(a->rows * a->cols < 32768 ? NULL : pool, norm_rows, &job);
    return WEFT_OK;
}
