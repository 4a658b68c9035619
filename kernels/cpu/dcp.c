/* kernels/cpu/dcp.c - partial attention results of the context ranks: masks, packs, combination. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

static float clean(float lse)
{
    return isnan(lse) || lse == INFINITY ? -INFINITY : lse;
}

static float power(float x, int base2)
{
    return base2 ? exp2f(x) : expf(x);
}

/* log_b of the sum of b^lse over the parts, `stride` apart; -inf when all are empty. */
static float combined_lse(const float *lse, int64_t parts, int64_t stride, int base2)
{
    float max = -INFINITY, sum = 0.0f;
    for (int64_t n = 0; n < parts; n++) max = fmaxf(max, clean(lse[n * stride]));
    if (max == -INFINITY) return -INFINITY;
    for (int64_t n = 0; n < parts; n++) sum += power(clean(lse[n * stride]) - max, base2);
    return (base2 ? log2f(sum) : logf(sum)) + max;
}

/* ---- combine ---- */

typedef struct {
    const weft_dcp_combine_args *args;
    const weft_isa_table *isa;
} combine_job;

static void combine_head(const combine_job *job, int64_t t, int64_t h)
{
    const weft_dcp_combine_args *a = job->args;
    const weft_isa_table *isa = job->isa;
    const float *lse = a->lse + t * a->lse_token_stride + h;
    float s = t < a->valid_rows ? combined_lse(lse, a->parts, a->lse_part_stride, a->base2) : -INFINITY;
    float x[WEFT_BLOCK], y[WEFT_BLOCK];
    for (int64_t i = 0; i < a->dim; i += WEFT_BLOCK) {
        int64_t count = weft__min(WEFT_BLOCK, a->dim - i);
        memset(y, 0, (size_t)count * sizeof *y);
        for (int64_t n = 0; n < a->parts && s != -INFINITY; n++) {
            float own = clean(lse[n * a->lse_part_stride]);
            float weight = own == -INFINITY ? 0.0f : power(own - s, a->base2);
            if (weight == 0.0f) continue;
            int64_t at = n * a->part_stride + t * a->token_stride + h * a->head_stride + i;
            isa->widen(x, weft__at(a->partial, a->dtype, at), a->dtype, count);
            isa->axpy(y, x, weight, count);
        }
        isa->narrow(weft__at_mut(a->out, a->out_dtype, (t * a->heads + h) * a->dim + i), a->out_dtype, y, count);
    }
    if (a->lse_out != NULL) a->lse_out[t * a->heads + h] = s;
}

static void combine_tokens(void *context, int part, int parts)
{
    const combine_job *job = context;
    long begin, end;
    weft_pool_range(job->args->tokens * job->args->heads, 1, part, parts, &begin, &end);
    for (long i = begin; i < end; i++) combine_head(job, i / job->args->heads, i % job->args->heads);
}

weft_status weft_dcp_combine_cpu(const weft_dcp_combine_args *a, weft_pool *pool)
{
    const int64_t sizes[] = {a->parts, a->tokens, a->heads, a->dim, a->valid_rows};
    WEFT_TRY(weft__check_sizes("dcp_combine", "parts, tokens, heads, dim, valid_rows", sizes, 5));
    WEFT_TRY(weft__check_float("dcp_combine", "partial", a->dtype));
    WEFT_TRY(weft__check_float("dcp_combine", "out", a->out_dtype));
    combine_job job = {a, weft__isa()};
    int64_t work = a->parts * a->tokens * a->heads * a->dim;
    if (a->tokens > 0 && a->heads > 0) weft_pool_run(work < 32768 ? NULL : pool, combine_tokens, &job);
    return WEFT_OK;
}

/* ---- the a2a exchange ---- */

static weft_status check_pack(const weft_dcp_pack_args *a)
{
    const int64_t sizes[] = {a->parts, a->tokens, a->heads, a->dim};
    WEFT_TRY(weft__check_sizes("dcp_pack", "parts, tokens, heads, dim", sizes, 4));
    return weft__check_float("dcp_pack", "out", a->dtype);
}

/* The bits of an LSE behind a row of `dim` elements: low half first in 16-bit types. */
static void put_lse(char *row, size_t size, int64_t dim, float lse)
{
    uint32_t bits = weft_f32_bits(lse);
    uint16_t lanes[2] = {(uint16_t)bits, (uint16_t)(bits >> 16)};
    if (size == 4) memcpy(row + dim * 4, &bits, 4);
    else memcpy(row + dim * 2, lanes, 4);
}

static float take_lse(const char *row, size_t size, int64_t dim)
{
    uint32_t bits;
    uint16_t lanes[2];
    if (size == 4) {
        memcpy(&bits, row + dim * 4, 4);
    } else {
        memcpy(lanes, row + dim * 2, 4);
        bits = lanes[0] | (uint32_t)lanes[1] << 16;
    }
    return weft_f32_from_bits(bits);
}

static void pack_rows(void *context, int part, int parts)
{
    const weft_dcp_pack_args *a = context;
    const size_t size = weft_dtype_size(a->dtype);
    const int64_t row_bytes = (a->dim + (size == 4 ? 1 : 2)) * (int64_t)size, all_heads = a->parts * a->heads;
    long begin, end;
    weft_pool_range(a->parts * a->tokens, 1, part, parts, &begin, &end);
    for (long i = begin; i < end; i++) {
        int64_t n = i / a->tokens, t = i % a->tokens;
        for (int64_t h = 0; h < a->heads; h++) {
            int64_t from = t * all_heads + n * a->heads + h;
            char *row = (char *)a->buffer + (i * a->heads + h) * row_bytes;
            memcpy(row, (const char *)a->out + from * a->dim * (int64_t)size, (size_t)a->dim * size);
            put_lse(row, size, a->dim, a->lse[from]);
        }
    }
}

static void unpack_rows(void *context, int part, int parts)
{
    const weft_dcp_pack_args *a = context;
    const size_t size = weft_dtype_size(a->dtype);
    const int64_t row_bytes = (a->dim + (size == 4 ? 1 : 2)) * (int64_t)size;
    long begin, end;
    weft_pool_range(a->parts * a->tokens * a->heads, 1, part, parts, &begin, &end);
    for (long i = begin; i < end; i++) a->lse_unpacked[i] = take_lse((const char *)a->buffer + i * row_bytes, size, a->dim);
}

weft_status weft_dcp_pack_cpu(const weft_dcp_pack_args *a, weft_pool *pool)
{
    WEFT_TRY(check_pack(a));
    weft_dcp_pack_args copy = *a;
    if (a->parts * a->tokens * a->heads > 0)
        weft_pool_run(a->parts * a->tokens * a->heads * a->dim < 65536 ? NULL : pool, pack_rows, &copy);
    return WEFT_OK;
}

weft_status weft_dcp_unpack_lse_cpu(const weft_dcp_pack_args *a, weft_pool *pool)
{
    WEFT_TRY(check_pack(a));
    weft_dcp_pack_args copy = *a;
    int64_t rows = a->parts * a->tokens * a->heads;
    if (rows > 0) weft_pool_run(rows < 16384 ? NULL : pool, unpack_rows, &copy);
    return WEFT_OK;
}

/* ---- the ag_rs exchange ---- */

typedef struct {
    const weft_dcp_scale_args *args;
    const weft_isa_table *isa;
} scale_job;

static void scale_rows(void *context, int part, int parts)
{
    const scale_job *job = context;
    const weft_dcp_scale_args *a = job->args;
    const int64_t rows = a->tokens * a->heads;
    long begin, end;
    weft_pool_range(rows, 1, part, parts, &begin, &end);
    for (long i = begin; i < end; i++) {
        int64_t t = i / a->heads, h = i % a->heads;
        float s = combined_lse(a->lses + i, a->parts, rows, a->base2), own = clean(a->lses[a->part * rows + i]);
        float weight = own == -INFINITY ? 0.0f : power(own - s, a->base2);
        float *to = a->scaled + (h * a->tokens + t) * a->dim;
        if (weight == 0.0f) {
            memset(to, 0, (size_t)a->dim * sizeof *to);
        } else {
            job->isa->widen(to, weft__at(a->out, a->dtype, i * a->dim), a->dtype, a->dim);
            job->isa->scale(to, weight, a->dim);
        }
        if (a->lse_out != NULL && h >= a->lse_first && h < a->lse_first + a->lse_heads)
            a->lse_out[t * a->lse_heads + h - a->lse_first] = s;
    }
}

weft_status weft_dcp_scale_cpu(const weft_dcp_scale_args *a, weft_pool *pool)
{
    const int64_t sizes[] = {a->parts, a->part, a->tokens, a->heads, a->dim, a->lse_first, a->lse_heads};
    WEFT_TRY(weft__check_sizes("dcp_scale", "parts, part, tokens, heads, dim, lse_first, lse_heads", sizes, 7));
    WEFT_TRY(weft__check_float("dcp_scale", "out", a->dtype));
    if (a->part >= a->parts)
        return weft_fail(WEFT_INVALID, "dcp_scale: part %" PRId64 " of %" PRId64, a->part, a->parts);
    if (a->lse_out != NULL && a->lse_first + a->lse_heads > a->heads)
        return weft_fail(WEFT_INVALID, "dcp_scale: heads %" PRId64 " to %" PRId64 " of %" PRId64, a->lse_first,
                         a->lse_first + a->lse_heads, a->heads);
    scale_job job = {a, weft__isa()};
    int64_t rows = a->tokens * a->heads;
    if (rows > 0) weft_pool_run(rows * a->dim < 32768 ? NULL : pool, scale_rows, &job);
    return WEFT_OK;
}

/* ---- empty shards ---- */

weft_status weft_mask_empty_cpu(const weft_mask_empty_args *a, weft_pool *pool)
{
    const int64_t sizes[] = {a->tokens, a->heads, a->requests};
    WEFT_TRY(weft__check_sizes("mask_empty", "tokens, heads, requests", sizes, 3));
    int64_t done = 0;
    if (a->requests > 0) WEFT_TRY(weft__check_ragged("mask_empty", a->query_start_loc, NULL, a->requests, a->tokens));
    for (int64_t r = 0; r < a->requests; r++) {
        done = a->query_start_loc[r + 1];
        if (a->local_lens[r] != 0) continue;
        for (int64_t i = a->query_start_loc[r] * a->heads; i < done * a->heads; i++) a->lse[i] = -INFINITY;
    }
    for (int64_t i = done * a->heads; i < a->tokens * a->heads; i++) a->lse[i] = -INFINITY;
    return WEFT_OK;
}
