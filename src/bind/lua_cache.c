/* bind/lua_cache.c - weft.block_pool: which blocks of the cache are in use. Rank 0 holds one.
 *
 *   core.block_pool{num_blocks=, block_tokens=}    .num_blocks .block_tokens .free_blocks
 *   pool:allocate(n [, list]) -> list with n ids more, or nil when there are not as many (none taken)
 *   pool:free(list)    pool:retain(list)
 *   pool:match(ids) -> blocks, tokens     committed blocks that hold the beginning of ids, retained;
 *                                         at least one token of ids stays to be computed
 *   pool:commit(blocks, ids [, count])    remembers the full blocks of a request, of whose ids the first
 *                                         `count` are in the cache (all of them)
 *   pool:stats() -> {num_blocks, used, free, cached, queried_tokens, hit_tokens, evictions, refusals} */
#include "cache/block_pool.h"

#include <string.h>

#include "bind/box.h"
#include "bind/core.h"
#include "bind/plan_args.h"
#include "bind/step_args.h"

#define BLOCK_POOL "weft.block_pool"

int32_t *weft_check_int32_list(lua_State *L, int index, const char *what, int64_t first, int64_t *count)
{
    if (index < 0) index = lua_gettop(L) + index + 1;
    if (!lua_istable(L, index)) luaL_error(L, "%s must be a list of integers, got %s", what, luaL_typename(L, index));
    int64_t length = (int64_t)lua_objlen(L, index) - (first - 1);
    if (length < 0) length = 0;
    int32_t *values = lua_newuserdata(L, (size_t)(length + 1) * sizeof *values);
    for (int64_t i = 0; i < length; i++) {
        lua_rawgeti(L, index, (int)(first + i));
        values[i] = weft_check_int(L, -1, what);
        lua_pop(L, 1);
    }
    *count = length;
    return values;
}

static weft_block_pool *check_pool(lua_State *L)
{
    return (weft_block_pool *)weft_box_check(L, 1, BLOCK_POOL); /* the object is the first member */
}

static int l_block_pool(lua_State *L)
{
    static const char *const names[] = {"num_blocks", "block_tokens", NULL};
    weft_check_keys(L, 1, "block_pool", names);
    int64_t num_blocks = weft_field_int(L, 1, "num_blocks", 1, INT32_MAX / 2);
    int64_t block_tokens = weft_field_int(L, 1, "block_tokens", 1, INT32_MAX);
    weft_object **slot = weft_box_new(L, BLOCK_POOL);
    weft_block_pool *pool = NULL;
    weft_raise_if(L, weft_block_pool_create(&pool, num_blocks, block_tokens));
    *slot = weft_block_pool_object(pool);
    return 1;
}

static int l_allocate(lua_State *L)
{
    weft_block_pool *pool = check_pool(L);
    lua_Number count = luaL_checknumber(L, 2);
    luaL_argcheck(L, count >= 0 && count <= INT32_MAX && count == (lua_Number)(int32_t)count, 2, "expected a number of blocks");
    lua_settop(L, 3);
    if (lua_isnil(L, 3)) {
        lua_createtable(L, (int)count, 0);
        lua_replace(L, 3);
    }
    luaL_checktype(L, 3, LUA_TTABLE);
    int length = (int)lua_objlen(L, 3);
    /* Room in the list first: once blocks are taken nothing may raise. */
    for (int i = 1; i <= (int)count; i++) {
        lua_pushinteger(L, 0);
        lua_rawseti(L, 3, length + i);
    }
    int32_t *ids = lua_newuserdata(L, ((size_t)count + 1) * sizeof *ids);
    int taken = weft_block_pool_allocate(pool, (int64_t)count, ids);
    for (int i = 1; i <= (int)count; i++) {
        if (taken) lua_pushinteger(L, ids[i - 1]);
        else lua_pushnil(L);
        lua_rawseti(L, 3, length + i);
    }
    if (taken) lua_settop(L, 3);
    else lua_pushnil(L);
    return 1;
}

static int l_free(lua_State *L)
{
    weft_block_pool *pool = check_pool(L);
    int64_t count;
    int32_t *ids = weft_check_int32_list(L, 2, "blocks", 1, &count);
    weft_raise_if(L, weft_block_pool_free(pool, ids, count));
    return 0;
}

static int l_retain(lua_State *L)
{
    weft_block_pool *pool = check_pool(L);
    int64_t count;
    int32_t *ids = weft_check_int32_list(L, 2, "blocks", 1, &count);
    weft_raise_if(L, weft_block_pool_retain(pool, ids, count));
    return 0;
}

static int l_match(lua_State *L)
{
    weft_block_pool *pool = check_pool(L);
    int64_t count;
    int32_t *ids = weft_check_int32_list(L, 2, "ids", 1, &count);
    int64_t room = count / weft_block_pool_block_tokens(pool);
    int32_t *blocks = lua_newuserdata(L, (size_t)(room + 1) * sizeof *blocks);
    lua_createtable(L, (int)room, 0);
    for (int64_t i = 1; i <= room; i++) {
        lua_pushinteger(L, 0);
        lua_rawseti(L, -2, (int)i);
    }
    int64_t found = weft_block_pool_match(pool, ids, count, blocks);
    for (int64_t i = 1; i <= room; i++) {
        if (i <= found) lua_pushinteger(L, blocks[i - 1]);
        else lua_pushnil(L);
        lua_rawseti(L, -2, (int)i);
    }
    lua_pushnumber(L, (lua_Number)(found * weft_block_pool_block_tokens(pool)));
    return 2;
}

static int l_commit(lua_State *L)
{
    weft_block_pool *pool = check_pool(L);
    int64_t num_blocks, count;
    lua_settop(L, 4);
    int32_t *blocks = weft_check_int32_list(L, 2, "blocks", 1, &num_blocks);
    int64_t first = weft_block_pool_committed(pool, blocks, num_blocks), done = first * weft_block_pool_block_tokens(pool);
    lua_Number limit = luaL_optnumber(L, 4, (lua_Number)done + INT32_MAX);
    luaL_argcheck(L, limit >= 0, 4, "expected a number of tokens");
    /* Only what is new crosses: a long request commits one block after another. */
    int32_t *ids = weft_check_int32_list(L, 3, "ids", done + 1, &count);
    if ((lua_Number)count > limit - (lua_Number)done) count = limit > (lua_Number)done ? (int64_t)(limit - (lua_Number)done) : 0;
    weft_raise_if(L, weft_block_pool_commit(pool, blocks, num_blocks, first, ids, count));
    return 0;
}

static void set_count(lua_State *L, const char *name, int64_t value)
{
    lua_pushnumber(L, (lua_Number)value);
    lua_setfield(L, -2, name);
}

static int l_stats(lua_State *L)
{
    weft_block_pool_stats stats = weft_block_pool_get_stats(check_pool(L));
    lua_createtable(L, 0, 8);
    set_count(L, "num_blocks", stats.num_blocks);
    set_count(L, "used", stats.used);
    set_count(L, "free", stats.free);
    set_count(L, "cached", stats.cached);
    set_count(L, "queried_tokens", stats.queried_tokens);
    set_count(L, "hit_tokens", stats.hit_tokens);
    set_count(L, "evictions", stats.evictions);
    set_count(L, "refusals", stats.refusals);
    return 1;
}

static int fields(lua_State *L)
{
    weft_block_pool *pool = check_pool(L);
    const char *name = luaL_checkstring(L, 2);
    weft_block_pool_stats stats = weft_block_pool_get_stats(pool);
    if (strcmp(name, "num_blocks") == 0) lua_pushnumber(L, (lua_Number)stats.num_blocks);
    else if (strcmp(name, "free_blocks") == 0) lua_pushnumber(L, (lua_Number)stats.free);
    else if (strcmp(name, "block_tokens") == 0) lua_pushnumber(L, (lua_Number)weft_block_pool_block_tokens(pool));
    else lua_pushnil(L);
    return 1;
}

void weft_open_cache(lua_State *L)
{
    static const luaL_Reg methods[] = {
        {"allocate", l_allocate}, {"free", l_free},   {"retain", l_retain}, {"match", l_match},
        {"commit", l_commit},     {"stats", l_stats}, {NULL, NULL},
    };
    weft_box_class(L, BLOCK_POOL, methods, fields, NULL);
    lua_pushcfunction(L, l_block_pool);
    lua_setfield(L, -2, "block_pool");
    weft_open_step(L);
}
