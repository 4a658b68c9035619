/* layers/sampler_draw.c - filters over a whole row, and log-probabilities. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kernels/weft_kernels.h"
#include "layers/sampler.h"

typedef struct {
    float score;
    int32_t id;
} candidate;

/* A strict order: larger scores first, then lower ids. Scores are never NaN here. */
static int before(const candidate *a, const candidate *b)
{
    return a->score > b->score || (a->score == b->score && a->id < b->id);
}

static int compare(const void *a, const void *b)
{
    return before(a, b) ? -1 : before(b, a);
}

static void swap(candidate *a, candidate *b)
{
    candidate kept = *a;
    *a = *b;
    *b = kept;
}

/* Puts the `count` best of `n` first, in no order. */
static void select_best(candidate *list, int64_t n, int64_t count)
{
    int64_t low = 0, high = n - 1;
    while (low < high) {
        candidate pivot = list[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (before(&list[i], &pivot)) i++;
            while (before(&pivot, &list[j])) j--;
            if (i <= j) swap(&list[i++], &list[j--]);
        }
        if (count - 1 <= j) high = j;
        else if (count - 1 >= i) low = i;
        else return;
    }
}

/* Sorts the best `count` of list[sorted..n) into place behind list[0..sorted). */
static void sort_further(candidate *list, int64_t n, int64_t sorted, int64_t count)
{
    if (count < n - sorted) select_best(list + sorted, n - sorted, count);
    qsort(list + sorted, (size_t)count, sizeof *list, compare);
}

static int64_t keep_top_k(candidate *list, int64_t n, int64_t k)
{
    if (k <= 0 || k >= n) return n;
    select_best(list, n, k);
    float last = list[0].score;
    for (int64_t i = 1; i < k; i++) last = fminf(last, list[i].score);
    int64_t kept = k;
    for (int64_t i = k; i < n; i++)
        if (list[i].score == last) swap(&list[i], &list[kept++]);
    return kept;
}

static int64_t keep_top_p(candidate *list, int64_t n, double p, double temperature, float largest)
{
    if (p >= 1) return n;
    double total = 0, sum = 0;
    for (int64_t i = 0; i < n; i++) total += exp(((double)list[i].score - largest) / temperature);
    int64_t sorted = 0;
    while (sorted < n) {
        /* A few at a time: the mass is nearly always in the first. */
        int64_t count = sorted > 0 ? 3 * sorted : 64;
        if (count > n - sorted) count = n - sorted;
        sort_further(list, n, sorted, count);
        for (int64_t end = sorted + count; sorted < end; sorted++) {
            if (sorted > 0 && sum >= p * total) return sorted;
            sum += exp(((double)list[sorted].score - largest) / temperature);
        }
    }
    return n;
}

static int64_t keep_min_p(candidate *list, int64_t n, double min_p, double temperature, float largest)
{
    if (min_p <= 0) return n;
    double limit = log(min_p);
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++)
        if (((double)list[i].score - largest) / temperature >= limit) swap(&list[i], &list[kept++]);
    return kept;
}

static void penalise(float *scores, const float *row, int64_t vocab, const weft_draw_options *o)
{
    if (o->repetition_penalty == 1) return;
    for (int64_t i = 0; i < o->history_length; i++) {
        int32_t id = o->history[i];
        if (id < 0 || id >= vocab || isnan(row[id])) continue;
        /* From the row, not from scores: an id counts once however often it came. */
        scores[id] = row[id] > 0 ? row[id] / (float)o->repetition_penalty : row[id] * (float)o->repetition_penalty;
    }
}

/* Leaves -inf in every score that the filters drop. */
static void filter(float *scores, candidate *list, int64_t vocab, const weft_draw_options *o)
{
    int filters = o->top_k > 0 || o->top_p < 1 || o->min_p > 0;
    if (o->temperature == 0 || !filters) return;
    float largest = -INFINITY;
    int64_t n = 0;
    for (int64_t i = 0; i < vocab; i++) {
        if (scores[i] == -INFINITY) continue;
        list[n++] = (candidate){scores[i], (int32_t)i};
        largest = fmaxf(largest, scores[i]);
    }
    if (n == 0 || isinf(largest)) return;
    n = keep_top_k(list, n, o->top_k);
    n = keep_top_p(list, n, o->top_p, o->temperature, largest);
    n = keep_min_p(list, n, o->min_p, o->temperature, largest);
    for (int64_t i = 0; i < vocab; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < n; i++) scores[list[i].id] = list[i].score;
}

static weft_status check(int64_t vocab, const weft_draw_options *o)
{
    if (vocab < 1 || vocab > INT32_MAX) return weft_fail(WEFT_INVALID, "draw: a row of %lld logits", (long long)vocab);
    if (!(o->temperature >= 0) || isinf(o->temperature))
        return weft_fail(WEFT_INVALID, "temperature must be 0 or more, got %g", o->temperature);
    if (!(o->top_p >= 0 && o->top_p <= 1)) return weft_fail(WEFT_INVALID, "top_p must be from 0 to 1, got %g", o->top_p);
    if (!(o->min_p >= 0 && o->min_p <= 1)) return weft_fail(WEFT_INVALID, "min_p must be from 0 to 1, got %g", o->min_p);
    if (o->top_k < 0) return weft_fail(WEFT_INVALID, "top_k must be 0 or more, got %lld", (long long)o->top_k);
    if (!(o->repetition_penalty > 0)) return weft_fail(WEFT_INVALID, "repetition_penalty must be positive, got %g", o->repetition_penalty);
    return WEFT_OK;
}

weft_status weft_sampler_draw(weft_rank *rank, const float *row, int64_t vocab, const weft_draw_options *options, int32_t *id)
{
    WEFT_TRY(check(vocab, options));
    size_t each = sizeof(float) + sizeof(candidate), bytes;
    if (!weft_mul_size((size_t)vocab, each, &bytes)) return weft_fail(WEFT_MEMORY, "draw: a row of %lld logits", (long long)vocab);
    void *scratch = NULL;
    WEFT_TRY(weft_memory_alloc(rank->memory, bytes, &scratch));
    candidate *list = scratch;
    float *scores = (float *)(list + vocab);
    for (int64_t i = 0; i < vocab; i++) scores[i] = isnan(row[i]) ? -INFINITY : row[i];
    penalise(scores, row, vocab, options);
    filter(scores, list, vocab, options);
    float temperature = (float)options->temperature, value;
    weft_sample_args args = {.logits = scores, .temperature = &temperature, .seed = &options->seed, .position = &options->position,
                             .value = &value, .id = id, .rows = 1, .first = 0, .count = vocab, .logits_stride = vocab};
    weft_status status = weft_sample_cpu(&args, rank->pool);
    weft_memory_free(rank->memory, scratch, bytes);
    return status;
}

weft_status weft_sampler_top_logprobs(weft_rank *rank, const float *row, int64_t vocab, int64_t n, int32_t *ids, float *logprobs,
                                      double *log_sum)
{
    if (vocab < 1 || vocab > INT32_MAX || n < 0 || n > vocab)
        return weft_fail(WEFT_INVALID, "the %lld best of %lld logits", (long long)n, (long long)vocab);
    size_t bytes = (size_t)vocab * sizeof(candidate);
    void *scratch = NULL;
    WEFT_TRY(weft_memory_alloc(rank->memory, bytes, &scratch));
    candidate *list = scratch;
    float largest = -INFINITY;
    for (int64_t i = 0; i < vocab; i++) {
        list[i] = (candidate){isnan(row[i]) ? -INFINITY : row[i], (int32_t)i};
        largest = fmaxf(largest, list[i].score);
    }
    double sum = 0;
    for (int64_t i = 0; i < vocab; i++) sum += exp((double)list[i].score - largest);
    double total = largest + log(sum);
    if (n > 0) sort_further(list, vocab, 0, n);
    for (int64_t i = 0; i < n; i++) {
        ids[i] = list[i].id;
        logprobs[i] = (float)(list[i].score - total);
    }
    if (log_sum != NULL) *log_sum = total;
    weft_memory_free(rank->memory, scratch, bytes);
    return WEFT_OK;
}
