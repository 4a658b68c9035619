/* bind/group_args.h - groups as arguments and results of Lua functions. */
#pragma once

#include <lua.h>

#include "comm/group.h"

#define WEFT_GROUP "weft.group"

weft_group *weft_check_group(lua_State *L, int index);
weft_group *weft_opt_group(lua_State *L, int index); /* NULL for nil or none */
void weft_push_group(lua_State *L, weft_group *group); /* with a new reference */
/* "context" or "CONTEXT"; an unknown name raises and lists the known ones. */
weft_group_type weft_check_group_type(lua_State *L, int index);
