/* bind/core.c - opens the module `weft.core`. Opening it again in the same state is harmless. */
#include "bind/core.h"

#include "bind/box.h"

static int l_live_objects(lua_State *L)
{
    lua_pushnumber(L, (lua_Number)weft_live_objects());
    return 1;
}

/* core._methods("weft.tensor") -> table of methods, for help and completion. */
static int l_methods(lua_State *L)
{
    luaL_getmetatable(L, luaL_checkstring(L, 1));
    if (lua_isnil(L, -1)) return 1;
    lua_getfield(L, -1, "__methods");
    return 1;
}

void weft_open_base(lua_State *L)
{
    static const luaL_Reg functions[] = {
        {"live_objects", l_live_objects}, {"_methods", l_methods}, {NULL, NULL}};
    luaL_setfuncs(L, functions, 0);
    lua_pushliteral(L, WEFT_VERSION);
    lua_setfield(L, -2, "version");
}

__attribute__((visibility("default"))) int luaopen_weft_core(lua_State *L)
{
    static void (*const parts[])(lua_State *) = {
        weft_open_base,
        weft_open_machine,
        weft_open_readline,
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
