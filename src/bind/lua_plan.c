/* bind/lua_plan.c - weft.axis and weft.plan: immutable values.
 *
 *   core.axis(world_size, rank [, group])             .world_size .rank .group
 *   core.plan{input=, output= [, context=, expert=, interleave=, exchange="ag_rs"|"a2a"]}
 *       the same fields, .reshards_output, :get_output_size(n)
 * Both compare by value. */
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "bind/box.h"
#include "bind/core.h"
#include "bind/plan_args.h"

/* ---- arguments ---- */

int weft_check_int(lua_State *L, int index, const char *what)
{
    if (lua_type(L, index) != LUA_TNUMBER) luaL_error(L, "%s must be an integer, got %s", what, luaL_typename(L, index));
    double value = lua_tonumber(L, index);
    if (!(value >= INT_MIN && value <= INT_MAX) || value != (double)(int)value) {
        char text[128];
        snprintf(text, sizeof text, "%s must be an integer, got %.14g", what, value);
        luaL_error(L, "%s", text);
    }
    return (int)value;
}

void weft_check_keys(lua_State *L, int index, const char *what, const char *const *names)
{
    luaL_checktype(L, index, LUA_TTABLE);
    lua_pushnil(L);
    while (lua_next(L, index) != 0) {
        lua_pop(L, 1); /* key */
        int known = 0;
        if (lua_type(L, -1) == LUA_TSTRING)
            for (const char *const *n = names; *n != NULL && !known; n++) known = strcmp(*n, lua_tostring(L, -1)) == 0;
        if (known) continue;
        luaL_Buffer list;
        lua_getglobal(L, "tostring");
        lua_pushvalue(L, -2);
        lua_call(L, 1, 1); /* key text */
        luaL_buffinit(L, &list);
        for (const char *const *n = names; *n != NULL; n++) {
            if (n != names) luaL_addstring(&list, ", ");
            luaL_addstring(&list, *n);
        }
        luaL_pushresult(&list);
        luaL_error(L, "%s has no field '%s' (known: %s)", what, lua_tostring(L, -2), lua_tostring(L, -1));
    }
}

static weft_group_type check_group_type(lua_State *L, int index)
{
    weft_group_type type = WEFT_GROUP_TENSOR;
    if (lua_isnoneornil(L, index)) return type;
    const char *name = luaL_checkstring(L, index);
    if (!weft_group_type_from_name(name, &type))
        luaL_error(L, "unknown group '%s' (known: tensor, attention_tensor, context, expert, expert_tensor, mlp_tensor, "
                      "pipeline, data, prefill_context)", name);
    return type;
}

weft_axis weft_check_axis(lua_State *L, int index)
{
    return *(weft_axis *)luaL_checkudata(L, index, WEFT_AXIS);
}

weft_plan weft_check_plan(lua_State *L, int index)
{
    return *(weft_plan *)luaL_checkudata(L, index, WEFT_PLAN);
}

int weft_opt_plan_field(lua_State *L, int table_index, const char *name, weft_plan *out)
{
    lua_getfield(L, table_index, name);
    int given = !lua_isnil(L, -1);
    if (given) {
        weft_plan *plan = luaL_testudata(L, -1, WEFT_PLAN);
        if (plan == NULL) luaL_error(L, "%s must be a weft.plan, got %s", name, luaL_typename(L, -1));
        *out = *plan;
    }
    lua_pop(L, 1);
    return given;
}

/* ---- axis ---- */

void weft_push_axis(lua_State *L, weft_axis axis)
{
    *(weft_axis *)lua_newuserdata(L, sizeof axis) = axis;
    luaL_setmetatable(L, WEFT_AXIS);
}

static int l_axis(lua_State *L)
{
    weft_axis axis;
    int world_size = weft_check_int(L, 1, "world_size");
    int rank = weft_check_int(L, 2, "rank");
    weft_group_type group = check_group_type(L, 3);
    weft_raise_if(L, weft_axis_make(&axis, world_size, rank, group));
    weft_push_axis(L, axis);
    return 1;
}

static int axis_index(lua_State *L)
{
    weft_axis axis = weft_check_axis(L, 1);
    const char *name = luaL_checkstring(L, 2);
    if (strcmp(name, "world_size") == 0) lua_pushinteger(L, axis.world_size);
    else if (strcmp(name, "rank") == 0) lua_pushinteger(L, axis.rank);
    else if (strcmp(name, "group") == 0) lua_pushstring(L, weft_group_type_name(axis.group));
    else lua_pushnil(L);
    return 1;
}

static int axis_eq(lua_State *L)
{
    lua_pushboolean(L, weft_axis_equal(weft_check_axis(L, 1), weft_check_axis(L, 2)));
    return 1;
}

static int axis_tostring(lua_State *L)
{
    char text[64];
    lua_pushstring(L, weft_axis_describe(weft_check_axis(L, 1), text, sizeof text));
    return 1;
}

/* ---- plan ---- */

void weft_push_plan(lua_State *L, weft_plan plan)
{
    *(weft_plan *)lua_newuserdata(L, sizeof plan) = plan;
    luaL_setmetatable(L, WEFT_PLAN);
}

/* table[name] as an axis: 0 when it is nil. */
static int axis_field(lua_State *L, int index, const char *name, weft_axis *out)
{
    lua_getfield(L, index, name);
    int given = !lua_isnil(L, -1);
    if (given) {
        weft_axis *axis = luaL_testudata(L, -1, WEFT_AXIS);
        if (axis == NULL) luaL_error(L, "%s must be a weft.axis, got %s", name, luaL_typename(L, -1));
        *out = *axis;
    }
    lua_pop(L, 1);
    return given;
}

static void group_field(lua_State *L, int index, const char *name, weft_group_type group, weft_axis *out)
{
    weft_axis axis;
    if (!axis_field(L, index, name, &axis)) return;
    if (axis.group != group)
        luaL_error(L, "%s must be an axis of group '%s', got '%s'", name, weft_group_type_name(group),
                   weft_group_type_name(axis.group));
    *out = axis;
}

static int l_plan(lua_State *L)
{
    static const char *const names[] = {"input", "output", "context", "expert", "interleave", "exchange", NULL};
    weft_axis input, output;
    weft_check_keys(L, 1, "a plan", names);
    if (!axis_field(L, 1, "input", &input)) luaL_error(L, "a plan needs an input axis");
    if (!axis_field(L, 1, "output", &output)) luaL_error(L, "a plan needs an output axis");
    weft_plan plan = weft_plan_make(input, output);
    group_field(L, 1, "context", WEFT_GROUP_CONTEXT, &plan.context);
    group_field(L, 1, "expert", WEFT_GROUP_EXPERT, &plan.expert);
    plan.interleave = (int)weft_field_int_or(L, 1, "interleave", 1, INT_MAX, 1);
    const char *exchange = weft_field_string_or(L, 1, "exchange", "ag_rs");
    plan.exchange_a2a = strcmp(exchange, "a2a") == 0;
    if (!plan.exchange_a2a && strcmp(exchange, "ag_rs") != 0)
        luaL_error(L, "exchange must be 'ag_rs' or 'a2a', got '%s'", exchange);
    weft_push_plan(L, plan);
    return 1;
}

static int l_get_output_size(lua_State *L)
{
    weft_plan plan = weft_check_plan(L, 1);
    int64_t size = 0;
    weft_raise_if(L, weft_plan_output_size(&plan, weft_check_int(L, 2, "input_size"), &size));
    lua_pushnumber(L, (lua_Number)size);
    return 1;
}

static int plan_index(lua_State *L)
{
    weft_plan plan = weft_check_plan(L, 1);
    const char *name = luaL_checkstring(L, 2);
    if (strcmp(name, "input") == 0) weft_push_axis(L, plan.input);
    else if (strcmp(name, "output") == 0) weft_push_axis(L, plan.output);
    else if (strcmp(name, "context") == 0) weft_push_axis(L, plan.context);
    else if (strcmp(name, "expert") == 0) weft_push_axis(L, plan.expert);
    else if (strcmp(name, "interleave") == 0) lua_pushinteger(L, plan.interleave);
    else if (strcmp(name, "exchange") == 0) lua_pushstring(L, plan.exchange_a2a ? "a2a" : "ag_rs");
    else if (strcmp(name, "reshards_output") == 0) lua_pushboolean(L, weft_plan_reshards_output(&plan));
    else if (strcmp(name, "get_output_size") == 0) lua_pushcfunction(L, l_get_output_size);
    else lua_pushnil(L);
    return 1;
}

static int plan_eq(lua_State *L)
{
    weft_plan a = weft_check_plan(L, 1), b = weft_check_plan(L, 2);
    lua_pushboolean(L, weft_plan_equal(&a, &b));
    return 1;
}

static int plan_tostring(lua_State *L)
{
    char text[256];
    weft_plan plan = weft_check_plan(L, 1);
    lua_pushstring(L, weft_plan_describe(&plan, text, sizeof text));
    return 1;
}

/* ---- classes ---- */

static int refuse_newindex(lua_State *L)
{
    lua_getglobal(L, "tostring");
    lua_pushvalue(L, 2);
    lua_call(L, 1, 1);
    return luaL_error(L, "%s is immutable: cannot set '%s'", lua_tostring(L, lua_upvalueindex(1)), lua_tostring(L, -1));
}

void weft_value_class(lua_State *L, const char *tname, lua_CFunction index, lua_CFunction eq, lua_CFunction tostring)
{
    const luaL_Reg functions[] = {{"__index", index}, {"__tostring", tostring}, {eq != NULL ? "__eq" : NULL, eq}, {NULL, NULL}};
    if (luaL_newmetatable(L, tname)) {
        luaL_setfuncs(L, functions, 0);
        lua_pushstring(L, tname);
        lua_pushcclosure(L, refuse_newindex, 1);
        lua_setfield(L, -2, "__newindex");
        lua_pushstring(L, tname);
        lua_setfield(L, -2, "__metatable");
    }
    lua_pop(L, 1);
}

void weft_open_plan_values(lua_State *L)
{
    static const luaL_Reg functions[] = {{"axis", l_axis}, {"plan", l_plan}, {NULL, NULL}};
    weft_value_class(L, WEFT_AXIS, axis_index, axis_eq, axis_tostring);
    weft_value_class(L, WEFT_PLAN, plan_index, plan_eq, plan_tostring);
    luaL_setfuncs(L, functions, 0);
}

void weft_open_plan(lua_State *L)
{
    weft_open_plan_values(L);
    weft_open_layer_parallel(L);
    weft_open_layout(L);
    weft_open_parallel_config(L);
    weft_open_policy(L);
}
