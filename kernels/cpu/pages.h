/* kernels/cpu/pages.h - whose a position is and where it lies: the arithmetic of plan/layout.h for
 * a weft_page_layout (this room does not see the plan's). */
#pragma once

#include "kernels/weft_kernels.h"

static inline int weft__page_owner(const weft_page_layout *p, int64_t position)
{
    return (int)(position / p->interleave % p->context_size);
}
/* The rank-local index of a position that this rank owns. */
static inline int64_t weft__page_local(const weft_page_layout *p, int64_t position)
{
    return position / ((int64_t)p->context_size * p->interleave) * p->interleave + position % p->interleave;
}
/* How many of the first `length` positions this rank holds. */
static inline int64_t weft__page_local_len(const weft_page_layout *p, int64_t length)
{
    int64_t round = (int64_t)p->context_size * p->interleave;
    int64_t rest = length % round - (int64_t)p->context_rank * p->interleave;
    if (rest < 0) rest = 0;
    if (rest > p->interleave) rest = p->interleave;
    return length / round * p->interleave + rest;
}
