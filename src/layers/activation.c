/* layers/activation.c - silu_mul and add. */
#include "layers/activation.h"

#include "layers/linear_weight.h"
#include "layers/run.h"

weft_status weft_silu_mul_forward(weft_rank *rank, const weft_tensor *x, weft_tensor **y)
{
    int64_t cols = x->ndim == 2 ? x->shape[1] / 2 : 0;
    WEFT_TRY(weft_layer_check_rows("silu_mul", x, 2 * cols));
    weft_tensor *out = NULL;
    WEFT_TRY(weft_arena_tensor(rank->arena, &out, x->dtype, 2, (int64_t[]){x->shape[0], cols}));
    weft_silu_mul_args args = {.x = x->data, .y = out->data, .rows = x->shape[0], .cols = cols, .x_stride = x->stride[0],
                               .y_stride = cols, .dtype = x->dtype};
    weft_status status = WEFT_RUN(rank, silu_mul, &args);
    if (status != WEFT_OK) {
        WEFT_RELEASE(out);
        return status;
    }
    *y = out;
    return WEFT_OK;
}

weft_status weft_add_forward(weft_rank *rank, const weft_tensor *a, const weft_tensor *b, weft_tensor **y)
{
    char left[160], right[160];
    if (a->ndim != 2 || b->ndim != 2 || a->shape[0] != b->shape[0] || a->shape[1] != b->shape[1] || a->dtype != b->dtype)
        return weft_fail(WEFT_INVALID, "add: wanted two tensors of one shape and dtype, found %s and %s",
                         weft_tensor_describe(a, left, sizeof left), weft_tensor_describe(b, right, sizeof right));
    WEFT_TRY(weft_layer_check_rows("add", a, a->shape[1]));
    WEFT_TRY(weft_layer_check_rows("add", b, a->shape[1]));
    weft_tensor *out = NULL;
    WEFT_TRY(weft_arena_tensor(rank->arena, &out, a->dtype, 2, a->shape));
    weft_add_args args = {.a = a->data, .b = b->data, .y = out->data, .rows = a->shape[0], .cols = a->shape[1],
                          .a_stride = a->stride[0], .b_stride = b->stride[0], .y_stride = a->shape[1], .dtype = a->dtype};
    weft_status status = WEFT_RUN(rank, add, &args);
    if (status != WEFT_OK) {
        WEFT_RELEASE(out);
        return status;
    }
    *y = out;
    return WEFT_OK;
}
