/* kernels/cpu/dispatch.c - which instruction set runs. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

#if defined(__x86_64__)
static int has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static int has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
}

/* Both the machine and the user's limit allow it; the names are in order of width. */
const weft_isa_table *weft__isa(void)
{
    const char *limit = getenv("WEFT_CPU_ISA");
    if (limit != NULL && strcmp(limit, "scalar") == 0) return &weft_isa_table_scalar;
    if ((limit == NULL || strcmp(limit, "avx2") != 0) && has_avx512()) return &weft_isa_table_avx512;
    return has_avx2() ? &weft_isa_table_avx2 : &weft_isa_table_scalar;
}
#else
const weft_isa_table *weft__isa(void)
{
    return &weft_isa_table_scalar;
}
#endif

const char *weft_cpu_isa(void)
{
    return weft__isa()->name;
}
