/* bind/lua_safetensors.c - tensors into a file.
 *
 *   core.save_safetensors(path, {name = tensor})
 *   core.can_save_safetensors(path)   raises what that would say of the path; writes nothing */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "bind/box.h"
#include "bind/core.h"
#include "model/safetensors_write.h"

enum { MAX_ITEMS = 4096 };

static int by_name(const void *a, const void *b)
{
    return strcmp(((const weft_safetensors_item *)a)->name, ((const weft_safetensors_item *)b)->name);
}

static int l_save(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    luaL_checktype(L, 2, LUA_TTABLE);
    size_t count = 0;
    lua_pushnil(L);
    while (lua_next(L, 2)) {
        if (lua_type(L, -2) != LUA_TSTRING) luaL_argerror(L, 2, "names of tensors are strings");
        weft_tensor *tensor = weft_check_tensor(L, -1);
        if (tensor->storage->cuda != NULL) luaL_argerror(L, 2, "tensors on the host expected: core.to_host(t)");
        if (!weft_tensor_is_contiguous(tensor)) luaL_argerror(L, 2, "contiguous tensors expected: give a :clone()");
        count++;
        lua_pop(L, 1);
    }
    luaL_argcheck(L, count <= MAX_ITEMS, 2, "too many tensors");
    weft_safetensors_item *items = lua_newuserdata(L, (count + 1) * sizeof *items); /* Lua owns it: nothing to free on an error */
    size_t i = 0;
    lua_pushnil(L);
    while (lua_next(L, 2)) {
        weft_tensor *tensor = weft_check_tensor(L, -1);
        items[i++] = (weft_safetensors_item){lua_tostring(L, -2), tensor->dtype, tensor->ndim, tensor->shape, tensor->data};
        lua_pop(L, 1);
    }
    qsort(items, count, sizeof *items, by_name); /* one order, whatever the table's */
    weft_raise_if(L, weft_safetensors_write(path, items, count));
    return 0;
}

static int l_can_save(lua_State *L)
{
    weft_raise_if(L, weft_file_can_replace(luaL_checkstring(L, 1)));
    return 0;
}

void weft_open_safetensors(lua_State *L)
{
    lua_pushcfunction(L, l_save);
    lua_setfield(L, -2, "save_safetensors");
    lua_pushcfunction(L, l_can_save);
    lua_setfield(L, -2, "can_save_safetensors");
}
