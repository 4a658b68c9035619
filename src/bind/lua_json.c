/* bind/lua_json.c - JSON for scripts.
 *
 *   core.json.decode(text) -> value, or nil, message, "format" or "memory"
 *       Numbers are doubles. null is core.json.null. Arrays are sequences; an empty array carries
 *       the mark of core.json.array, so that it is written back as one. A key that is there twice
 *       keeps its last value.
 *   core.json.encode(value) -> text. Keys are sorted, so equal values give equal text. A table is
 *       an array when its keys are 1..n, n > 0, or when core.json.array(t) marked it. Whole
 *       numbers have no point or exponent. NaN, infinities, other types, other keys, cycles: raises.
 *   core.json.array([t]) -> t, marked      core.json.null */
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bind/box.h"
#include "bind/core.h"

#define ARRAY_MARK "weft.json.array"
#define DOCUMENT "weft.json.document"
#define BUFFER "weft.json.buffer"

enum { MAX_DEPTH = 256 };

static const char null_address; /* core.json.null is light userdata of this address */

static void push_null(lua_State *L)
{
    lua_pushlightuserdata(L, (void *)&null_address);
}

/* ---- decode ---- */

static int document_gc(lua_State *L)
{
    json_t **root = lua_touserdata(L, 1);
    json_decref(*root);
    *root = NULL;
    return 0;
}

static void push_value(lua_State *L, const json_t *value, int depth)
{
    if (depth > MAX_DEPTH) luaL_error(L, "more than %d levels", MAX_DEPTH);
    luaL_checkstack(L, 8, "JSON value");
    switch (json_typeof(value)) {
    case JSON_OBJECT: {
        const char *key;
        json_t *member;
        lua_createtable(L, 0, (int)json_object_size(value));
        json_object_foreach((json_t *)value, key, member) {
            lua_pushstring(L, key);
            push_value(L, member, depth + 1);
            lua_rawset(L, -3);
        }
        return;
    }
    case JSON_ARRAY:
        lua_createtable(L, (int)json_array_size(value), 0);
        for (size_t i = 0; i < json_array_size(value); i++) {
            push_value(L, json_array_get(value, i), depth + 1);
            lua_rawseti(L, -2, (int)(i + 1));
        }
        if (json_array_size(value) == 0) luaL_setmetatable(L, ARRAY_MARK);
        return;
    case JSON_STRING: lua_pushlstring(L, json_string_value(value), json_string_length(value)); return;
    case JSON_INTEGER:
    case JSON_REAL: lua_pushnumber(L, json_number_value(value)); return;
    case JSON_TRUE: lua_pushboolean(L, 1); return;
    case JSON_FALSE: lua_pushboolean(L, 0); return;
    default: push_null(L); return;
    }
}

static int convert_document(lua_State *L)
{
    json_t **root = lua_touserdata(L, 1);
    push_value(L, *root, 0);
    return 1;
}

static int l_decode(lua_State *L)
{
    size_t length;
    const char *text = luaL_checklstring(L, 1, &length);
    json_error_t error;
    json_t **root = lua_newuserdata(L, sizeof *root);
    *root = NULL;
    luaL_setmetatable(L, DOCUMENT);
    lua_pushcfunction(L, convert_document);
    lua_pushvalue(L, -2); /* document convert document */
    errno = 0; /* jansson takes a string that it has no memory for for a bad one */
    *root = json_loadb(text, length, JSON_DECODE_ANY | JSON_DECODE_INT_AS_REAL | JSON_ALLOW_NUL, &error);
    if (*root == NULL && errno == ENOMEM) return weft_push_failure(L, weft_fail(WEFT_MEMORY, "no memory to read %zu bytes of JSON", length));
    if (*root == NULL) {
        weft_status status = weft_fail(WEFT_FORMAT, "%s (line %d, column %d)", error.text, error.line, error.column);
        return weft_push_failure(L, status);
    }
    int failed = lua_pcall(L, 1, 1, 0);
    json_decref(*root);
    *root = NULL;
    if (failed) return weft_push_failure(L, weft_fail(failed == LUA_ERRMEM ? WEFT_MEMORY : WEFT_FORMAT, "%s", lua_tostring(L, -1)));
    return 1;
}

/* ---- encode ---- */

typedef struct {
    char *text;
    size_t used, capacity;
} buffer;

static int buffer_gc(lua_State *L)
{
    buffer *out = lua_touserdata(L, 1);
    free(out->text);
    out->text = NULL;
    return 0;
}

static void put(lua_State *L, buffer *out, const char *text, size_t length)
{
    if (length > out->capacity - out->used) {
        size_t wanted = out->capacity * 2 + length + 256;
        char *grown = realloc(out->text, wanted);
        if (grown == NULL) luaL_error(L, "no memory for JSON text");
        out->text = grown;
        out->capacity = wanted;
    }
    memcpy(out->text + out->used, text, length);
    out->used += length;
}

/* Bytes of the well-formed UTF-8 character at `at`; negative: so many bad bytes to replace. */
static int utf8_length(const unsigned char *at, size_t left)
{
    unsigned char lead = at[0], low = 0x80, high = 0xbf;
    int length = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
    if (length == 0) return -1;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
    for (int i = 1; i < length; i++, low = 0x80, high = 0xbf)
        if ((size_t)i >= left || at[i] < low || at[i] > high) return -i;
    return length;
}

static void put_string(lua_State *L, buffer *out, const char *text, size_t length)
{
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    const unsigned char *at = (const unsigned char *)text, *end = at + length;
    put(L, out, "\"", 1);
    while (at < end) {
        const unsigned char *plain = at;
        while (at < end && *at >= 32 && *at < 127 && *at != '"' && *at != '\\') at++;
        put(L, out, (const char *)plain, (size_t)(at - plain));
        if (at == end) break;
        char escaped[8];
        const char *simple = *at != 0 ? strchr(from, *at) : NULL;
        int bytes = utf8_length(at, (size_t)(end - at));
        if (simple != NULL) put(L, out, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\%c", to[simple - from]));
        else if (*at < 32 || *at == 127) put(L, out, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", *at));
        else if (bytes > 0) put(L, out, (const char *)at, (size_t)bytes);
        else put(L, out, "\xef\xbf\xbd", 3);
        at += bytes > 0 ? bytes : -bytes;
    }
    put(L, out, "\"", 1);
}

static void put_number(lua_State *L, buffer *out, double value)
{
    char text[40];
    if (!isfinite(value)) luaL_error(L, "JSON has no %s", isnan(value) ? "NaN" : "infinity");
    int whole = value == floor(value) && fabs(value) < 1e18, digits = 15;
    if (whole) snprintf(text, sizeof text, "%.0f", value == 0 ? 0.0 : value);
    else do snprintf(text, sizeof text, "%.*g", digits, value);
        while (strtod(text, NULL) != value && digits++ < 17);
    put(L, out, text, strlen(text));
}

typedef struct {
    const char *text;
    size_t length;
} key_text;

static int by_bytes(const void *a, const void *b)
{
    const key_text *x = a, *y = b;
    int order = memcmp(x->text, y->text, x->length < y->length ? x->length : y->length);
    return order ? order : x->length < y->length ? -1 : x->length > y->length;
}

static void put_value(lua_State *L, buffer *out, int index, int depth);

/* The table at `index`: keys are sorted in a userdata; the table itself keeps their text alive. */
static void put_object(lua_State *L, buffer *out, int index, int count, int depth)
{
    key_text *keys = lua_newuserdata(L, (size_t)(count + 1) * sizeof *keys);
    int used = 0;
    lua_pushnil(L);
    while (lua_next(L, index) != 0) {
        lua_pop(L, 1);
        if (lua_type(L, -1) != LUA_TSTRING) luaL_error(L, "a table with a %s among its keys is neither array nor object", luaL_typename(L, -1));
        keys[used].text = lua_tolstring(L, -1, &keys[used].length);
        used++;
    }
    qsort(keys, (size_t)used, sizeof *keys, by_bytes);
    put(L, out, "{", 1);
    for (int i = 0; i < used; i++) {
        if (i > 0) put(L, out, ",", 1);
        put_string(L, out, keys[i].text, keys[i].length);
        put(L, out, ":", 1);
        lua_pushlstring(L, keys[i].text, keys[i].length);
        lua_rawget(L, index);
        put_value(L, out, lua_gettop(L), depth + 1);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
    put(L, out, "}", 1);
}

static void put_table(lua_State *L, buffer *out, int index, int depth)
{
    int marked = 0, count = 0, length = (int)lua_objlen(L, index);
    if (depth > MAX_DEPTH) luaL_error(L, "more than %d levels, or a table that holds itself", MAX_DEPTH);
    luaL_checkstack(L, 8, "JSON value");
    if (lua_getmetatable(L, index)) {
        luaL_getmetatable(L, ARRAY_MARK);
        marked = lua_rawequal(L, -1, -2);
        lua_pop(L, 2);
    }
    for (lua_pushnil(L); lua_next(L, index) != 0; lua_pop(L, 1)) count++;
    if (count != length || (length == 0 && !marked)) {
        if (marked || length > 0) luaL_error(L, "an array with holes or other keys: %d of %d keys are 1..n", length, count);
        put_object(L, out, index, count, depth);
        return;
    }
    put(L, out, "[", 1);
    for (int i = 1; i <= length; i++) {
        if (i > 1) put(L, out, ",", 1);
        lua_rawgeti(L, index, i);
        put_value(L, out, lua_gettop(L), depth + 1);
        lua_pop(L, 1);
    }
    put(L, out, "]", 1);
}

static void put_value(lua_State *L, buffer *out, int index, int depth)
{
    size_t length;
    const char *text;
    switch (lua_type(L, index)) {
    case LUA_TNIL: put(L, out, "null", 4); return;
    case LUA_TBOOLEAN:
        if (lua_toboolean(L, index)) put(L, out, "true", 4);
        else put(L, out, "false", 5);
        return;
    case LUA_TNUMBER: put_number(L, out, lua_tonumber(L, index)); return;
    case LUA_TSTRING:
        text = lua_tolstring(L, index, &length);
        put_string(L, out, text, length);
        return;
    case LUA_TTABLE: put_table(L, out, index, depth); return;
    case LUA_TLIGHTUSERDATA:
        if (lua_touserdata(L, index) == (void *)&null_address) {
            put(L, out, "null", 4);
            return;
        }
        /* fall through */
    default: luaL_error(L, "JSON has no %s", luaL_typename(L, index));
    }
}

static int l_encode(lua_State *L)
{
    luaL_checkany(L, 1);
    buffer *out = lua_newuserdata(L, sizeof *out);
    *out = (buffer){0};
    luaL_setmetatable(L, BUFFER);
    put_value(L, out, 1, 0);
    lua_pushlstring(L, out->text, out->used);
    free(out->text);
    *out = (buffer){0};
    return 1;
}

static int l_array(lua_State *L)
{
    if (lua_isnoneornil(L, 1)) {
        lua_settop(L, 0);
        lua_newtable(L);
    }
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    luaL_setmetatable(L, ARRAY_MARK);
    return 1;
}

static void gc_class(lua_State *L, const char *name, lua_CFunction gc)
{
    luaL_newmetatable(L, name);
    lua_pushcfunction(L, gc);
    lua_setfield(L, -2, "__gc");
    lua_pop(L, 1);
}

void weft_open_json(lua_State *L)
{
    static const luaL_Reg functions[] = {{"decode", l_decode}, {"encode", l_encode}, {"array", l_array}, {NULL, NULL}};
    gc_class(L, DOCUMENT, document_gc);
    gc_class(L, BUFFER, buffer_gc);
    luaL_newmetatable(L, ARRAY_MARK);
    lua_pop(L, 1);
    lua_createtable(L, 0, 4);
    luaL_setfuncs(L, functions, 0);
    push_null(L);
    lua_setfield(L, -2, "null");
    lua_setfield(L, -2, "json");
}
