/* layers/activation.h - element-wise pieces between the products. */
#pragma once

#include "comm/world.h"
#include "device/tensor.h"

/* x (tokens, 2 n): gate first, then up -> silu(gate) * up (tokens, n), in the rank's arena. */
weft_status weft_silu_mul_forward(weft_rank *rank, const weft_tensor *x, weft_tensor **y);
/* a + b of equal shape and dtype, in the rank's arena. */
weft_status weft_add_forward(weft_rank *rank, const weft_tensor *a, const weft_tensor *b, weft_tensor **y);
