/* kernels/cuda/tests/twin.h - memory that exists twice: on the host for the CPU operation, on the
 * device for the CUDA one, at the same offsets. */
#pragma once

#include "kernels/weft_cuda.h"

/* Begins a case: everything taken before is gone. */
void twin_reset(uint64_t seed);
/* Memory for `count` elements, 256-byte aligned plus `skew` elements. */
void *twin_take(int64_t count, weft_dtype dtype, int skew);
/* The same, filled with normal values times `scale`. fp8: any finite bits. */
void *twin_random(int64_t count, weft_dtype dtype, int skew, float scale);
/* The same, integers of [low, high). */
int32_t *twin_integers(int64_t count, int low, int high);
double twin_uniform(void);
int twin_below(int n);

void twin_upload(void);
/* The device's address of a pointer (NULL stays NULL). */
void *twin_device(const void *host);
/* Waits; brings the device's side back. 0 and the text on stderr when the device failed. */
int twin_download(void);
/* What the device has at a host address, after twin_download. */
const void *twin_result(const void *host);

weft_cuda_context *twin_context(void); /* of this process; made on the first call */
