/* kernels/cuda/tests/peer_step.c - sums over two GPUs inside a step (weft_fused.h): norms and products with
 * their sums, captured, replayed and compared with the same operations launched one by one, and between members;
 * and how long those of an 8B model's layers take. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cuda/tests/peer_rig.h"
#include "kernels/weft_fused.h"

enum { REPLAYS = 25, MOST_LAYERS = 32, TIMED = 11, TOGETHER = 8, WORKSPACE = 32 << 20, DIM = 128, SHARED_HEADS = 4, PAGE = 16, CONTEXT = 1024 };

/* One layer: norm, up (and silu of pairs), down with its sum; before it attention of as many columns (0: none) over
 * CONTEXT tokens, every token a request. */
typedef struct {
    int64_t tokens, hidden, inner, attention;
    int layers;
    weft_dtype dtype;
    int bias, apart, between; /* apart: the sum is also read by another operation; between: a launched sum in the middle */
} shape;

typedef struct {
    weft_cuda_context *context;
    void *workspace, *fused_memory;
    void *up[MOST_LAYERS], *down[MOST_LAYERS], *qkv[MOST_LAYERS], *o[MOST_LAYERS];
    void *k_cache[MOST_LAYERS], *v_cache[MOST_LAYERS];
    int32_t *numbers; /* positions, query_start_loc, seq_lens, block table */
    float *cos_sin;
    void *gain, *bias, *first, *residual, *x, *normed, *both, *attended, *act, *extra, *last;
    void *want[3], *got[3]; /* host: residual, x, last */
    cudaGraphExec_t run;
    double ms;
    uint64_t random;
} store;

static peer_member members[2];
static store stores[2];
static const shape *now;
static int alone, failures; /* alone: the member that launches its operations one by one in replays, or -1 */
static pthread_barrier_t meet;

static uint32_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

static void draw_values(uint16_t *to, uint64_t seed, int64_t count, float scale)
{
    for (int64_t i = 0; i < count; i++) weft_store_f32(to, now->dtype, i, ((float)draw(&seed) * 0x1p-30f - 1.0f) * 1.7f * scale);
}

/* Large tensors are made of the same values, from different ones on. */
static void *values(uint64_t seed, int64_t count, float scale)
{
    enum { LARGE = 1 << 21, SHIFTS = 1 << 12 };
    static uint16_t pool[LARGE + SHIFTS];
    static float scale_of;
    static weft_dtype dtype_of;
    const int large = count > LARGE;
    uint16_t *host = large ? pool : malloc((size_t)count * 2);
    char *device = NULL;
    if (!large) draw_values(host, seed, count, scale);
    else if (scale_of != scale || dtype_of != now->dtype) draw_values(pool, 5, LARGE + SHIFTS, scale), scale_of = scale, dtype_of = now->dtype;
    peer_must(cudaMalloc((void **)&device, (size_t)count * 2), "device memory");
    for (int64_t at = 0; at < count; at += LARGE)
        peer_must(cudaMemcpy(device + 2 * at, large ? host + (seed * 37 + (uint64_t)at / LARGE * 11) % SHIFTS : host, (size_t)(count - at < LARGE ? count - at : LARGE) * 2, cudaMemcpyHostToDevice), "copy");
    if (!large) free(host);
    return device;
}

static void *integers(void)
{
    const int t = (int)now->tokens, width = CONTEXT / PAGE;
    int32_t *host = calloc((size_t)(3 * t + 1 + t * width), 4), *device;
    for (int i = 0; i < t; i++) host[i] = CONTEXT - 1 - i, host[t + i] = i, host[2 * t + 1 + i] = CONTEXT - i;
    host[2 * t] = t;
    for (int i = 0; i < t * width; i++) host[3 * t + 1 + i] = t * width - 1 - i;
    peer_must(cudaMalloc((void **)&device, (size_t)(3 * t + 1 + t * width) * 4), "device memory");
    peer_must(cudaMemcpy(device, host, (size_t)(3 * t + 1 + t * width) * 4, cudaMemcpyHostToDevice), "copy");
    free(host);
    return device;
}

static void *angles(void)
{
    float *host = malloc(CONTEXT * DIM * 4), *device;
    for (int i = 0; i < CONTEXT * DIM; i++) host[i] = i % DIM < DIM / 2 ? cosf((float)(i / DIM) * 0.01f * (float)(i % (DIM / 2))) : sinf((float)(i / DIM) * 0.01f * (float)(i % (DIM / 2)));
    peer_must(cudaMalloc((void **)&device, CONTEXT * DIM * 4), "device memory");
    peer_must(cudaMemcpy(device, host, CONTEXT * DIM * 4, cudaMemcpyHostToDevice), "copy");
    free(host);
    return device;
}

static void fill(peer_member *m)
{
    store *s = &stores[m->peer.rank];
    const int64_t rows = now->tokens * now->hidden, seed = 100 + m->peer.rank;
    memset(s, 0, sizeof *s);
    m->context = s;
    s->random = 9 + (uint64_t)m->peer.rank;
    peer_must(cudaMalloc(&s->workspace, WORKSPACE), "device memory");
    peer_must(cudaMalloc(&s->fused_memory, WEFT_FUSED_BYTES), "device memory");
    peer_must_run(weft_cuda_context_create(&s->context, s->workspace, WORKSPACE));
    for (int i = 0; i < now->layers; i++) s->up[i] = values((uint64_t)(seed + 10 * i), 2 * now->inner * now->hidden, 1 / sqrtf((float)now->hidden));
    for (int i = 0; i < now->layers; i++) s->down[i] = values((uint64_t)(seed + 10 * i + 2), now->hidden * now->inner, 1 / sqrtf((float)now->inner));
    for (int i = 0; i < now->layers && now->attention > 0; i++)
        s->qkv[i] = values((uint64_t)(seed + 10 * i + 4), 3 * now->attention / 2 * now->hidden, 1 / sqrtf((float)now->hidden));
    for (int i = 0; i < now->layers && now->attention > 0; i++)
        s->o[i] = values((uint64_t)(seed + 10 * i + 6), now->hidden * now->attention, 1 / sqrtf((float)now->attention));
    for (int i = 0; i < 2 * now->layers && now->attention > 0; i++)
        (i % 2 ? s->v_cache : s->k_cache)[i / 2] = values((uint64_t)(seed + 3 * i), now->tokens * CONTEXT * now->attention / SHARED_HEADS, 1);
    s->numbers = integers(), s->cos_sin = angles();
    s->gain = values(1, now->hidden, 1), s->first = values(2, rows, 1);
    s->bias = now->bias && m->peer.rank == 0 ? values(3, now->hidden, 1) : NULL;
    void **buffers[] = {&s->residual, &s->x, &s->normed, &s->extra, &s->last};
    for (int i = 0; i < 5; i++) *buffers[i] = values(4, rows, 1);
    s->attended = values(4, now->tokens * now->attention + 8, 1);
    s->both = values(4, now->tokens * (2 * now->inner + 2 * now->attention), 1), s->act = values(4, now->tokens * now->inner, 1);
    for (int i = 0; i < 3; i++) s->want[i] = calloc((size_t)rows, 2), s->got[i] = calloc((size_t)rows, 2);
}

static void empty(store *s)
{
    void *all[] = {s->workspace, s->fused_memory, s->gain, s->first, s->bias, s->residual, s->x, s->normed, s->extra, s->last, s->both, s->attended, s->act, s->numbers, s->cos_sin};
    weft_cuda_context_destroy(s->context);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) peer_must(cudaFree(all[i]), "free");
    for (int i = 0; i < now->layers; i++) {
        void *weights[] = {s->up[i], s->down[i], s->qkv[i], s->o[i], s->k_cache[i], s->v_cache[i]};
        for (int k = 0; k < 6; k++) peer_must(cudaFree(weights[k]), "free");
    }
    for (int i = 0; i < 3; i++) free(s->want[i]), free(s->got[i]);
}

/* ---- the operations, recorded or launched ---- */

#define RUN(m, fused, op, args)                                        \
    ((fused) != NULL && weft_fused_take(fused, WEFT_FUSED_##op, args)  \
         ? WEFT_OK                                                     \
         : ((fused) != NULL ? weft_fused_flush(fused) : WEFT_OK) != WEFT_OK ? WEFT_CUDA : weft_##op##_cuda(args, (m)->stream))

static weft_status norm(const peer_member *m, weft_fused *f, void *x, void *residual, void *y)
{
    const store *s = m->context;
    weft_rms_norm_args a = {.x = x, .residual = residual, .gain = s->gain, .y = y, .rows = now->tokens, .cols = now->hidden, .x_stride = now->hidden,
                            .residual_stride = now->hidden, .y_stride = now->hidden, .eps = 1e-5f, .dtype = now->dtype, .gain_dtype = now->dtype};
    return RUN(m, f, rms_norm, &a);
}

static weft_status sum(const peer_member *m, weft_fused *f, void *x)
{
    weft_peer_args a = {.in = x, .out = x, .count = now->tokens * now->hidden, .piece = now->tokens * now->hidden, .dtype = now->dtype};
    if (f != NULL) WEFT_TRY(weft_fused_flush(f));
    return weft_peer_sum(&m->peer, &a, m->stream);
}

static weft_status product(const peer_member *m, weft_fused *f, const void *x, const void *w, void *y, int64_t n, int64_t k, int over)
{
    const store *s = m->context;
    weft_linear_args a = {.x = x, .w = w, .y = y, .tokens = now->tokens, .n = n, .k = k, .x_stride = k, .w_stride = k, .y_stride = n,
                          .x_dtype = now->dtype, .w_dtype = now->dtype, .y_dtype = now->dtype, .cuda = s->context};
    if (!over) return RUN(m, f, linear, &a);
    a.bias = s->bias, a.bias_dtype = now->dtype;
    const weft_linear_over_args both = {&m->peer, &a};
    if (f != NULL && weft_fused_take(f, WEFT_FUSED_linear_over, &both)) return WEFT_OK;
    if (f != NULL) WEFT_TRY(weft_fused_flush(f));
    if (weft_peer_linear_fits(&m->peer, &a)) return weft_peer_linear(&m->peer, &a, m->stream);
    WEFT_TRY(weft_linear_cuda(&a, m->stream));
    return sum(m, NULL, y);
}

/* q, k and v lie in `both`. */
static weft_status attend(const peer_member *m, weft_fused *f, int i)
{
    const store *s = m->context;
    const int64_t t = now->tokens, heads = now->attention / DIM, kv = heads / SHARED_HEADS, stride = (heads + 2 * kv) * DIM;
    const int32_t *positions = s->numbers, *loc = positions + t, *lens = loc + t + 1, *table = lens + t;
    char *q = s->both, *k = q + heads * DIM * 2, *v = k + kv * DIM * 2;
    const weft_page_layout pages = {table, CONTEXT / PAGE, PAGE, 1, 0, 1};
    weft_rope_args rope = {.x = q, .positions = positions, .cos_sin = s->cos_sin, .tokens = t, .heads = heads + kv, .head_dim = DIM, .rotary_dim = DIM,
                           .token_stride = stride, .max_positions = CONTEXT, .dtype = now->dtype};
    weft_kv_write_args write = {.k = k, .v = v, .k_cache = s->k_cache[i], .v_cache = s->v_cache[i], .positions = positions, .query_start_loc = loc,
                                .pages = pages, .tokens = t, .requests = t, .num_kv_heads = kv, .head_dim = DIM, .head_dim_v = DIM, .k_stride = stride,
                                .v_stride = stride, .dtype = now->dtype, .cache_dtype = now->dtype};
    weft_attention_args a = {.q = q, .k = s->k_cache[i], .v = s->v_cache[i], .out = s->attended, .query_start_loc = loc, .seq_lens = lens,
                             .pages = pages, .tokens = t, .requests = t, .q_stride = stride, .out_stride = now->attention, .num_heads = (int)heads,
                             .num_kv_heads = (int)kv, .head_dim = DIM, .head_dim_v = DIM, .group_size = SHARED_HEADS, .causal = 1,
                             .scale = 0.088f, .dtype = now->dtype, .kv_dtype = now->dtype, .max_query_len = 1, .max_seq_len = CONTEXT,
                             .cuda = s->context};
    WEFT_TRY(RUN(m, f, rope, &rope));
    WEFT_TRY(RUN(m, f, kv_write, &write));
    return RUN(m, f, attention, &a);
}

static weft_status all_layers(const peer_member *m, weft_fused *f)
{
    store *s = m->context;
    const int64_t t = now->tokens, hidden = now->hidden, inner = now->inner, attention = now->attention;
    for (int i = 0; i < now->layers; i++) {
        if (attention > 0) {
            WEFT_TRY(norm(m, f, i == 0 ? s->residual : s->x, i == 0 ? NULL : s->residual, s->normed));
            WEFT_TRY(product(m, f, s->normed, s->qkv[i], s->both, 3 * attention / 2, hidden, 0));
            WEFT_TRY(attend(m, f, i));
            WEFT_TRY(product(m, f, s->attended, s->o[i], s->x, hidden, attention, 1));
        }
        const int fresh = i == 0 && attention == 0;
        WEFT_TRY(norm(m, f, fresh ? s->residual : s->x, fresh ? NULL : s->residual, s->normed));
        WEFT_TRY(product(m, f, s->normed, s->up[i], s->both, 2 * inner, hidden, 0));
        weft_silu_mul_args silu = {.x = s->both, .y = s->act, .rows = t, .cols = inner, .x_stride = 2 * inner, .y_stride = inner, .dtype = now->dtype};
        WEFT_TRY(RUN(m, f, silu_mul, &silu));
        WEFT_TRY(product(m, f, s->act, s->down[i], s->x, hidden, inner, 1));
        if (now->apart && i % 2 == 0) {
            weft_add_args add = {.a = s->x, .b = s->residual, .y = s->extra, .rows = t, .cols = hidden, .a_stride = hidden, .b_stride = hidden, .y_stride = hidden, .dtype = now->dtype};
            WEFT_TRY(RUN(m, f, add, &add));
        }
        if (now->between && i == now->layers / 2) WEFT_TRY(sum(m, f, s->normed));
    }
    return norm(m, f, s->x, s->residual, s->last);
}

static weft_status whole(const peer_member *m, int recorded)
{
    store *s = m->context;
    weft_fused *fused = NULL;
    peer_must(cudaMemcpyAsync(s->residual, s->first, (size_t)(now->tokens * now->hidden) * 2, cudaMemcpyDeviceToDevice, m->stream), "copy");
    if (recorded) WEFT_TRY(weft_fused_begin(&fused, s->context, s->fused_memory, 1, m->stream));
    weft_status status = all_layers(m, fused);
    if (!recorded) return status;
    (void)weft_fused_flush(fused);
    cudaGraph_t graph;
    cudaGraphExec_t run;
    peer_must(cudaStreamEndCapture(m->stream, &graph), "capture");
    const weft_status ended = weft_fused_end(fused, 1);
    peer_must(cudaGraphInstantiate(&run, graph, 0), "graph");
    peer_must(cudaGraphDestroy(graph), "graph");
    s->run = run;
    return status != WEFT_OK ? status : ended;
}

static cudaGraphExec_t capture(const peer_member *m)
{
    peer_must(cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeThreadLocal), "capture");
    peer_must_run(whole(m, 1));
    return ((store *)m->context)->run;
}

/* ---- what they must give ---- */

static void fetch(const peer_member *m, void **to)
{
    const store *s = m->context;
    const void *from[3] = {s->residual, s->x, s->last};
    const size_t bytes = (size_t)(now->tokens * now->hidden) * 2;
    for (int i = 0; i < 3; i++) peer_must(cudaMemcpyAsync(to[i], from[i], bytes, cudaMemcpyDeviceToHost, m->stream), "copy");
    peer_must(cudaStreamSynchronize(m->stream), "the step");
}

static void expect(int fine, const char *what, const peer_member *m)
{
    static const char *const dtypes[] = {"bfloat16", "float16"};
    if (fine) return;
    if (failures++ < 20)
        printf("%s: member %d, %s, %d tokens, %d x %d, %d layers, alone %d\n", what, m->peer.rank, dtypes[now->dtype == WEFT_F16], (int)now->tokens,
               (int)now->hidden, (int)now->inner, now->layers, alone);
}

static double difference(const void *a, const void *b, int64_t count)
{
    double most = 0, largest = 1e-9;
    for (int64_t i = 0; i < count; i++) {
        const double x = weft_load_f32(a, now->dtype, i), y = weft_load_f32(b, now->dtype, i);
        if (!(fabs(x - y) <= most)) most = fabs(x - y);
        if (fabs(x) > largest) largest = fabs(x);
    }
    return most / largest;
}

static void sleep_on_stream(void *us) { usleep((unsigned)(uintptr_t)us); }

static void *check(void *context)
{
    peer_member *m = context;
    store *s = m->context;
    const int64_t count = now->tokens * now->hidden;
    peer_must_run(whole(m, 0));
    fetch(m, s->want);
    cudaGraphExec_t run = m->peer.rank != alone ? capture(m) : NULL;
    for (int i = 0; i < REPLAYS; i++) {
        const uint32_t dice = draw(&s->random) % 8;
        if (dice == 0) usleep(draw(&s->random) % 400);
        if (dice == 1) peer_must(cudaLaunchHostFunc(m->stream, sleep_on_stream, (void *)(uintptr_t)(draw(&s->random) % 300)), "delay");
        if (run != NULL) peer_must(cudaGraphLaunch(run, m->stream), "graph");
        else peer_must_run(whole(m, 0));
        if (i % 7 == 3) peer_must_run(sum(m, NULL, s->normed)); /* between replays */
        if (i == 0) fetch(m, s->got);
    }
    void *first[3];
    for (int i = 0; i < 3; i++) first[i] = malloc((size_t)count * 2), memcpy(first[i], s->got[i], (size_t)count * 2);
    fetch(m, s->got);
    pthread_barrier_wait(&meet);
    for (int i = 0; i < 3; i++) {
        static const char *const names[3] = {"residual", "sum", "result"};
        char text[80];
        const double d = difference(s->want[i], s->got[i], count), most = (now->dtype == WEFT_BF16 ? 0.02 : 0.003) * sqrt(now->layers);
        snprintf(text, sizeof text, "%s differs from launches by %.1e", names[i], d);
        expect(d < most, text, m);
        snprintf(text, sizeof text, "%s of the first replay differs from the last", names[i]);
        expect(memcmp(first[i], s->got[i], (size_t)count * 2) == 0, text, m);
        snprintf(text, sizeof text, "%s differs between members", names[i]);
        expect(i == 2 || alone >= 0 || memcmp(s->got[i], stores[1 - m->peer.rank].got[i], (size_t)count * 2) == 0, text, m);
        free(first[i]);
    }
    expect(m->peer.halt[1] == 0, "gave up waiting", m);
    if (run != NULL) peer_must(cudaGraphExecDestroy(run), "graph");
    pthread_barrier_wait(&meet);
    return NULL;
}

static void open_shape(const shape *s)
{
    now = s;
    peer_open(members, 2, 16384, fill);
}
static void close_shape(void)
{
    peer_close(members, 2);
    for (int m = 0; m < 2; m++) {
        peer_must(cudaSetDevice(members[m].device), "GPU");
        empty(&stores[m]);
    }
}

static int two_gpus(void)
{
    int gpus = 0;
    peer_must(cudaGetDeviceCount(&gpus), "GPUs");
    if (gpus >= 2) return 1;
    fprintf(stderr, "sums inside a step need two GPUs, here is %d\n", gpus);
    return 0;
}

/* only: one of the shapes, or -1 for all of them. */
int peer_step_check(int only)
{
    static const shape shapes[] = {
        {1, 4096, 1792, 2048, 4, WEFT_BF16, 0, 0, 0},  {1, 4096, 3584, 0, 3, WEFT_BF16, 1, 1, 0}, {1, 8192, 1024, 512, 3, WEFT_F16, 0, 0, 0},
        {1, 64, 64, 0, 5, WEFT_BF16, 1, 0, 1},         {3, 1024, 704, 0, 4, WEFT_BF16, 1, 1, 0},  {8, 512, 192, 0, 6, WEFT_F16, 0, 0, 1},
        {2, 2048, 5504, 1024, 3, WEFT_BF16, 0, 0, 0},     {5, 704, 64, 0, 4, WEFT_BF16, 0, 1, 1},    {1, 5120, 64, 512, 6, WEFT_BF16, 0, 0, 0},
    };
    const int count = (int)(sizeof shapes / sizeof shapes[0]);
    if (only >= count) {
        fprintf(stderr, "no shape %d; shapes: 0 to %d\n", only, count - 1);
        return 2;
    }
    if (!two_gpus()) return 2;
    pthread_barrier_init(&meet, NULL, 2);
    for (int i = 0; i < count; i++) {
        if (only >= 0 && only != i) continue;
        open_shape(&shapes[i]);
        for (alone = -1; alone < 2; alone++) peer_run(members, 2, check);
        close_shape();
    }
    printf("%s\n", failures == 0 ? "steps of two GPUs: all agree" : "steps of two GPUs: DIFFERENCES");
    return failures != 0;
}

/* ---- time ---- */

static int ascending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

static void *measure(void *context)
{
    peer_member *m = context;
    store *s = m->context;
    cudaEvent_t begin, end;
    float ms[TIMED];
    peer_must_run(whole(m, 0));
    peer_must(cudaStreamSynchronize(m->stream), "the step");
    cudaGraphExec_t run = capture(m);
    peer_must(cudaEventCreate(&begin), "event");
    peer_must(cudaEventCreate(&end), "event");
    for (int i = 0; i < TIMED + 3; i++) {
        peer_must(cudaEventRecord(begin, m->stream), "event");
        for (int k = 0; k < TOGETHER; k++) peer_must(cudaGraphLaunch(run, m->stream), "graph"); /* the members begin at different times */
        peer_must(cudaEventRecord(end, m->stream), "event");
        peer_must(cudaStreamSynchronize(m->stream), "replay");
        if (i >= 3) peer_must(cudaEventElapsedTime(&ms[i - 3], begin, end), "event");
    }
    qsort(ms, TIMED, sizeof *ms, ascending);
    s->ms = ms[TIMED / 2] / TOGETHER;
    peer_must(cudaGraphExecDestroy(run), "graph");
    return NULL;
}

/* The layers of Llama-3.1-8B on two GPUs, a token at context 1024. */
int peer_step_time(void)
{
    static const shape layers = {1, 4096, 7168, 2048, 32, WEFT_BF16, 0, 0, 0};
    if (!two_gpus()) return 2;
    open_shape(&layers);
    peer_run(members, 2, measure);
    const double bytes = 2.0 * layers.layers * (double)layers.hidden * (double)(3 * layers.inner + 5 * layers.attention / 2);
    printf("%-48s %10.3f ms, %.2f TB/s\n", "layers of 8B on two GPUs, one launch", stores[0].ms, bytes / stores[0].ms * 1e-9);
    close_shape();
    return 0;
}
