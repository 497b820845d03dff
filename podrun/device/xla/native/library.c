/* Loads oneDNN. See library.h. */

#define _GNU_SOURCE
#include "library.h"

#include <dlfcn.h>
#include <stdio.h>

Library onednn;
Engine engine;

const char *
library_load(const char *path)
{
    static char message[512];
    /* Its own symbols, and those of its own libraries, come first: another oneDNN or OpenMP of the process (torch's,
       a preloaded one) is neither used nor disturbed. Never unloaded. */
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND | RTLD_NODELETE);
    if (!handle) {
        snprintf(message, sizeof message, "%s", dlerror());
        return message;
    }
#define FIND(RESULT, NAME, PARAMETERS)                                                                                \
    if (!(onednn.NAME = (RESULT(*) PARAMETERS)dlsym(handle, #NAME))) {                                                 \
        snprintf(message, sizeof message, "%s has no %s", path, #NAME);                                                \
        return message;                                                                                                \
    }
    LIBRARY(FIND)
#undef FIND
    const Version *version = onednn.dnnl_version();
    if (version->major != 3) {
        snprintf(message, sizeof message, "%s is version %d of oneDNN, not 3", path, version->major);
        return message;
    }
    onednn.dnnl_set_primitive_cache_capacity(0); /* what is made is kept in plans.c */
    if (onednn.dnnl_engine_create(&engine, CPU, 0)) {
        snprintf(message, sizeof message, "%s computes on no CPU", path);
        return message;
    }
    return NULL;
}
