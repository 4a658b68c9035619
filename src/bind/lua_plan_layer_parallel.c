/* bind/lua_plan_layer_parallel.c - the policy in force, one per Lua state.
 *
 *   core.layer_parallel.init(default [, overrides])   overrides = { attention = plan,
 *                                                       layers = { [17] = { attention = plan }, ["0-3"] = ... } }
 *   core.layer_parallel.get([layer_type [, layer]])   -> plan
 *   core.layer_parallel.clear()                       back to the single rank
 * The table lives in the registry of the state, never in a C global. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bind/box.h"
#include "bind/plan_args.h"

#define PLANS_KEY "weft.layer_parallel.plans"

weft_layer_type weft_check_layer_type(lua_State *L, int index)
{
    weft_layer_type type = WEFT_LAYER_DEFAULT;
    const char *name = luaL_checkstring(L, index);
    if (!weft_layer_type_from_name(name, &type))
        luaL_error(L, "unknown layer type '%s' (known: default, attention, mlp, experts, embedding, lm_head)", name);
    return type;
}

void weft_check_layer_range(lua_State *L, int index, int *first, int *last)
{
    if (lua_type(L, index) == LUA_TNUMBER) {
        *first = *last = weft_check_int(L, index, "a key of layers");
        if (*first < 0) luaL_error(L, "layers are counted from 0, got %d", *first);
        return;
    }
    char end;
    if (lua_type(L, index) != LUA_TSTRING)
        luaL_error(L, "a key of layers is a layer number or a range \"a-b\", got %s", luaL_typename(L, index));
    const char *text = lua_tostring(L, index);
    if (strspn(text, "0123456789-") != strlen(text) || sscanf(text, "%8d-%8d%c", first, last, &end) != 2 || *first < 0)
        luaL_error(L, "a key of layers is a layer number or a range \"a-b\", got \"%s\"", text);
    if (*last < *first) luaL_error(L, "layers: the range \"%s\" runs backwards", text);
}

void weft_check_layer_overlap(lua_State *L, const void *entries, int count, size_t stride)
{
    for (int i = 1; i < count; i++) {
        const int *a = (const int *)((const char *)entries + (size_t)(i - 1) * stride);
        const int *b = (const int *)((const char *)entries + (size_t)i * stride);
        int same_entry = a[0] == b[0] && a[1] == b[1] && a[2] != b[2];
        if (!same_entry && b[0] <= a[1]) luaL_error(L, "layers: %d-%d and %d-%d overlap", a[0], a[1], b[0], b[1]);
    }
}

static int compare_overrides(const void *left, const void *right)
{
    const weft_plan_override *a = left, *b = right;
    if (a->first_layer != b->first_layer) return a->first_layer < b->first_layer ? -1 : 1;
    if (a->last_layer != b->last_layer) return a->last_layer < b->last_layer ? -1 : 1;
    return (int)a->type - (int)b->type;
}

static int count_entries(lua_State *L, int index)
{
    int count = 0;
    lua_pushnil(L);
    while (lua_next(L, index) != 0) {
        count++;
        lua_pop(L, 1);
    }
    return count;
}

/* Each entry of the table `layers` on top: its plans, in the fixed order of the types. */
static void read_layers(lua_State *L, weft_plan_table *table)
{
    int layers = lua_gettop(L), count = 0;
    lua_pushnil(L);
    while (lua_next(L, layers) != 0) { /* key entry */
        int first, last, entry = lua_gettop(L), before = count;
        weft_check_layer_range(L, entry - 1, &first, &last);
        static const char *const names[] = {"attention", "mlp", "experts", NULL};
        weft_check_keys(L, entry, "an entry of layers", names);
        for (int n = 0; names[n] != NULL; n++) {
            weft_plan_override *o = &table->overrides[count];
            if (!weft_opt_plan_field(L, entry, names[n], &o->plan)) continue;
            weft_layer_type_from_name(names[n], &o->type);
            o->first_layer = first;
            o->last_layer = last;
            count++;
        }
        if (count == before) luaL_error(L, "layers: the entry of %d-%d holds no plan", first, last);
        lua_pop(L, 1);
    }
    qsort(table->overrides, (size_t)count, sizeof *table->overrides, compare_overrides);
    weft_check_layer_overlap(L, table->overrides, count, sizeof *table->overrides);
    table->num_overrides = count;
}

static weft_plan_table *new_table(lua_State *L, int overrides)
{
    size_t bytes = weft_plan_table_bytes(overrides);
    weft_plan_table *table = lua_newuserdata(L, bytes);
    memset(table, 0, bytes);
    return table;
}

static int l_init(lua_State *L)
{
    static const char *const names[] = {"attention", "mlp", "experts", "embedding", "lm_head", "layers", NULL};
    weft_plan default_plan = weft_check_plan(L, 1);
    int layers = 0;
    lua_settop(L, 2);
    if (!lua_isnil(L, 2)) {
        weft_check_keys(L, 2, "the overrides", names);
        lua_getfield(L, 2, "layers");
        if (!lua_isnil(L, 3)) {
            if (!lua_istable(L, 3)) luaL_error(L, "layers must be a table, got %s", luaL_typename(L, 3));
            layers = count_entries(L, 3);
        }
    }
    lua_settop(L, 3);
    weft_plan_table *table = new_table(L, layers * 3); /* default overrides layers table */
    table->default_plan = default_plan;
    for (int n = 0; !lua_isnil(L, 2) && n < 5; n++) {
        weft_layer_type type = WEFT_LAYER_DEFAULT;
        weft_layer_type_from_name(names[n], &type);
        table->has_type[type] = (unsigned char)weft_opt_plan_field(L, 2, names[n], &table->types[type]);
    }
    if (layers > 0) {
        lua_pushvalue(L, 3);
        read_layers(L, table);
        lua_pop(L, 1);
    }
    lua_setfield(L, LUA_REGISTRYINDEX, PLANS_KEY);
    return 0;
}

void weft_install_plans(lua_State *L, const weft_plan_table *table)
{
    weft_plan_table *copy = new_table(L, table->num_overrides);
    memcpy(copy, table, weft_plan_table_bytes(table->num_overrides));
    lua_setfield(L, LUA_REGISTRYINDEX, PLANS_KEY);
}

weft_plan weft_layer_plan(lua_State *L, weft_layer_type type, int layer)
{
    lua_getfield(L, LUA_REGISTRYINDEX, PLANS_KEY);
    const weft_plan_table *table = lua_touserdata(L, -1);
    weft_plan plan = table == NULL ? weft_plan_single_rank() : weft_plan_table_get(table, type, layer);
    lua_pop(L, 1);
    return plan;
}

static int l_get(lua_State *L)
{
    weft_layer_type type = lua_isnoneornil(L, 1) ? WEFT_LAYER_DEFAULT : weft_check_layer_type(L, 1);
    int layer = -1;
    if (!lua_isnoneornil(L, 2)) {
        layer = weft_check_int(L, 2, "layer");
        if (layer < 0) luaL_error(L, "layers are counted from 0, got %d", layer);
    }
    weft_push_plan(L, weft_layer_plan(L, type, layer));
    return 1;
}

static int l_clear(lua_State *L)
{
    lua_pushnil(L);
    lua_setfield(L, LUA_REGISTRYINDEX, PLANS_KEY);
    return 0;
}

void weft_open_layer_parallel(lua_State *L)
{
    static const luaL_Reg functions[] = {{"init", l_init}, {"get", l_get}, {"clear", l_clear}, {NULL, NULL}};
    lua_newtable(L);
    luaL_setfuncs(L, functions, 0);
    lua_setfield(L, -2, "layer_parallel");
}
