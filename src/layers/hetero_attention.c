/* layers/hetero_attention.c - new keys into the cache, then attention the way the plan says. */
#include "layers/hetero_attention.h"

#include <inttypes.h>
#include <stdlib.h>
#include <time.h>

#include "layers/attention_parts.h"
#include "layers/context_exchange.h"
#include "layers/run.h"

struct weft_hetero_attention {
    weft_object object;
    weft_rank *rank;
    weft_group *context; /* NULL without context parallelism */
    weft_hetero_attention_options options;
    weft__attention_shape shape;
    int resharding;
    int output_heads;
    int slice; /* first kept head, counted from this rank's first */
    weft_kv_cache *cache;
    weft_hetero_attention_traffic traffic;
};

/* ---- creation ---- */

weft_status weft_hetero_attention_supports(const weft_plan *plan)
{
    const weft_axis in = plan->input, out = plan->output, context = plan->context;
    int plain = in.world_size == out.world_size && in.rank == out.rank;
    int resharding = context.world_size > 1 && out.world_size == in.world_size * context.world_size &&
                     out.rank == in.rank * context.world_size + context.rank;
    if ((plain || resharding) && plan->expert.world_size == 1 && plan->interleave >= 1) return WEFT_OK;
    char text[160];
    return weft_fail(WEFT_UNSUPPORTED, "cpu paged does not support layer parallel plan %s", weft_plan_describe(plan, text, sizeof text));
}

/* Ranks that gather queries attend for each other, so they must hold the same key head. */
static weft_status check_same_kv_head(const weft_hetero_attention_options *o)
{
    int world = o->plan.input.world_size, context = o->plan.context.world_size, total = o->total_num_kv_heads;
    int same = o->num_kv_heads == 1;
    if (same && total > 0) same = world % total == 0 && world / total % context == 0;
    if (same) return WEFT_OK;
    return weft_fail(WEFT_INVALID,
                     "context size %d without a smaller attention tensor size needs %d ranks with the same key head: tensor size must "
                     "be a multiple of key heads times context size, got %d ranks over %d key heads",
                     context, context, world, total > 0 ? total : o->num_kv_heads * world);
}

/* The rank's heads, where the totals are known, must be those that the plan gives it. */
static weft_status check_totals(const weft_hetero_attention_options *o)
{
    weft_head_layout layout;
    if (o->total_num_heads == 0 || o->total_num_kv_heads == 0) return WEFT_OK;
    WEFT_TRY(weft_head_layout_make(&layout, o->total_num_heads, o->total_num_kv_heads, &o->plan));
    if (layout.num_heads == o->num_heads && layout.num_kv_heads == o->num_kv_heads) return WEFT_OK;
    return weft_fail(WEFT_INVALID, "hetero_attention: %d heads and %d key heads over %d ranks are %d and %d on each, got %d and %d",
                     o->total_num_heads, o->total_num_kv_heads, o->plan.input.world_size, layout.num_heads, layout.num_kv_heads,
                     o->num_heads, o->num_kv_heads);
}

static void destroy(weft_object *object)
{
    weft_hetero_attention *attention = (weft_hetero_attention *)object;
    if (attention->context != NULL) weft_group_release(attention->context);
    WEFT_RELEASE(attention->cache);
    weft_object_release(&attention->rank->object);
    free(attention);
}

static weft_status find_group(weft_rank *rank, const weft_plan *plan, weft_group **out)
{
    weft_group *group;
    WEFT_TRY(weft_rank_group(rank, WEFT_GROUP_CONTEXT, plan->context.world_size, &group));
    if (weft_group_rank(group) != plan->context.rank)
        return weft_fail(WEFT_INVALID, "the plan has context rank %d, and this rank is number %d of %s", plan->context.rank,
                         weft_group_rank(group), weft_group_name(group));
    *out = weft_group_retain(group);
    return WEFT_OK;
}

weft_status weft_hetero_attention_create(weft_hetero_attention **out, weft_rank *rank, const weft_hetero_attention_options *options)
{
    const weft_plan *plan = &options->plan;
    WEFT_TRY(weft_hetero_attention_supports(plan));
    weft__attention_shape shape = {options->num_heads,   options->num_kv_heads,   options->head_size,
                                   options->v_head_size, options->sliding_window, options->scale};
    WEFT_TRY(weft__attention_shape_check(&shape, "hetero_attention"));
    WEFT_TRY(check_totals(options));
    if (options->kv_dtype != WEFT_F32 && options->kv_dtype != WEFT_BF16 && options->kv_dtype != WEFT_F16)
        return weft_fail(WEFT_UNSUPPORTED, "cpu paged keeps float32, bfloat16 or float16 keys, not %s", weft_dtype_name(options->kv_dtype));
    int size = plan->context.world_size, resharding = plan->output.world_size != plan->input.world_size;
    if (resharding && shape.num_heads % size != 0)
        return weft_fail(WEFT_INVALID, "%d heads do not divide over %d context ranks", shape.num_heads, size);
    if (size > 1 && !resharding) WEFT_TRY(check_same_kv_head(options));
    weft_group *context = NULL;
    if (size > 1) WEFT_TRY(find_group(rank, plan, &context));
    weft_hetero_attention *attention = calloc(1, sizeof *attention);
    if (attention == NULL) {
        if (context != NULL) weft_group_release(context);
        return weft_fail(WEFT_MEMORY, "no memory for an attention layer");
    }
    weft_object_init(&attention->object, destroy);
    attention->rank = WEFT_RETAIN(rank);
    attention->context = context;
    attention->options = *options;
    attention->shape = shape;
    attention->resharding = resharding;
    attention->output_heads = resharding ? shape.num_heads / size : shape.num_heads;
    attention->slice = resharding ? plan->context.rank * attention->output_heads : 0;
    *out = attention;
    return WEFT_OK;
}

/* ---- what others ask ---- */

weft_object *weft_hetero_attention_object(weft_hetero_attention *attention)
{
    return &attention->object;
}

const weft_hetero_attention_options *weft_hetero_attention_get_options(const weft_hetero_attention *attention)
{
    return &attention->options;
}

int weft_hetero_attention_output_heads(const weft_hetero_attention *attention)
{
    return attention->output_heads;
}

int weft_hetero_attention_output_first_head(const weft_hetero_attention *attention)
{
    return attention->options.plan.input.rank * attention->shape.num_heads + attention->slice;
}

weft_kv_cache_shape weft_hetero_attention_cache_shape(const weft_hetero_attention *attention)
{
    const weft_plan *plan = &attention->options.plan;
    return (weft_kv_cache_shape){
        .num_kv_heads = attention->shape.num_kv_heads,
        .head_dim = attention->shape.head_size,
        .head_dim_v = attention->shape.v_head_size,
        .dtype = attention->options.kv_dtype,
        .context = {plan->context.world_size, plan->context.rank, plan->interleave},
    };
}

weft_status weft_hetero_attention_bind_cache(weft_hetero_attention *attention, int64_t num_blocks, int64_t block_tokens)
{
    weft_kv_cache_shape shape = weft_hetero_attention_cache_shape(attention);
    WEFT_RELEASE(attention->cache); /* before the new one is made: both may not fit */
    return weft_kv_cache_create(&attention->cache, attention->rank->device_memory, &shape, num_blocks, block_tokens);
}

const weft_kv_cache *weft_hetero_attention_cache(const weft_hetero_attention *attention)
{
    return attention->cache;
}

weft_hetero_attention_traffic weft_hetero_attention_get_traffic(const weft_hetero_attention *attention)
{
    return attention->traffic;
}

/* ---- forward ---- */

/* One call's inputs, so that its parts need not pass them one by one. */
typedef struct {
    weft_hetero_attention *attention;
    const weft_step *step;
    const weft_tensor *q, *k, *v;
    weft_page_layout pages;
    weft_tensor *out;
} call;

static weft_status check_cache(const weft_hetero_attention *attention, const weft_step *step)
{
    const weft_kv_cache *cache = attention->cache;
    const weft_step_header *h = step->header;
    if (cache == NULL) return weft_fail(WEFT_INVALID, "hetero_attention has no cache: call bind_cache first");
    if (h->block_tokens != cache->block_tokens)
        return weft_fail(WEFT_INVALID, "the step has blocks of %d tokens, the cache of %" PRId64, h->block_tokens, cache->block_tokens);
    if (h->max_block >= cache->num_blocks)
        return weft_fail(WEFT_INVALID, "the step names block %d, the cache has %" PRId64, h->max_block, cache->num_blocks);
    return WEFT_OK;
}

static weft_status write_keys(const call *c)
{
    const weft__attention_shape *s = &c->attention->shape;
    const weft_kv_cache *cache = c->attention->cache;
    const weft_step_arrays arrays = weft_step_arrays_of(c->step);
    weft_kv_write_args args = {
        .k = c->k->data,
        .v = c->v->data,
        .k_cache = cache->k->data,
        .v_cache = cache->v->data,
        .positions = arrays.positions,
        .query_start_loc = arrays.query_start_loc,
        .pages = c->pages,
        .tokens = c->step->header->num_tokens, /* padding belongs to no request and is never written */
        .requests = arrays.requests,
        .num_kv_heads = s->num_kv_heads,
        .head_dim = s->head_size,
        .head_dim_v = s->v_head_size,
        .k_stride = c->k->stride[0],
        .v_stride = c->v->stride[0],
        .dtype = c->k->dtype,
        .cache_dtype = cache->shape.dtype,
    };
    return WEFT_RUN(c->attention->rank, kv_write, &args);
}

/* Arguments that read the cache in place of this step's tensors. */
static weft_attention_args paged_args(const call *c, weft_attention_keys keys)
{
    weft_attention_args args = weft__attention_args_new(c->attention->rank, &c->attention->shape, c->q, c->k, c->v, c->step);
    args.keys = keys;
    args.k = c->attention->cache->k->data;
    args.v = c->attention->cache->v->data;
    args.kv_dtype = c->attention->cache->shape.dtype;
    args.pages = c->pages;
    return args;
}

static weft_status attend_whole_cache(const call *c)
{
    weft_attention_args args = paged_args(c, WEFT_KEYS_ALL);
    args.out = c->out->data;
    return WEFT_RUN(c->attention->rank, attention, &args);
}

/* This step's keys, for the heads that stay. lse may be NULL. */
static weft_status attend_new(const call *c, void *out, float *lse)
{
    const weft_hetero_attention *attention = c->attention;
    weft_attention_args args = weft__attention_args_new(attention->rank, &attention->shape, c->q, c->k, c->v, c->step);
    args.q = (const char *)args.q + (size_t)attention->slice * (size_t)args.head_dim * weft_dtype_size(args.dtype);
    args.num_heads = attention->output_heads;
    args.first_head = attention->slice;
    args.out = out;
    args.out_stride = (int64_t)args.num_heads * args.head_dim_v;
    args.lse = lse;
    return WEFT_RUN(attention->rank, attention, &args);
}

/* Rows of requests without a key here, and padding, count as empty whatever the kernel left there. (Those
 * of a GPU leave -inf there themselves, and a captured graph could not take lengths from the host.) */
static weft_status mask_empty(const call *c, float *lse, int64_t heads)
{
    if (c->attention->rank->cuda != NULL) return WEFT_OK;
    const weft_step_header *h = c->step->header;
    const weft_context_layout context = c->attention->cache->shape.context;
    void *scratch;
    WEFT_TRY(weft__step_scratch(c->attention->rank, h->num_requests, sizeof(int32_t), &scratch));
    int32_t *local_lens = scratch;
    for (int32_t r = 0; r < h->num_requests; r++) {
        int32_t query_len = c->step->query_start_loc[r + 1] - c->step->query_start_loc[r];
        local_lens[r] = (int32_t)weft_context_local_len(context, c->step->seq_lens[r] - query_len);
    }
    weft_mask_empty_args args = {.lse = lse,
                                 .local_lens = local_lens,
                                 .query_start_loc = c->step->query_start_loc,
                                 .tokens = h->num_tokens,
                                 .heads = heads,
                                 .requests = h->num_requests};
    return WEFT_RUN(c->attention->rank, mask_empty, &args);
}

/* Attention over this rank's share of the context, for all heads of the group. */
static weft_status attend_context(const call *c, weft__exchange_args *out)
{
    weft_hetero_attention *attention = c->attention;
    weft_rank *rank = attention->rank;
    weft_attention_args args = paged_args(c, WEFT_KEYS_CONTEXT);
    args.causal = 0; /* all of the context precedes the new tokens */
    if (!attention->resharding) {
        void *gathered;
        WEFT_TRY(weft__gather_rows_by_width(rank, attention->context, c->q->data, args.tokens, c->q->shape[1], c->q->stride[0],
                                            args.dtype, &gathered));
        args.q = gathered;
        args.num_heads *= attention->options.plan.context.world_size;
        args.q_stride = (int64_t)args.num_heads * args.head_dim;
        args.group_size = args.num_heads / args.num_kv_heads;
        args.out_stride = (int64_t)args.num_heads * args.head_dim_v;
    }
    void *partial, *partial_lse;
    int64_t rows = args.tokens * args.num_heads;
    WEFT_TRY(weft__step_scratch(rank, rows * args.head_dim_v, weft_dtype_size(args.dtype), &partial));
    WEFT_TRY(weft__step_scratch(rank, rows, sizeof(float), &partial_lse));
    args.out = partial;
    args.lse = partial_lse;
    WEFT_TRY(WEFT_RUN(rank, attention, &args));
    WEFT_TRY(mask_empty(c, partial_lse, args.num_heads));
    *out = (weft__exchange_args){.out = partial,
                                 .lse = partial_lse,
                                 .tokens = args.tokens,
                                 .heads = args.num_heads,
                                 .dim = args.head_dim_v,
                                 .dtype = args.dtype,
                                 .a2a = attention->options.plan.exchange_a2a};
    return WEFT_OK;
}

/* The context made whole over the group and merged with the new tokens' part, which lies in c->out. */
static weft_status exchange_and_merge(const call *c, const weft__exchange_args *context, const float *suffix_lse)
{
    weft_hetero_attention *attention = c->attention;
    weft_rank *rank = attention->rank;
    int64_t tokens = context->tokens, heads = attention->output_heads, dim = context->dim;
    float *prefix, *prefix_lse;
    int done = 0;
    if (rank->cuda != NULL) {
        weft_peer_dcp_args whole = {.partial = context->out,
                                    .lse = context->lse,
                                    .suffix = c->out->data,
                                    .suffix_lse = suffix_lse,
                                    .out = c->out->data,
                                    .tokens = tokens,
                                    .heads = heads,
                                    .dim = dim,
                                    .dtype = context->dtype};
        WEFT_TRY(weft_rank_fault(rank, "exchange"));
        WEFT_TRY(weft_group_dcp_over(attention->context, &whole, &done));
        if (done) return WEFT_OK;
    }
    WEFT_TRY(weft__context_exchange(rank, attention->context, context, &prefix, &prefix_lse));
    weft_merge_attn_states_args merge = {.prefix = prefix,
                                         .suffix = c->out->data,
                                         .prefix_lse = prefix_lse,
                                         .suffix_lse = suffix_lse,
                                         .out = c->out->data,
                                         .tokens = tokens,
                                         .heads = heads,
                                         .dim = dim,
                                         .prefix_stride = heads * dim,
                                         .suffix_stride = heads * dim,
                                         .out_stride = heads * dim,
                                         .prefix_dtype = WEFT_F32,
                                         .suffix_dtype = c->out->dtype,
                                         .out_dtype = c->out->dtype};
    return WEFT_RUN(rank, merge_attn_states, &merge);
}

static weft_status attend_and_merge(const call *c)
{
    weft_hetero_attention *attention = c->attention;
    weft__exchange_args context;
    void *suffix_lse;
    weft_group_traffic before = weft_group_get_traffic(attention->context);
    WEFT_TRY(attend_context(c, &context));
    WEFT_TRY(weft__step_scratch(attention->rank, context.tokens * attention->output_heads, sizeof(float), &suffix_lse));
    WEFT_TRY(attend_new(c, c->out->data, suffix_lse));
    WEFT_TRY(exchange_and_merge(c, &context, suffix_lse));
    weft_group_traffic after = weft_group_get_traffic(attention->context);
    attention->traffic.exchanges++;
    attention->traffic.bytes_sent += after.bytes_sent - before.bytes_sent;
    attention->traffic.exchange_seconds += after.seconds - before.seconds;
    return WEFT_OK;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static weft_status run(const call *c)
{
    WEFT_TRY(write_keys(c));
    if (c->attention->context == NULL) return attend_whole_cache(c);
    /* The skip gate: the same on all ranks, because the record is. */
    if (c->step->header->max_context_len == 0) return attend_new(c, c->out->data, NULL);
    return attend_and_merge(c);
}

weft_status weft_hetero_attention_forward(weft_hetero_attention *attention, const weft_tensor *q, const weft_tensor *k,
                                          const weft_tensor *v, const weft_step *step, weft_tensor **out)
{
    double start = now();
    WEFT_TRY(weft__attention_inputs_check(&attention->shape, q, k, v, step));
    WEFT_TRY(check_cache(attention, step));
    const weft_context_layout context = attention->cache->shape.context;
    const weft_step_arrays arrays = weft_step_arrays_of(step);
    call c = {.attention = attention,
              .step = step,
              .q = q,
              .k = k,
              .v = v,
              .pages = {.block_table = arrays.block_table,
                        .block_table_stride = arrays.block_table_stride,
                        .page_size = attention->cache->page_tokens,
                        .context_size = context.size,
                        .context_rank = context.rank,
                        .interleave = context.interleave}};
    int64_t sizes[2] = {step->header->num_tokens, (int64_t)attention->output_heads * attention->shape.v_head_size};
    WEFT_TRY(weft_arena_tensor(attention->rank->arena, &c.out, q->dtype, 2, sizes));
    weft_status status = run(&c);
    if (status != WEFT_OK) {
        WEFT_RELEASE(c.out);
        return status;
    }
    weft_tensor_note_cut(c.out, 1, weft_group_type_name(attention->options.plan.output.group), attention->options.plan.output.world_size);
    attention->traffic.steps++;
    attention->traffic.total_seconds += now() - start;
    *out = c.out;
    return WEFT_OK;
}
