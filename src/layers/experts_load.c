/* layers/experts_load.c - reads this rank's experts, and of each its share of the width. */
#include "layers/experts.h"

#include <inttypes.h>
#include <stdio.h>

#include "layers/run.h"

/* The first bit of each kind in weft_experts.state; parts follow. */
enum { LOADED = 0, AWAITS = WEFT_EXPERT_PARTS, SCALED = 2 * WEFT_EXPERT_PARTS };

static const char *const part_names[WEFT_EXPERT_PARTS] = {"gate", "up", "down"};

/* Where a part lies: the box of one expert's matrix in the checkpoint, and its first row here. */
typedef struct {
    weft_experts_matrix *matrix;
    int64_t shape[2];          /* of one expert in the checkpoint */
    int64_t start[2], count[2]; /* this rank's box */
    int64_t row;               /* first row in the local matrix */
    int64_t rows, columns;     /* of the local matrix */
    int64_t scale_row;         /* first row of scales */
    int64_t scale_rows, scale_columns;
} place;

static int64_t blocks(int64_t total)
{
    return (total + WEFT_SCALE_BLOCK - 1) / WEFT_SCALE_BLOCK;
}

/* Blocks that [first, first + count) lies in. */
static int64_t blocks_of(int64_t first, int64_t count)
{
    return count == 0 ? 0 : (first + count - 1) / WEFT_SCALE_BLOCK - first / WEFT_SCALE_BLOCK + 1;
}

static place find(weft_experts *l, weft_expert_part part, int fused)
{
    const int64_t width = l->intermediate_size, hidden = l->hidden_size, share = l->width.count, room = blocks(share) + 1;
    if (part == WEFT_EXPERT_DOWN)
        return (place){.matrix = &l->down, .shape = {hidden, width}, .start = {0, l->width.offset}, .count = {hidden, share},
                       .rows = hidden, .columns = share, .scale_rows = blocks(hidden),
                       .scale_columns = blocks_of(l->width.offset, share)};
    int second = part == WEFT_EXPERT_UP;
    return (place){.matrix = &l->up, .shape = {fused ? 2 * width : width, hidden},
                   .start = {l->width.offset + (fused && second ? width : 0), 0}, .count = {share, hidden},
                   .row = second ? share : 0, .rows = 2 * share, .columns = hidden, .scale_row = second ? room : 0,
                   .scale_rows = 2 * room, .scale_columns = blocks(hidden)};
}

static int is_float(weft_dtype dtype)
{
    return dtype == WEFT_F32 || dtype == WEFT_BF16 || dtype == WEFT_F16;
}

static weft_status ensure_weights(weft_experts *l, const place *p, const weft_source *source)
{
    weft_dtype dtype = source->dtype;
    if (!is_float(dtype) && dtype != WEFT_F8E4M3)
        return weft_fail(WEFT_FORMAT, "tensor '%s': weights of %s cannot be %s", source->name, l->name, weft_dtype_name(dtype));
    if (dtype == WEFT_F8E4M3 ? l->dequantize : l->convert) dtype = l->convert ? l->dtype : WEFT_F32;
    weft_dtype other = l->up.w != NULL ? l->up.w->dtype : l->down.w != NULL ? l->down.w->dtype : dtype;
    if (other != dtype)
        return weft_fail(WEFT_FORMAT, "tensor '%s': wanted %s like the other weights of %s, found %s", source->name,
                         weft_dtype_name(other), l->name, weft_dtype_name(dtype));
    if (p->matrix->w != NULL) return WEFT_OK;
    return weft_tensor_create(&p->matrix->w, l->rank->device_memory, dtype, 3, (int64_t[]){l->experts.count, p->rows, p->columns});
}

static weft_status ensure_scales(weft_experts *l, const place *p)
{
    weft_experts_matrix *m = p->matrix;
    if (m->scale == NULL)
        WEFT_TRY(weft_tensor_create(&m->scale, l->rank->device_memory, WEFT_F32, 3,
                                    (int64_t[]){l->experts.count, p->scale_rows, p->scale_columns}));
    if (m->scale_row == NULL) WEFT_TRY(weft_tensor_create(&m->scale_row, l->rank->device_memory, WEFT_I32, 1, &p->rows));
    return WEFT_OK;
}

/* A box of one expert: of its own tensor, or of the tensor of all. */
static weft_status read_box(weft_rank *rank, const weft_source *source, int fused, int64_t expert, const int64_t *start,
                            const int64_t *count, weft_tensor *to, int64_t offset)
{
    const int64_t starts[3] = {expert, start[0], start[1]}, counts[3] = {1, count[0], count[1]};
    return weft_run_load(rank, source, starts + !fused, counts + !fused, to, offset);
}

static weft_status read_weights(weft_experts *l, weft_expert_part part, int64_t here, int fused, const weft_source *source)
{
    place p = find(l, part, fused);
    WEFT_TRY(read_box(l->rank, source, fused, l->experts.offset + here, p.start, p.count, p.matrix->w,
                      (here * p.rows + p.row) * p.columns));
    l->state[here] |= (uint16_t)(1u << (LOADED + part));
    if (source->dtype == WEFT_F8E4M3) l->state[here] |= (uint16_t)(1u << (AWAITS + part));
    return WEFT_OK;
}

/* The row of scales of local row i of a part. */
static int64_t scale_row_of(const place *p, int64_t i)
{
    return p->scale_row + (p->start[0] + i) / WEFT_SCALE_BLOCK - p->start[0] / WEFT_SCALE_BLOCK;
}

/* Multiplies the weights of a part, already widened, by their scales: on the host. */
static weft_status apply_scales(const place *p, int64_t here)
{
    weft_tensor *expert = NULL, *part = NULL, *rows = NULL, *scales = NULL, *scale = NULL;
    weft_status status = weft_tensor_select(&expert, p->matrix->w, 0, here);
    if (status == WEFT_OK) status = weft_tensor_narrow(&part, expert, 0, p->row, p->count[0]);
    if (status == WEFT_OK) status = weft_tensor_to_host(&rows, part);
    if (status == WEFT_OK) status = weft_tensor_select(&scales, p->matrix->scale, 0, here);
    if (status == WEFT_OK) status = weft_tensor_to_host(&scale, scales);
    for (int64_t i = 0; status == WEFT_OK && i < p->count[0]; i++)
        weft_scale_row((char *)rows->data + (size_t)(i * p->columns) * weft_dtype_size(rows->dtype), rows->dtype, p->columns,
                       (const float *)scale->data + scale_row_of(p, i) * p->scale_columns, p->start[1]);
    if (status == WEFT_OK && rows->storage != part->storage) status = weft_tensor_copy(part, rows);
    WEFT_RELEASE(scale);
    WEFT_RELEASE(scales);
    WEFT_RELEASE(rows);
    WEFT_RELEASE(part);
    WEFT_RELEASE(expert);
    return status;
}

/* Which scales each row of a part has, the same for all experts. */
static weft_status fill_scale_rows(weft_rank *rank, const place *p)
{
    weft_tensor *rows = NULL, *view = NULL;
    WEFT_TRY(weft_tensor_create(&rows, rank->memory, WEFT_I32, 1, &p->count[0]));
    for (int64_t i = 0; i < p->count[0]; i++) ((int32_t *)rows->data)[i] = (int32_t)scale_row_of(p, i);
    weft_status status = weft_tensor_narrow(&view, p->matrix->scale_row, 0, p->row, p->count[0]);
    if (status == WEFT_OK) status = weft_tensor_copy(view, rows);
    WEFT_RELEASE(view);
    WEFT_RELEASE(rows);
    return status;
}

static weft_status read_scales(weft_experts *l, weft_expert_part part, int64_t here, int fused, const weft_source *source)
{
    place p = find(l, part, fused);
    weft_experts_matrix *m = p.matrix;
    const int64_t first = p.start[0] / WEFT_SCALE_BLOCK;
    const int64_t start[2] = {first, p.start[1] / WEFT_SCALE_BLOCK};
    const int64_t count[2] = {blocks_of(p.start[0], p.count[0]), p.scale_columns};
    WEFT_TRY(read_box(l->rank, source, fused, l->experts.offset + here, start, count, m->scale,
                      (here * p.scale_rows + p.scale_row) * p.scale_columns));
    if (here == 0) WEFT_TRY(fill_scale_rows(l->rank, &p));
    l->state[here] |= (uint16_t)(1u << (SCALED + part));
    return m->w->dtype != WEFT_F8E4M3 ? apply_scales(&p, here) : WEFT_OK;
}

/* ---- one expert ---- */

/* The local index of a global expert. */
static weft_status find_expert(const weft_experts *l, int64_t expert, int64_t *here)
{
    *here = expert - l->experts.offset;
    if (expert >= 0 && *here >= 0 && *here < l->experts.count) return WEFT_OK;
    return weft_fail(WEFT_INVALID, "%s: this rank holds experts %" PRId64 " to %" PRId64 ", not %" PRId64, l->name, l->experts.offset,
                     l->experts.offset + l->experts.count - 1, expert);
}

static weft_status check_loaded(const weft_experts *l, weft_expert_part part, int64_t here, const weft_source *source)
{
    unsigned state = l->state[here];
    if (!(state >> (LOADED + part) & 1))
        return weft_fail(WEFT_INVALID, "%s: load the weights before their scales '%s'", l->name, source->name);
    if (l->dequantize && state >> (SCALED + part) & 1)
        return weft_fail(WEFT_INVALID, "%s: the scales '%s' were multiplied in before", l->name, source->name);
    return WEFT_OK;
}

static weft_status check_style(weft_experts *l, int fused, const weft_source *source)
{
    if (l->fused_scales >= 0 && l->fused_scales != fused)
        return weft_fail(WEFT_FORMAT, "tensor '%s': %s has scales of all experts in one tensor and scales of single experts", source->name, l->name);
    l->fused_scales = fused;
    return WEFT_OK;
}

weft_status weft_experts_load(weft_experts *l, weft_expert_part part, int64_t expert, const weft_source *source)
{
    int64_t here;
    WEFT_TRY(find_expert(l, expert, &here));
    place p = find(l, part, 0);
    WEFT_TRY(weft_source_expect(source, 2, p.shape));
    WEFT_TRY(ensure_weights(l, &p, source));
    return read_weights(l, part, here, 0, source);
}

weft_status weft_experts_load_scale(weft_experts *l, weft_expert_part part, int64_t expert, const weft_source *source)
{
    int64_t here;
    WEFT_TRY(find_expert(l, expert, &here));
    place p = find(l, part, 0);
    WEFT_TRY(weft_source_expect(source, 2, (int64_t[]){blocks(p.shape[0]), blocks(p.shape[1])}));
    WEFT_TRY(weft_source_expect_floats(source));
    WEFT_TRY(check_loaded(l, part, here, source));
    WEFT_TRY(check_style(l, 0, source));
    WEFT_TRY(ensure_scales(l, &p));
    return read_scales(l, part, here, 0, source);
}

/* ---- all experts ---- */

static weft_status check_fused(const weft_experts *l, weft_expert_part part)
{
    if (part != WEFT_EXPERT_GATE) return WEFT_OK;
    return weft_fail(WEFT_INVALID, "%s: all experts in one tensor are gate_up or down", l->name);
}

weft_status weft_experts_load_fused(weft_experts *l, weft_expert_part part, const weft_source *source)
{
    WEFT_TRY(check_fused(l, part));
    place p = find(l, part, 1);
    WEFT_TRY(weft_source_expect(source, 3, (int64_t[]){l->num_experts, p.shape[0], p.shape[1]}));
    WEFT_TRY(ensure_weights(l, &p, source));
    for (int64_t here = 0; here < l->experts.count; here++) {
        if (part == WEFT_EXPERT_UP) WEFT_TRY(read_weights(l, WEFT_EXPERT_GATE, here, 1, source));
        WEFT_TRY(read_weights(l, part, here, 1, source));
    }
    return WEFT_OK;
}

weft_status weft_experts_load_scale_fused(weft_experts *l, weft_expert_part part, const weft_source *source)
{
    WEFT_TRY(check_fused(l, part));
    place p = find(l, part, 1);
    WEFT_TRY(weft_source_expect(source, 3, (int64_t[]){l->num_experts, blocks(p.shape[0]), blocks(p.shape[1])}));
    WEFT_TRY(weft_source_expect_floats(source));
    for (int64_t here = 0; here < l->experts.count; here++) WEFT_TRY(check_loaded(l, part, here, source));
    WEFT_TRY(check_style(l, 1, source));
    WEFT_TRY(ensure_scales(l, &p));
    for (int64_t here = 0; here < l->experts.count; here++) {
        if (part == WEFT_EXPERT_UP) WEFT_TRY(read_scales(l, WEFT_EXPERT_GATE, here, 1, source));
        WEFT_TRY(read_scales(l, part, here, 1, source));
    }
    return WEFT_OK;
}

static const char *list_parts(unsigned mask, char *text, size_t size)
{
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < WEFT_EXPERT_PARTS && used < size; i++)
        if (mask >> i & 1) used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", part_names[i]);
    return text;
}

weft_status weft_experts_check_ready(weft_experts *l)
{
    const unsigned all = (1u << WEFT_EXPERT_PARTS) - 1;
    char missing[64];
    if (l->ready) return WEFT_OK;
    for (int64_t here = 0; here < l->experts.count; here++) {
        unsigned state = l->state[here], loaded = state >> LOADED & all, bare = (state >> AWAITS & all) & ~(state >> SCALED);
        if (loaded != all)
            return weft_fail(WEFT_INVALID, "weights of expert %" PRId64 " of %s were not loaded (missing: %s)", l->experts.offset + here,
                             l->name, list_parts(~loaded & all, missing, sizeof missing));
        if (bare != 0)
            return weft_fail(WEFT_INVALID, "the fp8 scales of expert %" PRId64 " of %s were not loaded (missing: %s)",
                             l->experts.offset + here, l->name, list_parts(bare, missing, sizeof missing));
    }
    l->ready = 1;
    return WEFT_OK;
}
