/* layers/vocab_embedding.c - vocabulary-parallel embedding. */
#include "layers/vocab_embedding.h"

#include <stdlib.h>

#include "layers/linear.h"
#include "layers/run.h"

static void destroy(weft_object *object)
{
    weft_vocab_embedding *embedding = (weft_vocab_embedding *)object;
    weft_linear_weight_clear(&embedding->weight);
    if (embedding->group != NULL) weft_group_release(embedding->group);
    WEFT_RELEASE(embedding->rank);
    free(embedding);
}

weft_status weft_vocab_weight_init(weft_linear_weight *weight, weft_rank *rank, const weft_vocab_options *options,
                                   weft_vocab_layout *layout)
{
    const char *name = options->weight.name;
    if (options->vocab_size < 1 || options->vocab_size > INT32_MAX - 65536 || options->hidden_size < 1)
        return weft_fail(WEFT_INVALID, "%s: vocab_size and hidden_size must be positive", name);
    *layout = weft_vocab_layout_make(options->vocab_size, options->axis);
    WEFT_TRY(weft_linear_weight_init(weight, rank, &options->weight, options->hidden_size, (weft_shard){0, options->hidden_size}));
    int64_t offset = layout->real > 0 ? layout->offset : 0; /* a shard of nothing begins anywhere */
    return weft_linear_weight_add_part(weight, "0", options->vocab_size, (weft_shard){offset, layout->real});
}

weft_status weft_vocab_embedding_create(weft_vocab_embedding **out, weft_rank *rank, const weft_vocab_options *options)
{
    weft_vocab_embedding *embedding = calloc(1, sizeof *embedding);
    if (embedding == NULL) return weft_fail(WEFT_MEMORY, "no memory for a layer");
    weft_object_init(&embedding->object, destroy);
    embedding->rank = WEFT_RETAIN(rank);
    embedding->axis = options->axis;
    embedding->vocab_size = options->vocab_size;
    embedding->hidden_size = options->hidden_size;
    weft_status status = weft_vocab_weight_init(&embedding->weight, rank, options, &embedding->layout);
    if (status == WEFT_OK) status = weft_layer_group(rank, options->axis, options->weight.name, &embedding->group);
    if (status != WEFT_OK) {
        WEFT_RELEASE(embedding);
        return status;
    }
    *out = embedding;
    return WEFT_OK;
}

static weft_status check_ids(const weft_vocab_embedding *embedding, const weft_tensor *ids)
{
    char found[160];
    WEFT_TRY(weft_tensor_check(ids));
    if (ids->ndim != 1 || ids->dtype != WEFT_I32 || !weft_tensor_is_contiguous(ids))
        return weft_fail(WEFT_INVALID, "%s: wanted dense int32 [tokens], found %s", embedding->weight.name,
                         weft_tensor_describe(ids, found, sizeof found));
    if (ids->storage->cuda != NULL) return WEFT_OK; /* values on a GPU are not looked at: no row is read for a wrong one */
    const int32_t *id = ids->data;
    const int follows = ids->device_data != NULL; /* one below zero became a drawn id there (sampler.h) */
    for (int64_t t = 0; t < ids->shape[0]; t++)
        if ((id[t] < 0 && !follows) || id[t] >= embedding->vocab_size)
            return weft_fail(WEFT_INVALID, "token id %d is outside the vocabulary of %lld", id[t], (long long)embedding->vocab_size);
    return WEFT_OK;
}

static weft_dtype result_dtype(const weft_vocab_embedding *embedding)
{
    if (embedding->has_output_dtype) return embedding->output_dtype;
    weft_dtype stored = embedding->weight.weight->dtype;
    return stored == WEFT_F8E4M3 ? WEFT_BF16 : stored;
}

weft_status weft_vocab_embedding_forward(weft_vocab_embedding *embedding, const weft_tensor *ids, weft_tensor **y)
{
    WEFT_TRY(check_ids(embedding, ids));
    WEFT_TRY(weft_linear_weight_ready(&embedding->weight));
    weft_rank *rank = embedding->rank;
    const void *where;
    weft_tensor *out = NULL;
    WEFT_TRY(weft_run_operand(rank, ids, &where));
    WEFT_TRY(weft_arena_tensor(rank->arena, &out, result_dtype(embedding), 2, (int64_t[]){ids->shape[0], embedding->hidden_size}));
    weft_embedding_args args = {
        .w = embedding->weight.weight->data,
        .ids = where,
        .y = out->data,
        .tokens = ids->shape[0],
        .hidden = embedding->hidden_size,
        .first = embedding->layout.offset,
        .count = embedding->layout.real,
        .w_dtype = embedding->weight.weight->dtype,
        .y_dtype = out->dtype,
    };
    weft_status status = WEFT_RUN(rank, embedding, &args);
    /* One rank holds the row and all others add zeros: exact in any dtype. */
    if (status == WEFT_OK && embedding->group != NULL)
        status = weft_group_all_reduce(embedding->group, out->data, out->data, weft_tensor_numel(out), out->dtype, WEFT_REDUCE_SUM);
    if (status != WEFT_OK) {
        WEFT_RELEASE(out);
        return status;
    }
    *y = out;
    return WEFT_OK;
}
