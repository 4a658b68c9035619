/* kernels/cpu/embedding.c - rows of the vocabulary that this rank holds. */
#include <string.h>

#include "kernels/cpu/cpu.h"

typedef struct {
    const weft_embedding_args *args;
    const weft_isa_table *isa;
} embedding_job;

static void embed(void *context, int part, int parts)
{
    const embedding_job *job = context;
    const weft_embedding_args *a = job->args;
    long begin, end;
    weft_pool_range(a->tokens, 1, part, parts, &begin, &end);
    for (long t = begin; t < end; t++) {
        void *y = weft__at_mut(a->y, a->y_dtype, t * a->hidden);
        int64_t row = (int64_t)a->ids[t] - a->first;
        if (row < 0 || row >= a->count) {
            memset(y, 0, (size_t)a->hidden * weft_dtype_size(a->y_dtype));
        } else if (a->w_dtype == a->y_dtype) {
            memcpy(y, weft__at(a->w, a->w_dtype, row * a->hidden), (size_t)a->hidden * weft_dtype_size(a->y_dtype));
        } else {
            float block[WEFT_BLOCK];
            for (int64_t i = 0; i < a->hidden; i += WEFT_BLOCK) {
                int64_t n = weft__min(WEFT_BLOCK, a->hidden - i);
                job->isa->widen(block, weft__at(a->w, a->w_dtype, row * a->hidden + i), a->w_dtype, n);
                job->isa->narrow(weft__at_mut(y, a->y_dtype, i), a->y_dtype, block, n);
            }
        }
    }
}

weft_status weft_embedding_cpu(const weft_embedding_args *a, weft_pool *pool)
{
    const int64_t sizes[] = {a->tokens, a->hidden, a->first, a->count};
    WEFT_TRY(weft__check_sizes("embedding", "tokens, hidden, first, count", sizes, 4));
    WEFT_TRY(weft__check_float("embedding", "w", a->w_dtype));
    WEFT_TRY(weft__check_float("embedding", "y", a->y_dtype));
    embedding_job job = {a, weft__isa()};
    if (a->tokens > 0 && a->hidden > 0) weft_pool_run(a->tokens * a->hidden < 65536 ? NULL : pool, embed, &job);
    return WEFT_OK;
}
