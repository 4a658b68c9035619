/* plan/policy.c - from sizes to plans and groups. */
#include "plan/policy.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void destroy(weft_object *object)
{
    free(object);
}

/* ---- making ---- */

static int compare_entries(const void *left, const void *right)
{
    const weft_policy_entry *a = left, *b = right;
    if (a->first_layer != b->first_layer) return a->first_layer < b->first_layer ? -1 : 1;
    if (a->last_layer != b->last_layer) return a->last_layer < b->last_layer ? -1 : 1;
    return (int)a->type - (int)b->type;
}

/* Ranges may be equal (other layer types of the same layers), else they must not meet. */
static weft_status check_overlap(const weft_policy *policy)
{
    for (int i = 1; i < policy->num_entries; i++) {
        const weft_policy_entry *a = &policy->entries[i - 1], *b = &policy->entries[i];
        if (a->first_layer < 0) continue;
        int same = a->first_layer == b->first_layer && a->last_layer == b->last_layer && a->type != b->type;
        if (!same && b->first_layer <= a->last_layer)
            return weft_fail(WEFT_INVALID, "layers: %d-%d and %d-%d overlap", a->first_layer, a->last_layer, b->first_layer,
                             b->last_layer);
    }
    return WEFT_OK;
}

static weft_status complete_attention(const weft_policy *p, weft_layer_sizes *s)
{
    if (s->tensor == 0) s->tensor = p->tensor;
    if (s->interleave == 0) s->interleave = p->interleave;
    WEFT_TRY(weft_rule_attention_tensor(p->tensor, s->tensor, 1));
    WEFT_TRY(weft_rule_context(p->tensor, s->tensor, 1, &s->context));
    WEFT_TRY(weft_rule_interleave(p->block_size, s->interleave));
    if (s->exchange_a2a >= 0) return weft_rule_exchange(s->context, s->exchange_a2a);
    s->exchange_a2a = p->exchange_a2a && s->context > 1;
    return WEFT_OK;
}

static weft_status complete_experts(const weft_policy *p, weft_layer_sizes *s)
{
    if (s->expert == 0 && s->tensor > 0 && p->tensor % s->tensor == 0) s->expert = p->tensor / s->tensor;
    if (s->expert == 0) s->expert = 1;
    WEFT_TRY(weft_rule_experts(p->tensor, s->expert));
    if (s->tensor == 0) s->tensor = p->tensor / s->expert;
    if ((int64_t)s->tensor * s->expert != p->tensor)
        return weft_fail(WEFT_INVALID, "experts: expert (%d) * tensor (%d) must equal the tensor size of the policy (%d)",
                         s->expert, s->tensor, p->tensor);
    return WEFT_OK;
}

static weft_status complete_sizes(const weft_policy *p, weft_policy_entry *e)
{
    weft_layer_sizes *s = &e->sizes;
    switch (e->type) {
    case WEFT_LAYER_ATTENTION: return complete_attention(p, s);
    case WEFT_LAYER_EXPERTS: return complete_experts(p, s);
    case WEFT_LAYER_MLP:
        if (s->tensor == 0) s->tensor = p->tensor;
        return weft_rule_mlp(p->tensor, s->tensor);
    case WEFT_LAYER_EMBEDDING:
    case WEFT_LAYER_LM_HEAD:
        if (s->tensor == 0) s->tensor = p->tensor;
        if (s->tensor == p->tensor) return WEFT_OK;
        return weft_fail(WEFT_INVALID, "%s follows the tensor size of the policy (%d), got %d", weft_layer_type_name(e->type),
                         p->tensor, s->tensor);
    default: return weft_fail(WEFT_INVALID, "a policy has no sizes for layer type %s", weft_layer_type_name(e->type));
    }
}

static weft_status while_in(weft_status status, const weft_policy_entry *e)
{
    if (status == WEFT_OK || e->first_layer < 0) return status;
    if (e->first_layer == e->last_layer) return weft_fail_while(status, "checking layer %d", e->first_layer);
    return weft_fail_while(status, "checking layers %d-%d", e->first_layer, e->last_layer);
}

/* The exchange is asked for, but no layer has anything to exchange. */
static weft_status check_exchange(const weft_policy *p)
{
    int used = !p->exchange_a2a;
    for (int i = 0; i < p->num_entries && !used; i++) used = p->entries[i].sizes.context > 1;
    return weft_rule_exchange(used ? 2 : 1, p->exchange_a2a);
}

static weft_status fill(weft_policy *policy)
{
    WEFT_TRY(weft_rule_positive("tensor", policy->tensor));
    if (policy->tensor > 1 << 16) return weft_fail(WEFT_INVALID, "tensor must be at most %d, got %d", 1 << 16, policy->tensor);
    WEFT_TRY(weft_rule_interleave(policy->block_size, policy->interleave));
    qsort(policy->entries, (size_t)policy->num_entries, sizeof *policy->entries, compare_entries);
    WEFT_TRY(check_overlap(policy));
    for (int i = 0; i < policy->num_entries; i++)
        WEFT_TRY(while_in(complete_sizes(policy, &policy->entries[i]), &policy->entries[i]));
    return check_exchange(policy);
}

weft_status weft_policy_create(weft_policy **out, const weft_policy_spec *spec)
{
    size_t bytes = (size_t)spec->num_entries * sizeof *spec->entries;
    weft_policy *policy = calloc(1, sizeof *policy + bytes);
    if (policy == NULL) return weft_fail(WEFT_MEMORY, "no memory for a policy");
    weft_object_init(&policy->object, destroy);
    policy->tensor = spec->tensor;
    policy->block_size = spec->block_size == 0 ? 16 : spec->block_size;
    policy->interleave = spec->interleave == 0 ? 1 : spec->interleave;
    policy->exchange_a2a = spec->exchange_a2a;
    policy->num_entries = spec->num_entries;
    if (bytes > 0) memcpy(policy->entries, spec->entries, bytes);
    weft_status status = fill(policy);
    if (status == WEFT_OK) *out = policy;
    else WEFT_RELEASE(policy);
    return status;
}

/* ---- checking against a model ---- */

static weft_status check_entry(const weft_policy *p, const weft_policy_entry *e, const weft_model_numbers *model)
{
    const weft_layer_sizes *s = &e->sizes;
    if (model->num_hidden_layers > 0 && e->last_layer >= model->num_hidden_layers)
        return weft_fail(WEFT_INVALID, "layers: %d-%d, but the model has %d layers, 0 to %d", e->first_layer, e->last_layer,
                         model->num_hidden_layers, model->num_hidden_layers - 1);
    switch (e->type) {
    case WEFT_LAYER_ATTENTION: return weft_rule_model_attention(model, p->tensor, s->tensor, s->context, 1);
    case WEFT_LAYER_MLP: return weft_rule_model_mlp(model, p->tensor, s->tensor);
    case WEFT_LAYER_EXPERTS: return weft_rule_model_experts(model, p->tensor, s->expert);
    default: return WEFT_OK;
    }
}

static const weft_policy_entry *find_entry(const weft_policy *policy, weft_layer_type type, int layer)
{
    const weft_policy_entry *found = NULL;
    for (int i = 0; i < policy->num_entries; i++) {
        const weft_policy_entry *e = &policy->entries[i];
        if (e->type != type) continue;
        if (e->first_layer < 0) found = e;
        else if (layer >= e->first_layer && layer <= e->last_layer) return e;
    }
    return found;
}

weft_status weft_policy_check_model(const weft_policy *policy, const weft_model_numbers *model)
{
    WEFT_TRY(weft_rule_model_heads(model, policy->tensor));
    for (int i = 0; i < policy->num_entries; i++)
        WEFT_TRY(while_in(check_entry(policy, &policy->entries[i], model), &policy->entries[i]));
    /* Layer types without sizes are cut over all ranks. */
    int tp = policy->tensor;
    if (find_entry(policy, WEFT_LAYER_ATTENTION, -1) == NULL) WEFT_TRY(weft_rule_model_attention(model, tp, tp, 1, 1));
    if (find_entry(policy, WEFT_LAYER_MLP, -1) == NULL) WEFT_TRY(weft_rule_model_mlp(model, tp, tp));
    if (find_entry(policy, WEFT_LAYER_EXPERTS, -1) == NULL) WEFT_TRY(weft_rule_model_experts(model, tp, 1));
    return WEFT_OK;
}

/* ---- lowering ---- */

static weft_plan default_plan(const weft_policy *p, int rank)
{
    weft_axis tensor = {p->tensor, rank, WEFT_GROUP_TENSOR};
    return weft_plan_make(tensor, tensor);
}

static weft_plan lower_sizes(const weft_policy *p, const weft_policy_entry *e, int rank)
{
    const weft_layer_sizes *s = &e->sizes;
    weft_plan plan = default_plan(p, rank);
    int across = p->tensor / s->tensor; /* ranks with the same part */
    if (e->type == WEFT_LAYER_ATTENTION) {
        if (s->tensor != p->tensor) plan.input = (weft_axis){s->tensor, rank / across, WEFT_GROUP_ATTENTION_TENSOR};
        plan.context = (weft_axis){s->context, rank % s->context, WEFT_GROUP_CONTEXT};
        plan.interleave = s->context > 1 ? s->interleave : 1;
        plan.exchange_a2a = s->exchange_a2a;
    } else if (e->type == WEFT_LAYER_MLP && s->tensor != p->tensor) {
        plan.input = plan.output = (weft_axis){s->tensor, rank / across, WEFT_GROUP_MLP_TENSOR};
    } else if (e->type == WEFT_LAYER_EXPERTS && s->expert > 1) {
        plan.expert = (weft_axis){s->expert, rank / s->tensor, WEFT_GROUP_EXPERT};
        plan.input = (weft_axis){s->tensor, rank % s->tensor, WEFT_GROUP_EXPERT_TENSOR};
    }
    return plan;
}

static weft_status check_rank(const weft_policy *policy, int rank)
{
    if (rank >= 0 && rank < policy->tensor) return WEFT_OK;
    return weft_fail(WEFT_INVALID, "rank %d is outside of the %d ranks of the policy", rank, policy->tensor);
}

weft_status weft_policy_plan(const weft_policy *policy, weft_layer_type type, int layer, int rank, weft_plan *out)
{
    WEFT_TRY(check_rank(policy, rank));
    const weft_policy_entry *e = find_entry(policy, type, layer);
    *out = e == NULL ? default_plan(policy, rank) : lower_sizes(policy, e, rank);
    return WEFT_OK;
}

weft_status weft_policy_lower(const weft_policy *policy, int rank, weft_plan_table **out)
{
    WEFT_TRY(check_rank(policy, rank));
    weft_plan_table *table = calloc(1, weft_plan_table_bytes(policy->num_entries));
    if (table == NULL) return weft_fail(WEFT_MEMORY, "no memory for the plans of a rank");
    table->default_plan = default_plan(policy, rank);
    for (int i = 0; i < policy->num_entries; i++) {
        const weft_policy_entry *e = &policy->entries[i];
        weft_plan plan = lower_sizes(policy, e, rank);
        if (e->first_layer >= 0) {
            table->overrides[table->num_overrides++] = (weft_plan_override){e->first_layer, e->last_layer, e->type, plan};
        } else if (!weft_plan_equal(&plan, &table->default_plan)) {
            /* A type cut like the default has no override, as in the seed. */
            table->has_type[e->type] = 1;
            table->types[e->type] = plan;
        }
    }
    *out = table;
    return WEFT_OK;
}

/* ---- groups ---- */

static int sizes_need(const weft_policy *p, const weft_policy_entry *e, weft_group_type type)
{
    const weft_layer_sizes *s = &e->sizes;
    int attention = e->type == WEFT_LAYER_ATTENTION, experts = e->type == WEFT_LAYER_EXPERTS && s->expert > 1;
    switch (type) {
    case WEFT_GROUP_ATTENTION_TENSOR: return attention && s->tensor != p->tensor ? s->tensor : 1;
    case WEFT_GROUP_CONTEXT: return attention ? s->context : 1;
    case WEFT_GROUP_EXPERT: return experts ? s->expert : 1;
    case WEFT_GROUP_EXPERT_TENSOR: return experts ? s->tensor : 1;
    case WEFT_GROUP_MLP_TENSOR: return e->type == WEFT_LAYER_MLP && s->tensor != p->tensor ? s->tensor : 1;
    default: return 1;
    }
}

static int needs_group(const weft_policy *p, weft_group_type type, int size)
{
    if (type == WEFT_GROUP_TENSOR) return size == p->tensor;
    for (int i = 0; i < p->num_entries; i++)
        if (sizes_need(p, &p->entries[i], type) == size) return 1;
    return 0;
}

static weft_status group_rows(const weft_policy *p, weft_group_type type, int size, weft_rank_rows *rows)
{
    static const weft_grid_kind kinds[] = {
        [WEFT_GROUP_TENSOR] = WEFT_GRID_TENSOR,   [WEFT_GROUP_ATTENTION_TENSOR] = WEFT_GRID_ATTENTION_TENSOR,
        [WEFT_GROUP_CONTEXT] = WEFT_GRID_CONTEXT, [WEFT_GROUP_EXPERT] = WEFT_GRID_EXPERT,
        [WEFT_GROUP_EXPERT_TENSOR] = WEFT_GRID_EXPERT_TENSOR, [WEFT_GROUP_MLP_TENSOR] = WEFT_GRID_MLP_TENSOR,
    };
    weft_rank_grid grid = {.external_dp = 1, .dp = 1, .pp = 1, .pcp = 1, .tp = p->tensor, .attention_tp = size,
                           .dcp = size, .ep = type == WEFT_GROUP_EXPERT_TENSOR ? p->tensor / size : size, .mlp_tensor = size};
    return weft_rank_grid_rows(&grid, kinds[type], rows);
}

weft_status weft_policy_groups(const weft_policy *policy, weft_policy_group **out, int *count)
{
    int capacity = 1 + 2 * policy->num_entries, used = 0; /* a layer type needs at most two kinds */
    weft_policy_group *groups = calloc((size_t)capacity, sizeof *groups);
    if (groups == NULL) return weft_fail(WEFT_MEMORY, "no memory for the groups of a policy");
    for (int type = WEFT_GROUP_TENSOR; type <= WEFT_GROUP_MLP_TENSOR; type++) {
        for (int size = 2; size <= policy->tensor; size++) {
            if (policy->tensor % size != 0 || !needs_group(policy, (weft_group_type)type, size)) continue;
            weft_status status = group_rows(policy, (weft_group_type)type, size, &groups[used].rows);
            if (status != WEFT_OK) {
                weft_policy_groups_free(groups, used);
                return status;
            }
            groups[used++].type = (weft_group_type)type;
        }
    }
    *out = groups;
    *count = used;
    return WEFT_OK;
}

void weft_policy_groups_free(weft_policy_group *groups, int count)
{
    for (int i = 0; groups != NULL && i < count; i++) weft_rank_rows_free(&groups[i].rows);
    free(groups);
}

int weft_policy_context_lcm(const weft_policy *policy)
{
    int lcm = 1; /* every context size divides tensor, so this does too */
    for (int i = 0; i < policy->num_entries; i++) {
        const weft_policy_entry *e = &policy->entries[i];
        if (e->type != WEFT_LAYER_ATTENTION) continue;
        int a = lcm, b = e->sizes.context;
        while (b != 0) {
            int rest = a % b;
            a = b;
            b = rest;
        }
        lcm = lcm / a * e->sizes.context;
    }
    return lcm;
}

/* ---- text ---- */

typedef struct {
    char *at;
    size_t left;
} text_out;

static void append(text_out *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void append(text_out *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(t->at, t->left, format, args);
    va_end(args);
    if (n < 0) return;
    size_t step = (size_t)n < t->left ? (size_t)n : (t->left > 0 ? t->left - 1 : 0);
    t->at += step;
    t->left -= step;
}

const char *weft_policy_describe(const weft_policy *policy, char *text, size_t size)
{
    text_out t = {text, size};
    append(&t, "tensor=%d", policy->tensor);
    for (int i = 0; i < policy->num_entries; i++) {
        const weft_policy_entry *e = &policy->entries[i];
        if (e->first_layer == e->last_layer && e->first_layer >= 0) append(&t, " layer %d", e->first_layer);
        else if (e->first_layer >= 0) append(&t, " layers %d-%d", e->first_layer, e->last_layer);
        append(&t, " %s={", weft_layer_type_name(e->type));
        if (e->type == WEFT_LAYER_EXPERTS) append(&t, "expert=%d,", e->sizes.expert);
        append(&t, "tensor=%d", e->sizes.tensor);
        if (e->type == WEFT_LAYER_ATTENTION && e->sizes.context > 1)
            append(&t, ",context=%d,interleave=%d,exchange=%s", e->sizes.context, e->sizes.interleave,
                   e->sizes.exchange_a2a ? "a2a" : "ag_rs");
        append(&t, "}");
    }
    append(&t, " block_size=%d", policy->block_size);
    return text;
}
