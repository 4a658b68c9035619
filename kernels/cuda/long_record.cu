/* kernels/cuda/long_record.cu - what joins a product of many tokens (long_record.cuh). */
#include "kernels/cuda/long_record.cuh"

namespace weft {

static bool packs(const void *p, int64_t stride) { return p != NULL && aligned(p, 16) && stride % 8 == 0; }

/* Rows that are written in a product's end, where others still read x and write y. */
static bool end_writes(const weft_linear_args &l, const void *to, int64_t stride)
{
    const int64_t bytes = 2 * l.tokens * stride;
    return packs(to, stride) && !overlap(to, bytes, l.x, 2 * l.tokens * l.x_stride) && !overlap(to, bytes, l.y, 2 * l.tokens * l.y_stride);
}

bool LongPending::take(const weft_linear_args *a, void *stream, weft_status *status)
{
    if (!long_fits(a) || !(all || long_pays(a))) return false;
    *status = flush(stream);
    held = true, turned = false;
    linear = *a;
    return true;
}

bool LongPending::take(const weft_silu_mul_args *a, void *stream, weft_status *status)
{
    const weft_linear_args l = linear;
    if (turned || a->x != l.y || a->dtype != l.y_dtype || a->rows != l.tokens || 2 * a->cols != l.n || a->cols % 8 != 0 || a->x_stride != l.y_stride ||
        !end_writes(l, a->y, a->y_stride))
        return false;
    LongJoins joins = {};
    joins.silu = a;
    held = false;
    if (long_product(&l, joins, stream)) *status = launched("linear");
    else if ((*status = weft_linear_cuda(&l, stream)) == WEFT_OK) *status = weft_silu_mul_cuda(a, stream);
    return true;
}

bool LongPending::take(const weft_rms_norm_args *a, void *stream, weft_status *status)
{
    const weft_linear_args l = linear;
    if (turned || a->x != l.y || a->dtype != l.y_dtype || a->rows != l.tokens || a->cols != l.n || a->x_stride != l.y_stride || a->residual == NULL ||
        !end_writes(l, a->residual, a->residual_stride))
        return false;
    LongJoins joins = {};
    joins.norm = a;
    held = false;
    weft_rms_norm_args rest = *a;
    if (long_product(&l, joins, stream)) {
        rest.x = a->residual, rest.x_stride = a->residual_stride, rest.residual = NULL; /* the sum has been made */
        *status = launched("linear");
    } else *status = weft_linear_cuda(&l, stream);
    if (*status == WEFT_OK) *status = weft_rms_norm_cuda(&rest, stream);
    return true;
}

bool LongPending::take(const weft_rope_args *a)
{
    const weft_linear_args &l = linear;
    if (turned || a->x != l.y || a->dtype != l.y_dtype || a->tokens != l.tokens || a->token_stride != l.y_stride || a->head_dim != LONG_HEAD ||
        a->rotary_dim != LONG_HEAD || l.n % LONG_HEAD != 0 || a->heads * LONG_HEAD > l.n || !aligned(a->cos_sin, 8))
        return false;
    turned = true;
    rope = *a;
    return true;
}

/* Keys and values behind one another at the end of y. */
bool LongPending::take(const weft_kv_write_args *a, void *stream, weft_status *status)
{
    const weft_linear_args l = linear;
    const int64_t k = (const char *)a->k - (const char *)l.y, v = (const char *)a->v - (const char *)l.y, width = 2 * LONG_HEAD * a->num_kv_heads;
    if (!turned || a->dtype != l.y_dtype || a->cache_dtype != a->dtype || a->tokens != l.tokens || a->head_dim != LONG_HEAD || a->head_dim_v != LONG_HEAD ||
        a->k_stride != l.y_stride || a->v_stride != l.y_stride || k < 0 || k % (2 * LONG_HEAD) != 0 || v != k + width || 2 * l.n != v + width ||
        a->requests < 1 || !aligned(a->k_cache, 16) || !aligned(a->v_cache, 16) || weft__check_pages("kv_write", &a->pages) != WEFT_OK)
        return false;
    LongJoins joins = {};
    joins.rope = &rope, joins.pages = a;
    held = false;
    if (long_product(&l, joins, stream)) {
        *status = launched("linear");
        return true;
    }
    held = true;
    *status = flush(stream);
    if (*status == WEFT_OK) *status = weft_kv_write_cuda(a, stream);
    return true;
}

weft_status LongPending::flush(void *stream)
{
    if (!held) return WEFT_OK;
    const weft_linear_args l = linear;
    LongJoins joins = {};
    held = false;
    if (turned) joins.rope = &rope;
    if ((turned || all) && long_product(&l, joins, stream)) return launched("linear");
    WEFT_TRY(weft_linear_cuda(&l, stream));
    return turned ? weft_rope_cuda(&rope, stream) : WEFT_OK;
}

bool LongPending::take(weft_fused_op op, const void *args, void *stream, weft_status *status)
{
    *status = WEFT_OK;
    if (op == WEFT_FUSED_linear) return take((const weft_linear_args *)args, stream, status);
    if (!held) return false;
    switch (op) {
    case WEFT_FUSED_silu_mul: return take((const weft_silu_mul_args *)args, stream, status);
    case WEFT_FUSED_rms_norm: return take((const weft_rms_norm_args *)args, stream, status);
    case WEFT_FUSED_rope: return take((const weft_rope_args *)args);
    case WEFT_FUSED_kv_write: return take((const weft_kv_write_args *)args, stream, status);
    default: return false;
    }
}

} // namespace weft
