/* layers/lm_head.c - vocabulary-parallel logits. */
#include "layers/lm_head.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layers/linear.h"
#include "layers/run.h"
#ifdef WEFT_HAVE_CUDA
#include "kernels/weft_cuda_device.h"
#endif

static void destroy(weft_object *object)
{
    weft_lm_head *head = (weft_lm_head *)object;
    weft_linear_weight_clear(&head->weight);
    if (head->group != NULL) weft_group_release(head->group);
    WEFT_RELEASE(head->tied);
    WEFT_RELEASE(head->rank);
    free(head);
}

static weft_status build(weft_lm_head *head, weft_rank *rank, const weft_vocab_options *options)
{
    head->axis = options->axis;
    head->vocab_size = options->vocab_size;
    head->hidden_size = options->hidden_size;
    if (head->tied == NULL) {
        WEFT_TRY(weft_vocab_weight_init(&head->weight, rank, options, &head->layout));
    } else {
        head->axis = head->tied->axis;
        head->vocab_size = head->tied->vocab_size;
        head->hidden_size = head->tied->hidden_size;
        head->layout = head->tied->layout;
    }
    return weft_layer_group(rank, head->axis, options->weight.name, &head->group);
}

weft_status weft_lm_head_create(weft_lm_head **out, weft_rank *rank, const weft_vocab_options *options,
                                weft_vocab_embedding *tied, double logit_scale)
{
    weft_lm_head *head = calloc(1, sizeof *head);
    if (head == NULL) return weft_fail(WEFT_MEMORY, "no memory for a layer");
    weft_object_init(&head->object, destroy);
    head->rank = WEFT_RETAIN(rank);
    head->logit_scale = (float)logit_scale;
    if (tied != NULL) head->tied = WEFT_RETAIN(tied);
    weft_status status = build(head, rank, options);
    if (status != WEFT_OK) {
        WEFT_RELEASE(head);
        return status;
    }
    *out = head;
    return WEFT_OK;
}

const weft_linear_weight *weft_lm_head_weight(const weft_lm_head *head)
{
    return head->tied != NULL ? &head->tied->weight : &head->weight;
}

/* Scales the columns that exist and fills the others. */
static weft_status finish_rows(const weft_lm_head *head, weft_tensor *logits)
{
#ifdef WEFT_HAVE_CUDA
    if (head->rank->cuda != NULL) {
        weft_cuda_finish_args args = {.x = logits->data, .rows = logits->shape[0], .cols = head->layout.count, .real = head->layout.real,
                                      .stride = logits->stride[0], .scale = head->logit_scale};
        return weft_cuda_finish_logits(&args, weft_cuda_stream(head->rank->cuda));
    }
#endif
    int64_t count = head->layout.count, real = head->layout.real;
    for (int64_t t = 0; t < logits->shape[0]; t++) {
        float *row = (float *)logits->data + t * count;
        if (head->logit_scale != 1.0f)
            for (int64_t i = 0; i < real; i++) row[i] *= head->logit_scale;
        for (int64_t i = real; i < count; i++) row[i] = -INFINITY;
    }
    return WEFT_OK;
}

weft_status weft_lm_head_forward(weft_lm_head *head, const weft_tensor *x, weft_tensor **logits)
{
    const weft_linear_weight *w = weft_lm_head_weight(head);
    WEFT_TRY(weft_layer_check_rows("lm_head", x, head->hidden_size));
    WEFT_TRY(weft_linear_weight_ready(w));
    weft_tensor *out = NULL;
    WEFT_TRY(weft_arena_tensor(head->rank->arena, &out, WEFT_F32, 2, (int64_t[]){x->shape[0], head->layout.count}));
    weft_status status = weft_linear_weight_apply_into(w, head->rank, x, 0, out);
    if (status == WEFT_OK) status = finish_rows(head, out);
    if (status != WEFT_OK) {
        WEFT_RELEASE(out);
        return status;
    }
    weft_tensor_note_cut(out, 1, weft_group_type_name(head->axis.group), head->axis.world_size);
    *logits = out;
    return WEFT_OK;
}

/* The shards side by side, padding at the end of the last ones. */
static weft_status join(weft_lm_head *head, weft_tensor *logits, weft_tensor **joined)
{
    if (head->group == NULL) {
        *joined = WEFT_RETAIN(logits);
        return WEFT_OK;
    }
    weft_tensor *padded = NULL;
    WEFT_TRY(weft_arena_tensor(head->rank->arena, &padded, WEFT_F32, 2, (int64_t[]){logits->shape[0], head->layout.padded_vocab}));
    weft_status status = weft_group_all_gather_dim(head->group, logits, 1, padded);
    if (status != WEFT_OK) {
        WEFT_RELEASE(padded);
        return status;
    }
    *joined = padded;
    return WEFT_OK;
}

weft_status weft_lm_head_gather(weft_lm_head *head, weft_tensor *logits, weft_tensor **all)
{
    WEFT_TRY(weft_layer_check_rows("lm_head gather", logits, head->layout.count));
    if (logits->dtype != WEFT_F32) return weft_fail(WEFT_INVALID, "lm_head gather: logits are float32");
    weft_tensor *joined = NULL, *view = NULL;
    WEFT_TRY(join(head, logits, &joined));
    weft_status status = weft_tensor_narrow(&view, joined, 1, 0, head->vocab_size);
    WEFT_RELEASE(joined);
    if (status == WEFT_OK) *all = view;
    return status;
}
