#include "kernels/weft_kernels.h"
const char *weft_cpu_isa(void) { return "scalar"; }
