/* bind/lua_linear.c - weft.linear (replicated, column, merged column, row) and weft.qkv_linear.
 *
 *   core.replicated_linear{input_size=, output_size=, bias=false, dtype="auto", name=}
 *   core.column_linear{input_size=, output_size=, axis= | parallel_plan=, gather_output=false, ...}
 *   core.merged_column_linear{input_size=, output_sizes={...}, ...}
 *   core.row_linear{input_size=, output_size=, axis= | parallel_plan=, reduce_results=true, ...}
 *   core.qkv_linear{hidden_size=, head_size=, v_head_size=, total_num_heads=, total_num_kv_heads=, ...}
 *   layer:load([shard_id,] source) :load_bias(...) :load_scale(...) :forward(x) -> y
 *   qkv:split_qkv(qkv) -> q, k, v
 *   layer.weight: this rank's shard, [rows, columns], and the sizes: .input_size .output_size .weight_bytes ...
 * Column layers are cut by the plan's input axis, row layers by its output axis. A fused checkpoint
 * tensor is loaded without a shard id; ids are "q", "k", "v", or 0, 1, ...
 * fp8 weights: dequantize=true keeps them as floats; quantize_activations=true rounds x to fp8 too. */
#include <stdio.h>
#include <string.h>

#include "bind/box.h"
#include "bind/core.h"
#include "bind/layer_args.h"
#include "layers/linear.h"
#include "layers/qkv_linear.h"

#define LINEAR "weft.linear"
#define QKV "weft.qkv_linear"

/* What weft_check_weight_options reads. */
#define WEIGHT_KEYS "bias", "dtype", "dequantize", "quantize_activations", "name"

enum { LARGEST_SIZE = 1 << 30 };

static int make_linear(lua_State *L, weft_linear_options *options)
{
    weft_object **slot = weft_box_new(L, LINEAR);
    weft_linear *linear = NULL;
    weft_raise_if(L, weft_linear_create(&linear, weft_lua_rank(L), options));
    *slot = &linear->object;
    return 1;
}

static int l_replicated(lua_State *L)
{
    static const char *const keys[] = {"input_size", "output_size", WEIGHT_KEYS, NULL};
    luaL_checktype(L, 1, LUA_TTABLE);
    weft_check_keys(L, 1, "replicated_linear", keys);
    int64_t output_size = weft_field_int(L, 1, "output_size", 1, LARGEST_SIZE);
    weft_linear_options options = {.kind = WEFT_LINEAR_REPLICATED,
                                   .weight = weft_check_weight_options(L, 1, "replicated_linear"),
                                   .input_size = weft_field_int(L, 1, "input_size", 1, LARGEST_SIZE),
                                   .num_outputs = 1,
                                   .output_sizes = &output_size,
                                   .axis = weft_plan_single_rank().input};
    return make_linear(L, &options);
}

static int l_column(lua_State *L)
{
    static const char *const keys[] = {"input_size", "output_size", WEIGHT_KEYS, "axis", "parallel_plan",
                                       "disable_tp", "gather_output", NULL};
    luaL_checktype(L, 1, LUA_TTABLE);
    weft_check_keys(L, 1, "column_linear", keys);
    int64_t output_size = weft_field_int(L, 1, "output_size", 1, LARGEST_SIZE);
    weft_linear_options options = {.kind = WEFT_LINEAR_COLUMN,
                                   .weight = weft_check_weight_options(L, 1, "column_linear"),
                                   .input_size = weft_field_int(L, 1, "input_size", 1, LARGEST_SIZE),
                                   .num_outputs = 1,
                                   .output_sizes = &output_size,
                                   .axis = weft_check_layer_axis(L, 1, 0),
                                   .gather_output = weft_field_bool_or(L, 1, "gather_output", 0)};
    return make_linear(L, &options);
}

static int check_sizes(lua_State *L, int64_t *sizes)
{
    lua_getfield(L, 1, "output_sizes");
    if (!lua_istable(L, -1)) luaL_error(L, "output_sizes must be a table of sizes, got %s", luaL_typename(L, -1));
    int count = (int)lua_objlen(L, -1);
    if (count < 1 || count > WEFT_WEIGHT_MAX_PARTS)
        luaL_error(L, "output_sizes must have 1 to %d sizes, got %d", WEFT_WEIGHT_MAX_PARTS, count);
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, -1, i + 1);
        double size = lua_isnumber(L, -1) ? lua_tonumber(L, -1) : 0;
        if (!(size >= 1 && size <= LARGEST_SIZE) || size != (double)(int64_t)size)
            luaL_error(L, "size %d of output_sizes is not a positive whole number", i + 1);
        sizes[i] = (int64_t)size;
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
    return count;
}

static int l_merged(lua_State *L)
{
    static const char *const keys[] = {"input_size", "output_sizes", WEIGHT_KEYS, "axis", "parallel_plan",
                                       "disable_tp", NULL};
    luaL_checktype(L, 1, LUA_TTABLE);
    weft_check_keys(L, 1, "merged_column_linear", keys);
    int64_t sizes[WEFT_WEIGHT_MAX_PARTS];
    int count = check_sizes(L, sizes);
    weft_linear_options options = {.kind = WEFT_LINEAR_COLUMN,
                                   .weight = weft_check_weight_options(L, 1, "merged_column_linear"),
                                   .input_size = weft_field_int(L, 1, "input_size", 1, LARGEST_SIZE),
                                   .num_outputs = count,
                                   .output_sizes = sizes,
                                   .axis = weft_check_layer_axis(L, 1, 0)};
    return make_linear(L, &options);
}

static int l_row(lua_State *L)
{
    static const char *const keys[] = {"input_size", "output_size", WEIGHT_KEYS, "axis", "parallel_plan",
                                       "disable_tp", "reduce_results", NULL};
    luaL_checktype(L, 1, LUA_TTABLE);
    weft_check_keys(L, 1, "row_linear", keys);
    int64_t output_size = weft_field_int(L, 1, "output_size", 1, LARGEST_SIZE);
    weft_linear_options options = {.kind = WEFT_LINEAR_ROW,
                                   .weight = weft_check_weight_options(L, 1, "row_linear"),
                                   .input_size = weft_field_int(L, 1, "input_size", 1, LARGEST_SIZE),
                                   .num_outputs = 1,
                                   .output_sizes = &output_size,
                                   .axis = weft_check_layer_axis(L, 1, 1),
                                   .reduce_results = weft_field_bool_or(L, 1, "reduce_results", 1)};
    return make_linear(L, &options);
}

static weft_linear *check_linear(lua_State *L)
{
    return (weft_linear *)weft_box_check(L, 1, LINEAR);
}

static int l_load(lua_State *L)
{
    return weft_load_weight(L, &check_linear(L)->weight, weft_linear_weight_load);
}

static int l_load_bias(lua_State *L)
{
    return weft_load_weight(L, &check_linear(L)->weight, weft_linear_weight_load_bias);
}

static int l_load_scale(lua_State *L)
{
    return weft_load_weight(L, &check_linear(L)->weight, weft_linear_weight_load_scale);
}

static int l_forward(lua_State *L)
{
    weft_linear *linear = check_linear(L);
    weft_tensor *y = NULL;
    weft_raise_if(L, weft_linear_forward(linear, weft_check_tensor(L, 2), &y));
    weft_push_tensor(L, y);
    return 1;
}

/* This rank's shard as it lies in memory, or nil before it is loaded. */
static void push_weight(lua_State *L, const weft_linear_weight *w, weft_axis axis, int dim)
{
    if (w->weight == NULL) {
        lua_pushnil(L);
        return;
    }
    weft_tensor_note_cut(w->weight, dim, weft_group_type_name(axis.group), axis.world_size);
    weft_push_tensor(L, WEFT_RETAIN(w->weight));
}

static int linear_fields(lua_State *L)
{
    weft_linear *linear = check_linear(L);
    const weft_linear_weight *w = &linear->weight;
    const char *name = luaL_checkstring(L, 2);
    const weft_number_field numbers[] = {
        {"input_size", (double)w->total_columns},       {"output_size", (double)w->total_rows},
        {"local_input_size", (double)w->columns.count}, {"local_output_size", (double)w->rows},
        {"weight_bytes", (double)weft_linear_weight_bytes(w)}, {NULL, 0},
    };
    if (strcmp(name, "name") == 0) lua_pushstring(L, w->name);
    else if (strcmp(name, "axis") == 0) weft_push_axis(L, linear->axis);
    else if (strcmp(name, "weight") == 0) push_weight(L, w, linear->axis, linear->kind == WEFT_LINEAR_ROW ? 1 : 0);
    else if (strcmp(name, "bias") == 0) lua_pushboolean(L, w->has_bias);
    else if (strcmp(name, "dtype") == 0 && w->weight != NULL) lua_pushstring(L, weft_dtype_name(w->weight->dtype));
    else return weft_push_number_field(L, name, numbers);
    return 1;
}

static int linear_tostring(lua_State *L)
{
    weft_linear *linear = (weft_linear *)weft_box_test(L, 1, LINEAR);
    if (linear == NULL) {
        lua_pushliteral(L, LINEAR " (closed)");
        return 1;
    }
    const weft_linear_weight *w = &linear->weight;
    char text[256], axis[64];
    snprintf(text, sizeof text, "%s %lld -> %lld, this rank %lld -> %lld (%s)", weft_linear_kind_name(linear->kind),
             (long long)w->total_columns, (long long)w->total_rows, (long long)w->columns.count, (long long)w->rows,
             weft_axis_describe(linear->axis, axis, sizeof axis));
    lua_pushstring(L, text);
    return 1;
}

/* ---- qkv ---- */

static int l_qkv(lua_State *L)
{
    static const char *const keys[] = {"hidden_size", "head_size", "v_head_size", "total_num_heads", "total_num_kv_heads",
                                       "parallel_plan", "tensor_parallel_size", "disable_tp", WEIGHT_KEYS, NULL};
    luaL_checktype(L, 1, LUA_TTABLE);
    weft_check_keys(L, 1, "qkv_linear", keys);
    int tp = weft_layer_plan(L, WEFT_LAYER_DEFAULT, -1).output.world_size;
    weft_qkv_options options = {
        .weight = weft_check_weight_options(L, 1, "qkv_linear"),
        .hidden_size = weft_field_int(L, 1, "hidden_size", 1, LARGEST_SIZE),
        .head_size = (int)weft_field_int(L, 1, "head_size", 1, 65536),
        .v_head_size = (int)weft_field_int_or(L, 1, "v_head_size", 1, 65536, 0),
        .total_num_heads = (int)weft_field_int(L, 1, "total_num_heads", 1, 1 << 20),
        .total_num_kv_heads = (int)weft_field_int_or(L, 1, "total_num_kv_heads", 1, 1 << 20, 0),
        .plan = weft_check_parallel_plan(L, 1),
        .tensor_parallel_size = (int)weft_field_int_or(L, 1, "tensor_parallel_size", 1, 1 << 20, tp),
        .disable_tp = weft_field_bool_or(L, 1, "disable_tp", 0),
    };
    weft_object **slot = weft_box_new(L, QKV);
    weft_qkv_linear *layer = NULL;
    weft_raise_if(L, weft_qkv_linear_create(&layer, weft_lua_rank(L), &options));
    *slot = &layer->object;
    return 1;
}

static weft_qkv_linear *check_qkv(lua_State *L)
{
    return (weft_qkv_linear *)weft_box_check(L, 1, QKV);
}

static int l_qkv_load(lua_State *L)
{
    return weft_load_weight(L, &check_qkv(L)->weight, weft_linear_weight_load);
}

static int l_qkv_load_bias(lua_State *L)
{
    return weft_load_weight(L, &check_qkv(L)->weight, weft_linear_weight_load_bias);
}

static int l_qkv_load_scale(lua_State *L)
{
    return weft_load_weight(L, &check_qkv(L)->weight, weft_linear_weight_load_scale);
}

static int l_qkv_forward(lua_State *L)
{
    weft_qkv_linear *layer = check_qkv(L);
    weft_tensor *qkv = NULL;
    weft_raise_if(L, weft_qkv_linear_forward(layer, weft_check_tensor(L, 2), &qkv));
    weft_push_tensor(L, qkv);
    return 1;
}

static int l_split_qkv(lua_State *L)
{
    weft_qkv_linear *layer = check_qkv(L);
    weft_tensor *qkv = weft_check_tensor(L, 2), *views[3];
    weft_object **slots[3];
    for (int i = 0; i < 3; i++) slots[i] = weft_box_new(L, WEFT_TENSOR);
    weft_raise_if(L, weft_qkv_linear_split(layer, qkv, &views[0], &views[1], &views[2]));
    for (int i = 0; i < 3; i++) *slots[i] = &views[i]->object;
    return 3;
}

static int qkv_fields(lua_State *L)
{
    weft_qkv_linear *layer = check_qkv(L);
    const weft_head_layout *h = &layer->layout;
    const weft_linear_weight *w = &layer->weight;
    const char *name = luaL_checkstring(L, 2);
    const weft_number_field numbers[] = {
        {"num_heads", h->num_heads},
        {"num_kv_heads", h->num_kv_heads},
        {"num_kv_head_replicas", h->num_kv_head_replicas},
        {"first_head", h->first_head},
        {"first_kv_head", h->first_kv_head},
        {"output_num_heads", h->output_num_heads},
        {"output_first_head", h->output_first_head},
        {"total_num_heads", layer->total_num_heads},
        {"total_num_kv_heads", layer->total_num_kv_heads},
        {"head_size", layer->head_size},
        {"v_head_size", layer->v_head_size},
        {"q_size", (double)layer->q_size},
        {"k_size", (double)layer->k_size},
        {"v_size", (double)layer->v_size},
        {"hidden_size", (double)w->total_columns},
        {"output_size", (double)w->rows},
        {"weight_bytes", (double)weft_linear_weight_bytes(w)},
        {NULL, 0},
    };
    if (strcmp(name, "name") == 0) lua_pushstring(L, w->name);
    else if (strcmp(name, "parallel_plan") == 0) weft_push_plan(L, layer->plan);
    else if (strcmp(name, "weight") == 0) push_weight(L, w, layer->plan.input, 0);
    else if (strcmp(name, "bias") == 0) lua_pushboolean(L, w->has_bias);
    else if (strcmp(name, "dtype") == 0 && w->weight != NULL) lua_pushstring(L, weft_dtype_name(w->weight->dtype));
    else return weft_push_number_field(L, name, numbers);
    return 1;
}

static int qkv_tostring(lua_State *L)
{
    weft_qkv_linear *layer = (weft_qkv_linear *)weft_box_test(L, 1, QKV);
    if (layer == NULL) {
        lua_pushliteral(L, QKV " (closed)");
        return 1;
    }
    const weft_head_layout *h = &layer->layout;
    char text[256];
    snprintf(text, sizeof text, "qkv_linear %lld -> %lld: heads %d to %d of %d, kv heads %d to %d of %d (each on %d ranks)",
             (long long)layer->weight.total_columns, (long long)layer->weight.rows, h->first_head,
             h->first_head + h->num_heads - 1, layer->total_num_heads, h->first_kv_head, h->first_kv_head + h->num_kv_heads - 1,
             layer->total_num_kv_heads, h->num_kv_head_replicas);
    lua_pushstring(L, text);
    return 1;
}

void weft_open_linear(lua_State *L)
{
    static const luaL_Reg linear_methods[] = {
        {"load", l_load}, {"load_bias", l_load_bias}, {"load_scale", l_load_scale}, {"forward", l_forward}, {NULL, NULL}};
    static const luaL_Reg qkv_methods[] = {
        {"load", l_qkv_load},       {"load_bias", l_qkv_load_bias}, {"load_scale", l_qkv_load_scale},
        {"forward", l_qkv_forward}, {"split_qkv", l_split_qkv},     {NULL, NULL}};
    static const luaL_Reg functions[] = {
        {"replicated_linear", l_replicated}, {"column_linear", l_column}, {"merged_column_linear", l_merged},
        {"row_linear", l_row},               {"qkv_linear", l_qkv},       {NULL, NULL}};
    weft_box_class(L, LINEAR, linear_methods, linear_fields, linear_tostring);
    weft_box_class(L, QKV, qkv_methods, qkv_fields, qkv_tostring);
    luaL_setfuncs(L, functions, 0);
    weft_open_embedding(L);
}
