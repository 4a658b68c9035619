/* device/cuda_mail.c - a step's record and its tokens without a call into the driver for either: page-locked
 * memory that kernels read and write, and words in it that the host looks at. */
#ifdef WEFT_HAVE_CUDA

#include <sched.h>

#include "device/cuda_internal.h"

enum {
    RECORD_BYTES = 64 << 10, /* above it a copy is faster than the kernel (scripts/bench.md) */
    TOKEN_BYTES = 4 << 16,   /* of 65536 rows, as many as are drawn at once */
    LINE = 32,               /* words: counters and words that have nothing to do with one another lie apart */
};

static void lay_out(weft__mailbox *box, char **at, size_t part_bytes, unsigned *counters, unsigned *words, int which)
{
    box->mail = (weft_cuda_mail){.parts = *at, .part_bytes = part_bytes, .counter = counters + which * LINE, .done = words + which * LINE};
    *at += 2 * part_bytes;
}

weft_status weft__cuda_mail_open(weft_cuda *cuda)
{
    void *counters = NULL;
    size_t bytes = 2 * LINE * sizeof(unsigned);
    cudaError_t error = cudaMalloc(&counters, bytes);
    if (error == cudaSuccess) error = cudaMemsetAsync(counters, 0, bytes, cuda->stream);
    cuda->mail_counters = counters;
    if (error != cudaSuccess) return weft__cuda_fail(cuda, "opening the mail", error);
    WEFT_TRY(weft_cuda_words_create(&cuda->mail_words, 2 * LINE + 2 * (RECORD_BYTES + TOKEN_BYTES) / sizeof(unsigned)));
    char *at = (char *)(cuda->mail_words + 2 * LINE);
    lay_out(&cuda->records, &at, RECORD_BYTES, counters, cuda->mail_words, 0);
    lay_out(&cuda->tokens, &at, TOKEN_BYTES, counters, cuda->mail_words, 1);
    return WEFT_OK;
}

void weft__cuda_mail_close(weft_cuda *cuda)
{
    if (cuda->mail_counters != NULL) (void)cudaFree(cuda->mail_counters);
    weft_cuda_words_free(cuda->mail_words);
}

/* Looks at the stream now and then: a fault ends it before it comes to the word. */
static weft_status look(weft_cuda *cuda, double *looked, const unsigned *word, unsigned wanted, const char *what)
{
    double now = weft__cuda_now();
    if (now - *looked < 1e-3) return WEFT_OK;
    *looked = now;
    cudaError_t error = cudaStreamQuery(cuda->stream);
    if (error == cudaErrorNotReady) return WEFT_OK;
    if (error != cudaSuccess) return weft__cuda_fail(cuda, what, error);
    if ((int)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - wanted) >= 0) return WEFT_OK;
    return weft_fail(WEFT_INTERNAL, "%s: GPU %d rests, and call %u of %u has been", what, cuda->index, *word, wanted);
}

/* Until as many calls as `wanted` are through with the mail. */
static weft_status wait_for(weft_cuda *cuda, const weft__mailbox *box, unsigned wanted, const char *what)
{
    const unsigned *word = box->mail.done;
    double began = 0, looked = 0;
    WEFT_TRY(weft__cuda_usable(cuda));
    for (long turn = 0; (int)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - wanted) < 0; turn++) {
        if (cuda->capturing) return weft_fail(WEFT_INTERNAL, "%s while a graph is captured: a step must not wait", what);
        if (cuda->check != NULL) WEFT_TRY(cuda->check(cuda->check_context));
        if (turn < 64) continue;
        sched_yield();
        double now = weft__cuda_now();
        if (began == 0) began = looked = now;
        WEFT_TRY(look(cuda, &looked, word, wanted, what));
        if (now - began <= cuda->timeout) continue;
        if (cuda->late != NULL) WEFT_TRY(cuda->late(cuda->check_context));
        return weft_fail(WEFT_TIMEOUT, "GPU %d did not finish within %.3g s (%s)", cuda->index, cuda->timeout, what);
    }
    weft__cuda_note_activity(cuda);
    return WEFT_OK;
}

size_t weft_cuda_record_room(const weft_cuda *cuda) { return cuda->records.mail.part_bytes; }

unsigned weft_cuda_record_calls(const weft_cuda *cuda) { return cuda->records.calls; }

size_t weft_cuda_token_room(const weft_cuda *cuda) { return cuda->tokens.mail.part_bytes; }

weft_status weft_cuda_record_slot(weft_cuda *cuda, void **slot)
{
    weft__mailbox *box = &cuda->records;
    if (box->calls >= 2) WEFT_TRY(wait_for(cuda, box, box->calls - 1, "waiting for the record before the last"));
    *slot = (char *)box->mail.parts + (box->calls & 1) * box->mail.part_bytes;
    return WEFT_OK;
}

static weft_cuda_mail next_call(weft_cuda *cuda, weft__mailbox *box)
{
    if (cuda->capturing) box->captured++;
    else box->calls++;
    return box->mail;
}

weft_cuda_mail weft_cuda_record_mail(weft_cuda *cuda) { return next_call(cuda, &cuda->records); }
weft_cuda_mail weft_cuda_token_mail(weft_cuda *cuda) { return next_call(cuda, &cuda->tokens); }

weft_status weft_cuda_tokens(weft_cuda *cuda, const int32_t **ids)
{
    weft__mailbox *box = &cuda->tokens;
    unsigned behind = box->calls - box->taken;
    if (behind == 0) return weft_fail(WEFT_INTERNAL, "no tokens are on their way");
    if (behind > 2) return weft_fail(WEFT_INTERNAL, "the tokens of %u steps are on their way, and two have room", behind);
    WEFT_TRY(wait_for(cuda, box, box->taken + 1, "waiting for the tokens of a step"));
    *ids = (const int32_t *)((char *)box->mail.parts + (box->taken++ & 1) * box->mail.part_bytes);
    return WEFT_OK;
}

void weft_cuda_forget_tokens(weft_cuda *cuda) { cuda->tokens.taken = cuda->tokens.calls; }

/* What this call marks: the last choice of tokens where one was begun since, else an event. */
weft_status weft_cuda_pace(weft_cuda *cuda)
{
    weft__pace mark = {.tokens = cuda->tokens.calls, .by_event = cuda->tokens.calls == cuda->pace.tokens}, before = cuda->pace;
    WEFT_TRY(weft__cuda_usable(cuda));
    if (mark.by_event) {
        mark.event = before.event ^ 1;
        cudaError_t error = cudaEventRecord(cuda->paces[mark.event], cuda->stream);
        if (error != cudaSuccess) return weft__cuda_fail(cuda, "recording an event", error);
    }
    cuda->pace = mark;
    if (before.by_event) return weft__cuda_wait_event(cuda, cuda->paces[before.event], "waiting for the step before");
    return wait_for(cuda, &cuda->tokens, before.tokens, "waiting for the step before");
}

#endif
