/* kernels/cpu/isa/elementwise.c - runs of float32: sums, scaling, exp, silu, rotation, softmax. */
#include "kernels/cpu/isa/tables.h"

/* for each vector of a run; the tail is a part of one */
#define EACH_VECTOR(i, count, body)                                        \
    for (int64_t i = 0; i < (count); i += LANES) {                         \
        int64_t part = (count) - i < LANES ? (count) - i : LANES;          \
        body                                                               \
    }

INLINE vf load_some(const float *p, int64_t part)
{
    return part == LANES ? vf_load(p) : vf_load_part(p, WEFT_F32, part);
}
INLINE void store_some(float *p, vf v, int64_t part)
{
    if (part == LANES) vf_store(p, v);
    else memcpy(p, &v, (size_t)part * 4);
}

typedef uint64_t vq __attribute__((vector_size(LANES * 4)));

uint64_t ISA(sum_words)(const void *words, int64_t count)
{
    /* Four places at once: memory gives one stream less than it can. */
    enum { WORDS = LANES / 2, STREAMS = 4 };
    const int64_t each = count / STREAMS / (2 * WORDS) * (2 * WORDS);
    const char *p = words;
    vq acc[STREAMS][2] = {{{0}}};
    for (int64_t i = 0; i < each; i += 2 * WORDS)
        for (int s = 0; s < STREAMS; s++)
            for (int u = 0; u < 2; u++) {
                vq v;
                memcpy(&v, p + (s * each + i + u * WORDS) * 8, sizeof v);
                acc[s][u] += v;
            }
    for (int s = 1; s < STREAMS; s++) acc[0][0] += acc[s][0] + acc[s][1];
    acc[0][0] += acc[0][1];
    uint64_t sum = 0;
    for (int j = 0; j < WORDS; j++) sum += acc[0][0][j];
    p += STREAMS * each * 8;
    for (int64_t i = STREAMS * each; i < count; i++, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        sum += word;
    }
    return sum;
}

float ISA(sum_squares)(const float *x, int64_t count)
{
    vf acc[4] = {{0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int u = 0; u < 4; u++) {
            vf v = vf_load(x + i + u * LANES);
            acc[u] += v * v;
        }
    for (; i < count; i += LANES) {
        vf v = load_some(x + i, weft__min(count - i, LANES));
        acc[0] += v * v;
    }
    return vf_sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

void ISA(add)(float *y, const float *x, int64_t count)
{
    EACH_VECTOR(i, count, { store_some(y + i, load_some(y + i, part) + load_some(x + i, part), part); })
}

void ISA(scale)(float *y, float factor, int64_t count)
{
    EACH_VECTOR(i, count, { store_some(y + i, load_some(y + i, part) * factor, part); })
}

void ISA(axpy)(float *y, const float *x, float factor, int64_t count)
{
    EACH_VECTOR(i, count, { store_some(y + i, load_some(y + i, part) + load_some(x + i, part) * factor, part); })
}

void ISA(scale_gain)(float *y, float factor, const float *gain, int64_t count)
{
    EACH_VECTOR(i, count, { store_some(y + i, load_some(y + i, part) * factor * load_some(gain + i, part), part); })
}

void ISA(silu_mul)(float *y, const float *gate, const float *up, int64_t count)
{
    EACH_VECTOR(i, count, {
        vf g = load_some(gate + i, part);
        store_some(y + i, g / (1.0f + vf_exp(-g)) * load_some(up + i, part), part);
    })
}

void ISA(rotate)(float *x1, float *x2, const float *c, const float *s, int64_t count)
{
    EACH_VECTOR(i, count, {
        vf a = load_some(x1 + i, part);
        vf b = load_some(x2 + i, part);
        vf cos = load_some(c + i, part);
        vf sin = load_some(s + i, part);
        store_some(x1 + i, a * cos - b * sin, part);
        store_some(x2 + i, b * cos + a * sin, part);
    })
}

/* exp(old - now) for maxima, where "nothing yet" (-inf) gives 0 and `now` is finite or NaN */
INLINE vf ratio_of(vf old, vf now)
{
    return vf_exp(old - now);
}

float ISA(softmax_row)(float *s, int64_t count, float *max, float *sum)
{
    vf top = vf_all(*max);
    int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) top = vf_max(top, vf_load(s + i));
    float now = top[0];
    for (int i = 1; i < LANES; i++) now = now > top[i] ? now : top[i];
    for (int64_t i = whole; i < count; i++) now = now > s[i] ? now : s[i];
    float base = now == -INFINITY ? 0.0f : now;
    vf total = {0};
    EACH_VECTOR(i, count, {
        vf p = vf_exp(load_some(s + i, part) - base);
        store_some(s + i, p, part);
        /* the zeros that fill up the last vector are no scores */
        if (part == LANES) total += p;
        else
            for (int64_t j = 0; j < part; j++) total[0] += p[j];
    })
    float ratio = ratio_of(vf_all(*max), vf_all(base))[0];
    *max = now;
    *sum = *sum * ratio + vf_sum(total);
    return ratio;
}

void ISA(softmax_lanes)(float *scores, int64_t keys, float *max, float *sum, float *ratio)
{
    for (int half = 0; half < PANEL; half += LANES) {
        vf old = vf_load(max + half), now = old;
        for (int64_t i = 0; i < keys; i++) now = vf_max(now, vf_load(scores + i * PANEL + half));
        vf base = vf_select(now == -INFINITY, vf_all(0.0f), now);
        vf total = {0};
        for (int64_t i = 0; i < keys; i++) {
            vf p = vf_exp(vf_load(scores + i * PANEL + half) - base);
            vf_store(scores + i * PANEL + half, p);
            total += p;
        }
        vf r = ratio_of(old, base);
        vf_store(ratio + half, r);
        vf_store(max + half, now);
        vf_store(sum + half, vf_load(sum + half) * r + total);
    }
}

void ISA(scale_lanes)(float *c, int64_t rows, const float *ratio)
{
    vf r0 = vf_load(ratio), r1 = vf_load(ratio + LANES);
    for (int64_t i = 0; i < rows; i++) {
        vf_store(c + i * PANEL, vf_load(c + i * PANEL) * r0);
        vf_store(c + i * PANEL + LANES, vf_load(c + i * PANEL + LANES) * r1);
    }
}
