/* bind/lua_tokenizer.c - weft.tokenizer and weft.token_stream.
 *
 *   core.tokenizer.load(path) -> tokenizer | nil, message, code     path: tokenizer.json or its folder
 *   core.tokenizer.parse(json [, name]) -> the same from text
 *   t:encode(text [, {add_special = true, match_special = true, continues = false}]) -> {ids}
 *       match_special = false: special tokens in the text stay text; continues: it stands behind a special token
 *   t:decode(ids [, {skip_special = true}]) -> text
 *   t:stream([{skip_special = true}]) -> stream   s:push(id) -> text, s:finish() -> text
 *   t:id(token) -> id | nil   t:token(id) -> string | nil   t:special_ids() -> {ids}   t.vocab_size */
#include <stdlib.h>
#include <string.h>

#include "bind/box.h"
#include "bind/core.h"
#include "model/tokenizer.h"

#define TOKENIZER "weft.tokenizer"
#define STREAM "weft.token_stream"
#define BUFFER "weft.token_buffer"

static weft_tokenizer *check_tokenizer(lua_State *L, int index)
{
    return (weft_tokenizer *)weft_box_check(L, index, TOKENIZER);
}

/* ---- memory that must not be lost when Lua raises ---- */

typedef struct {
    weft_token_ids ids;
    weft_text text;
} buffer;

static int buffer_gc(lua_State *L)
{
    buffer *b = lua_touserdata(L, 1);
    weft_token_ids_free(&b->ids);
    weft_text_free(&b->text);
    return 0;
}

static buffer *push_buffer(lua_State *L)
{
    buffer *b = lua_newuserdata(L, sizeof *b);
    memset(b, 0, sizeof *b);
    if (luaL_newmetatable(L, BUFFER)) {
        lua_pushcfunction(L, buffer_gc);
        lua_setfield(L, -2, "__gc");
    }
    lua_setmetatable(L, -2);
    return b;
}

/* Pushes the buffer's text and frees its memory at once. */
static int push_text(lua_State *L, buffer *b)
{
    lua_pushlstring(L, b->text.data == NULL ? "" : b->text.data, b->text.length);
    weft_token_ids_free(&b->ids);
    weft_text_free(&b->text);
    return 1;
}

/* ---- loading ---- */

static int finish_load(lua_State *L, weft_status status, weft_tokenizer *tokenizer, weft_object **slot)
{
    if (status == WEFT_MEMORY) weft_raise_if(L, status);
    if (status != WEFT_OK) return weft_push_failure(L, status);
    *slot = weft_tokenizer_object(tokenizer);
    return 1;
}

static int l_load(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    weft_object **slot = weft_box_new(L, TOKENIZER);
    weft_tokenizer *tokenizer = NULL;
    weft_status status = weft_tokenizer_load(&tokenizer, path);
    return finish_load(L, status, tokenizer, slot);
}

static int l_parse(lua_State *L)
{
    size_t bytes;
    const char *json = luaL_checklstring(L, 1, &bytes), *name = luaL_optstring(L, 2, "tokenizer.json");
    weft_object **slot = weft_box_new(L, TOKENIZER);
    weft_tokenizer *tokenizer = NULL;
    weft_status status = weft_tokenizer_parse(&tokenizer, name, json, bytes);
    return finish_load(L, status, tokenizer, slot);
}

/* ---- text and ids ---- */

static int option(lua_State *L, int index, const char *name, int fallback)
{
    if (lua_isnoneornil(L, index)) return fallback;
    luaL_checktype(L, index, LUA_TTABLE);
    return weft_field_bool_or(L, index, name, fallback);
}

static int l_encode(lua_State *L)
{
    weft_tokenizer *tokenizer = check_tokenizer(L, 1);
    size_t bytes;
    luaL_checktype(L, 2, LUA_TSTRING);
    const char *text = lua_tolstring(L, 2, &bytes);
    unsigned flags = 0;
    if (option(L, 3, "add_special", 1)) flags |= WEFT_ENCODE_ADD_SPECIAL;
    if (option(L, 3, "match_special", 1)) flags |= WEFT_ENCODE_MATCH_SPECIAL;
    if (option(L, 3, "continues", 0)) flags |= WEFT_ENCODE_CONTINUES;
    buffer *b = push_buffer(L);
    weft_raise_if(L, weft_tokenizer_encode(tokenizer, text, bytes, flags, &b->ids));
    lua_createtable(L, b->ids.count > INT32_MAX ? 0 : (int)b->ids.count, 0);
    for (size_t i = 0; i < b->ids.count; i++) {
        lua_pushinteger(L, b->ids.ids[i]);
        lua_rawseti(L, -2, (int)i + 1);
    }
    weft_token_ids_free(&b->ids);
    return 1;
}

/* A whole number that no tokenizer has as an id may still be asked for: it is -1. */
static int32_t check_id(lua_State *L, int index)
{
    if (lua_type(L, index) != LUA_TNUMBER) luaL_error(L, "wanted token ids, found %s", luaL_typename(L, index));
    double id = lua_tonumber(L, index);
    return id >= 0 && id < INT32_MAX && id == (double)(int32_t)id ? (int32_t)id : -1;
}

static void read_ids(lua_State *L, int index, buffer *b)
{
    size_t count = lua_objlen(L, index);
    b->ids.ids = count == 0 ? NULL : calloc(count, sizeof *b->ids.ids);
    if (count > 0 && b->ids.ids == NULL) weft_raise_if(L, weft_fail(WEFT_MEMORY, "no memory for %zu ids", count));
    b->ids.count = b->ids.capacity = count;
    for (size_t i = 0; i < count; i++) {
        lua_rawgeti(L, index, (int)i + 1);
        b->ids.ids[i] = check_id(L, -1);
        lua_pop(L, 1);
    }
}

static int l_decode(lua_State *L)
{
    weft_tokenizer *tokenizer = check_tokenizer(L, 1);
    luaL_checktype(L, 2, LUA_TTABLE);
    int skip_special = option(L, 3, "skip_special", 1);
    buffer *b = push_buffer(L);
    read_ids(L, 2, b);
    weft_raise_if(L, weft_tokenizer_decode(tokenizer, b->ids.ids, b->ids.count, skip_special, &b->text));
    return push_text(L, b);
}

/* ---- streams ---- */

static int l_stream(lua_State *L)
{
    weft_tokenizer *tokenizer = check_tokenizer(L, 1);
    int skip_special = option(L, 2, "skip_special", 1);
    weft_object **slot = weft_box_new(L, STREAM);
    weft_token_stream *stream = NULL;
    weft_raise_if(L, weft_token_stream_create(&stream, tokenizer, skip_special));
    *slot = weft_token_stream_object(stream);
    return 1;
}

static int l_push(lua_State *L)
{
    weft_token_stream *stream = (weft_token_stream *)weft_box_check(L, 1, STREAM);
    int32_t id = check_id(L, 2);
    buffer *b = push_buffer(L);
    weft_raise_if(L, weft_token_stream_push(stream, id, &b->text));
    return push_text(L, b);
}

static int l_finish(lua_State *L)
{
    weft_token_stream *stream = (weft_token_stream *)weft_box_check(L, 1, STREAM);
    buffer *b = push_buffer(L);
    weft_raise_if(L, weft_token_stream_finish(stream, &b->text));
    return push_text(L, b);
}

/* ---- the vocabulary ---- */

static int l_id(lua_State *L)
{
    weft_tokenizer *tokenizer = check_tokenizer(L, 1);
    size_t bytes;
    const char *token = luaL_checklstring(L, 2, &bytes);
    int32_t id = weft_tokenizer_id(tokenizer, token, bytes);
    if (id < 0) lua_pushnil(L);
    else lua_pushinteger(L, id);
    return 1;
}

static int l_token(lua_State *L)
{
    weft_tokenizer *tokenizer = check_tokenizer(L, 1);
    size_t bytes = 0;
    const char *token = weft_tokenizer_token(tokenizer, check_id(L, 2), &bytes);
    if (token == NULL) lua_pushnil(L);
    else lua_pushlstring(L, token, bytes);
    return 1;
}

static int l_special_ids(lua_State *L)
{
    weft_tokenizer *tokenizer = check_tokenizer(L, 1);
    lua_newtable(L);
    for (int32_t id = 0, n = 0; id < weft_tokenizer_vocab_size(tokenizer); id++) {
        if (!weft_tokenizer_is_special(tokenizer, id)) continue;
        lua_pushinteger(L, id);
        lua_rawseti(L, -2, ++n);
    }
    return 1;
}

static int fields(lua_State *L)
{
    weft_tokenizer *tokenizer = check_tokenizer(L, 1);
    if (strcmp(luaL_checkstring(L, 2), "vocab_size") == 0) lua_pushinteger(L, weft_tokenizer_vocab_size(tokenizer));
    else lua_pushnil(L);
    return 1;
}

static int to_string(lua_State *L)
{
    weft_tokenizer *tokenizer = (weft_tokenizer *)weft_box_test(L, 1, TOKENIZER);
    if (tokenizer == NULL) lua_pushliteral(L, "weft.tokenizer (closed)");
    else lua_pushfstring(L, "weft.tokenizer (%d tokens)", (int)weft_tokenizer_vocab_size(tokenizer));
    return 1;
}

void weft_open_tokenizer(lua_State *L) /* module */
{
    static const luaL_Reg methods[] = {{"encode", l_encode},
                                       {"decode", l_decode},
                                       {"stream", l_stream},
                                       {"id", l_id},
                                       {"token", l_token},
                                       {"special_ids", l_special_ids},
                                       {NULL, NULL}};
    static const luaL_Reg stream_methods[] = {{"push", l_push}, {"finish", l_finish}, {NULL, NULL}};
    static const luaL_Reg functions[] = {{"load", l_load}, {"parse", l_parse}, {NULL, NULL}};
    weft_box_class(L, TOKENIZER, methods, fields, to_string);
    weft_box_class(L, STREAM, stream_methods, NULL, NULL);
    lua_newtable(L);
    luaL_setfuncs(L, functions, 0); /* module tokenizer */
    lua_setfield(L, -2, "tokenizer");
}
