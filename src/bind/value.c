/* bind/value.c - plain values, tensors and functions as bytes. */
#include "bind/value.h"

#include <lauxlib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bind/box.h"

enum { MAX_DEPTH = 200 };

typedef enum tag {
    TAG_NIL, TAG_FALSE, TAG_TRUE, TAG_NUMBER, TAG_STRING, TAG_LIGHT, TAG_TABLE, TAG_END, TAG_TENSOR,
    TAG_MODULE,   /* name: required again */
    TAG_FUNCTION, /* bytecode, upvalues */
    TAG_AGAIN     /* the n-th function of this value */
} tag;

/* Metatables that cross with their table. */
static const char *const kept_metatables[] = {"weft.json.array", "weft.error"};
enum { KEPT = sizeof kept_metatables / sizeof *kept_metatables };

static int packed_gc(lua_State *L)
{
    weft_packed *p = lua_touserdata(L, 1);
    free(p->bytes);
    *p = (weft_packed){NULL, 0, 0};
    return 0;
}

weft_packed *weft_packed_new(lua_State *L)
{
    weft_packed *p = lua_newuserdata(L, sizeof *p);
    *p = (weft_packed){NULL, 0, 0};
    if (luaL_newmetatable(L, "weft.packed")) {
        lua_pushcfunction(L, packed_gc);
        lua_setfield(L, -2, "__gc");
    }
    lua_setmetatable(L, -2);
    return p;
}

/* ---- pack ---- */

typedef struct packer {
    lua_State *L;
    weft_packed *out;
    int open_tables;  /* stack index: tables that we are in */
    int functions;    /* stack index: function -> its number, or 0 when none may come */
    int num_functions;
    int depth;
    char path[240];
} packer;

static int append(weft_packed *out, const void *bytes, size_t size)
{
    if (size == 0) return 1;
    if (size > out->capacity - out->size) {
        size_t capacity = out->capacity < 256 ? 256 : out->capacity;
        while (capacity - out->size < size) {
            if (capacity > SIZE_MAX / 2) return 0;
            capacity *= 2;
        }
        char *larger = realloc(out->bytes, capacity);
        if (larger == NULL) return 0;
        out->bytes = larger;
        out->capacity = capacity;
    }
    memcpy(out->bytes + out->size, bytes, size);
    out->size += size;
    return 1;
}

static void put(packer *p, const void *bytes, size_t size)
{
    if (!append(p->out, bytes, size)) luaL_error(p->L, "no memory to copy %s to another rank", p->path);
}

static void put_tag(packer *p, tag t)
{
    char byte = (char)t;
    put(p, &byte, 1);
}

static void put_bytes(packer *p, const char *bytes, size_t size)
{
    put(p, &size, sizeof size);
    put(p, bytes, size);
}

static void refuse(packer *p, int index)
{
    lua_State *L = p->L;
    const char *type = luaL_typename(L, index);
    if (lua_iscfunction(L, index)) type = "C function";
    if (lua_type(L, index) == LUA_TUSERDATA && luaL_getmetafield(L, index, "__metatable") && lua_isstring(L, -1))
        type = lua_pushfstring(L, "userdata (%s)", lua_tostring(L, -1));
    luaL_error(L, "%s is a %s: only plain values and tensors%s cross to another rank", p->path, type,
               p->functions != 0 ? ", and in upvalues loaded modules and Lua functions," : "");
}

static void pack_value(packer *p, int index);

static void pack_tensor(packer *p, int index)
{
    lua_State *L = p->L;
    weft_tensor *tensor = weft_check_tensor(L, index), *copy = NULL;
    size_t bytes = (size_t)weft_tensor_numel(tensor) * weft_dtype_size(tensor->dtype);
    put_tag(p, TAG_TENSOR);
    put(p, &tensor->dtype, sizeof tensor->dtype);
    put(p, &tensor->ndim, sizeof tensor->ndim);
    put(p, tensor->shape, (size_t)tensor->ndim * sizeof *tensor->shape);
    if (weft_tensor_is_contiguous(tensor) && tensor->storage->cuda == NULL) {
        put(p, tensor->data, bytes);
        return;
    }
    weft_raise_if(L, weft_tensor_create(&copy, weft_lua_rank(L)->memory, tensor->dtype, tensor->ndim, tensor->shape));
    weft_push_tensor(L, copy);
    weft_raise_if(L, weft_tensor_copy(copy, tensor));
    put(p, copy->data, bytes);
    lua_pop(L, 1);
}

static size_t extend_path(packer *p, int key)
{
    size_t used = strlen(p->path);
    if (lua_type(p->L, key) == LUA_TSTRING) snprintf(p->path + used, sizeof p->path - used, ".%s", lua_tostring(p->L, key));
    else if (lua_type(p->L, key) == LUA_TNUMBER) snprintf(p->path + used, sizeof p->path - used, "[%.14g]", lua_tonumber(p->L, key));
    return used;
}

static int kept_metatable(lua_State *L, int index)
{
    int kept = KEPT;
    if (!lua_getmetatable(L, index)) return KEPT;
    for (int i = 0; i < KEPT && kept == KEPT; i++) {
        luaL_getmetatable(L, kept_metatables[i]);
        if (lua_rawequal(L, -1, -2)) kept = i;
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
    return kept == KEPT ? -1 : kept;
}

static void pack_table(packer *p, int index)
{
    lua_State *L = p->L;
    luaL_checkstack(L, 8, "nested tables");
    lua_pushvalue(L, index);
    lua_rawget(L, p->open_tables);
    if (!lua_isnil(L, -1)) luaL_error(L, "%s is a table that contains itself: cycles do not cross to another rank", p->path);
    lua_pop(L, 1);
    int metatable = kept_metatable(L, index);
    if (metatable < 0) luaL_error(L, "%s is a table with a metatable: only plain tables cross to another rank", p->path);
    if (++p->depth > MAX_DEPTH) luaL_error(L, "%s is nested more than %d tables deep", p->path, MAX_DEPTH);
    lua_pushvalue(L, index);
    lua_pushboolean(L, 1);
    lua_rawset(L, p->open_tables);

    char kept = (char)metatable;
    int length = (int)lua_objlen(L, index);
    put_tag(p, TAG_TABLE);
    put(p, &kept, 1);
    put(p, &length, sizeof length);
    for (lua_pushnil(L); lua_next(L, index) != 0; lua_pop(L, 1)) {
        int value = lua_gettop(L);
        pack_value(p, value - 1);
        size_t used = extend_path(p, value - 1);
        pack_value(p, value);
        p->path[used] = 0;
    }
    put_tag(p, TAG_END);

    lua_pushvalue(L, index);
    lua_pushnil(L);
    lua_rawset(L, p->open_tables);
    p->depth--;
}

/* index is absolute */
static void pack_value(packer *p, int index)
{
    lua_State *L = p->L;
    size_t length;
    const char *text;
    lua_Number number;
    void *pointer;
    switch (lua_type(L, index)) {
    case LUA_TNIL: put_tag(p, TAG_NIL); return;
    case LUA_TBOOLEAN: put_tag(p, lua_toboolean(L, index) ? TAG_TRUE : TAG_FALSE); return;
    case LUA_TNUMBER:
        number = lua_tonumber(L, index);
        put_tag(p, TAG_NUMBER);
        put(p, &number, sizeof number);
        return;
    case LUA_TSTRING:
        text = lua_tolstring(L, index, &length);
        put_tag(p, TAG_STRING);
        put_bytes(p, text, length);
        return;
    case LUA_TLIGHTUSERDATA:
        pointer = lua_touserdata(L, index);
        put_tag(p, TAG_LIGHT);
        put(p, &pointer, sizeof pointer);
        return;
    case LUA_TTABLE: pack_table(p, index); return;
    case LUA_TUSERDATA:
        if (weft_box_test(L, index, WEFT_TENSOR) != NULL) pack_tensor(p, index);
        else refuse(p, index);
        return;
    default: refuse(p, index);
    }
}

static packer begin(lua_State *L, weft_packed *out, const char *what)
{
    packer p = {.L = L, .out = out};
    luaL_checkstack(L, 12, "copied value");
    lua_newtable(L);
    p.open_tables = lua_gettop(L);
    snprintf(p.path, sizeof p.path, "%s", what);
    return p;
}

static int absolute(lua_State *L, int index)
{
    return index < 0 && index > LUA_REGISTRYINDEX ? lua_gettop(L) + index + 1 : index;
}

void weft_pack(lua_State *L, weft_packed *out, int index, const char *what)
{
    index = absolute(L, index);
    int top = lua_gettop(L);
    packer p = begin(L, out, what);
    pack_value(&p, index);
    lua_settop(L, top);
}

/* ---- functions ---- */

static int write_dump(lua_State *L, const void *bytes, size_t size, void *out)
{
    (void)L;
    return !append(out, bytes, size);
}

/* Pushes the name under which the value is in package.loaded, the first in order; or nothing. */
static const char *push_module_name(lua_State *L, int index)
{
    const char *best = NULL;
    int type = lua_type(L, index);
    if (type != LUA_TTABLE && type != LUA_TFUNCTION && type != LUA_TUSERDATA) return NULL;
    lua_pushnil(L); /* the name */
    int name = lua_gettop(L);
    lua_getfield(L, LUA_REGISTRYINDEX, "_LOADED");
    int loaded = lua_gettop(L);
    for (lua_pushnil(L); lua_next(L, loaded) != 0; lua_pop(L, 1)) {
        if (lua_type(L, -2) != LUA_TSTRING || !lua_rawequal(L, -1, index)) continue;
        if (best != NULL && strcmp(lua_tostring(L, -2), best) >= 0) continue;
        lua_pushvalue(L, -2);
        lua_replace(L, name);
        best = lua_tostring(L, name);
    }
    lua_settop(L, best != NULL ? name : name - 1);
    return best;
}

static void pack_function(packer *p, int index);

static void pack_upvalue(packer *p, int index)
{
    lua_State *L = p->L;
    const char *module = push_module_name(L, index);
    if (module != NULL) {
        put_tag(p, TAG_MODULE);
        put_bytes(p, module, strlen(module));
        lua_pop(L, 1);
    } else if (lua_isfunction(L, index)) {
        pack_function(p, index);
    } else {
        pack_value(p, index);
    }
}

static void pack_function(packer *p, int index)
{
    lua_State *L = p->L;
    luaL_checkstack(L, 12, "functions");
    if (lua_iscfunction(L, index)) refuse(p, index);
    lua_pushvalue(L, index);
    lua_rawget(L, p->functions);
    if (!lua_isnil(L, -1)) {
        int number = (int)lua_tointeger(L, -1);
        put_tag(p, TAG_AGAIN);
        put(p, &number, sizeof number);
        lua_pop(L, 1);
        return;
    }
    lua_pop(L, 1);
    if (++p->depth > MAX_DEPTH) luaL_error(L, "%s: functions nested more than %d deep", p->path, MAX_DEPTH);
    lua_pushvalue(L, index);
    lua_pushinteger(L, ++p->num_functions);
    lua_rawset(L, p->functions);

    put_tag(p, TAG_FUNCTION);
    put(p, &p->num_functions, sizeof p->num_functions);
    size_t at = p->out->size, length = 0;
    put(p, &length, sizeof length);
    lua_pushvalue(L, index);
    if (lua_dump(L, write_dump, p->out) != 0) luaL_error(L, "%s cannot be dumped as bytecode", p->path);
    lua_pop(L, 1);
    length = p->out->size - at - sizeof length;
    memcpy(p->out->bytes + at, &length, sizeof length);

    const char *name;
    for (int i = 1; (name = lua_getupvalue(L, index, i)) != NULL; i++) {
        char outer[sizeof p->path];
        strcpy(outer, p->path);
        snprintf(p->path, sizeof p->path, "upvalue '%s'", name);
        int number = i;
        put(p, &number, sizeof number);
        pack_upvalue(p, lua_gettop(L));
        strcpy(p->path, outer);
        lua_pop(L, 1);
    }
    int end = 0;
    put(p, &end, sizeof end);
    p->depth--;
}

void weft_pack_function(lua_State *L, weft_packed *out, int index, const char *what)
{
    index = absolute(L, index);
    int top = lua_gettop(L);
    packer p = begin(L, out, what);
    lua_newtable(L);
    p.functions = lua_gettop(L);
    pack_function(&p, index);
    lua_settop(L, top);
}

/* ---- unpack ---- */

static const char *get(const char *cursor, void *to, size_t size)
{
    memcpy(to, cursor, size);
    return cursor + size;
}

static const char *unpack_value(lua_State *L, const char *cursor, int functions);

static const char *unpack_table(lua_State *L, const char *cursor, int functions)
{
    char kept;
    int length;
    cursor = get(cursor, &kept, 1);
    cursor = get(cursor, &length, sizeof length);
    lua_createtable(L, length, 0);
    while (*cursor != TAG_END) {
        cursor = unpack_value(L, cursor, functions);
        cursor = unpack_value(L, cursor, functions);
        lua_rawset(L, -3);
    }
    if (kept < KEPT) luaL_setmetatable(L, kept_metatables[(int)kept]);
    return cursor + 1;
}

static const char *unpack_tensor(lua_State *L, const char *cursor)
{
    weft_dtype dtype;
    int ndim;
    int64_t shape[WEFT_MAX_DIMS];
    weft_tensor *tensor = NULL;
    cursor = get(cursor, &dtype, sizeof dtype);
    cursor = get(cursor, &ndim, sizeof ndim);
    cursor = get(cursor, shape, (size_t)ndim * sizeof *shape);
    weft_raise_if(L, weft_tensor_create(&tensor, weft_lua_rank(L)->memory, dtype, ndim, shape));
    weft_push_tensor(L, tensor);
    return get(cursor, tensor->data, (size_t)weft_tensor_numel(tensor) * weft_dtype_size(dtype));
}

static const char *unpack_function(lua_State *L, const char *cursor, int functions)
{
    int number, upvalue;
    size_t length;
    cursor = get(cursor, &number, sizeof number);
    cursor = get(cursor, &length, sizeof length);
    if (luaL_loadbuffer(L, cursor, length, "=spawn") != 0) lua_error(L);
    cursor += length;
    int function = lua_gettop(L);
    lua_pushvalue(L, function);
    lua_rawseti(L, functions, number);
    for (cursor = get(cursor, &upvalue, sizeof upvalue); upvalue != 0; cursor = get(cursor, &upvalue, sizeof upvalue)) {
        cursor = unpack_value(L, cursor, functions);
        lua_setupvalue(L, function, upvalue);
    }
    return cursor;
}

static const char *unpack_value(lua_State *L, const char *cursor, int functions)
{
    luaL_checkstack(L, 8, "copied value");
    size_t length;
    lua_Number number;
    void *pointer;
    int index;
    switch ((tag)*cursor++) {
    case TAG_NIL: lua_pushnil(L); return cursor;
    case TAG_FALSE: lua_pushboolean(L, 0); return cursor;
    case TAG_TRUE: lua_pushboolean(L, 1); return cursor;
    case TAG_NUMBER:
        cursor = get(cursor, &number, sizeof number);
        lua_pushnumber(L, number);
        return cursor;
    case TAG_STRING:
        cursor = get(cursor, &length, sizeof length);
        lua_pushlstring(L, cursor, length);
        return cursor + length;
    case TAG_LIGHT:
        cursor = get(cursor, &pointer, sizeof pointer);
        lua_pushlightuserdata(L, pointer);
        return cursor;
    case TAG_TABLE: return unpack_table(L, cursor, functions);
    case TAG_TENSOR: return unpack_tensor(L, cursor);
    case TAG_MODULE:
        cursor = get(cursor, &length, sizeof length);
        lua_getglobal(L, "require");
        lua_pushlstring(L, cursor, length);
        lua_call(L, 1, 1);
        return cursor + length;
    case TAG_FUNCTION: return unpack_function(L, cursor, functions);
    case TAG_AGAIN:
        cursor = get(cursor, &index, sizeof index);
        lua_rawgeti(L, functions, index);
        return cursor;
    case TAG_END: break;
    }
    luaL_error(L, "a copied value is broken");
    return cursor;
}

const char *weft_unpack(lua_State *L, const char *cursor)
{
    lua_newtable(L); /* functions by number */
    int functions = lua_gettop(L);
    cursor = unpack_value(L, cursor, functions);
    lua_remove(L, functions);
    return cursor;
}
