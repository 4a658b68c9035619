/* bind/layer_args.c - what the constructors and methods of layers have in common. */
#include "bind/layer_args.h"

#include <string.h>

#include "bind/box.h"
#include "bind/source_args.h"

int weft_check_weight_dtype(lua_State *L, int index, const char *field, weft_dtype *dtype)
{
    const char *name = weft_field_string_or(L, index, field, "auto");
    if (strcmp(name, "auto") == 0) return 0;
    if (!weft_dtype_from_name(name, dtype) || (*dtype != WEFT_F32 && *dtype != WEFT_BF16 && *dtype != WEFT_F16))
        luaL_error(L, "%s must be auto, float32, bfloat16 or float16, got '%s'", field, name);
    return 1;
}

weft_weight_options weft_check_weight_options(lua_State *L, int index, const char *kind)
{
    weft_weight_options options = {.name = weft_field_string_or(L, index, "name", kind),
                                   .bias = weft_field_bool_or(L, index, "bias", 0)};
    options.convert = weft_check_weight_dtype(L, index, "dtype", &options.dtype);
    options.dequantize = weft_field_bool_or(L, index, "dequantize", 0);
    options.quantize_activations = weft_field_bool_or(L, index, "quantize_activations", 0);
    return options;
}

weft_plan weft_check_parallel_plan(lua_State *L, int index)
{
    weft_plan plan;
    if (weft_opt_plan_field(L, index, "parallel_plan", &plan)) return plan;
    return weft_layer_plan(L, WEFT_LAYER_DEFAULT, -1);
}

weft_axis weft_check_layer_axis(lua_State *L, int index, int output)
{
    if (weft_field_bool_or(L, index, "disable_tp", 0)) return weft_plan_single_rank().input;
    lua_getfield(L, index, "axis");
    int given = !lua_isnil(L, -1);
    if (given && luaL_testudata(L, -1, WEFT_AXIS) == NULL)
        luaL_error(L, "axis must be a weft.axis, got %s", luaL_typename(L, -1));
    weft_axis axis = {1, 0, WEFT_GROUP_TENSOR};
    if (given) axis = weft_check_axis(L, -1);
    lua_pop(L, 1);
    if (given) return axis;
    weft_plan plan = weft_check_parallel_plan(L, index);
    return output ? plan.output : plan.input;
}

int weft_push_number_field(lua_State *L, const char *name, const weft_number_field *fields)
{
    for (; fields->name != NULL; fields++) {
        if (strcmp(fields->name, name) == 0) {
            lua_pushnumber(L, fields->value);
            return 1;
        }
    }
    lua_pushnil(L);
    return 1;
}

int weft_load_weight(lua_State *L, weft_linear_weight *w, weft_weight_loader loader)
{
    int source_index = lua_gettop(L) >= 3 ? 3 : 2, part = -1;
    const char *id = source_index == 3 ? luaL_optstring(L, 2, NULL) : NULL;
    weft_source *source = weft_check_source(L, source_index);
    weft_raise_if(L, weft_linear_weight_find(w, id, &part));
    weft_raise_if(L, loader(w, part, source));
    lua_settop(L, 1);
    return 1;
}
