/* kernels/cuda/step.cuh - a decode step as one launch: the list of instructions that one persistent
 * kernel works through.
 *
 * Launched one by one, each product of a decode step pays 3.5 to 6 us in which memory idles: the blocks of
 * one kernel end unevenly, those of the next start, wait for their input and then wait for their first
 * weights. But weights do not depend on activations. So one block stays on every multiprocessor for the
 * whole step and is dealt tiles of 16 rows of every product. One of its warps does nothing but ask the
 * copy engine for their pieces, in the order of the list, across products, into a ring in shared memory;
 * it stops only when the ring is full. While the blocks wait for one another, normalise or attend, up to
 * 190 KB of weights for each multiprocessor (6 us of the memory's time) arrive.
 * Only some of the ring is ever on its way at once, and less while blocks wait: more would not come faster, and everything else
 * that the step reads would queue up behind it.
 * What is left to lose is the way from a product's last tile to the first of the next one. It is kept short: no fences
 * (step_feed.cuh), one token has code of its own with nothing in local memory, and whatever does not hang on what other
 * blocks do comes before the wait for them.
 *
 *   recorder (step_record.cu)  while a step is being captured, operations that fit are appended to the list
 *                              instead of launched; neighbours are joined into one instruction; whatever
 *                              does not fit first launches what is in the list, then itself
 *   kernel   (step_run.cu)     the loop over instructions, the barrier between blocks
 *   parts    (step_feed.cuh, step_block.cuh, step_product.cuh, step_attention.cuh, step_rows.cuh, step_peer.cuh)
 *
 * An instruction holds the arguments of the operations it stands for, so results lie where the operations
 * would have put them, rounded at the same places. Lengths, positions and tables are read when the kernel
 * runs: a captured step serves later ones.
 *
 * Blocks wait for one another before an instruction that reads what others wrote since the last wait, or
 * writes what they may still read (`wait`). Norms that stand before a product are computed by every block
 * for itself; each writes its share of the result, and of the residual sum only behind a later wait, when
 * all have read it (`late`, `puts`). */
#pragma once

#include <cuda.h>

#include "kernels/cuda/attention_decode.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/peer.cuh"

namespace weft {

enum {
    STEP_TOKENS = 8,         /* most tokens of a product: the columns of a tile */
    STEP_HEAD_DIM = 128,     /* largest of attention */
    STEP_SHARED = 227 << 10, /* shared memory of a block */
    STEP_WARPS = 8,          /* that compute; one more feeds them, another finishes their tiles */
    STEP_PACKETS = 1 << 16,  /* between parts of attention: a megabyte */
    STEP_SUMS = 4,           /* tiles whose sums wait to be finished */
    STEP_TEAMS = 4,          /* of two of them: a piece is one team's, half of its columns each */
    STEP_PIECE = 1024,       /* bytes of each row of a tile that come together */
    STEP_HALF = STEP_PIECE / 2,
    STEP_PIECE_BYTES = 16 * STEP_PIECE,
    STEP_MOST_PLACES = 13,   /* pieces in the ring */
    STEP_KEPT = 2,           /* packs of a row that a thread keeps between a norm's sum and the scaling */
    STEP_ONE_NORM = STEP_KEPT * STEP_WARPS * 32 * 8, /* most columns of a norm in HOW_ONE */
    STEP_GROUPS = 4,         /* most groups whose sums are in one launch */
};

enum StepKind { STEP_PRODUCT, STEP_ATTENTION, STEP_EMBEDDING, STEP_GATHER, STEP_NORM, STEP_SILU, STEP_ADD, STEP_ROPE, STEP_KV_WRITE, STEP_SUM, STEP_END };
/* How a product's input is taken. One token has code of its own, and so has one that is a sum over two GPUs: short, and with nothing
 * in local memory. */
enum StepHow { HOW_ONE, HOW_ONE_SUM, HOW_ANY, HOW_FAR };
enum StepPairs { PAIRS_NONE, PAIRS_SILU, PAIRS_ROPE };

/* Which sum over two GPUs. */
struct StepSum {
    int group; /* of the launch's, from 1 on; 0: no sum */
    int call;  /* its number among the group's in this launch, from 0 on */
};
/* y (count elements) = the sum. */
struct StepTake {
    StepSum sum;
    void *y;
    int64_t count;
};

/* y = x w^T, x perhaps normalised first; with pairs, rows u and u + half of w are worked on together. */
struct StepProduct {
    weft_linear_args linear;
    weft_rms_norm_args norm; /* has_norm: its y is linear.x */
    weft_silu_mul_args silu; /* PAIRS_SILU: its x is linear.y */
    weft_rope_args rope;     /* PAIRS_ROPE: its x is linear.y, columns below rope_rows */
    weft_kv_write_args kv;   /* has_kv: rows [k_row, ..) and [v_row, ..) of w are its k and v */
    void *residual; /* fp8 weights: y is added to it too, for the next one's norm, which takes it as its x; NULL: not */
    int64_t residual_stride;
    StepSum sum;   /* y is to be summed: its rows are sent, and nothing is written here */
    StepSum input; /* has_norm: its x is this sum, taken as it comes */
    int keeps, kept; /* the residual sum stays in shared memory as a whole; that of before is there */
    int far; /* the input is too large for shared memory: read as it is needed */
    StepHow how;
    int twos; /* one token, whose results can be written by two */
    int has_norm, has_kv, k_row, v_row, rope_rows;
    int half;                      /* with pairs; else 0 */
    int tiles, first;              /* tile t is the block's of number (first + t) % blocks */
    StepPairs pairs;
};

struct StepInstruction {
    StepKind kind;
    int wait; /* for all blocks before it */
    int arrive; /* the next one waits */
    int calm; /* pieces on their way at once until its tiles begin */
    int late; /* the residual sum of its norm is held, to be written behind a wait */
    int puts; /* writes the residual sum that is held */
    int parts, row_tiles; /* of attention */
    int few;              /* one token, whose parts may meet in packets */
    int again;            /* few, and keys lie where those of the attention before do, in another layer's cache */
    int fetches;          /* the next one is `again` and reads the cache that this product adds to: into the L2 with it */
    union {
        StepProduct product;
        weft_attention_args attention;
        weft_embedding_args embedding;
        weft_gather_rows_args gather;
        weft_rms_norm_args norm;
        weft_silu_mul_args silu;
        weft_add_args add;
        weft_rope_args rope;
        weft_kv_write_args kv;
        StepTake take;
    };
};

/* What a block shares when it attends. */
template <class T> struct StepAttention {
    union {
        Joined<STEP_HEAD_DIM, 1, STEP_WARPS> warps;
        typename ByLast<T, 1, STEP_WARPS>::Shared last; /* when all have read the others */
    };
};

/* A group of two GPUs: what weft_peer says of it. */
struct StepGroup {
    PeerPacket *own, *other; /* inboxes */
    unsigned *counters, *halt;
    int64_t capacity, patience;
    int rank, calls; /* calls: of this launch */
};

/* What the ring needs to know of a product. */
struct alignas(128) StepStream {
    CUtensorMap map; /* (columns of 128 bytes, pairs' blocks, 2, rows, 128) of w; a copy brings a piece */
    int tiles, pieces, half, first;
};

/* One launch. */
struct StepProgram {
    const StepInstruction *list;
    const StepStream *streams;
    int count, num_streams;
    int places;    /* pieces in the ring */
    int in_flight; /* pieces on their way at once: at most places - (2 STEP_TEAMS - 1) (step_feed.cuh) */
    int x_bytes, held_bytes, cos_sin_bytes, sums_bytes; /* of shared memory: most that a product needs */
    unsigned long long *arrivals; /* of the blocks at waits: a multiple of their number between launches */
    unsigned *counters;           /* attention's, zero between operations */
    char *partial;                /* attention's */
    uint4 *packets;               /* attention's (step_attention.cuh) */
    StepGroup groups[STEP_GROUPS];
    int num_groups;
    uint64_t patience; /* ns of a wait, longer than those for another GPU */
};

void step_launch(const StepProgram &program, int blocks, weft_dtype dtype, void *stream);
bool step_possible(int device, int blocks);
size_t step_room(); /* shared memory for ring and inputs together */

} // namespace weft
