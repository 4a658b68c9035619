/* bind/lua_ops.h - what the bindings of the operations share: tensors and integers by name, from
 * the table at index 1. The table keeps its tensors alive for the length of the call. */
#pragma once

#include "bind/box.h"
#include "kernels/weft_kernels.h"

/* Raises with the name when the field is missing or no tensor. ndim < 0: any. */
weft_tensor *weft__op_tensor(lua_State *L, const char *name, int ndim);
weft_tensor *weft__op_tensor_or_nil(lua_State *L, const char *name, int ndim);
/* float32, every element adjacent. */
const float *weft__op_floats(lua_State *L, const char *name, const weft_tensor *tensor);
void weft__op_expect(lua_State *L, const char *name, const weft_tensor *tensor, int dim, int64_t size);
void weft__op_same_dtype(lua_State *L, const char *name, const weft_tensor *tensor, weft_dtype dtype);
void weft__op_contiguous(lua_State *L, const char *name, const weft_tensor *tensor);

/* A tensor as rows of adjacent elements, `stride` apart. */
typedef struct weft_op_rows {
    int64_t rows, cols, stride;
} weft_op_rows;
weft_op_rows weft__op_rows_of(lua_State *L, const char *name, const weft_tensor *tensor);
/* (tokens, heads, dim): heads and dim adjacent; returns the stride of tokens. */
int64_t weft__op_token_stride(lua_State *L, const char *name, const weft_tensor *tensor);

/* An int32 tensor, or a table of integers that becomes one on the stack; NULL when the field is nil
 * and may be. */
weft_tensor *weft__op_ints(lua_State *L, const char *name, int optional);
/* Pushes the tensor of field `name` (checked against shape and dtype), or a new one. */
weft_tensor *weft__op_output(lua_State *L, const char *name, weft_dtype dtype, int ndim, const int64_t *shape);
weft_dtype weft__op_dtype(lua_State *L, const char *name, weft_dtype fallback);
weft_pool *weft__op_pool(lua_State *L);

/* Sets functions that take exactly one table into the table on top. */
void weft__op_register(lua_State *L, const luaL_Reg *functions);
/* lua_ops_attention.c: the functions on caches and partial attention results. */
void weft__open_attention_ops(lua_State *L);
/* lua_ops_experts.c: routing and experts. */
void weft__open_expert_ops(lua_State *L);
