/* bind/lua_rotary.c - weft.rotary.
 *
 *   core.rotary{head_size=, rotary_dim=head_size, max_position=, rope_theta=10000, rope_scaling={type=, factor=, ...}}
 *     :forward(positions, q [, k]) rotates q and k in place   :reserve(n)   :inv_freq() -> {...}
 *   rope_scaling takes the names of config.json: rope_type (or type), factor, original_max_position_embeddings,
 *   low_freq_factor, high_freq_factor, beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate, ... */
#include <math.h>
#include <string.h>

#include "bind/box.h"
#include "bind/core.h"
#include "bind/layer_args.h"
#include "layers/rotary.h"

#define ROTARY "weft.rotary"

static double required_number(lua_State *L, int index, const char *name, const char *type)
{
    double value = weft_field_number_or(L, index, name, NAN);
    if (isnan(value)) luaL_error(L, "rope_scaling of type '%s' needs %s", type, name);
    return value;
}

/* rope_type, or the older word type; both only when they agree. */
static const char *check_type_name(lua_State *L, int index)
{
    const char *modern = weft_field_string_or(L, index, "rope_type", NULL);
    const char *legacy = weft_field_string_or(L, index, "type", NULL);
    if (modern != NULL && legacy != NULL && strcmp(modern, legacy) != 0)
        luaL_error(L, "rope_scaling says rope_type '%s' and type '%s'", modern, legacy);
    return modern != NULL ? modern : legacy != NULL ? legacy : "default";
}

static weft_rope_scaling check_scaling(lua_State *L, int index)
{
    static const char *const keys[] = {"rope_type", "type", "factor", "alpha", "low_freq_factor", "high_freq_factor",
                                       "original_max_position_embeddings", "beta_fast", "beta_slow", "extrapolation_factor",
                                       "attention_factor", "attn_factor", "mscale", "mscale_all_dim", "apply_yarn_scaling",
                                       "truncate", "rope_theta", "partial_rotary_factor", NULL};
    weft_rope_scaling s = weft_rope_scaling_default();
    const char *type = check_type_name(L, index);
    weft_raise_if(L, weft_rope_type_from_name(type, &s.type));
    weft_check_keys(L, index, "rope_scaling", keys);
    s.original_max_position = weft_field_int_or(L, index, "original_max_position_embeddings", 1, 1 << 30, 0);
    if (s.type == WEFT_ROPE_LINEAR || s.type == WEFT_ROPE_YARN || s.type == WEFT_ROPE_LLAMA3)
        s.factor = required_number(L, index, "factor", type);
    if (s.type == WEFT_ROPE_LLAMA3) {
        s.low_freq_factor = required_number(L, index, "low_freq_factor", type);
        s.high_freq_factor = required_number(L, index, "high_freq_factor", type);
        if (s.original_max_position == 0) luaL_error(L, "rope_scaling of type 'llama3' needs original_max_position_embeddings");
    }
    s.alpha = weft_field_number_or(L, index, "alpha", s.alpha);
    s.beta_fast = weft_field_number_or(L, index, "beta_fast", s.beta_fast);
    s.beta_slow = weft_field_number_or(L, index, "beta_slow", s.beta_slow);
    s.extrapolation_factor = weft_field_number_or(L, index, "extrapolation_factor", s.extrapolation_factor);
    s.attention_factor = weft_field_number_or(L, index, "attention_factor", s.attention_factor);
    s.attn_factor = weft_field_number_or(L, index, "attn_factor", s.attn_factor);
    s.mscale = weft_field_number_or(L, index, "mscale", s.mscale);
    s.mscale_all_dim = weft_field_number_or(L, index, "mscale_all_dim", s.mscale_all_dim);
    s.apply_yarn_scaling = weft_field_bool_or(L, index, "apply_yarn_scaling", s.apply_yarn_scaling);
    s.truncate = weft_field_bool_or(L, index, "truncate", s.truncate);
    return s;
}

static int partial_dim(lua_State *L, int index, int head_size)
{
    double factor = weft_field_number_or(L, index, "partial_rotary_factor", 1);
    if (!(factor > 0 && factor <= 1)) luaL_error(L, "partial_rotary_factor must be above 0 and at most 1, got %f", factor);
    return (int)(head_size * factor);
}

static int l_rotary(lua_State *L)
{
    static const char *const keys[] = {"head_size", "rotary_dim", "max_position", "rope_theta", "rope_scaling", NULL};
    luaL_checktype(L, 1, LUA_TTABLE);
    weft_check_keys(L, 1, "rotary", keys);
    int head_size = (int)weft_field_int(L, 1, "head_size", 1, 65536);
    int rotary_dim = (int)weft_field_int_or(L, 1, "rotary_dim", 1, 65536, 0);
    int64_t max_position = weft_field_int(L, 1, "max_position", 1, 1 << 30);
    double theta = weft_field_number_or(L, 1, "rope_theta", 10000);
    weft_rope_scaling scaling = weft_rope_scaling_default();
    lua_getfield(L, 1, "rope_scaling");
    if (lua_istable(L, -1)) {
        int index = lua_gettop(L);
        scaling = check_scaling(L, index);
        theta = weft_field_number_or(L, 1, "rope_theta", weft_field_number_or(L, index, "rope_theta", theta));
        if (rotary_dim == 0) rotary_dim = partial_dim(L, index, head_size);
    } else if (!lua_isnil(L, -1)) luaL_error(L, "rope_scaling must be a table, got %s", luaL_typename(L, -1));
    weft_object **slot = weft_box_new(L, ROTARY);
    weft_rotary *rotary = NULL;
    weft_raise_if(L, weft_rotary_create(&rotary, weft_lua_rank(L), head_size, rotary_dim, max_position, theta, &scaling));
    *slot = &rotary->object;
    return 1;
}

static weft_rotary *check_rotary(lua_State *L)
{
    return (weft_rotary *)weft_box_check(L, 1, ROTARY);
}

static int l_forward(lua_State *L)
{
    weft_rotary *rotary = check_rotary(L);
    weft_raise_if(L, weft_rotary_forward(rotary, weft_check_tensor(L, 2), weft_check_tensor(L, 3), weft_opt_tensor(L, 4)));
    return 0;
}

static int l_reserve(lua_State *L)
{
    weft_rotary *rotary = check_rotary(L);
    weft_raise_if(L, weft_rotary_reserve(rotary, (int64_t)luaL_checknumber(L, 2)));
    return 0;
}

static int l_inv_freq(lua_State *L)
{
    weft_rotary *rotary = check_rotary(L);
    lua_createtable(L, rotary->rotary_dim / 2, 0);
    for (int i = 0; i < rotary->rotary_dim / 2; i++) {
        lua_pushnumber(L, rotary->inv_freq[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int fields(lua_State *L)
{
    weft_rotary *rotary = check_rotary(L);
    const char *name = luaL_checkstring(L, 2);
    const weft_tensor *table = rotary->table;
    const weft_number_field numbers[] = {
        {"head_size", rotary->head_size},
        {"rotary_dim", rotary->rotary_dim},
        {"max_positions", (double)rotary->max_positions},
        {"scale", rotary->scale},
        {"weight_bytes", table != NULL ? (double)table->storage->bytes : 0},
        {NULL, 0},
    };
    if (strcmp(name, "rope_type") == 0) {
        lua_pushstring(L, weft_rope_type_name(rotary->scaling.type));
        return 1;
    }
    return weft_push_number_field(L, name, numbers);
}

void weft_open_rotary(lua_State *L)
{
    static const luaL_Reg methods[] = {{"forward", l_forward}, {"reserve", l_reserve}, {"inv_freq", l_inv_freq}, {NULL, NULL}};
    weft_box_class(L, ROTARY, methods, fields, NULL);
    lua_pushcfunction(L, l_rotary);
    lua_setfield(L, -2, "rotary");
}
