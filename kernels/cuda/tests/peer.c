/* kernels/cuda/tests/peer.c - collectives over peer memory against sums on the host: random calls back
 * to back with delays on every member, launched one by one and replayed as graphs.
 * usage: weft_gpu_peer check [MEMBERS [BATCHES]] | time      (members share a GPU where there are too few)
 *        weft_gpu_peer step [SHAPE] | step-time              (peer_step.c; on two GPUs) */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cuda/tests/peer_rig.h"

enum { CAPACITY = 8192, REGION = 1 << 19, ARENA = 48 << 20, CALLS = 48, REGIONS = 4 };

typedef enum { SUM, SUM_IN_PLACE, MAX, SCATTER, GATHER, ALL_TO_ALL, LINEAR, GROUP_NORM, DCP, DCP_MERGE, KINDS } kind;
static const char *const names[KINDS] = {"sum", "sum in place", "max", "scatter", "gather", "all to all", "product and sum", "group norm", "exchange", "exchange and merge"};
static const weft_dtype dtypes[REGIONS] = {WEFT_F32, WEFT_BF16, WEFT_F16, WEFT_I32};

typedef struct {
    kind kind;
    weft_dtype dtype;
    int64_t rows, cols; /* rows of pieces; rows and columns of norms; items of head_dim */
    int64_t in, second;  /* elements into the region of the dtype */
    int64_t k;
    size_t out, out2;    /* bytes into the arena */
    int skew[WEFT_PEER_MAX];
    float want_factor;
} call;

/* What a member has. Every other one may read `host`. */
typedef struct {
    char *host[REGIONS], *device[REGIONS];
    char *arena, *result;
    uint64_t random;
} store;

static peer_member members[WEFT_PEER_MAX];
static store stores[WEFT_PEER_MAX];
static call calls[CALLS];
static int size, replays;
static long done_calls[KINDS], failures;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint32_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    uint32_t x = (uint32_t)(((*state >> 18) ^ *state) >> 27), r = (uint32_t)(*state >> 59);
    return x >> r | x << (-r & 31);
}

static int region_of(weft_dtype dtype) { return dtype == WEFT_F32 ? 0 : dtype == WEFT_BF16 ? 1 : dtype == WEFT_F16 ? 2 : 3; }
static size_t bytes_of(weft_dtype dtype) { return weft_dtype_size(dtype); }

static void fill(peer_member *m)
{
    store *s = &stores[m->peer.rank];
    m->context = s;
    s->random = 77 + (uint64_t)m->peer.rank;
    s->result = malloc(ARENA);
    peer_must(cudaMalloc((void **)&s->arena, ARENA), "device memory");
    for (int r = 0; r < REGIONS; r++) {
        size_t bytes = REGION * bytes_of(dtypes[r]);
        s->host[r] = malloc(bytes);
        for (int64_t i = 0; i < REGION; i++) {
            float x = ((float)draw(&s->random) + (float)draw(&s->random)) * 0x1p-31f - 2.0f;
            if (dtypes[r] == WEFT_I32) ((int32_t *)s->host[r])[i] = (int32_t)draw(&s->random);
            else weft_store_f32(s->host[r], dtypes[r], i, x);
        }
        peer_must(cudaMalloc((void **)&s->device[r], bytes), "device memory");
        peer_must(cudaMemcpy(s->device[r], s->host[r], bytes, cudaMemcpyHostToDevice), "copy");
    }
}

/* ---- what to call ---- */

static int64_t a_count(uint64_t *state, int64_t most)
{
    static const int64_t odd[] = {0, 1, 2, 3, 5, 7, 31, 127, 1023, 1024, 1025, 4095, 4096, 4097};
    int64_t n = draw(state) % 3 == 0 ? odd[draw(state) % 14] : draw(state) % 4 == 0 ? most - draw(state) % 3 : 1 + draw(state) % 9000;
    return n < most ? n : most;
}

static void shape_call(call *c, uint64_t *state)
{
    int64_t each = CAPACITY * 8 / (int64_t)bytes_of(c->dtype);
    c->rows = 1;
    switch (c->kind) {
    case SCATTER:
    case GATHER:
    case ALL_TO_ALL:
        if (draw(state) % 2 && c->kind != ALL_TO_ALL) c->rows = 1 + draw(state) % 9;
        c->cols = a_count(state, (each < REGION / 2 / size ? each : REGION / 2 / size) / c->rows);
        break;
    case LINEAR: /* rows: tokens, cols: n, second: w; k in whole 16 bytes */
        c->dtype = draw(state) % 2 ? WEFT_BF16 : WEFT_F16;
        c->rows = 1 + draw(state) % 8;
        c->cols = 4 * (1 + draw(state) % 100);
        c->k = 8 * (1 + draw(state) % 40);
        break;
    case GROUP_NORM:
        c->cols = draw(state) % 2 ? 512 : 1 + draw(state) % 700;
        c->rows = 1 + draw(state) % (draw(state) % 4 ? 8 : 200);
        break;
    case DCP:
    case DCP_MERGE:
        c->cols = draw(state) % 2 ? 128 : 1 + draw(state) % 256;
        c->rows = 1 + draw(state) % (CAPACITY / ((c->cols + 1) / 2 + 1) > 40 ? 40 : CAPACITY / ((c->cols + 1) / 2 + 1));
        break;
    default: c->cols = a_count(state, each);
    }
}

static void draw_calls(uint64_t *state)
{
    size_t at = 0;
    for (int i = 0; i < CALLS; i++) {
        call *c = &calls[i];
        c->kind = (kind)(draw(state) % KINDS);
        c->dtype = dtypes[draw(state) % (c->kind >= GROUP_NORM ? 3 : REGIONS)];
        shape_call(c, state);
        int aligned = draw(state) % 2 || c->kind == LINEAR;
        c->in = draw(state) % (REGION / 4) / 16 * 16 + (aligned ? 0 : draw(state) % 8);
        c->second = REGION / 2 + draw(state) % (REGION / 4) / 16 * 16;
        for (int m = 0; m < WEFT_PEER_MAX; m++) c->skew[m] = aligned ? 0 : (int)(draw(state) % 5);
        size_t room = ((size_t)(c->rows * c->cols * size) * 4 + 4096 + 511) & ~(size_t)511;
        c->out = at + (aligned ? 0 : draw(state) % 4 * (c->kind == DCP ? sizeof(float) : bytes_of(c->dtype)));
        c->out2 = at + room;
        at += 2 * room;
        if (at > ARENA) i--, at -= 2 * room; /* draw a smaller one */
    }
}

/* ---- running them ---- */

static void sleep_on_stream(void *us) { usleep((unsigned)(uintptr_t)us); }

static weft_status start(const peer_member *m, const call *c)
{
    const store *s = m->context;
    int64_t n = c->rows * c->cols, k = region_of(c->dtype), element = (int64_t)bytes_of(c->dtype);
    char *in = s->device[k] + (c->in + c->skew[m->peer.rank]) * element, *second = s->device[k] + c->second * element;
    char *out = s->arena + c->out, *out2 = s->arena + c->out2;
    weft_peer_args a = {.in = in, .out = out, .count = n, .piece = c->cols, .dtype = c->dtype, .max = c->kind == MAX};
    switch (c->kind) {
    case SUM_IN_PLACE:
        peer_must(cudaMemcpyAsync(out, in, (size_t)(n * element), cudaMemcpyDeviceToDevice, m->stream), "copy");
        a.in = out;
        return weft_peer_sum(&m->peer, &a, m->stream);
    case SCATTER:
        a.in_member_stride = c->cols, a.in_row_stride = c->cols * size;
        return weft_peer_sum(&m->peer, &a, m->stream);
    case GATHER:
        a.in_row_stride = c->cols, a.out_member_stride = c->cols, a.out_row_stride = c->cols * size;
        return weft_peer_move(&m->peer, &a, m->stream);
    case ALL_TO_ALL:
        a.in_member_stride = a.out_member_stride = c->cols;
        return weft_peer_move(&m->peer, &a, m->stream);
    case LINEAR: {
        weft_linear_args l = {.x = in, .w = second, .y = out, .tokens = c->rows, .n = c->cols, .k = c->k, .x_stride = c->k, .w_stride = c->k,
                              .y_stride = c->cols, .x_dtype = c->dtype, .w_dtype = c->dtype, .y_dtype = c->dtype};
        int alone = (c->in + m->peer.rank) % 3 == 0; /* some members take the way round */
        if (!alone && weft_peer_linear_fits(&m->peer, &l)) return weft_peer_linear(&m->peer, &l, m->stream);
        if (!alone && m->peer.blocks > 64 && failures++ < 20) printf("a product does not fit: %lld x %lld\n", (long long)l.n, (long long)l.k);
        WEFT_TRY(weft_linear_cuda(&l, m->stream));
        a.in = out, a.piece = n;
        return weft_peer_sum(&m->peer, &a, m->stream);
    }
    case GROUP_NORM: { /* q of cols, k of half */
        int64_t half = c->cols / 2, width = c->cols + half;
        weft_group_norm_args q = {.x = in, .gain = second, .y = out, .rows = c->rows, .cols = c->cols, .x_stride = width, .y_stride = c->cols,
                                  .world = size, .eps = 1e-6f, .dtype = c->dtype, .gain_dtype = c->dtype}, both[2] = {q, q};
        both[1].x = in + c->cols * element, both[1].y = out2, both[1].cols = both[1].y_stride = half;
        return weft_peer_group_norm(&m->peer, both, 2, m->stream);
    }
    case DCP:
    case DCP_MERGE: {
        weft_peer_dcp_args d = {.partial = in, .lse = (float *)(s->device[0] + c->second * 4), .out = out, .lse_out = (float *)out2,
                                .tokens = c->rows, .heads = 1, .dim = c->cols, .dtype = c->dtype};
        if (c->rows % 2 == 0) d.tokens /= 2, d.heads = 2;
        if (c->kind == DCP_MERGE) d.suffix = second, d.suffix_lse = (float *)(s->device[0] + c->second * 4 + 64);
        return weft_peer_dcp(&m->peer, &d, m->stream);
    }
    default: return weft_peer_sum(&m->peer, &a, m->stream);
    }
}

/* ---- what it must give ---- */

static float element(int member, const call *c, int64_t base, int64_t i)
{
    return weft_load_f32(stores[member].host[region_of(c->dtype)], c->dtype, base + i);
}
static float input(int member, const call *c, int64_t i) { return element(member, c, c->in + c->skew[member], i); }

static float total(const call *c, int64_t i)
{
    float sum = input(0, c, i);
    for (int m = 1; m < size; m++) {
        float x = input(m, c, i);
        sum = c->kind != MAX ? sum + x : x > sum ? x : sum;
    }
    return sum;
}

static int32_t total_int(const call *c, int64_t i)
{
    const int32_t *x = (const int32_t *)stores[0].host[3] + c->in + c->skew[0];
    int32_t sum = x[i];
    for (int m = 1; m < size; m++) {
        x = (const int32_t *)stores[m].host[3] + c->in + c->skew[m];
        sum = c->kind != MAX ? (int32_t)((uint32_t)sum + (uint32_t)x[i]) : x[i] > sum ? x[i] : sum;
    }
    return sum;
}

static int equal_total(const call *c, const char *out, int64_t i, int64_t from)
{
    char want[4];
    if (c->dtype == WEFT_I32) return ((const int32_t *)out)[i] == total_int(c, from);
    weft_store_f32(want, c->dtype, 0, total(c, from));
    return memcmp(want, out + i * (int64_t)bytes_of(c->dtype), bytes_of(c->dtype)) == 0;
}

static int moved(const call *c, int rank, const char *out)
{
    size_t e = bytes_of(c->dtype), piece = (size_t)c->cols * e;
    for (int m = 0; m < size; m++)
        for (int64_t r = 0; r < c->rows; r++) {
            int64_t from = c->kind == GATHER ? r * c->cols : rank * c->cols;
            const char *want = stores[m].host[region_of(c->dtype)] + (size_t)(c->in + c->skew[m] + from) * e;
            size_t to = c->kind == GATHER ? (size_t)(r * size + m) * piece : (size_t)m * piece;
            if (memcmp(want, out + to, piece) != 0) return 0;
        }
    return 1;
}

static int near(const void *got, weft_dtype dtype, int64_t i, double want, double scale)
{
    double x = weft_load_f32(got, dtype, i), slack = dtype == WEFT_F32 ? 2e-5 : dtype == WEFT_F16 ? 2e-3 : 1.6e-2;
    return fabs(x - want) <= slack * (fabs(want) + scale);
}

static int linear_agrees(const call *c, const char *y)
{
    for (int64_t t = 0; t < c->rows; t++)
        for (int64_t i = 0; i < c->cols; i++) {
            double want = 0;
            for (int m = 0; m < size; m++)
                for (int64_t j = 0; j < c->k; j++) want += (double)input(m, c, t * c->k + j) * element(m, c, c->second, i * c->k + j);
            if (!near(y, c->dtype, t * c->cols + i, want, sqrt((double)c->k))) return 0;
        }
    return 1;
}

static int group_norm_agrees(const call *c, int rank, const char *y, int64_t first, int64_t cols, int64_t width)
{
    for (int64_t r = 0; r < c->rows; r++) {
        double var = 0;
        for (int m = 0; m < size; m++)
            for (int64_t i = 0; i < cols; i++) var += pow(input(m, c, r * width + first + i), 2) / (double)cols;
        double factor = 1 / sqrt(var / size + 1e-6);
        for (int64_t i = 0; i < cols; i++)
            if (!near(y, c->dtype, r * cols + i, input(rank, c, r * width + first + i) * factor * element(rank, c, c->second, i), 0.01)) return 0;
    }
    return 1;
}

static int exchange_agrees(const call *c, int rank, const char *out, const char *lse_out)
{
    int64_t heads = c->rows % 2 == 0 ? 2 : 1;
    int merge = c->kind == DCP_MERGE;
    for (int64_t item = 0; item < c->rows; item++) {
        int64_t from = item / heads * heads * size + rank * heads + item % heads;
        double z = 0, rest = merge ? exp(weft_load_f32(stores[rank].host[0], WEFT_F32, c->second + 16 + item)) : 0;
        for (int m = 0; m < size; m++) z += exp(weft_load_f32(stores[m].host[0], WEFT_F32, c->second + from));
        for (int64_t i = 0; i < c->cols; i++) {
            double y = 0;
            for (int m = 0; m < size; m++)
                y += exp(weft_load_f32(stores[m].host[0], WEFT_F32, c->second + from)) * input(m, c, from * c->cols + i);
            if (merge) y += rest * element(rank, c, c->second, item * c->cols + i);
            if (!near(out, merge ? c->dtype : WEFT_F32, item * c->cols + i, y / (z + rest), 0.1)) return 0;
        }
        if (!near(lse_out, WEFT_F32, item, log(z + rest), 0.1)) return 0;
    }
    return 1;
}

static int agrees(const call *c, int rank, const char *result)
{
    const char *out = result + c->out, *out2 = result + c->out2;
    int64_t n = c->rows * c->cols;
    switch (c->kind) {
    case GATHER:
    case ALL_TO_ALL: return moved(c, rank, out);
    case LINEAR: return linear_agrees(c, out);
    case GROUP_NORM:
        return group_norm_agrees(c, rank, out, 0, c->cols, c->cols + c->cols / 2) &&
               group_norm_agrees(c, rank, out2, c->cols, c->cols / 2, c->cols + c->cols / 2);
    case DCP:
    case DCP_MERGE: return exchange_agrees(c, rank, out, out2);
    default:
        for (int64_t i = 0; i < n; i++) {
            int64_t from = c->kind == SCATTER ? (i / c->cols * size + rank) * c->cols + i % c->cols : i;
            if (!equal_total(c, out, i, from)) return 0;
        }
        return 1;
    }
}

static void compare(const peer_member *m, const char *how)
{
    store *s = m->context;
    peer_must(cudaStreamSynchronize(m->stream), "the calls"); /* a copy would wait within the driver, where the other members must get in */
    peer_must(cudaMemcpyAsync(s->result, s->arena, ARENA, cudaMemcpyDeviceToHost, m->stream), "copy");
    peer_must(cudaStreamSynchronize(m->stream), "the calls");
    for (int i = 0; i < CALLS; i++) {
        int fine = agrees(&calls[i], m->peer.rank, s->result) && m->peer.halt[1] == 0;
        pthread_mutex_lock(&lock);
        done_calls[calls[i].kind]++;
        if (!fine && failures++ < 20)
            printf("%s (%s): call %d, %s, rows %lld of %lld, member %d of %d\n", names[calls[i].kind], how, i, weft_dtype_name(calls[i].dtype),
                   (long long)calls[i].rows, (long long)calls[i].cols, m->peer.rank, size);
        pthread_mutex_unlock(&lock);
    }
}

static void launch_all(peer_member *m, int delays)
{
    store *s = m->context;
    for (int i = 0; i < CALLS; i++) {
        uint32_t dice = delays ? draw(&s->random) % 16 : 9;
        if (dice == 0) usleep(draw(&s->random) % 300);
        if (dice == 1) peer_must(cudaLaunchHostFunc(m->stream, sleep_on_stream, (void *)(uintptr_t)(draw(&s->random) % 200)), "delay");
        peer_must_run(start(m, &calls[i]));
    }
}

static void poison(const peer_member *m)
{
    peer_must(cudaMemsetAsync(((store *)m->context)->arena, 0xa5, ARENA, m->stream), "poison");
}

static void *batch(void *context)
{
    peer_member *m = context;
    cudaGraph_t graph;
    cudaGraphExec_t run;
    poison(m);
    launch_all(m, 1);
    compare(m, "one by one");
    peer_must(cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeThreadLocal), "capture");
    launch_all(m, 1);
    peer_must(cudaStreamEndCapture(m->stream, &graph), "capture");
    peer_must(cudaGraphInstantiate(&run, graph, 0), "graph");
    for (int i = 0; i < replays; i++) {
        if (i == replays - 1) poison(m);
        peer_must(cudaGraphLaunch(run, m->stream), "graph");
        if (i % 7 == 3) peer_must_run(start(m, &calls[i % CALLS])); /* between replays */
    }
    compare(m, "replayed");
    peer_must(cudaGraphExecDestroy(run), "graph");
    peer_must(cudaGraphDestroy(graph), "graph");
    return NULL;
}

/* A number from `least` to `most`; -1: the text is none. */
static int number(const char *text, int least, int most)
{
    char *end;
    long n = strtol(text, &end, 10);
    return end != text && *end == '\0' && n >= least && n <= most ? (int)n : -1;
}

static int check(int members_asked, int batches)
{
    uint64_t state = 5;
    size = members_asked;
    replays = 25;
    peer_open(members, size, CAPACITY, fill);
    for (int b = 0; b < batches; b++) {
        draw_calls(&state);
        peer_run(members, size, batch);
    }
    peer_close(members, size);
    for (int k = 0; k < KINDS; k++) printf("%-20s %7ld results compared on %d members\n", names[k], done_calls[k], size);
    printf("%s\n", failures == 0 ? "all agree" : "DIFFERENCES");
    return failures != 0;
}

int peer_time(void), peer_step_check(int only), peer_step_time(void);

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    int help = strcmp(what, "-h") == 0 || strcmp(what, "--help") == 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc == 2 && strcmp(what, "time") == 0) return peer_time();
    if (argc == 2 && strcmp(what, "step-time") == 0) return peer_step_time();
    if (argc == 2 && strcmp(what, "step") == 0) return peer_step_check(-1);
    if (argc == 3 && strcmp(what, "step") == 0 && number(argv[2], 0, 1000) >= 0) return peer_step_check(number(argv[2], 0, 1000));
    if (argc <= 4 && strcmp(what, "check") == 0) {
        int asked = argc > 2 ? number(argv[2], 2, WEFT_PEER_MAX) : 2, batches = argc > 3 ? number(argv[3], 1, 1000000) : 6;
        if (asked > 0 && batches > 0) return check(asked, batches);
    }
    fprintf(help ? stdout : stderr, "usage: weft_gpu_peer check [MEMBERS (2 to %d) [BATCHES]] | time | step [SHAPE] | step-time\n", WEFT_PEER_MAX);
    return help ? 0 : 2;
}
