/* layers/context_exchange.c - the two exchanges and the gather of queries. All sums are float32. */
#include "layers/context_exchange.h"

#include "base/checked.h"
#include "layers/run.h"

weft_status weft__step_scratch(weft_rank *rank, int64_t count, size_t element, void **out)
{
    size_t bytes;
    if (count < 0 || !weft_mul_size((size_t)count, element, &bytes)) return weft_fail(WEFT_MEMORY, "a step with too many bytes");
    return weft_arena_scratch(rank->arena, bytes, out);
}

/* One collective: destination n gets its heads of every token, with the LSE's bits beside them. */
static weft_status exchange_a2a(weft_rank *rank, weft_group *group, const weft__exchange_args *a, float *out, float *lse)
{
    int64_t parts = weft_group_size(group), own = a->heads / parts;
    int64_t lanes = weft_dtype_size(a->dtype) == 2 ? 2 : 1;
    int64_t chunk = a->tokens * own * (a->dim + lanes);
    void *send, *received, *lses;
    WEFT_TRY(weft__step_scratch(rank, parts * chunk, weft_dtype_size(a->dtype), &send));
    WEFT_TRY(weft__step_scratch(rank, parts * chunk, weft_dtype_size(a->dtype), &received));
    WEFT_TRY(weft__step_scratch(rank, parts * a->tokens * own, sizeof(float), &lses));
    weft_dcp_pack_args pack = {.out = a->out,
                               .lse = a->lse,
                               .buffer = send,
                               .parts = parts,
                               .tokens = a->tokens,
                               .heads = own,
                               .dim = a->dim,
                               .dtype = a->dtype};
    WEFT_TRY(WEFT_RUN(rank, dcp_pack, &pack));
    WEFT_TRY(weft_group_all_to_all(group, send, received, chunk, a->dtype));
    pack.buffer = received;
    pack.lse_unpacked = lses;
    WEFT_TRY(WEFT_RUN(rank, dcp_unpack_lse, &pack));
    weft_dcp_combine_args combine = {.partial = received,
                                     .lse = lses,
                                     .out = out,
                                     .lse_out = lse,
                                     .parts = parts,
                                     .tokens = a->tokens,
                                     .heads = own,
                                     .dim = a->dim,
                                     .valid_rows = a->tokens,
                                     .part_stride = chunk,
                                     .token_stride = own * (a->dim + lanes),
                                     .head_stride = a->dim + lanes,
                                     .lse_part_stride = a->tokens * own,
                                     .lse_token_stride = own,
                                     .dtype = a->dtype,
                                     .out_dtype = WEFT_F32};
    return WEFT_RUN(rank, dcp_combine, &combine);
}

/* LSEs first; each rank then scales what it has, and the sum over ranks is scattered by heads. */
static weft_status exchange_ag_rs(weft_rank *rank, weft_group *group, const weft__exchange_args *a, float *out, float *lse)
{
    int64_t parts = weft_group_size(group), own = a->heads / parts, count = own * a->tokens * a->dim;
    void *lses, *scaled, *sum;
    WEFT_TRY(weft__step_scratch(rank, parts * a->tokens * a->heads, sizeof(float), &lses));
    WEFT_TRY(weft__step_scratch(rank, parts * count, sizeof(float), &scaled));
    WEFT_TRY(weft__step_scratch(rank, count, sizeof(float), &sum));
    WEFT_TRY(weft_group_all_gather(group, a->lse, lses, a->tokens * a->heads, WEFT_F32));
    weft_dcp_scale_args scale = {.out = a->out,
                                 .lses = lses,
                                 .scaled = scaled,
                                 .lse_out = lse,
                                 .parts = parts,
                                 .part = weft_group_rank(group),
                                 .tokens = a->tokens,
                                 .heads = a->heads,
                                 .dim = a->dim,
                                 .lse_first = weft_group_rank(group) * own,
                                 .lse_heads = own,
                                 .dtype = a->dtype};
    WEFT_TRY(WEFT_RUN(rank, dcp_scale, &scale));
    WEFT_TRY(weft_group_reduce_scatter(group, scaled, sum, count, WEFT_F32));
    /* Heads come first in a scattered sum and second in what attention gives on. */
    size_t width = (size_t)a->dim * sizeof(float);
    for (int64_t h = 0; h < own; h++)
        WEFT_TRY(weft_run_copy_rows(rank, out + h * a->dim, (size_t)own * width, (const float *)sum + h * a->tokens * a->dim, width, width,
                                    a->tokens));
    return WEFT_OK;
}

weft_status weft__context_exchange(weft_rank *rank, weft_group *group, const weft__exchange_args *args, float **out, float **lse)
{
    int64_t parts = weft_group_size(group), own = args->heads / parts;
    void *whole, *whole_lse;
    if (args->heads % parts != 0)
        return weft_fail(WEFT_INVALID, "%lld heads do not divide over %lld context ranks", (long long)args->heads, (long long)parts);
    WEFT_TRY(weft__step_scratch(rank, args->tokens * own * args->dim, sizeof(float), &whole));
    WEFT_TRY(weft__step_scratch(rank, args->tokens * own, sizeof(float), &whole_lse));
    WEFT_TRY(weft_rank_fault(rank, "exchange"));
    WEFT_TRY((args->a2a ? exchange_a2a : exchange_ag_rs)(rank, group, args, whole, whole_lse));
    *out = whole;
    *lse = whole_lse;
    return WEFT_OK;
}

weft_status weft__gather_rows_by_width(weft_rank *rank, weft_group *group, const void *rows, int64_t tokens, int64_t width,
                                       int64_t row_stride, weft_dtype dtype, void **out)
{
    size_t element = weft_dtype_size(dtype), row = (size_t)width * element;
    int64_t parts = weft_group_size(group);
    void *packed, *gathered, *result;
    WEFT_TRY(weft__step_scratch(rank, tokens * width, element, &packed));
    WEFT_TRY(weft__step_scratch(rank, parts * tokens * width, element, &gathered));
    WEFT_TRY(weft__step_scratch(rank, parts * tokens * width, element, &result));
    WEFT_TRY(weft_run_copy_rows(rank, packed, row, rows, (size_t)row_stride * element, row, tokens));
    WEFT_TRY(weft_group_all_gather(group, packed, gathered, tokens * width, dtype));
    for (int64_t p = 0; p < parts; p++)
        WEFT_TRY(weft_run_copy_rows(rank, (char *)result + (size_t)p * row, (size_t)parts * row,
                                    (const char *)gathered + (size_t)(p * tokens) * row, row, row, tokens));
    *out = result;
    return WEFT_OK;
}
