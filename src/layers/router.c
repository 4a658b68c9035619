/* layers/router.c - the gate of a mixture of experts. */
#include "layers/router.h"

#include <inttypes.h>
#include <stdlib.h>

#include "layers/run.h"

static void destroy(weft_object *object)
{
    weft_router *router = (weft_router *)object;
    weft_linear_weight_clear(&router->weight);
    WEFT_RELEASE(router->bias);
    WEFT_RELEASE(router->rank);
    free(router);
}

weft_status weft_router_create(weft_router **out, weft_rank *rank, const weft_router_options *o)
{
    if (o->num_experts < 1 || o->hidden_size < 1) return weft_fail(WEFT_INVALID, "%s: sizes must be positive", o->name);
    if (o->top_k < 1) return weft_fail(WEFT_INVALID, "%s: num_experts_per_tok must be positive, got %d", o->name, o->top_k);
    if (o->top_k > o->num_experts)
        return weft_fail(WEFT_INVALID, "%s: num_experts_per_tok (%d) exceeds num_experts (%" PRId64 ")", o->name, o->top_k, o->num_experts);
    weft_router *router = calloc(1, sizeof *router);
    if (router == NULL) return weft_fail(WEFT_MEMORY, "no memory for a layer");
    weft_object_init(&router->object, destroy);
    router->rank = WEFT_RETAIN(rank);
    router->top_k = o->top_k;
    router->renormalize = o->renormalize;
    router->scoring = o->scoring;
    router->has_bias = o->bias;
    weft_weight_options weight = {.name = o->name, .convert = 1, .dtype = WEFT_F32, .dequantize = 1};
    weft_status status = weft_linear_weight_init(&router->weight, rank, &weight, o->hidden_size, (weft_shard){0, o->hidden_size});
    if (status == WEFT_OK) status = weft_linear_weight_add_part(&router->weight, "0", o->num_experts, (weft_shard){0, o->num_experts});
    if (status != WEFT_OK) {
        WEFT_RELEASE(router);
        return status;
    }
    *out = router;
    return WEFT_OK;
}

weft_status weft_router_load_gate(weft_linear_weight *gate, int part, const weft_source *source)
{
    WEFT_TRY(weft_source_expect_finite(source));
    return weft_linear_weight_load(gate, part, source);
}

weft_status weft_router_load_bias(weft_router *router, const weft_source *source)
{
    const char *name = router->weight.name;
    if (!router->has_bias) return weft_fail(WEFT_INVALID, "%s was made without a bias, got '%s'", name, source->name);
    const int64_t count = router->weight.total_rows, first = 0;
    WEFT_TRY(weft_source_expect(source, 1, &count));
    WEFT_TRY(weft_source_expect_finite(source));
    if (router->bias == NULL) WEFT_TRY(weft_tensor_create(&router->bias, router->rank->device_memory, WEFT_F32, 1, &count));
    return weft_run_load(router->rank, source, &first, &count, router->bias, 0);
}

static weft_status choose(weft_router *router, const weft_tensor *logits, weft_tensor *ids, weft_tensor *weights)
{
    weft_router_args args = {
        .logits = logits->data,
        .bias = router->bias != NULL ? router->bias->data : NULL,
        .ids = ids->data,
        .weights = weights->data,
        .tokens = logits->shape[0],
        .experts = logits->shape[1],
        .logits_stride = logits->stride[0],
        .top_k = router->top_k,
        .scoring = router->scoring,
        .renormalize = router->renormalize,
    };
    return WEFT_RUN(router->rank, router, &args);
}

weft_status weft_router_forward(weft_router *router, const weft_tensor *x, weft_tensor **ids, weft_tensor **weights)
{
    if (router->has_bias && router->bias == NULL)
        return weft_fail(WEFT_INVALID, "the bias of %s was not loaded", router->weight.name);
    weft_arena *arena = router->rank->arena;
    weft_tensor *logits = NULL, *chosen = NULL, *share = NULL;
    const int64_t shape[] = {x->ndim > 0 ? x->shape[0] : 0, router->top_k};
    weft_status status = weft_linear_weight_apply(&router->weight, router->rank, x, 0, WEFT_F32, NULL, &logits);
    if (status == WEFT_OK) status = weft_arena_tensor(arena, &chosen, WEFT_I32, 2, shape);
    if (status == WEFT_OK) status = weft_arena_tensor(arena, &share, WEFT_F32, 2, shape);
    if (status == WEFT_OK) status = choose(router, logits, chosen, share);
    WEFT_RELEASE(logits);
    if (status != WEFT_OK) {
        WEFT_RELEASE(chosen);
        WEFT_RELEASE(share);
        return status;
    }
    *ids = chosen;
    *weights = share;
    return WEFT_OK;
}
