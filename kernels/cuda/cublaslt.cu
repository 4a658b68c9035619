/* kernels/cuda/cublaslt.cu - cuBLASLt, opened with the first GPU and not before: linked, its half a
 * gigabyte costs every start of the program 0.27 s, also where no GPU is used.
 *
 * The functions that weft calls are defined here and pass on to the library's. One that is missing
 * at link time wants a line in FUNCTIONS. */
#include <pthread.h>
#include <stdio.h>

#pragma GCC visibility push(hidden) /* the library must keep to its own functions */
#include <cublasLt.h>
#pragma GCC visibility pop

#include "kernels/cuda/blas.cuh"
extern "C" {
#include "base/library.h"
}

#define FUNCTIONS(F)                                                                                                                    \
    F(cublasStatus_t, cublasLtCreate, (cublasLtHandle_t * handle), (handle))                                                            \
    F(cublasStatus_t, cublasLtDestroy, (cublasLtHandle_t handle), (handle))                                                             \
    F(const char *, cublasLtGetStatusName, (cublasStatus_t status), (status))                                                           \
    F(cublasStatus_t, cublasLtMatmulDescCreate, (cublasLtMatmulDesc_t * out, cublasComputeType_t compute, cudaDataType_t scale),        \
      (out, compute, scale))                                                                                                            \
    F(cublasStatus_t, cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t operation), (operation))                                         \
    F(cublasStatus_t, cublasLtMatmulDescSetAttribute,                                                                                   \
      (cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes),                      \
      (operation, attribute, value, bytes))                                                                                             \
    F(cublasStatus_t, cublasLtMatrixLayoutCreate,                                                                                       \
      (cublasLtMatrixLayout_t * out, cudaDataType type, uint64_t rows, uint64_t cols, int64_t stride), (out, type, rows, cols, stride)) \
    F(cublasStatus_t, cublasLtMatrixLayoutSetAttribute,                                                                                 \
      (cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const void *value, size_t bytes),                      \
      (layout, attribute, value, bytes))                                                                                                \
    F(cublasStatus_t, cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t layout), (layout))                                           \
    F(cublasStatus_t, cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * out), (out))                                        \
    F(cublasStatus_t, cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t preference), (preference))                           \
    F(cublasStatus_t, cublasLtMatmulPreferenceSetAttribute,                                                                             \
      (cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t bytes),         \
      (preference, attribute, value, bytes))                                                                                            \
    F(cublasStatus_t, cublasLtMatmulAlgoGetHeuristic,                                                                                   \
      (cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,                     \
       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int wanted,                           \
       cublasLtMatmulHeuristicResult_t results[], int *found),                                                                          \
      (handle, operation, a, b, c, d, preference, wanted, results, found))                                                              \
    F(cublasStatus_t, cublasLtMatmulAlgoConfigGetAttribute,                                                                             \
      (const cublasLtMatmulAlgo_t *algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute, void *value, size_t bytes, size_t *written), \
      (algorithm, attribute, value, bytes, written))                                                                                    \
    F(cublasStatus_t, cublasLtMatmul,                                                                                                   \
      (cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void *alpha, const void *a, cublasLtMatrixLayout_t a_layout,      \
       const void *b, cublasLtMatrixLayout_t b_layout, const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,       \
       cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t workspace_bytes,                 \
       cudaStream_t stream),                                                                                                            \
      (handle, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, workspace, workspace_bytes, stream))

/* Written once, by whoever opens the first GPU; only read behind that. */
static struct {
#define MEMBER(result, name, parameters, arguments) decltype(&::name) name;
    FUNCTIONS(MEMBER)
} library;

#define PASS_ON(result, name, parameters, arguments) \
    extern "C" result name parameters { return library.name arguments; }
FUNCTIONS(PASS_ON)

static pthread_once_t once = PTHREAD_ONCE_INIT;
static weft_status loaded;
static char failure[512];

#define TEXT_OF(number) #number
#define TEXT(number) TEXT_OF(number)

static weft_status load(void)
{
    static const char file[] = "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR);
    void *handle = NULL;
    WEFT_TRY(weft_library_open(&handle, file, WEFT_CUDA_LIBRARIES));
#define FIND(result, name, parameters, arguments) WEFT_TRY(weft_library_function(handle, file, #name, (void **)&library.name));
    FUNCTIONS(FIND)
    return WEFT_OK;
}

static void load_once(void)
{
    loaded = load();
    if (loaded != WEFT_OK) snprintf(failure, sizeof failure, "%s", weft_error_message());
}

weft_status weft::blas_load(void)
{
    pthread_once(&once, load_once);
    return loaded == WEFT_OK ? WEFT_OK : weft_fail(loaded, "GPUs need cuBLASLt: %s", failure);
}
