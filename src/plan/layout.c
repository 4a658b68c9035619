/* plan/layout.c - which rank owns what. */
#include "plan/layout.h"

#include <inttypes.h>

weft_status weft_shard_even(weft_shard *out, const char *what, int64_t total, weft_axis axis)
{
    if (total < 0) return weft_fail(WEFT_INVALID, "the number of %s must not be negative, got %" PRId64, what, total);
    if (total % axis.world_size != 0)
        return weft_fail(WEFT_INVALID, "%" PRId64 " %s do not divide over %d ranks", total, what, axis.world_size);
    int64_t count = total / axis.world_size;
    *out = (weft_shard){axis.rank * count, count};
    return WEFT_OK;
}

/* KV heads: cut while there is at least one for each rank, beyond that one each, replicated. */
static weft_status split_kv_heads(weft_head_layout *out, int total, weft_axis input)
{
    int world = input.world_size;
    int wide = world >= total;
    if (wide ? world % total != 0 : total % world != 0)
        return weft_fail(WEFT_INVALID,
                         "%d key/value heads over %d ranks: one number must divide the other "
                         "(so that every rank holds whole heads, the same number each)",
                         total, world);
    out->num_kv_heads = wide ? 1 : total / world;
    out->num_kv_head_replicas = wide ? world / total : 1;
    out->first_kv_head = input.rank / out->num_kv_head_replicas * out->num_kv_heads;
    return WEFT_OK;
}

weft_status weft_head_layout_make(weft_head_layout *out, int total_num_heads, int total_num_kv_heads, const weft_plan *plan)
{
    weft_head_layout h = {0};
    weft_shard heads, leaving;
    if (total_num_heads < 1 || total_num_kv_heads < 1)
        return weft_fail(WEFT_INVALID, "a model needs at least one head of each kind, got %d attention heads and %d key/value heads",
                         total_num_heads, total_num_kv_heads);
    if (total_num_heads % total_num_kv_heads != 0)
        return weft_fail(WEFT_INVALID, "%d attention heads do not divide over %d key/value heads", total_num_heads,
                         total_num_kv_heads);
    WEFT_TRY(weft_shard_even(&heads, "attention heads", total_num_heads, plan->input));
    WEFT_TRY(split_kv_heads(&h, total_num_kv_heads, plan->input));
    WEFT_TRY(weft_shard_even(&leaving, "output heads", total_num_heads, plan->output));
    if (leaving.offset < heads.offset || leaving.offset + leaving.count > heads.offset + heads.count)
        return weft_fail(WEFT_INVALID,
                         "output rank %d of %d keeps heads %d to %d, but input rank %d of %d computes heads %d to %d only",
                         plan->output.rank, plan->output.world_size, (int)leaving.offset,
                         (int)(leaving.offset + leaving.count - 1), plan->input.rank, plan->input.world_size,
                         (int)heads.offset, (int)(heads.offset + heads.count - 1));
    h.num_heads = (int)heads.count;
    h.first_head = (int)heads.offset;
    h.output_num_heads = (int)leaving.count;
    h.output_first_head = (int)leaving.offset;
    *out = h;
    return WEFT_OK;
}

static int64_t greatest_common_divisor(int64_t a, int64_t b)
{
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

weft_vocab_layout weft_vocab_layout_make(int64_t vocab_size, weft_axis axis)
{
    int64_t grain = 64 / greatest_common_divisor(64, axis.world_size) * axis.world_size;
    weft_vocab_layout v;
    v.padded_vocab = (vocab_size + grain - 1) / grain * grain;
    v.count = v.padded_vocab / axis.world_size;
    v.offset = axis.rank * v.count;
    v.real = min_i64(v.offset + v.count, vocab_size) - min_i64(v.offset, vocab_size);
    return v;
}
