/* bind/lua_checkpoint.c - weft.checkpoint and weft.source: where weights come from.
 *
 *   core.checkpoint.open(path [, {format = "auto"|"safetensors"|"dummy", dtype = "bfloat16"}])
 *       path: a folder or one .safetensors file; nil for dummy. dtype: of dummy weights.
 *       A file that is missing or wrong: nil, message, code.
 *   c:names() sorted   c:has(name)   c.path c.format c.bytes_total c.num_tensors
 *   c:source(name [, {shape = {...}, dtype =}]) raises when the tensor is missing or its shape is
 *       not this one. Dummy weights need the shape; dtype says what dummies hold.
 *   core.source(name, tensor) -> the tensor as a source
 *   s.name s.dtype s.shape   s:tensor([dtype])   s:read(starts, counts [, dtype]) -> tensors of their own */
#include <stdio.h>
#include <string.h>

#include "bind/box.h"
#include "bind/core.h"
#include "bind/source_args.h"
#include "model/checkpoint.h"

#define WEFT_CHECKPOINT "weft.checkpoint"

/* Dummy checkpoints remember what their weights hold: kept beside the box, in its environment. */
#define DUMMY_DTYPE "dummy_dtype"

weft_source *weft_check_source(lua_State *L, int index)
{
    return (weft_source *)weft_box_check(L, index, WEFT_SOURCE);
}

weft_source *weft_opt_source(lua_State *L, int index)
{
    return lua_isnoneornil(L, index) ? NULL : weft_check_source(L, index);
}

static weft_checkpoint *check_checkpoint(lua_State *L, int index)
{
    return (weft_checkpoint *)weft_box_check(L, index, WEFT_CHECKPOINT);
}

static weft_dtype dtype_from(lua_State *L, const char *name, weft_dtype fallback)
{
    weft_dtype dtype = fallback;
    if (name != NULL && !weft_dtype_from_name(name, &dtype))
        luaL_error(L, "unknown dtype '%s' (known: float32, bfloat16, float16, int32, float8_e4m3, uint8)", name);
    return dtype;
}

/* A list of at most WEFT_SOURCE_MAX_DIMS sizes from 0 to 2^53. */
static int check_sizes(lua_State *L, int index, const char *what, int64_t *sizes)
{
    if (!lua_istable(L, index)) luaL_error(L, "%s must be a list of numbers, got %s", what, luaL_typename(L, index));
    int ndim = (int)lua_objlen(L, index);
    if (ndim > WEFT_SOURCE_MAX_DIMS) luaL_error(L, "%s has %d numbers; a weight has at most %d dimensions", what, ndim, WEFT_SOURCE_MAX_DIMS);
    for (int i = 0; i < ndim; i++) {
        lua_rawgeti(L, index, i + 1);
        double value = lua_type(L, -1) == LUA_TNUMBER ? lua_tonumber(L, -1) : -1.0;
        if (!(value >= 0 && value <= 0x1p53) || value != (double)(int64_t)value)
            luaL_error(L, "number %d of %s must be an integer from 0 up", i + 1, what);
        sizes[i] = (int64_t)value;
        lua_pop(L, 1);
    }
    return ndim;
}

static void push_sizes(lua_State *L, const int64_t *sizes, int n)
{
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushnumber(L, (lua_Number)sizes[i]);
        lua_rawseti(L, -2, i + 1);
    }
}

/* ---- weft.checkpoint ---- */

static int l_open(lua_State *L)
{
    const char *path = luaL_optstring(L, 1, NULL), *format = "auto", *dtype = NULL;
    if (!lua_isnoneornil(L, 2)) {
        luaL_checktype(L, 2, LUA_TTABLE);
        format = weft_field_string_or(L, 2, "format", "auto");
        dtype = weft_field_string_or(L, 2, "dtype", NULL);
    }
    int dummy = strcmp(format, "dummy") == 0;
    if (strcmp(format, "gguf") == 0) luaL_error(L, "this build does not read GGUF files; give a safetensors checkpoint");
    if (!dummy && strcmp(format, "auto") != 0 && strcmp(format, "safetensors") != 0)
        luaL_error(L, "format must be auto, safetensors or dummy, got '%s'", format);
    if (!dummy && path == NULL) luaL_argerror(L, 1, "the path of a folder or a .safetensors file expected");
    weft_dtype dummy_dtype = dtype_from(L, dtype, WEFT_BF16);

    weft_object **slot = weft_box_new(L, WEFT_CHECKPOINT);
    lua_createtable(L, 0, 1);
    lua_pushstring(L, weft_dtype_name(dummy_dtype));
    lua_setfield(L, -2, DUMMY_DTYPE);
    lua_setfenv(L, -2);
    weft_checkpoint *checkpoint = NULL;
    weft_status status = dummy ? weft_checkpoint_create_dummy(&checkpoint) : weft_checkpoint_open(&checkpoint, path);
    if (status != WEFT_OK) return weft_push_failure(L, status);
    *slot = &checkpoint->object;
    return 1;
}

static int l_names(lua_State *L)
{
    weft_checkpoint *checkpoint = check_checkpoint(L, 1);
    lua_createtable(L, (int)checkpoint->count, 0);
    for (size_t i = 0; i < checkpoint->count; i++) {
        lua_pushstring(L, checkpoint->entries[i].tensor->name);
        lua_rawseti(L, -2, (int)(i + 1));
    }
    return 1;
}

/* Dummy weights have every name but scales: whether a weight is quantised is the config's word. */
static int l_has(lua_State *L)
{
    weft_checkpoint *checkpoint = check_checkpoint(L, 1);
    const char *name = luaL_checkstring(L, 2);
    int there = checkpoint->dummy ? strstr(name, "weight_scale") == NULL : weft_checkpoint_find(checkpoint, name) != NULL;
    lua_pushboolean(L, there);
    return 1;
}

static weft_dtype dummy_dtype_of(lua_State *L, const char *name, const char *asked)
{
    size_t length = strlen(name), end = strlen("weight_scale_inv");
    if (asked == NULL && length >= end && strcmp(name + length - end, "weight_scale_inv") == 0) return WEFT_F32;
    if (asked == NULL) {
        lua_getfenv(L, 1);
        lua_getfield(L, -1, DUMMY_DTYPE);
        asked = lua_tostring(L, -1);
        lua_pop(L, 2);
    }
    return dtype_from(L, asked, WEFT_BF16);
}

static int l_source(lua_State *L)
{
    weft_checkpoint *checkpoint = check_checkpoint(L, 1);
    const char *name = luaL_checkstring(L, 2), *dtype = NULL;
    int64_t shape[WEFT_SOURCE_MAX_DIMS];
    int ndim = -1;
    if (!lua_isnoneornil(L, 3)) {
        luaL_checktype(L, 3, LUA_TTABLE);
        dtype = weft_field_string_or(L, 3, "dtype", NULL);
        lua_getfield(L, 3, "shape");
        if (!lua_isnil(L, -1)) ndim = check_sizes(L, lua_gettop(L), "shape", shape);
        lua_pop(L, 1);
    }
    if (checkpoint->dummy && ndim < 0) luaL_error(L, "a dummy weight needs its shape: source('%s', {shape = {...}})", name);
    weft_dtype dummy_dtype = checkpoint->dummy ? dummy_dtype_of(L, name, dtype) : dtype_from(L, dtype, WEFT_BF16);

    weft_object **slot = weft_box_new(L, WEFT_SOURCE);
    weft_source *source = NULL;
    if (checkpoint->dummy) weft_raise_if(L, weft_source_create_dummy(&source, name, dummy_dtype, ndim, shape));
    else weft_raise_if(L, weft_checkpoint_source(&source, checkpoint, name));
    *slot = &source->object;
    if (ndim >= 0) weft_raise_if(L, weft_source_expect(source, ndim, shape));
    return 1;
}

static int checkpoint_fields(lua_State *L)
{
    weft_checkpoint *checkpoint = check_checkpoint(L, 1);
    const char *name = luaL_checkstring(L, 2);
    if (strcmp(name, "path") == 0) lua_pushstring(L, checkpoint->path);
    else if (strcmp(name, "format") == 0) lua_pushstring(L, checkpoint->dummy ? "dummy" : "safetensors");
    else if (strcmp(name, "bytes_total") == 0) lua_pushnumber(L, (lua_Number)checkpoint->bytes);
    else if (strcmp(name, "num_tensors") == 0) lua_pushnumber(L, (lua_Number)checkpoint->count);
    else lua_pushnil(L);
    return 1;
}

static int checkpoint_tostring(lua_State *L)
{
    weft_checkpoint *checkpoint = (weft_checkpoint *)weft_box_test(L, 1, WEFT_CHECKPOINT);
    char text[64];
    if (checkpoint == NULL) {
        lua_pushliteral(L, "weft.checkpoint (closed)");
        return 1;
    }
    snprintf(text, sizeof text, " (%zu tensors, %.1f MB)", checkpoint->count, (double)checkpoint->bytes / 1e6);
    lua_pushfstring(L, "weft.checkpoint %s%s", checkpoint->path, checkpoint->dummy ? "" : text);
    return 1;
}

/* ---- weft.source ---- */

static int l_wrap(lua_State *L)
{
    const char *name = luaL_checkstring(L, 1);
    weft_tensor *tensor = weft_check_tensor(L, 2);
    luaL_argcheck(L, weft_tensor_is_contiguous(tensor), 2, "a contiguous tensor expected: give a :clone()");
    luaL_argcheck(L, tensor->arena == NULL, 2, "a tensor of a step does not last: give a :clone()");
    weft_object **slot = weft_box_new(L, WEFT_SOURCE);
    weft_source *source = NULL;
    weft_raise_if(L, weft_source_create(&source, name, tensor->dtype, tensor->ndim, tensor->shape, tensor->data, &tensor->object));
    *slot = &source->object;
    return 1;
}

static int read_box(lua_State *L, const weft_source *source, const int64_t *start, const int64_t *count, weft_dtype dtype)
{
    weft_tensor *tensor = NULL;
    weft_raise_if(L, weft_tensor_create(&tensor, weft_lua_rank(L)->memory, dtype, source->ndim, count));
    weft_push_tensor(L, tensor);
    weft_raise_if(L, weft_source_read(source, start, count, tensor->data, dtype, tensor->stride));
    return 1;
}

static int l_tensor(lua_State *L)
{
    weft_source *source = weft_check_source(L, 1);
    static const int64_t zeros[WEFT_SOURCE_MAX_DIMS];
    return read_box(L, source, zeros, source->shape, dtype_from(L, luaL_optstring(L, 2, NULL), source->dtype));
}

static int l_read(lua_State *L)
{
    weft_source *source = weft_check_source(L, 1);
    int64_t start[WEFT_SOURCE_MAX_DIMS] = {0}, count[WEFT_SOURCE_MAX_DIMS] = {0};
    int starts = check_sizes(L, 2, "starts", start), counts = check_sizes(L, 3, "counts", count);
    if (starts != source->ndim || counts != source->ndim)
        luaL_error(L, "tensor '%s' has %d dimensions, got %d starts and %d counts", source->name, source->ndim, starts, counts);
    for (int i = 0; i < source->ndim; i++)
        if (start[i] > source->shape[i] || count[i] > source->shape[i] - start[i])
            luaL_error(L, "tensor '%s': %f from %f of dimension %d, which has %f", source->name, (double)count[i], (double)start[i], i,
                       (double)source->shape[i]);
    return read_box(L, source, start, count, dtype_from(L, luaL_optstring(L, 4, NULL), source->dtype));
}

static int source_fields(lua_State *L)
{
    weft_source *source = weft_check_source(L, 1);
    const char *name = luaL_checkstring(L, 2);
    if (strcmp(name, "name") == 0) lua_pushstring(L, source->name);
    else if (strcmp(name, "dtype") == 0) lua_pushstring(L, weft_dtype_name(source->dtype));
    else if (strcmp(name, "shape") == 0) push_sizes(L, source->shape, source->ndim);
    else lua_pushnil(L);
    return 1;
}

static int source_tostring(lua_State *L)
{
    weft_source *source = (weft_source *)weft_box_test(L, 1, WEFT_SOURCE);
    if (source == NULL) lua_pushliteral(L, "weft.source (closed)");
    else lua_pushfstring(L, "weft.source %s (%s)", source->name, weft_dtype_name(source->dtype));
    return 1;
}

void weft_open_checkpoint(lua_State *L)
{
    static const luaL_Reg checkpoint_methods[] = {{"names", l_names}, {"has", l_has}, {"source", l_source}, {NULL, NULL}};
    static const luaL_Reg source_methods[] = {{"tensor", l_tensor}, {"read", l_read}, {NULL, NULL}};
    weft_box_class(L, WEFT_CHECKPOINT, checkpoint_methods, checkpoint_fields, checkpoint_tostring);
    weft_box_class(L, WEFT_SOURCE, source_methods, source_fields, source_tostring);
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, l_open);
    lua_setfield(L, -2, "open");
    lua_setfield(L, -2, "checkpoint");
    lua_pushcfunction(L, l_wrap);
    lua_setfield(L, -2, "source");
}
