/* kernels/cuda/step_launch.cu - the recorder (weft_fused.h): lists into launches. */
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/linear_batch.cuh"
#include "kernels/cuda/linear_fp8_run.cuh"
#include "kernels/cuda/long_record.cuh"
#include "kernels/cuda/step_list.cuh"
#include "kernels/cuda/tensor_map.cuh"

using namespace weft;

enum { HEAD_BYTES = 256, INSTRUCTIONS = 1200, STREAMS = 640, LEAST_PRODUCTS = 3, IN_FLIGHT = 3 };
/* Launches of fp8 products: where in the head their counters are; most products and instructions of attention; a ring's places
 * and pieces on their way. */
enum { RUN_PRODUCTS_AT = 128, RUN_ATTENDED_AT = 192, RUN_JOBS = 640, RUN_ATTENDS = 320, RUN_LEAST = 2, RUN_IN_FLIGHT = 6 };
static const size_t LIST_AT = HEAD_BYTES + STREAMS * sizeof(StepStream);
static const size_t PACKETS_AT = (LIST_AT + INSTRUCTIONS * sizeof(StepInstruction) + 127) / 128 * 128;
static const size_t JOBS_AT = PACKETS_AT + STEP_PACKETS * sizeof(uint4);
static_assert(HEAD_BYTES % 128 == 0 && JOBS_AT % 128 == 0, "tensor maps");
static const size_t ATTENDS_AT = JOBS_AT + RUN_JOBS * sizeof(Fp8Job);
static const size_t DRAWN_AT = ATTENDS_AT + RUN_ATTENDS * sizeof(Fp8Attend);
static_assert(DRAWN_AT + RUN_JOBS * sizeof(unsigned) <= WEFT_FUSED_BYTES, "memory of a recorder");

struct weft_fused {
    StepList list;
    LongPending pending; /* where the list takes nothing */
    char *memory; /* device: arrivals, streams, instructions, packets, jobs, attention */
    void *stream;
    StepInstruction *taken, *ready; /* host; ready: with waits, as the device gets them */
    StepStream *streams;
    Fp8Job *jobs;
    Fp8Attend *attends;
    int num_ready, num_streams, num_jobs, num_attends;
    weft_status failure; /* the first of a flush */
    char why[256];
};

static void release(weft_fused *r)
{
    free(r->taken);
    free(r->ready);
    free(r->streams);
    free(r->jobs);
    free(r->attends);
    free(r);
}

extern "C" weft_status weft_fused_begin(weft_fused **out, weft_cuda_context *context, void *memory, int all, void *stream)
{
    weft_fused *r = (weft_fused *)calloc(1, sizeof *r);
    if (r == NULL) return weft_fail(WEFT_MEMORY, "no memory for a recorder");
    int device = 0;
    (void)cudaGetDevice(&device);
    r->list.context = context;
    r->list.blocks = context->sms;
    r->list.most_tokens = all ? (int)STEP_TOKENS : 1;
    r->list.batch = all == 0;
    r->pending.all = all != 0;
    r->memory = (char *)memory;
    r->stream = stream;
    if (memory != NULL && step_possible(device, r->list.blocks) && fp8_run_possible()) {
        r->taken = (StepInstruction *)malloc(INSTRUCTIONS * sizeof *r->taken);
        r->ready = (StepInstruction *)malloc(INSTRUCTIONS * sizeof *r->ready);
        r->streams = (StepStream *)aligned_alloc(128, STREAMS * sizeof *r->streams);
        r->jobs = (Fp8Job *)aligned_alloc(128, RUN_JOBS * sizeof *r->jobs);
        r->attends = (Fp8Attend *)malloc(RUN_ATTENDS * sizeof *r->attends);
        if (r->taken == NULL || r->ready == NULL || r->streams == NULL || r->jobs == NULL || r->attends == NULL) {
            release(r);
            return weft_fail(WEFT_MEMORY, "no memory for a recorder");
        }
        r->list.list = r->taken;
        r->list.capacity = INSTRUCTIONS;
    }
    *out = r;
    return WEFT_OK;
}

static void note_failure(weft_fused *r, weft_status status)
{
    if (status == WEFT_OK || r->failure != WEFT_OK) return;
    r->failure = status;
    snprintf(r->why, sizeof r->why, "%s", weft_error_message());
}

extern "C" int weft_fused_take(weft_fused *r, weft_fused_op op, const void *args)
{
    if (r->list.capacity == 0) {
        weft_status status = WEFT_OK;
        const bool taken = r->pending.take(op, args, r->stream, &status);
        note_failure(r, status);
        return taken;
    }
    switch (op) {
    case WEFT_FUSED_embedding: return r->list.take((const weft_embedding_args *)args);
    case WEFT_FUSED_linear: return r->list.take((const weft_linear_args *)args);
    case WEFT_FUSED_rms_norm: return r->list.take((const weft_rms_norm_args *)args);
    case WEFT_FUSED_rope: return r->list.take((const weft_rope_args *)args);
    case WEFT_FUSED_kv_write: return r->list.take((const weft_kv_write_args *)args);
    case WEFT_FUSED_attention: return r->list.take((const weft_attention_args *)args);
    case WEFT_FUSED_silu_mul: return r->list.take((const weft_silu_mul_args *)args);
    case WEFT_FUSED_add: return r->list.take((const weft_add_args *)args);
    case WEFT_FUSED_gather_rows: return r->list.take((const weft_gather_rows_args *)args);
    case WEFT_FUSED_linear_over: return r->list.take((const weft_linear_over_args *)args);
    default: return 0;
    }
}

/* What becomes a batch_product. */
static bool is_batch(const StepInstruction *in)
{
    if (in->kind != STEP_PRODUCT || in->product.sum.group != 0) return false;
    const StepProduct &p = in->product;
    return batch_pays(&p.linear, true) && batch_fits(&p.linear);
}

/* A product of fp8 weights and all that joins it, in one launch. */
static Fp8Joins joins_of(const StepProduct *p)
{
    Fp8Joins joins = {};
    if (p->has_norm) joins.norm = &p->norm;
    if (p->pairs == PAIRS_SILU) joins.silu = &p->silu;
    if (p->pairs == PAIRS_ROPE) joins.rope = &p->rope;
    if (p->has_kv) joins.pages = &p->kv;
    joins.residual = p->residual, joins.residual_stride = p->residual_stride;
    return joins;
}
static weft_status launch_fp8(const StepProduct *p, void *stream)
{
    if (!fp8_product(&p->linear, joins_of(p), stream)) return weft_fail(WEFT_CUDA, "linear: the driver makes no map of the weights for the copy engine");
    return launched("linear");
}

/* The product in front of the norm in front of this one, if those two share the norm; *norm: which. */
static const StepInstruction *shares_norm(const StepList *list, const StepInstruction *in, const weft_rms_norm_args **norm)
{
    const StepInstruction *first = in - 1;
    *norm = &in->product.norm;
    if (!is_batch(in) || first < list->list) return NULL;
    if (!in->product.has_norm) {
        if (first->kind != STEP_NORM || first == list->list) return NULL;
        *norm = &first->norm;
        first--;
    }
    if (!is_batch(first) || first->product.pairs != PAIRS_NONE || first->product.input.group != 0) return NULL;
    return batch_norm_fits(&first->product.linear, *norm, &in->product.linear) ? first : NULL;
}

/* The norm behind a product that it shares with the next one, or NULL. */
static const weft_rms_norm_args *norm_behind(const StepList *list, const StepInstruction *in)
{
    const weft_rms_norm_args *norm = NULL;
    for (const StepInstruction *next = in + 1; next <= in + 2 && next < list->list + list->count; next++)
        if (next->kind == STEP_PRODUCT) return shares_norm(list, next, &norm) == in ? norm : NULL;
    return NULL;
}

/* Whether what follows this product of q, k and v, rotation and pages, is done by the attention behind it. */
static bool rotates_later(const StepList *list, const StepInstruction *in)
{
    const StepProduct &p = in->product;
    if (in->kind != STEP_PRODUCT || p.pairs != PAIRS_ROPE || !p.has_kv || p.linear.w_dtype == WEFT_F8E4M3) return false;
    if (in + 1 == list->list + list->count || in[1].kind != STEP_ATTENTION || (is_batch(in) && batch_rotates(&p.linear, &p.rope, &p.kv))) return false;
    return attention_rotates(&p.rope, &p.kv, &in[1].attention);
}

/* A product, and what joins it. */
static weft_status launch_product(const StepList *list, const StepInstruction *in, void *stream)
{
    const StepProduct *p = &in->product;
    if (p->linear.w_dtype == WEFT_F8E4M3) return launch_fp8(p, stream);
    const bool batch = is_batch(in);
    const weft_rms_norm_args *front = NULL;
    const StepInstruction *before = shares_norm(list, in, &front);
    if (p->has_norm && before == NULL) WEFT_TRY(batch ? norm_before_batch(&p->norm, stream) : weft_rms_norm_cuda(&p->norm, stream));
    if (p->sum.group != 0) return weft_peer_linear(&list->peers[p->sum.group - 1], &p->linear, stream);
    const bool later = rotates_later(list, in);
    BatchJoins joins = {};
    if (p->pairs == PAIRS_SILU) joins.silu = &p->silu;
    if (p->pairs == PAIRS_ROPE && !later) joins.rope = &p->rope;
    if (p->has_kv && !later) joins.pages = &p->kv;
    joins.norm = norm_behind(list, in);
    if (before != NULL) joins.front = front, joins.before = &before->product.linear;
    if (batch && batch_product(&p->linear, joins, stream)) return launched("linear");
    joins.silu = NULL, joins.rope = NULL, joins.pages = NULL;
    if (batch && batch_product(&p->linear, joins, stream)) WEFT_TRY(launched("linear"));
    else if (joins.norm != NULL || before != NULL) return weft_fail(WEFT_CUDA, "linear: no map for the tensor copy engine");
    else WEFT_TRY(weft_linear_cuda(&p->linear, stream));
    if (later) return WEFT_OK;
    if (p->pairs == PAIRS_SILU) WEFT_TRY(weft_silu_mul_cuda(&p->silu, stream));
    if (p->has_kv && rope_into_pages(&p->rope, &p->kv, stream)) return launched("rope");
    if (p->pairs == PAIRS_ROPE) WEFT_TRY(weft_rope_cuda(&p->rope, stream));
    return p->has_kv ? weft_kv_write_cuda(&p->kv, stream) : WEFT_OK;
}

/* The operations of an instruction, one by one. */
static weft_status launch_alone(const StepList *list, const StepInstruction *in, void *stream)
{
    switch (in->kind) {
    case STEP_PRODUCT: return launch_product(list, in, stream);
    case STEP_ATTENTION:
        if (in == list->list || !rotates_later(list, in - 1)) return weft_attention_cuda(&in->attention, stream);
        rotate_and_attend(&in[-1].product.rope, &in->attention, stream);
        return launched("attention");
    case STEP_EMBEDDING: return weft_embedding_cuda(&in->embedding, stream);
    case STEP_GATHER: return weft_gather_rows_cuda(&in->gather, stream);
    case STEP_NORM: {
        const weft_rms_norm_args *norm = NULL;
        if (in + 1 < list->list + list->count && in[1].kind == STEP_PRODUCT && !in[1].product.has_norm && shares_norm(list, in + 1, &norm) != NULL) return WEFT_OK;
        if (in + 1 < list->list + list->count && is_batch(in + 1)) return norm_before_batch(&in->norm, stream);
        return weft_rms_norm_cuda(&in->norm, stream);
    }
    case STEP_SILU: return weft_silu_mul_cuda(&in->silu, stream);
    case STEP_ADD: return weft_add_cuda(&in->add, stream);
    case STEP_ROPE: return weft_rope_cuda(&in->rope, stream);
    case STEP_KV_WRITE: return weft_kv_write_cuda(&in->kv, stream);
    case STEP_SUM: /* the product has done it */
    case STEP_END: break;
    }
    return WEFT_OK;
}

static bool stream_of(const StepProduct *p, StepStream *s)
{
    s->tiles = p->tiles;
    s->pieces = (int)div_up(2 * p->linear.k, STEP_PIECE);
    s->half = p->half;
    s->first = p->first;
    const int64_t stride = 2 * p->linear.w_stride, half = p->half, columns = 2 * p->linear.k / 128;
    if (half == 0) return bytes_map(&s->map, p->linear.w, {128, p->linear.n, 1, 1, columns}, {stride, stride, stride, 128}, {128, 16, 1, 1, STEP_PIECE / 128});
    return bytes_map(&s->map, p->linear.w, {128, half, 2, p->linear.n / (2 * half), columns}, {stride, half * stride, 2 * half * stride, 128},
                      {128, 8, 2, 1, STEP_PIECE / 128});
}

static void widen_needs(StepProgram *program, const StepNeeds &n)
{
    program->x_bytes = (int)most(program->x_bytes, n.x);
    program->held_bytes = (int)most(program->held_bytes, n.held);
    program->cos_sin_bytes = (int)most(program->cos_sin_bytes, n.cos_sin);
    program->sums_bytes = (int)most(program->sums_bytes, n.sums);
}

static StepGroup group_for(const weft_peer &p, int calls)
{
    StepGroup g = {};
    g.own = (PeerPacket *)p.inbox[p.rank], g.other = (PeerPacket *)p.inbox[1 - p.rank];
    g.counters = p.counters, g.halt = p.halt;
    g.capacity = p.capacity, g.patience = p.patience;
    g.rank = p.rank, g.calls = calls;
    return g;
}

/* While one block waits for another GPU, the others wait for it. */
static uint64_t patience_of(const StepList &list)
{
    const uint64_t own = 30ull * 1000000000;
    uint64_t most = 0;
    for (int g = 0; g < list.num_groups; g++)
        if ((uint64_t)list.peers[g].patience > most) most = (uint64_t)list.peers[g].patience;
    return most + own; /* no overflow: patience has 63 bits */
}

/* The list as one launch; *done says whether it is worth it and fits. */
static weft_status launch_together(weft_fused *r, bool *done)
{
    StepList &list = r->list;
    int products = 0;
    *done = false;
    for (int i = 0; i < list.count; i++) {
        if (list.list[i].kind != STEP_PRODUCT) continue;
        const weft_linear_args &a = list.list[i].product.linear;
        if (a.tokens > list.most_tokens || a.w_dtype == WEFT_F8E4M3) return WEFT_OK;
        products++;
    }
    if (products < LEAST_PRODUCTS || r->num_streams + products > STREAMS) return WEFT_OK;
    const int made = list.arrange(r->ready + r->num_ready, INSTRUCTIONS - r->num_ready);
    if (made < 0) return WEFT_OK;
    StepProgram program = {};
    program.list = (const StepInstruction *)(r->memory + LIST_AT) + r->num_ready;
    program.streams = (const StepStream *)(r->memory + HEAD_BYTES) + r->num_streams;
    program.count = made;
    program.arrivals = (unsigned long long *)r->memory;
    program.counters = list.context->counters;
    program.partial = list.context->workspace;
    program.packets = (uint4 *)(r->memory + PACKETS_AT);
    program.x_bytes = sizeof(StepAttention<bf16>);
    program.sums_bytes = 128;
    program.num_groups = list.num_groups;
    for (int g = 0; g < list.num_groups; g++) program.groups[g] = group_for(list.peers[g], list.calls[g]);
    program.patience = patience_of(list);
    int dealt = 0;
    for (int i = 0; i < made; i++) {
        StepInstruction *in = &r->ready[r->num_ready + i];
        if (in->kind != STEP_PRODUCT) continue;
        in->product.first = dealt;
        dealt = (dealt + in->product.tiles) % list.blocks; /* who has one tile less here begins with one more */
        if (!stream_of(&in->product, &r->streams[r->num_streams + program.num_streams])) return WEFT_OK;
        program.num_streams++;
        widen_needs(&program, list.needs_of(&in->product));
    }
    const size_t other = (size_t)program.x_bytes + (size_t)program.held_bytes + (size_t)program.cos_sin_bytes + (size_t)program.sums_bytes;
    if (other + 2 * STEP_TEAMS * STEP_PIECE_BYTES > step_room()) return WEFT_OK; /* fewer places, and nothing may be on its way (step_feed.cuh) */
    r->num_ready += made;
    r->num_streams += program.num_streams;
    program.places = (int)least((int64_t)((step_room() - other) / STEP_PIECE_BYTES), STEP_MOST_PLACES);
    program.in_flight = (int)least(IN_FLIGHT, program.places - (2 * STEP_TEAMS - 1));
    step_launch(program, list.blocks, list.dtype, r->stream);
    *done = true;
    return launched("a step in one launch");
}

/* A block's residual is read ahead of the wait for the others: not what they write just before it. at: the last job so far, or NULL;
 * between: attention behind it, or NULL. */
static bool residual_waits(const Fp8Job &job, const Fp8Job *at, const weft_attention_args *between)
{
    const int64_t bytes = job.a.n * 2;
    if (job.residual == NULL) return false;
    if (between != NULL && overlap(job.residual, bytes, between->out, between->num_heads * between->head_dim_v * 2)) return true;
    if (at == NULL) return false;
    return overlap(job.residual, bytes, at->residual, at->a.n * 2) || overlap(job.residual, bytes, at->a.y, at->a.n * 2) ||
           (at->end == END_SILU && overlap(job.residual, bytes, at->silu.y, at->silu.cols * 2)) || (at->norm.cols > 0 && overlap(job.residual, bytes, at->norm.y, at->norm.cols * 2));
}

/* Attention directly behind the run's last product so far, or NULL. */
static const weft_attention_args *just_attended(const weft_fused *r, const Fp8Run *run)
{
    const Fp8Attend *last = run->num_attends > 0 ? &r->attends[r->num_attends + run->num_attends - 1] : NULL;
    return last != NULL && last->after == run->num_jobs ? &last->a : NULL;
}

/* What may stand in one launch of fp8 products, and is put into the recorder's lists behind what is there. */
static bool take_for_run(weft_fused *r, const StepInstruction *in, Fp8Run *run)
{
    if (in->kind == STEP_ATTENTION) {
        int parts = 0, rows = 0;
        if (r->num_attends + run->num_attends == RUN_ATTENDS || run->num_jobs == 0 || !fp8_run_takes(&in->attention, r->list.blocks, &parts, &rows)) return false;
        if (run->num_attends > 0 && (parts != run->parts || rows != run->rows)) return false;
        if (just_attended(r, run) != NULL) return false; /* packets of two differ by the products in front */
        run->parts = parts, run->rows = rows;
        Fp8Attend *attend = &r->attends[r->num_attends + run->num_attends++];
        memset(attend, 0, sizeof *attend);
        attend->a = in->attention;
        attend->after = run->num_jobs;
        return true;
    }
    if (in->kind != STEP_PRODUCT || in->product.linear.w_dtype != WEFT_F8E4M3 || r->num_jobs + run->num_jobs == RUN_JOBS) return false;
    const int number = r->num_jobs + run->num_jobs;
    Fp8Job *job = &r->jobs[number];
    if (!fp8_job(&in->product.linear, joins_of(&in->product), job) || !fp8_run_takes(*job)) return false;
    if (residual_waits(*job, run->num_jobs > 0 ? job - 1 : NULL, just_attended(r, run))) return false;
    job->attends = run->num_attends;
    job->drawn = (unsigned *)(r->memory + DRAWN_AT) + number;
    const int places = fp8_run_places(*job);
    run->places = run->num_jobs == 0 || places < run->places ? places : run->places;
    run->num_jobs++;
    return true;
}

/* As many instructions from number `from` on as can be one launch of fp8 products; *taken: how many, 0 where it is not worth it. */
static weft_status launch_run(weft_fused *r, int from, int *taken)
{
    Fp8Run run = {};
    int count = 0;
    while (from + count < r->list.count && take_for_run(r, &r->list.list[from + count], &run)) count++;
    *taken = 0;
    if (run.num_jobs < RUN_LEAST) return WEFT_OK;
    size_t input = 0;
    for (int i = 0; i < run.num_jobs; i++) {
        Fp8Job *job = &r->jobs[r->num_jobs + i];
        job->dealt = fp8_dealt(*job, run.places);
        input = (size_t)most((int64_t)input, fp8_run_input(*job));
    }
    run.jobs = (const Fp8Job *)(r->memory + JOBS_AT) + r->num_jobs;
    run.attends = (const Fp8Attend *)(r->memory + ATTENDS_AT) + r->num_attends;
    run.products = (unsigned long long *)(r->memory + RUN_PRODUCTS_AT);
    run.attended = (unsigned long long *)(r->memory + RUN_ATTENDED_AT);
    run.packets = (uint4 *)(r->memory + PACKETS_AT);
    run.in_flight = (int)least(RUN_IN_FLIGHT, run.places);
    run.patience = patience_of(r->list);
    if (run.num_attends == 0) run.parts = 1;
    r->num_jobs += run.num_jobs, r->num_attends += run.num_attends;
    fp8_run_launch(run, r->list.blocks, (int)(run.places * (size_t)FP8_PIECE_BYTES + input), r->stream);
    *taken = count;
    return launched("products in one launch");
}

/* The list in several launches. */
static weft_status launch_apart(weft_fused *r)
{
    for (int i = 0; i < r->list.count;) {
        int taken = 0;
        WEFT_TRY(launch_run(r, i, &taken));
        if (taken == 0) WEFT_TRY(launch_alone(&r->list, &r->list.list[i], r->stream));
        i += taken > 0 ? taken : 1;
    }
    return WEFT_OK;
}

extern "C" weft_status weft_fused_flush(weft_fused *r)
{
    bool done = false;
    weft_status status = r->pending.flush(r->stream);
    if (r->list.count > 0 && status == WEFT_OK) status = launch_together(r, &done);
    if (!done && status == WEFT_OK) status = launch_apart(r);
    r->list.count = r->list.num_groups = 0;
    note_failure(r, status);
    return status;
}

extern "C" weft_status weft_fused_end(weft_fused *r, int keep)
{
    cudaError_t error = cudaSuccess;
    if (keep && r->num_ready + r->num_jobs > 0) {
        /* On the stream: what had this memory before may still be running there. */
        cudaStream_t stream = (cudaStream_t)r->stream;
        error = cudaMemsetAsync(r->memory, 0, HEAD_BYTES, stream);
        if (error == cudaSuccess) error = cudaMemsetAsync(r->memory + PACKETS_AT, 0, STEP_PACKETS * sizeof(uint4), stream);
        if (error == cudaSuccess)
            error = cudaMemcpyAsync(r->memory + LIST_AT, r->ready, (size_t)r->num_ready * sizeof *r->ready, cudaMemcpyHostToDevice, stream);
        if (error == cudaSuccess)
            error = cudaMemcpyAsync(r->memory + HEAD_BYTES, r->streams, (size_t)r->num_streams * sizeof *r->streams, cudaMemcpyHostToDevice, stream);
        if (error == cudaSuccess) error = cudaMemcpyAsync(r->memory + JOBS_AT, r->jobs, (size_t)r->num_jobs * sizeof *r->jobs, cudaMemcpyHostToDevice, stream);
        if (error == cudaSuccess) error = cudaMemcpyAsync(r->memory + ATTENDS_AT, r->attends, (size_t)r->num_attends * sizeof *r->attends, cudaMemcpyHostToDevice, stream);
        if (error == cudaSuccess) error = cudaMemsetAsync(r->memory + DRAWN_AT, 0, RUN_JOBS * sizeof(unsigned), stream);
        maps_arrived(r->memory + HEAD_BYTES, r->num_streams, sizeof(StepStream), r->list.context, stream);
        maps_arrived(r->memory + JOBS_AT, r->num_jobs, sizeof(Fp8Job), r->list.context, stream);
        if (error == cudaSuccess) error = cudaGetLastError();
    }
    const weft_status failure = keep ? r->failure : WEFT_OK;
    if (failure != WEFT_OK) (void)weft_fail(failure, "%s", r->why);
    release(r);
    if (failure != WEFT_OK) return failure;
    return error == cudaSuccess ? WEFT_OK : failed("a step's list", error);
}
