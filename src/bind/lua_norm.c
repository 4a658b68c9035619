/* bind/lua_norm.c - weft.rms_norm, weft.minimax_rms_norm, silu_mul and add.
 *
 *   core.rms_norm{hidden_size=, eps=1e-6, dtype="auto", name=}
 *     :load(source) :forward(x [, residual]) -> y, residual becomes x + residual
 *     :forward_heads(x) -> x, each head of hidden_size in place
 *   core.minimax_rms_norm{hidden_size=, eps=, parallel_plan=, weight_shard_world_size=, weight_shard_rank=, ...}
 *     :load(source) :forward(x) -> y
 *     q_norm:forward_qk(k_norm, qkv [, q_size, k_size]) -> q, k
 *   core.silu_mul(x) -> silu(x[:, :n]) * x[:, n:]      core.add(a, b) -> a + b */
#include <string.h>

#include "bind/box.h"
#include "bind/core.h"
#include "bind/layer_args.h"
#include "bind/source_args.h"
#include "layers/activation.h"
#include "layers/minimax_rms_norm.h"
#include "layers/rms_norm.h"

#define NORM "weft.rms_norm"
#define MINIMAX "weft.minimax_rms_norm"

static int64_t gain_bytes(const weft_tensor *gain)
{
    return gain == NULL ? 0 : weft_tensor_numel(gain) * (int64_t)weft_dtype_size(gain->dtype);
}

static int l_norm(lua_State *L)
{
    static const char *const keys[] = {"hidden_size", "eps", "dtype", "name", NULL};
    luaL_checktype(L, 1, LUA_TTABLE);
    weft_check_keys(L, 1, "rms_norm", keys);
    const char *name = weft_field_string_or(L, 1, "name", "rms_norm");
    int64_t hidden_size = weft_field_int(L, 1, "hidden_size", 1, 1 << 30);
    double eps = weft_field_number_or(L, 1, "eps", 1e-6);
    weft_dtype dtype = WEFT_F32;
    int convert = weft_check_weight_dtype(L, 1, "dtype", &dtype);
    weft_object **slot = weft_box_new(L, NORM);
    weft_rms_norm *norm = NULL;
    weft_raise_if(L, weft_rms_norm_create(&norm, weft_lua_rank(L), name, hidden_size, eps, convert, dtype));
    *slot = &norm->object;
    return 1;
}

static weft_rms_norm *check_norm(lua_State *L)
{
    return (weft_rms_norm *)weft_box_check(L, 1, NORM);
}

static int l_load(lua_State *L)
{
    weft_raise_if(L, weft_rms_norm_load(check_norm(L), weft_check_source(L, 2)));
    lua_settop(L, 1);
    return 1;
}

static int l_forward(lua_State *L)
{
    weft_rms_norm *norm = check_norm(L);
    weft_tensor *y = NULL;
    weft_raise_if(L, weft_rms_norm_forward(norm, weft_check_tensor(L, 2), weft_opt_tensor(L, 3), &y));
    weft_push_tensor(L, y);
    return 1;
}

static int l_forward_heads(lua_State *L)
{
    weft_raise_if(L, weft_rms_norm_forward_heads(check_norm(L), weft_check_tensor(L, 2)));
    lua_settop(L, 2);
    return 1;
}

static int norm_fields(lua_State *L)
{
    weft_rms_norm *norm = check_norm(L);
    const char *name = luaL_checkstring(L, 2);
    const weft_number_field numbers[] = {
        {"hidden_size", (double)norm->hidden_size}, {"eps", norm->eps}, {"weight_bytes", (double)gain_bytes(norm->gain)}, {NULL, 0}};
    if (strcmp(name, "name") == 0) {
        lua_pushstring(L, norm->name);
        return 1;
    }
    return weft_push_number_field(L, name, numbers);
}

/* ---- over all heads of the model ---- */

static int l_minimax(lua_State *L)
{
    static const char *const keys[] = {"hidden_size", "eps", "dtype", "name", "parallel_plan", "weight_shard_world_size",
                                       "weight_shard_rank", NULL};
    luaL_checktype(L, 1, LUA_TTABLE);
    weft_check_keys(L, 1, "minimax_rms_norm", keys);
    weft_minimax_rms_norm_options options = {
        .name = weft_field_string_or(L, 1, "name", "minimax_rms_norm"),
        .hidden_size = weft_field_int(L, 1, "hidden_size", 1, 1 << 30),
        .eps = weft_field_number_or(L, 1, "eps", 1e-6),
        .plan = weft_check_parallel_plan(L, 1),
        .weight_shard_world_size = (int)weft_field_int_or(L, 1, "weight_shard_world_size", 1, 1 << 20, 0),
        .weight_shard_rank = (int)weft_field_int_or(L, 1, "weight_shard_rank", 0, 1 << 20, -1),
    };
    if ((options.weight_shard_world_size > 0) != (options.weight_shard_rank >= 0))
        luaL_error(L, "weight_shard_world_size and weight_shard_rank go together");
    options.convert = weft_check_weight_dtype(L, 1, "dtype", &options.dtype);
    weft_object **slot = weft_box_new(L, MINIMAX);
    weft_minimax_rms_norm *norm = NULL;
    weft_raise_if(L, weft_minimax_rms_norm_create(&norm, weft_lua_rank(L), &options));
    *slot = &norm->object;
    return 1;
}

static weft_minimax_rms_norm *check_minimax(lua_State *L, int index)
{
    return (weft_minimax_rms_norm *)weft_box_check(L, index, MINIMAX);
}

static int l_minimax_load(lua_State *L)
{
    weft_raise_if(L, weft_minimax_rms_norm_load(check_minimax(L, 1), weft_check_source(L, 2)));
    lua_settop(L, 1);
    return 1;
}

static int l_minimax_forward(lua_State *L)
{
    weft_minimax_rms_norm *norm = check_minimax(L, 1);
    weft_tensor *y = NULL;
    weft_raise_if(L, weft_minimax_rms_norm_forward(norm, weft_check_tensor(L, 2), &y));
    weft_push_tensor(L, y);
    return 1;
}

/* Sizes that the caller states must be those of the norms. */
static void check_size(lua_State *L, int index, const char *what, int64_t size)
{
    if (lua_isnoneornil(L, index)) return;
    lua_Number given = luaL_checknumber(L, index);
    if (given != (lua_Number)size) luaL_error(L, "%s is %f, but the norm's shard holds %f", what, given, (lua_Number)size);
}

static int l_forward_qk(lua_State *L)
{
    weft_minimax_rms_norm *q_norm = check_minimax(L, 1), *k_norm = check_minimax(L, 2);
    weft_tensor *qkv = weft_check_tensor(L, 3), *q = NULL, *k = NULL;
    check_size(L, 4, "q_size", q_norm->size);
    check_size(L, 5, "k_size", k_norm->size);
    weft_object **q_slot = weft_box_new(L, WEFT_TENSOR), **k_slot = weft_box_new(L, WEFT_TENSOR);
    weft_raise_if(L, weft_minimax_rms_norm_forward_qk(q_norm, k_norm, qkv, &q, &k));
    *q_slot = &q->object;
    *k_slot = &k->object;
    return 2;
}

static int minimax_fields(lua_State *L)
{
    weft_minimax_rms_norm *norm = check_minimax(L, 1);
    const char *name = luaL_checkstring(L, 2);
    const weft_number_field numbers[] = {{"hidden_size", (double)norm->total_size},
                                         {"local_size", (double)norm->size},
                                         {"offset", (double)norm->offset},
                                         {"eps", norm->eps},
                                         {"weight_bytes", (double)gain_bytes(norm->gain)},
                                         {NULL, 0}};
    if (strcmp(name, "name") == 0) lua_pushstring(L, norm->name);
    else if (strcmp(name, "parallel_plan") == 0) weft_push_plan(L, norm->plan);
    else return weft_push_number_field(L, name, numbers);
    return 1;
}

static int l_silu_mul(lua_State *L)
{
    weft_tensor *x = weft_check_tensor(L, 1), *y = NULL;
    weft_raise_if(L, weft_silu_mul_forward(weft_lua_rank(L), x, &y));
    weft_push_tensor(L, y);
    return 1;
}

static int l_add(lua_State *L)
{
    weft_tensor *a = weft_check_tensor(L, 1), *b = weft_check_tensor(L, 2), *y = NULL;
    weft_raise_if(L, weft_add_forward(weft_lua_rank(L), a, b, &y));
    weft_push_tensor(L, y);
    return 1;
}

void weft_open_norm(lua_State *L)
{
    static const luaL_Reg norm_methods[] = {
        {"load", l_load}, {"forward", l_forward}, {"forward_heads", l_forward_heads}, {NULL, NULL}};
    static const luaL_Reg minimax_methods[] = {
        {"load", l_minimax_load}, {"forward", l_minimax_forward}, {"forward_qk", l_forward_qk}, {NULL, NULL}};
    static const luaL_Reg functions[] = {
        {"rms_norm", l_norm}, {"minimax_rms_norm", l_minimax}, {"silu_mul", l_silu_mul}, {"add", l_add}, {NULL, NULL}};
    weft_box_class(L, NORM, norm_methods, norm_fields, NULL);
    weft_box_class(L, MINIMAX, minimax_methods, minimax_fields, NULL);
    luaL_setfuncs(L, functions, 0);
    weft_open_rotary(L);
}
