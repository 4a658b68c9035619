/* bind/main.c - the program: one Lua state on the main thread that reads the command line.
 *
 * Ranks are threads that `weft.spawn` starts; the main thread supervises them (lua_spawn.c). */
#include <lauxlib.h>
#include <limits.h>
#include <locale.h>
#include <lua.h>
#include <lualib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bind/core.h"
#include "bind/state.h"

static int traceback(lua_State *L)
{
    return weft_state_traceback(L);
}

int main(int argc, char **argv)
{
    setlocale(LC_CTYPE, ""); /* letters typed at the prompt; before there are threads */
    lua_State *L = weft_state_open();
    if (L == NULL) {
        fputs("weft: no memory for a Lua state\n", stderr);
        return 1;
    }
    lua_createtable(L, argc, 0);
    for (int i = 0; i < argc; i++) {
        lua_pushstring(L, argv[i]);
        lua_rawseti(L, -2, i);
    }
    lua_setglobal(L, "arg");
    lua_pushcfunction(L, traceback);
    int handler = lua_gettop(L);
    int failed = luaL_loadstring(L, "return require('weft.commands').main(arg)") != 0 || lua_pcall(L, 0, 1, handler) != 0;
    int code = 1;
    if (failed) {
        const char *message = lua_tostring(L, -1);
        fprintf(stderr, "weft: %s\n", message != NULL ? message : "an error without a message");
    } else {
        code = lua_isnumber(L, -1) ? (int)lua_tointeger(L, -1) : 0;
    }
    fflush(stdout);
    lua_close(L);
    return code;
}
