/* model/source.c - reads boxes of one weight. */
#include "model/source.h"

#include <math.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/checked.h"
#include "base/file.h"
#include "model/dummy.h"

static void source_destroy(weft_object *object)
{
    weft_source *source = (weft_source *)object;
    weft_object_release(source->owner);
    free(source->name);
    free(source);
}

static weft_status create(weft_source **out, const char *name, weft_dtype dtype, int ndim, const int64_t *shape)
{
    int64_t bytes = (int64_t)weft_dtype_size(dtype);
    if (ndim < 0 || ndim > WEFT_SOURCE_MAX_DIMS)
        return weft_fail(WEFT_UNSUPPORTED, "tensor '%s' has %d dimensions; weft reads weights with at most %d", name, ndim, WEFT_SOURCE_MAX_DIMS);
    for (int i = 0; i < ndim; i++)
        if (shape[i] < 0 || !weft_mul_i64(bytes, shape[i], &bytes))
            return weft_fail(WEFT_INVALID, "tensor '%s': size %" PRId64 " of dimension %d is out of range", name, shape[i], i);
    weft_source *source = calloc(1, sizeof *source);
    char *copy = strdup(name);
    if (source == NULL || copy == NULL) {
        free(source);
        free(copy);
        return weft_fail(WEFT_MEMORY, "no memory for tensor '%s'", name);
    }
    weft_object_init(&source->object, source_destroy);
    source->name = copy;
    source->dtype = dtype;
    source->ndim = ndim;
    for (int i = 0; i < ndim; i++) source->shape[i] = shape[i];
    *out = source;
    return WEFT_OK;
}

weft_status weft_source_create(weft_source **out, const char *name, weft_dtype dtype, int ndim, const int64_t *shape,
                               const void *data, weft_object *owner)
{
    weft_source *source;
    if (data == NULL) return weft_fail(WEFT_INVALID, "tensor '%s' has no data", name);
    WEFT_TRY(create(&source, name, dtype, ndim, shape));
    source->data = data;
    source->owner = owner;
    if (owner != NULL) weft_object_retain(owner);
    *out = source;
    return WEFT_OK;
}

weft_status weft_source_create_dummy(weft_source **out, const char *name, weft_dtype dtype, int ndim, const int64_t *shape)
{
    return create(out, name, dtype, ndim, shape);
}

static const char *describe_shape(int ndim, const int64_t *shape, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "[");
    for (int i = 0; i < ndim && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%" PRId64, i ? ", " : "", shape[i]);
    if (used < size) snprintf(text + used, size - used, "]");
    return text;
}

weft_status weft_source_expect_floats(const weft_source *source)
{
    if (source->dtype == WEFT_F32 || source->dtype == WEFT_BF16 || source->dtype == WEFT_F16) return WEFT_OK;
    return weft_fail(WEFT_FORMAT, "tensor '%s': wanted floats (F32, BF16 or F16), found %s", source->name, weft_dtype_name(source->dtype));
}

weft_status weft_source_expect_finite(const weft_source *source)
{
    if (source->data == NULL) return WEFT_OK; /* dummy values are finite */
    int64_t count = 1;
    for (int i = 0; i < source->ndim; i++) count *= source->shape[i];
    for (int64_t i = 0; i < count; i++) {
        unsigned char value[4]; /* data in a file may lie at any address */
        size_t size = weft_dtype_size(source->dtype);
        memcpy(value, (const char *)source->data + (size_t)i * size, size);
        if (!isfinite(weft_load_f32(value, source->dtype, 0)))
            return weft_fail(WEFT_FORMAT, "tensor '%s' holds NaN or infinity (element %lld)", source->name, (long long)i);
    }
    return WEFT_OK;
}

weft_status weft_source_expect(const weft_source *source, int ndim, const int64_t *shape)
{
    char wanted[128], found[128];
    int same = ndim == source->ndim;
    for (int i = 0; same && i < ndim; i++) same = shape[i] == source->shape[i];
    if (same) return WEFT_OK;
    return weft_fail(WEFT_FORMAT, "tensor '%s': wanted %s, found %s", source->name, describe_shape(ndim, shape, wanted, sizeof wanted),
                     describe_shape(source->ndim, source->shape, found, sizeof found));
}

static weft_status check_box(const weft_source *source, const int64_t *start, const int64_t *count, weft_dtype dst_dtype)
{
    for (int i = 0; i < source->ndim; i++)
        if (start[i] < 0 || count[i] < 0 || start[i] > source->shape[i] || count[i] > source->shape[i] - start[i])
            return weft_fail(WEFT_INVALID, "tensor '%s': %" PRId64 " from %" PRId64 " of dimension %d, which has %" PRId64, source->name,
                             count[i], start[i], i, source->shape[i]);
    if (dst_dtype == source->dtype) return WEFT_OK;
    if (dst_dtype == WEFT_F8E4M3 || dst_dtype == WEFT_U8 || dst_dtype == WEFT_I32)
        return weft_fail(WEFT_INVALID, "tensor '%s' holds %s and cannot be read as %s", source->name, weft_dtype_name(source->dtype),
                         weft_dtype_name(dst_dtype));
    return WEFT_OK;
}

/* Columns [first, first + count) of one row of dummy values, through the source's own dtype. */
static void dummy_row(const weft_source *source, const weft_dummy *dummy, uint64_t row, int64_t first, int64_t count, char *dst,
                      weft_dtype dst_dtype)
{
    enum { CHUNK = 2048 };
    float values[CHUNK];
    uint32_t rounded[CHUNK];
    size_t size = weft_dtype_size(dst_dtype);
    int exact = source->dtype == WEFT_F32 || source->dtype == dst_dtype; /* one rounding is enough */
    for (int64_t done = 0, n; done < count; done += n) {
        n = count - done < CHUNK ? count - done : CHUNK;
        char *to = dst + done * (int64_t)size;
        if (source->dtype == WEFT_F8E4M3) {
            uint8_t *bytes = dst_dtype == WEFT_F8E4M3 ? (uint8_t *)to : (uint8_t *)rounded;
            weft__dummy_e4m3(dummy, row, (uint64_t)(first + done), n, bytes);
            if (dst_dtype != WEFT_F8E4M3) weft_convert(to, dst_dtype, rounded, WEFT_F8E4M3, n);
            continue;
        }
        float *made = dst_dtype == WEFT_F32 && exact ? (float *)to : values;
        weft__dummy_f32(dummy, row, (uint64_t)(first + done), n, made);
        if (!exact) {
            weft_convert(rounded, source->dtype, values, WEFT_F32, n);
            weft_convert(to, dst_dtype, rounded, source->dtype, n);
        } else if (made == values) {
            weft_convert(to, dst_dtype, values, WEFT_F32, n);
        }
    }
}

typedef struct {
    const weft_source *source;
    const weft_dummy *dummy; /* NULL: the source has data */
    const int64_t *start, *count, *dst_stride;
    weft_dtype dst_dtype;
    int solid; /* dimensions from here on are whole and contiguous on both sides: one run */
} box_read;

static int64_t numel_from(const weft_source *source, int dim)
{
    int64_t n = 1;
    for (int i = dim; i < source->ndim; i++) n *= source->shape[i];
    return n;
}

/* A run of elements. Tensors of a file may begin at any byte, so a conversion of misaligned ones
 * goes through an aligned copy. */
static void convert_run(char *dst, weft_dtype dst_dtype, const char *src, weft_dtype src_dtype, int64_t count)
{
    uint32_t aligned[1024];
    int64_t size = (int64_t)weft_dtype_size(src_dtype), chunk = (int64_t)sizeof aligned / size;
    if (dst_dtype == src_dtype || (uintptr_t)src % (uintptr_t)size == 0) {
        weft_convert(dst, dst_dtype, src, src_dtype, count);
        return;
    }
    for (int64_t done = 0, n; done < count; done += n) {
        n = count - done < chunk ? count - done : chunk;
        memcpy(aligned, src + done * size, (size_t)(n * size));
        weft_convert(dst + done * (int64_t)weft_dtype_size(dst_dtype), dst_dtype, aligned, src_dtype, n);
    }
}

/* Elements [first, first + count) of the whole tensor, in row-major order. */
static void read_run(const box_read *box, int64_t first, int64_t count, char *dst)
{
    const weft_source *source = box->source;
    if (box->dummy == NULL) {
        convert_run(dst, box->dst_dtype, (const char *)source->data + first * (int64_t)weft_dtype_size(source->dtype), source->dtype, count);
        return;
    }
    int64_t columns = source->ndim == 0 ? 1 : source->shape[source->ndim - 1];
    for (int64_t done = 0, n; done < count; done += n) {
        int64_t column = (first + done) % columns;
        n = columns - column < count - done ? columns - column : count - done;
        dummy_row(source, box->dummy, (uint64_t)((first + done) / columns), column, n, dst + done * (int64_t)weft_dtype_size(box->dst_dtype),
                  box->dst_dtype);
    }
}

/* index: where the box's corner lies in the dimensions before `dim`, row-major. */
static void read_dim(const box_read *box, int dim, int64_t index, char *dst)
{
    const weft_source *source = box->source;
    if (dim >= source->ndim || dim >= WEFT_SOURCE_MAX_DIMS) {
        read_run(box, index, 1, dst);
    } else if (dim == box->solid) {
        int64_t rest = numel_from(source, dim + 1);
        read_run(box, (index * source->shape[dim] + box->start[dim]) * rest, box->count[dim] * rest, dst);
    } else {
        int64_t step = box->dst_stride[dim] * (int64_t)weft_dtype_size(box->dst_dtype);
        for (int64_t i = 0; i < box->count[dim]; i++)
            read_dim(box, dim + 1, index * source->shape[dim] + box->start[dim] + i, dst + i * step);
    }
}

/* How many first-dimension rows of a file are announced and read at a time: enough to spare page
 * faults, few enough to be copied while they are still in the cache of files. 0: do not announce,
 * the box leaves out most of each row. */
static int64_t rows_at_a_time(const weft_source *source, const int64_t *count)
{
    enum { PIECE_BYTES = 16 << 20, SKIPPED_BYTES = 65536 };
    int64_t size = (int64_t)weft_dtype_size(source->dtype), row = numel_from(source, 1) * size;
    if (source->ndim > 1 && (source->shape[1] - count[1]) * numel_from(source, 2) * size > SKIPPED_BYTES) return 0;
    return row >= PIECE_BYTES ? 1 : PIECE_BYTES / row;
}

/* The box of a source with data and at least one dimension, some rows at a time. */
static void read_rows(const box_read *box, char *dst)
{
    const weft_source *source = box->source;
    int64_t start[WEFT_SOURCE_MAX_DIMS], count[WEFT_SOURCE_MAX_DIMS];
    int64_t announced = rows_at_a_time(source, box->count), rows = announced > 0 ? announced : box->count[0];
    int64_t row = numel_from(source, 1) * (int64_t)weft_dtype_size(source->dtype);
    int64_t step = box->dst_stride[0] * (int64_t)weft_dtype_size(box->dst_dtype);
    box_read piece = *box;
    memcpy(start, box->start, (size_t)source->ndim * sizeof *start);
    memcpy(count, box->count, (size_t)source->ndim * sizeof *count);
    piece.start = start;
    piece.count = count;
    for (int64_t done = 0; done < box->count[0]; done += rows) {
        start[0] = box->start[0] + done;
        count[0] = box->count[0] - done < rows ? box->count[0] - done : rows;
        if (announced > 0) weft_file_will_read((const char *)source->data + start[0] * row, (size_t)(count[0] * row));
        read_dim(&piece, 0, 0, dst + done * step);
    }
}

weft_status weft_source_read(const weft_source *source, const int64_t *start, const int64_t *count, void *dst,
                             weft_dtype dst_dtype, const int64_t *dst_stride)
{
    WEFT_TRY(check_box(source, start, count, dst_dtype));
    for (int i = 0; i < source->ndim; i++)
        if (count[i] == 0) return WEFT_OK;
    weft_dummy dummy = {0};
    if (source->data == NULL) dummy = weft__dummy_of(source->name);
    box_read box = {source, source->data == NULL ? &dummy : NULL, start, count, dst_stride, dst_dtype, source->ndim};
    int64_t stride = 1;
    for (int i = source->ndim - 1; i >= 0 && (dst_stride[i] == stride || count[i] == 1); i--) {
        box.solid = i;
        if (count[i] != source->shape[i]) break;
        stride *= count[i];
    }
    if (source->data != NULL && source->ndim > 0) read_rows(&box, dst);
    else read_dim(&box, 0, 0, dst);
    return WEFT_OK;
}
