/* base/library.c - shared libraries opened at run time. */
#include "base/library.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

weft_status weft_library_open(void **out, const char *file, const char *folder)
{
    char path[PATH_MAX], reason[200] = "";
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        /* "libx.so.1: cannot open shared object file: ..."; a broken library says what is wrong with it. */
        const char *text = dlerror();
        if (text != NULL && strstr(text, "No such file") == NULL) snprintf(reason, sizeof reason, " (%s)", text);
        if (folder != NULL && snprintf(path, sizeof path, "%s/%s", folder, file) < (int)sizeof path) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == NULL)
        return weft_fail(WEFT_UNSUPPORTED, "%s was not found in the library path%s%s%s; install it, or add its folder to LD_LIBRARY_PATH", file,
                         folder != NULL ? " nor in " : "", folder != NULL ? folder : "", reason);
    *out = library;
    return WEFT_OK;
}

weft_status weft_library_function(void *library, const char *file, const char *name, void **out)
{
    void *address = dlsym(library, name);
    if (address == NULL) return weft_fail(WEFT_UNSUPPORTED, "%s has no function %s: it is another version than weft was built for", file, name);
    *out = address;
    return WEFT_OK;
}
