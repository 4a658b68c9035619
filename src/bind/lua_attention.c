/* bind/lua_attention.c - weft.hetero_attention and weft.encoder_attention.
 *
 *   core.hetero_attention{num_heads=, num_kv_heads=, head_size= [, v_head_size=, total_num_heads=,
 *       total_num_kv_heads=, parallel_plan=, sliding_window=, scale=, kv_dtype="float32"]}
 *     parallel_plan: else the attention plan of layer_parallel
 *     .num_heads .num_kv_heads .head_size .v_head_size .output_num_heads .output_first_head
 *     .parallel_plan .sliding_window .kv_dtype .page_tokens .num_blocks .cache_bytes (0 before bind_cache)
 *     :bytes_per_block(block_tokens)  :bind_cache(num_blocks, block_tokens)
 *     :forward(q, k, v, step) -> [T, output_num_heads * v_head_size]
 *     :traffic() -> {steps=, exchanges=, bytes_sent=, exchange_seconds=, total_seconds=}
 *     :cache() -> k, v      the pages, for looking at
 *   core.encoder_attention{the same without total_*, kv_dtype}: plan default, no cache; :forward
 *   core.kv_block_tokens(block_size, {attention, ..}) -> tokens of a virtual block
 *   core.kv_num_blocks(bytes, {attention, ..}, block_tokens) -> how many fit */
#include <limits.h>
#include <string.h>

#include "bind/box.h"
#include "bind/core.h"
#include "bind/plan_args.h"
#include "bind/step_args.h"
#include "layers/encoder_attention.h"
#include "layers/hetero_attention.h"

#define HETERO_ATTENTION "weft.hetero_attention"
#define ENCODER_ATTENTION "weft.encoder_attention"

enum { MAX_LAYERS = 4096 };

static int int_field(lua_State *L, const char *name, int low, int fallback)
{
    return (int)weft_field_int_or(L, 1, name, low, INT_MAX, fallback);
}

/* ---- hetero attention ---- */

static weft_hetero_attention *check_attention(lua_State *L, int index)
{
    return (weft_hetero_attention *)weft_box_check(L, index, HETERO_ATTENTION); /* the object is the first member */
}

static int l_hetero_attention(lua_State *L)
{
    static const char *const names[] = {"num_heads",     "num_kv_heads",    "head_size",          "v_head_size",
                                        "total_num_heads", "total_num_kv_heads", "parallel_plan", "sliding_window",
                                        "scale",         "kv_dtype",        NULL};
    weft_check_keys(L, 1, "hetero_attention", names);
    weft_hetero_attention_options o = {0};
    o.num_heads = (int)weft_field_int(L, 1, "num_heads", 1, INT_MAX);
    o.num_kv_heads = int_field(L, "num_kv_heads", 1, o.num_heads);
    o.head_size = (int)weft_field_int(L, 1, "head_size", 1, INT_MAX);
    o.v_head_size = int_field(L, "v_head_size", 1, o.head_size);
    o.total_num_heads = int_field(L, "total_num_heads", 1, 0);
    o.total_num_kv_heads = int_field(L, "total_num_kv_heads", 1, 0);
    o.sliding_window = int_field(L, "sliding_window", 0, 0);
    o.scale = (float)weft_field_number_or(L, 1, "scale", 0);
    const char *dtype = weft_field_string_or(L, 1, "kv_dtype", "float32");
    if (!weft_dtype_from_name(dtype, &o.kv_dtype)) luaL_error(L, "unknown kv_dtype '%s'", dtype);
    if (!weft_opt_plan_field(L, 1, "parallel_plan", &o.plan)) o.plan = weft_layer_plan(L, WEFT_LAYER_ATTENTION, -1);
    weft_rank *rank = weft_lua_rank(L);
    weft_object **slot = weft_box_new(L, HETERO_ATTENTION);
    weft_hetero_attention *attention = NULL;
    weft_raise_if(L, weft_hetero_attention_create(&attention, rank, &o));
    *slot = weft_hetero_attention_object(attention);
    return 1;
}

static int64_t check_count(lua_State *L, int index, const char *what)
{
    lua_Number count = luaL_checknumber(L, index);
    if (!(count >= 1 && count <= INT_MAX) || count != (lua_Number)(int)count) luaL_error(L, "%s must be a positive integer", what);
    return (int64_t)count;
}

static int l_bytes_per_block(lua_State *L)
{
    weft_kv_cache_shape shape = weft_hetero_attention_cache_shape(check_attention(L, 1));
    int64_t bytes = 0;
    weft_raise_if(L, weft_kv_block_bytes(&shape, check_count(L, 2, "block_tokens"), &bytes));
    lua_pushnumber(L, (lua_Number)bytes);
    return 1;
}

static int l_bind_cache(lua_State *L)
{
    weft_hetero_attention *attention = check_attention(L, 1);
    int64_t num_blocks = check_count(L, 2, "num_blocks"), block_tokens = check_count(L, 3, "block_tokens");
    weft_raise_if(L, weft_hetero_attention_bind_cache(attention, num_blocks, block_tokens));
    return 0;
}

static int l_forward(lua_State *L)
{
    weft_hetero_attention *attention = check_attention(L, 1);
    weft_tensor *q = weft_check_tensor(L, 2), *k = weft_check_tensor(L, 3), *v = weft_check_tensor(L, 4), *out = NULL;
    weft_raise_if(L, weft_hetero_attention_forward(attention, q, k, v, weft_check_step(L, 5), &out));
    weft_push_tensor(L, out);
    return 1;
}

static int l_traffic(lua_State *L)
{
    weft_hetero_attention_traffic t = weft_hetero_attention_get_traffic(check_attention(L, 1));
    const struct {
        const char *name;
        double value;
    } counters[] = {{"steps", (double)t.steps},
                    {"exchanges", (double)t.exchanges},
                    {"bytes_sent", (double)t.bytes_sent},
                    {"exchange_seconds", t.exchange_seconds},
                    {"total_seconds", t.total_seconds}};
    lua_createtable(L, 0, 5);
    for (size_t i = 0; i < sizeof counters / sizeof *counters; i++) {
        lua_pushnumber(L, counters[i].value);
        lua_setfield(L, -2, counters[i].name);
    }
    return 1;
}

static int l_cache(lua_State *L)
{
    const weft_kv_cache *cache = weft_hetero_attention_cache(check_attention(L, 1));
    if (cache == NULL) return 0;
    weft_push_tensor(L, WEFT_RETAIN(cache->k));
    weft_push_tensor(L, WEFT_RETAIN(cache->v));
    return 2;
}

static int fields(lua_State *L)
{
    weft_hetero_attention *attention = check_attention(L, 1);
    const weft_hetero_attention_options *o = weft_hetero_attention_get_options(attention);
    const weft_kv_cache *cache = weft_hetero_attention_cache(attention);
    const char *name = luaL_checkstring(L, 2);
    if (strcmp(name, "num_heads") == 0) lua_pushinteger(L, o->num_heads);
    else if (strcmp(name, "num_kv_heads") == 0) lua_pushinteger(L, o->num_kv_heads);
    else if (strcmp(name, "head_size") == 0) lua_pushinteger(L, o->head_size);
    else if (strcmp(name, "v_head_size") == 0) lua_pushinteger(L, o->v_head_size);
    else if (strcmp(name, "sliding_window") == 0) lua_pushinteger(L, o->sliding_window);
    else if (strcmp(name, "kv_dtype") == 0) lua_pushstring(L, weft_dtype_name(o->kv_dtype));
    else if (strcmp(name, "output_num_heads") == 0) lua_pushinteger(L, weft_hetero_attention_output_heads(attention));
    else if (strcmp(name, "output_first_head") == 0) lua_pushinteger(L, weft_hetero_attention_output_first_head(attention));
    else if (strcmp(name, "parallel_plan") == 0) weft_push_plan(L, o->plan);
    else if (strcmp(name, "page_tokens") == 0) lua_pushnumber(L, cache ? (lua_Number)cache->page_tokens : 0);
    else if (strcmp(name, "num_blocks") == 0) lua_pushnumber(L, cache ? (lua_Number)cache->num_blocks : 0);
    else if (strcmp(name, "cache_bytes") == 0) lua_pushnumber(L, cache ? (lua_Number)cache->bytes : 0);
    else lua_pushnil(L);
    return 1;
}

/* ---- encoder attention ---- */

static int l_encoder_attention(lua_State *L)
{
    static const char *const names[] = {"num_heads",     "num_kv_heads",   "head_size", "v_head_size", "total_num_heads",
                                        "total_num_kv_heads", "parallel_plan", "sliding_window", "scale", NULL};
    weft_check_keys(L, 1, "encoder_attention", names);
    weft_encoder_attention_options o = {0};
    o.num_heads = (int)weft_field_int(L, 1, "num_heads", 1, INT_MAX);
    o.num_kv_heads = int_field(L, "num_kv_heads", 1, o.num_heads);
    o.head_size = (int)weft_field_int(L, 1, "head_size", 1, INT_MAX);
    o.v_head_size = int_field(L, "v_head_size", 1, o.head_size);
    o.sliding_window = int_field(L, "sliding_window", 0, 0);
    o.scale = (float)weft_field_number_or(L, 1, "scale", 0);
    if (!weft_opt_plan_field(L, 1, "parallel_plan", &o.plan)) o.plan = weft_layer_plan(L, WEFT_LAYER_DEFAULT, -1);
    weft_rank *rank = weft_lua_rank(L);
    weft_object **slot = weft_box_new(L, ENCODER_ATTENTION);
    weft_encoder_attention *attention = NULL;
    weft_raise_if(L, weft_encoder_attention_create(&attention, rank, &o));
    *slot = weft_encoder_attention_object(attention);
    return 1;
}

static weft_encoder_attention *check_encoder(lua_State *L)
{
    return (weft_encoder_attention *)weft_box_check(L, 1, ENCODER_ATTENTION);
}

static int l_encoder_forward(lua_State *L)
{
    weft_encoder_attention *attention = check_encoder(L);
    weft_tensor *q = weft_check_tensor(L, 2), *k = weft_check_tensor(L, 3), *v = weft_check_tensor(L, 4), *out = NULL;
    weft_raise_if(L, weft_encoder_attention_forward(attention, q, k, v, weft_check_step(L, 5), &out));
    weft_push_tensor(L, out);
    return 1;
}

static int encoder_fields(lua_State *L)
{
    const weft_encoder_attention_options *o = weft_encoder_attention_get_options(check_encoder(L));
    const char *name = luaL_checkstring(L, 2);
    if (strcmp(name, "num_heads") == 0 || strcmp(name, "output_num_heads") == 0) lua_pushinteger(L, o->num_heads);
    else if (strcmp(name, "num_kv_heads") == 0) lua_pushinteger(L, o->num_kv_heads);
    else if (strcmp(name, "output_first_head") == 0) lua_pushinteger(L, o->plan.input.rank * o->num_heads);
    else if (strcmp(name, "parallel_plan") == 0) weft_push_plan(L, o->plan);
    else lua_pushnil(L);
    return 1;
}

/* ---- sizes over a model's layers ---- */

/* The cache shapes of a list of attentions, in memory that Lua owns. */
static weft_kv_cache_shape *check_shapes(lua_State *L, int index, int *count)
{
    luaL_checktype(L, index, LUA_TTABLE);
    size_t length = lua_objlen(L, index);
    if (length < 1 || length > MAX_LAYERS) luaL_argerror(L, index, "expected a list of weft.hetero_attention");
    weft_kv_cache_shape *shapes = lua_newuserdata(L, length * sizeof *shapes);
    for (size_t i = 0; i < length; i++) {
        lua_rawgeti(L, index, (int)i + 1);
        shapes[i] = weft_hetero_attention_cache_shape(check_attention(L, -1));
        lua_pop(L, 1);
    }
    *count = (int)length;
    return shapes;
}

static int l_kv_block_tokens(lua_State *L)
{
    int count;
    int64_t block_size = check_count(L, 1, "block_size"), tokens = 0;
    weft_kv_cache_shape *shapes = check_shapes(L, 2, &count);
    weft_context_layout *contexts = lua_newuserdata(L, (size_t)count * sizeof *contexts);
    for (int i = 0; i < count; i++) contexts[i] = shapes[i].context;
    weft_raise_if(L, weft_kv_block_tokens(&tokens, block_size, contexts, count));
    lua_pushnumber(L, (lua_Number)tokens);
    return 1;
}

static int l_kv_num_blocks(lua_State *L)
{
    int count;
    int64_t blocks = 0;
    lua_Number bytes = luaL_checknumber(L, 1);
    luaL_argcheck(L, bytes >= 0 && bytes <= 9007199254740992.0, 1, "expected a number of bytes");
    weft_kv_cache_shape *shapes = check_shapes(L, 2, &count);
    weft_raise_if(L, weft_kv_num_blocks(&blocks, (int64_t)bytes, shapes, count, check_count(L, 3, "block_tokens")));
    lua_pushnumber(L, (lua_Number)blocks);
    return 1;
}

void weft_open_attention(lua_State *L)
{
    static const luaL_Reg methods[] = {
        {"bytes_per_block", l_bytes_per_block}, {"bind_cache", l_bind_cache}, {"forward", l_forward},
        {"traffic", l_traffic},                 {"cache", l_cache},           {NULL, NULL},
    };
    static const luaL_Reg encoder_methods[] = {{"forward", l_encoder_forward}, {NULL, NULL}};
    static const luaL_Reg functions[] = {
        {"hetero_attention", l_hetero_attention}, {"encoder_attention", l_encoder_attention},
        {"kv_block_tokens", l_kv_block_tokens},   {"kv_num_blocks", l_kv_num_blocks},
        {NULL, NULL},
    };
    weft_box_class(L, HETERO_ATTENTION, methods, fields, NULL);
    weft_box_class(L, ENCODER_ATTENTION, encoder_methods, encoder_fields, NULL);
    luaL_setfuncs(L, functions, 0);
}
