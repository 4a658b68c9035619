/* bind/rank_thread.c - what a rank's thread does: opens a Lua state, makes its rank, runs the
 * function, packs what it gave or raised.
 *
 * A count hook looks at the abort flag every 10000 instructions, so that a rank in a Lua loop stops
 * too. Loops that LuaJIT has compiled never look at hooks: they stop at their next call into weft. */
#include "bind/rank_thread.h"

#include <lauxlib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bind/box.h"
#include "bind/core.h"
#include "bind/state.h"
#include "bind/value.h"

#define SPAWN_KEY "weft.spawn"

enum { HOOK_INSTRUCTIONS = 10000 };

weft_spawn *weft_lua_spawn(lua_State *L)
{
    lua_getfield(L, LUA_REGISTRYINDEX, SPAWN_KEY);
    weft_rank_thread *thread = lua_touserdata(L, -1);
    lua_pop(L, 1);
    return thread != NULL ? thread->spawn : NULL;
}

static void watch_abort(lua_State *L, lua_Debug *activation)
{
    (void)activation;
    weft_status status = weft_world_check(weft_lua_spawn(L)->world);
    if (status == WEFT_OK) return;
    lua_sethook(L, watch_abort, LUA_MASKCOUNT, 1); /* a pcall may swallow this one; the next comes at once */
    weft_raise_if(L, status);
}

void weft_rank_thread_watch(lua_State *L)
{
    lua_sethook(L, watch_abort, LUA_MASKCOUNT, HOOK_INSTRUCTIONS);
}

/* Ranks other than 0 have no standard output: "[rank 2] ..." on standard error, or nothing. */
static int l_print(lua_State *L)
{
    weft_rank_thread *thread = lua_touserdata(L, lua_upvalueindex(1));
    int count = lua_gettop(L);
    if (!thread->spawn->verbose) return 0;
    lua_getglobal(L, "tostring");
    int tostring = count + 1;
    lua_pushfstring(L, "[rank %d]", thread->rank);
    for (int i = 1; i <= count; i++) {
        lua_pushstring(L, i == 1 ? " " : "\t");
        lua_pushvalue(L, tostring);
        lua_pushvalue(L, i);
        lua_call(L, 1, 1);
        if (!lua_isstring(L, -1)) return luaL_error(L, "'tostring' must return a string to 'print'");
        lua_concat(L, 3);
    }
    lua_pushliteral(L, "\n");
    lua_concat(L, 2);
    size_t length;
    const char *text = lua_tolstring(L, -1, &length);
    fwrite(text, 1, length, stderr);
    return 0;
}

/* The process belongs to all ranks: a request to end it becomes an error that ends them all. */
static int l_exit(lua_State *L)
{
    int code = 0;
    if (lua_isboolean(L, 1)) code = lua_toboolean(L, 1) ? 0 : 1;
    else code = luaL_optint(L, 1, 0);
    char text[64];
    snprintf(text, sizeof text, "os.exit(%d) was called", code);
    weft_push_error(L, "exit", text);
    lua_pushinteger(L, code);
    lua_setfield(L, -2, "exit_code");
    return lua_error(L);
}

static void replace_globals(lua_State *L, weft_rank_thread *thread)
{
    if (thread->rank != 0) {
        lua_pushlightuserdata(L, thread);
        lua_pushcclosure(L, l_print, 1);
        lua_setglobal(L, "print");
        /* Rank 0 alone has standard input and output. */
        if (luaL_dostring(L, "local null = io.open('/dev/null', 'r+'); io.output(null); io.input(null); io.stdout = null; io.stdin = null"))
            lua_error(L);
    }
    lua_getglobal(L, "os");
    lua_pushcfunction(L, l_exit);
    lua_setfield(L, -2, "exit");
    lua_pop(L, 1);
}

/* The caller's package paths first; what this state found by itself stays behind them. */
static const char *set_path(lua_State *L, const char *name, const char *cursor)
{
    lua_getglobal(L, "package");
    cursor = weft_unpack(L, cursor);
    lua_pushliteral(L, ";");
    lua_getfield(L, -3, name);
    lua_concat(L, 3);
    lua_setfield(L, -2, name);
    lua_pop(L, 1);
    return cursor;
}

/* Pushes the function to run. */
static const char *push_function(lua_State *L, const weft_spawn *spawn, const char *cursor)
{
    if (!spawn->by_name) return weft_unpack(L, cursor);
    cursor = weft_unpack(L, cursor); /* module */
    cursor = weft_unpack(L, cursor); /* name */
    lua_getglobal(L, "require");
    lua_pushvalue(L, -3);
    lua_call(L, 1, 1);
    if (!lua_istable(L, -1)) luaL_error(L, "module '%s' is a %s, not a table of functions", lua_tostring(L, -3), luaL_typename(L, -1));
    lua_getfield(L, -1, lua_tostring(L, -2));
    if (!lua_isfunction(L, -1)) luaL_error(L, "module '%s' has no function '%s'", lua_tostring(L, -4), lua_tostring(L, -3));
    lua_replace(L, -4);
    lua_pop(L, 2);
    return cursor;
}

static int traceback(lua_State *L)
{
    const char *debug = getenv("WEFT_DEBUG");
    if (lua_isstring(L, 1) && debug != NULL && *debug == '1') luaL_traceback(L, L, lua_tostring(L, 1), 1);
    return 1;
}

/* Hands the bytes out of the state: they outlive it. */
static char *take(weft_packed *packed)
{
    char *bytes = packed->bytes;
    *packed = (weft_packed){NULL, 0, 0};
    return bytes;
}

static int run(lua_State *L)
{
    weft_rank_thread *thread = lua_touserdata(L, 1);
    weft_spawn *spawn = thread->spawn;
    lua_settop(L, 0);
    lua_pushlightuserdata(L, thread);
    lua_setfield(L, LUA_REGISTRYINDEX, SPAWN_KEY);
    const char *cursor = set_path(L, "path", spawn->job);
    cursor = set_path(L, "cpath", cursor);
    weft_rank *rank = NULL;
    weft_raise_if(L, weft_rank_create(&rank, spawn->world, thread->rank));
    weft_lua_set_rank(L, rank);
    replace_globals(L, thread);
    lua_getglobal(L, "require"); /* the classes of copied values */
    lua_pushliteral(L, "weft.core");
    lua_call(L, 1, 0);
    cursor = weft_unpack(L, cursor);
    lua_setglobal(L, "arg");
    cursor = weft_unpack(L, cursor); /* whether `weft` is at hand */
    if (lua_toboolean(L, -1)) {
        lua_getglobal(L, "require");
        lua_pushliteral(L, "weft");
        lua_call(L, 1, 1);
        lua_setglobal(L, "weft");
    }
    lua_pop(L, 1);

    lua_pushcfunction(L, traceback);
    cursor = push_function(L, spawn, cursor);
    luaL_checkstack(L, spawn->num_args + 4, "arguments");
    for (int i = 0; i < spawn->num_args; i++) cursor = weft_unpack(L, cursor);
    weft_rank_thread_watch(L);
    int failed = lua_pcall(L, spawn->num_args, 1, 1);
    lua_sethook(L, NULL, 0, 0);
    if (failed) return lua_error(L);
    weft_packed *packed = weft_packed_new(L);
    weft_pack(L, packed, 2, "the result");
    thread->result = take(packed);
    return 0;
}

weft_status weft_status_of(const char *name)
{
    for (int code = WEFT_INVALID; code <= WEFT_INTERNAL; code++)
        if (strcmp(weft_status_name((weft_status)code), name) == 0) return (weft_status)code;
    return WEFT_ABORTED; /* the script's own errors */
}

const char *weft_push_error_text(lua_State *L, int index, weft_status *code)
{
    const char *message = NULL;
    *code = WEFT_ABORTED;
    if (lua_istable(L, index)) {
        lua_getfield(L, index, "code");
        if (lua_isstring(L, -1)) *code = weft_status_of(lua_tostring(L, -1));
        lua_pop(L, 1);
        lua_getfield(L, index, "message");
        if (lua_isstring(L, -1)) return lua_tostring(L, -1);
        lua_pop(L, 1);
    } else if (lua_isstring(L, index)) {
        lua_pushvalue(L, index);
        return lua_tostring(L, -1);
    }
    if (luaL_callmeta(L, index, "__tostring")) message = lua_tostring(L, -1);
    if (message != NULL) return message;
    return lua_pushfstring(L, "the error is a %s without a message", luaL_typename(L, index));
}

void weft_push_rank_message(lua_State *L, int rank, const char *message, const char *behind)
{
    size_t digits = strncmp(message, "rank ", 5) == 0 ? strspn(message + 5, "0123456789") : 0;
    int named = digits > 0 && message[5 + digits] != 0 && strchr(behind, message[5 + digits]) != NULL;
    if (named) lua_pushstring(L, message);
    else lua_pushfstring(L, "rank %d: %s", rank, message);
}

/* The error is argument 2: tells the world, and keeps the whole table for the caller. */
static int report(lua_State *L)
{
    weft_rank_thread *thread = lua_touserdata(L, 1);
    lua_settop(L, 2);
    weft_status code;
    const char *message = weft_push_error_text(L, 2, &code);
    weft_world_abort(thread->spawn->world, thread->rank, code, message);
    if (lua_istable(L, 2)) {
        weft_packed *packed = weft_packed_new(L);
        weft_pack(L, packed, 2, "the error");
        thread->error = take(packed);
    }
    return 0;
}

static void run_state(weft_rank_thread *thread)
{
    lua_State *L = weft_state_open();
    if (L == NULL) {
        weft_world_abort(thread->spawn->world, thread->rank, WEFT_MEMORY, "no memory for a Lua state");
        return;
    }
    if (lua_cpcall(L, run, thread) != 0) {
        lua_sethook(L, NULL, 0, 0);
        lua_pushcfunction(L, report);
        lua_pushlightuserdata(L, thread);
        lua_pushvalue(L, -3);
        if (lua_pcall(L, 2, 0, 0) != 0) /* an error that does not cross, or no memory: its text must do */
            weft_world_abort(thread->spawn->world, thread->rank, WEFT_ABORTED,
                             lua_isstring(L, -1) ? lua_tostring(L, -1) : "an error without a message");
        weft_world_leave(thread->spawn->world);
    }
    lua_close(L);
}

void *weft_rank_thread_main(void *argument)
{
    weft_rank_thread *thread = argument;
    run_state(thread);
    uint64_t one = 1;
    int done_fd = thread->spawn->done_fd;
    atomic_store(&thread->done, 1);
    if (write(done_fd, &one, sizeof one) < 0) perror("weft: eventfd");
    return NULL;
}
