/* kernels/cpu/sample.c - Gumbel-max over a shard of the vocabulary, or the largest logit. */
#include <inttypes.h>
#include <math.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/philox.h"

/* No u of the generator gives more: u <= 1 - 2^-33, -log(-log(u)) <= 22.873897. */
static const float gumbel_limit = 22.8740f;

typedef struct {
    const weft_sample_args *args;
    int parts;
    float *value; /* (rows, parts): the best of each part */
    int32_t *id;
} sample_job;

double weft_sample_uniform(uint64_t seed, int32_t position, int32_t id)
{
    uint32_t lanes[4];
    weft__philox(seed, (uint32_t)id / 4, (uint32_t)position, lanes);
    return ((double)lanes[(uint32_t)id % 4] + 0.5) * 0x1p-32;
}

static double uniform(const weft_sample_args *a, int64_t row, int64_t id)
{
    return weft_sample_uniform(a->seed[row], a->position[row], (int32_t)id);
}

static float gumbel(double u)
{
    return (float)-log(-log(u));
}

/* The first of the largest; -1 when there is nothing above -inf. */
static int64_t argmax(const float *logits, int64_t begin, int64_t end)
{
    int64_t best = -1;
    float top = -INFINITY;
    for (int64_t i = begin; i < end; i++)
        if (logits[i] > top) top = logits[best = i];
    return best;
}

static void sample_range(const weft_sample_args *a, int64_t row, int64_t begin, int64_t end, float *value, int32_t *id)
{
    const float *logits = a->logits + row * a->logits_stride, temperature = a->temperature[row];
    int64_t best = argmax(logits, begin, end);
    *value = -INFINITY;
    *id = (int32_t)(a->first + begin);
    if (best < 0) return;
    if (!(temperature > 0.0f)) {
        *value = logits[best];
        *id = (int32_t)(a->first + best);
        return;
    }
    /* The largest logit's score is a bound that most others cannot reach with any noise. Of the rest,
     * most are ruled out by -log(u) >= 1 - u, which costs no logarithm. */
    float bound = logits[best] / temperature + gumbel(uniform(a, row, a->first + best));
    for (int64_t i = begin; i < end; i++) {
        float scaled = logits[i] / temperature;
        if (!(scaled + gumbel_limit >= bound) || scaled == -INFINITY) continue;
        double u = uniform(a, row, a->first + i);
        if ((float)(1.0 - u) > expf(scaled - bound) * 1.001f) continue;
        float score = scaled + gumbel(u);
        if (score > *value) {
            *value = score;
            *id = (int32_t)(a->first + i);
        }
        if (score > bound) bound = score;
    }
}

static void sample_part(void *context, int part, int parts)
{
    const sample_job *job = context;
    const weft_sample_args *a = job->args;
    long begin, end;
    weft_pool_range(a->count, 1, part, parts, &begin, &end);
    for (int64_t row = 0; row < a->rows; row++)
        sample_range(a, row, begin, end, &job->value[row * job->parts + part], &job->id[row * job->parts + part]);
}

weft_status weft_sample_cpu(const weft_sample_args *a, weft_pool *pool)
{
    const int64_t sizes[] = {a->rows, a->first, a->count};
    WEFT_TRY(weft__check_sizes("sample", "rows, first, count", sizes, 3));
    if (a->first + a->count > INT32_MAX)
        return weft_fail(WEFT_INVALID, "sample: ids up to %" PRId64 " do not fit in 32 bits", a->first + a->count - 1);
    for (int64_t row = 0; row < a->rows; row++)
        if (!(a->temperature[row] >= 0.0f))
            return weft_fail(WEFT_INVALID, "sample: temperature must be 0 or more, got %g in row %" PRId64, a->temperature[row], row);
    if (a->rows == 0) return WEFT_OK;
    if (a->rows * a->count < 16384) pool = NULL;
    int parts = weft_pool_threads(pool);
    void *scratch = NULL;
    WEFT_TRY(weft__scratch((size_t)a->rows * (size_t)parts * 8, &scratch));
    sample_job job = {a, parts, scratch, (int32_t *)((float *)scratch + a->rows * parts)};
    weft_pool_run(pool, sample_part, &job);
    for (int64_t row = 0; row < a->rows; row++) {
        int best = 0; /* parts are in order of ids, so the first of equals has the lowest */
        for (int part = 1; part < parts; part++)
            if (job.value[row * parts + part] > job.value[row * parts + best]) best = part;
        a->value[row] = job.value[row * parts + best];
        a->id[row] = job.id[row * parts + best];
    }
    return WEFT_OK;
}
