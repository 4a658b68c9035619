/* device/cuda_none.c - device/cuda.h in a build without CUDA. No weft_cuda can exist here. */
#ifndef WEFT_HAVE_CUDA

#include "device/cuda.h"

static weft_status none(void)
{
    return weft_fail(WEFT_UNSUPPORTED, "this build of weft has no CUDA; use --device cpu, or build with -DWEFT_CUDA=ON");
}

int weft_cuda_device_count(void) { return 0; }
const char *weft_cuda_why_none(void) { return "a build without CUDA"; }
weft_status weft_cuda_describe(int index, char *text, size_t size, size_t *free_bytes, size_t *total_bytes) { return none(); }
weft_status weft_cuda_open(weft_cuda **out, int index) { return none(); }
weft_cuda *weft_cuda_retain(weft_cuda *cuda) { return cuda; }
void weft_cuda_release(weft_cuda *cuda) {}
int weft_cuda_index(const weft_cuda *cuda) { return 0; }
void *weft_cuda_stream(const weft_cuda *cuda) { return NULL; }
struct weft_cuda_context *weft_cuda_kernels(const weft_cuda *cuda) { return NULL; }
void weft_cuda_watch(weft_cuda *cuda, weft_status (*check)(void *context), weft_status (*late)(void *context), void *context,
                     double seconds)
{
}
size_t weft_cuda_block_bytes(size_t bytes) { return bytes; }
weft_status weft_cuda_alloc(weft_cuda *cuda, size_t bytes, void **out) { return none(); }
void weft_cuda_retire(weft_cuda *cuda, void *block, size_t bytes) {}
int weft_cuda_is_device(const void *address) { return 0; }
weft_status weft_cuda_open_peer(weft_cuda *cuda, int index) { return none(); }
weft_status weft_cuda_share(weft_cuda *cuda, size_t bytes, const int32_t *gpus, int count, void **out) { return none(); }
void weft_cuda_unshare(weft_cuda *cuda, void *block) {}
int weft_cuda_multiprocessors(const weft_cuda *cuda) { return 1; }
int weft_cuda_rests(weft_cuda *cuda, double seconds) { return 1; }
double weft_cuda_driver_seconds(const weft_cuda *cuda) { return 0; }
weft_status weft_cuda_words_create(unsigned **out, size_t count) { return none(); }
void weft_cuda_words_free(unsigned *words) {}
void weft_cuda_moved(weft_cuda *cuda) {}
weft_status weft_cuda_launched(weft_cuda *cuda, const char *what, weft_status status) { return status; }
weft_status weft_cuda_to_host(weft_cuda *cuda, void *dst, const void *src, size_t bytes) { return none(); }
weft_status weft_cuda_to_device(weft_cuda *cuda, void *dst, const void *src, size_t bytes) { return none(); }
weft_status weft_cuda_copy(weft_cuda *cuda, void *dst, const void *src, size_t bytes) { return none(); }
weft_status weft_cuda_copy_rows(weft_cuda *cuda, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                                size_t rows)
{
    return none();
}
weft_status weft_cuda_clear(weft_cuda *cuda, void *data, size_t bytes) { return none(); }
weft_status weft_cuda_wait(weft_cuda *cuda) { return none(); }
weft_status weft_cuda_mark(weft_cuda *cuda, int mark) { return none(); }
weft_status weft_cuda_follow(weft_cuda *cuda, const weft_cuda *other, int mark) { return none(); }
weft_status weft_cuda_outgoing(weft_cuda *cuda, size_t bytes, void **out) { return none(); }
weft_status weft_cuda_send(weft_cuda *cuda, void *dst, size_t bytes) { return none(); }
size_t weft_cuda_record_room(const weft_cuda *cuda) { return 0; }
unsigned weft_cuda_record_calls(const weft_cuda *cuda) { return 0; }
size_t weft_cuda_token_room(const weft_cuda *cuda) { return 0; }
weft_status weft_cuda_record_slot(weft_cuda *cuda, void **slot) { return none(); }
weft_status weft_cuda_tokens(weft_cuda *cuda, const int32_t **ids) { return none(); }
void weft_cuda_forget_tokens(weft_cuda *cuda) {}
weft_status weft_cuda_pace(weft_cuda *cuda) { return none(); }
weft_status weft_cuda_graph_begin(weft_cuda *cuda, int together) { return none(); }
weft_status weft_cuda_join_begin(weft_cuda *cuda) { return none(); }
weft_status weft_cuda_join_end(weft_cuda *cuda, int keep) { return WEFT_OK; }
int weft_cuda_take(weft_cuda *cuda, int op, const void *args) { return 0; }
weft_status weft_cuda_graph_end(weft_cuda *cuda, weft_cuda_graph **out) { return none(); }
weft_status weft_cuda_graph_launch(weft_cuda_graph *graph) { return none(); }
void weft_cuda_drop_graphs(weft_cuda *cuda) {}
int weft_cuda_graph_fresh(const weft_cuda_graph *graph) { return 0; }

#endif
