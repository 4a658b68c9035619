/* bind/state.c - how every Lua state of weft starts. */
#include "bind/state.h"

#include <errno.h>
#include <lauxlib.h>
#include <limits.h>
#include <lualib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bind/core.h"

/* The first folder that holds weft/init.lua. */
static const char *lua_folder(char *text, size_t size)
{
    const char *named = getenv("WEFT_LUA");
    if (named != NULL && *named != 0) return named;
    char exe[PATH_MAX], probe[PATH_MAX + 32];
    ssize_t length = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (length > 0) {
        exe[length] = 0;
        char *slash = strrchr(exe, '/');
        if (slash != NULL) *slash = 0;
        snprintf(text, size, "%s/../share/weft/lua", exe);
        snprintf(probe, sizeof probe, "%s/weft/init.lua", text);
        if (access(probe, R_OK) == 0) return text;
    }
    return WEFT_SOURCE_LUA;
}

/* The last searcher of `require`: raises for a file that is there and cannot be opened, which is not "not found". */
static int tell_unreadable(lua_State *L)
{
    const char *name = luaL_gsub(L, luaL_checkstring(L, 1), ".", "/");
    lua_getfield(L, lua_upvalueindex(1), "path");
    const char *at = lua_tostring(L, -1);
    while (at != NULL && *at != 0) {
        size_t length = strcspn(at, ";");
        lua_pushlstring(L, at, length);
        const char *path = luaL_gsub(L, lua_tostring(L, -1), "?", name); /* name path template file */
        FILE *file = access(path, F_OK) == 0 ? fopen(path, "rb") : NULL;
        if (file == NULL && errno != ENOENT && errno != ENOTDIR) return luaL_error(L, "cannot open %s: %s", path, strerror(errno));
        if (file != NULL) fclose(file);
        lua_pop(L, 2);
        at += length + (at[length] == ';');
    }
    return 0;
}

void weft_state_prepare(lua_State *L)
{
    char text[PATH_MAX];
    const char *folder = lua_folder(text, sizeof text);
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "path");
    lua_pushfstring(L, "%s/?.lua;%s/?/init.lua;%s", folder, folder, lua_tostring(L, -1));
    lua_setfield(L, -3, "path");
    lua_pop(L, 1);
    lua_getfield(L, -1, "preload");
    lua_pushcfunction(L, luaopen_weft_core);
    lua_setfield(L, -2, "weft.core");
    lua_pop(L, 1);
    lua_getfield(L, -1, "loaders");
    lua_pushvalue(L, -2);
    lua_pushcclosure(L, tell_unreadable, 1);
    lua_rawseti(L, -2, (int)lua_objlen(L, -2) + 1); /* package loaders */
    lua_pop(L, 2);
}

/* LuaJIT maps and unmaps its memory unseen by the thread sanitizer, which then takes an address that
 * went from one rank's state to another's for a race: there, states use the allocator it watches. */
#if defined(__SANITIZE_THREAD__)
static void *watched_alloc(void *context, void *block, size_t old_size, size_t size)
{
    (void)context;
    (void)old_size;
    if (size != 0) return realloc(block, size);
    free(block);
    return NULL;
}

static lua_State *new_state(void)
{
    lua_State *L = lua_newstate(watched_alloc, NULL);
    return L != NULL ? L : luaL_newstate(); /* builds of LuaJIT that take no allocator */
}
#else
static lua_State *new_state(void)
{
    return luaL_newstate();
}
#endif

lua_State *weft_state_open(void)
{
    lua_State *L = new_state();
    if (L == NULL) return NULL;
    luaL_openlibs(L);
    weft_state_prepare(L);
    return L;
}

int weft_state_traceback(lua_State *L)
{
    if (!lua_isstring(L, 1)) {
        if (luaL_callmeta(L, 1, "__tostring")) return 1;
        if (lua_isnil(L, 1)) lua_pushliteral(L, "nil");
        return 1;
    }
    const char *debug = getenv("WEFT_DEBUG");
    if (debug != NULL && *debug == '1') luaL_traceback(L, L, lua_tostring(L, 1), 1);
    return 1;
}
