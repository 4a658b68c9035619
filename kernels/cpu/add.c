/* kernels/cpu/add.c - elementwise sum, or a row added to all rows. */
#include "kernels/cpu/cpu.h"

typedef struct {
    const weft_add_args *args;
    const weft_isa_table *isa;
} add_job;

static void add_blocks(void *context, int part, int parts)
{
    const add_job *job = context;
    const weft_add_args *a = job->args;
    const weft_isa_table *isa = job->isa;
    const int64_t blocks = (a->cols + WEFT_BLOCK - 1) / WEFT_BLOCK;
    float x[WEFT_BLOCK], y[WEFT_BLOCK];
    long begin, end;
    weft_pool_range(a->rows * blocks, 1, part, parts, &begin, &end);
    for (long b = begin; b < end; b++) {
        int64_t row = b / blocks, i = b % blocks * WEFT_BLOCK, n = weft__min(WEFT_BLOCK, a->cols - i);
        isa->widen(y, weft__at(a->a, a->dtype, row * a->a_stride + i), a->dtype, n);
        isa->widen(x, weft__at(a->b, a->dtype, row * a->b_stride + i), a->dtype, n);
        isa->add(y, x, n);
        isa->narrow(weft__at_mut(a->y, a->dtype, row * a->y_stride + i), a->dtype, y, n);
    }
}

weft_status weft_add_cpu(const weft_add_args *a, weft_pool *pool)
{
    const int64_t sizes[] = {a->rows, a->cols};
    WEFT_TRY(weft__check_sizes("add", "rows, cols", sizes, 2));
    WEFT_TRY(weft__check_float("add", "a", a->dtype));
    add_job job = {a, weft__isa()};
    if (a->rows > 0 && a->cols > 0) weft_pool_run(a->rows * a->cols < 65536 ? NULL : pool, add_blocks, &job);
    return WEFT_OK;
}
