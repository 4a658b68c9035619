/* bind/box.h - the one shape of userdata that weft hands to Lua, and how its calls fail.
 *
 * A box holds one reference to a core object, or NULL once closed. Lua may finalise boxes in any
 * order; the core's own references keep what belongs together alive. */
#pragma once

#include <lauxlib.h>
#include <lua.h>
#include <stdint.h>

#include "base/object.h"
#include "base/status.h"
#include "comm/world.h"
#include "device/tensor.h"

/* Registers a class: methods behind __index, fields by `index` (may be NULL), :close() = __gc.
 * Opening the module again finds the old class. tostring may be NULL. */
void weft_box_class(lua_State *L, const char *tname, const luaL_Reg *methods, lua_CFunction fields, lua_CFunction tostring);
/* Pushes an empty box; fill *result last, when nothing can raise any more. */
weft_object **weft_box_new(lua_State *L, const char *tname);
/* Pushes a box with a new reference to object. */
void weft_box_push(lua_State *L, const char *tname, weft_object *object);
/* Raises an argument error: wrong type ("weft.tensor expected, got number"), or "object is closed". */
weft_object *weft_box_check(lua_State *L, int index, const char *tname);
weft_object *weft_box_test(lua_State *L, int index, const char *tname); /* NULL when it is something else or closed */

/* Raises {code =, message =} (tostring gives the message) when status is a failure. */
void weft_raise_if(lua_State *L, weft_status status);
/* Pushes such an object: metatable "weft.error". */
void weft_push_error(lua_State *L, const char *code, const char *message);
/* world failures: returns nil, message, code. */
int weft_push_failure(lua_State *L, weft_status status);

/* The rank of this Lua state; made on first use (a single rank) when nobody set one. */
weft_rank *weft_lua_rank(lua_State *L);
/* Where new tensors beside this one belong: the rank's memory on the host, or on its GPU. */
weft_memory *weft_lua_memory_like(lua_State *L, const weft_tensor *tensor);
void weft_lua_set_rank(lua_State *L, weft_rank *rank); /* takes over a reference */

#define WEFT_TENSOR "weft.tensor"
weft_tensor *weft_check_tensor(lua_State *L, int index); /* live, not of a past step */
weft_tensor *weft_opt_tensor(lua_State *L, int index);   /* NULL for nil or none */
void weft_push_tensor(lua_State *L, weft_tensor *tensor); /* takes over the reference, even when it raises */

/* Named arguments: the table at `index`. Errors name the field. */
int64_t weft_field_int(lua_State *L, int index, const char *name, int64_t low, int64_t high);
int64_t weft_field_int_or(lua_State *L, int index, const char *name, int64_t low, int64_t high, int64_t fallback);
double weft_field_number_or(lua_State *L, int index, const char *name, double fallback);
int weft_field_bool_or(lua_State *L, int index, const char *name, int fallback);
const char *weft_field_string_or(lua_State *L, int index, const char *name, const char *fallback); /* alive while the table is */
