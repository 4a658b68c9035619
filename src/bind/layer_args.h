/* bind/layer_args.h - what the constructors and methods of layers have in common. */
#pragma once

#include "bind/plan_args.h"
#include "layers/linear_weight.h"

/* name (or `kind`), bias, dtype ("auto" keeps the checkpoint's), dequantize, quantize_activations of
 * the table at index. */
weft_weight_options weft_check_weight_options(lua_State *L, int index, const char *kind);
/* parallel_plan of the table, else the default plan of this state's layer_parallel. */
weft_plan weft_check_parallel_plan(lua_State *L, int index);
/* disable_tp: a world of one; axis; the plan's input (or output) axis. */
weft_axis weft_check_layer_axis(lua_State *L, int index, int output);
/* "auto" or none: 0; else 1 and one of the float dtypes. */
int weft_check_weight_dtype(lua_State *L, int index, const char *field, weft_dtype *dtype);

typedef struct weft_number_field {
    const char *name; /* NULL ends the list */
    double value;
} weft_number_field;
/* Pushes the value of `name`, or nil. */
int weft_push_number_field(lua_State *L, const char *name, const weft_number_field *fields);

typedef weft_status (*weft_weight_loader)(weft_linear_weight *w, int part, const weft_source *source);
/* layer:load([shard_id,] source) for any layer with a linear weight; returns the layer. */
int weft_load_weight(lua_State *L, weft_linear_weight *w, weft_weight_loader loader);

/* Further parts of weft_open_linear and weft_open_norm, each with the module table on top. */
void weft_open_embedding(lua_State *L); /* vocab_embedding, lm_head */
void weft_open_rotary(lua_State *L);
