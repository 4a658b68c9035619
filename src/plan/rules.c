/* plan/rules.c - every rule about parallel sizes, once. */
#include "plan/rules.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>

/* "1, 2, 4, 8": the divisors of a size, as the legal values of another. */
static const char *divisors(int of, char *text, size_t size)
{
    size_t used = 0;
    for (int k = 1; k <= of; k++) {
        if (of % k != 0) continue;
        int n = snprintf(text + used, size - used, "%s%d", used > 0 ? ", " : "", k);
        if (n < 0 || (size_t)n >= size - used) {
            snprintf(text + used, size - used, "%s", size - used > 5 ? ", ..." : "");
            break;
        }
        used += (size_t)n;
    }
    return text;
}

weft_status weft_rule_positive(const char *flag, int value)
{
    if (value >= 1) return WEFT_OK;
    return weft_fail(WEFT_INVALID, "%s must be positive, got %d", flag, value);
}

weft_status weft_rule_attention_tensor(int tp, int tpa, int pcp)
{
    WEFT_TRY(weft_rule_positive("tensor_parallel_size_attention", tpa));
    if (tpa > tp)
        return weft_fail(WEFT_INVALID, "tensor_parallel_size_attention cannot exceed tensor_parallel_size: %d > %d.", tpa, tp);
    if (tp % tpa != 0)
        return weft_fail(WEFT_INVALID, "tensor_parallel_size must be divisible by tensor_parallel_size_attention: %d %% %d != 0.",
                         tp, tpa);
    /* Attention groups are columns of a tensor row cut by context ranks that follow each other; with
     * prefill context ranks in between they do not. */
    if (pcp > 1 && tpa != tp)
        return weft_fail(WEFT_INVALID,
                         "prefill_context_parallel_size (%d) cannot be combined with tensor_parallel_size_attention (%d) "
                         "below tensor_parallel_size (%d).",
                         pcp, tpa, tp);
    return WEFT_OK;
}

weft_status weft_rule_context(int tp, int tpa, int pcp, int *dcp)
{
    char legal[96];
    int wanted = tp / tpa;
    if (*dcp == 0) *dcp = wanted;
    WEFT_TRY(weft_rule_positive("decode_context_parallel_size", *dcp));
    if (tpa != tp && *dcp != wanted)
        return weft_fail(WEFT_INVALID,
                         "decode_context_parallel_size must equal tensor_parallel_size / tensor_parallel_size_attention "
                         "(%d), got %d.",
                         wanted, *dcp);
    if (pcp == 1 && tp % *dcp != 0)
        return weft_fail(WEFT_INVALID,
                         "tensor_parallel_size must be divisible by decode_context_parallel_size: %d %% %d != 0 (legal: %s).",
                         tp, *dcp, divisors(tp, legal, sizeof legal));
    if (pcp > 1 && *dcp != 1 && *dcp != pcp && *dcp != (int64_t)tp * pcp)
        return weft_fail(WEFT_INVALID,
                         "decode_context_parallel_size must be 1, prefill_context_parallel_size (%d) or tensor_parallel_size * "
                         "prefill_context_parallel_size (%" PRId64 "), got %d.",
                         pcp, (int64_t)tp * pcp, *dcp);
    return WEFT_OK;
}

weft_status weft_rule_exchange(int dcp, int exchange_a2a)
{
    if (exchange_a2a && dcp <= 1)
        return weft_fail(WEFT_INVALID, "dcp_comm_backend='a2a' requires decode_context_parallel_size > 1.");
    return WEFT_OK;
}

weft_status weft_rule_interleave(int block_size, int interleave)
{
    char legal[96];
    WEFT_TRY(weft_rule_positive("block_size", block_size));
    WEFT_TRY(weft_rule_positive("cp_kv_cache_interleave_size", interleave));
    if (block_size % interleave != 0)
        return weft_fail(WEFT_INVALID, "block_size must be divisible by cp_kv_cache_interleave_size: %d %% %d != 0 (legal: %s).",
                         block_size, interleave, divisors(block_size, legal, sizeof legal));
    return WEFT_OK;
}

weft_status weft_rule_mlp(int tp, int mlp_tensor)
{
    char legal[96];
    WEFT_TRY(weft_rule_positive("the tensor size of mlp", mlp_tensor));
    if (tp % mlp_tensor != 0)
        return weft_fail(WEFT_INVALID, "tensor_parallel_size must be divisible by the tensor size of mlp: %d %% %d != 0 (legal: %s).",
                         tp, mlp_tensor, divisors(tp, legal, sizeof legal));
    return WEFT_OK;
}

weft_status weft_rule_experts(int tp, int ep)
{
    char legal[96];
    WEFT_TRY(weft_rule_positive("expert_parallel_size", ep));
    if (ep > tp) return weft_fail(WEFT_INVALID, "expert_parallel_size cannot exceed tensor_parallel_size: %d > %d.", ep, tp);
    if (tp % ep != 0)
        return weft_fail(WEFT_INVALID, "tensor_parallel_size must be divisible by expert_parallel_size: %d %% %d != 0 (legal: %s).",
                         tp, ep, divisors(tp, legal, sizeof legal));
    return WEFT_OK;
}

/* ---- with a model's numbers ---- */

weft_status weft_rule_model_heads(const weft_model_numbers *model, int tp)
{
    WEFT_TRY(weft_rule_positive("num_attention_heads", model->num_attention_heads));
    WEFT_TRY(weft_rule_positive("num_key_value_heads", model->num_key_value_heads));
    if (model->num_attention_heads % model->num_key_value_heads != 0)
        return weft_fail(WEFT_INVALID, "num_attention_heads (%d) must be a multiple of num_key_value_heads (%d).",
                         model->num_attention_heads, model->num_key_value_heads);
    if (model->num_attention_heads % tp != 0)
        return weft_fail(WEFT_INVALID, "Total number of attention heads (%d) must be divisible by tensor parallel size (%d).",
                         model->num_attention_heads, tp);
    return WEFT_OK;
}

static weft_status require_support(const weft_model_numbers *model, weft_layer_type type, const char *what)
{
    if (model->supported_layer_types & 1u << type) return WEFT_OK;
    char name[32];
    snprintf(name, sizeof name, "%s", weft_layer_type_name(type));
    for (char *c = name; *c != 0; c++) *c = (char)toupper((unsigned char)*c);
    return weft_fail(WEFT_INVALID, "%s requires a model that supports the %s layer parallel plan. %s does not.", what, name,
                     model->architecture != NULL ? model->architecture : "This model");
}

/* Every rank holds whole key/value heads, the same number each. */
static weft_status check_kv_heads(const weft_model_numbers *model, int tp, int tpa)
{
    int kv = model->num_key_value_heads;
    if (tpa >= kv ? tpa % kv == 0 : kv % tpa == 0) return WEFT_OK;
    return weft_fail(WEFT_INVALID, "%s (%d) must divide num_key_value_heads (%d) or be a multiple of it.",
                     tpa == tp ? "tensor_parallel_size" : "tensor_parallel_size_attention", tpa, kv);
}

/* Plain decode context parallelism: all ranks of a context group hold the same key/value head. */
static weft_status check_plain_context(const weft_model_numbers *model, int tp, int dcp)
{
    int kv = model->num_key_value_heads;
    char legal[96], hint[80] = "";
    if (tp <= kv) {
        if (tp % dcp == 0) snprintf(hint, sizeof hint, " Use tensor_parallel_size_attention = %d instead.", tp / dcp);
        return weft_fail(WEFT_INVALID,
                         "decode_context_parallel_size (%d) needs tensor_parallel_size (%d) greater than num_key_value_heads "
                         "(%d): no key/value head is held twice.%s",
                         dcp, tp, kv, hint);
    }
    if (tp % kv != 0)
        return weft_fail(WEFT_INVALID,
                         "decode_context_parallel_size (%d) needs tensor_parallel_size (%d) to be a multiple of "
                         "num_key_value_heads (%d).",
                         dcp, tp, kv);
    if (tp / kv % dcp != 0)
        return weft_fail(WEFT_INVALID,
                         "decode_context_parallel_size (%d) must divide the %d ranks that hold one key/value head "
                         "(tensor_parallel_size %d / num_key_value_heads %d; legal: %s).",
                         dcp, tp / kv, tp, kv, divisors(tp / kv, legal, sizeof legal));
    return WEFT_OK;
}

weft_status weft_rule_model_attention(const weft_model_numbers *model, int tp, int tpa, int dcp, int pcp)
{
    if (tpa != tp) WEFT_TRY(require_support(model, WEFT_LAYER_ATTENTION, "Attention tensor parallelism"));
    WEFT_TRY(check_kv_heads(model, tp, tpa));
    /* A context group of pcp ranks lies across the prefill context ranks, which share every head. */
    int within_tensor = dcp / pcp;
    if (tpa == tp && within_tensor > 1) return check_plain_context(model, tp, within_tensor);
    return WEFT_OK;
}

weft_status weft_rule_model_mlp(const weft_model_numbers *model, int tp, int mlp_tensor)
{
    if (mlp_tensor != tp) WEFT_TRY(require_support(model, WEFT_LAYER_MLP, "A tensor size of its own for mlp"));
    if (model->intermediate_size % mlp_tensor != 0)
        return weft_fail(WEFT_INVALID, "intermediate_size (%" PRId64 ") must be divisible by %s (%d).", model->intermediate_size,
                         mlp_tensor == tp ? "tensor_parallel_size" : "the tensor size of mlp", mlp_tensor);
    return WEFT_OK;
}

weft_status weft_rule_model_experts(const weft_model_numbers *model, int tp, int ep)
{
    const char *name = model->architecture != NULL ? model->architecture : "this model";
    if (model->num_experts == 0) {
        if (ep == 1) return WEFT_OK;
        return weft_fail(WEFT_INVALID, "expert_parallel_size (%d) needs a model with experts; %s has none.", ep, name);
    }
    if (ep > 1) WEFT_TRY(require_support(model, WEFT_LAYER_EXPERTS, "Expert parallelism"));
    if (model->num_experts % ep != 0)
        return weft_fail(WEFT_INVALID, "num_experts (%d) must be divisible by expert_parallel_size (%d).", model->num_experts, ep);
    if (model->moe_intermediate_size % (tp / ep) != 0)
        return weft_fail(WEFT_INVALID,
                         "the width of an expert (%" PRId64 ") must be divisible by tensor_parallel_size / expert_parallel_size "
                         "(%d / %d).",
                         model->moe_intermediate_size, tp, ep);
    return WEFT_OK;
}
