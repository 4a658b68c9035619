/* kernels/cpu/onednn.c - oneDNN's matmul on the calling thread.
 *
 * oneDNN would start an OpenMP team for each call; our pool has cut the work already, so every thread
 * that comes here tells OpenMP once that its team has one member. Engine and stream belong to the
 * thread and go with it. */
#include "kernels/cpu/onednn.h"

#if defined(WEFT_HAVE_ONEDNN)

#include <dnnl.h>
#include <pthread.h>

/* From libgomp, which oneDNN brings along. */
extern void omp_set_num_threads(int threads);

static _Thread_local struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
} own;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static int key_failed;

static void destroy_own(void *unused)
{
    if (own.stream != NULL) dnnl_stream_destroy(own.stream);
    if (own.engine != NULL) dnnl_engine_destroy(own.engine);
    own.stream = NULL;
    own.engine = NULL;
}

static void make_key(void)
{
    key_failed = pthread_key_create(&key, destroy_own);
}

static int prepare(void)
{
    if (own.stream != NULL) return 1;
    pthread_once(&once, make_key);
    if (key_failed || pthread_setspecific(key, &own) != 0) return 0;
    omp_set_num_threads(1);
    if (own.engine == NULL && dnnl_engine_create(&own.engine, dnnl_cpu, 0) != dnnl_success) return 0;
    return dnnl_stream_create(&own.stream, own.engine, dnnl_stream_default_flags) == dnnl_success;
}

static int describe(dnnl_memory_desc_t *desc, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride, dnnl_data_type_t type)
{
    const dnnl_dims_t dims = {rows, cols}, strides = {row_stride, col_stride};
    return dnnl_memory_desc_init_by_strides(desc, 2, dims, type, strides) == dnnl_success;
}

typedef struct {
    dnnl_memory_desc_t x, w, c;
} product_descs;

/* The primitive for these shapes; oneDNN keeps those it has made. NULL when it has none. */
static dnnl_primitive_t create_matmul(product_descs *d, int64_t tokens, int64_t n, int64_t k, int64_t x_stride, int64_t w_stride,
                                      int64_t c_stride)
{
    dnnl_matmul_desc_t matmul;
    dnnl_primitive_desc_t primitive_desc = NULL;
    dnnl_primitive_t primitive = NULL;
    if (!describe(&d->x, tokens, k, x_stride, 1, dnnl_bf16) || !describe(&d->w, k, n, 1, w_stride, dnnl_bf16) ||
        !describe(&d->c, tokens, n, c_stride, 1, dnnl_f32))
        return NULL;
    if (dnnl_matmul_desc_init(&matmul, &d->x, &d->w, NULL, &d->c) != dnnl_success ||
        dnnl_primitive_desc_create(&primitive_desc, &matmul, NULL, own.engine, NULL) != dnnl_success)
        return NULL;
    if (dnnl_primitive_create(&primitive, primitive_desc) != dnnl_success) primitive = NULL;
    dnnl_primitive_desc_destroy(primitive_desc);
    return primitive;
}

int weft__onednn_has_bf16(void)
{
    product_descs descs;
    if (!prepare()) return 0;
    dnnl_primitive_t primitive = create_matmul(&descs, 64, 64, 64, 64, 64, 64);
    if (primitive == NULL) return 0;
    dnnl_primitive_destroy(primitive);
    return 1;
}

static int execute(dnnl_primitive_t primitive, product_descs *d, const void *x, const void *w, float *c)
{
    dnnl_memory_t memories[3] = {NULL, NULL, NULL};
    int done = 0;
    if (dnnl_memory_create(&memories[0], &d->x, own.engine, (void *)x) == dnnl_success &&
        dnnl_memory_create(&memories[1], &d->w, own.engine, (void *)w) == dnnl_success &&
        dnnl_memory_create(&memories[2], &d->c, own.engine, c) == dnnl_success) {
        const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, memories[0]}, {DNNL_ARG_WEIGHTS, memories[1]}, {DNNL_ARG_DST, memories[2]}};
        done = dnnl_primitive_execute(primitive, own.stream, 3, args) == dnnl_success && dnnl_stream_wait(own.stream) == dnnl_success;
    }
    for (int i = 0; i < 3; i++)
        if (memories[i] != NULL) dnnl_memory_destroy(memories[i]);
    return done;
}

int weft__onednn_product(const void *x, int64_t x_stride, int64_t tokens, const void *w, int64_t w_stride, int64_t n, int64_t k,
                         float *c, int64_t c_stride)
{
    product_descs descs;
    if (!prepare()) return 0;
    dnnl_primitive_t primitive = create_matmul(&descs, tokens, n, k, x_stride, w_stride, c_stride);
    if (primitive == NULL) return 0;
    int done = execute(primitive, &descs, x, w, c);
    dnnl_primitive_destroy(primitive);
    return done;
}

#else

int weft__onednn_has_bf16(void)
{
    return 0;
}

int weft__onednn_product(const void *x, int64_t x_stride, int64_t tokens, const void *w, int64_t w_stride, int64_t n, int64_t k,
                         float *c, int64_t c_stride)
{
    return 0;
}

#endif
