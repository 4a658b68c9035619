/* bind/lua_plan_policy.c - weft.policy: how a model is cut, written as sizes.
 *
 *   core.policy{tensor=8, attention={tensor=2 [, context=, interleave=, exchange=]}, experts={expert=4, tensor=2},
 *               mlp={tensor=4}, layers={[17]={attention={...}}, ["0-3"]={...}},
 *               interleave=1, exchange="ag_rs"|"a2a", block_size=16}
 *   :lower(rank) -> default plan, overrides          what layer_parallel.init takes
 *   :install([rank])                                 puts the plans in force in this Lua state
 *   :get([layer_type [, layer [, rank]]]) -> plan    rank: default this state's
 *   :groups() -> {{type=, world_size=, rows={{...}}}, ...}   :sizes(layer_type [, layer]) -> table
 *   :validate_model{...}   .num_ranks .tensor .block_size .interleave .exchange .context_lcm */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "bind/box.h"
#include "bind/plan_args.h"

static weft_policy *check_policy(lua_State *L, int index)
{
    return (weft_policy *)weft_box_check(L, index, WEFT_POLICY);
}

/* ---- reading the table ---- */

static int check_exchange(lua_State *L, int index, int fallback)
{
    const char *name = weft_field_string_or(L, index, "exchange", NULL);
    if (name == NULL) return fallback;
    if (strcmp(name, "a2a") == 0) return 1;
    if (strcmp(name, "ag_rs") != 0) luaL_error(L, "exchange must be 'ag_rs' or 'a2a', got '%s'", name);
    return 0;
}

/* The sizes of a layer type, when table[name] is there. */
static int read_sizes(lua_State *L, int table, weft_layer_type type, weft_layer_sizes *out)
{
    static const char *const attention[] = {"tensor", "context", "interleave", "exchange", NULL};
    static const char *const experts[] = {"expert", "tensor", NULL}, *const plain[] = {"tensor", NULL};
    const char *name = weft_layer_type_name(type);
    lua_getfield(L, table, name);
    int given = !lua_isnil(L, -1), at = lua_gettop(L);
    if (given) {
        if (!lua_istable(L, at)) luaL_error(L, "%s must be a table such as {tensor = 2}, got %s", name, luaL_typename(L, at));
        weft_check_keys(L, at, name, type == WEFT_LAYER_ATTENTION ? attention : type == WEFT_LAYER_EXPERTS ? experts : plain);
        out->tensor = (int)weft_field_int_or(L, at, "tensor", 1, INT_MAX, 0);
        out->context = (int)weft_field_int_or(L, at, "context", 1, INT_MAX, 0);
        out->expert = (int)weft_field_int_or(L, at, "expert", 1, INT_MAX, 0);
        out->interleave = (int)weft_field_int_or(L, at, "interleave", 1, INT_MAX, 0);
        out->exchange_a2a = check_exchange(L, at, -1);
    }
    lua_pop(L, 1);
    return given;
}

/* Entries in a block that Lua owns; `used` grows as they are read. */
typedef struct {
    weft_policy_entry *entries;
    int used;
} entry_list;

static void read_types(lua_State *L, int table, int first, int last, weft_layer_type most, entry_list *list)
{
    for (int type = WEFT_LAYER_ATTENTION; type <= (int)most; type++) {
        weft_policy_entry entry = {.first_layer = first, .last_layer = last, .type = (weft_layer_type)type};
        if (read_sizes(L, table, entry.type, &entry.sizes)) list->entries[list->used++] = entry;
    }
}

static void read_layers(lua_State *L, int layers, entry_list *list)
{
    static const char *const names[] = {"attention", "mlp", "experts", NULL};
    lua_pushnil(L);
    while (lua_next(L, layers) != 0) { /* key entry */
        int first, last, entry = lua_gettop(L), before = list->used;
        weft_check_layer_range(L, entry - 1, &first, &last);
        weft_check_keys(L, entry, "an entry of layers", names);
        read_types(L, entry, first, last, WEFT_LAYER_EXPERTS, list);
        if (list->used == before) luaL_error(L, "layers: the entry of %d-%d holds no sizes", first, last);
        lua_pop(L, 1);
    }
}

static int l_policy(lua_State *L)
{
    static const char *const names[] = {"tensor", "attention", "mlp", "experts", "embedding", "lm_head",
                                        "layers", "interleave", "exchange", "block_size", NULL};
    int layers = 0;
    lua_settop(L, 1);
    weft_check_keys(L, 1, "a policy", names);
    lua_getfield(L, 1, "layers"); /* policy layers */
    if (!lua_isnil(L, 2)) {
        if (!lua_istable(L, 2)) luaL_error(L, "layers must be a table, got %s", luaL_typename(L, 2));
        for (lua_pushnil(L); lua_next(L, 2) != 0; lua_pop(L, 1)) layers++;
    }
    size_t bytes = (size_t)(WEFT_LAYER_TYPE_COUNT + 3 * layers) * sizeof(weft_policy_entry);
    entry_list list = {lua_newuserdata(L, bytes), 0}; /* policy layers entries */
    read_types(L, 1, -1, -1, WEFT_LAYER_LM_HEAD, &list);
    if (layers > 0) read_layers(L, 2, &list);
    weft_policy_spec spec = {
        .tensor = (int)weft_field_int_or(L, 1, "tensor", 1, INT_MAX, 1),
        .block_size = (int)weft_field_int_or(L, 1, "block_size", 1, INT_MAX, 0),
        .interleave = (int)weft_field_int_or(L, 1, "interleave", 1, INT_MAX, 0),
        .exchange_a2a = check_exchange(L, 1, 0),
        .entries = list.entries,
        .num_entries = list.used,
    };
    weft_object **slot = weft_box_new(L, WEFT_POLICY);
    weft_policy *policy = NULL;
    weft_raise_if(L, weft_policy_create(&policy, &spec));
    *slot = &policy->object;
    return 1;
}

/* ---- plans of a rank ---- */

/* The rank given at index, or the one of this Lua state. */
static int opt_rank(lua_State *L, int index)
{
    return lua_isnoneornil(L, index) ? weft_lua_rank(L)->rank : weft_check_int(L, index, "rank");
}

static int opt_layer(lua_State *L, int index)
{
    if (lua_isnoneornil(L, index)) return -1;
    int layer = weft_check_int(L, index, "layer");
    if (layer < 0) luaL_error(L, "layers are counted from 0, got %d", layer);
    return layer;
}

static int l_get(lua_State *L)
{
    weft_policy *policy = check_policy(L, 1);
    weft_layer_type type = lua_isnoneornil(L, 2) ? WEFT_LAYER_DEFAULT : weft_check_layer_type(L, 2);
    int layer = opt_layer(L, 3);
    weft_plan plan;
    weft_raise_if(L, weft_policy_plan(policy, type, layer, opt_rank(L, 4), &plan));
    weft_push_plan(L, plan);
    return 1;
}

static void set_layer_plan(lua_State *L, const weft_plan_override *o)
{
    if (o->first_layer == o->last_layer) lua_pushinteger(L, o->first_layer);
    else lua_pushfstring(L, "%d-%d", o->first_layer, o->last_layer);
    lua_pushvalue(L, -1);
    lua_rawget(L, -3); /* layers key entry-or-nil */
    if (lua_isnil(L, -1)) {
        lua_pop(L, 1);
        lua_newtable(L); /* layers key entry */
        lua_pushvalue(L, -2);
        lua_pushvalue(L, -2);
        lua_rawset(L, -5);
    }
    weft_push_plan(L, o->plan);
    lua_setfield(L, -2, weft_layer_type_name(o->type));
    lua_pop(L, 2);
}

static int protected_overrides(lua_State *L)
{
    const weft_plan_table *table = lua_touserdata(L, 1);
    weft_push_plan(L, table->default_plan);
    lua_newtable(L);
    for (int type = 0; type < WEFT_LAYER_TYPE_COUNT; type++) {
        if (!table->has_type[type]) continue;
        weft_push_plan(L, table->types[type]);
        lua_setfield(L, -2, weft_layer_type_name((weft_layer_type)type));
    }
    if (table->num_overrides > 0) {
        lua_newtable(L); /* default overrides layers */
        for (int i = 0; i < table->num_overrides; i++) set_layer_plan(L, &table->overrides[i]);
        lua_setfield(L, -2, "layers");
    }
    return 2;
}

static int protected_install(lua_State *L)
{
    weft_install_plans(L, lua_touserdata(L, 1));
    return 0;
}

/* Runs fn on the lowered plans, protected so that their block is freed whatever happens. */
static void with_lowered(lua_State *L, weft_policy *policy, int rank, lua_CFunction fn, int results)
{
    weft_plan_table *table = NULL;
    lua_pushcfunction(L, fn);
    weft_raise_if(L, weft_policy_lower(policy, rank, &table));
    lua_pushlightuserdata(L, table);
    int failed = lua_pcall(L, 1, results, 0);
    free(table);
    if (failed) lua_error(L);
}

static int l_lower(lua_State *L)
{
    weft_policy *policy = check_policy(L, 1);
    with_lowered(L, policy, opt_rank(L, 2), protected_overrides, 2);
    return 2;
}

static int l_install(lua_State *L)
{
    weft_policy *policy = check_policy(L, 1);
    with_lowered(L, policy, opt_rank(L, 2), protected_install, 0);
    lua_settop(L, 1);
    return 1;
}

/* ---- groups, sizes, checks ---- */

typedef struct {
    weft_policy_group *groups;
    int count;
} group_list;

static int protected_groups(lua_State *L)
{
    const group_list *list = lua_touserdata(L, 1);
    lua_createtable(L, list->count, 0);
    for (int i = 0; i < list->count; i++) {
        const weft_policy_group *group = &list->groups[i];
        lua_createtable(L, 0, 3);
        lua_pushstring(L, weft_group_type_name(group->type));
        lua_setfield(L, -2, "type");
        lua_pushinteger(L, group->rows.row_size);
        lua_setfield(L, -2, "world_size");
        if (weft_try_push_rows(L, &group->rows) != 0) return lua_error(L);
        lua_setfield(L, -2, "rows");
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int l_groups(lua_State *L)
{
    group_list list = {0};
    weft_policy *policy = check_policy(L, 1);
    lua_pushcfunction(L, protected_groups);
    weft_raise_if(L, weft_policy_groups(policy, &list.groups, &list.count));
    lua_pushlightuserdata(L, &list);
    int failed = lua_pcall(L, 1, 1, 0);
    weft_policy_groups_free(list.groups, list.count);
    if (failed) lua_error(L);
    return 1;
}

static int l_sizes(lua_State *L)
{
    weft_policy *policy = check_policy(L, 1);
    weft_layer_type type = weft_check_layer_type(L, 2);
    weft_plan plan;
    weft_raise_if(L, weft_policy_plan(policy, type, opt_layer(L, 3), 0, &plan));
    lua_createtable(L, 0, 5);
    lua_pushinteger(L, plan.input.world_size);
    lua_setfield(L, -2, "tensor");
    lua_pushinteger(L, plan.context.world_size);
    lua_setfield(L, -2, "context");
    lua_pushinteger(L, plan.expert.world_size);
    lua_setfield(L, -2, "expert");
    lua_pushinteger(L, plan.interleave);
    lua_setfield(L, -2, "interleave");
    lua_pushstring(L, plan.exchange_a2a ? "a2a" : "ag_rs");
    lua_setfield(L, -2, "exchange");
    return 1;
}

static int l_validate_model(lua_State *L)
{
    weft_policy *policy = check_policy(L, 1);
    weft_model_numbers model = weft_check_model_numbers(L, 2);
    weft_raise_if(L, weft_policy_check_model(policy, &model));
    lua_settop(L, 1);
    return 1;
}

static int fields(lua_State *L)
{
    weft_policy *policy = check_policy(L, 1);
    const char *name = luaL_checkstring(L, 2);
    if (strcmp(name, "num_ranks") == 0 || strcmp(name, "tensor") == 0) lua_pushinteger(L, policy->tensor);
    else if (strcmp(name, "block_size") == 0) lua_pushinteger(L, policy->block_size);
    else if (strcmp(name, "interleave") == 0) lua_pushinteger(L, policy->interleave);
    else if (strcmp(name, "exchange") == 0) lua_pushstring(L, policy->exchange_a2a ? "a2a" : "ag_rs");
    else if (strcmp(name, "context_lcm") == 0) lua_pushinteger(L, weft_policy_context_lcm(policy));
    else lua_pushnil(L);
    return 1;
}

static int to_string(lua_State *L)
{
    char text[1024];
    weft_policy *policy = (weft_policy *)weft_box_test(L, 1, WEFT_POLICY);
    if (policy == NULL) lua_pushliteral(L, "weft.policy (closed)");
    else lua_pushstring(L, weft_policy_describe(policy, text, sizeof text));
    return 1;
}

void weft_open_policy(lua_State *L)
{
    static const luaL_Reg methods[] = {
        {"lower", l_lower}, {"install", l_install}, {"get", l_get}, {"groups", l_groups},
        {"sizes", l_sizes}, {"validate_model", l_validate_model}, {NULL, NULL},
    };
    weft_box_class(L, WEFT_POLICY, methods, fields, to_string);
    lua_pushcfunction(L, l_policy);
    lua_setfield(L, -2, "policy");
}
