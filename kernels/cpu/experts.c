/* kernels/cpu/experts.c - the experts of a rank over their tokens.
 *
 * The (token, choice) pairs are sorted by expert and worked off in rounds of at most ROUND_PAIRS:
 *
 *     gather   x of each pair, float32                 per pair
 *     up       gate and up of each segment             per (segment, rows)   segment: pairs of one expert
 *     silu     silu(gate) * up                         per pair
 *     down     of each segment                         per (segment, rows)
 *     scatter  acc[token] += weight * down             per columns, in the order of pairs
 *
 * A segment of few tokens streams its weights past them, all segments in one go over the pool; one
 * of many takes the blocked product of linear.c. Sums of a token run over ascending experts. */
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/cpu.h"

enum {
    ROUND_PAIRS = 1024,
    STREAM_TOKENS = 16, /* up to here weights stream past a segment */
    ROW_BLOCK = 32,     /* rows of a matrix in one item of work */
    ALIGN = 64
};

typedef struct {
    int64_t expert, first, count; /* pairs [first, first + count) of the round */
} segment;

typedef struct {
    const weft_experts_args *args;
    const weft_isa_table *isa;
    int32_t *order;   /* pairs (token * top_k + choice) by expert */
    int64_t *starts;  /* (count + 1): where each expert's pairs begin in order */
    segment *segments;
    float *acc;       /* (tokens, hidden) */
    float *x, *both, *act, *out; /* of a round: (pairs, hidden), (pairs, 2 I), (pairs, I), (pairs, hidden) */
    int64_t first_pair, pairs, num_segments; /* this round */
    /* the product that runs now */
    const weft_expert_matrix *matrix;
    const float *in;
    float *to;
    int64_t rows, columns, blocks;
    atomic_long next;
} experts_job;

/* ---- memory ---- */

typedef struct {
    size_t order, starts, segments, acc, x, both, act, out, total;
} layout;

static int place(size_t *at, size_t *total, int64_t a, int64_t b, size_t size)
{
    size_t bytes = 0;
    *at = *total;
    if (!weft_mul_size((size_t)a, (size_t)b, &bytes) || !weft_mul_size(bytes, size, &bytes) || bytes > SIZE_MAX - ALIGN) return 0;
    return weft_add_size(*total, (bytes + ALIGN - 1) / ALIGN * ALIGN, total);
}

static weft_status lay_out(const weft_experts_args *a, layout *l)
{
    const int64_t sizes[] = {a->tokens, a->top_k, a->first, a->count, a->hidden, a->intermediate};
    WEFT_TRY(weft__check_sizes("experts", "tokens, top_k, first, count, hidden, intermediate", sizes, 6));
    int64_t pairs = 0;
    memset(l, 0, sizeof *l);
    int fits = weft_mul_i64(a->tokens, a->top_k, &pairs) && pairs <= INT32_MAX && a->intermediate <= INT64_MAX / 2;
    int64_t round = weft__min(pairs, ROUND_PAIRS);
    fits = fits && place(&l->order, &l->total, pairs, 2, sizeof(int32_t)) && /* CUDA: and its inverse */
           place(&l->starts, &l->total, a->count + 1, 1, sizeof(int64_t)) &&
           place(&l->segments, &l->total, round, 1, sizeof(segment)) && place(&l->acc, &l->total, a->tokens, a->hidden, 4) &&
           place(&l->x, &l->total, round, a->hidden, 4) && place(&l->both, &l->total, round, 2 * a->intermediate, 4) &&
           place(&l->act, &l->total, round, a->intermediate, 4) && place(&l->out, &l->total, round, a->hidden, 4);
    if (fits) return WEFT_OK;
    return weft_fail(WEFT_INVALID, "experts: %" PRId64 " tokens of %" PRId64 " experts each are too many", a->tokens, a->top_k);
}

/* What kernels/cuda/experts_tile.cu lays out for all pairs at once. */
static int tiles_bytes(const weft_experts_args *a, size_t *total)
{
    const int64_t pairs = a->tokens * a->top_k, up = (a->hidden + 254) / 128, down = (a->intermediate + 254) / 128;
    size_t at = 0;
    *total = 0;
    return place(&at, total, pairs, 4, 1) && place(&at, total, pairs, 4, 1) && place(&at, total, 1, 4, 1) &&
           place(&at, total, pairs / 32 + weft__min(pairs, a->count), 12, 1) && place(&at, total, a->tokens, up, 256) &&
           place(&at, total, a->tokens, up, 4) && place(&at, total, pairs, down, 256) && place(&at, total, pairs, down, 4) &&
           place(&at, total, pairs, a->intermediate, 4) && place(&at, total, pairs, a->hidden, 2);
}

weft_status weft_experts_workspace(const weft_experts_args *args, size_t *bytes)
{
    layout l;
    size_t tiles = 0;
    WEFT_TRY(lay_out(args, &l));
    if (args->cuda != NULL && !tiles_bytes(args, &tiles))
        return weft_fail(WEFT_INVALID, "experts: %" PRId64 " tokens of %" PRId64 " experts each are too many", args->tokens, args->top_k);
    *bytes = tiles > l.total ? tiles : l.total;
    return WEFT_OK;
}

/* ---- which tokens go where ---- */

static int is_here(const weft_experts_args *a, int32_t id)
{
    return id >= a->first && id < a->first + a->count;
}

/* A counting sort: order, starts. Pairs of one expert stay in the order of tokens. */
static void sort_pairs(experts_job *job)
{
    const weft_experts_args *a = job->args;
    const int64_t pairs = a->tokens * a->top_k;
    for (int64_t e = 0; e <= a->count; e++) job->starts[e] = 0;
    for (int64_t p = 0; p < pairs; p++)
        if (is_here(a, a->ids[p])) job->starts[a->ids[p] - a->first + 1]++;
    for (int64_t e = 0; e < a->count; e++) job->starts[e + 1] += job->starts[e];
    for (int64_t p = 0; p < pairs; p++)
        if (is_here(a, a->ids[p])) job->order[job->starts[a->ids[p] - a->first]++] = (int32_t)p;
    /* each start has moved to its expert's end */
    for (int64_t e = a->count; e > 0; e--) job->starts[e] = job->starts[e - 1];
    job->starts[0] = 0;
}

/* The segments of pairs [first_pair, first_pair + pairs), from expert `from` on; the expert to go on with. */
static int64_t cut_segments(experts_job *job, int64_t from)
{
    const int64_t end = job->first_pair + job->pairs;
    job->num_segments = 0;
    while (from < job->args->count) {
        int64_t first = weft__max(job->starts[from], job->first_pair), last = weft__min(job->starts[from + 1], end);
        if (last > first) job->segments[job->num_segments++] = (segment){from, first - job->first_pair, last - first};
        if (job->starts[from + 1] > end) break;
        from++;
    }
    return from;
}

/* ---- the steps of a round ---- */

static int64_t token_of(const experts_job *job, int64_t pair)
{
    return job->order[job->first_pair + pair] / job->args->top_k;
}

static void quantize(const experts_job *job, float *x, int64_t cols, int64_t phase)
{
    if (!job->args->quantize) return;
    weft_quantize_groups_args q = {.x = x, .y = x, .rows = 1, .cols = cols, .phase = phase, .dtype = WEFT_F32, .y_dtype = WEFT_F32};
    (void)weft_quantize_groups_cpu(&q, NULL); /* these arguments cannot be refused */
}

static void gather_pairs(void *context, int part, int parts)
{
    experts_job *job = context;
    const weft_experts_args *a = job->args;
    long begin, end;
    weft_pool_range(job->pairs, 1, part, parts, &begin, &end);
    for (long p = begin; p < end; p++) {
        float *x = job->x + p * a->hidden;
        job->isa->widen(x, weft__at(a->x, a->x_dtype, token_of(job, p) * a->x_stride), a->x_dtype, a->hidden);
        quantize(job, x, a->hidden, a->up.scale_col_phase % 128);
    }
}

static void activate_pairs(void *context, int part, int parts)
{
    experts_job *job = context;
    const weft_experts_args *a = job->args;
    const int64_t width = a->intermediate;
    long begin, end;
    weft_pool_range(job->pairs, 1, part, parts, &begin, &end);
    for (long p = begin; p < end; p++) {
        const float *both = job->both + p * 2 * width;
        job->isa->silu_mul(job->act + p * width, both, both + width, width);
        quantize(job, job->act + p * width, width, a->down.scale_col_phase % 128);
    }
}

static void scatter_columns(void *context, int part, int parts)
{
    experts_job *job = context;
    const weft_experts_args *a = job->args;
    long begin, end;
    weft_pool_range(a->hidden, 16, part, parts, &begin, &end);
    if (end == begin) return;
    for (int64_t p = 0; p < job->pairs; p++)
        job->isa->axpy(job->acc + token_of(job, p) * a->hidden + begin, job->out + p * a->hidden + begin,
                       a->weights[job->order[job->first_pair + p]], end - begin);
}

static void round_rows(void *context, int part, int parts)
{
    experts_job *job = context;
    const weft_experts_args *a = job->args;
    long begin, end;
    weft_pool_range(a->tokens, 1, part, parts, &begin, &end);
    for (long t = begin; t < end; t++)
        job->isa->narrow(weft__at_mut(a->y, a->y_dtype, t * a->y_stride), a->y_dtype, job->acc + t * a->hidden, a->hidden);
}

/* ---- products ---- */

static const float *scales_of(const weft_expert_matrix *m, int64_t expert)
{
    return m->scale != NULL ? m->scale + expert * m->scale_rows * m->scale_stride : NULL;
}

/* Items of work: (segment, block of rows), taken in order. Segments of many tokens are left out. */
static void stream_blocks(void *context, int part, int parts)
{
    (void)part;
    (void)parts;
    experts_job *job = context;
    const weft_experts_args *a = job->args;
    const weft_expert_matrix *m = job->matrix;
    for (;;) {
        int64_t item = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (item >= job->num_segments * job->blocks) return;
        const segment *s = &job->segments[item / job->blocks];
        if (s->count > STREAM_TOKENS) continue;
        int64_t row = item % job->blocks * ROW_BLOCK;
        weft_isa_gemv_args g = {
            .w = weft__at(m->w, a->w_dtype, (s->expert * job->rows + row) * job->columns),
            .x = job->in + s->first * job->columns,
            .out = job->to + s->first * job->rows + row,
            .scale = scales_of(m, s->expert),
            .scale_row = m->scale_row != NULL ? m->scale_row + row : NULL,
            .rows = weft__min(ROW_BLOCK, job->rows - row),
            .tokens = s->count,
            .k = job->columns,
            .w_stride = job->columns,
            .x_stride = job->columns,
            .out_stride = job->rows,
            .scale_stride = m->scale_stride,
            .scale_phase = m->scale_col_phase,
            .w_dtype = a->w_dtype,
        };
        job->isa->gemv(&g);
    }
}

/* to[p] = in[p] w^T for all segments of the round. */
static weft_status multiply(experts_job *job, const weft_expert_matrix *m, int64_t rows, int64_t columns, const float *in, float *to,
                            weft_pool *pool)
{
    const weft_experts_args *a = job->args;
    job->matrix = m;
    job->in = in;
    job->to = to;
    job->rows = rows;
    job->columns = columns;
    job->blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    atomic_init(&job->next, 0);
    weft_pool_run(job->pairs * rows * columns < 16384 ? NULL : pool, stream_blocks, job);
    for (int64_t i = 0; i < job->num_segments; i++) {
        const segment *s = &job->segments[i];
        if (s->count <= STREAM_TOKENS) continue;
        weft_linear_args args = {
            .x = in + s->first * columns,
            .w = weft__at(m->w, a->w_dtype, s->expert * rows * columns),
            .y = to + s->first * rows,
            .scale = scales_of(m, s->expert),
            .scale_row = m->scale_row,
            .tokens = s->count,
            .n = rows,
            .k = columns,
            .x_stride = columns,
            .w_stride = columns,
            .y_stride = rows,
            .scale_stride = m->scale_stride,
            .scale_col_phase = m->scale_col_phase,
            .x_dtype = WEFT_F32,
            .w_dtype = a->w_dtype,
            .y_dtype = WEFT_F32,
        };
        WEFT_TRY(weft_linear_cpu(&args, pool));
    }
    return WEFT_OK;
}

static weft_status run_round(experts_job *job, weft_pool *pool)
{
    const weft_experts_args *a = job->args;
    weft_pool *used = job->pairs * a->hidden < 16384 ? NULL : pool;
    weft_pool_run(used, gather_pairs, job);
    WEFT_TRY(multiply(job, &a->up, 2 * a->intermediate, a->hidden, job->x, job->both, pool));
    weft_pool_run(used, activate_pairs, job);
    WEFT_TRY(multiply(job, &a->down, a->hidden, a->intermediate, job->act, job->out, pool));
    weft_pool_run(used, scatter_columns, job);
    return WEFT_OK;
}

weft_status weft_experts_cpu(const weft_experts_args *a, weft_pool *pool)
{
    layout l;
    WEFT_TRY(lay_out(a, &l));
    WEFT_TRY(weft__check_float("experts", "x", a->x_dtype));
    WEFT_TRY(weft__check_float("experts", "y", a->y_dtype));
    if (a->w_dtype != WEFT_F8E4M3) WEFT_TRY(weft__check_float("experts", "weights", a->w_dtype));
    WEFT_TRY(weft__check_expert_matrix(&a->up, "gate and up", a->hidden, a->w_dtype));
    WEFT_TRY(weft__check_expert_matrix(&a->down, "down", a->intermediate, a->w_dtype));
    if (a->tokens == 0 || a->hidden == 0) return WEFT_OK;
    char *base = a->workspace;
    experts_job job = {
        .args = a,
        .isa = weft__isa(),
        .order = (int32_t *)(base + l.order),
        .starts = (int64_t *)(base + l.starts),
        .segments = (segment *)(base + l.segments),
        .acc = (float *)(base + l.acc),
        .x = (float *)(base + l.x),
        .both = (float *)(base + l.both),
        .act = (float *)(base + l.act),
        .out = (float *)(base + l.out),
    };
    memset(job.acc, 0, (size_t)a->tokens * (size_t)a->hidden * sizeof(float));
    sort_pairs(&job);
    const int64_t pairs = job.starts[a->count];
    int64_t expert = 0;
    for (job.first_pair = 0; job.first_pair < pairs; job.first_pair += ROUND_PAIRS) {
        job.pairs = weft__min(ROUND_PAIRS, pairs - job.first_pair);
        expert = cut_segments(&job, expert);
        WEFT_TRY(run_round(&job, pool));
    }
    weft_pool_run(a->tokens * a->hidden < 16384 ? NULL : pool, round_rows, &job);
    return WEFT_OK;
}
