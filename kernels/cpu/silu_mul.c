/* kernels/cpu/silu_mul.c - silu(gate) * up. */
#include "kernels/cpu/cpu.h"

typedef struct {
    const weft_silu_mul_args *args;
    const weft_isa_table *isa;
} silu_job;

static void silu_blocks(void *context, int part, int parts)
{
    const silu_job *job = context;
    const weft_silu_mul_args *a = job->args;
    const weft_isa_table *isa = job->isa;
    const int64_t blocks = (a->cols + WEFT_BLOCK - 1) / WEFT_BLOCK;
    float gate[WEFT_BLOCK], up[WEFT_BLOCK];
    long begin, end;
    weft_pool_range(a->rows * blocks, 1, part, parts, &begin, &end);
    for (long b = begin; b < end; b++) {
        int64_t row = b / blocks, i = b % blocks * WEFT_BLOCK, n = weft__min(WEFT_BLOCK, a->cols - i);
        isa->widen(gate, weft__at(a->x, a->dtype, row * a->x_stride + i), a->dtype, n);
        isa->widen(up, weft__at(a->x, a->dtype, row * a->x_stride + a->cols + i), a->dtype, n);
        isa->silu_mul(gate, gate, up, n);
        isa->narrow(weft__at_mut(a->y, a->dtype, row * a->y_stride + i), a->dtype, gate, n);
    }
}

weft_status weft_silu_mul_cpu(const weft_silu_mul_args *a, weft_pool *pool)
{
    const int64_t sizes[] = {a->rows, a->cols};
    WEFT_TRY(weft__check_sizes("silu_mul", "rows, cols", sizes, 2));
    WEFT_TRY(weft__check_float("silu_mul", "x", a->dtype));
    silu_job job = {a, weft__isa()};
    if (a->rows > 0 && a->cols > 0) weft_pool_run(a->rows * a->cols < 16384 ? NULL : pool, silu_blocks, &job);
    return WEFT_OK;
}
