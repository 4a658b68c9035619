/* layers/encoder_attention.c */
#include "layers/encoder_attention.h"

#include <stdlib.h>

#include "layers/attention_parts.h"
#include "layers/run.h"

struct weft_encoder_attention {
    weft_object object;
    weft_rank *rank;
    weft_encoder_attention_options options;
    weft__attention_shape shape;
};

weft_status weft_encoder_attention_supports(const weft_plan *plan)
{
    char text[160];
    if (plan->input.world_size == plan->output.world_size && plan->context.world_size == 1) return WEFT_OK;
    return weft_fail(WEFT_UNSUPPORTED, "cpu encoder does not support layer parallel plan %s",
                     weft_plan_describe(plan, text, sizeof text));
}

static void destroy(weft_object *object)
{
    weft_encoder_attention *attention = (weft_encoder_attention *)object;
    weft_object_release(&attention->rank->object);
    free(attention);
}

weft_status weft_encoder_attention_create(weft_encoder_attention **out, weft_rank *rank, const weft_encoder_attention_options *options)
{
    WEFT_TRY(weft_encoder_attention_supports(&options->plan));
    weft__attention_shape shape = {options->num_heads,   options->num_kv_heads,   options->head_size,
                                   options->v_head_size, options->sliding_window, options->scale};
    WEFT_TRY(weft__attention_shape_check(&shape, "encoder_attention"));
    weft_encoder_attention *attention = calloc(1, sizeof *attention);
    if (attention == NULL) return weft_fail(WEFT_MEMORY, "no memory for an attention layer");
    weft_object_init(&attention->object, destroy);
    attention->rank = WEFT_RETAIN(rank);
    attention->options = *options;
    attention->shape = shape;
    *out = attention;
    return WEFT_OK;
}

weft_object *weft_encoder_attention_object(weft_encoder_attention *attention)
{
    return &attention->object;
}

const weft_encoder_attention_options *weft_encoder_attention_get_options(const weft_encoder_attention *attention)
{
    return &attention->options;
}

weft_status weft_encoder_attention_forward(weft_encoder_attention *attention, const weft_tensor *q, const weft_tensor *k,
                                           const weft_tensor *v, const weft_step *step, weft_tensor **out)
{
    const weft__attention_shape *shape = &attention->shape;
    WEFT_TRY(weft__attention_inputs_check(shape, q, k, v, step));
    if (step->header->max_context_len > 0)
        return weft_fail(WEFT_INVALID, "encoder attention sees only the step's own tokens, and a request has %d before them",
                         step->header->max_context_len);
    weft_tensor *result;
    int64_t sizes[2] = {step->header->num_tokens, (int64_t)shape->num_heads * shape->v_head_size};
    WEFT_TRY(weft_arena_tensor(attention->rank->arena, &result, q->dtype, 2, sizes));
    weft_attention_args args = weft__attention_args_new(attention->rank, shape, q, k, v, step);
    args.causal = 0;
    args.out = result->data;
    weft_status status = WEFT_RUN(attention->rank, attention, &args);
    if (status != WEFT_OK) {
        WEFT_RELEASE(result);
        return status;
    }
    *out = result;
    return WEFT_OK;
}
