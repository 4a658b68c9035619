/* bind/plan_args.h - axes and plans as arguments, fields and results of Lua functions. */
#pragma once

#include <lua.h>

#include "plan/axis.h"
#include "plan/plan_table.h"
#include "plan/policy.h"

#define WEFT_AXIS "weft.axis"
#define WEFT_PLAN "weft.plan"
#define WEFT_POLICY "weft.policy"

void weft_push_axis(lua_State *L, weft_axis axis);
weft_axis weft_check_axis(lua_State *L, int index);
void weft_push_plan(lua_State *L, weft_plan plan);
weft_plan weft_check_plan(lua_State *L, int index);
/* table[name] when it is there: 1 and *out; nil: 0. Another type raises, naming the field. */
int weft_opt_plan_field(lua_State *L, int table_index, const char *name, weft_plan *out);

/* What layer_parallel.get(type, layer) gives in this Lua state; layer < 0: the type's plan. */
weft_plan weft_layer_plan(lua_State *L, weft_layer_type type, int layer);
/* Installs a copy of the table for this Lua state. */
void weft_install_plans(lua_State *L, const weft_plan_table *table);

/* "attention" or "ATTENTION"; an unknown name raises and lists the known ones. */
weft_layer_type weft_check_layer_type(lua_State *L, int index);
/* A whole number in the int range; `what` names it in the error. */
int weft_check_int(lua_State *L, int index, const char *what);
/* Raises when the table at index has a key that is not among the NULL-ended names. */
void weft_check_keys(lua_State *L, int index, const char *what, const char *const *names);

/* A key of `layers`, at index: 17, or "0-3" inclusive. Raises for anything else. */
void weft_check_layer_range(lua_State *L, int index, int *first, int *last);
/* Entries that begin with {int first_layer, last_layer; weft_layer_type type}, `stride` bytes apart, sorted by all
 * three: raises when ranges overlap. Types of one range may differ, nothing else may meet. */
void weft_check_layer_overlap(lua_State *L, const void *entries, int count, size_t stride);

/* A class of values, not boxes: the userdata is the struct itself, so there is nothing to close.
 * eq may be NULL. */
void weft_value_class(lua_State *L, const char *tname, lua_CFunction index, lua_CFunction eq, lua_CFunction tostring);
/* Pushes rows as {{0, 1}, {2, 3}}; not 0: Lua had no memory and its error is on top, rows still the caller's. */
int weft_try_push_rows(lua_State *L, const weft_rank_rows *rows);
/* The numbers of a model from the table at index: num_attention_heads, num_key_value_heads (default: the same),
 * intermediate_size, moe_intermediate_size, vocab_size, num_experts, num_hidden_layers, architecture,
 * supported_layer_types = {"attention", ...}. Strings live as long as the table. */
weft_model_numbers weft_check_model_numbers(lua_State *L, int index);

/* The parts of weft_open_plan, each with the module table on top. */
void weft_open_plan_values(lua_State *L);    /* axis, plan */
void weft_open_layer_parallel(lua_State *L); /* layer_parallel */
void weft_open_layout(lua_State *L);         /* layout */
void weft_open_parallel_config(lua_State *L); /* parallel_config, rank_grid */
void weft_open_policy(lua_State *L);          /* policy */
