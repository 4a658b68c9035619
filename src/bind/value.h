/* bind/value.h - values as bytes, to cross from one Lua state to another.
 *
 * Plain values: nil, booleans, numbers, strings, light userdata (json.null), and tables of these
 * without cycles. A table may carry the metatable of core.json.array or of weft.error; others are
 * refused. Tensors are copied. Anything else raises and is named by its path. */
#pragma once

#include <lua.h>
#include <stddef.h>

/* Userdata, so that an error never loses the bytes. */
typedef struct weft_packed {
    char *bytes;
    size_t size, capacity;
} weft_packed;

weft_packed *weft_packed_new(lua_State *L); /* pushes it */
/* Appends the value at index. what: "argument 2", for the refusal. */
void weft_pack(lua_State *L, weft_packed *out, int index, const char *what);
/* A Lua function with upvalues that are plain, tensors, loaded modules, or such functions. */
void weft_pack_function(lua_State *L, weft_packed *out, int index, const char *what);
/* Pushes the value (or function) at cursor and returns what is behind it. Only for bytes of weft_pack. */
const char *weft_unpack(lua_State *L, const char *cursor);
