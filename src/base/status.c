/* base/status.c - the error text of each thread. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char message[2048];

weft_status weft_fail(weft_status code, const char *format, ...)
{
    /* The arguments may point into the old text, so the new one is made beside it. */
    char text[sizeof message];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(message, text, strlen(text) + 1);
    return code;
}

weft_status weft_fail_while(weft_status code, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    size_t used = strlen(message);
    snprintf(message + used, sizeof message - used, " (while %s)", text);
    return code;
}

const char *weft_error_message(void)
{
    return message;
}

void weft_error_clear(void)
{
    message[0] = 0;
}

const char *weft_status_name(weft_status code)
{
    static const char *const names[] = {
        "ok", "invalid", "closed", "memory", "device_memory", "io", "format", "unsupported",
        "cuda", "nccl", "timeout", "interrupted", "aborted", "poisoned", "internal",
    };
    return (unsigned)code < sizeof names / sizeof *names ? names[code] : "unknown";
}
