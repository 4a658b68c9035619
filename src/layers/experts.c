/* layers/experts.c - making and running the experts of a rank; experts_load.c fills them. */
#include "layers/experts.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "layers/linear.h"
#include "layers/run.h"

static void release_matrix(weft_experts_matrix *m)
{
    WEFT_RELEASE(m->w);
    WEFT_RELEASE(m->scale);
    WEFT_RELEASE(m->scale_row);
}

static void destroy(weft_object *object)
{
    weft_experts *l = (weft_experts *)object;
    release_matrix(&l->up);
    release_matrix(&l->down);
    if (l->group != NULL) weft_group_release(l->group);
    WEFT_RELEASE(l->rank);
    free(l->state);
    free(l->name);
    free(l);
}

static weft_status build(weft_experts *l, const weft_experts_options *o)
{
    if (o->num_experts < 1 || o->hidden_size < 1 || o->intermediate_size < 1)
        return weft_fail(WEFT_INVALID, "sizes must be positive");
    if (o->weight.bias) return weft_fail(WEFT_INVALID, "experts have no bias");
    WEFT_TRY(weft_shard_even(&l->experts, "experts", o->num_experts, o->plan.expert));
    WEFT_TRY(weft_shard_even(&l->width, "columns of each expert", o->intermediate_size, o->plan.input));
    l->name = strdup(o->weight.name);
    l->state = calloc((size_t)l->experts.count, sizeof *l->state);
    if (l->name == NULL || l->state == NULL) return weft_fail(WEFT_MEMORY, "no memory for a layer");
    return weft_layer_group(l->rank, o->plan.output, o->weight.name, &l->group);
}

weft_status weft_experts_create(weft_experts **out, weft_rank *rank, const weft_experts_options *o)
{
    weft_experts *l = calloc(1, sizeof *l);
    if (l == NULL) return weft_fail(WEFT_MEMORY, "no memory for a layer");
    weft_object_init(&l->object, destroy);
    l->rank = WEFT_RETAIN(rank);
    l->plan = o->plan;
    l->num_experts = o->num_experts;
    l->hidden_size = o->hidden_size;
    l->intermediate_size = o->intermediate_size;
    l->convert = o->weight.convert;
    l->dtype = o->weight.dtype;
    l->dequantize = o->weight.dequantize;
    l->quantize = o->weight.quantize_activations;
    l->fused_scales = -1;
    weft_status status = build(l, o);
    if (status != WEFT_OK) {
        WEFT_RELEASE(l);
        return weft_fail_while(status, "while making %s", o->weight.name);
    }
    *out = l;
    return WEFT_OK;
}

static int64_t tensor_bytes(const weft_tensor *tensor)
{
    return tensor == NULL ? 0 : weft_tensor_numel(tensor) * (int64_t)weft_dtype_size(tensor->dtype);
}

int64_t weft_experts_bytes(const weft_experts *l)
{
    return tensor_bytes(l->up.w) + tensor_bytes(l->up.scale) + tensor_bytes(l->down.w) + tensor_bytes(l->down.scale) +
           tensor_bytes(l->up.scale_row) + tensor_bytes(l->down.scale_row);
}

/* ids or weights: (tokens, k), dense. */
static weft_status check_choice(const weft_experts *l, const weft_tensor *t, const char *what, weft_dtype dtype, int64_t tokens)
{
    WEFT_TRY(weft_tensor_check(t));
    char found[160];
    if (t->ndim == 2 && t->shape[0] == tokens && t->dtype == dtype && weft_tensor_is_contiguous(t)) return WEFT_OK;
    return weft_fail(WEFT_INVALID, "%s: wanted %s as dense %s [%" PRId64 ", k], found %s", l->name, what, weft_dtype_name(dtype), tokens,
                     weft_tensor_describe(t, found, sizeof found));
}

static weft_expert_matrix kernel_matrix(const weft_experts_matrix *m, int64_t phase)
{
    weft_expert_matrix k = {.w = m->w->data};
    if (m->w->dtype != WEFT_F8E4M3) return k;
    k.scale = m->scale->data;
    k.scale_row = m->scale_row->data;
    k.scale_rows = m->scale->shape[1];
    k.scale_stride = m->scale->shape[2];
    k.scale_col_phase = phase;
    return k;
}

static weft_status run(const weft_experts *l, const weft_tensor *x, const weft_tensor *ids, const weft_tensor *weights, weft_tensor *y)
{
    weft_experts_args args = {
        .x = x->data,
        .ids = ids->data,
        .weights = weights->data,
        .up = kernel_matrix(&l->up, 0),
        .down = kernel_matrix(&l->down, l->width.offset % WEFT_SCALE_BLOCK),
        .y = y->data,
        .tokens = x->shape[0],
        .top_k = ids->shape[1],
        .first = l->experts.offset,
        .count = l->experts.count,
        .hidden = l->hidden_size,
        .intermediate = l->width.count,
        .x_stride = x->stride[0],
        .y_stride = y->stride[0],
        .x_dtype = x->dtype,
        .w_dtype = l->up.w->dtype,
        .y_dtype = y->dtype,
        .quantize = l->quantize && l->up.w->dtype == WEFT_F8E4M3,
        .cuda = weft_run_context(l->rank),
    };
    size_t bytes = 0;
    WEFT_TRY(weft_experts_workspace(&args, &bytes));
    WEFT_TRY(weft_arena_scratch(l->rank->arena, bytes, &args.workspace));
    WEFT_TRY(WEFT_RUN(l->rank, experts, &args));
    if (l->group == NULL) return WEFT_OK;
    return weft_group_all_reduce(l->group, y->data, y->data, weft_tensor_numel(y), y->dtype, WEFT_REDUCE_SUM);
}

weft_status weft_experts_forward(weft_experts *l, const weft_tensor *x, const weft_tensor *ids, const weft_tensor *weights,
                                 weft_tensor **y)
{
    WEFT_TRY(weft_layer_check_rows(l->name, x, l->hidden_size));
    WEFT_TRY(check_choice(l, ids, "ids", WEFT_I32, x->shape[0]));
    WEFT_TRY(check_choice(l, weights, "weights", WEFT_F32, x->shape[0]));
    if (ids->shape[1] != weights->shape[1])
        return weft_fail(WEFT_INVALID, "%s: %" PRId64 " ids and %" PRId64 " weights for a token", l->name, ids->shape[1], weights->shape[1]);
    WEFT_TRY(weft_experts_check_ready(l));
    weft_tensor *out = NULL;
    WEFT_TRY(weft_arena_tensor(l->rank->arena, &out, x->dtype, 2, (int64_t[]){x->shape[0], l->hidden_size}));
    weft_status status = run(l, x, ids, weights, out);
    if (status != WEFT_OK) {
        WEFT_RELEASE(out);
        return weft_fail_while(status, "while computing %s", l->name);
    }
    *y = out;
    return WEFT_OK;
}
