/* kernels/cuda/tests/check_rows.c - operations on rows: embedding, norms, rotation, cache writes,
 * activation, sums, chosen rows, sampling. */
#include <math.h>

#include "kernels/cuda/tests/check.h"

#define D(field) d.field = twin_device(a.field)

static const weft_dtype floats[] = {WEFT_F32, WEFT_BF16, WEFT_F16};
/* columns, and what is added to strides and pointers: aligned, odd, odd by alignment */
static const struct { int64_t cols; int skew, pad; } shapes[] = {{4096, 0, 0}, {64, 0, 8}, {517, 0, 0}, {1000, 1, 3}, {40000, 0, 0}};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

static void embedding(weft_dtype w, weft_dtype y, int s)
{
    int64_t n = shapes[s].cols;
    weft_embedding_args a = {.tokens = 13, .hidden = n, .first = 5, .count = 20, .w_dtype = w, .y_dtype = y}, d;
    a.w = twin_random(20 * n, w, shapes[s].skew, 1);
    a.ids = twin_integers(13, 0, 30);
    a.y = twin_take(13 * n, y, 0);
    d = a, D(w), D(ids), D(y);
    if (RUN("embedding", embedding, a, d)) check_values(a.y, y, 13 * n, check_tolerance(y) / 100);
}

static void norms(weft_dtype t, weft_dtype gain, int s, int residual)
{
    int64_t n = shapes[s].cols, stride = n + shapes[s].pad, rows = 7;
    weft_rms_norm_args a = {.rows = rows, .cols = n, .x_stride = stride, .residual_stride = stride, .y_stride = stride, .eps = 1e-5f,
                            .dtype = t, .gain_dtype = gain}, d;
    a.x = twin_random(rows * stride, t, shapes[s].skew, 1);
    a.residual = residual ? twin_random(rows * stride, t, shapes[s].skew, 3) : NULL;
    a.gain = twin_random(n, gain, 0, 1);
    a.y = twin_take(rows * stride, t, shapes[s].skew);
    d = a, D(x), D(residual), D(gain), D(y);
    if (!RUN("rms_norm", rms_norm, a, d)) return;
    check_values(a.y, t, rows * stride, check_tolerance(t));
    if (residual) check_values(a.residual, t, rows * stride, check_tolerance(t) / 100);
}

static void group_norm(weft_dtype t, int s)
{
    int64_t n = shapes[s].cols, stride = n + shapes[s].pad, rows = 5;
    weft_group_norm_args a = {.rows = rows, .cols = n, .x_stride = stride, .y_stride = stride, .var_stride = 3, .world = 2, .eps = 1e-6f,
                              .dtype = t, .gain_dtype = t}, d;
    a.x = twin_random(rows * stride, t, shapes[s].skew, 1);
    a.var = twin_take(rows * 3, WEFT_F32, 0);
    a.gain = twin_random(n, t, 0, 1);
    a.y = twin_take(rows * stride, t, shapes[s].skew);
    d = a, D(x), D(var), D(gain), D(y);
    if (RUN("group_norm_sums", group_norm_sums, a, d)) check_values(a.var, WEFT_F32, rows * 3, 2e-6);
    for (int i = 0; i < rows; i++) a.var[i * 3] = (float)(0.5 + twin_uniform());
    if (RUN("group_norm_apply", group_norm_apply, a, d)) check_values(a.y, t, rows * stride, check_tolerance(t));
}

static void rope(weft_dtype t, int64_t heads, int64_t dim, int64_t rotary, int64_t gap)
{
    int64_t tokens = 9, stride = heads * dim + gap;
    weft_rope_args a = {.tokens = tokens, .heads = heads, .head_dim = dim, .rotary_dim = rotary, .token_stride = stride,
                        .max_positions = 50, .dtype = t}, d;
    a.x = twin_random(tokens * stride, t, 0, 1);
    a.positions = twin_integers(tokens, 0, 50);
    a.cos_sin = twin_random(50 * rotary, WEFT_F32, 0, 1);
    d = a, D(x), D(positions), D(cos_sin);
    if (RUN("rope", rope, a, d)) check_values(a.x, t, tokens * stride, check_tolerance(t));
}

static void kv_write(weft_dtype t, weft_dtype cache, int64_t dim, int64_t dim_v, int context, int interleave)
{
    enum { R = 3, BLOCKS = 24, WIDTH = 8 };
    int64_t page = 16, heads = 3, tokens = 40;
    weft_kv_write_args a = {.tokens = tokens, .requests = R, .num_kv_heads = heads, .head_dim = dim, .head_dim_v = dim_v,
                            .k_stride = heads * dim + 8, .v_stride = heads * dim_v, .dtype = t, .cache_dtype = cache}, d;
    a.k = twin_random(tokens * a.k_stride, t, 0, 1);
    a.v = twin_random(tokens * a.v_stride, t, 0, 1);
    a.k_cache = twin_random(BLOCKS * heads * page * dim, cache, 0, 1);
    a.v_cache = twin_random(BLOCKS * heads * page * dim_v, cache, 0, 1);
    int32_t *loc = twin_integers(R + 1, 0, 1), *table = twin_integers(R * WIDTH, 0, 1), *positions = twin_integers(tokens, 0, 1);
    loc[1] = 1, loc[2] = 30, loc[3] = 37;
    for (int i = 0; i < R * WIDTH; i++) table[i] = (i * 7 + 3) % BLOCKS;
    for (int r = 0; r < R; r++)
        for (int i = loc[r]; i < loc[r + 1]; i++) positions[i] = 20 * r + i - loc[r];
    a.positions = positions, a.query_start_loc = loc;
    a.pages = (weft_page_layout){table, WIDTH, page, context, context - 1, interleave};
    d = a, D(k), D(v), D(k_cache), D(v_cache), D(positions), D(query_start_loc), D(pages.block_table);
    if (!RUN("kv_write", kv_write, a, d)) return;
    check_values(a.k_cache, cache, BLOCKS * heads * page * dim, check_tolerance(cache) / 100);
    check_values(a.v_cache, cache, BLOCKS * heads * page * dim_v, check_tolerance(cache) / 100);
}

static void elementwise(weft_dtype t, int s)
{
    int64_t n = shapes[s].cols, stride = n + shapes[s].pad, rows = 6;
    int skew = shapes[s].skew;
    weft_add_args a = {.rows = rows, .cols = n, .a_stride = stride, .b_stride = s % 2 ? 0 : stride, .y_stride = stride, .dtype = t}, d;
    a.a = twin_random(rows * stride, t, skew, 1);
    a.b = twin_random(rows * stride, t, skew, 1);
    a.y = twin_take(rows * stride, t, skew);
    d = a, D(a), D(b), D(y);
    if (RUN("add", add, a, d)) check_values(a.y, t, rows * stride, check_tolerance(t) / 100);
    weft_silu_mul_args m = {.rows = rows, .cols = n, .x_stride = 2 * n + shapes[s].pad, .y_stride = stride, .dtype = t}, dm;
    m.x = twin_random(rows * m.x_stride, t, skew, 2);
    m.y = twin_take(rows * stride, t, skew);
    dm = m, dm.x = twin_device(m.x), dm.y = twin_device(m.y);
    if (RUN("silu_mul", silu_mul, m, dm)) check_values(m.y, t, rows * stride, check_tolerance(t));
}

static void gather_rows(weft_dtype t, int s)
{
    int64_t n = shapes[s].cols, stride = n + shapes[s].pad;
    weft_gather_rows_args a = {.count = 11, .cols = n, .x_stride = stride, .y_stride = stride, .x_rows = 9, .dtype = t}, d;
    a.x = twin_random(9 * stride, t, shapes[s].skew, 1);
    a.indices = twin_integers(11, 0, 9);
    a.y = twin_random(11 * stride, t, shapes[s].skew, 1);
    d = a, D(x), D(indices), D(y);
    if (RUN("gather_rows", gather_rows, a, d)) check_equal(a.y, (size_t)(11 * stride) * weft_dtype_size(t));
}

static void sample(int64_t rows, int64_t count, int context)
{
    weft_sample_args a = {.rows = rows, .first = 1000, .count = count, .logits_stride = count + 3}, d;
    float *logits = twin_random(rows * a.logits_stride, WEFT_F32, 0, 3), *temperature = twin_random(rows, WEFT_F32, 0, 1);
    uint64_t *seed = twin_take(rows * 2, WEFT_I32, 0);
    for (int64_t r = 0; r < rows; r++) {
        temperature[r] = r % 3 == 0 ? 0.0f : 0.3f * (float)r;
        if (r % 5 == 4) for (int64_t i = 0; i < count; i++) logits[r * a.logits_stride + i] = NAN;
        if (r % 5 == 3) for (int64_t i = 0; i < count; i++) logits[r * a.logits_stride + i] = (float)(i / 50 % 3);
    }
    a.logits = logits, a.temperature = temperature, a.seed = seed;
    a.position = twin_integers(rows, 0, 100000);
    a.value = twin_take(rows, WEFT_F32, 0);
    a.id = twin_integers(rows, 0, 5);
    d = a, D(logits), D(temperature), D(seed), D(position), D(value), D(id);
    d.cuda = context ? twin_context() : NULL;
    if (!RUN("sample", sample, a, d)) return;
    check_equal(a.id, (size_t)rows * 4);
    check_values(a.value, WEFT_F32, rows, 1e-6);
}

void check_rows(void)
{
    uint64_t seed = 1;
    for (int i = 0; i < 3; i++)
        for (int s = 0; s < SHAPES; s++) {
            weft_dtype t = floats[i];
            for (int j = 0; j < 3; j++) {
                twin_reset(seed++), embedding(t, floats[j], s);
                twin_reset(seed++), norms(t, floats[j], s, j % 2);
            }
            twin_reset(seed++), norms(t, t, s, 1);
            twin_reset(seed++), group_norm(t, s);
            twin_reset(seed++), elementwise(t, s);
            twin_reset(seed++), gather_rows(t, s);
        }
    twin_reset(seed++), gather_rows(WEFT_U8, 2);
    twin_reset(seed++), gather_rows(WEFT_I32, 3);
    for (int i = 0; i < 3; i++) {
        twin_reset(seed++), rope(floats[i], 5, 64, 64, 5);
        twin_reset(seed++), rope(floats[i], 5, 64, 64, 8);
        twin_reset(seed++), rope(floats[i], 40, 128, 64, 8);
        twin_reset(seed++), rope(floats[i], 3, 48, 40, 8);
        twin_reset(seed++), rope(floats[i], 3, 10, 6, 5);
        for (int j = 0; j < 3; j++) {
            twin_reset(seed++), kv_write(floats[i], floats[j], 64, 64, 1, 1);
            twin_reset(seed++), kv_write(floats[i], floats[j], 24, 40, 2, 4);
            twin_reset(seed++), kv_write(floats[i], floats[j], 5, 3, 3, 1);
        }
    }
    static const int64_t counts[] = {1, 37, 5000, 128256};
    for (int c = 0; c < 4; c++)
        for (int context = 0; context < 2; context++) {
            twin_reset(seed++), sample(1, counts[c], context);
            twin_reset(seed++), sample(12, counts[c], context);
        }
}
