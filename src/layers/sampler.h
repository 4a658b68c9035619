/* layers/sampler.h - the next token of each row (DESIGN 10, Sampling).
 *
 * The noise of a token depends on (seed, position, global id) alone, so a row draws the same token
 * whatever the plan, the batch or the rank. Two ways that agree:
 *
 *   sharded   rows that need only a temperature (0: greedy). Each rank draws from its shard of the
 *             vocabulary; one exchange of (value, id) decides, ties to the lower id
 *   draw      a whole row on one rank, with repetition penalty, temperature, top-k, top-p and
 *             min-p in that order, then the same draw among what is left */
#pragma once

#include "cache/step.h"
#include "comm/group.h"
#include "device/tensor.h"
#include "plan/layout.h"

typedef struct weft_sampler {
    weft_object object;
    weft_rank *rank;
    weft_group *group; /* NULL for a world of 1 */
    weft_axis axis;
    weft_vocab_layout layout;
    int64_t holders; /* ranks of the axis that hold rows of the vocabulary: the first ones */
    /* On a GPU: what the last launch draws, values and then ids of drawn_rows rows; the same of all ranks;
     * and what is chosen. Addresses change only to grow. */
    weft_tensor *drawn, *gathered, *chosen;
    int64_t drawn_rows;
} weft_sampler;

weft_status weft_sampler_create(weft_sampler **out, weft_rank *rank, weft_axis axis, int64_t vocab_size);
/* logits: float32 (rows, layout.count) as of weft_lm_head_forward. temperature, seed, position:
 * (rows). ids: int32 (rows) in the rank's arena, the same on all ranks. Collective over the group. */
weft_status weft_sampler_forward(weft_sampler *sampler, const weft_tensor *logits, const float *temperature, const uint64_t *seed,
                                 const int32_t *position, weft_tensor **ids);

/* The same in two halves, for a GPU: launch takes device addresses, waits for nothing and may be captured;
 * take waits, exchanges over the group and gives the first `rows` of what was drawn, on the host. */
weft_status weft_sampler_launch(weft_sampler *sampler, const weft_tensor *logits, const float *temperature, const uint64_t *seed,
                                const int32_t *position);
weft_status weft_sampler_take(weft_sampler *sampler, int64_t rows, weft_tensor **ids);

/* The same where the ids stay on the GPUs, so that the next step can begin before a host knows them. All of
 * these wait for nothing but `told`.
 *   decide     behind launch: the choice, on every rank; may be captured. Collective over the group
 *   follow     the record of an uploaded step for a graph is there for what comes behind, and an id below zero,
 *              -1 - r, is what row r of the last choice was; may be captured
 *   told       `rows` ids of the oldest choice that was not asked for, of two at most; they hold until the second
 *              choice from it is begun */
weft_status weft_sampler_decide(weft_sampler *sampler);
weft_status weft_sampler_follow(weft_sampler *sampler, weft_step *step);
weft_status weft_sampler_told(weft_sampler *sampler, int64_t rows, const int32_t **ids);

typedef struct weft_draw_options {
    double temperature;        /* 0: the largest logit; filters do not matter then */
    int64_t top_k;             /* keep the k largest, and all equal to the last of them; 0: all */
    double top_p;              /* keep the fewest that have this probability together; 1: all */
    double min_p;              /* keep those with at least this part of the largest probability; 0: all */
    double repetition_penalty; /* logits of ids in history: divided when positive, multiplied when not; 1: off */
    uint64_t seed;
    int32_t position; /* of the token to be drawn */
    const int32_t *history;
    int64_t history_length;
} weft_draw_options;

/* row: `vocab` logits. NaN counts as -inf. Talks to nobody. */
weft_status weft_sampler_draw(weft_rank *rank, const float *row, int64_t vocab, const weft_draw_options *options, int32_t *id);

/* The n largest of a row by log-probability, best first: ids and logprobs (n each). n <= vocab.
 * log_sum: log of the sum of exps, so that any id's log-probability is row[id] - log_sum. May be NULL. */
weft_status weft_sampler_top_logprobs(weft_rank *rank, const float *row, int64_t vocab, int64_t n, int32_t *ids, float *logprobs,
                                      double *log_sum);
