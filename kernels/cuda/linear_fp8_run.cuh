/* kernels/cuda/linear_fp8_run.cuh - products of e4m3 weights of one token, and the attention between them, as one launch
 * (linear_fp8_run.cu). */
#pragma once

#include "kernels/cuda/linear_fp8_job.cuh"

namespace weft {

enum {
    RUN_DIM = 128,        /* of a head of attention */
    RUN_ROWS = 8,         /* query heads of a KV head, at most */
    RUN_PARTS = 16,       /* of a KV head's keys, at most */
    RUN_PACKETS = RUN_DIM / 2 + 1, /* of a row of a part: its values, two by two, and its statistics */
    RUN_KEYS = 4096       /* of attention; with more the kernels of its own are faster */
};

struct alignas(16) Fp8Attend { /* copied 16 bytes at a time */
    weft_attention_args a;
    int after; /* products in front of it */
};

/* A launch. */
struct Fp8Run {
    const Fp8Job *jobs;       /* device; Fp8Job.attends: instructions of attention in front of it */
    const Fp8Attend *attends; /* device */
    int num_jobs, num_attends;
    unsigned long long *products, *attended; /* arrivals of blocks, each in a line of its own: multiples of their number between launches */
    uint4 *packets; /* of attention: (KV heads, parts, rows, RUN_PACKETS) */
    int places, in_flight; /* of the ring; pieces on their way at once: the fewer, the less time blocks take to find out about one another */
    int parts, rows; /* of attention */
    uint32_t zero;   /* 0, which the compiler does not know */
    uint64_t patience; /* ns of a wait; more means that something is broken */
};

/* Whether the job may be in a launch with others. */
bool fp8_run_takes(const Fp8Job &job);
/* The same of attention, with which shares of its keys. */
bool fp8_run_takes(const weft_attention_args *a, int blocks, int *parts, int *rows);
/* Bytes of shared memory that a product's activations need, and places for a ring beside them. */
int64_t fp8_run_input(const Fp8Job &job);
int fp8_run_places(const Fp8Job &job);
/* The kernel is there, and loaded. */
bool fp8_run_possible();
void fp8_run_launch(const Fp8Run &run, int blocks, int shared, void *stream);

} // namespace weft
