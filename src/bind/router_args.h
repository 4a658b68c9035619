/* bind/router_args.h - how a router scores, as a field of a table. */
#pragma once

#include <lua.h>

#include "kernels/weft_kernels.h"

/* scoring of the table at index: "sigmoid", "softmax" (when missing) or "softmax_topk". */
weft_router_scoring weft_check_scoring(lua_State *L, int index);
