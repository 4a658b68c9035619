/* bind/step_args.h - steps and lists of numbers as arguments of Lua functions. */
#pragma once

#include <lua.h>
#include <stdint.h>

#include "cache/step.h"

#define WEFT_STEP "weft.step"

weft_step *weft_check_step(lua_State *L, int index);
/* The integers of a list from its item `first` (from 1) on, in memory that lives while what this pushes stays
 * on the stack. `what` names the list in the error. */
int32_t *weft_check_int32_list(lua_State *L, int index, const char *what, int64_t first, int64_t *count);
void weft_open_step(lua_State *L); /* a part of weft_open_cache */
