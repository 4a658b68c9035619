/* layers/rope_frequencies.c - the frequencies of each kind of rotary scaling. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "layers/rotary.h"

static const char *const type_names[WEFT_ROPE_TYPE_COUNT] = {"default", "linear", "dynamic", "llama3", "yarn"};
static const double pi = 3.14159265358979323846;

const char *weft_rope_type_name(weft_rope_type type)
{
    return type_names[type];
}

weft_status weft_rope_type_from_name(const char *name, weft_rope_type *out)
{
    char known[96] = "";
    for (int i = 0; i < WEFT_ROPE_TYPE_COUNT; i++) {
        if (strcmp(name, type_names[i]) == 0) {
            *out = (weft_rope_type)i;
            return WEFT_OK;
        }
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", type_names[i]);
    }
    return weft_fail(WEFT_UNSUPPORTED, "unknown rope type '%s' (known: %s)", name, known);
}

weft_rope_scaling weft_rope_scaling_default(void)
{
    return (weft_rope_scaling){.type = WEFT_ROPE_DEFAULT, .factor = 1, .alpha = 1, .low_freq_factor = 1, .high_freq_factor = 4,
                               .beta_fast = 32, .beta_slow = 1, .extrapolation_factor = 1, .attn_factor = 1,
                               .apply_yarn_scaling = 1, .truncate = 1};
}

static double llama3_frequency(double frequency, const weft_rope_scaling *s)
{
    double wavelength = 2 * pi / frequency, original = (double)s->original_max_position;
    if (wavelength < original / s->high_freq_factor) return frequency;
    if (wavelength > original / s->low_freq_factor) return frequency / s->factor;
    double smooth = 0;
    if (s->low_freq_factor != s->high_freq_factor)
        smooth = (original / wavelength - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor);
    return (1 - smooth) * frequency / s->factor + smooth * frequency;
}

/* The dimension whose wave turns `rotations` times within the original length. */
static double yarn_dimension(double rotations, int rotary_dim, double theta, double original)
{
    return rotary_dim * log(original / (rotations * 2 * pi)) / (2 * log(theta));
}

static void yarn_frequencies(double *inv_freq, int rotary_dim, double theta, const weft_rope_scaling *s)
{
    double original = (double)s->original_max_position;
    double low = yarn_dimension(s->beta_fast, rotary_dim, theta, original);
    double high = yarn_dimension(s->beta_slow, rotary_dim, theta, original);
    if (s->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, rotary_dim - 1);
    if (low == high) high += 0.001;
    for (int i = 0; i < rotary_dim / 2; i++) {
        double ramp = fmin(fmax((i - low) / (high - low), 0), 1);
        double keep = (1 - ramp) * s->extrapolation_factor;
        inv_freq[i] = inv_freq[i] / s->factor * (1 - keep) + inv_freq[i] * keep;
    }
}

static double yarn_magnitude(double factor, double mscale)
{
    return factor > 1 ? 0.1 * mscale * log(factor) + 1 : 1;
}

static double yarn_scale(const weft_rope_scaling *s)
{
    if (!s->apply_yarn_scaling) return s->attn_factor;
    if (s->attention_factor != 0) return s->attention_factor * s->attn_factor;
    if (s->mscale != 0 && s->mscale_all_dim != 0)
        return yarn_magnitude(s->factor, s->mscale) / yarn_magnitude(s->factor, s->mscale_all_dim) * s->attn_factor;
    return yarn_magnitude(s->factor, 1) * s->attn_factor;
}

static weft_status check(int rotary_dim, int64_t max_position, double theta, const weft_rope_scaling *s)
{
    if (max_position < 1 || max_position > (int64_t)1 << 30)
        return weft_fail(WEFT_INVALID, "rotary: max_position must be from 1 to 2^30, got %lld", (long long)max_position);
    if (!(theta > 1) || !isfinite(theta)) return weft_fail(WEFT_INVALID, "rotary: rope_theta must be above 1, got %g", theta);
    if (!(s->factor >= 1) || s->factor > 65536) return weft_fail(WEFT_INVALID, "rotary: factor must be from 1 to 65536, got %g", s->factor);
    if (s->type == WEFT_ROPE_LLAMA3 && !(s->low_freq_factor > 0 && s->high_freq_factor >= s->low_freq_factor))
        return weft_fail(WEFT_INVALID, "rotary: wanted 0 < low_freq_factor <= high_freq_factor, found %g and %g",
                         s->low_freq_factor, s->high_freq_factor);
    if (s->type == WEFT_ROPE_YARN && !(s->beta_slow > 0 && s->beta_fast > 0))
        return weft_fail(WEFT_INVALID, "rotary: beta_fast and beta_slow must be positive");
    if (s->type == WEFT_ROPE_DYNAMIC && s->alpha != 1 && rotary_dim <= 2)
        return weft_fail(WEFT_INVALID, "rotary: alpha needs a rotary_dim above 2");
    return WEFT_OK;
}

weft_status weft_rope_frequencies(double *inv_freq, double *scale, int64_t *positions, int rotary_dim, int64_t max_position,
                                  double theta, const weft_rope_scaling *scaling)
{
    WEFT_TRY(check(rotary_dim, max_position, theta, scaling));
    weft_rope_scaling s = *scaling;
    if (s.original_max_position <= 0) s.original_max_position = max_position;
    if (s.type == WEFT_ROPE_DYNAMIC && s.alpha != 1) theta *= pow(s.alpha, (double)rotary_dim / (rotary_dim - 2));
    for (int i = 0; i < rotary_dim / 2; i++) inv_freq[i] = pow(theta, -2.0 * i / rotary_dim);
    *scale = 1;
    *positions = max_position;
    if (s.type == WEFT_ROPE_LINEAR) {
        for (int i = 0; i < rotary_dim / 2; i++) inv_freq[i] /= s.factor;
        *positions = (int64_t)((double)max_position * s.factor);
    } else if (s.type == WEFT_ROPE_LLAMA3) {
        for (int i = 0; i < rotary_dim / 2; i++) inv_freq[i] = llama3_frequency(inv_freq[i], &s);
    } else if (s.type == WEFT_ROPE_YARN) {
        yarn_frequencies(inv_freq, rotary_dim, theta, &s);
        *scale = yarn_scale(&s);
        int64_t stretched = (int64_t)((double)s.original_max_position * s.factor);
        if (stretched > *positions) *positions = stretched;
    }
    return WEFT_OK;
}
