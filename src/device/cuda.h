/* device/cuda.h - one rank's use of one GPU: a stream, its memory, copies and captured graphs.
 *
 * C without CUDA types. In a build without CUDA every call that needs a device refuses in one line
 * and weft_cuda_device_count gives 0. A weft_cuda belongs to the thread that opened it; only
 * weft_cuda_retire may be called from others. All work goes to one stream, so memory that is given
 * back is used again in stream order. Waits poll: the device, what weft_cuda_watch was given, the
 * clock. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/object.h"
#include "base/status.h"

typedef struct weft_cuda weft_cuda;             /* starts with a weft_object */
typedef struct weft_cuda_graph weft_cuda_graph; /* starts with a weft_object */
struct weft_cuda_context;
struct weft_cuda_mail;

int weft_cuda_device_count(void); /* 0: none, no driver, or a build without CUDA */
const char *weft_cuda_why_none(void); /* in CUDA's words, where the count is 0 */
/* "NVIDIA H200" into text; free and total bytes (any may be NULL). */
weft_status weft_cuda_describe(int index, char *text, size_t size, size_t *free_bytes, size_t *total_bytes);

weft_status weft_cuda_open(weft_cuda **out, int index);
weft_cuda *weft_cuda_retain(weft_cuda *cuda);
void weft_cuda_release(weft_cuda *cuda); /* NULL is allowed. The last one gives the memory back */
int weft_cuda_index(const weft_cuda *cuda);
/* For putting work on it: what weft_cuda_take took is launched first. */
void *weft_cuda_stream(const weft_cuda *cuda);
struct weft_cuda_context *weft_cuda_kernels(const weft_cuda *cuda); /* of kernels/weft_cuda.h */
/* Every wait calls check(context) and leaves with its failure; after `seconds` with that of late(context),
 * or with TIMEOUT when there is none. */
void weft_cuda_watch(weft_cuda *cuda, weft_status (*check)(void *context), weft_status (*late)(void *context), void *context,
                     double seconds);

/* ---- memory: blocks of 256-byte alignment, kept for the next request of their size ---- */

/* What a block of so many bytes takes. */
size_t weft_cuda_block_bytes(size_t bytes);
/* DEVICE_MEMORY with the numbers, when even giving all unused blocks back is not enough. */
weft_status weft_cuda_alloc(weft_cuda *cuda, size_t bytes, void **out);
/* Only notes that the block is free. */
void weft_cuda_retire(weft_cuda *cuda, void *block, size_t bytes);
/* Whether the address is memory of a GPU. */
int weft_cuda_is_device(const void *address);
/* Makes the memory of another GPU readable from this one. CUDA when the two have no path, or under
 * WEFT_NO_PEER=1 (for checks of what then happens). */
weft_status weft_cuda_open_peer(weft_cuda *cuda, int index);
/* `bytes` of this GPU's memory that the GPUs of the list read and write too, cleared once the stream has come
 * to it; CUDA when one has no path. (weft_cuda_open_peer would open all memory, and from then on allocations
 * wait for kernels of the other GPU, which may wait for this one's: a step that allocates would never end.)
 * unshare gives it back in stream order. */
weft_status weft_cuda_share(weft_cuda *cuda, size_t bytes, const int32_t *gpus, int count, void **out);
void weft_cuda_unshare(weft_cuda *cuda, void *block);
int weft_cuda_multiprocessors(const weft_cuda *cuda);
/* Whether the stream comes to its end within `seconds`; watches nothing else. For use behind a failure. */
int weft_cuda_rests(weft_cuda *cuda, double seconds);
/* What a replayed step's calls into the driver took so far: graphs, and records that are copied. */
double weft_cuda_driver_seconds(const weft_cuda *cuda);
/* For other threads: a number that grows while the rank's thread comes back from calls into the driver; and
 * whether the stream has work that is not done: 1, 0, or -1 where it is being captured (which ends the capture). The
 * question may itself wait in the driver. */
unsigned long long weft_cuda_activity(const weft_cuda *cuda);
int weft_cuda_is_busy(const weft_cuda *cuda);
/* `count` words of host memory, 0, that every GPU reads and writes at the same address. */
weft_status weft_cuda_words_create(unsigned **out, size_t count);
void weft_cuda_words_free(unsigned *words); /* NULL is allowed. No kernel may use them any more */
/* Addresses that a captured graph may hold have changed: graphs of before are stale. */
void weft_cuda_moved(weft_cuda *cuda);
/* The status of an operation just launched. Under WEFT_SYNC=1 it waits, so that a fault is
 * reported where it happened. */
weft_status weft_cuda_launched(weft_cuda *cuda, const char *what, weft_status status);

/* ---- copies, in stream order ---- */

weft_status weft_cuda_to_host(weft_cuda *cuda, void *dst, const void *src, size_t bytes); /* waits */
weft_status weft_cuda_to_device(weft_cuda *cuda, void *dst, const void *src, size_t bytes); /* src may change at once */
weft_status weft_cuda_copy(weft_cuda *cuda, void *dst, const void *src, size_t bytes); /* on the device */
weft_status weft_cuda_copy_rows(weft_cuda *cuda, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                                size_t rows);
weft_status weft_cuda_clear(weft_cuda *cuda, void *data, size_t bytes);
/* Until all work of the stream is done. */
weft_status weft_cuda_wait(weft_cuda *cuda);
/* Order between streams, without waiting: `mark` stands at this place of the stream; what is put on the other
 * one's stream from follow on runs behind it. The mark must have been set before follow is called, and is not
 * set again before all have. */
enum { WEFT_CUDA_MARKS = 2 };
weft_status weft_cuda_mark(weft_cuda *cuda, int mark);
weft_status weft_cuda_follow(weft_cuda *cuda, const weft_cuda *other, int mark);
/* `bytes` of page-locked memory, free for writing: what it held before has been copied. Goes to the
 * device with the next weft_cuda_send, which does not wait. */
weft_status weft_cuda_outgoing(weft_cuda *cuda, size_t bytes, void **out);
weft_status weft_cuda_send(weft_cuda *cuda, void *dst, size_t bytes);
/* Waits for the work that was there at the call before: the host stays one step ahead, not more. */
weft_status weft_cuda_pace(weft_cuda *cuda);

/* ---- mail: what goes to the GPU and comes back with a step, without calls of its own (kernels/weft_cuda_device.h) ---- */

size_t weft_cuda_record_room(const weft_cuda *cuda); /* bytes of a record that may go by mail */
unsigned weft_cuda_record_calls(const weft_cuda *cuda); /* of weft_cuda_arrive so far, those in graphs that were launched too */
size_t weft_cuda_token_room(const weft_cuda *cuda); /* bytes of the tokens of a step that may come by mail */
/* Where the host writes the next record, once the one that lay there has arrived. */
weft_status weft_cuda_record_slot(weft_cuda *cuda, void **slot);
/* For the one kernel that comes next, weft_cuda_arrive or weft_cuda_choose: launched or captured, it counts. */
struct weft_cuda_mail weft_cuda_record_mail(weft_cuda *cuda);
struct weft_cuda_mail weft_cuda_token_mail(weft_cuda *cuda);
/* Waits for the oldest choice of tokens that was not asked for, of two at most. *ids hold until the second choice
 * from it is begun. */
weft_status weft_cuda_tokens(weft_cuda *cuda, const int32_t **ids);
void weft_cuda_forget_tokens(weft_cuda *cuda); /* nobody asks for those on their way any more */

/* ---- graphs ---- */

/* From begin to end this thread's work on the stream is recorded and not run. Nothing in between
 * may allocate or wait. end is called in any case, and with out NULL drops what was recorded.
 * together: operations become few launches where they can (kernels/weft_fused.h), which must have the
 * GPU for themselves. */
weft_status weft_cuda_graph_begin(weft_cuda *cuda, int together);
/* From begin to end, work that is not captured: an operation may run in the end of the product of many tokens in front of it
 * (kernels/weft_fused.h). end is called in any case; without keep what was taken and not launched is dropped. */
weft_status weft_cuda_join_begin(weft_cuda *cuda);
weft_status weft_cuda_join_end(weft_cuda *cuda, int keep);
/* An operation (a weft_fused_op) that is to run. 1: it will, with others; 0: launch it. */
int weft_cuda_take(weft_cuda *cuda, int op, const void *args);
weft_status weft_cuda_graph_end(weft_cuda *cuda, weft_cuda_graph **out);
weft_status weft_cuda_graph_launch(weft_cuda_graph *graph);
/* All graphs are stale, and what they hold is given back: for what they hold must go. */
void weft_cuda_drop_graphs(weft_cuda *cuda);
/* 0 once weft_cuda_moved was called behind its capture. */
int weft_cuda_graph_fresh(const weft_cuda_graph *graph);
