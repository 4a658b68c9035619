/* kernels/cpu/linear.c - y = x w^T + bias.
 *
 * Few tokens: every row of w is read once, at memory speed, for all of them (gemv). Many: x is
 * packed into panels once, blocks of w are widened to float32 in cache and multiplied with every
 * panel (product); bfloat16 by bfloat16 stays as it is where the processor multiplies it, and goes to
 * oneDNN when the product is large. All cut n over the pool. */
#include <inttypes.h>
#include <stdatomic.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/onednn.h"

enum {
    GEMV_TOKENS = 16,   /* up to here w streams past the tokens */
    GEMV_ROWS = 64,     /* rows of w between two stores of y */
    TOKEN_BLOCK = 512,  /* tokens packed at once: scratch is TOKEN_BLOCK * k floats */
    ROW_BLOCK = 48,     /* rows of w widened at once */
    K_BLOCK = 256,      /* columns of w widened at once */
    PACK_K = 128,       /* columns of x widened at once, per lane */
    LIBRARY_TOKENS = 12, /* from here bfloat16 products are oneDNN's, where it has them */
    LIBRARY_ROWS = 256, /* rows of w in one call of it, at most */
    LIBRARY_LEAST = 64, /* a side of a block that is not cut any more */
    MAX_LANES = 32
};

/* y[t][row .. row + count) = values + bias (+ y) */
static void finish(const weft_linear_args *a, const weft_isa_table *isa, int64_t t, int64_t row, float *values, int64_t count)
{
    float other[GEMV_ROWS];
    void *y = weft__at_mut(a->y, a->y_dtype, t * a->y_stride + row);
    if (a->bias != NULL) {
        isa->widen(other, weft__at(a->bias, a->bias_dtype, row), a->bias_dtype, count);
        isa->add(values, other, count);
    }
    if (a->add) {
        isa->widen(other, y, a->y_dtype, count);
        isa->add(values, other, count);
    }
    isa->narrow(y, a->y_dtype, values, count);
}

/* ---- few tokens ---- */

typedef struct {
    const weft_linear_args *args;
    const weft_isa_table *isa;
    const float *x;
    int64_t x_stride;
    int64_t rows_each; /* rows that a thread takes at once */
    atomic_long next;
} gemv_job;

static void gemv_rows(void *context, int part, int parts)
{
    gemv_job *job = context;
    const weft_linear_args *a = job->args;
    float out[GEMV_TOKENS * GEMV_ROWS];
    for (;;) {
        int64_t row = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed) * job->rows_each;
        if (row >= a->n) return;
        weft_isa_gemv_args g = {
            .w = weft__at(a->w, a->w_dtype, row * a->w_stride),
            .x = job->x,
            .out = out,
            .scale = a->scale,
            .scale_row = a->scale_row != NULL ? a->scale_row + row : NULL,
            .rows = weft__min(job->rows_each, a->n - row),
            .tokens = a->tokens,
            .k = a->k,
            .w_stride = a->w_stride,
            .x_stride = job->x_stride,
            .out_stride = GEMV_ROWS,
            .scale_stride = a->scale_stride,
            .scale_phase = a->scale_col_phase,
            .w_dtype = a->w_dtype,
        };
        job->isa->gemv(&g);
        for (int64_t t = 0; t < a->tokens; t++) finish(a, job->isa, t, row, out + t * GEMV_ROWS, g.rows);
    }
}

static weft_status gemv(const weft_linear_args *a, const weft_isa_table *isa, weft_pool *pool)
{
    gemv_job job = {.args = a, .isa = isa, .x = a->x, .x_stride = a->x_stride};
    if (a->n * (a->k + 1) < 16384) pool = NULL;
    /* Some eight pieces for each thread: a thread that loses its core for a while holds up little. */
    job.rows_each = weft__max(8, weft__min(GEMV_ROWS, a->n / (8 * weft_pool_threads(pool)) / 4 * 4));
    atomic_init(&job.next, 0);
    if (a->x_dtype != WEFT_F32) {
        void *scratch = NULL;
        WEFT_TRY(weft__scratch((size_t)a->tokens * (size_t)a->k * 4, &scratch));
        float *x = scratch;
        for (int64_t t = 0; t < a->tokens; t++)
            isa->widen(x + t * a->k, weft__at(a->x, a->x_dtype, t * a->x_stride), a->x_dtype, a->k);
        job.x = x;
        job.x_stride = a->k;
    }
    weft_pool_run(pool, gemv_rows, &job);
    return WEFT_OK;
}

/* ---- many tokens ---- */

typedef struct {
    const weft_linear_args *args;
    const weft_isa_table *isa;
    int pairs;            /* bfloat16 by bfloat16, natively: nothing is widened */
    void *packed;         /* panels of this token block, panel_bytes each */
    int64_t panel_bytes;
    float *worker;        /* per part: a widened block of w, then sums (ROW_BLOCK, panels * lanes) */
    int64_t worker_floats;
    int64_t first, tokens, panels; /* the token block */
    int64_t row_block;
    atomic_long next; /* block of rows that is taken next */
} product_job;

static void pack_panels(void *context, int part, int parts)
{
    product_job *job = context;
    const weft_linear_args *a = job->args;
    const int64_t lanes = job->isa->lanes;
    float wide[MAX_LANES * PACK_K];
    long begin, end;
    weft_pool_range(job->panels, 1, part, parts, &begin, &end);
    for (long panel = begin; panel < end; panel++) {
        int64_t token = panel * lanes, count = weft__min(lanes, job->tokens - token);
        float *to = (float *)((char *)job->packed + panel * job->panel_bytes);
        if (job->pairs) {
            job->isa->pack_pairs((uint16_t *)to, (const uint16_t *)a->x + (job->first + token) * a->x_stride, a->x_stride, count, a->k);
            continue;
        }
        for (int64_t k = 0; k < a->k; k += PACK_K) {
            int64_t n = weft__min(PACK_K, a->k - k);
            for (int64_t t = 0; t < count; t++)
                job->isa->widen(wide + t * PACK_K, weft__at(a->x, a->x_dtype, (job->first + token + t) * a->x_stride + k),
                                a->x_dtype, n);
            job->isa->pack(to + k * lanes, wide, PACK_K, count, n);
        }
    }
}

/* Columns [k, k + count) of one row of w in float32. */
static void widen_row(const weft_linear_args *a, const weft_isa_table *isa, int64_t row, int64_t k, int64_t count, float *to)
{
    isa->widen(to, weft__at(a->w, a->w_dtype, row * a->w_stride + k), a->w_dtype, count);
    if (a->w_dtype != WEFT_F8E4M3) return;
    const float *scale = a->scale + a->scale_row[row] * a->scale_stride;
    for (int64_t j = 0; j < count;) {
        int64_t column = (a->scale_col_phase + k + j) / 128;
        int64_t end = weft__min((column + 1) * 128 - a->scale_col_phase - k, count);
        isa->scale(to + j, scale[column], end - j);
        j = end;
    }
}

static void product_rows(product_job *job, int64_t row, int64_t rows, float *wide, float *sums)
{
    const weft_linear_args *a = job->args;
    const weft_isa_table *isa = job->isa;
    const int64_t lanes = isa->lanes, stride = job->panels * lanes;
    for (int64_t k = 0; k < a->k; k += K_BLOCK) {
        int64_t n = weft__min(K_BLOCK, a->k - k);
        for (int64_t i = 0; i < rows && !job->pairs; i++) widen_row(a, isa, row + i, k, n, wide + i * K_BLOCK);
        for (int64_t panel = 0; panel < job->panels; panel++) {
            const char *packed = (const char *)job->packed + panel * job->panel_bytes;
            if (job->pairs)
                isa->tile_pairs(n, (const uint16_t *)a->w + row * a->w_stride + k, a->w_stride, rows,
                                (const uint16_t *)packed + k * lanes, sums + panel * lanes, stride, k > 0);
            else isa->tile(n, wide, K_BLOCK, 1, rows, (const float *)packed + k * lanes, sums + panel * lanes, stride, k > 0);
        }
    }
    float lines[MAX_LANES * ROW_BLOCK];
    for (int64_t token = 0; token < job->tokens; token += lanes) {
        int64_t count = weft__min(lanes, job->tokens - token);
        isa->unpack(lines, ROW_BLOCK, sums + token, stride, rows, count);
        for (int64_t t = 0; t < count; t++) finish(a, isa, job->first + token + t, row, lines + t * ROW_BLOCK, rows);
    }
}

static void product_blocks(void *context, int part, int parts)
{
    product_job *job = context;
    float *wide = job->worker + part * job->worker_floats, *sums = wide + ROW_BLOCK * K_BLOCK;
    for (;;) {
        int64_t row = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed) * job->row_block;
        if (row >= job->args->n) return;
        product_rows(job, row, weft__min(job->row_block, job->args->n - row), wide, sums);
    }
}

static weft_status product(const weft_linear_args *a, const weft_isa_table *isa, weft_pool *pool)
{
    const int parts = weft_pool_threads(pool);
    const int64_t lanes = isa->lanes, most = weft__min(a->tokens, TOKEN_BLOCK), panels = (most + lanes - 1) / lanes;
    product_job job = {.args = a, .isa = isa, .worker_floats = ROW_BLOCK * (K_BLOCK + panels * lanes)};
    job.pairs = isa->tile_pairs != NULL && a->x_dtype == WEFT_BF16 && a->w_dtype == WEFT_BF16;
    if (a->k > INT32_MAX) return weft_fail(WEFT_INVALID, "linear: %" PRId64 " columns are too many", a->k);
    job.panel_bytes = lanes * (job.pairs ? (a->k + 1) / 2 * 4 : a->k * 4);
    void *scratch = NULL;
    WEFT_TRY(weft__scratch((size_t)(panels * job.panel_bytes + parts * job.worker_floats * 4), &scratch));
    job.packed = scratch;
    job.worker = (float *)((char *)scratch + panels * job.panel_bytes);
    /* At least four blocks for each thread, in whole tiles. */
    int64_t share = a->n / (4 * parts) / isa->tile_rows * isa->tile_rows;
    job.row_block = weft__min(ROW_BLOCK, weft__max(share, isa->tile_rows));
    for (job.first = 0; job.first < a->tokens; job.first += TOKEN_BLOCK) {
        job.tokens = weft__min(TOKEN_BLOCK, a->tokens - job.first);
        job.panels = (job.tokens + lanes - 1) / lanes;
        atomic_init(&job.next, 0);
        weft_pool_run(pool, pack_panels, &job);
        weft_pool_run(pool, product_blocks, &job);
    }
    return WEFT_OK;
}

/* ---- many tokens, by oneDNN ---- */

typedef struct {
    const weft_linear_args *args;
    const weft_isa_table *isa;
    float *sums;                     /* per part: (TOKEN_BLOCK, LIBRARY_ROWS) */
    int64_t rows_each, tokens_each;  /* of a block */
    atomic_long next;
    atomic_int refused;
} library_job;

static void library_blocks(void *context, int part, int parts)
{
    library_job *job = context;
    const weft_linear_args *a = job->args;
    const int64_t bands = (a->tokens + job->tokens_each - 1) / job->tokens_each;
    float *sums = job->sums + (int64_t)part * TOKEN_BLOCK * LIBRARY_ROWS;
    for (;;) {
        int64_t block = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        int64_t row = block / bands * job->rows_each, rows = weft__min(job->rows_each, a->n - row);
        int64_t token = block % bands * job->tokens_each, tokens = weft__min(job->tokens_each, a->tokens - token);
        if (row >= a->n || atomic_load_explicit(&job->refused, memory_order_relaxed)) return;
        if (!weft__onednn_product(weft__at(a->x, WEFT_BF16, token * a->x_stride), a->x_stride, tokens,
                                  weft__at(a->w, WEFT_BF16, row * a->w_stride), a->w_stride, rows, a->k, sums, LIBRARY_ROWS)) {
            atomic_store_explicit(&job->refused, 1, memory_order_relaxed);
            return;
        }
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t i = 0; i < rows; i += GEMV_ROWS)
                finish(a, job->isa, token + t, row + i, sums + t * LIBRARY_ROWS + i, weft__min(GEMV_ROWS, rows - i));
    }
}

/* Blocks as large as leave two for each thread. */
static void cut_library(library_job *job, int threads)
{
    const weft_linear_args *a = job->args;
    job->rows_each = LIBRARY_ROWS;
    job->tokens_each = TOKEN_BLOCK;
    for (;;) {
        int64_t tokens = weft__min(job->tokens_each, a->tokens);
        int64_t blocks = ((a->n + job->rows_each - 1) / job->rows_each) * ((a->tokens + tokens - 1) / tokens);
        if (blocks >= 2 * threads) return;
        if (job->rows_each > LIBRARY_LEAST && job->rows_each * 2 >= tokens) job->rows_each /= 2;
        else if (tokens > LIBRARY_LEAST) job->tokens_each = (tokens + 1) / 2;
        else if (job->rows_each > LIBRARY_LEAST) job->rows_each /= 2;
        else return;
    }
}

static weft_status library_product(const weft_linear_args *a, const weft_isa_table *isa, weft_pool *pool)
{
    void *scratch = NULL;
    WEFT_TRY(weft__scratch((size_t)weft_pool_threads(pool) * TOKEN_BLOCK * LIBRARY_ROWS * 4, &scratch));
    library_job job = {.args = a, .isa = isa, .sums = scratch};
    cut_library(&job, weft_pool_threads(pool));
    atomic_init(&job.next, 0);
    atomic_init(&job.refused, 0);
    weft_pool_run(pool, library_blocks, &job);
    if (atomic_load(&job.refused))
        return weft_fail(WEFT_INTERNAL, "linear: oneDNN refused a product of %" PRId64 " x %" PRId64 " x %" PRId64, a->tokens, a->n, a->k);
    return WEFT_OK;
}

static int library_takes(const weft_linear_args *a, const weft_isa_table *isa)
{
    return isa->tile_pairs != NULL && a->tokens >= LIBRARY_TOKENS && a->x_dtype == WEFT_BF16 && a->w_dtype == WEFT_BF16 &&
           weft__onednn_has_bf16();
}

weft_status weft_linear_cpu(const weft_linear_args *a, weft_pool *pool)
{
    WEFT_TRY(weft__check_linear(a));
    if (a->tokens == 0 || a->n == 0) return WEFT_OK;
    const weft_isa_table *isa = weft__isa();
    if (a->k > 0 && library_takes(a, isa)) return library_product(a, isa, pool);
    if (a->tokens > GEMV_TOKENS && a->k > 0) return product(a, isa, pool);
    weft_linear_args some = *a;
    for (int64_t t = 0; t < a->tokens; t += GEMV_TOKENS) {
        some.tokens = weft__min(GEMV_TOKENS, a->tokens - t);
        some.x = weft__at(a->x, a->x_dtype, t * a->x_stride);
        some.y = weft__at_mut(a->y, a->y_dtype, t * a->y_stride);
        WEFT_TRY(gemv(&some, isa, pool));
    }
    return WEFT_OK;
}
