/* kernels/cpu/onednn.c - oneDNN's matmul on the calling thread.
 *
 * oneDNN would start an OpenMP team for each call; our pool has cut the work already, so every thread
 * that comes here tells OpenMP once that its team has one member. Engine and stream belong to the
 * thread and go with it. */
#include "kernels/cpu/onednn.h"

#if defined(WEFT_HAVE_ONEDNN)

#include <dnnl.h>
#include <pthread.h>
#include <string.h>

/* From libgomp, which oneDNN brings along. */
extern void omp_set_num_threads(int threads);

enum { KEPT = 16 };

/* A product's shape and strides, and what oneDNN made for it. */
typedef struct {
    int64_t tokens, n, k, x_stride, w_stride, c_stride;
} product_shape;

typedef struct {
    product_shape shape;
    dnnl_primitive_t primitive;
    dnnl_memory_t x, w, c; /* their data is set for each call */
} kept_product;

static _Thread_local struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    kept_product kept[KEPT];
    unsigned next; /* whose place the next shape takes */
} own;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static int key_failed;

static void drop(kept_product *p)
{
    if (p->primitive != NULL) dnnl_primitive_destroy(p->primitive);
    if (p->x != NULL) dnnl_memory_destroy(p->x);
    if (p->w != NULL) dnnl_memory_destroy(p->w);
    if (p->c != NULL) dnnl_memory_destroy(p->c);
    memset(p, 0, sizeof *p);
}

static void destroy_own(void *unused)
{
    for (int i = 0; i < KEPT; i++) drop(&own.kept[i]);
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

static int make(kept_product *p, const product_shape *shape)
{
    dnnl_memory_desc_t x, w, c;
    dnnl_matmul_desc_t matmul;
    dnnl_primitive_desc_t primitive_desc = NULL;
    if (!describe(&x, shape->tokens, shape->k, shape->x_stride, 1, dnnl_bf16) ||
        !describe(&w, shape->k, shape->n, 1, shape->w_stride, dnnl_bf16) ||
        !describe(&c, shape->tokens, shape->n, shape->c_stride, 1, dnnl_f32))
        return 0;
    if (dnnl_matmul_desc_init(&matmul, &x, &w, NULL, &c) != dnnl_success ||
        dnnl_primitive_desc_create(&primitive_desc, &matmul, NULL, own.engine, NULL) != dnnl_success)
        return 0;
    int done = dnnl_primitive_create(&p->primitive, primitive_desc) == dnnl_success;
    dnnl_primitive_desc_destroy(primitive_desc);
    return done && dnnl_memory_create(&p->x, &x, own.engine, DNNL_MEMORY_NONE) == dnnl_success &&
           dnnl_memory_create(&p->w, &w, own.engine, DNNL_MEMORY_NONE) == dnnl_success &&
           dnnl_memory_create(&p->c, &c, own.engine, DNNL_MEMORY_NONE) == dnnl_success;
}

/* This thread's product of a shape. Asking oneDNN each time takes a lock that all threads share, which
 * costs more than a small block's product. NULL when oneDNN has none. */
static kept_product *product_for(const product_shape *shape)
{
    for (int i = 0; i < KEPT; i++)
        if (own.kept[i].primitive != NULL && memcmp(&own.kept[i].shape, shape, sizeof *shape) == 0) return &own.kept[i];
    kept_product *p = &own.kept[own.next++ % KEPT];
    drop(p);
    if (!make(p, shape)) {
        drop(p);
        return NULL;
    }
    p->shape = *shape;
    return p;
}

int weft__onednn_has_bf16(void)
{
    const product_shape small = {64, 64, 64, 64, 64, 64};
    return prepare() && product_for(&small) != NULL;
}

int weft__onednn_product(const void *x, int64_t x_stride, int64_t tokens, const void *w, int64_t w_stride, int64_t n, int64_t k,
                         float *c, int64_t c_stride)
{
    const product_shape shape = {tokens, n, k, x_stride, w_stride, c_stride};
    kept_product *p = prepare() ? product_for(&shape) : NULL;
    if (p == NULL) return 0;
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, p->x}, {DNNL_ARG_WEIGHTS, p->w}, {DNNL_ARG_DST, p->c}};
    return dnnl_memory_set_data_handle(p->x, (void *)x) == dnnl_success &&
           dnnl_memory_set_data_handle(p->w, (void *)w) == dnnl_success && dnnl_memory_set_data_handle(p->c, c) == dnnl_success &&
           dnnl_primitive_execute(p->primitive, own.stream, 3, args) == dnnl_success && dnnl_stream_wait(own.stream) == dnnl_success;
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
