/* bind/lua_evaluate.c - core.evaluate and weft.group_list: a piece of work that all ranks do together
 * and that may fail on any of them, which is what a prompt needs.
 *
 *   core.evaluate(fn, ...) -> true, results...  |  nil, error
 *                             on all ranks; a failure or Ctrl-C on one is one for all, with
 *                             error = {message = "rank 2: ...", rank =, code =} the same everywhere,
 *                             and the world goes on. Raises when the world is lost.
 *   core.alone(on)            this rank evaluates without the others: collectives raise until the
 *                             evaluation ends or core.alone(false)
 *   core.commit(fn)           all ranks meet, then each calls fn, which no abort or Ctrl-C
 *                             interrupts: either every rank comes to call it or none does
 *   core.attempt(fn, undo)    calls fn; when it fails, undo() first, which no abort interrupts
 *   core.take_groups()        -> the registered groups as a whole, leaving none: :restore() puts them
 *                             back (and lets go of what is registered by then), :close() is collective
 */
#include "bind/box.h"
#include "bind/core.h"
#include "bind/rank_thread.h"
#include "comm/group.h"

#define GROUP_LIST "weft.group_list"

/* The error is argument 1: tells the other ranks. */
static int report(lua_State *L)
{
    weft_rank *rank = weft_lua_rank(L);
    weft_status code;
    const char *message = weft_push_error_text(L, 1, &code);
    weft_world_abort(rank->world, rank->rank, code, message);
    return 0;
}

static void push_outcome(lua_State *L, const weft_outcome *outcome, int world_size)
{
    int plain = outcome->code == WEFT_INTERRUPTED || world_size == 1;
    if (plain) lua_pushstring(L, outcome->message);
    else weft_push_rank_message(L, outcome->rank, outcome->message, " :");
    weft_push_error(L, weft_status_name(outcome->code), lua_tostring(L, -1));
    lua_remove(L, -2);
    lua_pushinteger(L, outcome->rank);
    lua_setfield(L, -2, "rank");
}

static int l_evaluate(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    weft_rank *rank = weft_lua_rank(L);
    if (rank->rank == 0) weft_world_begin_evaluation(rank->world);
    int failed = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
    /* From here no Lua runs, so that an armed hook cannot strike before it is set anew. */
    if (failed) {
        lua_sethook(L, NULL, 0, 0);
        lua_pushcfunction(L, report);
        lua_pushvalue(L, -2);
        if (lua_pcall(L, 1, 0, 0) != 0)
            weft_world_abort(rank->world, rank->rank, WEFT_ABORTED, lua_isstring(L, -1) ? lua_tostring(L, -1) : "an error without a message");
        lua_settop(L, 0);
    }
    weft_outcome outcome;
    weft_status status = weft_world_settle(rank, &outcome);
    if (weft_lua_spawn(L) != NULL) weft_rank_thread_watch(L);
    weft_raise_if(L, status);
    if (outcome.rank >= 0) {
        lua_settop(L, 0);
        lua_pushnil(L);
        push_outcome(L, &outcome, rank->world_size);
        return 2;
    }
    lua_pushboolean(L, 1);
    lua_insert(L, 1);
    return lua_gettop(L);
}

static int l_alone(lua_State *L)
{
    weft_lua_rank(L)->alone = lua_toboolean(L, 1);
    return 0;
}

static int l_commit(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_Hook hook = lua_gethook(L);
    int mask = lua_gethookmask(L), count = lua_gethookcount(L);
    lua_sethook(L, NULL, 0, 0);
    weft_status status = weft_group_barrier(weft_lua_rank(L)->everyone);
    int failed = status == WEFT_OK && lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0) != 0;
    lua_sethook(L, hook, mask, count);
    weft_raise_if(L, status);
    if (failed) lua_error(L);
    return lua_gettop(L);
}

static int l_attempt(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    luaL_checktype(L, 2, LUA_TFUNCTION);
    lua_settop(L, 2);
    lua_pushvalue(L, 1);
    if (lua_pcall(L, 0, LUA_MULTRET, 0) == 0) return lua_gettop(L) - 2;
    lua_Hook hook = lua_gethook(L);
    int mask = lua_gethookmask(L), count = lua_gethookcount(L);
    lua_sethook(L, NULL, 0, 0);
    lua_pushvalue(L, 2);
    if (lua_pcall(L, 0, 0, 0) != 0) lua_replace(L, -2); /* worse than what came before it */
    lua_sethook(L, hook, mask, count);
    return lua_error(L);
}

/* ---- the groups as a whole ---- */

typedef struct {
    weft_group_list *list;
    int taken; /* list is ours, even when it is empty */
} list_box;

static list_box *check_list(lua_State *L)
{
    list_box *box = luaL_checkudata(L, 1, GROUP_LIST);
    luaL_argcheck(L, box->taken, 1, "these groups were restored or closed");
    box->taken = 0;
    return box;
}

static int l_restore(lua_State *L)
{
    weft_rank *rank = weft_lua_rank(L);
    list_box *box = check_list(L);
    weft_rank_put_groups(rank, box->list);
    return 0;
}

static int l_close_list(lua_State *L)
{
    weft_raise_if(L, weft_group_list_close(check_list(L)->list));
    return 0;
}

static int list_gc(lua_State *L)
{
    list_box *box = lua_touserdata(L, 1);
    if (box->taken) weft_group_list_free(box->list);
    box->taken = 0;
    return 0;
}

static int l_take_groups(lua_State *L)
{
    weft_rank *rank = weft_lua_rank(L);
    list_box *box = lua_newuserdata(L, sizeof *box);
    *box = (list_box){NULL, 0};
    luaL_getmetatable(L, GROUP_LIST);
    lua_setmetatable(L, -2);
    box->list = weft_rank_take_groups(rank);
    box->taken = 1;
    return 1;
}

void weft_open_evaluate(lua_State *L)
{
    static const luaL_Reg functions[] = {
        {"evaluate", l_evaluate}, {"alone", l_alone}, {"commit", l_commit}, {"attempt", l_attempt}, {"take_groups", l_take_groups}, {NULL, NULL}};
    static const luaL_Reg methods[] = {{"restore", l_restore}, {"close", l_close_list}, {NULL, NULL}};
    luaL_newmetatable(L, GROUP_LIST);
    lua_newtable(L);
    luaL_setfuncs(L, methods, 0);
    lua_pushvalue(L, -1);
    lua_setfield(L, -3, "__methods");
    lua_setfield(L, -2, "__index");
    lua_pushcfunction(L, list_gc);
    lua_setfield(L, -2, "__gc");
    lua_pushliteral(L, GROUP_LIST);
    lua_setfield(L, -2, "__metatable");
    lua_pop(L, 1);
    luaL_setfuncs(L, functions, 0);
}
