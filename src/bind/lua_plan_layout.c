/* bind/lua_plan_layout.c - core.layout: the arithmetic of shards, for specs and scripts.
 *
 *   owner(p, n [, i])  local_index(p, n [, i])  global(l, d, n [, i])  local_len(length, d, n [, i])
 *       n ranks of the context group, d one of them, strips of i tokens
 *   slot{position=, size=, rank= [, interleave=], page=, table={...}}   -1: another rank's
 *   heads{num_heads=, num_kv_heads=, plan=}   vocab{vocab_size=, axis=}   shard(what, total, axis)
 * Positions, ranks and blocks count from 0. */
#include <limits.h>

#include "bind/box.h"
#include "bind/plan_args.h"
#include "plan/layout.h"

static int64_t check_position(lua_State *L, int index, const char *what)
{
    double value = luaL_checknumber(L, index);
    if (!(value >= 0 && value < 9007199254740992.0) || value != (double)(int64_t)value)
        luaL_error(L, "%s must be a whole number from 0, got %f", what, value);
    return (int64_t)value;
}

/* size at index, rank given, interleave behind it. */
static weft_context_layout check_context(lua_State *L, int index, int rank)
{
    weft_axis axis;
    int size = weft_check_int(L, index, "size");
    int interleave = lua_isnoneornil(L, index + 1) ? 1 : weft_check_int(L, index + 1, "interleave");
    weft_raise_if(L, weft_axis_make(&axis, size, rank, WEFT_GROUP_CONTEXT));
    if (interleave < 1) luaL_error(L, "interleave must be positive, got %d", interleave);
    return (weft_context_layout){size, rank, interleave};
}

static int l_owner(lua_State *L)
{
    int64_t p = check_position(L, 1, "position");
    lua_pushinteger(L, weft_context_owner(check_context(L, 2, 0), p));
    return 1;
}

static int l_local_index(lua_State *L)
{
    int64_t p = check_position(L, 1, "position");
    lua_pushnumber(L, (lua_Number)weft_context_local(check_context(L, 2, 0), p));
    return 1;
}

static int l_global(lua_State *L)
{
    int64_t l = check_position(L, 1, "local index");
    int rank = weft_check_int(L, 2, "rank");
    lua_pushnumber(L, (lua_Number)weft_context_global(check_context(L, 3, rank), l));
    return 1;
}

static int l_local_len(lua_State *L)
{
    int64_t length = check_position(L, 1, "length");
    int rank = weft_check_int(L, 2, "rank");
    lua_pushnumber(L, (lua_Number)weft_context_local_len(check_context(L, 3, rank), length));
    return 1;
}

static int l_slot(lua_State *L)
{
    static const char *const names[] = {"position", "size", "rank", "interleave", "page", "table", NULL};
    weft_check_keys(L, 1, "slot", names);
    int64_t p = weft_field_int(L, 1, "position", 0, (int64_t)1 << 52);
    int size = (int)weft_field_int(L, 1, "size", 1, INT_MAX);
    int rank = (int)weft_field_int(L, 1, "rank", 0, size - 1);
    int interleave = (int)weft_field_int_or(L, 1, "interleave", 1, INT_MAX, 1);
    int64_t page = weft_field_int(L, 1, "page", 1, INT_MAX);
    if (page % interleave != 0)
        luaL_error(L, "page (%d tokens) must be a multiple of interleave (%d)", (int)page, interleave);
    lua_getfield(L, 1, "table");
    luaL_checktype(L, -1, LUA_TTABLE);
    int blocks = lua_gettop(L);
    weft_context_layout context = {size, rank, interleave};
    int64_t index = p / (page * size);
    if (index >= (int64_t)lua_objlen(L, blocks))
        luaL_error(L, "position %d lies in block %d of a table of %d", (int)p, (int)index, (int)lua_objlen(L, blocks));
    lua_rawgeti(L, blocks, (int)index + 1);
    /* The one block that p lies in stands for the whole table. */
    int32_t block = (int32_t)weft_check_int(L, -1, "a block of the table");
    int64_t slot = weft_context_slot(context, page, &block, p - index * page * size);
    lua_pushnumber(L, (lua_Number)slot);
    return 1;
}

static void set_int(lua_State *L, const char *name, int64_t value)
{
    lua_pushnumber(L, (lua_Number)value);
    lua_setfield(L, -2, name);
}

static int l_heads(lua_State *L)
{
    static const char *const names[] = {"num_heads", "num_kv_heads", "plan", NULL};
    weft_plan plan;
    weft_head_layout h;
    weft_check_keys(L, 1, "heads", names);
    int num_heads = (int)weft_field_int(L, 1, "num_heads", 1, INT_MAX);
    int num_kv_heads = (int)weft_field_int_or(L, 1, "num_kv_heads", 1, INT_MAX, num_heads);
    if (!weft_opt_plan_field(L, 1, "plan", &plan)) plan = weft_layer_plan(L, WEFT_LAYER_ATTENTION, -1);
    weft_raise_if(L, weft_head_layout_make(&h, num_heads, num_kv_heads, &plan));
    lua_createtable(L, 0, 7);
    set_int(L, "num_heads", h.num_heads);
    set_int(L, "num_kv_heads", h.num_kv_heads);
    set_int(L, "num_kv_head_replicas", h.num_kv_head_replicas);
    set_int(L, "first_head", h.first_head);
    set_int(L, "first_kv_head", h.first_kv_head);
    set_int(L, "output_num_heads", h.output_num_heads);
    set_int(L, "output_first_head", h.output_first_head);
    return 1;
}

static int l_vocab(lua_State *L)
{
    static const char *const names[] = {"vocab_size", "axis", NULL};
    weft_check_keys(L, 1, "vocab", names);
    int64_t size = weft_field_int(L, 1, "vocab_size", 1, (int64_t)1 << 40);
    lua_getfield(L, 1, "axis");
    weft_axis axis = lua_isnil(L, -1) ? weft_layer_plan(L, WEFT_LAYER_DEFAULT, -1).output : weft_check_axis(L, -1);
    weft_vocab_layout v = weft_vocab_layout_make(size, axis);
    lua_createtable(L, 0, 4);
    set_int(L, "padded_vocab", v.padded_vocab);
    set_int(L, "offset", v.offset);
    set_int(L, "count", v.count);
    set_int(L, "real", v.real);
    return 1;
}

static int l_shard(lua_State *L)
{
    weft_shard shard;
    const char *what = luaL_checkstring(L, 1);
    int64_t total = check_position(L, 2, what);
    weft_raise_if(L, weft_shard_even(&shard, what, total, weft_check_axis(L, 3)));
    lua_createtable(L, 0, 2);
    set_int(L, "offset", shard.offset);
    set_int(L, "count", shard.count);
    return 1;
}

void weft_open_layout(lua_State *L)
{
    static const luaL_Reg functions[] = {
        {"owner", l_owner}, {"local_index", l_local_index}, {"global", l_global}, {"local_len", l_local_len},
        {"slot", l_slot},   {"heads", l_heads},             {"vocab", l_vocab},   {"shard", l_shard},
        {NULL, NULL},
    };
    lua_newtable(L);
    luaL_setfuncs(L, functions, 0);
    lua_setfield(L, -2, "layout");
}
