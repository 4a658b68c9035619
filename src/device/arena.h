/* device/arena.h - where the tensors of a step live.
 *
 * forward() allocates nothing once warm: outputs of layers are cut from a rank's arena. It has
 * three parts. STEP holds what lives through the whole step (embedding output, residual, logits).
 * EVEN and ODD take turns, one decoder layer each: a layer's outputs stay valid through the next
 * layer and are overwritten by the one after. A tensor used too late is refused by name
 * (weft_tensor_check), not read. Given the same sequence of requests a step gets the same addresses
 * each time, which is what a captured graph needs. */
#pragma once

#include "device/tensor.h"

enum { WEFT_ARENA_STEP, WEFT_ARENA_EVEN, WEFT_ARENA_ODD, WEFT_ARENA_PARTS };

typedef struct weft_arena weft_arena;

weft_status weft_arena_create(weft_arena **out, weft_memory *memory);
void weft_arena_release(weft_arena *arena); /* tensors that are still held keep it alive */

/* A new step: everything of the step before is dead. */
void weft_arena_begin_step(weft_arena *arena);
/* The next decoder layer: its predecessor's outputs stay, those before are dead. */
void weft_arena_next_layer(weft_arena *arena);
/* Behind the last layer: the STEP part again. */
void weft_arena_end_layers(weft_arena *arena);

/* Cuts a contiguous tensor from the current part (or from `part`). 64-byte aligned. */
weft_status weft_arena_tensor(weft_arena *arena, weft_tensor **out, weft_dtype dtype, int ndim, const int64_t *shape);
weft_status weft_arena_tensor_in(weft_arena *arena, int part, weft_tensor **out, weft_dtype dtype, int ndim,
                                 const int64_t *shape);
/* Raw scratch from the current part, valid as long as a tensor cut now would be. */
weft_status weft_arena_scratch(weft_arena *arena, size_t bytes, void **out);
size_t weft_arena_bytes(const weft_arena *arena); /* reserved so far */
uint64_t weft_arena_epoch(const weft_arena *arena, int part);
