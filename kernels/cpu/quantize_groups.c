/* kernels/cpu/quantize_groups.c - activations as float8_e4m3 with a scale for each 128 columns
 * would hold them. */
#include <inttypes.h>
#include <math.h>

#include "kernels/cpu/cpu.h"

enum { GROUP = 128 };

/* Nearest e4m3 value, ties to even; |x| <= 448. Steps are 2^-9 below 2^-6 and 1/8 of the power of
 * two above. */
static float round_e4m3(float x)
{
    int exponent;
    frexpf(x, &exponent); /* |x| in [2^(e-1), 2^e) */
    float step = ldexpf(1.0f, exponent - 1 < -6 ? -9 : exponent - 4);
    return rintf(x / step) * step;
}

typedef struct {
    const weft_quantize_groups_args *args;
    const weft_isa_table *isa;
} quantize_job;

static void quantize_rows(void *context, int part, int parts)
{
    const quantize_job *job = context;
    const weft_quantize_groups_args *a = job->args;
    float values[GROUP];
    long begin, end;
    weft_pool_range(a->rows, 1, part, parts, &begin, &end);
    for (long row = begin; row < end; row++) {
        for (int64_t j = 0, n; j < a->cols; j += n) {
            n = weft__min(GROUP - (a->phase + j) % GROUP, a->cols - j);
            job->isa->widen(values, weft__at(a->x, a->dtype, row * a->x_stride + j), a->dtype, n);
            float largest = 0.0f;
            int finite = 1;
            for (int64_t i = 0; i < n; i++) {
                largest = fmaxf(largest, fabsf(values[i]));
                finite = finite && isfinite(values[i]);
            }
            /* What is not finite stays as it is: a poisoned token must show. */
            float scale = largest / 448.0f;
            if (finite && scale > 0.0f)
                for (int64_t i = 0; i < n; i++) values[i] = round_e4m3(fmaxf(-448.0f, fminf(448.0f, values[i] / scale))) * scale;
            job->isa->narrow(weft__at_mut(a->y, a->y_dtype, row * a->y_stride + j), a->y_dtype, values, n);
        }
    }
}

weft_status weft_quantize_groups_cpu(const weft_quantize_groups_args *a, weft_pool *pool)
{
    const int64_t sizes[] = {a->rows, a->cols, a->x_stride, a->y_stride, a->phase};
    WEFT_TRY(weft__check_sizes("quantize_groups", "rows, cols, x_stride, y_stride, phase", sizes, 5));
    WEFT_TRY(weft__check_float("quantize_groups", "x", a->dtype));
    WEFT_TRY(weft__check_float("quantize_groups", "y", a->y_dtype));
    if (a->phase >= GROUP) return weft_fail(WEFT_INVALID, "quantize_groups: phase %" PRId64 " is not below 128", a->phase);
    quantize_job job = {a, weft__isa()};
    if (a->rows > 0 && a->cols > 0) weft_pool_run(a->rows * a->cols < 16384 ? NULL : pool, quantize_rows, &job);
    return WEFT_OK;
}
