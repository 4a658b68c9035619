/* kernels/cpu/isa/table.c - the inner functions of this instruction set in one table. */
#include "kernels/cpu/isa/tables.h"

#define ISA_TEXT_(x) #x
#define ISA_TEXT(x) ISA_TEXT_(x)

const weft_isa_table ISA_JOIN(weft_isa_table, WEFT_ISA) = {
    .name = ISA_TEXT(WEFT_ISA),
    .lanes = PANEL,
    .tile_rows = TILE_ROWS,
    .widen = ISA(widen),
    .narrow = ISA(narrow),
    .sum_words = ISA(sum_words),
    .sum_squares = ISA(sum_squares),
    .add = ISA(add),
    .scale = ISA(scale),
    .axpy = ISA(axpy),
    .scale_gain = ISA(scale_gain),
    .silu_mul = ISA(silu_mul),
    .rotate = ISA(rotate),
    .gemv = ISA(gemv),
    .weigh = ISA(weigh),
    .softmax_row = ISA(softmax_row),
    .pack = ISA(pack),
    .tile = ISA(tile),
#if defined(WEFT_ISA_avx512)
    .pack_pairs = ISA(pack_pairs),
    .tile_pairs = ISA(tile_pairs),
#endif
    .softmax_lanes = ISA(softmax_lanes),
    .scale_lanes = ISA(scale_lanes),
    .unpack = ISA(unpack),
};
