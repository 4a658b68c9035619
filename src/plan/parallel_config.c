/* plan/parallel_config.c - the parallel sizes that flags give, checked together. */
#include "plan/parallel_config.h"

#include <stdio.h>

weft_parallel_config weft_parallel_config_default(void)
{
    return (weft_parallel_config){.tensor_parallel_size = 1,
                                  .prefill_context_parallel_size = 1,
                                  .pipeline_parallel_size = 1,
                                  .data_parallel_size = 1,
                                  .expert_parallel_size = 1,
                                  .cp_kv_cache_interleave_size = 1,
                                  .block_size = 16};
}

int weft_attention_tp_size(const weft_parallel_config *config)
{
    return config->tensor_parallel_size_attention > 0 ? config->tensor_parallel_size_attention : config->tensor_parallel_size;
}

int weft_mlp_tp_size(const weft_parallel_config *config)
{
    return config->tensor_parallel_size_mlp > 0 ? config->tensor_parallel_size_mlp : config->tensor_parallel_size;
}

int weft_config_world_size(const weft_parallel_config *config)
{
    return config->data_parallel_size * config->pipeline_parallel_size * config->prefill_context_parallel_size *
           config->tensor_parallel_size;
}

static weft_status check_world(const weft_parallel_config *c)
{
    WEFT_TRY(weft_rule_positive("tensor_parallel_size", c->tensor_parallel_size));
    WEFT_TRY(weft_rule_positive("prefill_context_parallel_size", c->prefill_context_parallel_size));
    WEFT_TRY(weft_rule_positive("pipeline_parallel_size", c->pipeline_parallel_size));
    WEFT_TRY(weft_rule_positive("data_parallel_size", c->data_parallel_size));
    int ranks = c->tensor_parallel_size;
    if (__builtin_mul_overflow(ranks, c->prefill_context_parallel_size, &ranks) ||
        __builtin_mul_overflow(ranks, c->pipeline_parallel_size, &ranks) ||
        __builtin_mul_overflow(ranks, c->data_parallel_size, &ranks) || ranks > 1 << 20)
        return weft_fail(WEFT_INVALID,
                         "a world of at most %d ranks, got data_parallel_size %d * pipeline_parallel_size %d * "
                         "prefill_context_parallel_size %d * tensor_parallel_size %d",
                         1 << 20, c->data_parallel_size, c->pipeline_parallel_size, c->prefill_context_parallel_size,
                         c->tensor_parallel_size);
    if (c->prefill_context_parallel_size > 1 && c->data_parallel_size > 1)
        return weft_fail(WEFT_INVALID, "prefill_context_parallel_size (%d) cannot be combined with data_parallel_size (%d).",
                         c->prefill_context_parallel_size, c->data_parallel_size);
    return WEFT_OK;
}

weft_status weft_parallel_config_make(weft_parallel_config *out, const weft_parallel_config *given)
{
    weft_parallel_config c = *given;
    WEFT_TRY(check_world(&c));
    int tp = c.tensor_parallel_size, pcp = c.prefill_context_parallel_size;
    if (c.tensor_parallel_size_attention != 0)
        WEFT_TRY(weft_rule_attention_tensor(tp, c.tensor_parallel_size_attention, pcp));
    WEFT_TRY(weft_rule_context(tp, weft_attention_tp_size(&c), pcp, &c.decode_context_parallel_size));
    WEFT_TRY(weft_rule_exchange(c.decode_context_parallel_size, c.exchange_a2a));
    WEFT_TRY(weft_rule_interleave(c.block_size, c.cp_kv_cache_interleave_size));
    WEFT_TRY(weft_rule_experts(tp, c.expert_parallel_size));
    if (c.tensor_parallel_size_mlp != 0) WEFT_TRY(weft_rule_mlp(tp, c.tensor_parallel_size_mlp));
    *out = c;
    return WEFT_OK;
}

weft_status weft_parallel_config_check_model(const weft_parallel_config *config, const weft_model_numbers *model)
{
    int tp = config->tensor_parallel_size;
    WEFT_TRY(weft_rule_model_heads(model, tp));
    WEFT_TRY(weft_rule_model_attention(model, tp, weft_attention_tp_size(config), config->decode_context_parallel_size,
                                       config->prefill_context_parallel_size));
    WEFT_TRY(weft_rule_model_mlp(model, tp, weft_mlp_tp_size(config)));
    return weft_rule_model_experts(model, tp, config->expert_parallel_size);
}

/* A size that was not given reads "none". */
static const char *optional(int size, char *text, size_t bytes)
{
    if (size == 0) return "none";
    snprintf(text, bytes, "%d", size);
    return text;
}

const char *weft_parallel_config_describe(const weft_parallel_config *c, char *text, size_t size)
{
    char attention[16], mlp[16];
    snprintf(text, size,
             "tensor_parallel_size=%d, tensor_parallel_size_attention=%s, pipeline_parallel_size=%d, data_parallel_size=%d, "
             "decode_context_parallel_size=%d, prefill_context_parallel_size=%d, expert_parallel_size=%d, "
             "tensor_parallel_size_mlp=%s, dcp_comm_backend=%s, cp_kv_cache_interleave_size=%d, block_size=%d",
             c->tensor_parallel_size, optional(c->tensor_parallel_size_attention, attention, sizeof attention),
             c->pipeline_parallel_size, c->data_parallel_size, c->decode_context_parallel_size,
             c->prefill_context_parallel_size, c->expert_parallel_size,
             optional(c->tensor_parallel_size_mlp, mlp, sizeof mlp), c->exchange_a2a ? "a2a" : "ag_rs",
             c->cp_kv_cache_interleave_size, c->block_size);
    return text;
}
