/* layers/linear_weight.c - loading and applying the rows and columns that this rank holds. */
#include "layers/linear_weight.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "device/arena.h"
#include "layers/run.h"

weft_status weft_linear_weight_init(weft_linear_weight *w, weft_rank *rank, const weft_weight_options *options,
                                    int64_t total_columns, weft_shard columns)
{
    memset(w, 0, sizeof *w);
    w->name = strdup(options->name);
    if (w->name == NULL) return weft_fail(WEFT_MEMORY, "no memory for a layer");
    w->rank = rank;
    w->memory = WEFT_RETAIN(rank->device_memory);
    w->total_columns = total_columns;
    w->columns = columns;
    w->has_bias = options->bias;
    w->holds_bias = options->bias;
    w->convert = options->convert;
    w->dtype = options->dtype;
    w->dequantize = options->dequantize;
    w->quantize_activations = options->quantize_activations;
    return WEFT_OK;
}

void weft_linear_weight_clear(weft_linear_weight *w)
{
    WEFT_RELEASE(w->weight);
    WEFT_RELEASE(w->bias);
    WEFT_RELEASE(w->scale);
    WEFT_RELEASE(w->scale_row);
    WEFT_RELEASE(w->memory);
    free(w->name);
    w->name = NULL;
}

/* Blocks of scales that a run of rows or columns can touch, wherever it begins. */
static int64_t blocks_touched(int64_t count)
{
    return (count + WEFT_SCALE_BLOCK - 1) / WEFT_SCALE_BLOCK + 1;
}

static int64_t blocks(int64_t total)
{
    return (total + WEFT_SCALE_BLOCK - 1) / WEFT_SCALE_BLOCK;
}

weft_status weft_linear_weight_add_part(weft_linear_weight *w, const char *id, int64_t total, weft_shard rows)
{
    if (w->num_parts == WEFT_WEIGHT_MAX_PARTS)
        return weft_fail(WEFT_INVALID, "%s: at most %d parts", w->name, WEFT_WEIGHT_MAX_PARTS);
    weft_weight_part *part = &w->parts[w->num_parts];
    snprintf(part->id, sizeof part->id, "%s", id);
    part->total = total;
    part->global_row = w->total_rows;
    part->rows = rows;
    part->row = w->rows;
    part->scale_row = 0;
    for (int i = 0; i < w->num_parts; i++) part->scale_row += blocks_touched(w->parts[i].rows.count);
    if (!weft_add_i64(w->total_rows, total, &w->total_rows))
        return weft_fail(WEFT_INVALID, "%s: more rows than can be counted", w->name);
    w->rows += rows.count;
    w->num_parts++;
    return WEFT_OK;
}

/* "q, k, v" of the parts whose bit is set. */
static const char *list_parts(const weft_linear_weight *w, unsigned mask, char *text, size_t size)
{
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < w->num_parts && used < size; i++)
        if (mask >> i & 1) used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", w->parts[i].id);
    return text;
}

weft_status weft_linear_weight_find(const weft_linear_weight *w, const char *id, int *part)
{
    if (id == NULL) {
        *part = -1;
        return WEFT_OK;
    }
    for (int i = 0; i < w->num_parts; i++) {
        if (strcmp(w->parts[i].id, id) == 0) {
            *part = i;
            return WEFT_OK;
        }
    }
    char known[128];
    return weft_fail(WEFT_INVALID, "%s: unknown shard id '%s' (known: %s)", w->name, id,
                     list_parts(w, ~0u, known, sizeof known));
}

static weft_status check_part(const weft_linear_weight *w, int part)
{
    if (part < -1 || part >= w->num_parts)
        return weft_fail(WEFT_INVALID, "%s: part %d of %d", w->name, part, w->num_parts);
    return WEFT_OK;
}

static int is_float(weft_dtype dtype)
{
    return dtype == WEFT_F32 || dtype == WEFT_BF16 || dtype == WEFT_F16;
}

/* The tensor that holds `source`'s kind of values, made at the first load. */
static weft_status ensure(const weft_linear_weight *w, const weft_source *source, weft_tensor **tensor, int ndim,
                          const int64_t *shape)
{
    weft_dtype dtype = source->dtype;
    if (!is_float(dtype) && dtype != WEFT_F8E4M3)
        return weft_fail(WEFT_FORMAT, "tensor '%s': weights of %s cannot be %s", source->name, w->name, weft_dtype_name(dtype));
    if (dtype == WEFT_F8E4M3 ? w->dequantize : w->convert) dtype = w->convert ? w->dtype : WEFT_F32;
    if (*tensor == NULL) return weft_tensor_create(tensor, w->memory, dtype, ndim, shape);
    if ((*tensor)->dtype != dtype)
        return weft_fail(WEFT_FORMAT, "tensor '%s': wanted %s like the other parts of %s, found %s", source->name,
                         weft_dtype_name((*tensor)->dtype), w->name, weft_dtype_name(dtype));
    return WEFT_OK;
}

weft_status weft_linear_weight_load(weft_linear_weight *w, int part, const weft_source *source)
{
    WEFT_TRY(check_part(w, part));
    int64_t total = part < 0 ? w->total_rows : w->parts[part].total;
    WEFT_TRY(weft_source_expect(source, 2, (int64_t[]){total, w->total_columns}));
    WEFT_TRY(ensure(w, source, &w->weight, 2, (int64_t[]){w->rows, w->columns.count}));
    for (int i = 0; i < w->num_parts; i++) {
        if (part >= 0 && i != part) continue;
        const weft_weight_part *p = &w->parts[i];
        int64_t first = (part < 0 ? p->global_row : 0) + p->rows.offset;
        WEFT_TRY(weft_run_load(w->rank, source, (int64_t[]){first, w->columns.offset}, (int64_t[]){p->rows.count, w->columns.count},
                               w->weight, p->row * w->columns.count));
        w->loaded |= 1u << i;
        if (source->dtype == WEFT_F8E4M3) w->awaits_scale |= 1u << i;
    }
    return WEFT_OK;
}

weft_status weft_linear_weight_load_bias(weft_linear_weight *w, int part, const weft_source *source)
{
    WEFT_TRY(check_part(w, part));
    if (!w->has_bias) return weft_fail(WEFT_INVALID, "%s was made without a bias, got '%s'", w->name, source->name);
    int64_t total = part < 0 ? w->total_rows : w->parts[part].total;
    WEFT_TRY(weft_source_expect(source, 1, &total));
    if (w->holds_bias) WEFT_TRY(ensure(w, source, &w->bias, 1, &w->rows));
    for (int i = 0; i < w->num_parts; i++) {
        if (part >= 0 && i != part) continue;
        const weft_weight_part *p = &w->parts[i];
        int64_t first = (part < 0 ? p->global_row : 0) + p->rows.offset;
        if (w->holds_bias) WEFT_TRY(weft_run_load(w->rank, source, &first, &p->rows.count, w->bias, p->row));
        w->bias_loaded |= 1u << i;
    }
    return WEFT_OK;
}

static int64_t scale_columns(const weft_linear_weight *w)
{
    if (w->columns.count == 0) return 0;
    return (w->columns.offset + w->columns.count - 1) / WEFT_SCALE_BLOCK - w->columns.offset / WEFT_SCALE_BLOCK + 1;
}

static weft_status make_scales(weft_linear_weight *w)
{
    const weft_weight_part *last = &w->parts[w->num_parts - 1];
    int64_t shape[2] = {last->scale_row + blocks_touched(last->rows.count), scale_columns(w)};
    if (w->scale == NULL) WEFT_TRY(weft_tensor_create(&w->scale, w->memory, WEFT_F32, 2, shape));
    if (w->scale_row == NULL) WEFT_TRY(weft_tensor_create(&w->scale_row, w->memory, WEFT_I32, 1, &w->rows));
    return WEFT_OK;
}

void weft_scale_row(void *row, weft_dtype dtype, int64_t count, const float *scale, int64_t first_column)
{
    float values[WEFT_SCALE_BLOCK];
    const int64_t phase = first_column % WEFT_SCALE_BLOCK;
    for (int64_t j = 0, n; j < count; j += n) {
        int64_t left = WEFT_SCALE_BLOCK - (phase + j) % WEFT_SCALE_BLOCK;
        n = left < count - j ? left : count - j;
        char *at = (char *)row + (size_t)j * weft_dtype_size(dtype);
        weft_convert(values, WEFT_F32, at, dtype, n);
        for (int64_t i = 0; i < n; i++) values[i] *= scale[(phase + j) / WEFT_SCALE_BLOCK];
        weft_convert(at, dtype, values, WEFT_F32, n);
    }
}

/* Weights that were widened when they came: multiplied by the scales of their part, on the host. */
static weft_status apply_scales(weft_linear_weight *w, const weft_weight_part *p, int64_t first)
{
    weft_tensor *view = NULL, *rows = NULL, *scale = NULL;
    int64_t columns = w->columns.count, first_block = first / WEFT_SCALE_BLOCK;
    weft_status status = weft_tensor_narrow(&view, w->weight, 0, p->row, p->rows.count);
    if (status == WEFT_OK) status = weft_tensor_to_host(&rows, view);
    if (status == WEFT_OK) status = weft_tensor_to_host(&scale, w->scale);
    for (int64_t r = 0; status == WEFT_OK && r < p->rows.count; r++) {
        int64_t row = p->scale_row + (first + r) / WEFT_SCALE_BLOCK - first_block;
        weft_scale_row((char *)rows->data + (size_t)(r * columns) * weft_dtype_size(rows->dtype), rows->dtype, columns,
                       (const float *)scale->data + row * scale->shape[1], w->columns.offset);
    }
    if (status == WEFT_OK && rows->storage != view->storage) status = weft_tensor_copy(view, rows);
    WEFT_RELEASE(scale);
    WEFT_RELEASE(rows);
    WEFT_RELEASE(view);
    return status;
}

/* Each local row of a part, whose first one is row `first` of the whole: the row of its scales. */
static weft_status fill_scale_rows(weft_linear_weight *w, const weft_weight_part *p, int64_t first)
{
    weft_tensor *rows = NULL, *view = NULL;
    WEFT_TRY(weft_tensor_create(&rows, w->rank->memory, WEFT_I32, 1, &p->rows.count));
    int64_t first_block = first / WEFT_SCALE_BLOCK;
    for (int64_t r = 0; r < p->rows.count; r++)
        ((int32_t *)rows->data)[r] = (int32_t)(p->scale_row + (first + r) / WEFT_SCALE_BLOCK - first_block);
    weft_status status = weft_tensor_narrow(&view, w->scale_row, 0, p->row, p->rows.count);
    if (status == WEFT_OK) status = weft_tensor_copy(view, rows);
    WEFT_RELEASE(view);
    WEFT_RELEASE(rows);
    return status;
}

weft_status weft_linear_weight_load_scale(weft_linear_weight *w, int part, const weft_source *source)
{
    WEFT_TRY(check_part(w, part));
    unsigned asked = part < 0 ? (1u << w->num_parts) - 1 : 1u << part;
    if (w->dequantize && (w->awaits_scale & asked) != asked)
        return weft_fail(WEFT_INVALID, "%s: load the weights before their scales '%s'", w->name, source->name);
    if (w->dequantize && (w->scale_loaded & asked) != 0)
        return weft_fail(WEFT_INVALID, "%s: the scales '%s' were multiplied in before", w->name, source->name);
    int64_t total = part < 0 ? w->total_rows : w->parts[part].total;
    WEFT_TRY(weft_source_expect(source, 2, (int64_t[]){blocks(total), blocks(w->total_columns)}));
    WEFT_TRY(weft_source_expect_floats(source));
    WEFT_TRY(make_scales(w));
    int64_t columns = scale_columns(w), first_column = w->columns.offset / WEFT_SCALE_BLOCK;
    for (int i = 0; i < w->num_parts; i++) {
        if (part >= 0 && i != part) continue;
        const weft_weight_part *p = &w->parts[i];
        w->scale_loaded |= 1u << i;
        if (p->rows.count == 0) continue;
        int64_t first = (part < 0 ? p->global_row : 0) + p->rows.offset, first_block = first / WEFT_SCALE_BLOCK;
        int64_t count = (first + p->rows.count - 1) / WEFT_SCALE_BLOCK - first_block + 1;
        weft_status status = weft_run_load(w->rank, source, (int64_t[]){first_block, first_column}, (int64_t[]){count, columns},
                                           w->scale, p->scale_row * columns);
        if (status == WEFT_OK) status = fill_scale_rows(w, p, first);
        if (status == WEFT_OK && w->dequantize) status = apply_scales(w, p, first);
        if (status != WEFT_OK) {
            w->scale_loaded &= ~(1u << i);
            return status;
        }
    }
    return WEFT_OK;
}

weft_status weft_linear_weight_ready(const weft_linear_weight *w)
{
    unsigned all = (1u << w->num_parts) - 1;
    char missing[128];
    if (w->loaded != all)
        return weft_fail(WEFT_INVALID, "weights of %s were not loaded (missing: %s)", w->name,
                         list_parts(w, ~w->loaded, missing, sizeof missing));
    if (w->has_bias && w->bias_loaded != all)
        return weft_fail(WEFT_INVALID, "the bias of %s was not loaded (missing: %s)", w->name,
                         list_parts(w, ~w->bias_loaded, missing, sizeof missing));
    if ((w->awaits_scale & ~w->scale_loaded) != 0)
        return weft_fail(WEFT_INVALID, "the fp8 scales of %s were not loaded (missing: %s)", w->name,
                         list_parts(w, w->awaits_scale & ~w->scale_loaded, missing, sizeof missing));
    return WEFT_OK;
}

static int64_t tensor_bytes(const weft_tensor *tensor)
{
    return tensor == NULL ? 0 : weft_tensor_numel(tensor) * (int64_t)weft_dtype_size(tensor->dtype);
}

int64_t weft_linear_weight_bytes(const weft_linear_weight *w)
{
    return tensor_bytes(w->weight) + tensor_bytes(w->bias) + tensor_bytes(w->scale) + tensor_bytes(w->scale_row);
}

weft_status weft_layer_check_rows(const char *name, const weft_tensor *x, int64_t columns)
{
    WEFT_TRY(weft_tensor_check(x));
    char found[160];
    if (x->ndim != 2 || x->shape[1] != columns || !is_float(x->dtype))
        return weft_fail(WEFT_INVALID, "%s: wanted floats [tokens, %lld], found %s", name, (long long)columns,
                         weft_tensor_describe(x, found, sizeof found));
    if (x->stride[1] != 1 && columns > 1) return weft_fail(WEFT_INVALID, "%s: the rows of x are not dense", name);
    return WEFT_OK;
}

/* x as its fp8 values, groups of 128 columns of the whole matrix; float32, which holds them exactly. */
static weft_status quantize(const weft_linear_weight *w, weft_rank *rank, const weft_tensor *x, weft_tensor **out)
{
    weft_tensor *rounded = NULL;
    WEFT_TRY(weft_arena_tensor(rank->arena, &rounded, WEFT_F32, 2, x->shape));
    weft_quantize_groups_args args = {
        .x = x->data,
        .y = rounded->data,
        .rows = x->shape[0],
        .cols = x->shape[1],
        .x_stride = x->stride[0],
        .y_stride = rounded->stride[0],
        .phase = w->columns.offset % WEFT_SCALE_BLOCK,
        .dtype = x->dtype,
        .y_dtype = WEFT_F32,
    };
    weft_status status = WEFT_RUN(rank, quantize_groups, &args);
    if (status != WEFT_OK) WEFT_RELEASE(rounded);
    else *out = rounded;
    return status;
}

/* *summed: whether the result is that of the whole group already. group may be NULL. */
static weft_status apply_into(const weft_linear_weight *w, weft_rank *rank, const weft_tensor *x, int add_bias, weft_group *group,
                              weft_tensor *out, int *summed)
{
    WEFT_TRY(weft_layer_check_rows(w->name, x, w->columns.count));
    WEFT_TRY(weft_linear_weight_ready(w));
    if (w->rows == 0) return WEFT_OK;
    int with_bias = add_bias && w->bias != NULL, scaled = w->weight->dtype == WEFT_F8E4M3;
    weft_tensor *rounded = NULL;
    if (scaled && w->quantize_activations) WEFT_TRY(quantize(w, rank, x, &rounded));
    if (rounded != NULL) x = rounded;
    weft_linear_args args = {
        .x = x->data,
        .w = w->weight->data,
        .bias = with_bias ? w->bias->data : NULL,
        .y = out->data,
        .scale = scaled ? w->scale->data : NULL,
        .scale_row = scaled ? w->scale_row->data : NULL,
        .tokens = x->shape[0],
        .n = w->rows,
        .k = w->columns.count,
        .x_stride = x->stride[0],
        .w_stride = w->columns.count,
        .y_stride = out->stride[0],
        .scale_stride = scaled ? w->scale->shape[1] : 0,
        .scale_col_phase = w->columns.offset % WEFT_SCALE_BLOCK,
        .x_dtype = x->dtype,
        .w_dtype = w->weight->dtype,
        .bias_dtype = with_bias ? w->bias->dtype : WEFT_F32,
        .y_dtype = out->dtype,
        .cuda = weft_run_context(rank),
    };
    weft_status status = WEFT_OK;
    if (group != NULL && rank->cuda != NULL) status = weft_group_linear_over(group, &args, summed);
    if (status == WEFT_OK && !*summed) status = WEFT_RUN(rank, linear, &args);
    WEFT_RELEASE(rounded);
    return status == WEFT_OK ? WEFT_OK : weft_fail_while(status, "while computing %s", w->name);
}

weft_status weft_linear_weight_apply_into(const weft_linear_weight *w, weft_rank *rank, const weft_tensor *x, int add_bias,
                                          weft_tensor *out)
{
    int summed = 0;
    return apply_into(w, rank, x, add_bias, NULL, out, &summed);
}

weft_status weft_linear_weight_apply(const weft_linear_weight *w, weft_rank *rank, const weft_tensor *x, int add_bias,
                                     weft_dtype y_dtype, weft_group *group, weft_tensor **y)
{
    WEFT_TRY(weft_layer_check_rows(w->name, x, w->columns.count));
    weft_tensor *out = NULL;
    WEFT_TRY(weft_arena_tensor(rank->arena, &out, y_dtype, 2, (int64_t[]){x->shape[0], w->rows}));
    int summed = 0;
    weft_status status = apply_into(w, rank, x, add_bias, group, out, &summed);
    if (status == WEFT_OK && group != NULL && !summed)
        status = weft_group_all_reduce(group, out->data, out->data, weft_tensor_numel(out), out->dtype, WEFT_REDUCE_SUM);
    if (status != WEFT_OK) {
        WEFT_RELEASE(out);
        return status;
    }
    *y = out;
    return WEFT_OK;
}
