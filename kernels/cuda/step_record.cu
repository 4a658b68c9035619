/* kernels/cuda/step_record.cu - operations into instructions (step.cuh). */
#include "kernels/cuda/linear_batch.cuh"
#include "kernels/cuda/linear_fp8.cuh"
#include "kernels/cuda/step_list.cuh"

namespace weft {

/* ---- operations that stand alone ---- */

static bool in_packs(const void *p, int64_t stride) { return aligned(p, 16) && stride % 8 == 0; }

bool StepList::take_type(weft_dtype type)
{
    if (type != WEFT_BF16 && type != WEFT_F16) return false;
    if (count == 0) dtype = type;
    return dtype == type;
}

StepInstruction *StepList::append(StepKind kind)
{
    if (count == capacity) return NULL;
    StepInstruction *in = &list[count++];
    memset(in, 0, sizeof *in);
    in->kind = kind;
    return in;
}
StepInstruction *StepList::last(StepKind kind) { return count > 0 && list[count - 1].kind == kind ? &list[count - 1] : NULL; }

bool StepList::take(const weft_embedding_args *a)
{
    if (a->w_dtype != a->y_dtype || a->hidden % 8 != 0 || !aligned(a->w, 16) || !aligned(a->y, 16) || !take_type(a->y_dtype)) return false;
    StepInstruction *in = append(STEP_EMBEDDING);
    if (in != NULL) in->embedding = *a;
    return in != NULL;
}
bool StepList::take(const weft_gather_rows_args *a)
{
    if (a->cols % 8 != 0 || !in_packs(a->x, a->x_stride) || !in_packs(a->y, a->y_stride) || !take_type(a->dtype)) return false;
    StepInstruction *in = append(STEP_GATHER);
    if (in != NULL) in->gather = *a;
    return in != NULL;
}
bool StepList::take(const weft_add_args *a)
{
    if (a->cols % 8 != 0 || !in_packs(a->a, a->a_stride) || !in_packs(a->b, a->b_stride) || !in_packs(a->y, a->y_stride) || !take_type(a->dtype))
        return false;
    StepInstruction *in = append(STEP_ADD);
    if (in != NULL) in->add = *a;
    return in != NULL;
}
bool StepList::take(const weft_rms_norm_args *a)
{
    if (a->cols % 8 != 0 || !in_packs(a->x, a->x_stride) || !in_packs(a->y, a->y_stride) || !take_type(a->dtype)) return false;
    if (a->residual != NULL && !in_packs(a->residual, a->residual_stride)) return false;
    StepInstruction *in = append(STEP_NORM);
    if (in != NULL) in->norm = *a;
    return in != NULL;
}

bool StepList::take(const weft_attention_args *a)
{
    const int64_t query_len = a->max_query_len > 0 ? least(a->max_query_len, a->tokens) : a->tokens;
    const int64_t rows = query_len * least(a->group_size, a->num_heads);
    if (a->requests < 1 || rows > 64 || a->head_dim > STEP_HEAD_DIM || a->head_dim_v > STEP_HEAD_DIM || !attention_mma_fits(a) || !take_type(a->dtype))
        return false;
    const int64_t row_tiles = div_up(rows, 8), items = a->requests * a->num_kv_heads * row_tiles;
    int64_t keys = a->max_seq_len;
    if (a->keys == WEFT_KEYS_NEW) keys = query_len;
    else if (keys == 0) keys = a->pages.block_table_stride * a->pages.page_size;
    if (a->window > 0) keys = least(keys, a->window + query_len);
    const size_t room = context->workspace_bytes / (8 * ((size_t)a->head_dim_v * 4 + sizeof(float2))) / (size_t)items;
    const int64_t limit = least(least(MAX_SPLITS, (int64_t)room), div_up(keys, KEYS * 8));
    if (items > COUNTERS || items * MAX_SPLITS > INT32_MAX) return false;
    StepInstruction *in = append(STEP_ATTENTION);
    if (in == NULL) return false;
    in->attention = *a;
    in->parts = splits_that_fill(items, blocks, limit);
    in->row_tiles = (int)row_tiles;
    in->few = a->tokens == 1 && a->requests == 1 && query_len == 1 && row_tiles == 1 && a->head_dim == STEP_HEAD_DIM && a->head_dim_v == STEP_HEAD_DIM &&
              a->keys != WEFT_KEYS_NEW && items * in->parts <= blocks && items * in->parts * rows * (STEP_HEAD_DIM / 2 + 2) <= STEP_PACKETS;
    return true;
}

/* ---- products, and what joins them ---- */

static int64_t input_bytes(int64_t tokens, int64_t k) { return tokens * (div_up(2 * k, STEP_PIECE) * STEP_PIECE + 64); }
static int64_t sums_bytes(int64_t tokens) { return STEP_SUMS * STEP_WARPS * tokens * 16 * 4; }

StepNeeds StepList::needs_of(const StepProduct *p) const
{
    StepNeeds n = {};
    if (!p->far) n.x = (int)input_bytes(p->linear.tokens, p->linear.k);
    if (p->has_norm && p->norm.residual != NULL) n.held = (int)(p->linear.tokens * (p->keeps ? p->norm.cols / 8 : div_up(p->norm.cols / 8, blocks)) * 16);
    if (p->pairs == PAIRS_ROPE) n.cos_sin = (int)(2 * p->linear.tokens * p->rope.rotary_dim * 4);
    n.sums = (int)sums_bytes(p->linear.tokens);
    return n;
}

/* Beside a ring of 8 pieces. */
static bool input_fits(const weft_linear_args *a)
{
    return input_bytes(a->tokens, a->k) + sums_bytes(a->tokens) + (16 << 10) + 8 * STEP_PIECE_BYTES <= (int64_t)step_room();
}

bool StepList::product_fits(const weft_linear_args *a) const
{
    const bool fp8 = a->w_dtype == WEFT_F8E4M3;
    if (fp8 ? !fp8_fits(a, false) : a->tokens > most_tokens && !(batch && batch_pays(a, true) && batch_fits(a))) return false;
    if ((a->w_dtype != a->x_dtype && !fp8) || a->n > 1 << 24 || a->k > 1 << 20 || a->add || !in_packs(a->x, a->x_stride) || !aligned(a->w, 16)) return false;
    if (a->k % 64 != 0 || a->w_stride % 8 != 0 || (a->bias != NULL && a->bias_dtype != a->x_dtype)) return false;
    return a->y_dtype == a->x_dtype || a->y_dtype == WEFT_F32;
}

static int64_t rows_bytes(int64_t rows, int64_t stride, int64_t cols, weft_dtype dtype)
{
    return rows == 0 ? 0 : ((rows - 1) * stride + cols) * (int64_t)weft_dtype_size(dtype);
}

/* Whether every block can do the norm for itself, while others write the product's results. */
static bool norm_joins(const weft_rms_norm_args *n, const weft_linear_args *a)
{
    if (n->gain_dtype != n->dtype || !aligned(n->gain, 16)) return false;
    if (n->y != a->x || n->rows != a->tokens || n->cols != a->k || (n->y_stride != a->x_stride && n->rows > 1)) return false;
    const int64_t x = rows_bytes(n->rows, n->x_stride, n->cols, n->dtype), y = rows_bytes(n->rows, n->y_stride, n->cols, n->dtype);
    const int64_t r = rows_bytes(n->rows, n->residual_stride, n->cols, n->dtype), out = rows_bytes(a->tokens, a->y_stride, a->n, a->y_dtype);
    return !overlap(n->x, x, n->y, y) && !overlap(n->residual, r, n->y, y) && !overlap(n->x, x, a->y, out) && !overlap(n->residual, r, a->y, out);
}

/* A product of fp8 weights does a norm without a residual; or one whose sum with the residual the product in front can do,
 * which then does it. in: the norm. */
static bool fp8_norm_joins(const StepInstruction *first, StepInstruction *in, const weft_linear_args *a)
{
    weft_rms_norm_args *n = &in->norm;
    if (!fp8_fits(a, true)) return false;
    if (n->residual == NULL) return true;
    if (in == first || in[-1].kind != STEP_PRODUCT || in[-1].product.linear.w_dtype != WEFT_F8E4M3) return false;
    StepProduct *p = &in[-1].product;
    const weft_linear_args *l = &p->linear;
    if (p->pairs != PAIRS_NONE || n->x != l->y || n->rows != l->tokens || n->cols != l->n || (n->x_stride != l->y_stride && n->rows > 1) || l->y_dtype != n->dtype)
        return false;
    const int64_t r = rows_bytes(n->rows, n->residual_stride, n->cols, n->dtype);
    if (overlap(n->residual, r, l->x, rows_bytes(l->tokens, l->x_stride, l->k, l->x_dtype)) || overlap(n->residual, r, l->y, rows_bytes(l->tokens, l->y_stride, l->n, l->y_dtype)))
        return false;
    if (p->has_norm && overlap(n->residual, r, p->norm.x, rows_bytes(p->norm.rows, p->norm.x_stride, p->norm.cols, p->norm.dtype))) return false;
    p->residual = n->residual, p->residual_stride = n->residual_stride;
    n->x = n->residual, n->x_stride = n->residual_stride, n->residual = NULL;
    return true;
}

/* Whether the norm's rows are this sum. */
static bool norm_takes(const weft_rms_norm_args *n, const StepTake *take)
{
    return n->x == take->y && n->rows * n->cols == take->count && (n->x_stride == n->cols || n->rows == 1);
}

enum { MOST_KEPT = 12 << 10 }; /* bytes of a residual sum that stays in shared memory: some of what input_fits leaves */

bool StepList::take_product(const weft_linear_args *a, bool takes_sums)
{
    if (!product_fits(a) || !take_type(a->x_dtype)) return false;
    if (overlap(a->x, rows_bytes(a->tokens, a->x_stride, a->k, a->x_dtype), a->y, rows_bytes(a->tokens, a->y_stride, a->n, a->y_dtype))) return false;
    StepInstruction *in = last(STEP_NORM);
    weft_rms_norm_args norm;
    StepSum input = {};
    const bool joins = in != NULL && norm_joins(&in->norm, a) && (a->w_dtype == WEFT_F8E4M3 ? fp8_norm_joins(list, in, a) : input_fits(a));
    if (joins) {
        norm = in->norm;
        if (takes_sums && count > 1 && in[-1].kind == STEP_SUM && norm_takes(&norm, &in[-1].take)) {
            input = (--in)->take.sum;
            count--;
        }
        memset(in, 0, sizeof *in);
        in->kind = STEP_PRODUCT;
    } else in = append(STEP_PRODUCT);
    if (in == NULL) return false;
    in->product.linear = *a;
    in->product.tiles = (int)div_up(a->n, 16);
    in->product.has_norm = joins;
    in->product.far = !input_fits(a);
    if (joins) in->product.norm = norm;
    in->product.input = input;
    in->product.keeps = joins && norm.residual != NULL && norm.rows * norm.cols * 2 <= MOST_KEPT;
    return true;
}

bool StepList::take(const weft_linear_args *a) { return take_product(a, true); }

int StepList::group_of(const weft_peer *peer) const
{
    int g = 0;
    while (g < num_groups && peers[g].counters != peer->counters) g++;
    return g;
}

/* The sum is an instruction of its own until a norm takes it. No product takes one sum and sends another: not all
 * blocks would have read the first when the last of the second is sent. */
bool StepList::take(const weft_linear_over_args *over)
{
    const weft_linear_args *a = over->linear;
    if (a->tokens > most_tokens || a->w_dtype != a->x_dtype || over->peer->size != 2 || blocks > WEFT_PEER_BLOCKS || a->n % 8 != 0 || (a->y_stride != a->n && a->tokens > 1) || a->y_dtype != a->x_dtype || !aligned(a->y, 16)) return false;
    if (!weft_peer_fits(over->peer, a->tokens * a->n, a->y_dtype) || count + 2 > capacity) return false;
    const int group = group_of(over->peer);
    if (group == STEP_GROUPS || !take_product(a, false)) return false;
    if (group == num_groups) peers[num_groups] = *over->peer, calls[num_groups++] = 0;
    StepInstruction *product = &list[count - 1], *in = append(STEP_SUM);
    in->take.sum.group = group + 1;
    in->take.sum.call = calls[group]++;
    in->take.y = a->y;
    in->take.count = a->tokens * a->n;
    product->product.sum = in->take.sum;
    return true;
}

/* Whether others still read there when the first results are written. */
static bool silu_meets(const weft_silu_mul_args *a, const StepProduct *p)
{
    const weft_linear_args *l = &p->linear;
    const weft_rms_norm_args *n = &p->norm;
    const int64_t bytes = rows_bytes(a->rows, a->y_stride, a->cols, a->dtype);
    return overlap(a->y, bytes, l->x, rows_bytes(l->tokens, l->x_stride, l->k, l->x_dtype)) || overlap(a->y, bytes, l->y, rows_bytes(l->tokens, l->y_stride, l->n, l->y_dtype)) ||
           (p->has_norm && overlap(a->y, bytes, n->x, rows_bytes(n->rows, n->x_stride, n->cols, n->dtype)));
}

bool StepList::take(const weft_silu_mul_args *a)
{
    StepInstruction *in = last(STEP_PRODUCT);
    if (!take_type(a->dtype)) return false;
    if (in != NULL && in->product.pairs == PAIRS_NONE) {
        StepProduct *p = &in->product;
        const weft_linear_args *l = &p->linear;
        if (l->y == a->x && l->n == 2 * a->cols && a->cols % 8 == 0 && l->tokens == a->rows && l->y_dtype == a->dtype && (l->y_stride == a->x_stride || a->rows == 1) && !silu_meets(a, p)) {
            p->pairs = PAIRS_SILU;
            p->silu = *a;
            p->half = (int)a->cols;
            p->tiles = (int)a->cols / 8;
            return true;
        }
    }
    if (a->cols % 8 != 0 || !in_packs(a->x, a->x_stride) || !in_packs(a->y, a->y_stride)) return false;
    in = append(STEP_SILU);
    if (in != NULL) in->silu = *a;
    return in != NULL;
}

bool StepList::take(const weft_rope_args *a)
{
    StepInstruction *in = last(STEP_PRODUCT);
    if (!take_type(a->dtype)) return false;
    if (in != NULL && in->product.pairs == PAIRS_NONE) {
        StepProduct *p = &in->product;
        const weft_linear_args *l = &p->linear;
        if (l->y == a->x && l->y_dtype == a->dtype && l->tokens == a->tokens && (l->y_stride == a->token_stride || a->tokens == 1) &&
            a->rotary_dim == a->head_dim && a->head_dim % 16 == 0 && l->n % a->head_dim == 0 && a->heads * a->head_dim <= l->n && a->head_dim <= 256) {
            p->pairs = PAIRS_ROPE;
            p->rope = *a;
            p->rope_rows = (int)(a->heads * a->head_dim);
            p->half = (int)a->head_dim / 2;
            p->tiles = (int)l->n / 16;
            return true;
        }
    }
    in = append(STEP_ROPE);
    if (in != NULL) in->rope = *a;
    return in != NULL;
}

bool StepList::take(const weft_kv_write_args *a)
{
    StepInstruction *in = last(STEP_PRODUCT);
    if (a->dtype != a->cache_dtype || !take_type(a->dtype)) return false;
    if (in != NULL && in->product.pairs == PAIRS_ROPE && !in->product.has_kv) {
        StepProduct *p = &in->product;
        const weft_linear_args *l = &p->linear;
        const int64_t k = ((const char *)a->k - (const char *)l->y) / 2, v = ((const char *)a->v - (const char *)l->y) / 2;
        const bool strides = (a->k_stride == l->y_stride && a->v_stride == l->y_stride) || a->tokens == 1;
        if (l->tokens == a->tokens && strides && k >= 0 && v == k + a->num_kv_heads * a->head_dim && l->n == v + a->num_kv_heads * a->head_dim_v) {
            p->has_kv = 1;
            p->kv = *a;
            p->k_row = (int)k;
            p->v_row = (int)v;
            return true;
        }
    }
    if ((a->head_dim | a->head_dim_v) % 8 != 0 || !in_packs(a->k, a->k_stride) || !in_packs(a->v, a->v_stride) || !aligned(a->k_cache, 16) ||
        !aligned(a->v_cache, 16))
        return false;
    in = append(STEP_KV_WRITE);
    if (in != NULL) in->kv = *a;
    return in != NULL;
}

/* ---- who waits for whom ---- */

void StepTraffic::clear() { reads.count = writes.count = 0, full = false; }
void StepTraffic::Ranges::add(const void *p, int64_t bytes, bool *full)
{
    if (p == NULL || bytes <= 0) return;
    if (count == MOST) *full = true;
    else at[count].p = p, at[count++].bytes = bytes;
}
static bool meet(const StepTraffic::Ranges &a, const StepTraffic::Ranges &b)
{
    for (int i = 0; i < a.count; i++)
        for (int j = 0; j < b.count; j++)
            if (overlap(a.at[i].p, a.at[i].bytes, b.at[j].p, b.at[j].bytes)) return true;
    return false;
}
bool StepTraffic::before(const StepTraffic &next) const
{
    return full || next.full || meet(writes, next.reads) || meet(writes, next.writes) || meet(reads, next.writes);
}
void StepTraffic::join(const StepTraffic &other)
{
    for (int i = 0; i < other.reads.count; i++) reads.add(other.reads.at[i].p, other.reads.at[i].bytes, &full);
    for (int i = 0; i < other.writes.count; i++) writes.add(other.writes.at[i].p, other.writes.at[i].bytes, &full);
    full = full || other.full;
}

/* A cache is known by its address alone: its extent is nowhere in the arguments. */
static void traffic_of(const StepInstruction *in, const weft_cuda_context *context, StepTraffic *t)
{
    auto reads = [&](const void *p, int64_t rows, int64_t stride, int64_t cols, weft_dtype dtype) { t->reads.add(p, rows_bytes(rows, stride, cols, dtype), &t->full); };
    auto writes = [&](const void *p, int64_t rows, int64_t stride, int64_t cols, weft_dtype dtype) { t->writes.add(p, rows_bytes(rows, stride, cols, dtype), &t->full); };
    auto keeps = [&](const weft_kv_write_args &a) {
        t->writes.add(a.k_cache, 1, &t->full);
        t->writes.add(a.v_cache, 1, &t->full);
    };
    auto norm = [&](const weft_rms_norm_args &a, bool kept) {
        reads(a.x, a.rows, a.x_stride, a.cols, a.dtype);
        if (!kept) reads(a.residual, a.rows, a.residual_stride, a.cols, a.dtype);
        writes(a.y, a.rows, a.y_stride, a.cols, a.dtype);
    };
    auto norm_of_sum = [&](const weft_rms_norm_args &a, bool kept) {
        writes(a.x, a.rows, a.x_stride, a.cols, a.dtype);
        if (!kept) reads(a.residual, a.rows, a.residual_stride, a.cols, a.dtype);
        writes(a.y, a.rows, a.y_stride, a.cols, a.dtype);
    };
    t->clear();
    switch (in->kind) {
    case STEP_PRODUCT: {
        const StepProduct &p = in->product;
        const weft_linear_args &a = p.linear;
        if (p.input.group != 0) norm_of_sum(p.norm, p.kept);
        else if (p.has_norm) norm(p.norm, p.kept);
        else reads(a.x, a.tokens, a.x_stride, a.k, a.x_dtype);
        if (p.sum.group == 0) writes(a.y, a.tokens, a.y_stride, a.n, a.y_dtype);
        if (p.pairs == PAIRS_SILU) writes(p.silu.y, p.silu.rows, p.silu.y_stride, p.silu.cols, p.silu.dtype);
        if (p.has_kv) keeps(p.kv);
        break;
    }
    case STEP_ATTENTION: {
        const weft_attention_args &a = in->attention;
        reads(a.q, a.tokens, a.q_stride, (int64_t)a.num_heads * a.head_dim, a.dtype);
        if (a.keys == WEFT_KEYS_NEW) {
            reads(a.k, a.tokens, a.k_stride, (int64_t)a.num_kv_heads * a.head_dim, a.kv_dtype);
            reads(a.v, a.tokens, a.v_stride, (int64_t)a.num_kv_heads * a.head_dim_v, a.kv_dtype);
        } else t->reads.add(a.k, 1, &t->full), t->reads.add(a.v, 1, &t->full);
        writes(a.out, a.tokens, a.out_stride, (int64_t)a.num_heads * a.head_dim_v, a.dtype);
        writes(a.lse, a.tokens, a.num_heads, a.num_heads, WEFT_F32);
        t->writes.add(context->workspace, 1, &t->full);
        break;
    }
    case STEP_EMBEDDING: writes(in->embedding.y, in->embedding.tokens, in->embedding.hidden, in->embedding.hidden, in->embedding.y_dtype); break;
    case STEP_GATHER:
        reads(in->gather.x, in->gather.x_rows, in->gather.x_stride, in->gather.cols, in->gather.dtype);
        writes(in->gather.y, in->gather.count, in->gather.y_stride, in->gather.cols, in->gather.dtype);
        break;
    case STEP_NORM:
        norm(in->norm, false);
        writes(in->norm.residual, in->norm.rows, in->norm.residual_stride, in->norm.cols, in->norm.dtype);
        break;
    case STEP_SILU:
        reads(in->silu.x, in->silu.rows, in->silu.x_stride, 2 * in->silu.cols, in->silu.dtype);
        writes(in->silu.y, in->silu.rows, in->silu.y_stride, in->silu.cols, in->silu.dtype);
        break;
    case STEP_ADD:
        reads(in->add.a, in->add.rows, in->add.a_stride, in->add.cols, in->add.dtype);
        reads(in->add.b, in->add.rows, in->add.b_stride, in->add.cols, in->add.dtype);
        writes(in->add.y, in->add.rows, in->add.y_stride, in->add.cols, in->add.dtype);
        break;
    case STEP_ROPE: writes(in->rope.x, in->rope.tokens, in->rope.token_stride, in->rope.heads * in->rope.head_dim, in->rope.dtype); break;
    case STEP_KV_WRITE:
        reads(in->kv.k, in->kv.tokens, in->kv.k_stride, in->kv.num_kv_heads * in->kv.head_dim, in->kv.dtype);
        reads(in->kv.v, in->kv.tokens, in->kv.v_stride, in->kv.num_kv_heads * in->kv.head_dim_v, in->kv.dtype);
        keeps(in->kv);
        break;
    case STEP_SUM: t->writes.add(in->take.y, in->take.count * 2, &t->full); break;
    case STEP_END: break;
    }
}

/* What arrange knows on its way. */
struct StepOrder {
    const weft_rms_norm_args *kept; /* the norm whose residual sum every block has in shared memory, or NULL */
    bool taken[STEP_GROUPS];        /* since the last wait a sum of the group was read: its next one must not be sent yet */
    bool waited;

    void wait()
    {
        memset(taken, 0, sizeof taken);
        waited = true;
    }
    bool knows(const weft_rms_norm_args &n) const
    {
        return kept != NULL && kept->residual == n.residual && kept->rows == n.rows && kept->cols == n.cols && (kept->residual_stride == n.residual_stride || n.rows == 1);
    }
    void pass(const StepInstruction &in, const StepTraffic &traffic, bool sum, const weft_rms_norm_args *own)
    {
        const StepSum taken_here = in.kind == STEP_SUM ? in.take.sum : in.kind == STEP_PRODUCT ? in.product.input : StepSum{};
        if (taken_here.group != 0) taken[taken_here.group - 1] = true;
        StepTraffic::Ranges residual = {};
        bool full = traffic.full;
        if (kept != NULL) residual.add(kept->residual, rows_bytes(kept->rows, kept->residual_stride, kept->cols, kept->dtype), &full);
        if (full || meet(residual, traffic.writes)) kept = NULL;
        if (sum) kept = in.product.keeps ? own : NULL;
    }
};

/* Pieces on their way at once while blocks wait: the fewer there are, the shorter are the ways to the L2. Around attention, which is many
 * of them one behind the other, the ring is full in any case. */
enum { CALM_ATTENTION = 1, CALM = 2 };

static StepHow how_of(const StepProduct *p)
{
    if (p->far) return HOW_FAR;
    if (p->linear.tokens > 1) return HOW_ANY;
    return !p->has_norm || (p->norm.cols <= STEP_ONE_NORM && (p->keeps || p->norm.residual == NULL)) ? (p->input.group != 0 ? HOW_ONE_SUM : HOW_ONE) : HOW_ANY;
}

static bool in_twos(const StepProduct *p)
{
    if (p->linear.tokens != 1 || p->linear.n % 2 != 0 || !aligned(p->linear.y, 4)) return false;
    return (p->pairs != PAIRS_SILU || aligned(p->silu.y, 4)) && (!p->has_kv || (p->kv.head_dim_v % 2 == 0 && aligned(p->kv.k_cache, 4) && aligned(p->kv.v_cache, 4)));
}

/* An instruction that only waits, and perhaps writes the residual sum that is held. */
static bool append_wait(StepInstruction *to, int *made, int room, bool puts)
{
    if (*made == room) return false;
    memset(&to[*made], 0, sizeof *to);
    to[*made].kind = STEP_END, to[*made].wait = 1, to[*made].puts = puts, to[*made].calm = CALM;
    (*made)++;
    return true;
}

/* Whether attention reads the cache that this instruction adds to. */
static bool adds_to(const StepInstruction &in, const weft_attention_args &a)
{
    return in.kind == STEP_PRODUCT && in.product.has_kv && in.product.kv.k_cache == a.k && in.product.kv.v_cache == a.v;
}

/* Whether two attentions have their parts of the keys in common. */
static bool same_parts(const StepInstruction &x, const StepInstruction &y)
{
    const weft_attention_args &a = x.attention, &b = y.attention;
    const weft_page_layout &p = a.pages, &q = b.pages;
    return x.parts == y.parts && x.row_tiles == y.row_tiles && a.query_start_loc == b.query_start_loc && a.seq_lens == b.seq_lens && p.block_table == q.block_table &&
           p.block_table_stride == q.block_table_stride && p.page_size == q.page_size && p.context_size == q.context_size && p.context_rank == q.context_rank &&
           p.interleave == q.interleave && a.num_heads == b.num_heads && a.num_kv_heads == b.num_kv_heads && a.group_size == b.group_size &&
           a.first_head == b.first_head && a.first_kv_head == b.first_kv_head && a.keys == b.keys && a.causal == b.causal && a.window == b.window;
}

/* Copies the list to `to` with waits put in; the number of instructions, or -1 when they do not fit. A product without a norm
 * writes the residual sum that is held since one before, behind its wait and beside its first tile, where nobody waits
 * for it; if the sum is read or another one held sooner, an instruction of its own. */
int StepList::arrange(StepInstruction *to, int room) const
{
    StepTraffic since, next, late;
    StepOrder order = {};
    since.clear(), late.clear();
    int made = 0;
    for (int i = 0; i < count; i++) {
        StepInstruction in = list[i];
        const bool product = in.kind == STEP_PRODUCT, sum = product && in.product.has_norm && in.product.norm.residual != NULL;
        if (sum) in.product.kept = order.knows(in.product.norm);
        traffic_of(&in, context, &next);
        if (late.writes.count > 0 && (sum || late.before(next))) {
            if (!append_wait(to, &made, room, true)) return -1;
            since = late, late.clear();
            order.wait();
        }
        const bool early = product && in.product.sum.group != 0 && order.taken[in.product.sum.group - 1];
        in.wait = early || since.before(next);
        if (in.wait) {
            since.clear();
            order.wait();
            in.puts = late.writes.count > 0 && product;
            if (in.puts) since = late, late.clear();
        }
        in.late = sum;
        if (product) in.product.how = how_of(&in.product), in.product.twos = in_twos(&in.product);
        in.calm = in.kind == STEP_ATTENTION || (i > 0 && list[i - 1].kind == STEP_ATTENTION) ? CALM_ATTENTION : CALM;
        if (made == room) return -1;
        to[made++] = in;
        since.join(next);
        order.pass(in, next, sum, &list[i].product.norm);
        if (sum) late.writes.add(in.product.norm.residual, rows_bytes(in.product.norm.rows, in.product.norm.residual_stride, in.product.norm.cols, in.product.norm.dtype), &late.full);
    }
    const bool pending = late.writes.count > 0, uncounted = num_groups > 0 && !order.waited;
    if ((pending || uncounted) && !append_wait(to, &made, room, pending)) return -1;
    const StepInstruction *few = NULL; /* the last one */
    for (int i = 0; i < made; i++) {
        to[i].arrive = i + 1 < made && to[i + 1].wait;
        if (to[i].kind != STEP_ATTENTION || !to[i].few) continue;
        to[i].again = few != NULL && same_parts(*few, to[i]);
        if (to[i].again) to[i - 1].fetches = adds_to(to[i - 1], to[i].attention);
        few = &to[i];
    }
    return made;
}

} // namespace weft
