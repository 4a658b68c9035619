/* bind/lua_rows.c - rows of a step's tensors.
 *
 *   core.gather_rows(x, indices) -> rows of x ([tokens, width], any dtype), in the arena
 *   core.compare_rows(got, reference, margin) -> {max_rel_diff=, first_diff=}: largest difference over the
 *       largest logit; the first row whose best differs where the reference's best two are margin apart */
#include <math.h>

#include "bind/box.h"
#include "bind/core.h"
#include "layers/run.h"

/* core.gather_rows(x, indices) -> rows of x ([tokens, width], any dtype) by int32 indices, in the arena. */
static int l_gather_rows(lua_State *L)
{
    weft_tensor *x = weft_check_tensor(L, 1), *indices = weft_check_tensor(L, 2);
    luaL_argcheck(L, x->ndim == 2 && x->stride[1] == 1, 1, "a [tokens, width] tensor expected");
    luaL_argcheck(L, indices->ndim == 1 && indices->dtype == WEFT_I32 && weft_tensor_is_contiguous(indices), 2,
                  "a vector of int32 expected");
    weft_rank *rank = weft_lua_rank(L);
    weft_tensor *y = NULL;
    weft_raise_if(L, weft_arena_tensor(rank->arena, &y, x->dtype, 2, (int64_t[]){indices->shape[0], x->shape[1]}));
    weft_push_tensor(L, y);
    const void *where = NULL;
    weft_raise_if(L, weft_run_operand(rank, indices, &where));
    weft_gather_rows_args args = {
        .x = x->data, .indices = where, .y = y->data, .count = indices->shape[0], .cols = x->shape[1],
        .x_stride = x->stride[0], .y_stride = y->stride[0], .x_rows = x->shape[0], .dtype = x->dtype,
    };
    weft_raise_if(L, WEFT_RUN(rank, gather_rows, &args));
    return 1;
}

typedef struct {
    float best, second;
    int64_t at;
} top_two;

static top_two best_of(const float *row, int64_t count)
{
    top_two top = {-INFINITY, -INFINITY, 0};
    for (int64_t i = 0; i < count; i++) {
        if (row[i] > top.best) {
            top.second = top.best;
            top.best = row[i];
            top.at = i;
        } else if (row[i] > top.second) {
            top.second = row[i];
        }
    }
    return top;
}

/* core.compare_rows(a, reference, margin) -> { max_rel_diff =, first_diff = }: the largest difference
 * over the largest |reference|, and the first row whose best element differs although the
 * reference's best two are more than margin apart (-1: none). float32 [rows, width], equal shapes. */
static int l_compare_rows(lua_State *L)
{
    weft_tensor *a = weft_check_tensor(L, 1), *b = weft_check_tensor(L, 2);
    luaL_argcheck(L, a->storage->cuda == NULL && b->storage->cuda == NULL, 1, "tensors on the host expected: core.to_host(t)");
    double margin = luaL_optnumber(L, 3, 0);
    luaL_argcheck(L, a->ndim == 2 && b->ndim == 2 && a->shape[0] == b->shape[0] && a->shape[1] == b->shape[1], 2,
                  "two tensors of one [rows, width] expected");
    luaL_argcheck(L, a->dtype == WEFT_F32 && b->dtype == WEFT_F32 && a->stride[1] == 1 && b->stride[1] == 1, 1, "float32 rows expected");
    double largest = 0, worst = 0;
    int64_t first = -1;
    for (int64_t r = 0; r < a->shape[0]; r++) {
        const float *x = (const float *)a->data + r * a->stride[0], *y = (const float *)b->data + r * b->stride[0];
        for (int64_t i = 0; i < a->shape[1]; i++) {
            double difference = fabs((double)x[i] - (double)y[i]), size = fabs((double)y[i]);
            if (size > largest) largest = size;
            if (!(difference <= worst)) worst = difference; /* NaN counts as worst */
        }
        top_two ours = best_of(x, a->shape[1]), theirs = best_of(y, b->shape[1]);
        if (first < 0 && ours.at != theirs.at && (double)theirs.best - (double)theirs.second > margin) first = r;
    }
    lua_createtable(L, 0, 2);
    lua_pushnumber(L, worst == 0 ? 0 : worst / (largest > 0 ? largest : 1));
    lua_setfield(L, -2, "max_rel_diff");
    lua_pushnumber(L, (lua_Number)first);
    lua_setfield(L, -2, "first_diff");
    return 1;
}

void weft_open_rows(lua_State *L)
{
    lua_pushcfunction(L, l_gather_rows);
    lua_setfield(L, -2, "gather_rows");
    lua_pushcfunction(L, l_compare_rows);
    lua_setfield(L, -2, "compare_rows");
}
