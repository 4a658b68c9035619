/* kernels/cuda/linear.cu - y = x w^T + bias: which way a product takes. */
#include <inttypes.h>

#include "kernels/cuda/blas.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/linear_batch.cuh"

namespace weft {

enum {
    FP8_STREAM_TOKENS = 32, /* up to here fp8 weights are streamed again for every 8 tokens */
    OWN_TOKENS = 32         /* without the library: streamed again up to here, tiles beyond */
};
static const size_t blas_bytes = (size_t)32 << 20; /* what cuBLASLt likes to have */

static weft_linear_args some_tokens(const weft_linear_args *a, int64_t first, int64_t count)
{
    weft_linear_args part = *a;
    part.x = at(a->x, a->x_dtype, first * a->x_stride);
    part.y = (void *)at(a->y, a->y_dtype, first * a->y_stride);
    part.tokens = count;
    return part;
}

static void by_eights(const weft_linear_args *a, void (*product)(const weft_linear_args *, void *), void *stream)
{
    for (int64_t t = 0; t < a->tokens; t += SKINNY_TOKENS) {
        weft_linear_args part = some_tokens(a, t, least(SKINNY_TOKENS, a->tokens - t));
        product(&part, stream);
    }
}

/* fp8 weights expanded block by block of rows in the workspace, each block one library product. */
static weft_status expanded(const weft_linear_args *a, void *stream, bool *done)
{
    *done = false;
    if (a->cuda == NULL) return WEFT_OK;
    const size_t row_bytes = (size_t)a->k * weft_dtype_size(a->x_dtype), bytes = a->cuda->workspace_bytes;
    const size_t room = bytes > 2 * blas_bytes ? bytes - blas_bytes : bytes / 2;
    const int64_t rows = (int64_t)(room / row_bytes) / 128 * 128;
    if (rows == 0 || row_bytes % 16 != 0) return WEFT_OK;
    for (int64_t row = 0; row < a->n; row += rows) {
        weft_linear_args part = *a;
        part.n = least(rows, a->n - row);
        part.w = a->cuda->workspace;
        part.w_dtype = a->x_dtype;
        part.w_stride = a->k;
        part.scale = NULL;
        part.y = (void *)at(a->y, a->y_dtype, row);
        if (a->bias != NULL) part.bias = at(a->bias, a->bias_dtype, row);
        expand_rows(a, row, part.n, a->cuda->workspace, a->x_dtype, stream);
        WEFT_TRY(blas_linear(&part, (room + 255) & ~(size_t)255, stream, done));
        if (!*done && row == 0) return WEFT_OK;
        if (!*done) tile_product(&part, stream);
        *done = true;
    }
    return WEFT_OK;
}

/* 16-bit x and float32 w (the gate of a mixture of experts): x made wide in the workspace, as many tokens at a
 * time as it holds, each a library product. */
static weft_status widened(const weft_linear_args *a, void *stream, bool *done)
{
    *done = false;
    if (a->cuda == NULL) return WEFT_OK;
    const size_t row_bytes = (size_t)a->k * sizeof(float), bytes = a->cuda->workspace_bytes;
    const size_t room = bytes > 2 * blas_bytes ? bytes - blas_bytes : bytes / 2;
    const int64_t most = (int64_t)(room / row_bytes);
    for (int64_t t = 0; t < a->tokens && most > 0; t += most) {
        weft_linear_args part = some_tokens(a, t, least(most, a->tokens - t));
        widen_tokens(&part, (float *)a->cuda->workspace, stream);
        part.x = a->cuda->workspace;
        part.x_dtype = WEFT_F32;
        part.x_stride = a->k;
        WEFT_TRY(blas_linear(&part, (room + 255) & ~(size_t)255, stream, done));
        if (!*done && t == 0) return WEFT_OK;
        if (!*done) tile_product(&part, stream);
        *done = true;
    }
    return WEFT_OK;
}

} // namespace weft

using namespace weft;

extern "C" weft_status weft_linear_cuda(const weft_linear_args *a, void *stream)
{
    WEFT_TRY(weft__check_linear(a));
    if (a->tokens == 0 || a->n == 0) return WEFT_OK;
    if (batch_pays(a, false) && batch_fits(a) && batch_product(a, {}, stream)) return launched("linear");
    const bool fp8 = a->w_dtype == WEFT_F8E4M3, fits = a->k > 0 && skinny_fits(a);
    const int64_t stream_tokens = fp8 ? (int)FP8_STREAM_TOKENS : (int)SKINNY_TOKENS;
    bool done = false;
    if (a->k > 0 && !(fits && a->tokens <= stream_tokens) && a->tokens > 1) {
        if (a->x_dtype != WEFT_F32 && a->w_dtype == WEFT_F32) {
            if (a->tokens > SKINNY_TOKENS) WEFT_TRY(widened(a, stream, &done));
        } else if (!fp8) WEFT_TRY(blas_linear(a, 0, stream, &done));
        else if (a->tokens > SKINNY_TOKENS) WEFT_TRY(expanded(a, stream, &done));
    }
    if (!done) {
        if (fits && a->tokens <= OWN_TOKENS) by_eights(a, skinny, stream);
        else if (a->tokens <= 2 * SKINNY_TOKENS || a->k == 0) by_eights(a, rows_product, stream);
        else tile_product(a, stream);
    }
    return launched("linear");
}
