/* bind/lua_readline.c - core.readline(prompt) -> line or nil at the end of input: editing and
 * history through libedit. Without libedit there is no core.readline, and callers read plainly. */
#include <stdlib.h>

#include "bind/box.h"
#include "bind/core.h"

#ifdef WEFT_HAVE_LIBEDIT
#include <editline/readline.h>

static int free_line(lua_State *L)
{
    char **slot = lua_touserdata(L, 1);
    free(*slot);
    *slot = NULL;
    return 0;
}

static int l_readline(lua_State *L)
{
    const char *prompt = luaL_optstring(L, 1, "");
    char *line = readline(prompt);
    if (line == NULL) return 0;
    if (*line != 0 && *line != ' ') add_history(line); /* a line that begins with a space is not kept */
    char **slot = lua_touserdata(L, lua_upvalueindex(1)); /* keeps the line if Lua has no memory for it */
    free(*slot);
    *slot = line;
    lua_pushstring(L, line);
    return 1;
}
#endif

void weft_open_readline(lua_State *L)
{
#ifdef WEFT_HAVE_LIBEDIT
    char **slot = lua_newuserdata(L, sizeof *slot);
    *slot = NULL;
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, free_line);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, -2);
    lua_pushcclosure(L, l_readline, 1);
    lua_setfield(L, -2, "readline");
#else
    (void)L;
#endif
}
