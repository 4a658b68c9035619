/* layers/minimax_rms_norm.c - RMSNorm whose statistics span the plan's input group. */
#include "layers/minimax_rms_norm.h"

#include <stdlib.h>
#include <string.h>

#include "layers/linear.h"
#include "layers/rms_norm.h"
#include "layers/run.h"

static void destroy(weft_object *object)
{
    weft_minimax_rms_norm *norm = (weft_minimax_rms_norm *)object;
    WEFT_RELEASE(norm->gain);
    if (norm->group != NULL) weft_group_release(norm->group);
    WEFT_RELEASE(norm->rank);
    free(norm->name);
    free(norm);
}

static weft_status build(weft_minimax_rms_norm *norm, weft_rank *rank, const weft_minimax_rms_norm_options *o)
{
    weft_axis shard = o->plan.input;
    if (o->weight_shard_world_size > 0)
        WEFT_TRY(weft_axis_make(&shard, o->weight_shard_world_size, o->weight_shard_rank, o->plan.input.group));
    if (o->plan.input.world_size % shard.world_size != 0)
        return weft_fail(WEFT_INVALID, "%d shards of the gain on %d ranks: each must be held equally often", shard.world_size,
                         o->plan.input.world_size);
    weft_shard mine;
    WEFT_TRY(weft_shard_even(&mine, "elements of the gain", o->hidden_size, shard));
    norm->offset = mine.offset;
    norm->size = mine.count;
    return weft_layer_group(rank, o->plan.input, o->name, &norm->group);
}

weft_status weft_minimax_rms_norm_create(weft_minimax_rms_norm **out, weft_rank *rank, const weft_minimax_rms_norm_options *options)
{
    if (options->hidden_size < 1) return weft_fail(WEFT_INVALID, "%s: hidden_size must be positive", options->name);
    if (!(options->eps >= 0 && options->eps < 1))
        return weft_fail(WEFT_INVALID, "%s: wanted 0 <= eps < 1, found %g", options->name, options->eps);
    weft_minimax_rms_norm *norm = calloc(1, sizeof *norm);
    if (norm == NULL) return weft_fail(WEFT_MEMORY, "no memory for a layer");
    weft_object_init(&norm->object, destroy);
    norm->rank = WEFT_RETAIN(rank);
    norm->plan = options->plan;
    norm->total_size = options->hidden_size;
    norm->eps = (float)options->eps;
    norm->convert = options->convert;
    norm->dtype = options->dtype;
    norm->name = strdup(options->name);
    weft_status status = norm->name != NULL ? build(norm, rank, options) : weft_fail(WEFT_MEMORY, "no memory for a layer");
    if (status != WEFT_OK) {
        WEFT_RELEASE(norm);
        return weft_fail_while(status, "while making %s", options->name);
    }
    *out = norm;
    return WEFT_OK;
}

weft_status weft_minimax_rms_norm_load(weft_minimax_rms_norm *norm, const weft_source *source)
{
    return weft_norm_load_gain(&norm->gain, norm->rank, source, norm->total_size, norm->offset, norm->size, norm->convert,
                               norm->dtype);
}

/* One norm's share of a step: x is `size` columns of a row, from `column` on. */
typedef struct {
    weft_minimax_rms_norm *norm;
    int64_t column;
    weft_tensor *y;
} part;

static weft_group_norm_args arguments(const part *p, const weft_tensor *x, float *var, int parts, int index)
{
    return (weft_group_norm_args){
        .x = (const char *)x->data + (size_t)p->column * weft_dtype_size(x->dtype),
        .var = var != NULL ? var + index : NULL,
        .gain = p->norm->gain->data,
        .y = p->y->data,
        .rows = x->shape[0],
        .cols = p->norm->size,
        .x_stride = x->stride[0],
        .y_stride = p->norm->size,
        .var_stride = parts,
        .world = p->norm->plan.input.world_size,
        .eps = p->norm->eps,
        .dtype = x->dtype,
        .gain_dtype = p->norm->gain->dtype,
    };
}

static weft_status run(part *parts, int count, const weft_tensor *x)
{
    weft_minimax_rms_norm *first = parts[0].norm;
    weft_rank *rank = first->rank;
    int64_t tokens = x->shape[0];
    void *scratch = NULL;
    if (first->group != NULL && rank->cuda != NULL && tokens > 0) {
        weft_group_norm_args all[2];
        int done = 0;
        for (int i = 0; i < count; i++) all[i] = arguments(&parts[i], x, NULL, count, 0);
        WEFT_TRY(weft_group_norm_over(first->group, all, count, &done));
        if (done) return WEFT_OK;
    }
    WEFT_TRY(weft_arena_scratch(rank->arena, (size_t)tokens * (size_t)count * sizeof(float), &scratch));
    float *var = scratch;
    for (int i = 0; i < count; i++) {
        weft_group_norm_args args = arguments(&parts[i], x, var, count, i);
        WEFT_TRY(WEFT_RUN(rank, group_norm_sums, &args));
    }
    if (first->group != NULL && tokens > 0)
        WEFT_TRY(weft_group_all_reduce(first->group, var, var, tokens * count, WEFT_F32, WEFT_REDUCE_SUM));
    for (int i = 0; i < count; i++) {
        weft_group_norm_args args = arguments(&parts[i], x, var, count, i);
        WEFT_TRY(WEFT_RUN(rank, group_norm_apply, &args));
    }
    return WEFT_OK;
}

static weft_status forward(part *parts, int count, const weft_tensor *x)
{
    weft_status status = WEFT_OK;
    for (int i = 0; i < count && status == WEFT_OK; i++) {
        const weft_minimax_rms_norm *norm = parts[i].norm;
        if (norm->gain == NULL) status = weft_fail(WEFT_INVALID, "weights of %s were not loaded", norm->name);
        else status = weft_arena_tensor(norm->rank->arena, &parts[i].y, x->dtype, 2, (int64_t[]){x->shape[0], norm->size});
    }
    if (status == WEFT_OK) status = run(parts, count, x);
    if (status != WEFT_OK)
        for (int i = 0; i < count; i++) WEFT_RELEASE(parts[i].y);
    return status;
}

weft_status weft_minimax_rms_norm_forward(weft_minimax_rms_norm *norm, const weft_tensor *x, weft_tensor **y)
{
    WEFT_TRY(weft_layer_check_rows(norm->name, x, norm->size));
    part only = {norm, 0, NULL};
    WEFT_TRY(forward(&only, 1, x));
    *y = only.y;
    return WEFT_OK;
}

weft_status weft_minimax_rms_norm_forward_qk(weft_minimax_rms_norm *q_norm, weft_minimax_rms_norm *k_norm, const weft_tensor *qkv,
                                             weft_tensor **q, weft_tensor **k)
{
    if (q_norm->eps != k_norm->eps)
        return weft_fail(WEFT_INVALID, "%s and %s must have one eps, found %g and %g", q_norm->name, k_norm->name, q_norm->eps,
                         k_norm->eps);
    if (!weft_axis_equal(q_norm->plan.input, k_norm->plan.input))
        return weft_fail(WEFT_INVALID, "%s and %s must have one input axis", q_norm->name, k_norm->name);
    int64_t width = q_norm->size + k_norm->size;
    WEFT_TRY(weft_layer_check_rows(q_norm->name, qkv, qkv->ndim == 2 && qkv->shape[1] > width ? qkv->shape[1] : width));
    part both[2] = {{q_norm, 0, NULL}, {k_norm, q_norm->size, NULL}};
    WEFT_TRY(forward(both, 2, qkv));
    *q = both[0].y;
    *k = both[1].y;
    return WEFT_OK;
}
