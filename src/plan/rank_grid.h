/* plan/rank_grid.h - which ranks talk: the rows of every kind of group, as arithmetic.
 *
 *     rank = ((((ext * DP + dp) * PP + pp) * PCP + pcp) * TP + tp)
 *
 * The order of the rows is the order in which all ranks create the groups; the order inside a row
 * is a rank's place in its group. */
#pragma once

#include "plan/parallel_config.h"

typedef enum weft_grid_kind {
    WEFT_GRID_TENSOR,           /* "tensor" */
    WEFT_GRID_ATTENTION_TENSOR, /* "attention_tensor": columns of a tensor row seen as [tpa][tp / tpa] */
    WEFT_GRID_CONTEXT,          /* "context" (DCP) */
    WEFT_GRID_EXPERT,           /* "expert": columns of a tensor row seen as [ep][tp / ep] */
    WEFT_GRID_EXPERT_TENSOR,    /* "expert_tensor": its rows */
    WEFT_GRID_MLP_TENSOR,       /* "mlp_tensor": columns of a tensor row seen as [mlp][tp / mlp] */
    WEFT_GRID_PIPELINE,
    WEFT_GRID_DATA,
    WEFT_GRID_PREFILL_CONTEXT,
    WEFT_GRID_EXPERT_PARALLEL, /* "expert_parallel" (EP): all ranks of one pipeline stage */
    WEFT_GRID_EXPERT_BALANCE,  /* "expert_balance" (EPLB): the same ranks, a group of its own */
    WEFT_GRID_KIND_COUNT
} weft_grid_kind;

const char *weft_grid_kind_name(weft_grid_kind kind);
/* Also the short names tp, dcp, attention_tp, pcp, pp, dp, ep, eplb. 0 when unknown. */
int weft_grid_kind_from_name(const char *name, weft_grid_kind *out);

typedef struct weft_rank_grid {
    int external_dp, dp, pp, pcp, tp;       /* the shape, tp fastest */
    int attention_tp, dcp, ep, mlp_tensor; /* cuts of a tensor row */
} weft_rank_grid;

/* config has been made by weft_parallel_config_make; external_dp >= 1: worlds beside this one. */
weft_status weft_rank_grid_make(weft_rank_grid *out, const weft_parallel_config *config, int external_dp);
int weft_rank_grid_world_size(const weft_rank_grid *grid);

typedef struct weft_rank_rows {
    int num_rows, row_size;
    int *ranks; /* [num_rows][row_size]; the caller frees it */
} weft_rank_rows;
weft_status weft_rank_grid_rows(const weft_rank_grid *grid, weft_grid_kind kind, weft_rank_rows *out);
void weft_rank_rows_free(weft_rank_rows *rows);
/* Where a rank stands; a rank outside of the world is an error. */
weft_status weft_rank_grid_place(const weft_rank_grid *grid, weft_grid_kind kind, int rank, int *row, int *index);
/* Without prefill context ranks every rank has d = t mod N, a = t / N, t = a N + d: asserted at start. */
weft_status weft_rank_grid_check(const weft_rank_grid *grid);
