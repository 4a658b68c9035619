/* plan/rank_grid.c - the rows of every kind of group. */
#include "plan/rank_grid.h"

#include <stdlib.h>
#include <strings.h>

enum { EXT, DP, PP, PCP, TP, AXES };

static const char *const kind_names[WEFT_GRID_KIND_COUNT][2] = {
    [WEFT_GRID_TENSOR] = {"tensor", "tp"},
    [WEFT_GRID_ATTENTION_TENSOR] = {"attention_tensor", "attention_tp"},
    [WEFT_GRID_CONTEXT] = {"context", "dcp"},
    [WEFT_GRID_EXPERT] = {"expert", "expert"},
    [WEFT_GRID_EXPERT_TENSOR] = {"expert_tensor", "expert_tensor"},
    [WEFT_GRID_MLP_TENSOR] = {"mlp_tensor", "mlp_tensor"},
    [WEFT_GRID_PIPELINE] = {"pipeline", "pp"},
    [WEFT_GRID_DATA] = {"data", "dp"},
    [WEFT_GRID_PREFILL_CONTEXT] = {"prefill_context", "pcp"},
    [WEFT_GRID_EXPERT_PARALLEL] = {"expert_parallel", "ep"},
    [WEFT_GRID_EXPERT_BALANCE] = {"expert_balance", "eplb"},
};

const char *weft_grid_kind_name(weft_grid_kind kind)
{
    return (unsigned)kind < WEFT_GRID_KIND_COUNT ? kind_names[kind][0] : "unknown";
}

int weft_grid_kind_from_name(const char *name, weft_grid_kind *out)
{
    for (int k = 0; k < WEFT_GRID_KIND_COUNT; k++) {
        if (strcasecmp(name, kind_names[k][0]) != 0 && strcasecmp(name, kind_names[k][1]) != 0) continue;
        *out = (weft_grid_kind)k;
        return 1;
    }
    return 0;
}

weft_status weft_rank_grid_make(weft_rank_grid *out, const weft_parallel_config *c, int external_dp)
{
    WEFT_TRY(weft_rule_positive("external_data_parallel_size", external_dp));
    if (external_dp > (1 << 20) / weft_config_world_size(c))
        return weft_fail(WEFT_INVALID, "a world of at most %d ranks, got external_data_parallel_size %d * %d", 1 << 20,
                         external_dp, weft_config_world_size(c));
    *out = (weft_rank_grid){.external_dp = external_dp,
                            .dp = c->data_parallel_size,
                            .pp = c->pipeline_parallel_size,
                            .pcp = c->prefill_context_parallel_size,
                            .tp = c->tensor_parallel_size,
                            .attention_tp = weft_attention_tp_size(c),
                            .dcp = c->decode_context_parallel_size,
                            .ep = c->expert_parallel_size,
                            .mlp_tensor = weft_mlp_tp_size(c)};
    return WEFT_OK;
}

int weft_rank_grid_world_size(const weft_rank_grid *grid)
{
    return grid->external_dp * grid->dp * grid->pp * grid->pcp * grid->tp;
}

/* All ranks with the axes in another order, the last one fastest. */
static void flatten(const weft_rank_grid *grid, const unsigned char order[AXES], int *ranks)
{
    const int sizes[AXES] = {grid->external_dp, grid->dp, grid->pp, grid->pcp, grid->tp};
    int strides[AXES], at[AXES] = {0}, count = weft_rank_grid_world_size(grid);
    strides[TP] = 1;
    for (int axis = TP; axis > EXT; axis--) strides[axis - 1] = strides[axis] * sizes[axis];
    for (int i = 0; i < count; i++) {
        ranks[i] = 0;
        for (int axis = EXT; axis < AXES; axis++) ranks[i] += at[axis] * strides[axis];
        for (int k = AXES - 1; k >= 0; k--) {
            if (++at[order[k]] < sizes[order[k]]) break;
            at[order[k]] = 0;
        }
    }
}

/* Each tensor row, seen as [parts][tp / parts], by columns. */
static void take_columns(const weft_rank_grid *grid, int parts, int *ranks)
{
    int count = weft_rank_grid_world_size(grid), across = grid->tp / parts;
    for (int i = 0; i < count; i++) {
        int in_row = i % grid->tp;
        ranks[i] = i - in_row + in_row % parts * across + in_row / parts;
    }
}

/* The named axis changes places with tp, so that it runs fastest. */
static weft_status fill_rows(const weft_rank_grid *g, weft_grid_kind kind, int *row_size, int *ranks)
{
    static const unsigned char plain[AXES] = {EXT, DP, PP, PCP, TP}, by_pcp[AXES] = {EXT, DP, PP, TP, PCP},
                               by_pp[AXES] = {EXT, DP, TP, PCP, PP}, by_dp[AXES] = {EXT, TP, PP, PCP, DP},
                               by_stage[AXES] = {EXT, PP, DP, PCP, TP};
    switch (kind) {
    case WEFT_GRID_TENSOR: flatten(g, plain, ranks); *row_size = g->tp; return WEFT_OK;
    case WEFT_GRID_CONTEXT: flatten(g, g->dcp > 1 ? by_pcp : plain, ranks); *row_size = g->dcp; return WEFT_OK;
    case WEFT_GRID_PREFILL_CONTEXT: flatten(g, by_pcp, ranks); *row_size = g->pcp; return WEFT_OK;
    case WEFT_GRID_PIPELINE: flatten(g, by_pp, ranks); *row_size = g->pp; return WEFT_OK;
    case WEFT_GRID_DATA: flatten(g, by_dp, ranks); *row_size = g->dp; return WEFT_OK;
    case WEFT_GRID_EXPERT_PARALLEL:
    case WEFT_GRID_EXPERT_BALANCE: flatten(g, by_stage, ranks); *row_size = g->dp * g->pcp * g->tp; return WEFT_OK;
    case WEFT_GRID_ATTENTION_TENSOR: take_columns(g, g->attention_tp, ranks); *row_size = g->attention_tp; return WEFT_OK;
    case WEFT_GRID_MLP_TENSOR: take_columns(g, g->mlp_tensor, ranks); *row_size = g->mlp_tensor; return WEFT_OK;
    case WEFT_GRID_EXPERT: take_columns(g, g->ep, ranks); *row_size = g->ep; return WEFT_OK;
    case WEFT_GRID_EXPERT_TENSOR: flatten(g, plain, ranks); *row_size = g->tp / g->ep; return WEFT_OK;
    case WEFT_GRID_KIND_COUNT: break;
    }
    return weft_fail(WEFT_INTERNAL, "no such kind of group: %d", (int)kind);
}

weft_status weft_rank_grid_rows(const weft_rank_grid *grid, weft_grid_kind kind, weft_rank_rows *out)
{
    int count = weft_rank_grid_world_size(grid), row_size = 1;
    int *ranks = malloc((size_t)count * sizeof *ranks);
    if (ranks == NULL) return weft_fail(WEFT_MEMORY, "no memory for the groups of %d ranks", count);
    weft_status status = fill_rows(grid, kind, &row_size, ranks);
    if (status != WEFT_OK) {
        free(ranks);
        return status;
    }
    *out = (weft_rank_rows){count / row_size, row_size, ranks};
    return WEFT_OK;
}

void weft_rank_rows_free(weft_rank_rows *rows)
{
    free(rows->ranks);
    *rows = (weft_rank_rows){0};
}

weft_status weft_rank_grid_place(const weft_rank_grid *grid, weft_grid_kind kind, int rank, int *row, int *index)
{
    int world = weft_rank_grid_world_size(grid);
    if (rank < 0 || rank >= world) return weft_fail(WEFT_INVALID, "rank %d is outside of the world of %d ranks", rank, world);
    weft_rank_rows rows;
    WEFT_TRY(weft_rank_grid_rows(grid, kind, &rows));
    int at = 0;
    while (rows.ranks[at] != rank) at++;
    *row = at / rows.row_size;
    *index = at % rows.row_size;
    weft_rank_rows_free(&rows);
    return WEFT_OK;
}

/* Fills place[rank] with the rank's index in its row. */
static weft_status index_in_rows(const weft_rank_grid *grid, weft_grid_kind kind, int *place)
{
    weft_rank_rows rows;
    WEFT_TRY(weft_rank_grid_rows(grid, kind, &rows));
    for (int i = 0; i < rows.num_rows * rows.row_size; i++) place[rows.ranks[i]] = i % rows.row_size;
    weft_rank_rows_free(&rows);
    return WEFT_OK;
}

weft_status weft_rank_grid_check(const weft_rank_grid *grid)
{
    if (grid->pcp > 1) return WEFT_OK; /* the identities hold within tensor rows only */
    int world = weft_rank_grid_world_size(grid), n = grid->tp / grid->attention_tp;
    int reshards = n > 1;
    int *places = malloc((size_t)world * 2 * sizeof *places);
    if (places == NULL) return weft_fail(WEFT_MEMORY, "no memory for the places of %d ranks", world);
    int *context = places, *attention = places + world;
    weft_status status = index_in_rows(grid, WEFT_GRID_CONTEXT, context);
    if (status == WEFT_OK) status = index_in_rows(grid, WEFT_GRID_ATTENTION_TENSOR, attention);
    for (int rank = 0; status == WEFT_OK && rank < world; rank++) {
        int t = rank % grid->tp, a = attention[rank], d = context[rank];
        if (d != t % grid->dcp || a != t / n || (reshards && t != a * n + d))
            status = weft_fail(WEFT_INTERNAL, "rank %d of %d has place %d in its context group and %d in its attention group", t,
                               grid->tp, d, a);
    }
    free(places);
    return status;
}
