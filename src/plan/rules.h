/* plan/rules.h - every rule about parallel sizes, once.
 *
 * Flags, policies, `weft plan`, `verify` and the loaders all ask these. Sizes are ranks, tokens or
 * heads; a refusal names the flag, the numbers and, where that helps, what is legal.
 *
 * tp, tpa, dcp, pcp, ep: tensor, attention tensor, decode context, prefill context and expert
 * parallel sizes, all at least 1. */
#pragma once

#include <stdint.h>

#include "base/status.h"
#include "plan/axis.h"

/* What a model needs to tell. Zero means: has none, or not known. */
typedef struct weft_model_numbers {
    const char *architecture; /* "LlamaForCausalLM" */
    int num_attention_heads, num_key_value_heads;
    int64_t intermediate_size;     /* width of the dense MLP */
    int64_t moe_intermediate_size; /* width of one expert */
    int64_t vocab_size;
    int num_experts;
    int num_hidden_layers;
    unsigned supported_layer_types; /* bit 1 << weft_layer_type for each plan that the model follows */
} weft_model_numbers;

weft_status weft_rule_positive(const char *flag, int value);
weft_status weft_rule_attention_tensor(int tp, int tpa, int pcp);
/* *dcp of 0 follows: tp / tpa, or 1. */
weft_status weft_rule_context(int tp, int tpa, int pcp, int *dcp);
weft_status weft_rule_exchange(int dcp, int exchange_a2a);
weft_status weft_rule_interleave(int block_size, int interleave);
weft_status weft_rule_mlp(int tp, int mlp_tensor);
weft_status weft_rule_experts(int tp, int ep);

/* With a model's numbers; sizes have passed the rules above. */
weft_status weft_rule_model_heads(const weft_model_numbers *model, int tp);
weft_status weft_rule_model_attention(const weft_model_numbers *model, int tp, int tpa, int dcp, int pcp);
weft_status weft_rule_model_mlp(const weft_model_numbers *model, int tp, int mlp_tensor);
weft_status weft_rule_model_experts(const weft_model_numbers *model, int tp, int ep);
