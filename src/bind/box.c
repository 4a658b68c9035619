/* bind/box.c - userdata boxes, errors and named arguments. */
#include "bind/box.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    weft_object *obj;
} box;

/* Serves as __gc and as :close(), so it can run twice or behind a failed constructor. It must not
 * raise: the error would surface in whatever allocation started the collection. */
static int box_close(lua_State *L)
{
    box *b = luaL_testudata(L, 1, lua_tostring(L, lua_upvalueindex(1)));
    if (b != NULL) {
        weft_object *obj = b->obj;
        b->obj = NULL; /* first: whoever still reaches this box sees it closed */
        weft_object_release(obj);
    }
    return 0;
}

/* __index with fields: a method of that name first, then the class's own function. */
static int index_fields(lua_State *L)
{
    lua_pushvalue(L, 2);
    lua_rawget(L, lua_upvalueindex(1));
    if (!lua_isnil(L, -1)) return 1;
    lua_settop(L, 2);
    return lua_tocfunction(L, lua_upvalueindex(2))(L);
}

static int refuse_newindex(lua_State *L)
{
    return luaL_error(L, "%s is immutable: cannot set '%s'", lua_tostring(L, lua_upvalueindex(1)),
                      lua_isstring(L, 2) ? lua_tostring(L, 2) : luaL_typename(L, 2));
}

void weft_box_class(lua_State *L, const char *tname, const luaL_Reg *methods, lua_CFunction fields, lua_CFunction tostring)
{
    luaL_newmetatable(L, tname);
    lua_newtable(L);
    if (methods != NULL) luaL_setfuncs(L, methods, 0); /* mt methods */
    lua_pushstring(L, tname);
    lua_pushcclosure(L, box_close, 1); /* mt methods close */
    lua_pushvalue(L, -1);
    lua_setfield(L, -4, "__gc");
    lua_setfield(L, -2, "close"); /* mt methods */
    lua_pushvalue(L, -1);
    lua_setfield(L, -3, "__methods"); /* for completion and help; hidden behind __metatable */
    if (fields != NULL) {
        lua_pushcfunction(L, fields);
        lua_pushcclosure(L, index_fields, 2);
    }
    lua_setfield(L, -2, "__index"); /* mt */
    lua_pushstring(L, tname);
    lua_pushcclosure(L, refuse_newindex, 1);
    lua_setfield(L, -2, "__newindex");
    if (tostring != NULL) {
        lua_pushcfunction(L, tostring);
        lua_setfield(L, -2, "__tostring");
    }
    lua_pushstring(L, tname);
    lua_setfield(L, -2, "__metatable"); /* scripts cannot borrow our __gc; getmetatable gives the name */
    lua_pop(L, 1);
}

weft_object **weft_box_new(lua_State *L, const char *tname)
{
    box *b = lua_newuserdata(L, sizeof *b);
    b->obj = NULL;
    luaL_setmetatable(L, tname);
    return &b->obj;
}

void weft_box_push(lua_State *L, const char *tname, weft_object *object)
{
    weft_object **slot = weft_box_new(L, tname);
    weft_object_retain(object);
    *slot = object;
}

weft_object *weft_box_check(lua_State *L, int index, const char *tname)
{
    box *b = luaL_checkudata(L, index, tname);
    if (b->obj == NULL) luaL_argerror(L, index, "object is closed");
    return b->obj;
}

weft_object *weft_box_test(lua_State *L, int index, const char *tname)
{
    box *b = luaL_testudata(L, index, tname);
    return b == NULL ? NULL : b->obj;
}

static int error_tostring(lua_State *L)
{
    lua_getfield(L, 1, "message");
    return 1;
}

void weft_push_error(lua_State *L, const char *code, const char *message)
{
    lua_createtable(L, 0, 2);
    lua_pushstring(L, message);
    lua_setfield(L, -2, "message");
    lua_pushstring(L, code);
    lua_setfield(L, -2, "code");
    if (luaL_newmetatable(L, "weft.error")) {
        lua_pushcfunction(L, error_tostring);
        lua_setfield(L, -2, "__tostring");
    }
    lua_setmetatable(L, -2);
}

void weft_raise_if(lua_State *L, weft_status status)
{
    if (status == WEFT_OK) return;
    weft_push_error(L, weft_status_name(status), weft_error_message());
    lua_error(L);
}

int weft_push_failure(lua_State *L, weft_status status)
{
    lua_pushnil(L);
    lua_pushstring(L, weft_error_message());
    lua_pushstring(L, weft_status_name(status));
    return 3;
}

/* ---- the rank of a state ---- */

#define RANK_KEY "weft.rank.context"

typedef struct {
    weft_rank *rank;
} rank_box;

static int rank_gc(lua_State *L)
{
    rank_box *b = lua_touserdata(L, 1);
    weft_rank *rank = b->rank;
    b->rank = NULL;
    if (rank != NULL) weft_rank_release(rank);
    return 0;
}

void weft_lua_set_rank(lua_State *L, weft_rank *rank)
{
    rank_box *b = lua_newuserdata(L, sizeof *b);
    b->rank = NULL;
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, rank_gc);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, -2);
    b->rank = rank;
    lua_setfield(L, LUA_REGISTRYINDEX, RANK_KEY);
}

weft_rank *weft_lua_rank(lua_State *L)
{
    lua_getfield(L, LUA_REGISTRYINDEX, RANK_KEY);
    rank_box *b = lua_touserdata(L, -1);
    lua_pop(L, 1);
    if (b != NULL && b->rank != NULL) return b->rank;
    weft_rank *rank = NULL;
    weft_raise_if(L, weft_rank_create_single(&rank, 0));
    weft_lua_set_rank(L, rank);
    return rank;
}

weft_memory *weft_lua_memory_like(lua_State *L, const weft_tensor *tensor)
{
    weft_rank *rank = weft_lua_rank(L);
    return tensor->storage->cuda != NULL ? rank->device_memory : rank->memory;
}

/* ---- tensors ---- */

weft_tensor *weft_check_tensor(lua_State *L, int index)
{
    weft_tensor *tensor = (weft_tensor *)weft_box_check(L, index, WEFT_TENSOR);
    if (weft_tensor_check(tensor) != WEFT_OK) luaL_argerror(L, index, weft_error_message());
    return tensor;
}

weft_tensor *weft_opt_tensor(lua_State *L, int index)
{
    return lua_isnoneornil(L, index) ? NULL : weft_check_tensor(L, index);
}

/* The box comes first, so that a tensor is never lost: see weft_push_tensor. */
static int new_tensor_box(lua_State *L)
{
    weft_box_new(L, WEFT_TENSOR);
    return 1;
}

void weft_push_tensor(lua_State *L, weft_tensor *tensor)
{
    lua_pushcfunction(L, new_tensor_box);
    if (lua_pcall(L, 0, 1, 0) != 0) {
        WEFT_RELEASE(tensor);
        lua_error(L);
    }
    ((box *)lua_touserdata(L, -1))->obj = &tensor->object;
}

/* ---- named arguments ---- */

int64_t weft_field_int_or(lua_State *L, int index, const char *name, int64_t low, int64_t high, int64_t fallback)
{
    lua_getfield(L, index, name);
    if (lua_isnil(L, -1)) {
        lua_pop(L, 1);
        return fallback;
    }
    if (lua_type(L, -1) != LUA_TNUMBER) luaL_error(L, "%s must be an integer, got %s", name, luaL_typename(L, -1));
    double value = lua_tonumber(L, -1);
    lua_pop(L, 1);
    if (!(value >= (double)low && value <= (double)high) || value != (double)(int64_t)value) {
        char text[160];
        snprintf(text, sizeof text, "%s must be an integer from %" PRId64 " to %" PRId64 ", got %.14g", name, low, high, value);
        luaL_error(L, "%s", text);
    }
    return (int64_t)value;
}

int64_t weft_field_int(lua_State *L, int index, const char *name, int64_t low, int64_t high)
{
    lua_getfield(L, index, name);
    if (lua_isnil(L, -1)) luaL_error(L, "%s is missing", name);
    lua_pop(L, 1);
    return weft_field_int_or(L, index, name, low, high, 0);
}

double weft_field_number_or(lua_State *L, int index, const char *name, double fallback)
{
    lua_getfield(L, index, name);
    if (!lua_isnil(L, -1)) {
        if (lua_type(L, -1) != LUA_TNUMBER) luaL_error(L, "%s must be a number, got %s", name, luaL_typename(L, -1));
        fallback = lua_tonumber(L, -1);
    }
    lua_pop(L, 1);
    return fallback;
}

int weft_field_bool_or(lua_State *L, int index, const char *name, int fallback)
{
    lua_getfield(L, index, name);
    if (!lua_isnil(L, -1)) {
        if (!lua_isboolean(L, -1)) luaL_error(L, "%s must be true or false, got %s", name, luaL_typename(L, -1));
        fallback = lua_toboolean(L, -1);
    }
    lua_pop(L, 1);
    return fallback;
}

const char *weft_field_string_or(lua_State *L, int index, const char *name, const char *fallback)
{
    lua_getfield(L, index, name);
    if (!lua_isnil(L, -1)) {
        if (lua_type(L, -1) != LUA_TSTRING) luaL_error(L, "%s must be a string, got %s", name, luaL_typename(L, -1));
        fallback = lua_tostring(L, -1);
    }
    lua_pop(L, 1);
    return fallback;
}
