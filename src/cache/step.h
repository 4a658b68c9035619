/* cache/step.h - one step as one flat record.
 *
 * Rank 0 alone schedules. What it decides for a step lies in one buffer, a header and arrays, that
 * travels to the other ranks byte by byte (weft_world_publish) and is checked there before anything
 * reads it. What must be equal on all ranks, the skip gate and the bucket above all, is in the
 * record and never worked out from a rank's own share. */
#pragma once

#include <stdint.h>

#include "comm/world.h"
#include "device/memory.h"
#include "device/tensor.h"

typedef enum weft_step_kind {
    WEFT_STEP_FORWARD,
    WEFT_STEP_STOP,    /* no further steps: leave the loop */
    WEFT_STEP_COMMAND, /* payload: some bytes for the scripts */
    WEFT_STEP_KIND_COUNT
} weft_step_kind;
const char *weft_step_kind_name(int kind); /* "forward", "stop", "command" */
int weft_step_kind_from_name(const char *name, weft_step_kind *out); /* 0 when unknown */

enum {
    WEFT_STEP_GATHER_LOGITS = 1, /* rank 0 wants all logits, not only the winners */
    WEFT_STEP_WANT_HIDDEN = 2,   /* the last hidden states are asked for */
    WEFT_STEP_GRAPH = 4,         /* one token and one row of logits for each request: may run as a captured graph */
};

typedef struct weft_step_header {
    uint32_t magic;
    int32_t kind, flags;
    int32_t num_tokens;         /* T: rows of the step; those behind query_start_loc[R] are padding */
    int32_t num_requests;       /* R */
    int32_t block_table_stride; /* blocks in a row of the table */
    int32_t block_tokens;       /* tokens of a virtual block; 0: the step has no block table */
    int32_t num_logits;         /* n: rows that get logits */
    int32_t max_context_len;    /* over requests, tokens in the cache before this step: the skip gate */
    int32_t max_block;          /* largest block id in the table, -1 without one */
    int32_t bucket;             /* rows a captured graph would run: >= num_tokens */
    int32_t reserved;
    uint64_t payload_bytes;
    uint64_t total_bytes; /* 0 until weft_step_finish */
} weft_step_header;

/* The sizes that a record is laid out by. */
typedef struct weft_step_shape {
    weft_step_kind kind;
    int flags;
    int64_t num_tokens, num_requests, block_table_stride, block_tokens, num_logits;
    int64_t bucket; /* 0: num_tokens */
    int64_t payload_bytes;
} weft_step_shape;

/* The arrays where the rank computes: those of the record, or copies on its GPU. There rows and the
 * table are padded to sizes that few steps differ in, so that a captured graph serves them: a request
 * of padding has no tokens, a row of padding draws from row 0. */
typedef struct weft_step_arrays {
    const uint64_t *seeds;
    const int32_t *ids, *positions, *query_start_loc, *seq_lens, *block_table, *logits_indices, *sample_positions;
    const float *temperature;
    int64_t requests, block_table_stride, logits;
    int64_t max_query_len, max_seq_len; /* bounds; 0: not known */
} weft_step_arrays;

/* A step, its memory used again from one record to the next. The pointers lead into the record and
 * hold until the next begin, decode or receive. */
typedef struct weft_step {
    weft_object object;
    weft_memory *memory;
    weft_tensor *buffer; /* bytes; NULL before the first record */
    size_t bytes;             /* of the record in it */
    weft_step_header *header; /* NULL before the first record */
    uint64_t *seeds;          /* (n) */
    int32_t *ids, *positions; /* (T) */
    int32_t *query_start_loc; /* (R + 1) */
    int32_t *seq_lens;        /* (R) global, this step's tokens included */
    int32_t *block_table;     /* (R, block_table_stride); unused entries are 0 */
    int32_t *logits_indices;  /* (n) rows that get logits, in any order */
    int32_t *sample_positions; /* (n) position of the token that is drawn from them */
    float *temperature;       /* (n) 0: greedy */
    char *payload;            /* (payload_bytes) */
    int uploaded;             /* `device` holds this record's arrays */
    size_t mailed;            /* bytes that lie in the mail and arrive with weft_step_arrive; 0: they were copied */
    int64_t table_changes, changes_at; /* pairs of the mail that are new in the table, and from which word on; 0: the table is part of the record */
    weft_step_arrays device;
} weft_step;

weft_status weft_step_create(weft_step **out, weft_memory *memory);
/* Lays out a new record; its arrays are zeros for the caller to fill. Allocates only when the
 * record is larger than any before. */
weft_status weft_step_begin(weft_step *step, const weft_step_shape *shape);
/* Blocks that the request of a row has got behind those that its tokens fill. */
typedef struct weft_step_growth {
    int32_t row;
    const int32_t *blocks;
    int64_t count;
} weft_step_growth;
/* The record behind `previous` (another step), whose requests drew one token each: one more token for each, with the
 * id -1 - r, what row r draws. *built is 0 when previous is no such record. */
weft_status weft_step_follow(weft_step *step, const weft_step *previous, const weft_step_growth *grown, int64_t num_grown, int *built);
/* How many blocks the tokens of row r fill. */
int64_t weft_step_filled_blocks(const weft_step *step, int32_t row);
/* Works out max_context_len and max_block and checks the whole record. */
weft_status weft_step_finish(weft_step *step);
/* INVALID unless the step holds a whole, checked record. */
weft_status weft_step_ready(const weft_step *step);
/* Copies and checks a record. FORMAT, with what is wrong, for one that is not sound. */
weft_status weft_step_decode(weft_step *step, const void *record, size_t bytes);

/* Copies the arrays to the rank's GPU, in stream order, into memory of the rank that the next upload
 * uses again. Nothing to do on a CPU rank. The record of a step that may run as a graph is only mailed, and with it
 * what is new in a long block table (the GPU has the rest, or a copy brings all of it): it is there behind weft_step_arrive. */
weft_status weft_step_upload(weft_step *step, weft_rank *rank);
weft_step_arrays weft_step_arrays_of(const weft_step *step);
/* On a GPU, for a step that may run as a graph: its record is there for the kernels behind, and an id below zero,
 * -1 - r, becomes chosen[r], of `rows`. Waits for nothing, and may be captured. */
weft_status weft_step_arrive(weft_step *step, weft_rank *rank, const int32_t *chosen, int64_t rows);

/* Rank 0 to all others; nothing to do in a world of one. */
weft_status weft_step_publish(weft_step *step, weft_rank *rank);
weft_status weft_step_receive(weft_step *step, weft_rank *rank);
