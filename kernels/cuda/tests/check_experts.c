/* kernels/cuda/tests/check_experts.c - the router, experts, and rounding to e4m3 groups. */
#include <math.h>

#include "kernels/cuda/tests/check.h"

#define D(field) d.field = twin_device(a.field)

static void router(int64_t tokens, int64_t experts, int64_t top_k, weft_router_scoring scoring, int bias, int renormalize)
{
    weft_router_args a = {.tokens = tokens, .experts = experts, .logits_stride = experts + 2, .top_k = top_k, .scoring = scoring,
                          .renormalize = renormalize}, d;
    float *logits = twin_random(tokens * a.logits_stride, WEFT_F32, 0, 2);
    if (tokens > 3) logits[a.logits_stride * 2] = NAN, logits[a.logits_stride * 3 + 1] = INFINITY;
    a.logits = logits;
    a.bias = bias ? twin_random(experts, WEFT_F32, 0, 0.3f) : NULL;
    a.ids = twin_integers(tokens * top_k, 0, 5);
    a.weights = twin_take(tokens * top_k, WEFT_F32, 0);
    d = a, D(logits), D(bias), D(ids), D(weights);
    if (!RUN("router", router, a, d)) return;
    check_equal(a.ids, (size_t)(tokens * top_k) * 4);
    check_values(a.weights, WEFT_F32, tokens * top_k, 2e-6);
}

static void quantize_groups(weft_dtype t, weft_dtype to, int64_t cols, int64_t phase)
{
    weft_quantize_groups_args a = {.rows = 5, .cols = cols, .x_stride = cols + 3, .y_stride = cols + 1, .phase = phase, .dtype = t, .y_dtype = to}, d;
    float *x = twin_random(5 * a.x_stride, t, 0, 1);
    for (int i = 0; i < 5; i++) weft_store_f32(x, t, i * 7, i * 1e-3f); /* small ones, too */
    weft_store_f32(x, t, 2 * a.x_stride, INFINITY);
    a.x = x;
    a.y = twin_take(5 * a.y_stride, to, 0);
    d = a, D(x), D(y);
    if (RUN("quantize_groups", quantize_groups, a, d)) check_values(a.y, to, 5 * a.y_stride, check_tolerance(to));
}

static weft_expert_matrix matrix(int64_t count, int64_t rows, int64_t columns, weft_dtype t, int64_t phase)
{
    weft_expert_matrix m = {.scale_rows = (rows + 127) / 128, .scale_stride = (phase + columns + 127) / 128, .scale_col_phase = phase};
    const float unit = 1.0f / sqrtf((float)columns);
    m.w = twin_random(count * rows * columns, t, 0, unit);
    if (t != WEFT_F8E4M3) return m;
    float *scale = twin_random(count * m.scale_rows * m.scale_stride, WEFT_F32, 0, unit);
    int32_t *row = twin_integers(rows, 0, 1);
    for (int64_t i = 0; i < rows; i++) row[i] = (int32_t)(i / 128);
    m.scale = scale, m.scale_row = row;
    return m;
}

static void experts(int64_t tokens, int64_t top_k, int64_t all, int64_t first, int64_t count, int64_t hidden, int64_t width, weft_dtype x,
                    weft_dtype w, int quantize, int64_t phase)
{
    if (check_passes_over()) return;
    weft_experts_args a = {.tokens = tokens, .top_k = top_k, .first = first, .count = count, .hidden = hidden, .intermediate = width,
                           .x_stride = hidden + 8, .y_stride = hidden, .x_dtype = x, .w_dtype = w, .y_dtype = x, .quantize = quantize, .cuda = twin_context()}, d;
    a.x = twin_random(tokens * a.x_stride, x, 0, 1);
    int32_t *ids = twin_integers(tokens * top_k, 0, 1);
    for (int64_t t = 0; t < tokens; t++) /* distinct in a token; some are nobody */
        for (int64_t k = 0, start = t < 3 && tokens < 9 ? 1 : twin_below((int)all); k < top_k; k++) ids[t * top_k + k] = twin_below(9) ? (int32_t)((start + k * 3) % all) : -1;
    a.ids = ids;
    a.weights = twin_random(tokens * top_k, WEFT_F32, 0, 1);
    a.up = matrix(count, 2 * width, hidden, w, 0);
    a.down = matrix(count, hidden, width, w, phase);
    a.y = twin_take(tokens * hidden, x, 0);
    size_t bytes = 0;
    if (weft_experts_workspace(&a, &bytes) != WEFT_OK) return;
    a.workspace = twin_take((int64_t)bytes, WEFT_U8, 0);
    d = a, D(x), D(ids), D(weights), D(up.w), D(up.scale), D(up.scale_row), D(down.w), D(down.scale), D(down.scale_row), D(y), D(workspace);
    /* a rounding that falls the other way in the middle moves one value by 1/16 */
    double tolerance = quantize ? 5e-3 : x == WEFT_F32 ? 5e-6 : check_tolerance(x);
    if (RUN(quantize ? "experts, rounded activations" : "experts", experts, a, d)) check_values(a.y, x, tokens * hidden, tolerance);
}

void check_experts(void)
{
    uint64_t seed = 20000;
    for (int s = 0; s < WEFT_ROUTER_SCORING_COUNT; s++)
        for (int v = 0; v < 4; v++) {
            twin_reset(seed++), router(1, 256, 8, (weft_router_scoring)s, v & 1, v >> 1);
            twin_reset(seed++), router(37, 130, 6, (weft_router_scoring)s, v & 1, v >> 1);
            twin_reset(seed++), router(5, 7, 7, (weft_router_scoring)s, v & 1, v >> 1);
        }
    static const weft_dtype types[][2] = {{WEFT_F32, WEFT_F32}, {WEFT_BF16, WEFT_BF16}, {WEFT_F16, WEFT_F16}, {WEFT_BF16, WEFT_F8E4M3}, {WEFT_F32, WEFT_F8E4M3}};
    for (int i = 0; i < 5; i++) {
        const weft_dtype x = types[i][0], w = types[i][1];
        if (i < 3) {
            twin_reset(seed++), quantize_groups(x, x, 517, 0);
            twin_reset(seed++), quantize_groups(x, WEFT_F32, 300, 72);
        }
        twin_reset(seed++), experts(1, 4, 16, 0, 16, 256, 192, x, w, 0, 0);
        twin_reset(seed++), experts(9, 3, 16, 4, 8, 264, 80, x, w, 0, 64);
        twin_reset(seed++), experts(70, 2, 5, 0, 5, 130, 70, x, w, 0, 5);
        twin_reset(seed++), experts(400, 4, 12, 2, 9, 128, 96, x, w, 0, 32);
        twin_reset(seed++), experts(3, 4, 16, 0, 0, 64, 16, x, w, 0, 0);
        twin_reset(seed++), experts(32, 8, 256, 0, 256, 128, 48, x, w, 0, 0);
        twin_reset(seed++), experts(150, 8, 256, 100, 130, 48, 32, x, w, 0, 0);
        if (x != WEFT_F32) { /* few tokens, many columns */
            twin_reset(seed++), experts(1, 8, 16, 0, 16, 3072, 768, x, w, 0, 0);
            twin_reset(seed++), experts(8, 8, 16, 0, 16, 3072, 768, x, w, 0, 0);
            twin_reset(seed++), experts(7, 4, 20, 5, 9, 1040, 336, x, w, 0, w == WEFT_F8E4M3 ? 80 : 0);
            twin_reset(seed++), experts(2, 6, 6, 1, 4, 400, 144, x, w, w == WEFT_F8E4M3, w == WEFT_F8E4M3 ? 64 : 0);
            twin_reset(seed++), experts(8, 32, 64, 0, 64, 128, 80, x, w, 0, 0);
        }
        if (w == WEFT_F8E4M3) {
            twin_reset(seed++), experts(5, 4, 16, 0, 16, 256, 192, x, w, 1, 64);
            twin_reset(seed++), experts(300, 4, 16, 0, 16, 256, 128, x, w, 1, 0);
        }
    }
}
