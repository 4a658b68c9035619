/* bind/source_args.h - sources of weights as arguments of bindings. */
#pragma once

#include <lua.h>

#include "model/source.h"

#define WEFT_SOURCE "weft.source"

/* Raises an argument error when it is something else or closed. The box keeps the reference. */
weft_source *weft_check_source(lua_State *L, int index);
weft_source *weft_opt_source(lua_State *L, int index); /* NULL for nil or none */
