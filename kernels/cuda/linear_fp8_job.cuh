/* kernels/cuda/linear_fp8_job.cuh - what a product of e4m3 weights has to do (linear_fp8.cu, linear_fp8_step.cu): its job, and
 * the parts of it that do not hang on how many of them are in a launch. */
#pragma once

#include "kernels/cuda/fp8_stream.cuh"
#include "kernels/cuda/linear_fp8.cuh"

namespace weft {

enum {
    F8_GROUPS = 4, /* warpgroups that multiply */
    F8_WARPS = F8_GROUPS * 4,
    F8_THREADS = F8_GROUPS * 128, /* two warps more feed them */
    F8_LEAST = 4,                 /* places of a ring */
    F8_TOLD = 32                  /* items that are known; more than a ring has places */
};

enum Fp8End { END_PLAIN, END_SILU, END_HEADS };

struct alignas(128) Fp8Job {
    CUtensorMap map;
    int paired; /* the map is a pairs_map() */
    weft_linear_args a;
    weft_rms_norm_args norm; /* cols 0: none */
    bf16 *residual;          /* y is added to it; NULL: none */
    int64_t residual_stride;
    weft_silu_mul_args silu;
    weft_rope_args rope;
    weft_kv_write_args pages; /* tokens 0: none */
    int k_row, v_row;         /* rows of w that are the first keys and values */
    int places;
    Fp8End end;
    int items, apart; /* apart: rows between an item's first and its second 8 */
    int dealt;        /* to each block; if there are more items, the others are drawn from `drawn` */
    unsigned *drawn;  /* zero between launches */
    int attends;      /* in a launch of many (linear_fp8_run.cuh) */
};

/* False where it cannot be done so: nothing is made then. How many items are dealt is left to the launch. */
bool fp8_job(const weft_linear_args *a, const Fp8Joins &joins, Fp8Job *job);

/* How many items are dealt to each block: half of them, and what fills the ring before the first is drawn. */
static inline int fp8_dealt(const Fp8Job &job, int places)
{
    return (int)most(1 + div_up(places, fp8_pieces(job.a.k)), job.items / job.a.cuda->sms / 2);
}

#ifdef WEFT_HOPPER

/* The first row of an item. */
__device__ __forceinline__ int row_of(const Fp8Job &job, int item, Fp8End end)
{
    if (end == END_PLAIN) return 16 * item;
    if (end == END_SILU) return 8 * item;
    const int each = job.apart / 8; /* items of a head */
    return item / each * 2 * job.apart + item % each * 8;
}

/* The first rows of entries lane and lane + 32 of an item's scales. */
struct ItemScales {
    int hint[2];
    const float *at[2];
};
__device__ __forceinline__ void ask_hints(const Fp8Job &job, int item, Fp8End end, ItemScales &of)
{
    const int row = row_of(job, item, end) + threadIdx.x % 32 / 4, last = (int)job.a.n - 1;
    of.hint[0] = __ldg(job.a.scale_row + min(row, last)), of.hint[1] = __ldg(job.a.scale_row + min(row + job.apart, last));
}

/* What the norm multiplies each token by. By all that multiply. */
template <int TOKENS> __device__ __forceinline__ void norm_factors(const Fp8Job &job, const Fp8Input<TOKENS, F8_GROUPS> &in, float (&squares)[TOKENS][F8_WARPS], float (&by)[TOKENS])
{
    float sum[TOKENS] = {};
    in.each([&](int piece) {
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (t > 0 && t >= in.tokens) break;
            float v[8];
            fp8_widen(*(const uint4 *)in.raw(t, piece), v);
#pragma unroll
            for (int i = 0; i < 8; i++) sum[t] = fmaf(v[i], v[i], sum[t]);
        }
    });
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        sum[t] = warp_sum(sum[t]);
        if (threadIdx.x % 32 == 0) squares[t][threadIdx.x / 32] = sum[t];
    }
    named_sync(1, F8_THREADS);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        float all = 0.0f;
#pragma unroll
        for (int w = 0; w < F8_WARPS; w++) all += squares[t][w];
        by[t] = 1.0f / sqrtf(all / (float)job.norm.cols + job.norm.eps);
    }
}

/* A token's eight values, normed; written too by the block whose share they are. */
__device__ __forceinline__ void norm_eight(const Fp8Job &job, uint4 &eight, const bf16 *gains, float by, int t, int column, bool own)
{
    float v[8], g[8];
    fp8_widen(eight, v);
    fp8_widen(*(const uint4 *)(gains + column), g);
#pragma unroll
    for (int i = 0; i < 4; i++) (&eight.x)[i] = pair<bf16>(v[2 * i] * by * g[2 * i], v[2 * i + 1] * by * g[2 * i + 1]);
    if (own) *(uint4 *)((bf16 *)job.norm.y + t * job.norm.y_stride + column) = eight;
}

__device__ __forceinline__ float rounded(float v) { return widen(narrow<bf16>(v)); }

#endif

} // namespace weft
