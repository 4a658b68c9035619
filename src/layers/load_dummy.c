/* layers/load_dummy.c */
#include "layers/load_dummy.h"

#ifdef WEFT_HAVE_CUDA

#include "kernels/weft_cuda_device.h"
#include "model/dummy.h"

weft_status weft__load_dummy(weft_rank *rank, const weft_source *source, const int64_t *start, const int64_t *count, weft_dtype dtype,
                             void *dst, int *made)
{
    *made = 0;
    int last = source->ndim - 1;
    if (source->data != NULL || source->ndim < 1) return WEFT_OK;
    int fp8 = source->dtype == WEFT_F8E4M3 || dtype == WEFT_F8E4M3;
    if (fp8 && source->dtype != dtype) return WEFT_OK;
    /* The rows of the box, of all dimensions but the last, must follow one another. */
    int64_t row = 0, rows = 1;
    for (int i = 0; i < last; i++) {
        if (rows > 1 && count[i] != source->shape[i]) return WEFT_OK;
        row = row * source->shape[i] + start[i];
        rows *= count[i];
    }
    weft_dummy dummy = weft__dummy_of(source->name);
    weft_cuda_dummy_args args = {.dst = dst, .seed = dummy.seed, .kind = (int)dummy.kind, .row = row, .rows = rows,
                                 .column = start[last], .columns = count[last], .source_dtype = source->dtype, .dtype = dtype};
    *made = 1;
    return weft_cuda_launched(rank->cuda, "dummy weights", weft_cuda_dummy(&args, weft_cuda_stream(rank->cuda)));
}

#else

weft_status weft__load_dummy(weft_rank *rank, const weft_source *source, const int64_t *start, const int64_t *count, weft_dtype dtype,
                             void *dst, int *made)
{
    *made = 0;
    return WEFT_OK;
}

#endif
