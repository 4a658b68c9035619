/* device/tensor.c - shapes, strides and views. */
#include "device/tensor.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/checked.h"
#include "device/arena.h"

static void storage_destroy(weft_object *object)
{
    weft_storage *storage = (weft_storage *)object;
    if (storage->memory != NULL) weft_memory_free(storage->memory, storage->data, storage->bytes);
    WEFT_RELEASE(storage->memory);
    weft_object_release(storage->owner);
    free(storage);
}

static void tensor_destroy(weft_object *object)
{
    weft_tensor *tensor = (weft_tensor *)object;
    WEFT_RELEASE(tensor->storage);
    weft_object_release((weft_object *)tensor->arena); /* the arena starts with its object header */
    free(tensor);
}

/* Bytes of a contiguous tensor, or a refusal. */
static weft_status contiguous_bytes(weft_dtype dtype, int ndim, const int64_t *shape, size_t *bytes)
{
    if (ndim < 0 || ndim > WEFT_MAX_DIMS)
        return weft_fail(WEFT_INVALID, "a tensor has 0 to %d dimensions, got %d", WEFT_MAX_DIMS, ndim);
    size_t total = weft_dtype_size(dtype);
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0) return weft_fail(WEFT_INVALID, "dimension %d has negative size %" PRId64, i, shape[i]);
        if (!weft_mul_size(total, (size_t)shape[i], &total) || total > (size_t)PTRDIFF_MAX)
            return weft_fail(WEFT_INVALID, "the shape has more bytes than this machine can address");
    }
    *bytes = total;
    return WEFT_OK;
}

static weft_tensor *new_tensor(weft_storage *storage, void *data, weft_dtype dtype, int ndim, const int64_t *shape)
{
    weft_tensor *tensor = calloc(1, sizeof *tensor);
    if (tensor == NULL) return NULL;
    weft_object_init(&tensor->object, tensor_destroy);
    tensor->storage = storage;
    tensor->data = data;
    tensor->dtype = dtype;
    tensor->ndim = ndim;
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        tensor->shape[i] = shape[i];
        tensor->stride[i] = stride;
        stride *= shape[i];
    }
    return tensor;
}

static weft_status storage_new(weft_storage **out)
{
    weft_storage *storage = calloc(1, sizeof *storage);
    if (storage == NULL) return weft_fail(WEFT_MEMORY, "no memory for a tensor");
    weft_object_init(&storage->object, storage_destroy);
    *out = storage;
    return WEFT_OK;
}

weft_status weft_tensor_create(weft_tensor **out, weft_memory *memory, weft_dtype dtype, int ndim, const int64_t *shape)
{
    size_t bytes;
    WEFT_TRY(contiguous_bytes(dtype, ndim, shape, &bytes));
    weft_storage *storage;
    WEFT_TRY(storage_new(&storage));
    weft_status status = weft_memory_alloc(memory, bytes, &storage->data);
    if (status != WEFT_OK) {
        WEFT_RELEASE(storage);
        return status;
    }
    storage->bytes = bytes;
    storage->memory = WEFT_RETAIN(memory);
    storage->cuda = memory->cuda;
    weft_tensor *tensor = new_tensor(storage, storage->data, dtype, ndim, shape);
    if (tensor == NULL) {
        WEFT_RELEASE(storage);
        return weft_fail(WEFT_MEMORY, "no memory for a tensor");
    }
    *out = tensor;
    return WEFT_OK;
}

weft_status weft_tensor_wrap(weft_tensor **out, weft_object *owner, void *data, weft_dtype dtype, int ndim,
                             const int64_t *shape)
{
    size_t bytes;
    WEFT_TRY(contiguous_bytes(dtype, ndim, shape, &bytes));
    weft_storage *storage;
    WEFT_TRY(storage_new(&storage));
    storage->data = data;
    storage->bytes = bytes;
    storage->owner = owner;
    if (owner != NULL) weft_object_retain(owner);
    weft_tensor *tensor = new_tensor(storage, data, dtype, ndim, shape);
    if (tensor == NULL) {
        WEFT_RELEASE(storage);
        return weft_fail(WEFT_MEMORY, "no memory for a tensor");
    }
    *out = tensor;
    return WEFT_OK;
}

int64_t weft_tensor_numel(const weft_tensor *tensor)
{
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++) count *= tensor->shape[i];
    return count;
}

int weft_tensor_is_contiguous(const weft_tensor *tensor)
{
    int64_t stride = 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] != 1 && tensor->stride[i] != stride) return weft_tensor_numel(tensor) == 0;
        stride *= tensor->shape[i];
    }
    return 1;
}

weft_status weft_tensor_check(const weft_tensor *tensor)
{
    if (tensor->arena != NULL && tensor->epoch != weft_arena_epoch(tensor->arena, tensor->arena_part))
        return weft_fail(WEFT_CLOSED, "this tensor belonged to an earlier layer or step, and its memory is used again; "
                                      "keep a :clone() of what must live longer");
    return WEFT_OK;
}

const char *weft_tensor_describe(const weft_tensor *tensor, char *text, size_t size)
{
    int used = snprintf(text, size, "%s[", weft_dtype_name(tensor->dtype));
    for (int i = 0; i < tensor->ndim && used > 0 && (size_t)used < size; i++) {
        used += snprintf(text + used, size - (size_t)used, "%s%" PRId64, i ? ", " : "", tensor->shape[i]);
        if (tensor->cut_axis != NULL && tensor->cut_dim == i && (size_t)used < size)
            used += snprintf(text + used, size - (size_t)used, " @%s/%d", tensor->cut_axis, tensor->cut_size);
    }
    if (used > 0 && (size_t)used < size) snprintf(text + used, size - (size_t)used, "]");
    return text;
}

void weft_tensor_note_cut(weft_tensor *tensor, int dim, const char *axis, int size)
{
    tensor->cut_axis = size > 1 ? axis : NULL;
    tensor->cut_dim = dim;
    tensor->cut_size = size;
}

/* A second tensor over the same storage, to be reshaped by the caller. */
static weft_status view_of(weft_tensor **out, weft_tensor *tensor)
{
    WEFT_TRY(weft_tensor_check(tensor));
    weft_tensor *view = malloc(sizeof *view);
    if (view == NULL) return weft_fail(WEFT_MEMORY, "no memory for a view");
    *view = *tensor;
    weft_object_init(&view->object, tensor_destroy);
    weft_object_retain(&view->storage->object);
    if (view->arena != NULL) weft_object_retain((weft_object *)view->arena);
    *out = view;
    return WEFT_OK;
}

static weft_status check_dim(const weft_tensor *tensor, int dim)
{
    if (dim < 0 || dim >= tensor->ndim)
        return weft_fail(WEFT_INVALID, "dimension %d of a tensor with %d", dim, tensor->ndim);
    return WEFT_OK;
}

static void advance(weft_tensor *view, int dim, int64_t start)
{
    int64_t bytes = start * view->stride[dim] * (int64_t)weft_dtype_size(view->dtype);
    view->data = (char *)view->data + bytes;
    if (view->device_data != NULL) view->device_data = (char *)view->device_data + bytes;
}

weft_status weft_tensor_narrow(weft_tensor **out, weft_tensor *tensor, int dim, int64_t start, int64_t length)
{
    WEFT_TRY(check_dim(tensor, dim));
    if (start < 0 || length < 0 || start > tensor->shape[dim] || length > tensor->shape[dim] - start)
        return weft_fail(WEFT_INVALID, "rows %" PRId64 " to %" PRId64 " of dimension %d, which has %" PRId64, start,
                         start + length, dim, tensor->shape[dim]);
    weft_tensor *view;
    WEFT_TRY(view_of(&view, tensor));
    advance(view, dim, start);
    if (view->cut_dim == dim && view->shape[dim] != length) view->cut_axis = NULL;
    view->shape[dim] = length;
    *out = view;
    return WEFT_OK;
}

weft_status weft_tensor_select(weft_tensor **out, weft_tensor *tensor, int dim, int64_t index)
{
    WEFT_TRY(check_dim(tensor, dim));
    if (index < 0 || index >= tensor->shape[dim])
        return weft_fail(WEFT_INVALID, "index %" PRId64 " of dimension %d, which has %" PRId64, index, dim,
                         tensor->shape[dim]);
    weft_tensor *view;
    WEFT_TRY(view_of(&view, tensor));
    advance(view, dim, index);
    for (int i = dim; i + 1 < view->ndim; i++) {
        view->shape[i] = view->shape[i + 1];
        view->stride[i] = view->stride[i + 1];
    }
    view->ndim--;
    if (view->cut_dim == dim) view->cut_axis = NULL;
    else if (view->cut_dim > dim) view->cut_dim--;
    *out = view;
    return WEFT_OK;
}

weft_status weft_tensor_transpose(weft_tensor **out, weft_tensor *tensor, int dim0, int dim1)
{
    WEFT_TRY(check_dim(tensor, dim0));
    WEFT_TRY(check_dim(tensor, dim1));
    weft_tensor *view;
    WEFT_TRY(view_of(&view, tensor));
    int64_t shape = view->shape[dim0], stride = view->stride[dim0];
    view->shape[dim0] = view->shape[dim1];
    view->stride[dim0] = view->stride[dim1];
    view->shape[dim1] = shape;
    view->stride[dim1] = stride;
    if (view->cut_dim == dim0) view->cut_dim = dim1;
    else if (view->cut_dim == dim1) view->cut_dim = dim0;
    *out = view;
    return WEFT_OK;
}

weft_status weft_tensor_view(weft_tensor **out, weft_tensor *tensor, int ndim, const int64_t *shape)
{
    if (!weft_tensor_is_contiguous(tensor)) return weft_fail(WEFT_INVALID, "a view of new shape needs a contiguous tensor");
    if (ndim < 0 || ndim > WEFT_MAX_DIMS)
        return weft_fail(WEFT_INVALID, "a tensor has 0 to %d dimensions, got %d", WEFT_MAX_DIMS, ndim);
    int64_t sizes[WEFT_MAX_DIMS], known = 1;
    int open = -1;
    for (int i = 0; i < ndim; i++) {
        sizes[i] = shape[i];
        if (shape[i] == -1 && open < 0) open = i;
        else if (shape[i] < 0 || !weft_mul_i64(known, shape[i], &known)) return weft_fail(WEFT_INVALID, "bad size %" PRId64 " in a view", shape[i]);
    }
    int64_t count = weft_tensor_numel(tensor);
    if (open >= 0) {
        if (known == 0 || count % known != 0)
            return weft_fail(WEFT_INVALID, "%" PRId64 " elements do not divide into rows of %" PRId64, count, known);
        sizes[open] = count / known;
    } else if (known != count) {
        return weft_fail(WEFT_INVALID, "a view of %" PRId64 " elements over %" PRId64, known, count);
    }
    weft_tensor *view;
    WEFT_TRY(view_of(&view, tensor));
    view->cut_axis = NULL;
    view->ndim = ndim;
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        view->shape[i] = sizes[i];
        view->stride[i] = stride;
        stride *= sizes[i];
    }
    *out = view;
    return WEFT_OK;
}

static void copy_dim(char *dst, const weft_tensor *d, const char *src, const weft_tensor *s, int dim)
{
    size_t dst_size = weft_dtype_size(d->dtype), src_size = weft_dtype_size(s->dtype);
    if (dim >= d->ndim || dim >= WEFT_MAX_DIMS) {
        weft_convert(dst, d->dtype, src, s->dtype, 1);
    } else if (dim == d->ndim - 1 && d->stride[dim] == 1 && s->stride[dim] == 1) {
        weft_convert(dst, d->dtype, src, s->dtype, d->shape[dim]);
    } else {
        for (int64_t i = 0; i < d->shape[dim]; i++)
            copy_dim(dst + i * d->stride[dim] * (int64_t)dst_size, d, src + i * s->stride[dim] * (int64_t)src_size, s, dim + 1);
    }
}

static void copy_on_host(const weft_tensor *dst, const weft_tensor *src)
{
    if (weft_tensor_is_contiguous(dst) && weft_tensor_is_contiguous(src))
        weft_convert(dst->data, dst->dtype, src->data, src->dtype, weft_tensor_numel(dst));
    else
        copy_dim(dst->data, dst, src->data, src, 0);
}

/* Bytes from the first element to behind the last. */
static size_t span(const weft_tensor *tensor)
{
    int64_t last = 0;
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] == 0) return 0;
        last += (tensor->shape[i] - 1) * tensor->stride[i];
    }
    return ((size_t)last + 1) * weft_dtype_size(tensor->dtype);
}

/* `image` is the tensor with its span in host memory, to be freed by the caller (image->data). */
static weft_status fetch(const weft_tensor *tensor, weft_tensor *image)
{
    size_t bytes = span(tensor);
    void *data = malloc(bytes > 0 ? bytes : 1);
    if (data == NULL) return weft_fail(WEFT_MEMORY, "no host memory for a copy of %zu bytes", bytes);
    weft_status status = weft_cuda_to_host(tensor->storage->cuda, data, tensor->data, bytes);
    if (status != WEFT_OK) {
        free(data);
        return status;
    }
    *image = *tensor;
    image->data = data;
    return WEFT_OK;
}

/* At least one of the two lies on a GPU. */
static weft_status copy_across(const weft_tensor *dst, const weft_tensor *src)
{
    int plain = dst->dtype == src->dtype && weft_tensor_is_contiguous(dst) && weft_tensor_is_contiguous(src);
    weft_cuda *from = src->storage->cuda, *to = dst->storage->cuda;
    if (plain && from == to) return weft_cuda_copy(to, dst->data, src->data, span(dst));
    if (plain && to == NULL) return weft_cuda_to_host(from, dst->data, src->data, span(dst));
    if (plain && from == NULL) return weft_cuda_to_device(to, dst->data, src->data, span(dst));
    weft_tensor source = *src, target = *dst;
    if (from != NULL) WEFT_TRY(fetch(src, &source));
    weft_status status = to != NULL ? fetch(dst, &target) : WEFT_OK;
    if (status == WEFT_OK) {
        copy_on_host(&target, &source);
        if (to != NULL) status = weft_cuda_to_device(to, dst->data, target.data, span(dst));
        if (to != NULL) free(target.data);
    }
    if (from != NULL) free(source.data);
    return status;
}

weft_status weft_tensor_copy(weft_tensor *dst, const weft_tensor *src)
{
    WEFT_TRY(weft_tensor_check(dst));
    WEFT_TRY(weft_tensor_check(src));
    int same = dst->ndim == src->ndim;
    for (int i = 0; same && i < dst->ndim; i++) same = dst->shape[i] == src->shape[i];
    if (!same) {
        char a[128], b[128];
        return weft_fail(WEFT_INVALID, "copy of %s into %s", weft_tensor_describe(src, a, sizeof a),
                         weft_tensor_describe(dst, b, sizeof b));
    }
    if (dst->storage->cuda != NULL || src->storage->cuda != NULL) return copy_across(dst, src);
    copy_on_host(dst, src);
    return WEFT_OK;
}

weft_status weft_tensor_to_host(weft_tensor **out, weft_tensor *tensor)
{
    WEFT_TRY(weft_tensor_check(tensor));
    if (tensor->storage->cuda == NULL) {
        *out = WEFT_RETAIN(tensor);
        return WEFT_OK;
    }
    weft_memory *memory;
    weft_tensor *copy = NULL;
    WEFT_TRY(weft_memory_create(&memory, 0));
    weft_status status = weft_tensor_create(&copy, memory, tensor->dtype, tensor->ndim, tensor->shape);
    WEFT_RELEASE(memory);
    if (status == WEFT_OK) status = weft_tensor_copy(copy, tensor);
    if (status != WEFT_OK) {
        WEFT_RELEASE(copy);
        return status;
    }
    *out = copy;
    return WEFT_OK;
}

static void fill_dim(char *dst, const weft_tensor *d, float value, int dim)
{
    if (dim >= d->ndim || dim >= WEFT_MAX_DIMS) {
        weft_store_f32(dst, d->dtype, 0, value);
        return;
    }
    for (int64_t i = 0; i < d->shape[dim]; i++)
        fill_dim(dst + i * d->stride[dim] * (int64_t)weft_dtype_size(d->dtype), d, value, dim + 1);
}

weft_status weft_tensor_fill(weft_tensor *tensor, double value)
{
    WEFT_TRY(weft_tensor_check(tensor));
    weft_cuda *cuda = tensor->storage->cuda;
    weft_tensor target = *tensor;
    if (cuda != NULL) WEFT_TRY(fetch(tensor, &target));
    fill_dim(target.data, &target, (float)value, 0);
    if (cuda == NULL) return WEFT_OK;
    weft_status status = weft_cuda_to_device(cuda, tensor->data, target.data, span(tensor));
    free(target.data);
    return status;
}
