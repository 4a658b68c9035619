/* layers/qkv_linear.c - queries, keys and values under a plan. */
#include "layers/qkv_linear.h"

#include <stdlib.h>

static void destroy(weft_object *object)
{
    weft_qkv_linear *layer = (weft_qkv_linear *)object;
    weft_linear_weight_clear(&layer->weight);
    WEFT_RELEASE(layer->rank);
    free(layer);
}

static weft_status check_options(const weft_qkv_options *o, weft_plan *plan)
{
    const char *name = o->weight.name;
    if (o->hidden_size < 1 || o->head_size < 1 || o->v_head_size < 0 || o->total_num_heads < 1 || o->total_num_kv_heads < 0)
        return weft_fail(WEFT_INVALID, "%s: hidden_size, head_size and the numbers of heads must be positive", name);
    *plan = o->disable_tp ? weft_plan_single_rank() : o->plan;
    if (!o->disable_tp && plan->output.world_size != o->tensor_parallel_size)
        return weft_fail(WEFT_INVALID, "QKV output plan must match tensor parallelism: plan=%d, tp=%d", plan->output.world_size,
                         o->tensor_parallel_size);
    return WEFT_OK;
}

static weft_status add_heads(weft_qkv_linear *layer, const char *id, int64_t size, int total, int first, int count)
{
    return weft_linear_weight_add_part(&layer->weight, id, total * size, (weft_shard){first * size, count * size});
}

static weft_status build(weft_qkv_linear *layer, weft_rank *rank, const weft_qkv_options *o)
{
    layer->head_size = o->head_size;
    layer->v_head_size = o->v_head_size ? o->v_head_size : o->head_size;
    layer->total_num_heads = o->total_num_heads;
    layer->total_num_kv_heads = o->total_num_kv_heads ? o->total_num_kv_heads : o->total_num_heads;
    WEFT_TRY(weft_head_layout_make(&layer->layout, layer->total_num_heads, layer->total_num_kv_heads, &layer->plan));
    const weft_head_layout *h = &layer->layout;
    layer->q_size = (int64_t)h->num_heads * layer->head_size;
    layer->k_size = (int64_t)h->num_kv_heads * layer->head_size;
    layer->v_size = (int64_t)h->num_kv_heads * layer->v_head_size;
    WEFT_TRY(weft_linear_weight_init(&layer->weight, rank, &o->weight, o->hidden_size, (weft_shard){0, o->hidden_size}));
    WEFT_TRY(add_heads(layer, "q", layer->head_size, layer->total_num_heads, h->first_head, h->num_heads));
    WEFT_TRY(add_heads(layer, "k", layer->head_size, layer->total_num_kv_heads, h->first_kv_head, h->num_kv_heads));
    return add_heads(layer, "v", layer->v_head_size, layer->total_num_kv_heads, h->first_kv_head, h->num_kv_heads);
}

weft_status weft_qkv_linear_create(weft_qkv_linear **out, weft_rank *rank, const weft_qkv_options *options)
{
    weft_plan plan;
    WEFT_TRY(check_options(options, &plan));
    weft_qkv_linear *layer = calloc(1, sizeof *layer);
    if (layer == NULL) return weft_fail(WEFT_MEMORY, "no memory for a layer");
    weft_object_init(&layer->object, destroy);
    layer->rank = WEFT_RETAIN(rank);
    layer->plan = plan;
    weft_status status = build(layer, rank, options);
    if (status != WEFT_OK) {
        WEFT_RELEASE(layer);
        return weft_fail_while(status, "while making %s", options->weight.name);
    }
    *out = layer;
    return WEFT_OK;
}

weft_status weft_qkv_linear_forward(weft_qkv_linear *layer, const weft_tensor *x, weft_tensor **qkv)
{
    WEFT_TRY(weft_linear_weight_apply(&layer->weight, layer->rank, x, 1, x->dtype, NULL, qkv));
    weft_tensor_note_cut(*qkv, 1, weft_group_type_name(layer->plan.input.group), layer->plan.input.world_size);
    return WEFT_OK;
}

weft_status weft_qkv_linear_split(const weft_qkv_linear *layer, weft_tensor *qkv, weft_tensor **q, weft_tensor **k, weft_tensor **v)
{
    WEFT_TRY(weft_layer_check_rows(layer->weight.name, qkv, layer->weight.rows));
    const int64_t sizes[3] = {layer->q_size, layer->k_size, layer->v_size};
    weft_tensor *views[3] = {NULL, NULL, NULL};
    int64_t start = 0;
    for (int i = 0; i < 3; i++) {
        weft_status status = weft_tensor_narrow(&views[i], qkv, 1, start, sizes[i]);
        if (status != WEFT_OK) {
            for (int j = 0; j < i; j++) WEFT_RELEASE(views[j]);
            return status;
        }
        int parts = layer->plan.input.world_size / (i > 0 ? layer->layout.num_kv_head_replicas : 1);
        weft_tensor_note_cut(views[i], 1, weft_group_type_name(layer->plan.input.group), parts);
        start += sizes[i];
    }
    *q = views[0];
    *k = views[1];
    *v = views[2];
    return WEFT_OK;
}
