/* layers/rotary.c - the table of cos and sin, and the rotation of packed heads. */
#include "layers/rotary.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layers/run.h"

enum { FIRST_ROWS = 512 };

static void destroy(weft_object *object)
{
    weft_rotary *rotary = (weft_rotary *)object;
    WEFT_RELEASE(rotary->table);
    WEFT_RELEASE(rotary->device_table);
    WEFT_RELEASE(rotary->rank);
    free(rotary);
}

weft_status weft_rotary_create(weft_rotary **out, weft_rank *rank, int head_size, int rotary_dim, int64_t max_position,
                               double theta, const weft_rope_scaling *scaling)
{
    if (rotary_dim == 0) rotary_dim = head_size;
    if (rotary_dim < 2 || rotary_dim % 2 != 0 || rotary_dim > head_size || rotary_dim > WEFT_ROPE_MAX_DIM)
        return weft_fail(WEFT_INVALID, "rotary: rotary_dim must be even and from 2 to head_size %d (at most %d), got %d", head_size,
                         WEFT_ROPE_MAX_DIM, rotary_dim);
    weft_rotary *rotary = calloc(1, sizeof *rotary);
    if (rotary == NULL) return weft_fail(WEFT_MEMORY, "no memory for a layer");
    weft_object_init(&rotary->object, destroy);
    rotary->rank = WEFT_RETAIN(rank);
    rotary->head_size = head_size;
    rotary->rotary_dim = rotary_dim;
    rotary->theta = theta;
    rotary->scaling = *scaling;
    weft_status status = weft_rope_frequencies(rotary->inv_freq, &rotary->scale, &rotary->max_positions, rotary_dim, max_position,
                                               theta, scaling);
    if (status != WEFT_OK) {
        WEFT_RELEASE(rotary);
        return status;
    }
    *out = rotary;
    return WEFT_OK;
}

typedef struct {
    const weft_rotary *rotary;
    weft_tensor *table;
    int64_t first;
} row_job;

static void fill_rows(void *context, int part, int parts)
{
    const row_job *job = context;
    const weft_rotary *rotary = job->rotary;
    int half = rotary->rotary_dim / 2;
    long begin, end;
    weft_pool_range((long)(job->table->shape[0] - job->first), 64, part, parts, &begin, &end);
    for (int64_t p = job->first + begin; p < job->first + end; p++) {
        float *row = (float *)job->table->data + p * rotary->rotary_dim;
        for (int i = 0; i < half; i++) {
            float angle = (float)p * (float)rotary->inv_freq[i];
            row[i] = (float)(cos((double)angle) * rotary->scale);
            row[half + i] = (float)(sin((double)angle) * rotary->scale);
        }
    }
}

static weft_status send_table(weft_rotary *rotary)
{
    weft_tensor *copy = NULL;
    WEFT_TRY(weft_tensor_create(&copy, rotary->rank->device_memory, WEFT_F32, 2, rotary->table->shape));
    weft_status status = weft_tensor_copy(copy, rotary->table);
    if (status != WEFT_OK) {
        WEFT_RELEASE(copy);
        return status;
    }
    if (rotary->device_table != NULL) weft_cuda_moved(rotary->rank->cuda);
    WEFT_RELEASE(rotary->device_table);
    rotary->device_table = copy;
    return WEFT_OK;
}

weft_status weft_rotary_reserve(weft_rotary *rotary, int64_t positions)
{
    int64_t have = rotary->table != NULL ? rotary->table->shape[0] : 0;
    if (positions <= have) return WEFT_OK;
    if (positions > rotary->max_positions)
        return weft_fail(WEFT_INVALID, "position %lld is beyond the model's %lld", (long long)positions - 1,
                         (long long)rotary->max_positions);
    int64_t first_rows = rotary->rank->cuda != NULL ? WEFT_ROPE_GPU_ROWS : FIRST_ROWS, rows = have * 2 > first_rows ? have * 2 : first_rows;
    if (rows < positions) rows = positions;
    if (rows > rotary->max_positions) rows = rotary->max_positions;
    weft_tensor *table = NULL;
    WEFT_TRY(weft_tensor_create(&table, rotary->rank->memory, WEFT_F32, 2, (int64_t[]){rows, rotary->rotary_dim}));
    if (have > 0) memcpy(table->data, rotary->table->data, (size_t)have * (size_t)rotary->rotary_dim * sizeof(float));
    row_job job = {rotary, table, have};
    weft_pool_run(rotary->rank->pool, fill_rows, &job);
    WEFT_RELEASE(rotary->table);
    rotary->table = table;
    return rotary->rank->cuda != NULL ? send_table(rotary) : WEFT_OK;
}

static weft_status check_positions(weft_rotary *rotary, const weft_tensor *positions)
{
    char found[160];
    WEFT_TRY(weft_tensor_check(positions));
    if (positions->ndim != 1 || positions->dtype != WEFT_I32 || !weft_tensor_is_contiguous(positions))
        return weft_fail(WEFT_INVALID, "rotary: wanted positions as dense int32 [tokens], found %s",
                         weft_tensor_describe(positions, found, sizeof found));
    /* Values on a GPU are not looked at; rows behind the table are left as they are. */
    if (positions->storage->cuda != NULL) return weft_rotary_reserve(rotary, 1);
    const int32_t *p = positions->data;
    int32_t largest = -1;
    for (int64_t t = 0; t < positions->shape[0]; t++) {
        if (p[t] < 0) return weft_fail(WEFT_INVALID, "rotary: position %d is negative", p[t]);
        if (p[t] > largest) largest = p[t];
    }
    return weft_rotary_reserve(rotary, (int64_t)largest + 1);
}

/* The number of heads in x, or -1 when it is not made of heads of this size. */
static int64_t count_heads(const weft_rotary *rotary, const weft_tensor *x)
{
    if (x->ndim == 2 && x->stride[1] == 1 && x->shape[1] % rotary->head_size == 0) return x->shape[1] / rotary->head_size;
    if (x->ndim == 3 && x->shape[2] == rotary->head_size && x->stride[2] == 1 && (x->stride[1] == x->shape[2] || x->shape[1] == 1))
        return x->shape[1];
    return -1;
}

static weft_status rotate(const weft_rotary *rotary, const weft_tensor *positions, weft_tensor *x)
{
    char found[160];
    WEFT_TRY(weft_tensor_check(x));
    int64_t heads = count_heads(rotary, x);
    if (heads < 0 || x->shape[0] != positions->shape[0] || x->dtype > WEFT_F16)
        return weft_fail(WEFT_INVALID, "rotary: wanted floats [%lld, heads * %d], found %s", (long long)positions->shape[0],
                         rotary->head_size, weft_tensor_describe(x, found, sizeof found));
    if (x->shape[0] == 0) return WEFT_OK;
    const void *where;
    WEFT_TRY(weft_run_operand(rotary->rank, positions, &where));
    weft_rope_args args = {
        .x = x->data,
        .positions = where,
        .cos_sin = (rotary->rank->cuda != NULL ? rotary->device_table : rotary->table)->data,
        .tokens = x->shape[0],
        .heads = heads,
        .head_dim = rotary->head_size,
        .rotary_dim = rotary->rotary_dim,
        .token_stride = x->stride[0],
        .max_positions = rotary->table->shape[0],
        .dtype = x->dtype,
    };
    return WEFT_RUN(rotary->rank, rope, &args);
}

/* Whether the heads of k follow those of q in every token, as in packed qkv. */
static int side_by_side(const weft_rotary *rotary, const weft_tensor *q, const weft_tensor *k)
{
    if (q->ndim != 2 || k->ndim != 2 || q->dtype != k->dtype || q->stride[0] != k->stride[0] || q->shape[0] != k->shape[0]) return 0;
    if (count_heads(rotary, q) < 0 || count_heads(rotary, k) < 0) return 0;
    return q->storage == k->storage && (char *)q->data + (size_t)q->shape[1] * weft_dtype_size(q->dtype) == (char *)k->data;
}

weft_status weft_rotary_forward(weft_rotary *rotary, const weft_tensor *positions, weft_tensor *q, weft_tensor *k)
{
    WEFT_TRY(check_positions(rotary, positions));
    if (k != NULL && side_by_side(rotary, q, k)) {
        WEFT_TRY(weft_tensor_check(k));
        weft_tensor both = *q;
        both.shape[1] += k->shape[1];
        return rotate(rotary, positions, &both);
    }
    WEFT_TRY(rotate(rotary, positions, q));
    return k != NULL ? rotate(rotary, positions, k) : WEFT_OK;
}
