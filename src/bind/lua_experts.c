/* bind/lua_experts.c - weft.router and weft.experts.
 *
 *   core.router{hidden_size=, num_experts=, num_experts_per_tok=, scoring="softmax", renormalize=true,
 *               bias=false, name=}
 *   router:load(source) :load_scale(source) :load_bias(source) :forward(x) -> ids, weights
 *   core.experts{num_experts=, hidden_size=, intermediate_size=, parallel_plan=, dtype="auto", name=, ...}
 *   experts:load("gate"|"up"|"down", expert, source) or :load("gate_up"|"down", source); :load_scale(...)
 *   experts:forward(x, ids, weights) -> y */
#include <stdio.h>
#include <string.h>

#include "bind/box.h"
#include "bind/core.h"
#include "bind/layer_args.h"
#include "bind/router_args.h"
#include "bind/source_args.h"
#include "layers/experts.h"
#include "layers/router.h"

#define ROUTER "weft.router"
#define EXPERTS "weft.experts"

enum { LARGEST_SIZE = 1 << 30, MOST_EXPERTS = 65536 };

/* ---- router ---- */

static int l_router(lua_State *L)
{
    static const char *const keys[] = {"hidden_size", "num_experts", "num_experts_per_tok", "scoring", "renormalize", "bias", "name", NULL};
    luaL_checktype(L, 1, LUA_TTABLE);
    weft_check_keys(L, 1, "router", keys);
    weft_router_options options = {
        .name = weft_field_string_or(L, 1, "name", "router"),
        .hidden_size = weft_field_int(L, 1, "hidden_size", 1, LARGEST_SIZE),
        .num_experts = weft_field_int(L, 1, "num_experts", 1, MOST_EXPERTS),
        .top_k = (int)weft_field_int(L, 1, "num_experts_per_tok", 1, MOST_EXPERTS),
        .scoring = weft_check_scoring(L, 1),
        .renormalize = weft_field_bool_or(L, 1, "renormalize", 1),
        .bias = weft_field_bool_or(L, 1, "bias", 0),
    };
    weft_object **slot = weft_box_new(L, ROUTER);
    weft_router *router = NULL;
    weft_raise_if(L, weft_router_create(&router, weft_lua_rank(L), &options));
    *slot = &router->object;
    return 1;
}

static weft_router *check_router(lua_State *L)
{
    return (weft_router *)weft_box_check(L, 1, ROUTER);
}

static int l_router_load(lua_State *L)
{
    return weft_load_weight(L, &check_router(L)->weight, weft_router_load_gate);
}

static int l_router_load_scale(lua_State *L)
{
    return weft_load_weight(L, &check_router(L)->weight, weft_linear_weight_load_scale);
}

static int l_router_load_bias(lua_State *L)
{
    weft_raise_if(L, weft_router_load_bias(check_router(L), weft_check_source(L, 2)));
    lua_settop(L, 1);
    return 1;
}

static int l_router_forward(lua_State *L)
{
    weft_router *router = check_router(L);
    weft_tensor *x = weft_check_tensor(L, 2), *ids = NULL, *weights = NULL;
    weft_object **first = weft_box_new(L, WEFT_TENSOR), **second = weft_box_new(L, WEFT_TENSOR);
    weft_raise_if(L, weft_router_forward(router, x, &ids, &weights));
    *first = &ids->object;
    *second = &weights->object;
    return 2;
}

static int router_fields(lua_State *L)
{
    weft_router *router = check_router(L);
    const char *name = luaL_checkstring(L, 2);
    const weft_number_field numbers[] = {
        {"num_experts", (double)router->weight.total_rows}, {"num_experts_per_tok", router->top_k},
        {"hidden_size", (double)router->weight.total_columns},
        {"weight_bytes", (double)(weft_linear_weight_bytes(&router->weight) + (router->bias != NULL ? router->bias->shape[0] * 4 : 0))},
        {NULL, 0}};
    if (strcmp(name, "name") == 0) lua_pushstring(L, router->weight.name);
    else return weft_push_number_field(L, name, numbers);
    return 1;
}

static int router_tostring(lua_State *L)
{
    weft_router *router = (weft_router *)weft_box_test(L, 1, ROUTER);
    char text[128] = ROUTER " (closed)";
    if (router != NULL)
        snprintf(text, sizeof text, "router: %d of %lld experts", router->top_k, (long long)router->weight.total_rows);
    lua_pushstring(L, text);
    return 1;
}

/* ---- experts ---- */

static int l_experts(lua_State *L)
{
    static const char *const keys[] = {"num_experts", "hidden_size", "intermediate_size", "parallel_plan", "dtype", "dequantize",
                                       "quantize_activations", "name", NULL};
    luaL_checktype(L, 1, LUA_TTABLE);
    weft_check_keys(L, 1, "experts", keys);
    weft_experts_options options = {
        .weight = weft_check_weight_options(L, 1, "experts"),
        .num_experts = weft_field_int(L, 1, "num_experts", 1, MOST_EXPERTS),
        .hidden_size = weft_field_int(L, 1, "hidden_size", 1, LARGEST_SIZE),
        .intermediate_size = weft_field_int(L, 1, "intermediate_size", 1, LARGEST_SIZE),
        .plan = weft_check_parallel_plan(L, 1),
    };
    weft_object **slot = weft_box_new(L, EXPERTS);
    weft_experts *experts = NULL;
    weft_raise_if(L, weft_experts_create(&experts, weft_lua_rank(L), &options));
    *slot = &experts->object;
    return 1;
}

static weft_experts *check_experts(lua_State *L)
{
    return (weft_experts *)weft_box_check(L, 1, EXPERTS);
}

typedef weft_status (*one_loader)(weft_experts *, weft_expert_part, int64_t, const weft_source *);
typedef weft_status (*all_loader)(weft_experts *, weft_expert_part, const weft_source *);

/* :load(part, expert, source) or :load(part, source) */
static int load(lua_State *L, one_loader one, all_loader all)
{
    static const char *const parts[] = {"gate", "up", "down", NULL}, *const fused[] = {"gate_up", "down", NULL};
    weft_experts *experts = check_experts(L);
    if (lua_gettop(L) >= 4) {
        weft_expert_part part = (weft_expert_part)luaL_checkoption(L, 2, NULL, parts);
        weft_raise_if(L, one(experts, part, (int64_t)luaL_checknumber(L, 3), weft_check_source(L, 4)));
    } else {
        weft_expert_part part = luaL_checkoption(L, 2, NULL, fused) == 0 ? WEFT_EXPERT_UP : WEFT_EXPERT_DOWN;
        weft_raise_if(L, all(experts, part, weft_check_source(L, 3)));
    }
    lua_settop(L, 1);
    return 1;
}

static int l_experts_load(lua_State *L)
{
    return load(L, weft_experts_load, weft_experts_load_fused);
}

static int l_experts_load_scale(lua_State *L)
{
    return load(L, weft_experts_load_scale, weft_experts_load_scale_fused);
}

static int l_experts_forward(lua_State *L)
{
    weft_experts *experts = check_experts(L);
    weft_tensor *x = weft_check_tensor(L, 2), *ids = weft_check_tensor(L, 3), *weights = weft_check_tensor(L, 4), *y = NULL;
    weft_raise_if(L, weft_experts_forward(experts, x, ids, weights, &y));
    weft_push_tensor(L, y);
    return 1;
}

static int experts_fields(lua_State *L)
{
    weft_experts *l = check_experts(L);
    const char *name = luaL_checkstring(L, 2);
    const weft_number_field numbers[] = {
        {"num_experts", (double)l->num_experts},          {"hidden_size", (double)l->hidden_size},
        {"intermediate_size", (double)l->intermediate_size}, {"local_intermediate_size", (double)l->width.count},
        {"first_expert", (double)l->experts.offset},      {"num_local_experts", (double)l->experts.count},
        {"weight_bytes", (double)weft_experts_bytes(l)},  {NULL, 0}};
    if (strcmp(name, "name") == 0) lua_pushstring(L, l->name);
    else if (strcmp(name, "parallel_plan") == 0) weft_push_plan(L, l->plan);
    else if (strcmp(name, "dtype") == 0 && l->up.w != NULL) lua_pushstring(L, weft_dtype_name(l->up.w->dtype));
    else return weft_push_number_field(L, name, numbers);
    return 1;
}

static int experts_tostring(lua_State *L)
{
    weft_experts *l = (weft_experts *)weft_box_test(L, 1, EXPERTS);
    char text[200] = EXPERTS " (closed)";
    if (l != NULL)
        snprintf(text, sizeof text, "experts %lld to %lld of %lld, columns %lld to %lld of %lld", (long long)l->experts.offset,
                 (long long)(l->experts.offset + l->experts.count - 1), (long long)l->num_experts, (long long)l->width.offset,
                 (long long)(l->width.offset + l->width.count - 1), (long long)l->intermediate_size);
    lua_pushstring(L, text);
    return 1;
}

void weft_open_experts(lua_State *L)
{
    static const luaL_Reg router_methods[] = {
        {"load", l_router_load}, {"load_scale", l_router_load_scale}, {"load_bias", l_router_load_bias}, {"forward", l_router_forward},
        {NULL, NULL}};
    static const luaL_Reg experts_methods[] = {
        {"load", l_experts_load}, {"load_scale", l_experts_load_scale}, {"forward", l_experts_forward}, {NULL, NULL}};
    static const luaL_Reg functions[] = {{"router", l_router}, {"experts", l_experts}, {NULL, NULL}};
    weft_box_class(L, ROUTER, router_methods, router_fields, router_tostring);
    weft_box_class(L, EXPERTS, experts_methods, experts_fields, experts_tostring);
    luaL_setfuncs(L, functions, 0);
}
