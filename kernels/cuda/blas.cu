/* kernels/cuda/blas.cu - products through cuBLASLt.
 *
 * Row-major y = x w^T is column-major y^T = w x^T: A = w transposed, B = x, m = n of the args. */
#include <stdlib.h>

#include <cublasLt.h>

#include "kernels/cuda/blas.cuh"

namespace weft {

enum {
    PLANS = 256,
    CHOICES = 64,    /* matrices whose kernel was chosen by measurement */
    CANDIDATES = 8,  /* kernels that the library proposes, the best guess first */
    LONG_TOKENS = 1024 /* from here on its guess is measured: it misses up to 6% */
};

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

/* What was fastest for a weight matrix, for any number of tokens from LONG_TOKENS on. */
struct Choice {
    int64_t n, k;
    int dtype, y_dtype;
    int tile;
    uint16_t cluster;
};

} // namespace weft

using namespace weft;

struct weft_blas {
    cublasLtHandle_t handle;
    int next; /* the plan that is replaced next */
    int choices;
    Choice chosen[CHOICES];
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

static cublasStatus_t run(weft_blas *blas, const Plan *p, const cublasLtMatmulAlgo_t *algorithm, const weft_linear_args *a, size_t reserved,
                          cudaStream_t stream)
{
    const float one = 1.0f, beta = a->add ? 1.0f : 0.0f;
    return cublasLtMatmul(blas->handle, p->operation, &one, a->w, p->a, a->x, p->b, &beta, a->y, p->c, a->y, p->c, algorithm,
                          a->cuda->workspace + reserved, p->key.workspace, stream);
}

template <class V> static V config(const cublasLtMatmulAlgo_t *algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute)
{
    V value = 0;
    size_t written = 0;
    (void)cublasLtMatmulAlgoConfigGetAttribute(algorithm, attribute, &value, sizeof value, &written);
    return value;
}

static Choice choice_of(const Key &k, const cublasLtMatmulAlgo_t *algorithm)
{
    return {k.n, k.k, k.dtype, k.y_dtype, config<int>(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID),
            config<uint16_t>(algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID)};
}

/* Microseconds of the second of two runs; huge where a run fails. Waits for the stream. */
static float time_of(weft_blas *blas, const Plan *p, const cublasLtMatmulAlgo_t *algorithm, const weft_linear_args *a, size_t reserved,
                     cudaStream_t stream, cudaEvent_t begin, cudaEvent_t end)
{
    float ms = 0.0f;
    bool well = run(blas, p, algorithm, a, reserved, stream) == CUBLAS_STATUS_SUCCESS;
    well = well && cudaEventRecord(begin, stream) == cudaSuccess && run(blas, p, algorithm, a, reserved, stream) == CUBLAS_STATUS_SUCCESS;
    well = well && cudaEventRecord(end, stream) == cudaSuccess && cudaEventSynchronize(end) == cudaSuccess;
    return well && cudaEventElapsedTime(&ms, begin, end) == cudaSuccess ? ms * 1e3f : 1e30f;
}

/* The fastest of the candidates that add up in the order of the first, so that a choice changes no bits. */
static int measure(weft_blas *blas, const Plan *p, const cublasLtMatmulHeuristicResult_t *candidates, int count, const weft_linear_args *a,
                   size_t reserved, cudaStream_t stream)
{
    cudaEvent_t begin = NULL, end = NULL;
    int best = 0;
    if (cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess) {
        float best_time = 0.98f * time_of(blas, p, &candidates[0].algo, a, reserved, stream, begin, end);
        for (int i = 1; i < count; i++) {
            if (candidates[i].state != CUBLAS_STATUS_SUCCESS || config<uint32_t>(&candidates[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1) continue;
            const float time = time_of(blas, p, &candidates[i].algo, a, reserved, stream, begin, end);
            if (time < best_time) best = i, best_time = time;
        }
    }
    if (begin != NULL) cudaEventDestroy(begin);
    if (end != NULL) cudaEventDestroy(end);
    (void)cudaGetLastError();
    return best;
}

/* Which candidate to take: the first for short products; for long ones the kernel that was fastest when
 * this matrix was first multiplied outside a captured graph. */
static int pick(weft_blas *blas, const Plan *p, const cublasLtMatmulHeuristicResult_t *candidates, int count, const weft_linear_args *a,
                size_t reserved, cudaStream_t stream)
{
    const Key &k = p->key;
    if (k.tokens < LONG_TOKENS || count < 2) return 0;
    for (int c = 0; c < blas->choices; c++) {
        const Choice &known = blas->chosen[c];
        if (known.n != k.n || known.k != k.k || known.dtype != k.dtype || known.y_dtype != k.y_dtype) continue;
        for (int i = 0; i < count; i++) {
            const Choice own = choice_of(k, &candidates[i].algo);
            if (own.tile == known.tile && own.cluster == known.cluster) return i;
        }
        return 0;
    }
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (a->add || blas->choices == CHOICES || cudaStreamIsCapturing(stream, &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone) return 0;
    const int best = measure(blas, p, candidates, count, a, reserved, stream);
    blas->chosen[blas->choices++] = choice_of(k, &candidates[best].algo);
    return best;
}

static cublasStatus_t choose(weft_blas *blas, Plan *p, const weft_linear_args *args, size_t reserved, cudaStream_t stream)
{
    const Key &k = p->key;
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t results[CANDIDATES];
    int found = 0;
    const uint32_t a = (uint32_t)k.w_align, b = (uint32_t)k.x_align, c = (uint32_t)k.y_align;
    cublasStatus_t s = cublasLtMatmulPreferenceCreate(&preference);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &k.workspace, sizeof k.workspace);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &a, sizeof a);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &b, sizeof b);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &c, sizeof c);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &c, sizeof c);
    s = cublasLtMatmulAlgoGetHeuristic(blas->handle, p->operation, p->a, p->b, p->c, p->c, preference, k.tokens < LONG_TOKENS ? 1 : (int)CANDIDATES,
                                       results, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    if (s == CUBLAS_STATUS_SUCCESS && found > 0 && results[0].state == CUBLAS_STATUS_SUCCESS) {
        p->algorithm = results[pick(blas, p, results, found, args, reserved, stream)].algo;
        p->possible = true;
        return s;
    }
    return s == CUBLAS_STATUS_NOT_SUPPORTED || s == CUBLAS_STATUS_INVALID_VALUE ? CUBLAS_STATUS_SUCCESS : s;
}

static weft_status plan_for(weft_blas *blas, const Key &key, const weft_linear_args *a, size_t reserved, cudaStream_t stream, Plan **out)
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
    if (s == CUBLAS_STATUS_SUCCESS && a->bias != NULL)
        s = cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &a->bias, sizeof a->bias);
    if (s == CUBLAS_STATUS_SUCCESS) s = choose(blas, p, a, reserved, stream);
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
    WEFT_TRY(plan_for(c->blas, key, a, reserved, (cudaStream_t)stream, &plan));
    if (!plan->possible) return WEFT_OK;
    if (a->bias != NULL)
        TRY_BLAS(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &a->bias, sizeof a->bias));
    TRY_BLAS(run(c->blas, plan, &plan->algorithm, a, reserved, (cudaStream_t)stream));
    *done = true;
    return WEFT_OK;
}

} // namespace weft
