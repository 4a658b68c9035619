/* kernels/cuda/tests/bench.h - timing of CUDA operations. */
#pragma once

#include <stdint.h>

#include "kernels/weft_cuda.h"

/* One call number `i` of what is timed, on a stream. Exits with the text when it fails. */
typedef weft_status (*bench_call)(void *context, int i, void *stream);

/* Microseconds of one call: `calls` of them captured into a graph, the median of its replays. */
extern void (*bench_captured)(void *context); /* called behind a capture, if set */
double bench_us(bench_call call, void *context, int calls);
/* Device memory with random normal values times scale (fp8: e4m3 up to 1.875). Never freed alone:
 * bench_free_all ends the section. */
void *bench_random(int64_t count, weft_dtype dtype, float scale);
void *bench_upload(const void *host, size_t bytes);
void bench_free_all(void);
weft_cuda_context *bench_context(void);

/* Lines of the table. bytes or flop 0: left out. The percentages are of the copy and of the product. */
void bench_line(const char *name, double us, double bytes, double flop);
extern double bench_copy_rate, bench_product_rate; /* bytes and FLOP a second, of this run */

void bench_linear(void);
void bench_attention(void);
void bench_small(void);
void bench_experts(void);
void bench_step(void);
void bench_fused(void);
