/* kernels/cuda/tests/bench_step.c - one decode step (or prefill) in the shape of Llama-3.1-8B, all
 * its operations in one graph: what the kernels allow before any runtime. */
#include <stdio.h>
#include <stdlib.h>

#include <cuda_runtime_api.h>
#include <math.h>

#include "kernels/cuda/tests/bench.h"
#include "kernels/weft_fused.h"

enum { LAYERS = 32, HIDDEN = 4096, HEADS = 32, KV = 8, DIM = 128, INNER = 14336, VOCAB = 128256, QKV = (HEADS + 2 * KV) * DIM, PAGE = 16,
       BLOCKS = 2 * INNER / 128 * (INNER / 128), SCALES = 257 /* sets of them */ };

enum recorder { LAUNCHES, AS_RUNTIME, TOGETHER }; /* no recorder; as the runtime captures; whatever the recorder can take */

struct step {
    int64_t tokens, requests, queries, length;
    weft_dtype w_dtype;
    const void *qkv[LAYERS], *o[LAYERS], *up[LAYERS], *down[LAYERS], *head, *embedding, *gain;
    const float *scale;
    const int32_t *scale_row;
    void *k_cache[LAYERS], *v_cache[LAYERS];
    void *x, *residual, *normed, *projected, *attended, *inner, *activated, *lse;
    float *logits, *value, *temperature;
    int32_t *ids, *positions, *loc, *lens, *table, *next;
    uint64_t *seed;
    const float *cos_sin;
    int64_t width;
    enum recorder recorder; /* while a graph is captured */
    weft_fused *fused;  /* during a capture */
    void *fused_memory, *residual_copy;
};

/* Recorded or launched, as the runtime does. */
#define RUN(s, op, args) \
    ((s)->fused != NULL && weft_fused_take((s)->fused, WEFT_FUSED_##op, (args)) ? WEFT_OK : (flush(s) != WEFT_OK ? WEFT_CUDA : weft_##op##_cuda((args), stream)))
static weft_status flush(const struct step *s) { return s->fused != NULL ? weft_fused_flush(s->fused) : WEFT_OK; }

static weft_status linear(const struct step *s, const void *x, const void *w, void *y, int64_t tokens, int64_t n, int64_t k, weft_dtype w_dtype,
                          weft_dtype y_dtype, void *stream)
{
    /* Every product has scales of its own: as many as w has blocks, at a place that follows from where w is. */
    const int64_t place = w_dtype == WEFT_F8E4M3 ? (int64_t)((uintptr_t)w >> 21) % SCALES : 0;
    weft_linear_args a = {.x = x, .w = w, .y = y, .tokens = tokens, .n = n, .k = k, .x_stride = k, .w_stride = k, .y_stride = n,
                          .scale = s->scale + place * BLOCKS, .scale_row = s->scale_row, .scale_stride = INNER / 128, .x_dtype = WEFT_BF16,
                          .w_dtype = w_dtype, .y_dtype = y_dtype, .cuda = bench_context()};
    return RUN(s, linear, &a);
}

static weft_status norm(const struct step *s, void *x, void *residual, void *y, void *stream)
{
    weft_rms_norm_args a = {.x = x, .residual = residual, .gain = s->gain, .y = y, .rows = s->tokens, .cols = HIDDEN, .x_stride = HIDDEN,
                            .residual_stride = HIDDEN, .y_stride = HIDDEN, .eps = 1e-5f, .dtype = WEFT_BF16, .gain_dtype = WEFT_BF16};
    return RUN(s, rms_norm, &a);
}

static weft_status layer(const struct step *s, int i, void *stream)
{
    char *qkv = s->projected, *k = qkv + HEADS * DIM * 2, *v = k + KV * DIM * 2;
    const weft_page_layout pages = {s->table, s->width, PAGE, 1, 0, 1};
    WEFT_TRY(norm(s, s->x, s->residual, s->normed, stream));
    WEFT_TRY(linear(s, s->normed, s->qkv[i], qkv, s->tokens, QKV, HIDDEN, s->w_dtype, WEFT_BF16, stream));
    weft_rope_args rope = {.x = qkv, .positions = s->positions, .cos_sin = s->cos_sin, .tokens = s->tokens, .heads = HEADS + KV,
                           .head_dim = DIM, .rotary_dim = DIM, .token_stride = QKV, .max_positions = s->length, .dtype = WEFT_BF16};
    WEFT_TRY(RUN(s, rope, &rope));
    weft_kv_write_args write = {.k = k, .v = v, .k_cache = s->k_cache[i], .v_cache = s->v_cache[i], .positions = s->positions,
                                .query_start_loc = s->loc, .pages = pages, .tokens = s->tokens, .requests = s->requests, .num_kv_heads = KV,
                                .head_dim = DIM, .head_dim_v = DIM, .k_stride = QKV, .v_stride = QKV, .dtype = WEFT_BF16,
                                .cache_dtype = WEFT_BF16};
    WEFT_TRY(RUN(s, kv_write, &write));
    weft_attention_args attention = {.q = qkv, .k = s->k_cache[i], .v = s->v_cache[i], .out = s->attended, .lse = s->lse,
                                     .query_start_loc = s->loc, .seq_lens = s->lens, .pages = pages, .tokens = s->tokens,
                                     .requests = s->requests, .q_stride = QKV, .out_stride = HEADS * DIM, .num_heads = HEADS,
                                     .num_kv_heads = KV, .head_dim = DIM, .head_dim_v = DIM, .group_size = HEADS / KV, .causal = 1,
                                     .scale = 0.088f, .dtype = WEFT_BF16, .kv_dtype = WEFT_BF16, .max_query_len = s->queries,
                                     .max_seq_len = s->length, .cuda = bench_context()};
    WEFT_TRY(RUN(s, attention, &attention));
    WEFT_TRY(linear(s, s->attended, s->o[i], s->x, s->tokens, HIDDEN, HEADS * DIM, s->w_dtype, WEFT_BF16, stream));
    WEFT_TRY(norm(s, s->x, s->residual, s->normed, stream));
    WEFT_TRY(linear(s, s->normed, s->up[i], s->inner, s->tokens, 2 * INNER, HIDDEN, s->w_dtype, WEFT_BF16, stream));
    weft_silu_mul_args silu = {.x = s->inner, .y = s->activated, .rows = s->tokens, .cols = INNER, .x_stride = 2 * INNER, .y_stride = INNER,
                               .dtype = WEFT_BF16};
    WEFT_TRY(RUN(s, silu_mul, &silu));
    return linear(s, s->activated, s->down[i], s->x, s->tokens, HIDDEN, INNER, s->w_dtype, WEFT_BF16, stream);
}

static weft_status all_operations(struct step *s, void *stream)
{
    if (s->residual_copy != NULL && cudaMemcpyAsync(s->residual, s->residual_copy, (size_t)s->tokens * HIDDEN * 2, cudaMemcpyDeviceToDevice, stream))
        return WEFT_CUDA;
    weft_embedding_args embedding = {.w = s->embedding, .ids = s->ids, .y = s->x, .tokens = s->tokens, .hidden = HIDDEN, .count = VOCAB,
                                     .w_dtype = WEFT_BF16, .y_dtype = WEFT_BF16};
    WEFT_TRY(RUN(s, embedding, &embedding));
    for (int i = 0; i < LAYERS; i++) WEFT_TRY(layer(s, i, stream));
    WEFT_TRY(norm(s, s->x, s->residual, s->normed, stream));
    WEFT_TRY(linear(s, s->normed, s->head, s->logits, s->requests, VOCAB, HIDDEN, WEFT_BF16, WEFT_F32, stream));
    weft_sample_args sample = {.logits = s->logits, .temperature = s->temperature, .seed = s->seed, .position = s->positions,
                               .value = s->value, .id = s->next, .rows = s->requests, .count = VOCAB, .logits_stride = VOCAB,
                               .cuda = bench_context()};
    WEFT_TRY(flush(s));
    return weft_sample_cuda(&sample, stream);
}

static weft_status one_step(void *context, int number, void *stream)
{
    struct step *s = context;
    enum cudaStreamCaptureStatus capturing;
    if (cudaStreamIsCapturing(stream, &capturing) != cudaSuccess) return WEFT_CUDA;
    if (s->recorder != LAUNCHES && capturing == cudaStreamCaptureStatusActive)
        WEFT_TRY(weft_fused_begin(&s->fused, bench_context(), s->fused_memory, s->recorder == TOGETHER, stream));
    return all_operations(s, stream);
}

static void captured(void *context)
{
    struct step *s = context;
    if (s->fused != NULL && weft_fused_end(s->fused, 1) != WEFT_OK) fprintf(stderr, "%s\n", weft_error_message()), exit(1);
    s->fused = NULL;
}

/* How far the logits of replays are from those of launches. */
static void agree(struct step *s)
{
    const size_t count = (size_t)s->requests * VOCAB;
    float *plain = malloc(count * 4), *other = malloc(count * 4);
    s->residual_copy = bench_random(s->tokens * HIDDEN, WEFT_BF16, 1);
    if (all_operations(s, NULL) != WEFT_OK || cudaMemcpy(plain, s->logits, count * 4, cudaMemcpyDeviceToHost)) exit(1);
    cudaMemset(s->logits, 0x7f, count * 4);
    cudaDeviceSynchronize();
    (void)bench_us(one_step, s, 1);
    if (cudaMemcpy(other, s->logits, count * 4, cudaMemcpyDeviceToHost)) exit(1);
    double difference = 0, norm = 0;
    int same = 0;
    for (int64_t r = 0; r < s->requests; r++) {
        int64_t best = 0, best_other = 0;
        for (int64_t i = 0; i < VOCAB; i++) {
            const float *p = plain + r * VOCAB, *o = other + r * VOCAB;
            difference += (p[i] - o[i]) * (p[i] - o[i]), norm += p[i] * p[i];
            if (p[i] > p[best]) best = i;
            if (o[i] > o[best_other]) best_other = i;
        }
        same += best == best_other;
    }
    printf("%-58s %10.2e relative difference of logits, %d of %d largest agree\n", "  recorded against launched", sqrt(difference / norm), same, (int)s->requests);
    s->residual_copy = NULL;
    free(plain), free(other);
}

static void *integers(int64_t count, int64_t by, int64_t modulo)
{
    int32_t *p = malloc((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) p[i] = (int32_t)(i * by % modulo);
    void *device = bench_upload(p, (size_t)count * 4);
    free(p);
    return device;
}

static void step(int64_t requests, int64_t queries, int64_t length, weft_dtype w, enum recorder recorder)
{
    struct step s = {.tokens = requests * queries, .requests = requests, .queries = queries, .length = length, .w_dtype = w};
    s.width = (length + PAGE - 1) / PAGE;
    const int64_t cache = requests * s.width * KV * PAGE * DIM;
    for (int i = 0; i < LAYERS; i++) {
        s.qkv[i] = bench_random((int64_t)QKV * HIDDEN, w, 0.02f), s.o[i] = bench_random((int64_t)HIDDEN * HEADS * DIM, w, 0.02f);
        s.up[i] = bench_random((int64_t)2 * INNER * HIDDEN, w, 0.02f), s.down[i] = bench_random((int64_t)HIDDEN * INNER, w, 0.02f);
        s.k_cache[i] = bench_random(cache, WEFT_BF16, 1), s.v_cache[i] = bench_random(cache, WEFT_BF16, 1);
    }
    s.head = bench_random((int64_t)VOCAB * HIDDEN, WEFT_BF16, 0.02f), s.embedding = bench_random((int64_t)VOCAB * HIDDEN, WEFT_BF16, 1);
    s.gain = bench_random(HIDDEN, WEFT_BF16, 1);
    s.scale = bench_random((int64_t)SCALES * BLOCKS, WEFT_F32, 0.04f);
    int32_t *rows = malloc(2 * INNER * 4);
    for (int i = 0; i < 2 * INNER; i++) rows[i] = i / 128;
    s.scale_row = bench_upload(rows, 2 * INNER * 4);
    s.x = bench_random(s.tokens * HIDDEN, WEFT_BF16, 1), s.residual = bench_random(s.tokens * HIDDEN, WEFT_BF16, 1);
    s.normed = bench_random(s.tokens * HIDDEN, WEFT_BF16, 1), s.projected = bench_random(s.tokens * QKV, WEFT_BF16, 1);
    s.attended = bench_random(s.tokens * HEADS * DIM, WEFT_BF16, 1), s.inner = bench_random(s.tokens * 2 * INNER, WEFT_BF16, 1);
    s.activated = bench_random(s.tokens * INNER, WEFT_BF16, 1), s.lse = bench_random(s.tokens * HEADS, WEFT_F32, 1);
    s.logits = bench_random(requests * VOCAB, WEFT_F32, 1), s.value = bench_random(requests, WEFT_F32, 1);
    s.temperature = integers(requests, 0, 1), s.seed = bench_random(requests * 2, WEFT_F32, 1);
    s.ids = integers(s.tokens, 977, VOCAB), s.next = integers(requests, 0, 1);
    s.loc = integers(requests + 1, queries, INT32_MAX), s.table = integers(requests * s.width, 1, INT32_MAX);
    for (int64_t i = 0; i < requests && i < 2 * INNER; i++) rows[i] = (int32_t)length;
    s.lens = bench_upload(rows, (size_t)requests * 4);
    int32_t *positions = malloc((size_t)s.tokens * 4);
    for (int64_t t = 0; t < s.tokens; t++) positions[t] = (int32_t)(length - queries + t % queries);
    s.positions = bench_upload(positions, (size_t)s.tokens * 4);
    free(rows), free(positions);
    s.cos_sin = bench_random(length * DIM, WEFT_F32, 0.5f);
    const double weights = ((double)QKV * HIDDEN + (double)HIDDEN * HEADS * DIM + 3.0 * INNER * HIDDEN) * LAYERS;
    const double bytes = weights * (double)weft_dtype_size(w) + (double)VOCAB * HIDDEN * 2 + (double)requests * (double)length * KV * DIM * 4 * LAYERS;
    char name[96];
    snprintf(name, sizeof name, "8B step, %s, %lld x %lld tokens, context %lld%s", weft_dtype_name(w), (long long)requests, (long long)queries,
             (long long)length, recorder == TOGETHER ? ", one launch" : recorder == AS_RUNTIME ? ", recorded" : "");
    if (recorder != LAUNCHES) {
        s.recorder = recorder;
        if (queries == 1) s.fused_memory = bench_random(WEFT_FUSED_BYTES, WEFT_F8E4M3, 1);
        bench_captured = captured;
        agree(&s);
    }
    const double us = bench_us(one_step, &s, 1);
    bench_line(name, us, queries == 1 ? bytes : 0, queries > 1 ? 2 * weights * (double)s.tokens + 2.0 * (double)queries * (double)queries * HEADS * DIM * LAYERS : 0);
    if (queries == 1) printf("%58s %10.1f tokens/s\n", "", (double)requests / us * 1e6);
    bench_captured = NULL;
    bench_free_all();
}

void bench_step(void)
{
    step(1, 1, 1024, WEFT_BF16, LAUNCHES);
    step(2, 1, 1024, WEFT_BF16, AS_RUNTIME);
    step(8, 1, 1024, WEFT_BF16, AS_RUNTIME);
    step(16, 1, 1024, WEFT_BF16, AS_RUNTIME);
    step(32, 1, 1024, WEFT_BF16, LAUNCHES);
    step(32, 1, 1024, WEFT_BF16, AS_RUNTIME);
    step(64, 1, 1024, WEFT_BF16, LAUNCHES);
    step(1, 8192, 8192, WEFT_BF16, LAUNCHES);
    step(1, 8192, 8192, WEFT_BF16, AS_RUNTIME);
    step(1, 1, 1024, WEFT_F8E4M3, AS_RUNTIME);
    step(1, 1, 1088, WEFT_F8E4M3, AS_RUNTIME);
    step(8, 1, 1024, WEFT_F8E4M3, AS_RUNTIME);
    step(1, 8192, 8192, WEFT_F8E4M3, LAUNCHES);
}

/* The same as one launch. */
void bench_fused(void)
{
    step(1, 1, 1024, WEFT_BF16, TOGETHER);
}
