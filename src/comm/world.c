/* comm/world.c - the ranks of a process. */
#include "comm/world.h"

#include <stdlib.h>

/* TEMPORARY single rank until the thread world lands. */
weft_status weft_rank_create_single(weft_rank **out, int threads)
{
    weft_rank *rank = calloc(1, sizeof *rank);
    if (rank == NULL) return weft_fail(WEFT_MEMORY, "no memory for a rank");
    weft_object_init(&rank->object, NULL);
    rank->world_size = 1;
    weft_status status = weft_memory_create(&rank->memory, 0);
    if (status == WEFT_OK) status = weft_arena_create(&rank->arena, rank->memory);
    if (status == WEFT_OK) status = weft_pool_create(&rank->pool, threads > 0 ? threads : weft_cpu_cores(), 0);
    *out = rank;
    return status;
}
void weft_rank_release(weft_rank *rank) { (void)rank; }
