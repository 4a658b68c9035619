/* kernels/cpu/gather_rows.c - chosen rows, of any dtype. */
#include <inttypes.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

static void copy_rows(void *context, int part, int parts)
{
    const weft_gather_rows_args *a = context;
    const size_t bytes = (size_t)a->cols * weft_dtype_size(a->dtype);
    long begin, end;
    weft_pool_range(a->count, 1, part, parts, &begin, &end);
    for (long i = begin; i < end; i++)
        memcpy(weft__at_mut(a->y, a->dtype, i * a->y_stride), weft__at(a->x, a->dtype, a->indices[i] * a->x_stride), bytes);
}

weft_status weft_gather_rows_cpu(const weft_gather_rows_args *a, weft_pool *pool)
{
    const int64_t sizes[] = {a->count, a->cols, a->x_rows};
    WEFT_TRY(weft__check_sizes("gather_rows", "count, cols, x_rows", sizes, 3));
    if ((unsigned)a->dtype >= WEFT_DTYPE_COUNT) return weft_fail(WEFT_INVALID, "gather_rows: unknown dtype");
    for (int64_t i = 0; i < a->count; i++)
        if (a->indices[i] < 0 || a->indices[i] >= a->x_rows)
            return weft_fail(WEFT_INVALID, "gather_rows: index %d of %" PRId64 " rows", a->indices[i], a->x_rows);
    weft_gather_rows_args copy = *a;
    if (a->count > 0 && a->cols > 0) weft_pool_run(a->count * a->cols < 65536 ? NULL : pool, copy_rows, &copy);
    return WEFT_OK;
}
