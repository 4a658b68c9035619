/* plan/plan_table.h - the plans of one rank: a default, overrides per layer type and per layer.
 *
 * A plain block of memory with its entries behind it, so that its owner (a Lua state, a policy)
 * keeps it in one allocation. */
#pragma once

#include <stddef.h>

#include "plan/axis.h"

typedef struct weft_plan_override {
    int first_layer, last_layer; /* inclusive, from 0 */
    weft_layer_type type;
    weft_plan plan;
} weft_plan_override;

typedef struct weft_plan_table {
    weft_plan default_plan;
    unsigned char has_type[WEFT_LAYER_TYPE_COUNT];
    weft_plan types[WEFT_LAYER_TYPE_COUNT]; /* where has_type is set */
    int num_overrides;
    weft_plan_override overrides[]; /* sorted by first_layer; ranges do not overlap */
} weft_plan_table;

static inline size_t weft_plan_table_bytes(int overrides)
{
    return sizeof(weft_plan_table) + (size_t)overrides * sizeof(weft_plan_override);
}

/* The plan of a layer: its own, else its type's, else the default. layer < 0: of the type. */
static inline weft_plan weft_plan_table_get(const weft_plan_table *table, weft_layer_type type, int layer)
{
    for (int i = 0; layer >= 0 && i < table->num_overrides; i++) {
        const weft_plan_override *o = &table->overrides[i];
        if (o->type == type && layer >= o->first_layer && layer <= o->last_layer) return o->plan;
    }
    return table->has_type[type] ? table->types[type] : table->default_plan;
}
