/* kernels/cuda/tests/check.h - comparing a case's results, and the table of all. */
#pragma once

#include "kernels/cuda/tests/twin.h"

/* Runs one case, unless --every leaves it out (0): twin memory is filled, args point into it. cpu and cuda are the two operations,
 * `device_args` the args with device pointers. */
#define RUN(name, op, args, device_args)                                              \
    (!check_skips() && (twin_upload(), check_begin(name, weft_##op##_cuda(&(device_args), NULL), weft_##op##_cpu(&(args), check_pool()))))

int check_skips(void);       /* whether the next case is left out; each answer counts as a case */
/* For functions of one case that are slow to set up: 1 when --every leaves it out. */
int check_passes_over(void);
weft_pool *check_pool(void); /* threads for the CPU's side */
/* 1 when both returned OK and the device is well. */
int check_begin(const char *name, weft_status cuda, weft_status cpu);
/* Compares `count` elements at a host address; tolerance: of the relative norm of the difference. */
void check_values(const void *host, weft_dtype dtype, int64_t count, double tolerance);
void check_equal(const void *host, size_t bytes);

double check_tolerance(weft_dtype dtype); /* what rounding to dtype allows */
/* Prints the table; 0 when all agreed. */
int check_report(void);

void check_rows(void);
void check_linear(void);
void check_attention(void);
void check_dcp(void);
void check_experts(void);
void check_fused(void);
void check_joined(void);
void check_rotated(void);
