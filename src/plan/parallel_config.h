/* plan/parallel_config.h - the parallel sizes that flags give, checked together.
 *
 * A value: make it once from what was given, then read it. Sizes count ranks; the cache's count
 * tokens. */
#pragma once

#include <stddef.h>

#include "plan/rules.h"

typedef struct weft_parallel_config {
    int tensor_parallel_size;
    int tensor_parallel_size_attention; /* 0: not given, attention follows the tensor size */
    int decode_context_parallel_size;   /* given as 0: follows from the two above */
    int prefill_context_parallel_size;
    int pipeline_parallel_size;
    int data_parallel_size;
    int expert_parallel_size;
    int tensor_parallel_size_mlp; /* 0: not given */
    int cp_kv_cache_interleave_size;
    int block_size;
    int exchange_a2a; /* dcp_comm_backend: 0 ag_rs, 1 a2a */
} weft_parallel_config;

/* Every size 1 or not given, block size 16. */
weft_parallel_config weft_parallel_config_default(void);
/* Checks `given` by every rule that needs no model and fills in what follows. */
weft_status weft_parallel_config_make(weft_parallel_config *out, const weft_parallel_config *given);
/* The rules that need a model's numbers. */
weft_status weft_parallel_config_check_model(const weft_parallel_config *config, const weft_model_numbers *model);

int weft_attention_tp_size(const weft_parallel_config *config);
int weft_mlp_tp_size(const weft_parallel_config *config);
int weft_config_world_size(const weft_parallel_config *config); /* all ranks: dp * pp * pcp * tp */
/* "tensor_parallel_size=8, tensor_parallel_size_attention=2, ...": every size. */
const char *weft_parallel_config_describe(const weft_parallel_config *config, char *text, size_t size);
