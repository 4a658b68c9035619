/* bind/core.c - opens the module `weft.core`. Opening it again in the same state is harmless. */
#include "bind/core.h"

#include "bind/box.h"

extern const char *const weft_bind_docs[]; /* generated from the files of this room; ends with NULL */

static int l_live_objects(lua_State *L)
{
    lua_pushnumber(L, (lua_Number)weft_live_objects());
    return 1;
}

/* core._as_error(table) -> table, which now prints as its message and crosses between states. */
static int l_as_error(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    weft_push_error(L, "ok", ""); /* the class exists from here on */
    lua_getmetatable(L, -1);
    lua_setmetatable(L, 1);
    lua_settop(L, 1);
    return 1;
}

/* core._methods("weft.tensor") -> table of methods, for help and completion. */
static int l_methods(lua_State *L)
{
    luaL_getmetatable(L, luaL_checkstring(L, 1));
    if (!lua_istable(L, -1)) return 0; /* the registry keeps other things by name too */
    lua_pushliteral(L, "__methods");
    lua_rawget(L, -2);
    return 1;
}

/* core._types() -> names of the classes, sorted: those whose metatables hold __methods. */
static int l_types(lua_State *L)
{
    lua_settop(L, 0);
    lua_newtable(L);
    for (lua_pushnil(L); lua_next(L, LUA_REGISTRYINDEX) != 0; lua_pop(L, 1)) {
        if (lua_type(L, -2) != LUA_TSTRING || !lua_istable(L, -1)) continue;
        lua_pushliteral(L, "__methods");
        lua_rawget(L, -2);
        if (!lua_isnil(L, -1)) {
            lua_pushvalue(L, -3);
            lua_rawseti(L, 1, (int)lua_objlen(L, 1) + 1);
        }
        lua_pop(L, 1);
    }
    lua_getglobal(L, "table");
    lua_getfield(L, -1, "sort");
    lua_pushvalue(L, 1);
    lua_call(L, 1, 0);
    lua_settop(L, 1);
    return 1;
}

/* core._docs() -> list of the comments at the top of the files here, for help. */
static int l_docs(lua_State *L)
{
    lua_newtable(L);
    for (int i = 0; weft_bind_docs[i] != NULL; i++) {
        lua_pushstring(L, weft_bind_docs[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

void weft_open_base(lua_State *L)
{
    static const luaL_Reg functions[] = {
        {"live_objects", l_live_objects}, {"_methods", l_methods}, {"_as_error", l_as_error}, {"_docs", l_docs}, {"_types", l_types}, {NULL, NULL}};
    luaL_setfuncs(L, functions, 0);
    lua_pushliteral(L, WEFT_VERSION);
    lua_setfield(L, -2, "version");
}

__attribute__((visibility("default"))) int luaopen_weft_core(lua_State *L)
{
    static void (*const parts[])(lua_State *) = {
        weft_open_base,
        weft_open_machine,
        weft_open_tensor,
        weft_open_plan,
        weft_open_group,
        weft_open_spawn,
        weft_open_evaluate,
        weft_open_line_editor,
        weft_open_json,
        weft_open_checkpoint,
        weft_open_safetensors,
        weft_open_rows,
        weft_open_device,
        weft_open_tokenizer,
        weft_open_ops,
        weft_open_linear,
        weft_open_norm,
        weft_open_cache,
        weft_open_attention,
        weft_open_sampler,
        weft_open_experts,
    };
    lua_newtable(L);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) parts[i](L);
    return 1;
}
