/* kernels/cpu/router.c - the top experts of each token. */
#include <inttypes.h>
#include <math.h>

#include "kernels/cpu/cpu.h"

/* Scores of one row; those that are no finite number are 0. */
static void score_row(const weft_router_args *a, const float *logits, float *score)
{
    const int64_t n = a->experts;
    if (a->scoring == WEFT_ROUTER_SOFTMAX) {
        float largest = logits[0], sum = 0.0f;
        for (int64_t e = 1; e < n; e++) largest = logits[e] > largest ? logits[e] : largest;
        for (int64_t e = 0; e < n; e++) sum += score[e] = expf(logits[e] - largest);
        for (int64_t e = 0; e < n; e++) score[e] /= sum;
    } else {
        for (int64_t e = 0; e < n; e++)
            score[e] = a->scoring == WEFT_ROUTER_SIGMOID ? 1.0f / (1.0f + expf(-logits[e])) : logits[e];
    }
    for (int64_t e = 0; e < n; e++)
        if (!isfinite(score[e])) score[e] = 0.0f;
}

/* The largest score + bias that is not taken, the first of equals. A bias of NaN never beats
 * anything, and still every call finds somebody. */
static int64_t choose(const weft_router_args *a, const float *score, const unsigned char *taken)
{
    int64_t best = -1;
    float highest = -INFINITY;
    for (int64_t e = 0; e < a->experts; e++) {
        if (taken[e]) continue;
        float value = a->bias != NULL ? score[e] + a->bias[e] : score[e];
        if (best >= 0 && !(value > highest)) continue;
        best = e;
        highest = isnan(value) ? -INFINITY : value;
    }
    return best;
}

static void weigh(const weft_router_args *a, float *weights)
{
    float sum = 0.0f;
    if (a->scoring == WEFT_ROUTER_SOFTMAX_TOPK) {
        float largest = weights[0];
        for (int64_t k = 1; k < a->top_k; k++) largest = weights[k] > largest ? weights[k] : largest;
        for (int64_t k = 0; k < a->top_k; k++) weights[k] = expf(weights[k] - largest);
    } else if (!a->renormalize) {
        return;
    }
    for (int64_t k = 0; k < a->top_k; k++) sum += weights[k];
    if (!(sum > 0.0f)) return;
    for (int64_t k = 0; k < a->top_k; k++) weights[k] /= sum;
}

typedef struct {
    const weft_router_args *args;
    float *scratch; /* per part: scores, then marks */
    int64_t part_floats;
} router_job;

static void route_rows(void *context, int part, int parts)
{
    const router_job *job = context;
    const weft_router_args *a = job->args;
    float *score = job->scratch + part * job->part_floats;
    unsigned char *taken = (unsigned char *)(score + a->experts);
    long begin, end;
    weft_pool_range(a->tokens, 1, part, parts, &begin, &end);
    for (long t = begin; t < end; t++) {
        int32_t *ids = a->ids + t * a->top_k;
        float *weights = a->weights + t * a->top_k;
        score_row(a, a->logits + t * a->logits_stride, score);
        for (int64_t e = 0; e < a->experts; e++) taken[e] = 0;
        for (int64_t k = 0; k < a->top_k; k++) {
            int64_t e = choose(a, score, taken);
            taken[e] = 1;
            ids[k] = (int32_t)e;
            weights[k] = score[e];
        }
        weigh(a, weights);
    }
}

weft_status weft_router_cpu(const weft_router_args *a, weft_pool *pool)
{
    WEFT_TRY(weft__check_router(a));
    if (a->tokens == 0) return WEFT_OK;
    weft_pool *used = a->tokens * a->experts < 16384 ? NULL : pool;
    router_job job = {.args = a, .part_floats = a->experts + (a->experts + 3) / 4 + 16};
    void *scratch = NULL;
    WEFT_TRY(weft__scratch((size_t)weft_pool_threads(used) * (size_t)job.part_floats * 4, &scratch));
    job.scratch = scratch;
    weft_pool_run(used, route_rows, &job);
    return WEFT_OK;
}
