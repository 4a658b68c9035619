/* bind/lua_ops_experts.c - core.ops: routing, experts and rounded activations.
 *
 *   router{logits, bias, top_k, scoring = "softmax", renormalize = true}    -> ids, weights [tokens, top_k]
 *   experts{x, ids, weights, gate_up = [count, 2 I, hidden], down = [count, hidden, I], first = 0,
 *           gate_up_scale, gate_up_scale_row, gate_up_scale_col_phase, down_scale, ..., quantize = false}
 *                                                                            -> [tokens, hidden]
 *   quantize_groups{x, phase = 0, dtype = x's}                              -> as x
 * scoring: sigmoid, softmax, softmax_topk. */
#include <stdio.h>
#include <string.h>

#include "bind/lua_ops.h"
#include "bind/router_args.h"

weft_router_scoring weft_check_scoring(lua_State *L, int index)
{
    static const char *const names[WEFT_ROUTER_SCORING_COUNT] = {"sigmoid", "softmax", "softmax_topk"};
    const char *name = weft_field_string_or(L, index, "scoring", "softmax");
    for (int i = 0; i < WEFT_ROUTER_SCORING_COUNT; i++)
        if (strcmp(names[i], name) == 0) return (weft_router_scoring)i;
    return (weft_router_scoring)luaL_error(L, "scoring must be sigmoid, softmax or softmax_topk, got '%s'", name);
}

static int l_router(lua_State *L)
{
    weft_tensor *logits = weft__op_tensor(L, "logits", 2), *bias = weft__op_tensor_or_nil(L, "bias", 1);
    weft__op_same_dtype(L, "logits", logits, WEFT_F32);
    weft_op_rows rows = weft__op_rows_of(L, "logits", logits);
    if (bias != NULL) weft__op_expect(L, "bias", bias, 0, rows.cols);
    const int64_t shape[] = {rows.rows, weft_field_int(L, 1, "top_k", 1, 65536)};
    weft_router_args args = {
        .logits = logits->data, .bias = bias != NULL ? weft__op_floats(L, "bias", bias) : NULL, .tokens = rows.rows,
        .experts = rows.cols, .logits_stride = rows.stride, .top_k = shape[1], .scoring = weft_check_scoring(L, 1),
        .renormalize = weft_field_bool_or(L, 1, "renormalize", 1),
    };
    weft_tensor *ids = weft__op_output(L, "ids", WEFT_I32, 2, shape), *weights = weft__op_output(L, "weights", WEFT_F32, 2, shape);
    weft__op_contiguous(L, "ids", ids);
    weft__op_contiguous(L, "weights", weights);
    args.ids = ids->data;
    args.weights = weights->data;
    weft_raise_if(L, weft_router_cpu(&args, weft__op_pool(L)));
    return 2;
}

/* Scales of an fp8 matrix (count, rows, columns); scale_row defaults to one row of scales per 128. */
static void matrix_scales(lua_State *L, const char *name, const weft_tensor *w, weft_expert_matrix *m)
{
    char scale_name[40], row_name[40], phase_name[48];
    snprintf(scale_name, sizeof scale_name, "%s_scale", name);
    snprintf(row_name, sizeof row_name, "%s_scale_row", name);
    snprintf(phase_name, sizeof phase_name, "%s_scale_col_phase", name);
    weft_tensor *scale = weft__op_tensor(L, scale_name, 3), *rows = weft__op_ints(L, row_name, 1);
    weft__op_expect(L, scale_name, scale, 0, w->shape[0]);
    m->scale = weft__op_floats(L, scale_name, scale);
    m->scale_rows = scale->shape[1];
    m->scale_stride = scale->shape[2];
    m->scale_col_phase = weft_field_int_or(L, 1, phase_name, 0, INT32_MAX, 0);
    if (rows == NULL) {
        weft_raise_if(L, weft_tensor_create(&rows, weft_lua_rank(L)->memory, WEFT_I32, 1, &w->shape[1]));
        weft_push_tensor(L, rows);
        for (int64_t i = 0; i < w->shape[1]; i++) ((int32_t *)rows->data)[i] = (int32_t)(i / 128);
    }
    if (weft_tensor_numel(rows) != w->shape[1]) luaL_error(L, "%s: one row of scales for each row of %s", row_name, name);
    for (int64_t i = 0; i < w->shape[1]; i++) {
        int32_t row = ((const int32_t *)rows->data)[i];
        if (row < 0 || row >= scale->shape[1]) luaL_error(L, "%s: row %d of %d", row_name, row, (int)scale->shape[1]);
    }
    m->scale_row = rows->data;
}

static int l_experts(lua_State *L)
{
    weft_tensor *x = weft__op_tensor(L, "x", 2), *up = weft__op_tensor(L, "gate_up", 3), *down = weft__op_tensor(L, "down", 3);
    weft_tensor *ids = weft__op_tensor(L, "ids", 2), *weights = weft__op_tensor(L, "weights", 2);
    weft_op_rows xs = weft__op_rows_of(L, "x", x);
    weft__op_contiguous(L, "gate_up", up);
    weft__op_contiguous(L, "down", down);
    weft__op_same_dtype(L, "down", down, up->dtype);
    weft__op_same_dtype(L, "ids", ids, WEFT_I32);
    weft__op_contiguous(L, "ids", ids);
    const float *w = weft__op_floats(L, "weights", weights);
    const int64_t count = up->shape[0], width = down->shape[2], hidden = xs.cols;
    const int64_t wanted_up[] = {count, 2 * width, hidden}, wanted_down[] = {count, hidden, width};
    for (int d = 0; d < 3; d++) {
        weft__op_expect(L, "gate_up", up, d, wanted_up[d]);
        weft__op_expect(L, "down", down, d, wanted_down[d]);
    }
    weft__op_expect(L, "ids", ids, 0, xs.rows);
    weft__op_expect(L, "weights", weights, 0, xs.rows);
    weft__op_expect(L, "weights", weights, 1, ids->shape[1]);
    const int64_t shape[] = {xs.rows, hidden};
    weft_experts_args args = {
        .x = x->data, .ids = ids->data, .weights = w, .up = {.w = up->data}, .down = {.w = down->data}, .tokens = xs.rows,
        .top_k = ids->shape[1], .first = weft_field_int_or(L, 1, "first", 0, INT32_MAX, 0), .count = count, .hidden = hidden,
        .intermediate = width, .x_stride = xs.stride, .x_dtype = x->dtype, .w_dtype = up->dtype,
        .quantize = weft_field_bool_or(L, 1, "quantize", 0),
    };
    if (up->dtype == WEFT_F8E4M3) {
        matrix_scales(L, "gate_up", up, &args.up);
        matrix_scales(L, "down", down, &args.down);
    }
    size_t bytes = 0;
    weft_raise_if(L, weft_experts_workspace(&args, &bytes));
    weft_tensor *workspace = NULL, *y;
    weft_raise_if(L, weft_tensor_create(&workspace, weft_lua_rank(L)->memory, WEFT_U8, 1, &(int64_t){(int64_t)bytes}));
    weft_push_tensor(L, workspace);
    y = weft__op_output(L, "out", x->dtype, 2, shape);
    args.workspace = workspace->data;
    args.y = y->data;
    args.y_dtype = y->dtype;
    args.y_stride = weft__op_rows_of(L, "out", y).stride;
    weft_raise_if(L, weft_experts_cpu(&args, weft__op_pool(L)));
    return 1;
}

static int l_quantize_groups(lua_State *L)
{
    weft_tensor *x = weft__op_tensor(L, "x", -1);
    weft_op_rows xs = weft__op_rows_of(L, "x", x);
    weft_tensor *y = weft__op_output(L, "out", weft__op_dtype(L, "dtype", x->dtype), x->ndim, x->shape);
    weft_quantize_groups_args args = {
        .x = x->data, .y = y->data, .rows = xs.rows, .cols = xs.cols, .x_stride = xs.stride,
        .y_stride = weft__op_rows_of(L, "out", y).stride, .phase = weft_field_int_or(L, 1, "phase", 0, 127, 0), .dtype = x->dtype,
        .y_dtype = y->dtype,
    };
    weft_raise_if(L, weft_quantize_groups_cpu(&args, weft__op_pool(L)));
    return 1;
}

void weft__open_expert_ops(lua_State *L)
{
    static const luaL_Reg functions[] = {
        {"router", l_router}, {"experts", l_experts}, {"quantize_groups", l_quantize_groups}, {NULL, NULL}};
    weft__op_register(L, functions);
}
