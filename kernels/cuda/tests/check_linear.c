/* kernels/cuda/tests/check_linear.c - products of every kind that weft_linear_cuda chooses between. */
#include <math.h>

#include "kernels/cuda/tests/check.h"

#define D(field) d.field = twin_device(a.field)

typedef struct {
    int64_t tokens, n, k;
    weft_dtype x, w, y;
    int bias, add, context, skew, pad, phase;
} shape;

static void linear(const shape *s)
{
    if (check_passes_over()) return;
    weft_linear_args a = {.tokens = s->tokens, .n = s->n, .k = s->k, .x_stride = s->k + s->pad, .w_stride = s->k + s->pad,
                          .y_stride = s->n + s->pad, .scale_col_phase = s->phase, .x_dtype = s->x, .w_dtype = s->w, .bias_dtype = s->y,
                          .y_dtype = s->y, .add = s->add}, d;
    const float unit = 1.0f / sqrtf((float)(s->k > 0 ? s->k : 1));
    a.x = twin_random(s->tokens * a.x_stride, s->x, s->skew, 1);
    a.w = twin_random(s->n * a.w_stride, s->w, s->skew, unit);
    a.bias = s->bias ? twin_random(s->n, s->y, 0, 1) : NULL;
    a.y = twin_random(s->tokens * a.y_stride, s->y, s->skew, 1);
    if (s->w == WEFT_F8E4M3) {
        a.scale_stride = (s->phase + s->k + 127) / 128 + 1;
        int64_t rows = (s->n + 127) / 128 + 1;
        float *scale = twin_random(rows * a.scale_stride, WEFT_F32, 0, unit);
        int32_t *row = twin_integers(s->n, 0, 1);
        for (int64_t i = 0; i < s->n; i++) row[i] = (int32_t)((i + 40) / 128);
        a.scale = scale, a.scale_row = row;
    }
    d = a, D(x), D(w), D(bias), D(y), D(scale), D(scale_row);
    d.cuda = s->context ? twin_context() : NULL;
    const char *name = s->w == WEFT_F8E4M3 ? "linear, fp8 weights" : s->w == WEFT_F32 && s->x == WEFT_F32 ? "linear, float32" : "linear, 16-bit weights";
    /* float32 sums in another order than the CPU's: the norm of the sum grows as its rounding does */
    double tolerance = s->y == WEFT_F32 ? 5e-6 : check_tolerance(s->y);
    if (RUN(name, linear, a, d)) check_values(a.y, s->y, s->tokens * a.y_stride, tolerance);
}

void check_linear(void)
{
    static const int64_t sizes[][2] = {{96, 64}, {333, 517}, {40, 4096}, {513, 1040}, {16, 128}, {200, 3088}, {7, 0}};
    static const int64_t tokens[] = {1, 3, 8, 9, 17, 33, 70};
    static const weft_dtype types[][3] = {{WEFT_BF16, WEFT_F32, WEFT_F32},
                                          {WEFT_F32, WEFT_F32, WEFT_F32},   {WEFT_BF16, WEFT_BF16, WEFT_BF16}, {WEFT_F16, WEFT_F16, WEFT_F16},
                                          {WEFT_BF16, WEFT_BF16, WEFT_F32}, {WEFT_F32, WEFT_BF16, WEFT_F32},   {WEFT_BF16, WEFT_F32, WEFT_F16},
                                          {WEFT_BF16, WEFT_F8E4M3, WEFT_BF16}, {WEFT_F16, WEFT_F8E4M3, WEFT_F16}, {WEFT_F32, WEFT_F8E4M3, WEFT_F32}};
    uint64_t seed = 2000;
    for (int t = 0; t < 10; t++)
        for (int i = 0; i < 7; i++)
            for (int j = 0; j < 7; j++) {
                shape s = {tokens[j], sizes[i][0], sizes[i][1], types[t][0], types[t][1], types[t][2], 0, 0, 0, 0, 0, 0};
                const int variant = (int)(seed % 8);
                s.bias = variant & 1, s.add = variant >> 1 & 1, s.context = variant >> 2;
                if (seed % 11 == 3) s.skew = 1, s.pad = 3;
                if (seed % 7 == 2) s.pad = 16;
                if (seed % 5 == 1) s.phase = seed % 2 ? 128 : 72;
                twin_reset(seed++), linear(&s);
                s.context = !s.context;
                twin_reset(seed++), linear(&s);
            }
    /* enough weights for those that a batch of requests shares */
    for (int i = 0; i < 8; i++) {
        static const weft_dtype batch_types[][2] = {{WEFT_BF16, WEFT_BF16}, {WEFT_F16, WEFT_F16}, {WEFT_BF16, WEFT_F32}, {WEFT_BF16, WEFT_BF16}};
        const weft_dtype x = batch_types[i % 4][0], y = batch_types[i % 4][1];
        shape s = {i < 3 ? 3 + 2 * i : 8 * (i - 2) + i % 2, i == 3 ? 2112 : 2117, 4136, x, x, y, i % 4 > 0, i % 4 == 1, 1, 0, i % 4 == 2 ? 8 : 0, 0};
        twin_reset(seed++), linear(&s);
    }
    /* enough weights for the kernel that stays on the machine */
    for (int64_t t = 1; t <= 2; t++) {
        shape s = {t, 400003, 680, WEFT_BF16, WEFT_BF16, WEFT_BF16, 1, 1, 1, 0, 8, 0};
        twin_reset(seed++), linear(&s);
    }
}
