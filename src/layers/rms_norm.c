/* layers/rms_norm.c - RMSNorm with fused residual, and per head. */
#include "layers/rms_norm.h"

#include <stdlib.h>
#include <string.h>

#include "layers/linear_weight.h"
#include "layers/run.h"

static void destroy(weft_object *object)
{
    weft_rms_norm *norm = (weft_rms_norm *)object;
    WEFT_RELEASE(norm->gain);
    WEFT_RELEASE(norm->rank);
    free(norm->name);
    free(norm);
}

weft_status weft_rms_norm_create(weft_rms_norm **out, weft_rank *rank, const char *name, int64_t hidden_size, double eps,
                                 int convert, weft_dtype dtype)
{
    if (hidden_size < 1) return weft_fail(WEFT_INVALID, "%s: hidden_size must be positive", name);
    if (!(eps >= 0 && eps < 1)) return weft_fail(WEFT_INVALID, "%s: wanted 0 <= eps < 1, found %g", name, eps);
    weft_rms_norm *norm = calloc(1, sizeof *norm);
    if (norm == NULL) return weft_fail(WEFT_MEMORY, "no memory for a layer");
    weft_object_init(&norm->object, destroy);
    norm->rank = WEFT_RETAIN(rank);
    norm->hidden_size = hidden_size;
    norm->eps = (float)eps;
    norm->convert = convert;
    norm->dtype = dtype;
    norm->name = strdup(name);
    if (norm->name == NULL) {
        WEFT_RELEASE(norm);
        return weft_fail(WEFT_MEMORY, "no memory for a layer");
    }
    *out = norm;
    return WEFT_OK;
}

weft_status weft_norm_load_gain(weft_tensor **gain, weft_rank *rank, const weft_source *source, int64_t total, int64_t offset,
                                int64_t count, int convert, weft_dtype dtype)
{
    WEFT_TRY(weft_source_expect(source, 1, &total));
    if (source->dtype != WEFT_F32 && source->dtype != WEFT_BF16 && source->dtype != WEFT_F16)
        return weft_fail(WEFT_FORMAT, "tensor '%s': gains of a norm cannot be %s", source->name, weft_dtype_name(source->dtype));
    weft_tensor *loaded = NULL;
    WEFT_TRY(weft_tensor_create(&loaded, rank->device_memory, convert ? dtype : source->dtype, 1, &count));
    weft_status status = weft_run_load(rank, source, &offset, &count, loaded, 0);
    if (status != WEFT_OK) {
        WEFT_RELEASE(loaded);
        return status;
    }
    WEFT_RELEASE(*gain);
    *gain = loaded;
    return WEFT_OK;
}

weft_status weft_rms_norm_load(weft_rms_norm *norm, const weft_source *source)
{
    return weft_norm_load_gain(&norm->gain, norm->rank, source, norm->hidden_size, 0, norm->hidden_size, norm->convert, norm->dtype);
}

static weft_status check_loaded(const weft_rms_norm *norm)
{
    return norm->gain != NULL ? WEFT_OK : weft_fail(WEFT_INVALID, "weights of %s were not loaded", norm->name);
}

static weft_status check_residual(const weft_rms_norm *norm, const weft_tensor *x, const weft_tensor *residual)
{
    WEFT_TRY(weft_layer_check_rows(norm->name, residual, norm->hidden_size));
    char wanted[160], found[160];
    if (residual->shape[0] != x->shape[0] || residual->dtype != x->dtype)
        return weft_fail(WEFT_INVALID, "%s: wanted a residual like x, %s, found %s", norm->name,
                         weft_tensor_describe(x, wanted, sizeof wanted), weft_tensor_describe(residual, found, sizeof found));
    return WEFT_OK;
}

weft_status weft_rms_norm_forward(weft_rms_norm *norm, const weft_tensor *x, weft_tensor *residual, weft_tensor **y)
{
    WEFT_TRY(weft_layer_check_rows(norm->name, x, norm->hidden_size));
    if (residual != NULL) WEFT_TRY(check_residual(norm, x, residual));
    WEFT_TRY(check_loaded(norm));
    weft_tensor *out = NULL;
    WEFT_TRY(weft_arena_tensor(norm->rank->arena, &out, x->dtype, 2, x->shape));
    weft_rms_norm_args args = {
        .x = x->data,
        .residual = residual != NULL ? residual->data : NULL,
        .gain = norm->gain->data,
        .y = out->data,
        .rows = x->shape[0],
        .cols = norm->hidden_size,
        .x_stride = x->stride[0],
        .residual_stride = residual != NULL ? residual->stride[0] : 0,
        .y_stride = norm->hidden_size,
        .eps = norm->eps,
        .dtype = x->dtype,
        .gain_dtype = norm->gain->dtype,
    };
    weft_status status = WEFT_RUN(norm->rank, rms_norm, &args);
    if (status != WEFT_OK) {
        WEFT_RELEASE(out);
        return weft_fail_while(status, "while computing %s", norm->name);
    }
    *y = out;
    return WEFT_OK;
}

weft_status weft_rms_norm_forward_heads(weft_rms_norm *norm, weft_tensor *x)
{
    int64_t size = norm->hidden_size, width = x->ndim == 2 ? x->shape[1] : 0;
    WEFT_TRY(weft_layer_check_rows(norm->name, x, width / size * size > 0 ? width / size * size : size));
    WEFT_TRY(check_loaded(norm));
    int64_t tokens = x->shape[0], heads = width / size;
    weft_rms_norm_args args = {
        .gain = norm->gain->data, .cols = size, .eps = norm->eps, .dtype = x->dtype, .gain_dtype = norm->gain->dtype};
    /* Rows of one call are equally far apart: the heads of a token, or one head of all tokens. */
    int by_token = tokens < heads;
    args.rows = by_token ? heads : tokens;
    args.x_stride = args.y_stride = by_token ? size : x->stride[0];
    int64_t calls = by_token ? tokens : heads, step = by_token ? x->stride[0] : size;
    for (int64_t i = 0; i < calls; i++) {
        args.x = args.y = (char *)x->data + (size_t)(i * step) * weft_dtype_size(x->dtype);
        WEFT_TRY(WEFT_RUN(norm->rank, rms_norm, &args));
    }
    return WEFT_OK;
}
