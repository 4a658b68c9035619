/* layers/sampler.c - drawing from a vocabulary that is cut over ranks. */
#include "layers/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/weft_kernels.h"
#include "layers/linear.h"

static void destroy(weft_object *object)
{
    weft_sampler *sampler = (weft_sampler *)object;
    if (sampler->group != NULL) weft_group_release(sampler->group);
    WEFT_RELEASE(sampler->rank);
    free(sampler);
}

weft_status weft_sampler_create(weft_sampler **out, weft_rank *rank, weft_axis axis, weft_vocab_layout layout)
{
    weft_sampler *sampler = calloc(1, sizeof *sampler);
    if (sampler == NULL) return weft_fail(WEFT_MEMORY, "no memory for a sampler");
    weft_object_init(&sampler->object, destroy);
    sampler->rank = WEFT_RETAIN(rank);
    sampler->axis = axis;
    sampler->layout = layout;
    weft_status status = weft_layer_group(rank, axis, "sampler", &sampler->group);
    if (status != WEFT_OK) {
        WEFT_RELEASE(sampler);
        return status;
    }
    *out = sampler;
    return WEFT_OK;
}

/* A rank's best of a row. They travel as two 32-bit words. */
typedef struct {
    float value;
    int32_t id;
} candidate;

static int better(candidate a, candidate b)
{
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

/* This rank's best of each row. A rank without rows of the vocabulary never wins. */
static weft_status draw_shard(weft_sampler *sampler, const weft_tensor *logits, const float *temperature, const uint64_t *seed,
                              const int32_t *position, candidate *mine)
{
    int64_t rows = logits->shape[0];
    for (int64_t r = 0; r < rows; r++) mine[r] = (candidate){-INFINITY, INT32_MAX};
    if (sampler->layout.real == 0 || rows == 0) return WEFT_OK;
    void *scratch = NULL;
    WEFT_TRY(weft_arena_scratch(sampler->rank->arena, (size_t)rows * sizeof(candidate), &scratch));
    float *value = scratch;
    int32_t *id = (int32_t *)scratch + rows;
    weft_sample_args args = {
        .logits = logits->data,
        .temperature = temperature,
        .seed = seed,
        .position = position,
        .value = value,
        .id = id,
        .rows = rows,
        .first = sampler->layout.offset,
        .count = sampler->layout.real,
        .logits_stride = logits->stride[0],
    };
    WEFT_TRY(weft_sample_cpu(&args, sampler->rank->pool));
    for (int64_t r = 0; r < rows; r++) mine[r] = (candidate){value[r], id[r]};
    return WEFT_OK;
}

static weft_status decide(weft_sampler *sampler, const candidate *mine, int64_t rows, int32_t *ids)
{
    const candidate *all = mine;
    int world = 1;
    if (sampler->group != NULL && rows > 0) {
        world = sampler->axis.world_size;
        void *scratch = NULL;
        WEFT_TRY(weft_arena_scratch(sampler->rank->arena, (size_t)world * (size_t)rows * sizeof(candidate), &scratch));
        WEFT_TRY(weft_group_all_gather(sampler->group, mine, scratch, 2 * rows, WEFT_I32));
        all = scratch;
    }
    for (int64_t r = 0; r < rows; r++) {
        candidate best = all[r];
        for (int w = 1; w < world; w++)
            if (better(all[w * rows + r], best)) best = all[w * rows + r];
        ids[r] = best.id;
    }
    return WEFT_OK;
}

weft_status weft_sampler_forward(weft_sampler *sampler, const weft_tensor *logits, const float *temperature, const uint64_t *seed,
                                 const int32_t *position, weft_tensor **ids)
{
    WEFT_TRY(weft_layer_check_rows("sampler", logits, sampler->layout.count));
    if (logits->dtype != WEFT_F32) return weft_fail(WEFT_INVALID, "sampler: logits are float32");
    int64_t rows = logits->shape[0];
    void *mine = NULL;
    WEFT_TRY(weft_arena_scratch(sampler->rank->arena, (size_t)rows * sizeof(candidate), &mine));
    WEFT_TRY(draw_shard(sampler, logits, temperature, seed, position, mine));
    weft_tensor *out = NULL;
    WEFT_TRY(weft_arena_tensor(sampler->rank->arena, &out, WEFT_I32, 1, &rows));
    weft_status status = decide(sampler, mine, rows, out->data);
    if (status != WEFT_OK) {
        WEFT_RELEASE(out);
        return status;
    }
    *ids = out;
    return WEFT_OK;
}
