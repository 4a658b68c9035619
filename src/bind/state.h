/* bind/state.h - how every Lua state of weft starts: the main one and one per rank. */
#pragma once

#include <lua.h>

/* A state with the standard libraries, weft.core preloaded and package.path set to where the Lua
 * files are: $WEFT_LUA, <exe>/../share/weft/lua, the source tree known at configure. NULL: no memory. */
lua_State *weft_state_open(void);
/* Only the preloading and paths, for states that others opened. */
void weft_state_prepare(lua_State *L);
/* Message handler for pcall: keeps weft.error objects, adds a traceback to strings under WEFT_DEBUG=1. */
int weft_state_traceback(lua_State *L);
