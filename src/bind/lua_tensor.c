/* bind/lua_tensor.c - weft.tensor: a small tensor API for scripts, specs and the prompt.
 *
 *   core.tensor({2, 3}, "float32" [, {values...}])   contents: values, or zeros
 *   t.shape t.dtype t.ndim t.numel t.stride  t:narrow(dim, start, n) t:select(dim, i)
 *   t:transpose(d0, d1) t:view{...} t:clone([dtype]) t:copy(src) t:fill(v) t:get(i, j, ...)
 *   t:set(v, i, j, ...) t:totable() t:bytes() t:show([n]) t.device ("cpu" or "cuda")
 *   core.to_host(t)    t itself, or a copy of what lies on a GPU; :clone stays where t is
 *   core.memory() -> {live_bytes=, peak_bytes=, live_blocks=, allocations=} of this rank
 *   core.arena.begin_step() next_layer() end_layers() bytes() tensor(shape, dtype)   the memory of a step:
 *       what forward returns lives there through the next decoder layer
 *   t.cut -> {axis=, dim=, size=}: the dimension that is this rank's part, where a layer has noted it
 * Dimensions and indices count from 0, as in the model's formulas. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "bind/box.h"
#include "bind/core.h"

static weft_dtype check_dtype(lua_State *L, int index, weft_dtype fallback)
{
    weft_dtype dtype = fallback;
    if (lua_isnoneornil(L, index)) return fallback;
    const char *name = luaL_checkstring(L, index);
    if (!weft_dtype_from_name(name, &dtype))
        luaL_error(L, "unknown dtype '%s' (known: float32, bfloat16, float16, int32, float8_e4m3, uint8)", name);
    return dtype;
}

static int check_shape(lua_State *L, int index, int64_t *shape)
{
    luaL_checktype(L, index, LUA_TTABLE);
    int ndim = (int)lua_objlen(L, index);
    if (ndim > WEFT_MAX_DIMS) luaL_error(L, "a tensor has 0 to %d dimensions, got %d", WEFT_MAX_DIMS, ndim);
    for (int i = 0; i < ndim; i++) {
        lua_rawgeti(L, index, i + 1);
        if (!lua_isnumber(L, -1)) luaL_error(L, "size %d of the shape is not a number", i + 1);
        shape[i] = (int64_t)lua_tonumber(L, -1);
        lua_pop(L, 1);
    }
    return ndim;
}

/* Values in row-major order from a flat table. */
static void fill_from_table(lua_State *L, int index, weft_tensor *tensor)
{
    int64_t count = weft_tensor_numel(tensor);
    for (int64_t i = 0; i < count; i++) {
        lua_rawgeti(L, index, (int)(i + 1));
        double value = lua_tonumber(L, -1);
        lua_pop(L, 1);
        if (tensor->dtype == WEFT_I32) ((int32_t *)tensor->data)[i] = (int32_t)value;
        else weft_store_f32(tensor->data, tensor->dtype, i, (float)value);
    }
}

static int l_tensor(lua_State *L)
{
    lua_settop(L, 3);
    int64_t shape[WEFT_MAX_DIMS];
    int ndim = check_shape(L, 1, shape);
    weft_dtype dtype = check_dtype(L, 2, WEFT_F32);
    int64_t count = 1;
    if (!lua_isnoneornil(L, 3)) {
        luaL_checktype(L, 3, LUA_TTABLE);
        for (int i = 0; i < ndim; i++) count *= shape[i];
        if ((int64_t)lua_objlen(L, 3) != count)
            luaL_error(L, "the shape holds %d values, the table %d", (int)count, (int)lua_objlen(L, 3));
    }
    weft_rank *rank = weft_lua_rank(L);
    weft_tensor *tensor = NULL;
    weft_raise_if(L, weft_tensor_create(&tensor, rank->memory, dtype, ndim, shape));
    weft_push_tensor(L, tensor);
    if (lua_isnoneornil(L, 3)) memset(tensor->data, 0, tensor->storage->bytes);
    else fill_from_table(L, 3, tensor);
    return 1;
}

static void push_sizes(lua_State *L, const int64_t *sizes, int n)
{
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushnumber(L, (lua_Number)sizes[i]);
        lua_rawseti(L, -2, i + 1);
    }
}

static void push_cut(lua_State *L, const weft_tensor *tensor)
{
    if (tensor->cut_axis == NULL) {
        lua_pushnil(L);
        return;
    }
    lua_createtable(L, 0, 3);
    lua_pushstring(L, tensor->cut_axis);
    lua_setfield(L, -2, "axis");
    lua_pushinteger(L, tensor->cut_dim);
    lua_setfield(L, -2, "dim");
    lua_pushinteger(L, tensor->cut_size);
    lua_setfield(L, -2, "size");
}

static int fields(lua_State *L)
{
    weft_tensor *tensor = (weft_tensor *)weft_box_check(L, 1, WEFT_TENSOR);
    const char *name = luaL_checkstring(L, 2);
    if (strcmp(name, "shape") == 0) push_sizes(L, tensor->shape, tensor->ndim);
    else if (strcmp(name, "stride") == 0) push_sizes(L, tensor->stride, tensor->ndim);
    else if (strcmp(name, "dtype") == 0) lua_pushstring(L, weft_dtype_name(tensor->dtype));
    else if (strcmp(name, "device") == 0) lua_pushstring(L, tensor->storage->cuda != NULL ? "cuda" : "cpu");
    else if (strcmp(name, "cut") == 0) push_cut(L, tensor);
    else if (strcmp(name, "ndim") == 0) lua_pushinteger(L, tensor->ndim);
    else if (strcmp(name, "numel") == 0) lua_pushnumber(L, (lua_Number)weft_tensor_numel(tensor));
    else lua_pushnil(L);
    return 1;
}

static int to_string(lua_State *L)
{
    weft_tensor *tensor = (weft_tensor *)weft_box_test(L, 1, WEFT_TENSOR);
    char text[160];
    if (tensor == NULL) lua_pushliteral(L, "weft.tensor (closed)");
    else lua_pushstring(L, weft_tensor_describe(tensor, text, sizeof text));
    return 1;
}

static int l_narrow(lua_State *L)
{
    weft_tensor *tensor = weft_check_tensor(L, 1), *view = NULL;
    int dim = (int)luaL_checkinteger(L, 2);
    int64_t start = (int64_t)luaL_checknumber(L, 3), length = (int64_t)luaL_checknumber(L, 4);
    weft_raise_if(L, weft_tensor_narrow(&view, tensor, dim, start, length));
    weft_push_tensor(L, view);
    return 1;
}

static int l_select(lua_State *L)
{
    weft_tensor *tensor = weft_check_tensor(L, 1), *view = NULL;
    int dim = (int)luaL_checkinteger(L, 2);
    int64_t index = (int64_t)luaL_checknumber(L, 3);
    weft_raise_if(L, weft_tensor_select(&view, tensor, dim, index));
    weft_push_tensor(L, view);
    return 1;
}

static int l_transpose(lua_State *L)
{
    weft_tensor *tensor = weft_check_tensor(L, 1), *view = NULL;
    int d0 = (int)luaL_checkinteger(L, 2), d1 = (int)luaL_checkinteger(L, 3);
    weft_raise_if(L, weft_tensor_transpose(&view, tensor, d0, d1));
    weft_push_tensor(L, view);
    return 1;
}

static int l_view(lua_State *L)
{
    weft_tensor *tensor = weft_check_tensor(L, 1), *view = NULL;
    int64_t shape[WEFT_MAX_DIMS];
    int ndim = check_shape(L, 2, shape);
    weft_raise_if(L, weft_tensor_view(&view, tensor, ndim, shape));
    weft_push_tensor(L, view);
    return 1;
}

static int l_clone(lua_State *L)
{
    weft_tensor *tensor = weft_check_tensor(L, 1), *copy = NULL;
    weft_dtype dtype = check_dtype(L, 2, tensor->dtype);
    weft_raise_if(L, weft_tensor_create(&copy, weft_lua_memory_like(L, tensor), dtype, tensor->ndim, tensor->shape));
    weft_push_tensor(L, copy);
    weft_raise_if(L, weft_tensor_copy(copy, tensor));
    return 1;
}

static int l_copy(lua_State *L)
{
    weft_raise_if(L, weft_tensor_copy(weft_check_tensor(L, 1), weft_check_tensor(L, 2)));
    lua_settop(L, 1);
    return 1;
}

static int l_fill(lua_State *L)
{
    weft_raise_if(L, weft_tensor_fill(weft_check_tensor(L, 1), luaL_checknumber(L, 2)));
    lua_settop(L, 1);
    return 1;
}

/* The element that the indices from `first` on name, as an offset in elements. */
static int64_t element(lua_State *L, const weft_tensor *tensor, int first)
{
    int given = lua_gettop(L) - first + 1;
    if (given != tensor->ndim) luaL_error(L, "%d indices for a tensor with %d dimensions", given, tensor->ndim);
    int64_t offset = 0;
    for (int i = 0; i < tensor->ndim; i++) {
        int64_t index = (int64_t)luaL_checknumber(L, first + i);
        if (index < 0 || index >= tensor->shape[i])
            luaL_error(L, "index %d of dimension %d, which has %d", (int)index, i, (int)tensor->shape[i]);
        offset += index * tensor->stride[i];
    }
    return offset;
}

static void push_element(lua_State *L, const weft_tensor *tensor, int64_t offset)
{
    if (tensor->dtype == WEFT_I32) lua_pushnumber(L, ((const int32_t *)tensor->data)[offset]);
    else lua_pushnumber(L, weft_load_f32(tensor->data, tensor->dtype, offset));
}

/* Pushes the tensor, or a host copy of it. */
static weft_tensor *push_host(lua_State *L, weft_tensor *tensor)
{
    weft_tensor *copy = NULL;
    weft_raise_if(L, weft_tensor_to_host(&copy, tensor));
    weft_push_tensor(L, copy);
    return copy;
}

static int l_to_host(lua_State *L)
{
    (void)push_host(L, weft_check_tensor(L, 1));
    return 1;
}

static int l_get(lua_State *L)
{
    weft_tensor *tensor = weft_check_tensor(L, 1);
    (void)element(L, tensor, 2);
    int indices = lua_gettop(L);
    tensor = push_host(L, tensor);
    lua_insert(L, 1); /* copy tensor indices: the same places in the copy */
    lua_remove(L, 2);
    lua_settop(L, indices);
    push_element(L, tensor, element(L, tensor, 2));
    return 1;
}

static int l_set(lua_State *L)
{
    weft_tensor *tensor = weft_check_tensor(L, 1);
    double value = luaL_checknumber(L, 2);
    int64_t offset = element(L, tensor, 3);
    if (tensor->storage->cuda != NULL) luaL_argerror(L, 1, "the tensor is on a GPU: set a host tensor and :copy it there");
    if (tensor->dtype == WEFT_I32) ((int32_t *)tensor->data)[offset] = (int32_t)value;
    else weft_store_f32(tensor->data, tensor->dtype, offset, (float)value);
    lua_settop(L, 1);
    return 1;
}

/* Flat, row-major; at most `limit` values. */
static void push_values(lua_State *L, const weft_tensor *tensor, int64_t limit)
{
    int64_t count = weft_tensor_numel(tensor), index[WEFT_MAX_DIMS] = {0};
    if (count > limit) count = limit;
    lua_createtable(L, (int)count, 0);
    for (int64_t n = 0; n < count; n++) {
        int64_t offset = 0;
        for (int d = 0; d < tensor->ndim; d++) offset += index[d] * tensor->stride[d];
        push_element(L, tensor, offset);
        lua_rawseti(L, -2, (int)(n + 1));
        for (int d = tensor->ndim - 1; d >= 0 && ++index[d] == tensor->shape[d]; d--) index[d] = 0;
    }
}

static int l_totable(lua_State *L)
{
    push_values(L, push_host(L, weft_check_tensor(L, 1)), INT64_MAX);
    return 1;
}

/* t:show([n]) -> "bf16[8, 3072] 0.1 0.2 ...": values on demand, at most n (default 8). */
static int l_show(lua_State *L)
{
    weft_tensor *tensor = weft_check_tensor(L, 1);
    int limit = (int)luaL_optinteger(L, 2, 8);
    push_values(L, push_host(L, tensor), limit);
    char text[160];
    luaL_Buffer buffer;
    int values = lua_gettop(L), count = (int)lua_objlen(L, values);
    luaL_buffinit(L, &buffer);
    luaL_addstring(&buffer, weft_dtype_short_name(tensor->dtype)); /* in place of the name that describe begins with */
    luaL_addstring(&buffer, weft_tensor_describe(tensor, text, sizeof text) + strlen(weft_dtype_name(tensor->dtype)));
    for (int i = 1; i <= count; i++) {
        lua_rawgeti(L, values, i);
        snprintf(text, sizeof text, " %.6g", lua_tonumber(L, -1));
        lua_pop(L, 1);
        luaL_addstring(&buffer, text);
    }
    if (count < weft_tensor_numel(tensor)) luaL_addstring(&buffer, " ...");
    luaL_pushresult(&buffer);
    return 1;
}

static int l_bytes(lua_State *L)
{
    weft_tensor *tensor = weft_check_tensor(L, 1);
    lua_pushnumber(L, (lua_Number)weft_tensor_numel(tensor) * (lua_Number)weft_dtype_size(tensor->dtype));
    return 1;
}

/* core.memory() -> {live_bytes=, peak_bytes=, live_blocks=, allocations=} of this rank */
static int l_memory(lua_State *L)
{
    weft_memory *memory = weft_lua_rank(L)->device_memory;
    lua_createtable(L, 0, 4);
    lua_pushnumber(L, (lua_Number)atomic_load(&memory->live_bytes));
    lua_setfield(L, -2, "live_bytes");
    lua_pushnumber(L, (lua_Number)atomic_load(&memory->peak_bytes));
    lua_setfield(L, -2, "peak_bytes");
    lua_pushnumber(L, (lua_Number)atomic_load(&memory->live_blocks));
    lua_setfield(L, -2, "live_blocks");
    lua_pushnumber(L, (lua_Number)atomic_load(&memory->allocations));
    lua_setfield(L, -2, "allocations");
    return 1;
}

/* core.arena.begin_step() / next_layer() / end_layers(): see device/arena.h */
static int l_begin_step(lua_State *L)
{
    weft_arena_begin_step(weft_lua_rank(L)->arena);
    return 0;
}

static int l_next_layer(lua_State *L)
{
    weft_arena_next_layer(weft_lua_rank(L)->arena);
    return 0;
}

static int l_end_layers(lua_State *L)
{
    weft_arena_end_layers(weft_lua_rank(L)->arena);
    return 0;
}

static int l_arena_bytes(lua_State *L)
{
    lua_pushnumber(L, (lua_Number)weft_arena_bytes(weft_lua_rank(L)->arena));
    return 1;
}

/* core.arena.tensor(shape, dtype): a tensor of the step, contents undefined. */
static int l_arena_tensor(lua_State *L)
{
    int64_t shape[WEFT_MAX_DIMS];
    int ndim = check_shape(L, 1, shape);
    weft_tensor *tensor = NULL;
    weft_raise_if(L, weft_arena_tensor(weft_lua_rank(L)->arena, &tensor, check_dtype(L, 2, WEFT_F32), ndim, shape));
    weft_push_tensor(L, tensor);
    return 1;
}

void weft_open_tensor(lua_State *L)
{
    static const luaL_Reg arena[] = {
        {"begin_step", l_begin_step}, {"next_layer", l_next_layer}, {"end_layers", l_end_layers},
        {"bytes", l_arena_bytes},     {"tensor", l_arena_tensor},   {NULL, NULL},
    };
    static const luaL_Reg methods[] = {
        {"narrow", l_narrow}, {"select", l_select}, {"transpose", l_transpose}, {"view", l_view},
        {"clone", l_clone},   {"copy", l_copy},     {"fill", l_fill},           {"get", l_get},
        {"set", l_set},       {"totable", l_totable}, {"show", l_show},         {"bytes", l_bytes},
        {NULL, NULL},
    };
    weft_box_class(L, WEFT_TENSOR, methods, fields, to_string);
    lua_pushcfunction(L, l_tensor);
    lua_setfield(L, -2, "tensor");
    lua_pushcfunction(L, l_to_host);
    lua_setfield(L, -2, "to_host");
    lua_pushcfunction(L, l_memory);
    lua_setfield(L, -2, "memory");
    lua_newtable(L);
    luaL_setfuncs(L, arena, 0);
    lua_setfield(L, -2, "arena");
}
