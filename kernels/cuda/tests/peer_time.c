/* kernels/cuda/tests/peer_time.c - microseconds of calls over peer memory, many in a graph. */
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/tests/peer_rig.h"

enum { REPEATS = 64, REPLAYS = 11, BYTES = 32 << 20 };

typedef enum { SUM, MOVE, SUM_THEN_NORM, GROUP_NORM, GROUP_NORM_PIECES, DCP } what;

typedef struct {
    char *in, *out, *more;
    double us;
} store;

static peer_member members[WEFT_PEER_MAX];
static store stores[WEFT_PEER_MAX];
static int size, threads;
static what timed;
static int64_t rows, cols;

static void fill(peer_member *m)
{
    store *s = &stores[m->peer.rank];
    m->context = s;
    unsigned short *host = malloc(BYTES);
    for (int i = 0; i < BYTES / 2; i++) host[i] = weft_bf16_from_f32((float)(rand() % 2000 - 1000) * 1e-3f);
    char **all[] = {&s->in, &s->out, &s->more};
    for (int i = 0; i < 3; i++) {
        peer_must(cudaMalloc((void **)all[i], BYTES), "device memory");
        peer_must(cudaMemcpy(*all[i], host, BYTES, cudaMemcpyHostToDevice), "copy");
    }
    free(host);
}

static weft_status group_norm(const peer_member *m, const store *s, int together)
{
    /* MiniMax-M2: q of 6144 and k of 1024 columns over all ranks */
    int64_t q_cols = 6144 / size, k_cols = 1024 / size;
    weft_group_norm_args q = {.x = s->in, .gain = s->more, .y = s->out, .var = (float *)s->more, .rows = rows, .cols = q_cols,
                              .x_stride = q_cols + 2 * k_cols, .y_stride = q_cols, .var_stride = 2, .world = size, .eps = 1e-6f,
                              .dtype = WEFT_BF16, .gain_dtype = WEFT_BF16}, both[2] = {q, q};
    both[1].x = s->in + 2 * q_cols, both[1].y = s->out + BYTES / 2, both[1].cols = both[1].y_stride = k_cols, both[1].var++;
    if (together) return weft_peer_group_norm(&m->peer, both, 2, m->stream);
    for (int i = 0; i < 2; i++) WEFT_TRY(weft_group_norm_sums_cuda(&both[i], m->stream));
    for (int i = 0; i < 2; i++) WEFT_TRY(weft_group_norm_apply_cuda(&both[i], m->stream));
    return WEFT_OK;
}

static weft_status one(const peer_member *m)
{
    store *s = m->context;
    weft_peer_args a = {.in = s->in, .out = s->out, .count = rows * cols, .piece = rows * cols, .dtype = WEFT_BF16, .threads = threads};
    weft_rms_norm_args norm = {.x = s->in, .residual = s->more, .gain = s->more + BYTES / 2, .y = s->out, .rows = rows, .cols = cols,
                               .x_stride = cols, .residual_stride = cols, .y_stride = cols, .eps = 1e-5f, .dtype = WEFT_BF16, .gain_dtype = WEFT_BF16};
    switch (timed) {
    case SUM: return weft_peer_sum(&m->peer, &a, m->stream);
    case MOVE:
        a.out_member_stride = a.count;
        return weft_peer_move(&m->peer, &a, m->stream);
    case SUM_THEN_NORM:
        WEFT_TRY(weft_peer_sum(&m->peer, &a, m->stream));
        norm.x = s->out;
        return weft_rms_norm_cuda(&norm, m->stream);
    case GROUP_NORM:
    case GROUP_NORM_PIECES: return group_norm(m, s, timed == GROUP_NORM);
    default: {
        weft_peer_dcp_args d = {.partial = s->in, .lse = (float *)s->more, .suffix = s->out + BYTES / 2, .suffix_lse = (float *)s->more,
                                .out = s->out, .tokens = rows, .heads = 32 / size, .dim = 128, .dtype = WEFT_BF16};
        return weft_peer_dcp(&m->peer, &d, m->stream);
    }
    }
}

static int ascending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

static void *run(void *context)
{
    peer_member *m = context;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    float ms[REPLAYS];
    peer_must(cudaEventCreate(&begin), "event");
    peer_must(cudaEventCreate(&end), "event");
    peer_must(cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < REPEATS; i++) peer_must_run(one(m));
    peer_must(cudaStreamEndCapture(m->stream, &graph), "capture");
    peer_must(cudaGraphInstantiate(&exec, graph, 0), "graph");
    for (int i = 0; i < REPLAYS + 2; i++) {
        peer_must(cudaEventRecord(begin, m->stream), "event");
        peer_must(cudaGraphLaunch(exec, m->stream), "graph");
        peer_must(cudaEventRecord(end, m->stream), "event");
        peer_must(cudaStreamSynchronize(m->stream), "replay");
        if (i >= 2) peer_must(cudaEventElapsedTime(&ms[i - 2], begin, end), "event");
    }
    qsort(ms, REPLAYS, sizeof *ms, ascending);
    ((store *)m->context)->us = ms[REPLAYS / 2] * 1e3 / REPEATS;
    peer_must(cudaGraphExecDestroy(exec), "graph");
    peer_must(cudaGraphDestroy(graph), "graph");
    return NULL;
}

/* A line; t threads a block, 0: as the launcher chooses. */
static void row(const char *name, what kind, int64_t r, int64_t c, int t)
{
    char text[80];
    timed = kind, rows = r, cols = c, threads = t;
    peer_run(members, size, run);
    if (t > 0) snprintf(text, sizeof text, "%s, blocks of %d", name, t);
    printf("%-48s %10.2f us\n", t > 0 ? text : name, stores[0].us);
}

int peer_time(void)
{
    static const int64_t kilobytes[] = {1, 8, 32, 64, 128, 256, 1024}, tokens[] = {1, 8, 32, 128, 512, 2048};
    char name[80];
    int gpus = 0;
    peer_must(cudaGetDeviceCount(&gpus), "GPUs");
    size = gpus < 2 ? 2 : gpus > WEFT_PEER_MAX ? WEFT_PEER_MAX : gpus;
    printf("%d members on %d GPUs\n", size, gpus);
    peer_open(members, size, 1 << 17, fill);
    for (int i = 0; i < 7; i++) {
        snprintf(name, sizeof name, "sum of %d KB", (int)kilobytes[i]);
        row(name, SUM, 1, 512 * kilobytes[i], 0);
    }
    for (int t = 128; t <= 1024; t *= 2) row("sum of 8 KB", SUM, 1, 4096, t);
    for (int i = 0; i < 6; i += 2) {
        snprintf(name, sizeof name, "gather of %d KB", (int)kilobytes[i]);
        row(name, MOVE, 1, 512 * kilobytes[i], 0);
    }
    for (int64_t t = 1; t <= 16; t *= 2) {
        snprintf(name, sizeof name, "sum, then a norm, %d x 4096", (int)t);
        row(name, SUM_THEN_NORM, t, 4096, 0);
    }
    for (int i = 0; i < 6; i++) {
        snprintf(name, sizeof name, "norms of q and k, %d tokens", (int)tokens[i]);
        row(name, GROUP_NORM, tokens[i], 0, 0);
        snprintf(name, sizeof name, "their four kernels alone, %d tokens", (int)tokens[i]);
        row(name, GROUP_NORM_PIECES, tokens[i], 0, 0);
    }
    for (int64_t t = 1; t <= 32; t *= 8) {
        snprintf(name, sizeof name, "exchange and merge, 32 heads, %d tokens", (int)t);
        row(name, DCP, t, 128, 0);
    }
    peer_close(members, size);
    return 0;
}
