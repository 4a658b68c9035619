/* layers/linear.c - replicated, column, merged column and row parallel linear layers. */
#include "layers/linear.h"

#include <stdio.h>
#include <stdlib.h>

const char *weft_linear_kind_name(weft_linear_kind kind)
{
    static const char *const names[] = {"replicated_linear", "column_linear", "row_linear"};
    return names[kind];
}

weft_status weft_layer_group(weft_rank *rank, weft_axis axis, const char *name, weft_group **out)
{
    *out = NULL;
    if (axis.world_size == 1) return WEFT_OK;
    weft_group *group = NULL;
    weft_status status = weft_rank_group(rank, axis.group, axis.world_size, &group);
    if (status != WEFT_OK) return weft_fail_while(status, "while making %s", name);
    if (weft_group_rank(group) != axis.rank)
        return weft_fail(WEFT_INVALID, "%s: the plan says rank %d of %s %d, but this rank is number %d of %s", name, axis.rank,
                         weft_group_type_name(axis.group), axis.world_size, weft_group_rank(group), weft_group_name(group));
    *out = weft_group_retain(group);
    return WEFT_OK;
}

static void destroy(weft_object *object)
{
    weft_linear *linear = (weft_linear *)object;
    weft_linear_weight_clear(&linear->weight);
    if (linear->group != NULL) weft_group_release(linear->group);
    WEFT_RELEASE(linear->rank);
    free(linear);
}

static weft_status check_options(const weft_linear_options *o)
{
    const char *name = o->weight.name;
    if (o->input_size < 1) return weft_fail(WEFT_INVALID, "%s: input_size must be positive", name);
    if (o->num_outputs < 1) return weft_fail(WEFT_INVALID, "%s: no output sizes", name);
    for (int i = 0; i < o->num_outputs; i++)
        if (o->output_sizes[i] < 1) return weft_fail(WEFT_INVALID, "%s: output sizes must be positive", name);
    if (o->gather_output && (o->kind != WEFT_LINEAR_COLUMN || o->num_outputs > 1))
        return weft_fail(WEFT_INVALID, "%s: gather_output is for a column linear layer of one part", name);
    if (o->kind == WEFT_LINEAR_ROW && !o->reduce_results && o->weight.bias)
        return weft_fail(WEFT_INVALID, "%s: a bias needs reduce_results, or it would be added once per rank", name);
    return WEFT_OK;
}

static weft_status add_parts(weft_linear *linear, const weft_linear_options *o)
{
    for (int i = 0; i < o->num_outputs; i++) {
        weft_shard rows = {0, o->output_sizes[i]};
        if (o->kind == WEFT_LINEAR_COLUMN) WEFT_TRY(weft_shard_even(&rows, "output rows", o->output_sizes[i], o->axis));
        char id[12];
        snprintf(id, sizeof id, "%d", i);
        WEFT_TRY(weft_linear_weight_add_part(&linear->weight, id, o->output_sizes[i], rows));
    }
    return WEFT_OK;
}

static weft_status build(weft_linear *linear, weft_rank *rank, const weft_linear_options *o)
{
    weft_shard columns = {0, o->input_size};
    if (o->kind == WEFT_LINEAR_ROW) WEFT_TRY(weft_shard_even(&columns, "input columns", o->input_size, o->axis));
    WEFT_TRY(weft_linear_weight_init(&linear->weight, rank, &o->weight, o->input_size, columns));
    WEFT_TRY(add_parts(linear, o));
    int talks = o->kind == WEFT_LINEAR_ROW ? o->reduce_results : o->gather_output;
    if (talks) WEFT_TRY(weft_layer_group(rank, o->axis, o->weight.name, &linear->group));
    if (o->kind == WEFT_LINEAR_ROW && o->axis.rank != 0) linear->weight.holds_bias = 0;
    return WEFT_OK;
}

weft_status weft_linear_create(weft_linear **out, weft_rank *rank, const weft_linear_options *options)
{
    WEFT_TRY(check_options(options));
    weft_linear *linear = calloc(1, sizeof *linear);
    if (linear == NULL) return weft_fail(WEFT_MEMORY, "no memory for a layer");
    weft_object_init(&linear->object, destroy);
    linear->kind = options->kind;
    linear->axis = options->axis;
    linear->gather_output = options->gather_output;
    linear->rank = WEFT_RETAIN(rank);
    weft_status status = build(linear, rank, options);
    if (status != WEFT_OK) {
        WEFT_RELEASE(linear);
        return weft_fail_while(status, "while making %s", options->weight.name);
    }
    *out = linear;
    return WEFT_OK;
}

static weft_status gather(weft_linear *linear, weft_tensor *part, weft_tensor **y)
{
    weft_tensor *whole = NULL;
    WEFT_TRY(weft_arena_tensor(linear->rank->arena, &whole, part->dtype, 2,
                               (int64_t[]){part->shape[0], linear->weight.total_rows}));
    weft_status status = weft_group_all_gather_dim(linear->group, part, 1, whole);
    if (status != WEFT_OK) {
        WEFT_RELEASE(whole);
        return status;
    }
    *y = whole;
    return WEFT_OK;
}

weft_status weft_linear_forward(weft_linear *linear, const weft_tensor *x, weft_tensor **y)
{
    weft_tensor *part = NULL;
    weft_group *sum = linear->kind == WEFT_LINEAR_ROW ? linear->group : NULL;
    WEFT_TRY(weft_linear_weight_apply(&linear->weight, linear->rank, x, 1, x->dtype, sum, &part));
    if (linear->group == NULL || sum != NULL) {
        if (linear->kind == WEFT_LINEAR_COLUMN)
            weft_tensor_note_cut(part, 1, weft_group_type_name(linear->axis.group), linear->axis.world_size);
        *y = part;
        return WEFT_OK;
    }
    weft_status status = gather(linear, part, y);
    WEFT_RELEASE(part);
    return status;
}
