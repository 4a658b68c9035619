/* kernels/cuda/tests/check.c - every CUDA operation against the CPU's, on random inputs at odd sizes.
 * Prints a table; exit 1 on a difference, 2 where no case is run. Arguments name sections: rows dcp experts linear
 * attention fused joined rotated; --every N runs one case of N (tools that watch each access take their time). */
#include "kernels/cuda/tests/check.h"
#include "kernels/cuda/tests/sections.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAMES = 64 };

static struct entry {
    char name[48];
    int cases, failures;
    double worst; /* difference over tolerance */
} table[NAMES];
static int entries;
static struct entry *current;
static long every = 1, asked;

weft_pool *check_pool(void)
{
    static weft_pool *pool;
    if (pool == NULL && weft_pool_create(&pool, weft_cpu_cores(), 1) != WEFT_OK) pool = NULL;
    return pool;
}

int check_skips(void) { return asked++ % every != 0; }

int check_passes_over(void)
{
    if (asked % every == 0) return 0;
    asked++;
    return 1;
}

static void fail(const char *what)
{
    current->failures++;
    if (current->failures <= 3) fprintf(stderr, "FAILED %s: %s\n", current->name, what);
}

int check_begin(const char *name, weft_status cuda, weft_status cpu)
{
    current = NULL;
    for (int i = 0; i < entries; i++)
        if (strcmp(table[i].name, name) == 0) current = &table[i];
    if (current == NULL && entries < NAMES) {
        current = &table[entries++];
        snprintf(current->name, sizeof current->name, "%s", name);
    }
    current->cases++;
    int well = twin_download();
    if (cuda != WEFT_OK || cpu != WEFT_OK || !well) fail(weft_error_message());
    return cuda == WEFT_OK && cpu == WEFT_OK && well;
}

double check_tolerance(weft_dtype dtype) { return dtype == WEFT_F32 ? 2e-6 : dtype == WEFT_F16 ? 6e-4 : 5e-3; }

void check_values(const void *host, weft_dtype dtype, int64_t count, double tolerance)
{
    const void *result = twin_result(host);
    double difference = 0, norm = 0;
    char text[160];
    for (int64_t i = 0; i < count; i++) {
        double want = weft_load_f32(host, dtype, i), got = weft_load_f32(result, dtype, i);
        if (want == got && (isinf(want) || fabs(want) >= 900)) continue; /* untouched, as twin_take filled it */
        if (!isfinite(want) || !isfinite(got)) {
            snprintf(text, sizeof text, "element %lld is %g, wanted %g", (long long)i, got, want);
            fail(text);
            return;
        }
        difference += (got - want) * (got - want);
        norm += want * want;
    }
    double error = norm > 0 ? sqrt(difference / norm) : sqrt(difference);
    if (error / tolerance > current->worst) current->worst = error / tolerance;
    if (error <= tolerance) return;
    snprintf(text, sizeof text, "relative difference %.2e, allowed %.2e (case %d)", error, tolerance, current->cases);
    fail(text);
}

void check_equal(const void *host, size_t bytes)
{
    if (memcmp(host, twin_result(host), bytes) != 0) fail("bytes differ");
}

int check_report(void)
{
    int failures = 0;
    printf("%-34s %6s %9s %22s\n", "operation", "cases", "failures", "difference / allowed");
    for (int i = 0; i < entries; i++) {
        printf("%-34s %6d %9d %22.3f\n", table[i].name, table[i].cases, table[i].failures, table[i].worst);
        failures += table[i].failures;
    }
    printf("%s\n", failures == 0 ? "all agree" : "DIFFERENCES");
    return failures != 0;
}

int main(int argc, char **argv)
{
    static const section sections[] = {{"rows", check_rows},     {"dcp", check_dcp},             {"experts", check_experts},
                                       {"linear", check_linear}, {"attention", check_attention}, {"fused", check_fused}, {"joined", check_joined},
                                       {"rotated", check_rotated}};
    const int count = (int)(sizeof sections / sizeof sections[0]);
    argc--, argv++;
    if (argc > 0 && strcmp(argv[0], "--every") == 0) {
        char *end = NULL;
        if (argc > 1) every = strtol(argv[1], &end, 10);
        if (end == NULL || end == argv[1] || *end != '\0' || every < 1) {
            fprintf(stderr, "--every takes a number from 1, got '%s'\n", argc > 1 ? argv[1] : "");
            return 2;
        }
        argc -= 2, argv += 2;
    }
    int refused = sections_refuse(sections, count, argv, argc, "usage: weft_gpu_check [--every N] [SECTION...]    one case of every N");
    if (refused >= 0) return refused;
    for (int s = 0; s < count; s++)
        if (sections_want(&sections[s], argv, argc)) sections[s].run();
    if (entries > 0) return check_report();
    fprintf(stderr, "no case was run\n");
    return 2;
}
