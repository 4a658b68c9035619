/* base/library.h - shared libraries that are opened when they are first needed, so that a run without
 * them neither waits for them nor needs them. They stay open for as long as the process. */
#pragma once

#include "base/status.h"

/* Looks for `file` ("libnccl.so.2") where the system looks for libraries (LD_LIBRARY_PATH, the system's
 * folders), then in `folder` (NULL: nowhere else). UNSUPPORTED says what was looked for and where. */
weft_status weft_library_open(void **out, const char *file, const char *folder);
/* UNSUPPORTED where the library, named for the message, has no such function. */
weft_status weft_library_function(void *library, const char *file, const char *name, void **out);
