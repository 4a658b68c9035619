/* bind/lua_ops.c - core.ops: every operation of the kernels for specs, scripts and the prompt.
 *
 * Each takes one table of named tensors and scalars and returns its outputs, which it makes unless
 * they are given (out =). Integer tensors may be given as tables. In place: rope, kv_write,
 * mask_dcp_empty_shards, and the residual of rms_norm.
 *
 *   embedding{w, ids, first = 0, dtype = w's}                        -> [tokens, hidden]
 *   linear{x, w, bias, scale, scale_row, scale_col_phase, add, dtype = x's}  -> [tokens, n]
 *   rms_norm{x, gain, eps = 1e-6, residual}                          -> as x
 *   group_norm_sums{x}                                               -> var [rows]
 *   group_norm_apply{x, var, gain, world = 1, eps = 1e-6}            -> as x
 *   rope{x = [tokens, heads, dim], positions, cos_sin = [positions, rotary_dim]}  -> x
 *   silu_mul{x = [rows, 2 cols]}  add{a, b}  gather_rows{x, indices}
 *   sample{logits, temperature, seed, position, first = 0}           -> id, value
 *   checksum{x} -> the sum of its 64-bit words, modulo 2^53
 *   philox(seed, position, id) -> u    isa() -> "avx2"
 * and those of lua_ops_attention.c and lua_ops_experts.c. threads = 1 keeps an operation on the
 * calling thread. */
#include "bind/lua_ops.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "bind/core.h"

/* ---- arguments ---- */

static int refuse(lua_State *L, const char *name, const weft_tensor *tensor, const char *wanted)
{
    char text[160];
    return luaL_error(L, "%s: expected %s, got %s", name, wanted, weft_tensor_describe(tensor, text, sizeof text));
}

weft_tensor *weft__op_tensor_or_nil(lua_State *L, const char *name, int ndim)
{
    lua_getfield(L, 1, name);
    if (lua_isnil(L, -1)) {
        lua_pop(L, 1);
        return NULL;
    }
    weft_tensor *tensor = (weft_tensor *)weft_box_test(L, -1, WEFT_TENSOR);
    if (tensor == NULL) luaL_error(L, "%s: expected an open weft.tensor, got %s", name, luaL_typename(L, -1));
    if (weft_tensor_check(tensor) != WEFT_OK) luaL_error(L, "%s: %s", name, weft_error_message());
    if (tensor->storage->cuda != NULL) luaL_error(L, "%s: core.ops compute on the host, and the tensor is on a GPU", name);
    lua_pop(L, 1);
    if (ndim >= 0 && tensor->ndim != ndim) {
        char wanted[40];
        snprintf(wanted, sizeof wanted, "%d dimensions", ndim);
        refuse(L, name, tensor, wanted);
    }
    return tensor;
}

weft_tensor *weft__op_tensor(lua_State *L, const char *name, int ndim)
{
    weft_tensor *tensor = weft__op_tensor_or_nil(L, name, ndim);
    if (tensor == NULL) luaL_error(L, "%s is missing", name);
    return tensor;
}

void weft__op_expect(lua_State *L, const char *name, const weft_tensor *tensor, int dim, int64_t size)
{
    if (tensor->shape[dim] == size) return;
    char wanted[80];
    snprintf(wanted, sizeof wanted, "%" PRId64 " in dimension %d", size, dim);
    refuse(L, name, tensor, wanted);
}

void weft__op_same_dtype(lua_State *L, const char *name, const weft_tensor *tensor, weft_dtype dtype)
{
    if (tensor->dtype != dtype) refuse(L, name, tensor, weft_dtype_name(dtype));
}

void weft__op_contiguous(lua_State *L, const char *name, const weft_tensor *tensor)
{
    if (!weft_tensor_is_contiguous(tensor)) refuse(L, name, tensor, "a contiguous tensor");
}

const float *weft__op_floats(lua_State *L, const char *name, const weft_tensor *tensor)
{
    weft__op_same_dtype(L, name, tensor, WEFT_F32);
    weft__op_contiguous(L, name, tensor);
    return tensor->data;
}

weft_op_rows weft__op_rows_of(lua_State *L, const char *name, const weft_tensor *t)
{
    if (t->ndim == 0) refuse(L, name, t, "at least one dimension");
    weft_op_rows rows = {1, t->shape[t->ndim - 1], t->shape[t->ndim - 1]};
    if (rows.cols > 1 && t->stride[t->ndim - 1] != 1) refuse(L, name, t, "adjacent elements in the last dimension");
    int found = 0; /* the innermost dimension of rows gives the stride, the others must fold into it */
    int64_t next = 0;
    for (int d = t->ndim - 2; d >= 0; d--) {
        rows.rows *= t->shape[d];
        if (t->shape[d] == 1) continue;
        if (!found) rows.stride = t->stride[d];
        else if (t->stride[d] != next) refuse(L, name, t, "rows at one distance");
        next = t->stride[d] * t->shape[d];
        found = 1;
    }
    return rows;
}

int64_t weft__op_token_stride(lua_State *L, const char *name, const weft_tensor *t)
{
    if (t->ndim != 3) refuse(L, name, t, "[tokens, heads, dim]");
    if ((t->shape[2] > 1 && t->stride[2] != 1) || (t->shape[1] > 1 && t->stride[1] != t->shape[2]))
        refuse(L, name, t, "heads side by side");
    return t->shape[0] > 1 ? t->stride[0] : t->shape[1] * t->shape[2];
}

weft_pool *weft__op_pool(lua_State *L)
{
    return weft_field_int_or(L, 1, "threads", 0, INT32_MAX, 0) == 1 ? NULL : weft_lua_rank(L)->pool;
}

weft_tensor *weft__op_ints(lua_State *L, const char *name, int optional)
{
    lua_getfield(L, 1, name);
    if (lua_isnil(L, -1) && optional) {
        lua_pop(L, 1);
        return NULL;
    }
    if (lua_type(L, -1) == LUA_TTABLE) {
        int64_t count = (int64_t)lua_objlen(L, -1);
        weft_tensor *tensor = NULL;
        weft_raise_if(L, weft_tensor_create(&tensor, weft_lua_rank(L)->memory, WEFT_I32, 1, &count));
        weft_push_tensor(L, tensor); /* table, box */
        for (int64_t i = 0; i < count; i++) {
            lua_rawgeti(L, -2, (int)(i + 1));
            double value = lua_tonumber(L, -1);
            if (!(value >= INT32_MIN && value <= INT32_MAX)) luaL_error(L, "%s: number %d does not fit in 32 bits", name, (int)i + 1);
            ((int32_t *)tensor->data)[i] = (int32_t)value;
            lua_pop(L, 1);
        }
        return tensor;
    }
    lua_pop(L, 1);
    weft_tensor *tensor = weft__op_tensor(L, name, -1);
    weft__op_same_dtype(L, name, tensor, WEFT_I32);
    weft__op_contiguous(L, name, tensor);
    return tensor;
}

weft_dtype weft__op_dtype(lua_State *L, const char *name, weft_dtype fallback)
{
    const char *text = weft_field_string_or(L, 1, name, NULL);
    if (text != NULL && !weft_dtype_from_name(text, &fallback)) luaL_error(L, "unknown %s '%s'", name, text);
    return fallback;
}

weft_tensor *weft__op_output(lua_State *L, const char *name, weft_dtype dtype, int ndim, const int64_t *shape)
{
    weft_tensor *tensor = weft__op_tensor_or_nil(L, name, ndim);
    if (tensor != NULL) {
        weft__op_same_dtype(L, name, tensor, dtype);
        for (int d = 0; d < ndim; d++) weft__op_expect(L, name, tensor, d, shape[d]);
        lua_getfield(L, 1, name);
        return tensor;
    }
    weft_raise_if(L, weft_tensor_create(&tensor, weft_lua_rank(L)->memory, dtype, ndim, shape));
    weft_push_tensor(L, tensor);
    return tensor;
}

/* ---- operations ---- */

static int l_embedding(lua_State *L)
{
    weft_tensor *w = weft__op_tensor(L, "w", 2), *ids = weft__op_ints(L, "ids", 0);
    weft__op_contiguous(L, "w", w);
    int64_t first = weft_field_int_or(L, 1, "first", 0, INT32_MAX, 0);
    const int64_t shape[] = {weft_tensor_numel(ids), w->shape[1]};
    weft_tensor *y = weft__op_output(L, "out", weft__op_dtype(L, "dtype", w->dtype), 2, shape);
    weft__op_contiguous(L, "out", y);
    weft_embedding_args args = {
        .w = w->data, .ids = ids->data, .y = y->data, .tokens = shape[0], .hidden = shape[1], .first = first,
        .count = w->shape[0], .w_dtype = w->dtype, .y_dtype = y->dtype,
    };
    weft_raise_if(L, weft_embedding_cpu(&args, weft__op_pool(L)));
    return 1;
}

/* Scales of fp8 weights; scale_row defaults to one row of scales per 128 rows. */
static void linear_scales(lua_State *L, weft_linear_args *args)
{
    weft_tensor *scale = weft__op_tensor(L, "scale", 2), *rows = weft__op_ints(L, "scale_row", 1);
    args->scale = weft__op_floats(L, "scale", scale);
    args->scale_stride = scale->shape[1];
    args->scale_col_phase = weft_field_int_or(L, 1, "scale_col_phase", 0, INT32_MAX, 0);
    if (rows == NULL) {
        weft_raise_if(L, weft_tensor_create(&rows, weft_lua_rank(L)->memory, WEFT_I32, 1, &args->n));
        weft_push_tensor(L, rows);
        for (int64_t i = 0; i < args->n; i++) ((int32_t *)rows->data)[i] = (int32_t)(i / 128);
    }
    if (weft_tensor_numel(rows) != args->n) refuse(L, "scale_row", rows, "one row of scales for each row of w");
    for (int64_t i = 0; i < args->n; i++) {
        int32_t row = ((const int32_t *)rows->data)[i];
        if (row < 0 || row >= scale->shape[0]) luaL_error(L, "scale_row: row %d of %d", row, (int)scale->shape[0]);
    }
    args->scale_row = rows->data;
}

static int l_linear(lua_State *L)
{
    weft_tensor *x = weft__op_tensor(L, "x", -1), *w = weft__op_tensor(L, "w", 2), *bias = weft__op_tensor_or_nil(L, "bias", 1);
    weft_op_rows xs = weft__op_rows_of(L, "x", x), ws = weft__op_rows_of(L, "w", w);
    if (xs.cols != ws.cols) refuse(L, "x", x, "as many columns as w");
    weft_linear_args args = {
        .x = x->data, .w = w->data, .tokens = xs.rows, .n = ws.rows, .k = xs.cols, .x_stride = xs.stride,
        .w_stride = ws.stride, .x_dtype = x->dtype, .w_dtype = w->dtype, .add = weft_field_bool_or(L, 1, "add", 0),
    };
    if (bias != NULL) {
        weft__op_expect(L, "bias", bias, 0, args.n);
        weft__op_contiguous(L, "bias", bias);
        args.bias = bias->data;
        args.bias_dtype = bias->dtype;
    }
    if (w->dtype == WEFT_F8E4M3) linear_scales(L, &args);
    const int64_t shape[] = {args.tokens, args.n};
    if (args.add) weft__op_tensor(L, "out", 2);
    weft_tensor *given = weft__op_tensor_or_nil(L, "out", 2);
    weft_tensor *y = weft__op_output(L, "out", given != NULL ? given->dtype : weft__op_dtype(L, "dtype", x->dtype), 2, shape);
    args.y = y->data;
    args.y_dtype = y->dtype;
    args.y_stride = weft__op_rows_of(L, "out", y).stride;
    weft_raise_if(L, weft_linear_cpu(&args, weft__op_pool(L)));
    return 1;
}

static int l_rms_norm(lua_State *L)
{
    weft_tensor *x = weft__op_tensor(L, "x", -1), *gain = weft__op_tensor(L, "gain", 1);
    weft_tensor *residual = weft__op_tensor_or_nil(L, "residual", x->ndim);
    weft_op_rows xs = weft__op_rows_of(L, "x", x);
    weft__op_expect(L, "gain", gain, 0, xs.cols);
    weft__op_contiguous(L, "gain", gain);
    weft_rms_norm_args args = {
        .x = x->data, .gain = gain->data, .rows = xs.rows, .cols = xs.cols, .x_stride = xs.stride,
        .eps = (float)weft_field_number_or(L, 1, "eps", 1e-6), .dtype = x->dtype, .gain_dtype = gain->dtype,
    };
    if (residual != NULL) {
        weft__op_same_dtype(L, "residual", residual, x->dtype);
        for (int d = 0; d < x->ndim; d++) weft__op_expect(L, "residual", residual, d, x->shape[d]);
        args.residual = residual->data;
        args.residual_stride = weft__op_rows_of(L, "residual", residual).stride;
    }
    weft_tensor *y = weft__op_output(L, "out", x->dtype, x->ndim, x->shape);
    args.y = y->data;
    args.y_stride = weft__op_rows_of(L, "out", y).stride;
    weft_raise_if(L, weft_rms_norm_cpu(&args, weft__op_pool(L)));
    return 1;
}

static int l_group_norm_sums(lua_State *L)
{
    weft_tensor *x = weft__op_tensor(L, "x", -1);
    weft_op_rows xs = weft__op_rows_of(L, "x", x);
    weft_tensor *var = weft__op_output(L, "out", WEFT_F32, 1, &xs.rows);
    weft_group_norm_args args = {
        .x = x->data, .var = var->data, .rows = xs.rows, .cols = xs.cols, .x_stride = xs.stride, .var_stride = var->stride[0],
        .dtype = x->dtype,
    };
    weft_raise_if(L, weft_group_norm_sums_cpu(&args, weft__op_pool(L)));
    return 1;
}

static int l_group_norm_apply(lua_State *L)
{
    weft_tensor *x = weft__op_tensor(L, "x", -1), *gain = weft__op_tensor(L, "gain", 1), *var = weft__op_tensor(L, "var", 1);
    weft_op_rows xs = weft__op_rows_of(L, "x", x);
    weft__op_expect(L, "gain", gain, 0, xs.cols);
    weft__op_contiguous(L, "gain", gain);
    weft__op_same_dtype(L, "var", var, WEFT_F32);
    weft__op_expect(L, "var", var, 0, xs.rows);
    weft_group_norm_args args = {
        .x = x->data, .var = var->data, .gain = gain->data, .rows = xs.rows, .cols = xs.cols, .x_stride = xs.stride,
        .var_stride = var->stride[0], .world = (int)weft_field_int_or(L, 1, "world", 1, INT32_MAX, 1),
        .eps = (float)weft_field_number_or(L, 1, "eps", 1e-6), .dtype = x->dtype, .gain_dtype = gain->dtype,
    };
    weft_tensor *y = weft__op_output(L, "out", x->dtype, x->ndim, x->shape);
    args.y = y->data;
    args.y_stride = weft__op_rows_of(L, "out", y).stride;
    weft_raise_if(L, weft_group_norm_apply_cpu(&args, weft__op_pool(L)));
    return 1;
}

static int l_rope(lua_State *L)
{
    weft_tensor *x = weft__op_tensor(L, "x", 3), *positions = weft__op_ints(L, "positions", 0);
    weft_tensor *table = weft__op_tensor(L, "cos_sin", 2);
    if (weft_tensor_numel(positions) != x->shape[0]) refuse(L, "positions", positions, "one for each token");
    weft_rope_args args = {
        .x = x->data, .positions = positions->data, .cos_sin = weft__op_floats(L, "cos_sin", table), .tokens = x->shape[0],
        .heads = x->shape[1], .head_dim = x->shape[2], .rotary_dim = table->shape[1],
        .token_stride = weft__op_token_stride(L, "x", x), .max_positions = table->shape[0], .dtype = x->dtype,
    };
    lua_getfield(L, 1, "x");
    weft_raise_if(L, weft_rope_cpu(&args, weft__op_pool(L)));
    return 1;
}

static int l_silu_mul(lua_State *L)
{
    weft_tensor *x = weft__op_tensor(L, "x", 2);
    weft_op_rows xs = weft__op_rows_of(L, "x", x);
    if (xs.cols % 2 != 0) refuse(L, "x", x, "an even number of columns (gate, then up)");
    const int64_t shape[] = {xs.rows, xs.cols / 2};
    weft_tensor *y = weft__op_output(L, "out", x->dtype, 2, shape);
    weft_silu_mul_args args = {
        .x = x->data, .y = y->data, .rows = xs.rows, .cols = xs.cols / 2, .x_stride = xs.stride,
        .y_stride = weft__op_rows_of(L, "out", y).stride, .dtype = x->dtype,
    };
    weft_raise_if(L, weft_silu_mul_cpu(&args, weft__op_pool(L)));
    return 1;
}

static int l_add(lua_State *L)
{
    weft_tensor *a = weft__op_tensor(L, "a", -1), *b = weft__op_tensor(L, "b", -1);
    weft_op_rows as = weft__op_rows_of(L, "a", a), bs = weft__op_rows_of(L, "b", b);
    weft__op_same_dtype(L, "b", b, a->dtype);
    int row = b->ndim == 1 && a->ndim != 1;
    if (bs.cols != as.cols || (!row && bs.rows != as.rows)) refuse(L, "b", b, "the shape of a, or one row of it");
    weft_tensor *y = weft__op_output(L, "out", a->dtype, a->ndim, a->shape);
    weft_add_args args = {
        .a = a->data, .b = b->data, .y = y->data, .rows = as.rows, .cols = as.cols, .a_stride = as.stride,
        .b_stride = row ? 0 : bs.stride, .y_stride = weft__op_rows_of(L, "out", y).stride, .dtype = a->dtype,
    };
    weft_raise_if(L, weft_add_cpu(&args, weft__op_pool(L)));
    return 1;
}

static int l_gather_rows(lua_State *L)
{
    weft_tensor *x = weft__op_tensor(L, "x", 2), *indices = weft__op_ints(L, "indices", 0);
    weft_op_rows xs = weft__op_rows_of(L, "x", x);
    const int64_t shape[] = {weft_tensor_numel(indices), xs.cols};
    weft_tensor *y = weft__op_output(L, "out", x->dtype, 2, shape);
    weft_gather_rows_args args = {
        .x = x->data, .indices = indices->data, .y = y->data, .count = shape[0], .cols = xs.cols, .x_stride = xs.stride,
        .y_stride = weft__op_rows_of(L, "out", y).stride, .x_rows = xs.rows, .dtype = x->dtype,
    };
    weft_raise_if(L, weft_gather_rows_cpu(&args, weft__op_pool(L)));
    return 1;
}

/* A number for all rows, or a table with one for each. */
static double row_number(lua_State *L, const char *name, int64_t row, double fallback)
{
    lua_getfield(L, 1, name);
    if (lua_type(L, -1) == LUA_TTABLE) {
        lua_rawgeti(L, -1, (int)(row + 1));
        lua_remove(L, -2);
    } else if (lua_isnil(L, -1)) {
        lua_pop(L, 1);
        return fallback;
    }
    if (lua_type(L, -1) != LUA_TNUMBER) luaL_error(L, "%s: expected a number for row %d", name, (int)row);
    double value = lua_tonumber(L, -1);
    lua_pop(L, 1);
    return value;
}

static uint64_t to_seed(lua_State *L, double value)
{
    if (!(value >= 0 && value <= 9007199254740992.0) || value != (double)(uint64_t)value)
        luaL_error(L, "seed: expected an integer from 0 to 2^53");
    return (uint64_t)value;
}

static int l_sample(lua_State *L)
{
    weft_tensor *logits = weft__op_tensor(L, "logits", 2);
    weft_op_rows rows = weft__op_rows_of(L, "logits", logits);
    weft__op_same_dtype(L, "logits", logits, WEFT_F32);
    int64_t first = weft_field_int_or(L, 1, "first", 0, INT32_MAX, 0);
    /* Lua owns the rows' numbers, so that a wrong one leaks nothing. */
    uint64_t *seed = lua_newuserdata(L, (size_t)rows.rows * 16 + 1);
    float *temperature = (float *)(seed + rows.rows);
    int32_t *position = (int32_t *)(temperature + rows.rows);
    for (int64_t r = 0; r < rows.rows; r++) {
        seed[r] = to_seed(L, row_number(L, "seed", r, 0));
        temperature[r] = (float)row_number(L, "temperature", r, 0);
        position[r] = (int32_t)row_number(L, "position", r, 0);
    }
    weft_tensor *id = weft__op_output(L, "id", WEFT_I32, 1, &rows.rows);
    weft_tensor *value = weft__op_output(L, "value", WEFT_F32, 1, &rows.rows);
    weft__op_contiguous(L, "id", id);
    weft__op_contiguous(L, "value", value);
    weft_sample_args args = {
        .logits = logits->data, .temperature = temperature, .seed = seed, .position = position, .value = value->data,
        .id = id->data, .rows = rows.rows, .first = first, .count = rows.cols, .logits_stride = rows.stride,
    };
    weft_raise_if(L, weft_sample_cpu(&args, weft__op_pool(L)));
    return 2;
}

static int l_checksum(lua_State *L)
{
    weft_tensor *x = weft__op_tensor(L, "x", -1);
    weft__op_contiguous(L, "x", x);
    uint64_t sum = 0;
    weft_raise_if(L, weft_checksum_cpu(x->data, weft_tensor_numel(x) * (int64_t)weft_dtype_size(x->dtype), &sum, weft__op_pool(L)));
    lua_pushnumber(L, (lua_Number)(sum & ((1ull << 53) - 1)));
    return 1;
}

static int l_philox(lua_State *L)
{
    uint64_t seed = to_seed(L, luaL_checknumber(L, 1));
    lua_pushnumber(L, weft_sample_uniform(seed, (int32_t)luaL_checknumber(L, 2), (int32_t)luaL_checknumber(L, 3)));
    return 1;
}

static int l_isa(lua_State *L)
{
    lua_pushstring(L, weft_cpu_isa());
    return 1;
}

/* Every operation takes exactly one table. */
static int call_with_table(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    return lua_tocfunction(L, lua_upvalueindex(1))(L);
}

void weft__op_register(lua_State *L, const luaL_Reg *functions)
{
    for (; functions->name != NULL; functions++) {
        lua_pushcfunction(L, functions->func);
        lua_pushcclosure(L, call_with_table, 1);
        lua_setfield(L, -2, functions->name);
    }
}

void weft_open_ops(lua_State *L)
{
    static const luaL_Reg functions[] = {
        {"embedding", l_embedding}, {"linear", l_linear},     {"rms_norm", l_rms_norm}, {"group_norm_sums", l_group_norm_sums},
        {"rope", l_rope},           {"silu_mul", l_silu_mul}, {"add", l_add},           {"group_norm_apply", l_group_norm_apply},
        {"gather_rows", l_gather_rows}, {"sample", l_sample}, {"checksum", l_checksum}, {NULL, NULL},
    };
    lua_newtable(L);
    weft__op_register(L, functions);
    weft__open_attention_ops(L);
    weft__open_expert_ops(L);
    lua_pushcfunction(L, l_philox);
    lua_setfield(L, -2, "philox");
    lua_pushcfunction(L, l_isa);
    lua_setfield(L, -2, "isa");
    lua_setfield(L, -2, "ops");
}
