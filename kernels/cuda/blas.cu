/* kernels/cuda/blas.cu - products through cuBLASLt.
 *
 * Row-major y = x w^T is column-major y^T = w x^T: A = w transposed, B = x, m = n of the args. */
#include <stdlib.h>

#include <cublasLt.h>

#include "kernels/cuda/blas.cuh"

namespace weft {

enum { PLANS = 256 };

struct Key {
    int64_t tokens, n, k, x_stride, w_stride, y_stride;
    size_t workspace;
    int dtype, y_dtype, bias, add;
    int x_align, w_align, y_align, unused;
};

struct Plan {
    Key key;
    bool used, possible;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algorithm;
};

} // namespace weft

using namespace weft;

struct weft_blas {
    cublasLtHandle_t handle;
    int next; /* the plan that is replaced next */
    Plan plans[PLANS];
};

namespace weft {

static weft_status refused(cublasStatus_t status)
{
    return weft_fail(status == CUBLAS_STATUS_ALLOC_FAILED ? WEFT_DEVICE_MEMORY : WEFT_CUDA, "linear: cuBLASLt reported %s",
                     cublasLtGetStatusName(status));
}

#define TRY_BLAS(call)                                            \
    do {                                                          \
        cublasStatus_t status_ = (call);                          \
        if (status_ != CUBLAS_STATUS_SUCCESS) return refused(status_); \
    } while (0)

weft_status blas_create(weft_blas **out)
{
    WEFT_TRY(blas_load());
    weft_blas *blas = (weft_blas *)calloc(1, sizeof *blas);
    if (blas == NULL) return weft_fail(WEFT_MEMORY, "no memory for the plans of cuBLASLt");
    cublasStatus_t status = cublasLtCreate(&blas->handle);
    if (status != CUBLAS_STATUS_SUCCESS) {
        free(blas);
        return refused(status);
    }
    *out = blas;
    return WEFT_OK;
}

static void plan_clear(Plan *p)
{
    if (p->operation != NULL) cublasLtMatmulDescDestroy(p->operation);
    if (p->a != NULL) cublasLtMatrixLayoutDestroy(p->a);
    if (p->b != NULL) cublasLtMatrixLayoutDestroy(p->b);
    if (p->c != NULL) cublasLtMatrixLayoutDestroy(p->c);
    memset(p, 0, sizeof *p);
}

void blas_destroy(weft_blas *blas)
{
    if (blas == NULL) return;
    for (int i = 0; i < PLANS; i++) plan_clear(&blas->plans[i]);
    cublasLtDestroy(blas->handle);
    free(blas);
}

static cudaDataType_t type_of(int dtype)
{
    return dtype == WEFT_F32 ? CUDA_R_32F : dtype == WEFT_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* The largest power of two up to 16 that divides the address. */
static int alignment(const void *p)
{
    int bytes = 16;
    while ((uintptr_t)p % bytes != 0) bytes /= 2;
    return bytes;
}

static cublasStatus_t describe(Plan *p)
{
    const Key &k = p->key;
    const cudaDataType_t type = type_of(k.dtype), y_type = type_of(k.y_dtype);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    cublasStatus_t s = cublasLtMatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    if (s == CUBLAS_STATUS_SUCCESS && k.bias)
        s = cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    if (s == CUBLAS_STATUS_SUCCESS) s = cublasLtMatrixLayoutCreate(&p->a, type, (uint64_t)k.k, (uint64_t)k.n, k.w_stride);
    if (s == CUBLAS_STATUS_SUCCESS) s = cublasLtMatrixLayoutCreate(&p->b, type, (uint64_t)k.k, (uint64_t)k.tokens, k.x_stride);
    if (s == CUBLAS_STATUS_SUCCESS) s = cublasLtMatrixLayoutCreate(&p->c, y_type, (uint64_t)k.n, (uint64_t)k.tokens, k.y_stride);
    return s;
}

static cublasStatus_t choose(cublasLtHandle_t handle, Plan *p)
{
    const Key &k = p->key;
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    const uint32_t a = (uint32_t)k.w_align, b = (uint32_t)k.x_align, c = (uint32_t)k.y_align;
    cublasStatus_t s = cublasLtMatmulPreferenceCreate(&preference);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &k.workspace, sizeof k.workspace);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &a, sizeof a);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &b, sizeof b);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &c, sizeof c);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &c, sizeof c);
    s = cublasLtMatmulAlgoGetHeuristic(handle, p->operation, p->a, p->b, p->c, p->c, preference, 1, &result, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    if (s == CUBLAS_STATUS_SUCCESS && found > 0 && result.state == CUBLAS_STATUS_SUCCESS) {
        p->algorithm = result.algo;
        p->possible = true;
        return s;
    }
    return s == CUBLAS_STATUS_NOT_SUPPORTED || s == CUBLAS_STATUS_INVALID_VALUE ? CUBLAS_STATUS_SUCCESS : s;
}

static weft_status plan_for(weft_blas *blas, const Key &key, Plan **out)
{
    for (int i = 0; i < PLANS; i++)
        if (blas->plans[i].used && memcmp(&blas->plans[i].key, &key, sizeof key) == 0) {
            *out = &blas->plans[i];
            return WEFT_OK;
        }
    Plan *p = &blas->plans[blas->next];
    blas->next = (blas->next + 1) % PLANS;
    plan_clear(p);
    p->key = key;
    cublasStatus_t s = describe(p);
    if (s == CUBLAS_STATUS_SUCCESS) s = choose(blas->handle, p);
    if (s != CUBLAS_STATUS_SUCCESS) {
        plan_clear(p);
        return refused(s);
    }
    p->used = true;
    *out = p;
    return WEFT_OK;
}

weft_status blas_linear(const weft_linear_args *a, size_t reserved, void *stream, bool *done)
{
    *done = false;
    weft_cuda_context *c = a->cuda;
    if (c == NULL || a->x_dtype != a->w_dtype || (a->bias != NULL && a->bias_dtype != a->y_dtype)) return WEFT_OK;
    if (a->y_dtype != a->x_dtype && a->y_dtype != WEFT_F32) return WEFT_OK;
    if (a->x_stride < a->k || a->w_stride < a->k || a->y_stride < a->n) return WEFT_OK;
    Key key;
    memset(&key, 0, sizeof key);
    key.tokens = a->tokens, key.n = a->n, key.k = a->k;
    key.x_stride = a->x_stride, key.w_stride = a->w_stride, key.y_stride = a->y_stride;
    key.workspace = c->workspace_bytes - reserved;
    key.dtype = a->x_dtype, key.y_dtype = a->y_dtype, key.bias = a->bias != NULL, key.add = a->add;
    key.x_align = alignment(a->x), key.w_align = alignment(a->w), key.y_align = alignment(a->y);
    Plan *plan = NULL;
    WEFT_TRY(plan_for(c->blas, key, &plan));
    if (!plan->possible) return WEFT_OK;
    const float one = 1.0f, beta = a->add ? 1.0f : 0.0f;
    if (a->bias != NULL)
        TRY_BLAS(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &a->bias, sizeof a->bias));
    TRY_BLAS(cublasLtMatmul(c->blas->handle, plan->operation, &one, a->w, plan->a, a->x, plan->b, &beta, a->y, plan->c, a->y, plan->c,
                            &plan->algorithm, c->workspace + reserved, key.workspace, (cudaStream_t)stream));
    *done = true;
    return WEFT_OK;
}

} // namespace weft
