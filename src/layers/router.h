/* layers/router.h - which experts each token gets: a float32 product with the gate's weights, then
 * the choice (SEMANTICS 6.1). Every rank holds all of it and comes to the same choice. */
#pragma once

#include "kernels/weft_kernels.h"
#include "layers/linear_weight.h"

typedef struct weft_router_options {
    const char *name;
    int64_t hidden_size, num_experts;
    int top_k;
    weft_router_scoring scoring;
    int renormalize;
    int bias; /* a bias on the choice is loaded too */
} weft_router_options;

typedef struct weft_router {
    weft_object object;
    weft_rank *rank;
    int top_k, renormalize, has_bias;
    weft_router_scoring scoring;
    weft_linear_weight weight; /* (num_experts, hidden_size), kept in float32 */
    weft_tensor *bias;         /* float32 (num_experts) */
} weft_router;

/* "num_experts_per_tok (9) exceeds num_experts (8)" */
weft_status weft_router_create(weft_router **out, weft_rank *rank, const weft_router_options *options);
/* The gate's weights, refused when one is NaN or infinite: a NaN score counts as 0 and would only
 * send tokens elsewhere. A weft_weight_loader over router->weight. */
weft_status weft_router_load_gate(weft_linear_weight *gate, int part, const weft_source *source);
weft_status weft_router_load_bias(weft_router *router, const weft_source *source);
/* x (tokens, hidden_size) -> ids int32 and weights float32, both (tokens, top_k), in the arena. */
weft_status weft_router_forward(weft_router *router, const weft_tensor *x, weft_tensor **ids, weft_tensor **weights);
