/* bind/lua_rank.c - what a rank knows of itself and its world.
 *
 *   core.rank() -> {rank =, world_size =, threads =}
 *   core.publish(text)     rank 0: one record to all others
 *   core.receive() -> text the others: waits for the next one, however long
 *   core.abort(message)    ends all ranks with this message; raises
 *   core.interrupted()     true once after a Ctrl-C, under on_interrupt = "flag"; under "evaluate" after
 *                          one between evaluations, which then does not end the next one
 *   core.begin_step()      counts a step, starts the arena's step
 *   core.fault(place)      where WEFT_FAULT may strike */
#include "bind/box.h"
#include "bind/rank_thread.h"

static int l_rank(lua_State *L)
{
    const weft_rank *rank = weft_lua_rank(L);
    lua_createtable(L, 0, 3);
    lua_pushinteger(L, rank->rank);
    lua_setfield(L, -2, "rank");
    lua_pushinteger(L, rank->world_size);
    lua_setfield(L, -2, "world_size");
    lua_pushinteger(L, weft_pool_threads(rank->pool));
    lua_setfield(L, -2, "threads");
    return 1;
}

static int l_publish(lua_State *L)
{
    size_t length;
    const char *text = luaL_checklstring(L, 1, &length);
    weft_raise_if(L, weft_world_publish(weft_lua_rank(L), text, length));
    return 0;
}

static int l_receive(lua_State *L)
{
    const void *record = NULL;
    size_t bytes = 0;
    weft_raise_if(L, weft_world_receive(weft_lua_rank(L), &record, &bytes));
    lua_pushlstring(L, record, bytes);
    return 1;
}

static int l_abort(lua_State *L)
{
    const char *message = luaL_checkstring(L, 1);
    weft_rank *rank = weft_lua_rank(L);
    weft_world_abort(rank->world, rank->rank, WEFT_ABORTED, message);
    weft_push_error(L, "aborted", message);
    return lua_error(L);
}

static int l_interrupted(lua_State *L)
{
    weft_spawn *spawn = weft_lua_spawn(L);
    int waited = weft_world_forget_interrupt(weft_lua_rank(L)->world);
    lua_pushboolean(L, waited || (spawn != NULL && atomic_exchange(&spawn->interrupts, 0) != 0));
    return 1;
}

static int l_begin_step(lua_State *L)
{
    weft_raise_if(L, weft_rank_begin_step(weft_lua_rank(L)));
    return 0;
}

static int l_fault(lua_State *L)
{
    const char *place = luaL_checkstring(L, 1);
    weft_raise_if(L, weft_rank_fault(weft_lua_rank(L), place));
    return 0;
}

void weft_open_rank(lua_State *L)
{
    static const luaL_Reg functions[] = {
        {"rank", l_rank},   {"publish", l_publish},         {"receive", l_receive},       {"abort", l_abort},
        {"fault", l_fault}, {"interrupted", l_interrupted}, {"begin_step", l_begin_step}, {NULL, NULL},
    };
    luaL_setfuncs(L, functions, 0);
}
