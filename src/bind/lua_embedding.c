/* bind/lua_embedding.c - weft.vocab_embedding and weft.lm_head.
 *
 *   core.vocab_embedding{vocab_size=, hidden_size=, axis= | parallel_plan=, dtype="auto", output_dtype="auto", name=}
 *     :load(source) :forward(ids) -> (tokens, hidden)
 *   core.lm_head{vocab_size=, hidden_size=, ... , logit_scale=1} or core.lm_head{embedding=tied, logit_scale=1}
 *     :load(source) :load_scale(source) :forward(x) -> float32 (rows, local_size) of this shard  :gather(logits) -> (rows, vocab_size)
 * output_dtype is the dtype of the hidden states; auto: that of the weights. */
#include <string.h>

#include "bind/box.h"
#include "bind/core.h"
#include "bind/layer_args.h"
#include "layers/lm_head.h"

#define EMBEDDING "weft.vocab_embedding"
#define HEAD "weft.lm_head"

static weft_vocab_options check_vocab(lua_State *L, const char *kind)
{
    return (weft_vocab_options){.weight = weft_check_weight_options(L, 1, kind),
                                .vocab_size = weft_field_int(L, 1, "vocab_size", 1, 1 << 30),
                                .hidden_size = weft_field_int(L, 1, "hidden_size", 1, 1 << 30),
                                .axis = weft_check_layer_axis(L, 1, 0)};
}

static int l_embedding(lua_State *L)
{
    static const char *const keys[] = {"vocab_size", "hidden_size", "dtype", "output_dtype", "name", "axis", "parallel_plan",
                                       "disable_tp", NULL};
    luaL_checktype(L, 1, LUA_TTABLE);
    weft_check_keys(L, 1, "vocab_embedding", keys);
    weft_vocab_options options = check_vocab(L, "vocab_embedding");
    weft_dtype output_dtype = WEFT_F32;
    int has_output_dtype = weft_check_weight_dtype(L, 1, "output_dtype", &output_dtype);
    weft_object **slot = weft_box_new(L, EMBEDDING);
    weft_vocab_embedding *embedding = NULL;
    weft_raise_if(L, weft_vocab_embedding_create(&embedding, weft_lua_rank(L), &options));
    embedding->has_output_dtype = has_output_dtype;
    embedding->output_dtype = output_dtype;
    *slot = &embedding->object;
    return 1;
}

static weft_vocab_embedding *check_embedding(lua_State *L)
{
    return (weft_vocab_embedding *)weft_box_check(L, 1, EMBEDDING);
}

static int l_load(lua_State *L)
{
    return weft_load_weight(L, &check_embedding(L)->weight, weft_linear_weight_load);
}

static int l_forward(lua_State *L)
{
    weft_vocab_embedding *embedding = check_embedding(L);
    weft_tensor *y = NULL;
    weft_raise_if(L, weft_vocab_embedding_forward(embedding, weft_check_tensor(L, 2), &y));
    weft_push_tensor(L, y);
    return 1;
}

static int push_vocab_field(lua_State *L, const char *name, int64_t vocab_size, int64_t hidden_size,
                            const weft_vocab_layout *layout, const weft_linear_weight *w, int64_t bytes)
{
    const weft_number_field numbers[] = {
        {"vocab_size", (double)vocab_size},      {"hidden_size", (double)hidden_size}, {"padded_vocab_size", (double)layout->padded_vocab},
        {"offset", (double)layout->offset},      {"local_size", (double)layout->count}, {"local_real_size", (double)layout->real},
        {"weight_bytes", (double)bytes},         {NULL, 0},
    };
    if (strcmp(name, "dtype") == 0 && w->weight != NULL) {
        lua_pushstring(L, weft_dtype_name(w->weight->dtype));
        return 1;
    }
    return weft_push_number_field(L, name, numbers);
}

static int embedding_fields(lua_State *L)
{
    weft_vocab_embedding *e = check_embedding(L);
    return push_vocab_field(L, luaL_checkstring(L, 2), e->vocab_size, e->hidden_size, &e->layout, &e->weight,
                            weft_linear_weight_bytes(&e->weight));
}

static int l_head(lua_State *L)
{
    static const char *const keys[] = {"vocab_size", "hidden_size", "dtype", "name", "axis", "parallel_plan", "disable_tp",
                                       "embedding", "logit_scale", NULL};
    luaL_checktype(L, 1, LUA_TTABLE);
    weft_check_keys(L, 1, "lm_head", keys);
    double logit_scale = weft_field_number_or(L, 1, "logit_scale", 1);
    lua_getfield(L, 1, "embedding");
    weft_vocab_embedding *tied = NULL;
    if (!lua_isnil(L, -1)) {
        tied = (weft_vocab_embedding *)weft_box_test(L, -1, EMBEDDING);
        if (tied == NULL) luaL_error(L, "embedding must be an open " EMBEDDING);
    }
    weft_vocab_options options = {.weight = {.name = "lm_head"}};
    if (tied == NULL) options = check_vocab(L, "lm_head");
    weft_object **slot = weft_box_new(L, HEAD);
    weft_lm_head *head = NULL;
    weft_raise_if(L, weft_lm_head_create(&head, weft_lua_rank(L), &options, tied, logit_scale));
    *slot = &head->object;
    return 1;
}

static weft_lm_head *check_head(lua_State *L)
{
    return (weft_lm_head *)weft_box_check(L, 1, HEAD);
}

static int l_head_load(lua_State *L)
{
    weft_lm_head *head = check_head(L);
    if (head->tied != NULL) luaL_error(L, "a tied lm_head has no weights of its own: load the embedding");
    return weft_load_weight(L, &head->weight, weft_linear_weight_load);
}

static int l_head_load_scale(lua_State *L)
{
    weft_lm_head *head = check_head(L);
    if (head->tied != NULL) luaL_error(L, "a tied lm_head has no weights of its own: load the embedding");
    return weft_load_weight(L, &head->weight, weft_linear_weight_load_scale);
}

static int l_head_forward(lua_State *L)
{
    weft_lm_head *head = check_head(L);
    weft_tensor *logits = NULL;
    weft_raise_if(L, weft_lm_head_forward(head, weft_check_tensor(L, 2), &logits));
    weft_push_tensor(L, logits);
    return 1;
}

static int l_head_gather(lua_State *L)
{
    weft_lm_head *head = check_head(L);
    weft_tensor *all = NULL;
    weft_raise_if(L, weft_lm_head_gather(head, weft_check_tensor(L, 2), &all));
    weft_push_tensor(L, all);
    return 1;
}

static int head_fields(lua_State *L)
{
    weft_lm_head *h = check_head(L);
    const char *name = luaL_checkstring(L, 2);
    if (strcmp(name, "tied") == 0) {
        lua_pushboolean(L, h->tied != NULL);
        return 1;
    }
    if (strcmp(name, "logit_scale") == 0) {
        lua_pushnumber(L, h->logit_scale);
        return 1;
    }
    /* A tied head adds no bytes to those of the embedding. */
    int64_t bytes = h->tied != NULL ? 0 : weft_linear_weight_bytes(&h->weight);
    return push_vocab_field(L, name, h->vocab_size, h->hidden_size, &h->layout, weft_lm_head_weight(h), bytes);
}

void weft_open_embedding(lua_State *L)
{
    static const luaL_Reg embedding_methods[] = {{"load", l_load}, {"forward", l_forward}, {NULL, NULL}};
    static const luaL_Reg head_methods[] = {
        {"load", l_head_load}, {"load_scale", l_head_load_scale}, {"forward", l_head_forward}, {"gather", l_head_gather}, {NULL, NULL}};
    static const luaL_Reg functions[] = {{"vocab_embedding", l_embedding}, {"lm_head", l_head}, {NULL, NULL}};
    weft_box_class(L, EMBEDDING, embedding_methods, embedding_fields, NULL);
    weft_box_class(L, HEAD, head_methods, head_fields, NULL);
    luaL_setfuncs(L, functions, 0);
}
