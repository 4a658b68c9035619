/* base/status.h - how calls fail.
 *
 * Every call of the core that can fail returns a weft_status and writes its results only on
 * success. The text that goes with a failure is kept per thread; each level may add a line that
 * says what it was doing. Nothing below src/bind raises, exits or prints. */
#pragma once

typedef enum weft_status {
    WEFT_OK = 0,
    WEFT_INVALID,       /* the caller's mistake: a wrong argument, plan or shape */
    WEFT_CLOSED,        /* the object was closed, or its group died */
    WEFT_MEMORY,        /* host memory ran out */
    WEFT_DEVICE_MEMORY, /* device memory ran out */
    WEFT_IO,            /* the file system said no */
    WEFT_FORMAT,        /* a file is not what it should be */
    WEFT_UNSUPPORTED,   /* right, but not something this build or backend does */
    WEFT_CUDA,
    WEFT_NCCL,
    WEFT_TIMEOUT,
    WEFT_INTERRUPTED, /* Ctrl-C */
    WEFT_ABORTED,     /* another rank failed first; the text is that rank's */
    WEFT_POISONED,    /* the device's context is ruined */
    WEFT_INTERNAL     /* a fault of weft itself */
} weft_status;

/* Sets this thread's error text and returns `code`. */
weft_status weft_fail(weft_status code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Adds "while ..." behind the text of a failure; returns `code` unchanged. */
weft_status weft_fail_while(weft_status code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The text of this thread's last failure; never NULL. Valid until the next failure. */
const char *weft_error_message(void);
void weft_error_clear(void);
/* "invalid", "format", ... the word that Lua sees as error.code. */
const char *weft_status_name(weft_status code);

#define WEFT_TRY(call)                                        \
    do {                                                      \
        weft_status weft_try_status_ = (call);                \
        if (weft_try_status_ != WEFT_OK) return weft_try_status_; \
    } while (0)

/* For functions with a cleanup label: status is a weft_status in scope. */
#define WEFT_TRY_GOTO(status, call, label)     \
    do {                                       \
        (status) = (call);                     \
        if ((status) != WEFT_OK) goto label;   \
    } while (0)
