/* bind/lua_ops_attention.c - core.ops on key/value caches and partial attention results.
 *
 * A cache is [blocks, kv heads, page, dim]. The place in the context group: context_size = 1,
 * context_rank = 0, interleave = 1. LSEs are float32 [tokens, heads], natural unless base2.
 *
 *   kv_write{k, v, k_cache, v_cache, positions, query_start_loc, block_table}
 *   attention{q = [tokens, heads, dim], k, v, keys = "all"|"context"|"new", query_start_loc, seq_lens,
 *             block_table, group_size, first_head = 0, first_kv_head = 0, causal = true, window = 0,
 *             scale = dim^-1/2}                                        -> out, lse
 *   merge_attn_states{prefix, prefix_lse, suffix, suffix_lse}           -> out, lse
 *   dcp_combine{partial = [parts, tokens, heads, dim], lse = [parts, tokens, heads], base2 = false,
 *               valid_rows = tokens, dtype}                             -> out, lse
 *   dcp_pack{out = [tokens, parts * heads, dim], lse, parts}            -> buffer [parts, tokens, heads, dim + lanes]
 *   dcp_unpack_lse{buffer}                                              -> lse [parts, tokens, heads]
 *   dcp_unpack{buffer, base2 = false, valid_rows = tokens}              -> out, lse: combined
 *   dcp_scale{out = [tokens, heads, dim], lses = [parts, tokens, heads], part, lse_first = 0,
 *             lse_heads = heads, base2 = false}                         -> scaled [heads, tokens, dim], lse
 *   mask_dcp_empty_shards{lse, seq_lens = local lengths, query_start_loc}  -> lse, in place */
#include <math.h>
#include <string.h>

#include "bind/lua_ops.h"

/* ---- pages ---- */

/* The cache and its table; every block id must be inside the cache. */
static void read_pages(lua_State *L, weft_page_layout *pages, const weft_tensor *k_cache, const weft_tensor *v_cache, int64_t requests)
{
    weft_tensor *table = weft__op_ints(L, "block_table", 0);
    weft__op_contiguous(L, "the cache of keys", k_cache);
    weft__op_contiguous(L, "the cache of values", v_cache);
    for (int d = 0; d < 3; d++) weft__op_expect(L, "the cache of values", v_cache, d, k_cache->shape[d]);
    weft__op_same_dtype(L, "the cache of values", v_cache, k_cache->dtype);
    int64_t numel = weft_tensor_numel(table), width = requests > 0 ? numel / requests : 0;
    if (table->ndim == 2) weft__op_expect(L, "block_table", table, 0, requests);
    else if (width * requests != numel) luaL_error(L, "block_table: %d ids do not divide over %d requests", (int)numel, (int)requests);
    for (int64_t i = 0; i < numel; i++)
        if (((const int32_t *)table->data)[i] >= k_cache->shape[0])
            luaL_error(L, "block_table: block %d of a cache of %d", ((const int32_t *)table->data)[i], (int)k_cache->shape[0]);
    pages->block_table = table->data;
    pages->block_table_stride = width;
    pages->page_size = k_cache->shape[2];
    pages->context_size = (int)weft_field_int_or(L, 1, "context_size", 1, INT32_MAX, 1);
    pages->context_rank = (int)weft_field_int_or(L, 1, "context_rank", 0, INT32_MAX, 0);
    pages->interleave = (int)weft_field_int_or(L, 1, "interleave", 1, INT32_MAX, 1);
}

/* query_start_loc and how many requests it names. */
static const int32_t *read_requests(lua_State *L, int64_t *requests)
{
    weft_tensor *loc = weft__op_ints(L, "query_start_loc", 0);
    if (weft_tensor_numel(loc) < 1) luaL_error(L, "query_start_loc: expected requests + 1 numbers, got none");
    *requests = weft_tensor_numel(loc) - 1;
    return loc->data;
}

static const int32_t *read_per_request(lua_State *L, const char *name, int64_t requests)
{
    weft_tensor *tensor = weft__op_ints(L, name, 0);
    if (weft_tensor_numel(tensor) != requests)
        luaL_error(L, "%s: expected %d numbers, one for each request, got %d", name, (int)requests, (int)weft_tensor_numel(tensor));
    return tensor->data;
}

static int l_kv_write(lua_State *L)
{
    weft_tensor *k = weft__op_tensor(L, "k", 3), *v = weft__op_tensor(L, "v", 3);
    weft_tensor *k_cache = weft__op_tensor(L, "k_cache", 4), *v_cache = weft__op_tensor(L, "v_cache", 4);
    weft_tensor *positions = weft__op_ints(L, "positions", 0);
    weft__op_same_dtype(L, "v", v, k->dtype);
    weft_kv_write_args args = {
        .k = k->data, .v = v->data, .k_cache = k_cache->data, .v_cache = v_cache->data, .positions = positions->data,
        .tokens = k->shape[0], .num_kv_heads = k->shape[1], .head_dim = k->shape[2], .head_dim_v = v->shape[2],
        .k_stride = weft__op_token_stride(L, "k", k), .v_stride = weft__op_token_stride(L, "v", v), .dtype = k->dtype,
        .cache_dtype = k_cache->dtype,
    };
    if (weft_tensor_numel(positions) != args.tokens) luaL_error(L, "positions: expected one for each of %d tokens", (int)args.tokens);
    weft__op_expect(L, "v", v, 0, args.tokens);
    weft__op_expect(L, "v", v, 1, args.num_kv_heads);
    weft__op_expect(L, "k_cache", k_cache, 1, args.num_kv_heads);
    weft__op_expect(L, "k_cache", k_cache, 3, args.head_dim);
    weft__op_expect(L, "v_cache", v_cache, 3, args.head_dim_v);
    args.query_start_loc = read_requests(L, &args.requests);
    read_pages(L, &args.pages, k_cache, v_cache, args.requests);
    weft_raise_if(L, weft_kv_write_cpu(&args, weft__op_pool(L)));
    return 0;
}

/* ---- attention ---- */

static weft_attention_keys read_keys(lua_State *L)
{
    const char *keys = weft_field_string_or(L, 1, "keys", "all");
    if (strcmp(keys, "all") == 0) return WEFT_KEYS_ALL;
    if (strcmp(keys, "context") == 0) return WEFT_KEYS_CONTEXT;
    if (strcmp(keys, "new") != 0) luaL_error(L, "keys: expected 'all', 'context' or 'new', got '%s'", keys);
    return WEFT_KEYS_NEW;
}

/* k and v as this step's tensors or as caches; sets KV heads and dimensions. */
static void read_keys_and_values(lua_State *L, weft_attention_args *args)
{
    int fresh = args->keys == WEFT_KEYS_NEW, ndim = fresh ? 3 : 4;
    weft_tensor *k = weft__op_tensor(L, "k", ndim), *v = weft__op_tensor(L, "v", ndim);
    weft__op_same_dtype(L, "v", v, k->dtype);
    weft__op_expect(L, "k", k, ndim - 1, args->head_dim);
    weft__op_expect(L, "v", v, 1, k->shape[1]);
    args->k = k->data;
    args->v = v->data;
    args->kv_dtype = k->dtype;
    args->num_kv_heads = (int)k->shape[1];
    args->head_dim_v = (int)v->shape[ndim - 1];
    if (!fresh) {
        read_pages(L, &args->pages, k, v, args->requests);
        return;
    }
    weft__op_expect(L, "k", k, 0, args->tokens);
    weft__op_expect(L, "v", v, 0, args->tokens);
    args->k_stride = weft__op_token_stride(L, "k", k);
    args->v_stride = weft__op_token_stride(L, "v", v);
}

static int l_attention(lua_State *L)
{
    weft_tensor *q = weft__op_tensor(L, "q", 3);
    weft_attention_args args = {
        .q = q->data, .tokens = q->shape[0], .num_heads = (int)q->shape[1], .head_dim = (int)q->shape[2],
        .q_stride = weft__op_token_stride(L, "q", q), .dtype = q->dtype, .keys = read_keys(L),
        .causal = weft_field_bool_or(L, 1, "causal", 1), .window = (int)weft_field_int_or(L, 1, "window", 0, INT32_MAX, 0),
        .first_head = (int)weft_field_int_or(L, 1, "first_head", 0, INT32_MAX, 0),
        .first_kv_head = (int)weft_field_int_or(L, 1, "first_kv_head", 0, INT32_MAX, 0),
    };
    args.query_start_loc = read_requests(L, &args.requests);
    args.seq_lens = read_per_request(L, "seq_lens", args.requests);
    read_keys_and_values(L, &args);
    int64_t group = args.num_kv_heads > 0 ? args.num_heads / args.num_kv_heads : 1;
    args.group_size = (int)weft_field_int_or(L, 1, "group_size", 1, INT32_MAX, group > 0 ? group : 1);
    args.scale = (float)weft_field_number_or(L, 1, "scale", 1.0 / sqrt((double)args.head_dim));
    const int64_t shape[] = {args.tokens, args.num_heads, args.head_dim_v};
    weft_tensor *out = weft__op_output(L, "out", q->dtype, 3, shape), *lse = weft__op_output(L, "lse", WEFT_F32, 2, shape);
    weft__op_contiguous(L, "lse", lse);
    args.out = out->data;
    args.out_stride = weft__op_token_stride(L, "out", out);
    args.lse = lse->data;
    weft_raise_if(L, weft_attention_cpu(&args, weft__op_pool(L)));
    return 2;
}

static int l_merge_attn_states(lua_State *L)
{
    weft_tensor *prefix = weft__op_tensor(L, "prefix", 3), *suffix = weft__op_tensor(L, "suffix", 3);
    weft_tensor *prefix_lse = weft__op_tensor(L, "prefix_lse", 2), *suffix_lse = weft__op_tensor(L, "suffix_lse", 2);
    for (int d = 0; d < 3; d++) weft__op_expect(L, "suffix", suffix, d, prefix->shape[d]);
    for (int d = 0; d < 2; d++) {
        weft__op_expect(L, "prefix_lse", prefix_lse, d, prefix->shape[d]);
        weft__op_expect(L, "suffix_lse", suffix_lse, d, prefix->shape[d]);
    }
    weft_merge_attn_states_args args = {
        .prefix = prefix->data, .suffix = suffix->data, .prefix_lse = weft__op_floats(L, "prefix_lse", prefix_lse),
        .suffix_lse = weft__op_floats(L, "suffix_lse", suffix_lse), .tokens = prefix->shape[0], .heads = prefix->shape[1],
        .dim = prefix->shape[2], .prefix_stride = weft__op_token_stride(L, "prefix", prefix),
        .suffix_stride = weft__op_token_stride(L, "suffix", suffix), .prefix_dtype = prefix->dtype, .suffix_dtype = suffix->dtype,
    };
    weft_tensor *out = weft__op_output(L, "out", weft__op_dtype(L, "dtype", suffix->dtype), 3, prefix->shape);
    weft_tensor *lse = weft__op_output(L, "lse", WEFT_F32, 2, prefix->shape);
    weft__op_contiguous(L, "lse", lse);
    args.out = out->data;
    args.out_dtype = out->dtype;
    args.out_stride = weft__op_token_stride(L, "out", out);
    args.lse_out = lse->data;
    weft_raise_if(L, weft_merge_attn_states_cpu(&args, weft__op_pool(L)));
    return 2;
}

/* ---- the context group ---- */

/* Pushes out and lse of a combination and runs it. */
static int combine(lua_State *L, weft_dcp_combine_args *args)
{
    const int64_t shape[] = {args->tokens, args->heads, args->dim};
    args->base2 = weft_field_bool_or(L, 1, "base2", 0);
    args->valid_rows = weft_field_int_or(L, 1, "valid_rows", 0, INT32_MAX, args->tokens);
    weft_dtype dtype = weft__op_dtype(L, "dtype", args->dtype);
    weft_tensor *out = NULL, *lse = NULL;
    weft_raise_if(L, weft_tensor_create(&out, weft_lua_rank(L)->memory, dtype, 3, shape));
    weft_push_tensor(L, out);
    weft_raise_if(L, weft_tensor_create(&lse, weft_lua_rank(L)->memory, WEFT_F32, 2, shape));
    weft_push_tensor(L, lse);
    args->out = out->data;
    args->out_dtype = dtype;
    args->lse_out = lse->data;
    weft_raise_if(L, weft_dcp_combine_cpu(args, weft__op_pool(L)));
    return 2;
}

static int l_dcp_combine(lua_State *L)
{
    weft_tensor *partial = weft__op_tensor(L, "partial", 4), *lse = weft__op_tensor(L, "lse", 3);
    if (partial->shape[3] > 1 && partial->stride[3] != 1) luaL_error(L, "partial: expected adjacent elements in the last dimension");
    for (int d = 0; d < 3; d++) weft__op_expect(L, "lse", lse, d, partial->shape[d]);
    if (lse->shape[2] > 1 && lse->stride[2] != 1) luaL_error(L, "lse: expected adjacent heads");
    weft__op_same_dtype(L, "lse", lse, WEFT_F32);
    weft_dcp_combine_args args = {
        .partial = partial->data, .lse = lse->data, .parts = partial->shape[0], .tokens = partial->shape[1],
        .heads = partial->shape[2], .dim = partial->shape[3], .part_stride = partial->stride[0], .token_stride = partial->stride[1],
        .head_stride = partial->stride[2], .lse_part_stride = lse->stride[0], .lse_token_stride = lse->stride[1],
        .dtype = partial->dtype,
    };
    return combine(L, &args);
}

static int64_t lse_lanes(weft_dtype dtype)
{
    return weft_dtype_size(dtype) == 2 ? 2 : 1;
}

static int l_dcp_pack(lua_State *L)
{
    weft_tensor *out = weft__op_tensor(L, "out", 3), *lse = weft__op_tensor(L, "lse", 2), *buffer = NULL;
    int64_t parts = weft_field_int(L, 1, "parts", 1, INT32_MAX);
    if (out->shape[1] % parts != 0)
        luaL_error(L, "dcp_pack: %d heads do not divide over %d ranks", (int)out->shape[1], (int)parts);
    weft__op_contiguous(L, "out", out);
    for (int d = 0; d < 2; d++) weft__op_expect(L, "lse", lse, d, out->shape[d]);
    const int64_t shape[] = {parts, out->shape[0], out->shape[1] / parts, out->shape[2] + lse_lanes(out->dtype)};
    weft_dcp_pack_args args = {
        .out = out->data, .lse = weft__op_floats(L, "lse", lse), .parts = parts, .tokens = shape[1], .heads = shape[2],
        .dim = out->shape[2], .dtype = out->dtype,
    };
    weft_raise_if(L, weft_tensor_create(&buffer, weft_lua_rank(L)->memory, out->dtype, 4, shape));
    weft_push_tensor(L, buffer);
    args.buffer = buffer->data;
    weft_raise_if(L, weft_dcp_pack_cpu(&args, weft__op_pool(L)));
    return 1;
}

/* Pushes the LSEs of a received buffer. */
static weft_tensor *unpack_lse(lua_State *L, const weft_tensor *buffer)
{
    weft_tensor *lse = NULL;
    weft__op_contiguous(L, "buffer", buffer);
    int64_t dim = buffer->shape[3] - lse_lanes(buffer->dtype);
    if (dim < 0) luaL_error(L, "buffer: its last dimension has no room for an LSE");
    weft_raise_if(L, weft_tensor_create(&lse, weft_lua_rank(L)->memory, WEFT_F32, 3, buffer->shape));
    weft_push_tensor(L, lse);
    weft_dcp_pack_args args = {
        .buffer = buffer->data, .lse_unpacked = lse->data, .parts = buffer->shape[0], .tokens = buffer->shape[1],
        .heads = buffer->shape[2], .dim = dim, .dtype = buffer->dtype,
    };
    weft_raise_if(L, weft_dcp_unpack_lse_cpu(&args, weft__op_pool(L)));
    return lse;
}

static int l_dcp_unpack_lse(lua_State *L)
{
    unpack_lse(L, weft__op_tensor(L, "buffer", 4));
    return 1;
}

static int l_dcp_unpack(lua_State *L)
{
    weft_tensor *buffer = weft__op_tensor(L, "buffer", 4), *lse = unpack_lse(L, buffer);
    weft_dcp_combine_args args = {
        .partial = buffer->data, .lse = lse->data, .parts = buffer->shape[0], .tokens = buffer->shape[1], .heads = buffer->shape[2],
        .dim = buffer->shape[3] - lse_lanes(buffer->dtype), .part_stride = buffer->stride[0], .token_stride = buffer->stride[1],
        .head_stride = buffer->stride[2], .lse_part_stride = lse->stride[0], .lse_token_stride = lse->stride[1],
        .dtype = buffer->dtype,
    };
    return combine(L, &args);
}

static int l_dcp_scale(lua_State *L)
{
    weft_tensor *out = weft__op_tensor(L, "out", 3), *lses = weft__op_tensor(L, "lses", 3), *scaled = NULL, *lse = NULL;
    weft__op_contiguous(L, "out", out);
    for (int d = 0; d < 2; d++) weft__op_expect(L, "lses", lses, d + 1, out->shape[d]);
    weft_dcp_scale_args args = {
        .out = out->data, .lses = weft__op_floats(L, "lses", lses), .parts = lses->shape[0],
        .part = weft_field_int(L, 1, "part", 0, INT32_MAX), .tokens = out->shape[0], .heads = out->shape[1], .dim = out->shape[2],
        .lse_first = weft_field_int_or(L, 1, "lse_first", 0, INT32_MAX, 0), .base2 = weft_field_bool_or(L, 1, "base2", 0),
        .dtype = out->dtype,
    };
    args.lse_heads = weft_field_int_or(L, 1, "lse_heads", 0, INT32_MAX, args.heads);
    const int64_t shape[] = {args.heads, args.tokens, args.dim}, lse_shape[] = {args.tokens, args.lse_heads};
    weft_raise_if(L, weft_tensor_create(&scaled, weft_lua_rank(L)->memory, WEFT_F32, 3, shape));
    weft_push_tensor(L, scaled);
    weft_raise_if(L, weft_tensor_create(&lse, weft_lua_rank(L)->memory, WEFT_F32, 2, lse_shape));
    weft_push_tensor(L, lse);
    args.scaled = scaled->data;
    args.lse_out = lse->data;
    weft_raise_if(L, weft_dcp_scale_cpu(&args, weft__op_pool(L)));
    return 2;
}

static int l_mask_dcp_empty_shards(lua_State *L)
{
    weft_tensor *lse = weft__op_tensor(L, "lse", 2);
    weft__op_floats(L, "lse", lse);
    weft_mask_empty_args args = {.lse = lse->data, .tokens = lse->shape[0], .heads = lse->shape[1]};
    args.query_start_loc = read_requests(L, &args.requests);
    args.local_lens = read_per_request(L, "seq_lens", args.requests);
    lua_getfield(L, 1, "lse");
    weft_raise_if(L, weft_mask_empty_cpu(&args, weft__op_pool(L)));
    return 1;
}

void weft__open_attention_ops(lua_State *L)
{
    static const luaL_Reg functions[] = {
        {"kv_write", l_kv_write},       {"attention", l_attention},   {"merge_attn_states", l_merge_attn_states},
        {"dcp_combine", l_dcp_combine}, {"dcp_pack", l_dcp_pack},     {"dcp_unpack_lse", l_dcp_unpack_lse},
        {"dcp_unpack", l_dcp_unpack},   {"dcp_scale", l_dcp_scale},   {"mask_dcp_empty_shards", l_mask_dcp_empty_shards},
        {NULL, NULL},
    };
    weft__op_register(L, functions);
}
