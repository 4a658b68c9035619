/* layers/sampler.c - drawing from a vocabulary that is cut over ranks. */
#include "layers/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layers/linear.h"
#include "kernels/weft_cuda_device.h"
#include "layers/run.h"

static void destroy(weft_object *object)
{
    weft_sampler *sampler = (weft_sampler *)object;
    if (sampler->group != NULL) weft_group_release(sampler->group);
    WEFT_RELEASE(sampler->drawn);
    WEFT_RELEASE(sampler->gathered);
    WEFT_RELEASE(sampler->chosen);
    WEFT_RELEASE(sampler->rank);
    free(sampler);
}

weft_status weft_sampler_create(weft_sampler **out, weft_rank *rank, weft_axis axis, int64_t vocab_size)
{
    weft_sampler *sampler = calloc(1, sizeof *sampler);
    if (sampler == NULL) return weft_fail(WEFT_MEMORY, "no memory for a sampler");
    weft_object_init(&sampler->object, destroy);
    sampler->rank = WEFT_RETAIN(rank);
    sampler->axis = axis;
    sampler->layout = weft_vocab_layout_make(vocab_size, axis);
    for (axis.rank = 0; axis.rank < axis.world_size && weft_vocab_layout_make(vocab_size, axis).real > 0; axis.rank++) sampler->holders++;
    axis = sampler->axis;
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
    WEFT_TRY(WEFT_RUN(sampler->rank, sample, &args));
    for (int64_t r = 0; r < rows; r++) mine[r] = (candidate){value[r], id[r]};
    return WEFT_OK;
}

static weft_status not_numbers(int64_t row)
{
    return weft_fail(WEFT_INVALID, "the logits of row %lld are not numbers: the weights or the activations hold NaN or infinity", (long long)row);
}

/* others: room for the candidates of all ranks. */
static weft_status decide(weft_sampler *sampler, const candidate *mine, int64_t rows, candidate *others, int32_t *ids)
{
    const candidate *all = mine;
    int world = 1;
    if (sampler->group != NULL && rows > 0) {
        world = sampler->axis.world_size;
        WEFT_TRY(weft_group_all_gather(sampler->group, mine, others, 2 * rows, WEFT_I32));
        all = others;
    }
    for (int64_t r = 0; r < rows; r++) {
        candidate best = all[r];
        for (int w = 1; w < world; w++)
            if (better(all[w * rows + r], best)) best = all[w * rows + r];
        if (best.value == -INFINITY || best.value != best.value)
            return not_numbers(r);
        ids[r] = best.id;
    }
    return WEFT_OK;
}

static weft_status check_logits(const weft_sampler *sampler, const weft_tensor *logits)
{
    WEFT_TRY(weft_layer_check_rows("sampler", logits, sampler->layout.count));
    return logits->dtype == WEFT_F32 ? WEFT_OK : weft_fail(WEFT_INVALID, "sampler: logits are float32");
}

/* ---- on a GPU ---- */

static weft_status reserve_words(weft_sampler *sampler, weft_tensor **tensor, int64_t words)
{
    weft_tensor *larger = NULL;
    WEFT_TRY(weft_tensor_create(&larger, sampler->rank->device_memory, WEFT_I32, 1, &words));
    WEFT_RELEASE(*tensor);
    *tensor = larger;
    return WEFT_OK;
}

/* Room for `rows` rows. */
static weft_status reserve(weft_sampler *sampler, int64_t rows)
{
    int64_t words = 64;
    while (words < 2 * rows) words *= 2;
    if (sampler->chosen != NULL && sampler->drawn->shape[0] >= words) return WEFT_OK;
    if (sampler->drawn != NULL) weft_cuda_moved(sampler->rank->cuda);
    WEFT_TRY(reserve_words(sampler, &sampler->drawn, words));
    if (sampler->group != NULL) WEFT_TRY(reserve_words(sampler, &sampler->gathered, words * sampler->axis.world_size));
    return reserve_words(sampler, &sampler->chosen, words / 2);
}

weft_status weft_sampler_launch(weft_sampler *sampler, const weft_tensor *logits, const float *temperature, const uint64_t *seed,
                                const int32_t *position)
{
    WEFT_TRY(check_logits(sampler, logits));
    weft_rank *rank = sampler->rank;
    int64_t rows = logits->shape[0];
    WEFT_TRY(reserve(sampler, rows));
    sampler->drawn_rows = rows;
    if (sampler->layout.real == 0 || rows == 0) return WEFT_OK;
    weft_sample_args args = {
        .logits = logits->data,
        .temperature = temperature,
        .seed = seed,
        .position = position,
        .value = sampler->drawn->data,
        .id = (int32_t *)sampler->drawn->data + rows,
        .rows = rows,
        .first = sampler->layout.offset,
        .count = sampler->layout.real,
        .logits_stride = logits->stride[0],
        .cuda = weft_run_context(rank),
    };
    return WEFT_RUN(rank, sample, &args);
}

weft_status weft_sampler_take(weft_sampler *sampler, int64_t rows, weft_tensor **ids)
{
    weft_rank *rank = sampler->rank;
    int64_t drawn = sampler->drawn_rows, world = sampler->axis.world_size;
    if (rank->cuda == NULL || sampler->drawn == NULL || rows > drawn)
        return weft_fail(WEFT_INVALID, "sampler: %lld rows are asked for, and %lld were drawn", (long long)rows, (long long)drawn);
    size_t bytes = ((size_t)(world + 2) * (size_t)drawn + 1) * sizeof(candidate);
    void *scratch = NULL;
    weft_tensor *out = NULL;
    WEFT_TRY(weft_memory_alloc(rank->memory, bytes, &scratch));
    candidate *mine = scratch, *others = mine + drawn, *words = others + world * drawn;
    weft_status status = weft_tensor_create(&out, rank->memory, WEFT_I32, 1, &rows);
    if (status == WEFT_OK) status = weft_cuda_to_host(rank->cuda, words, sampler->drawn->data, (size_t)drawn * sizeof(candidate));
    for (int64_t r = 0; r < rows; r++)
        mine[r] = sampler->layout.real == 0 ? (candidate){-INFINITY, INT32_MAX} : (candidate){((float *)words)[r], ((int32_t *)words)[drawn + r]};
    if (status == WEFT_OK) status = decide(sampler, mine, rows, others, out->data);
    weft_memory_free(rank->memory, scratch, bytes);
    if (status != WEFT_OK) {
        WEFT_RELEASE(out);
        return status;
    }
    *ids = out;
    return WEFT_OK;
}

#ifdef WEFT_HAVE_CUDA

weft_status weft_sampler_decide(weft_sampler *sampler)
{
    weft_rank *rank = sampler->rank;
    if (rank->cuda == NULL || sampler->drawn == NULL) return weft_fail(WEFT_INVALID, "sampler: nothing was drawn on a GPU");
    weft_cuda_choose_args args = {.candidates = sampler->drawn->data, .ids = sampler->chosen->data, .world = 1, .rows = sampler->drawn_rows};
    if (args.rows == 0) return WEFT_OK;
    if (args.rows * (int64_t)sizeof(int32_t) > (int64_t)weft_cuda_token_room(rank->cuda))
        return weft_fail(WEFT_INVALID, "sampler: %lld rows are more than can be told at once", (long long)args.rows);
    if (sampler->group != NULL) {
        WEFT_TRY(weft_group_all_gather(sampler->group, sampler->drawn->data, sampler->gathered->data, 2 * args.rows, WEFT_I32));
        args.candidates = sampler->gathered->data;
        args.world = sampler->holders;
    }
    void *stream = weft_cuda_stream(rank->cuda);
    args.mail = weft_cuda_token_mail(rank->cuda);
    return weft_cuda_launched(rank->cuda, "the choice of tokens", weft_cuda_choose(&args, stream));
}

weft_status weft_sampler_follow(weft_sampler *sampler, weft_step *step)
{
    if (sampler->rank->cuda == NULL) return weft_fail(WEFT_INVALID, "sampler: ids are followed on a GPU, and this rank computes on a CPU");
    WEFT_TRY(reserve(sampler, step->header->num_tokens));
    return weft_step_arrive(step, sampler->rank, sampler->chosen->data, sampler->chosen->shape[0]);
}

#else

static weft_status no_gpu(void) { return weft_fail(WEFT_UNSUPPORTED, "this build of weft has no CUDA kernels"); }
weft_status weft_sampler_decide(weft_sampler *sampler) { return no_gpu(); }
weft_status weft_sampler_follow(weft_sampler *sampler, weft_step *step) { return no_gpu(); }

#endif

weft_status weft_sampler_told(weft_sampler *sampler, int64_t rows, const int32_t **ids)
{
    if (sampler->rank->cuda == NULL) return weft_fail(WEFT_INVALID, "sampler: this rank computes on a CPU");
    if (rows * (int64_t)sizeof(int32_t) > (int64_t)weft_cuda_token_room(sampler->rank->cuda))
        return weft_fail(WEFT_INVALID, "sampler: %lld rows are asked for, and fewer were chosen", (long long)rows);
    const int32_t *told = NULL;
    WEFT_TRY(weft_cuda_tokens(sampler->rank->cuda, &told));
    for (int64_t r = 0; r < rows; r++)
        if (told[r] < 0) return not_numbers(r);
    *ids = told;
    return WEFT_OK;
}

/* Parameters from the host into the arena, then both halves. */
static weft_status forward_on_gpu(weft_sampler *sampler, const weft_tensor *logits, const float *temperature, const uint64_t *seed,
                                  const int32_t *position, weft_tensor **ids)
{
    weft_rank *rank = sampler->rank;
    size_t rows = (size_t)logits->shape[0];
    void *scratch = NULL;
    WEFT_TRY(weft_arena_scratch(rank->arena, rows * 16 + 16, &scratch));
    uint64_t *seeds = scratch;
    int32_t *positions = (int32_t *)(seeds + rows);
    float *temperatures = (float *)(positions + rows);
    WEFT_TRY(weft_cuda_to_device(rank->cuda, seeds, seed, rows * sizeof *seed));
    WEFT_TRY(weft_cuda_to_device(rank->cuda, positions, position, rows * sizeof *position));
    WEFT_TRY(weft_cuda_to_device(rank->cuda, temperatures, temperature, rows * sizeof *temperature));
    WEFT_TRY(weft_sampler_launch(sampler, logits, temperatures, seeds, positions));
    return weft_sampler_take(sampler, logits->shape[0], ids);
}

weft_status weft_sampler_forward(weft_sampler *sampler, const weft_tensor *logits, const float *temperature, const uint64_t *seed,
                                 const int32_t *position, weft_tensor **ids)
{
    WEFT_TRY(check_logits(sampler, logits));
    if (sampler->rank->cuda != NULL) return forward_on_gpu(sampler, logits, temperature, seed, position, ids);
    int64_t rows = logits->shape[0];
    void *mine = NULL, *others = NULL;
    WEFT_TRY(weft_arena_scratch(sampler->rank->arena, (size_t)rows * sizeof(candidate), &mine));
    WEFT_TRY(weft_arena_scratch(sampler->rank->arena, (size_t)sampler->axis.world_size * (size_t)rows * sizeof(candidate), &others));
    WEFT_TRY(draw_shard(sampler, logits, temperature, seed, position, mine));
    weft_tensor *out = NULL;
    WEFT_TRY(weft_arena_tensor(sampler->rank->arena, &out, WEFT_I32, 1, &rows));
    weft_status status = decide(sampler, mine, rows, others, out->data);
    if (status != WEFT_OK) {
        WEFT_RELEASE(out);
        return status;
    }
    *ids = out;
    return WEFT_OK;
}
