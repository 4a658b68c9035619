/* kernels/cuda/tests/check_dcp.c - merge, combination and exchange of partial attention results. */
#include <math.h>

#include "kernels/cuda/tests/check.h"

#define D(field) d.field = twin_device(a.field)

static const weft_dtype floats[] = {WEFT_F32, WEFT_BF16, WEFT_F16};

/* LSEs with every special value among them; the values that go with an empty one are NaN. */
static float *lses(int64_t count, void *values, weft_dtype dtype, int64_t dim)
{
    static const float special[] = {-INFINITY, INFINITY, NAN};
    float *p = twin_random(count, WEFT_F32, 0, 5);
    for (int64_t i = 0; i < count; i++)
        if (twin_below(4) == 0) {
            p[i] = special[twin_below(3)];
            for (int64_t j = 0; values != NULL && j < dim; j++) weft_store_f32(values, dtype, i * dim + j, NAN);
        }
    return p;
}

static void merge(weft_dtype t, int64_t dim)
{
    int64_t tokens = 11, heads = 5, n = tokens * heads;
    weft_merge_attn_states_args a = {.tokens = tokens, .heads = heads, .dim = dim, .prefix_stride = heads * dim, .suffix_stride = heads * dim,
                                     .out_stride = heads * dim + 4, .prefix_dtype = t, .suffix_dtype = t, .out_dtype = t}, d;
    void *prefix = twin_random(n * dim, t, 0, 1), *suffix = twin_random(n * dim, t, 0, 1);
    a.prefix_lse = lses(n, prefix, t, dim), a.suffix_lse = lses(n, suffix, t, dim);
    a.prefix = prefix, a.suffix = suffix;
    a.out = twin_take(tokens * a.out_stride, t, 0);
    a.lse_out = twin_take(n, WEFT_F32, 0);
    d = a, D(prefix), D(suffix), D(prefix_lse), D(suffix_lse), D(out), D(lse_out);
    if (!RUN("merge_attn_states", merge_attn_states, a, d)) return;
    check_values(a.out, t, tokens * a.out_stride, check_tolerance(t));
    check_values(a.lse_out, WEFT_F32, n, 1e-6);
}

static void combine(weft_dtype t, weft_dtype to, int64_t parts, int64_t dim, int base2)
{
    int64_t tokens = 7, heads = 6, n = tokens * heads;
    weft_dcp_combine_args a = {.parts = parts, .tokens = tokens, .heads = heads, .dim = dim, .valid_rows = 6, .part_stride = n * dim,
                               .token_stride = heads * dim, .head_stride = dim, .lse_part_stride = n, .lse_token_stride = heads,
                               .base2 = base2, .dtype = t, .out_dtype = to}, d;
    void *partial = twin_random(parts * n * dim, t, 0, 1);
    a.lse = lses(parts * n, partial, t, dim);
    a.partial = partial;
    a.out = twin_take(n * dim, to, 0);
    a.lse_out = twin_take(n, WEFT_F32, 0);
    d = a, D(partial), D(lse), D(out), D(lse_out);
    if (!RUN("dcp_combine", dcp_combine, a, d)) return;
    check_values(a.out, to, n * dim, check_tolerance(to));
    check_values(a.lse_out, WEFT_F32, n, 1e-6);
}

static void exchange(weft_dtype t, int64_t parts, int64_t dim)
{
    int64_t tokens = 5, heads = 3, n = tokens * parts * heads, lanes = t == WEFT_F32 ? 1 : 2;
    weft_dcp_pack_args a = {.parts = parts, .tokens = tokens, .heads = heads, .dim = dim, .dtype = t}, d;
    void *out = twin_random(n * dim, t, 0, 1);
    a.out = out, a.lse = lses(n, NULL, t, dim);
    a.buffer = twin_random(n * (dim + lanes), t, 0, 1);
    a.lse_unpacked = twin_take(n, WEFT_F32, 0);
    d = a, D(out), D(lse), D(buffer), D(lse_unpacked);
    if (RUN("dcp_pack", dcp_pack, a, d)) check_equal(a.buffer, (size_t)(n * (dim + lanes)) * weft_dtype_size(t));
    if (RUN("dcp_unpack_lse", dcp_unpack_lse, a, d)) check_equal(a.lse_unpacked, (size_t)n * 4);
}

static void scale(weft_dtype t, int64_t parts, int64_t dim, int base2)
{
    int64_t tokens = 5, heads = 8, n = tokens * heads;
    weft_dcp_scale_args a = {.parts = parts, .part = parts - 1, .tokens = tokens, .heads = heads, .dim = dim, .lse_first = 2, .lse_heads = 4,
                             .base2 = base2, .dtype = t}, d;
    a.out = twin_random(n * dim, t, 0, 1);
    a.lses = lses(parts * n, NULL, t, dim);
    a.scaled = twin_take(n * dim, WEFT_F32, 0);
    a.lse_out = twin_take(tokens * 4, WEFT_F32, 0);
    d = a, D(out), D(lses), D(scaled), D(lse_out);
    if (!RUN("dcp_scale", dcp_scale, a, d)) return;
    check_values(a.scaled, WEFT_F32, n * dim, 2e-6);
    check_values(a.lse_out, WEFT_F32, tokens * 4, 1e-6);
}

static void mask_empty(void)
{
    weft_mask_empty_args a = {.tokens = 10, .heads = 3, .requests = 3}, d;
    int32_t *lens = twin_integers(3, 0, 1), *loc = twin_integers(4, 0, 1);
    lens[1] = 4, loc[1] = 1, loc[2] = 6, loc[3] = 8;
    a.lse = twin_random(30, WEFT_F32, 0, 1);
    a.local_lens = lens, a.query_start_loc = loc;
    d = a, D(lse), D(local_lens), D(query_start_loc);
    if (RUN("mask_empty", mask_empty, a, d)) check_equal(a.lse, 120);
}

void check_dcp(void)
{
    uint64_t seed = 1000;
    static const int64_t dims[] = {128, 64, 5};
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 3; j++) {
            twin_reset(seed++), merge(floats[i], dims[j]);
            twin_reset(seed++), combine(floats[i], floats[j], 2 + j, dims[j], j % 2);
            twin_reset(seed++), combine(floats[i], floats[i], 8, dims[j], 1);
            twin_reset(seed++), exchange(floats[i], 1 + j, dims[j]);
            twin_reset(seed++), scale(floats[i], 1 + j, dims[j], j % 2);
        }
    twin_reset(seed++), mask_empty();
}
