/* plan/axis.c - axes and plans: checked once, then plain values. */
#include "plan/axis.h"

#include <inttypes.h>
#include <stdio.h>
#include <strings.h>

static const char *const group_names[WEFT_GROUP_TYPE_COUNT] = {
    [WEFT_GROUP_TENSOR] = "tensor",
    [WEFT_GROUP_ATTENTION_TENSOR] = "attention_tensor",
    [WEFT_GROUP_CONTEXT] = "context",
    [WEFT_GROUP_EXPERT] = "expert",
    [WEFT_GROUP_EXPERT_TENSOR] = "expert_tensor",
    [WEFT_GROUP_MLP_TENSOR] = "mlp_tensor",
    [WEFT_GROUP_PIPELINE] = "pipeline",
    [WEFT_GROUP_DATA] = "data",
    [WEFT_GROUP_PREFILL_CONTEXT] = "prefill_context",
};

static const char *const layer_names[WEFT_LAYER_TYPE_COUNT] = {
    [WEFT_LAYER_DEFAULT] = "default", [WEFT_LAYER_ATTENTION] = "attention", [WEFT_LAYER_MLP] = "mlp",
    [WEFT_LAYER_EXPERTS] = "experts", [WEFT_LAYER_EMBEDDING] = "embedding", [WEFT_LAYER_LM_HEAD] = "lm_head",
};

/* Upper case is accepted too: the seed writes its enums so. */
static int find_name(const char *const *names, int count, const char *name, int *out)
{
    for (int i = 0; i < count; i++) {
        if (strcasecmp(names[i], name) != 0) continue;
        *out = i;
        return 1;
    }
    return 0;
}

const char *weft_group_type_name(weft_group_type type)
{
    return (unsigned)type < WEFT_GROUP_TYPE_COUNT ? group_names[type] : "unknown";
}

int weft_group_type_from_name(const char *name, weft_group_type *out)
{
    int found;
    if (!find_name(group_names, WEFT_GROUP_TYPE_COUNT, name, &found)) return 0;
    *out = (weft_group_type)found;
    return 1;
}

const char *weft_layer_type_name(weft_layer_type type)
{
    return (unsigned)type < WEFT_LAYER_TYPE_COUNT ? layer_names[type] : "unknown";
}

int weft_layer_type_from_name(const char *name, weft_layer_type *out)
{
    int found;
    if (!find_name(layer_names, WEFT_LAYER_TYPE_COUNT, name, &found)) return 0;
    *out = (weft_layer_type)found;
    return 1;
}

weft_status weft_axis_make(weft_axis *out, int world_size, int rank, weft_group_type group)
{
    if (world_size < 1) return weft_fail(WEFT_INVALID, "world_size must be positive, got %d", world_size);
    if (rank < 0 || rank >= world_size)
        return weft_fail(WEFT_INVALID, "rank must be in [0, %d), got %d", world_size, rank);
    *out = (weft_axis){world_size, rank, group};
    return WEFT_OK;
}

int weft_axis_equal(weft_axis a, weft_axis b)
{
    return a.world_size == b.world_size && a.rank == b.rank && a.group == b.group;
}

weft_plan weft_plan_make(weft_axis input, weft_axis output)
{
    weft_plan plan = {.input = input,
                      .output = output,
                      .context = {1, 0, WEFT_GROUP_CONTEXT},
                      .expert = {1, 0, WEFT_GROUP_EXPERT},
                      .interleave = 1};
    if (input.group == WEFT_GROUP_ATTENTION_TENSOR && output.world_size % input.world_size == 0) {
        plan.context.world_size = output.world_size / input.world_size;
        plan.context.rank = output.rank % plan.context.world_size;
    }
    return plan;
}

int weft_plan_equal(const weft_plan *a, const weft_plan *b)
{
    return weft_axis_equal(a->input, b->input) && weft_axis_equal(a->output, b->output) &&
           weft_axis_equal(a->context, b->context) && weft_axis_equal(a->expert, b->expert) &&
           a->interleave == b->interleave && !a->exchange_a2a == !b->exchange_a2a;
}

int weft_plan_reshards_output(const weft_plan *plan)
{
    return !weft_axis_equal(plan->input, plan->output);
}

weft_status weft_plan_output_size(const weft_plan *plan, int64_t input_size, int64_t *out)
{
    int64_t global_size;
    if (input_size < 0 || __builtin_mul_overflow(input_size, (int64_t)plan->input.world_size, &global_size))
        return weft_fail(WEFT_INVALID, "input size must be from 0 to 2^63 over %d ranks, got %" PRId64,
                         plan->input.world_size, input_size);
    if (global_size % plan->output.world_size != 0)
        return weft_fail(WEFT_INVALID,
                         "Global input size must be divisible by the output parallel size: "
                         "global_size=%" PRId64 ", output_size=%d",
                         global_size, plan->output.world_size);
    *out = global_size / plan->output.world_size;
    return WEFT_OK;
}

weft_plan weft_plan_single_rank(void)
{
    weft_axis axis = {1, 0, WEFT_GROUP_TENSOR};
    return weft_plan_make(axis, axis);
}

const char *weft_axis_describe(weft_axis axis, char *text, size_t size)
{
    snprintf(text, size, "%s %d/%d", weft_group_type_name(axis.group), axis.rank, axis.world_size);
    return text;
}

const char *weft_plan_describe(const weft_plan *plan, char *text, size_t size)
{
    char in[48], out[48], context[96] = "", expert[48] = "";
    weft_axis_describe(plan->input, in, sizeof in);
    weft_axis_describe(plan->output, out, sizeof out);
    if (plan->context.world_size > 1)
        snprintf(context, sizeof context, ", context %d/%d by %d, %s", plan->context.rank, plan->context.world_size,
                 plan->interleave, plan->exchange_a2a ? "a2a" : "ag_rs");
    if (plan->expert.world_size > 1)
        snprintf(expert, sizeof expert, ", expert %d/%d", plan->expert.rank, plan->expert.world_size);
    snprintf(text, size, "%s -> %s%s%s", in, out, context, expert);
    return text;
}
