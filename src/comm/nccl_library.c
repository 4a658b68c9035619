/* comm/nccl_library.c - NCCL, opened when the first group over several GPUs is made: a start without one
 * does not wait for it.
 *
 * The functions that weft calls are defined here and pass on to the library's. One that is missing
 * at link time wants a line in FUNCTIONS. */
#ifdef WEFT_HAVE_NCCL

#include <pthread.h>
#include <stdio.h>

#pragma GCC visibility push(hidden) /* the library must keep to its own functions */
#include <nccl.h>
#pragma GCC visibility pop

#include "base/library.h"
#include "comm/internal.h"

#define FUNCTIONS(F)                                                                                                                      \
    F(ncclResult_t, ncclGetUniqueId, (ncclUniqueId * id), (id))                                                                           \
    F(ncclResult_t, ncclCommInitRank, (ncclComm_t * out, int size, ncclUniqueId id, int rank), (out, size, id, rank))                     \
    F(ncclResult_t, ncclCommDestroy, (ncclComm_t comm), (comm))                                                                           \
    F(ncclResult_t, ncclCommAbort, (ncclComm_t comm), (comm))                                                                             \
    F(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t * out), (comm, out))                                            \
    F(const char *, ncclGetErrorString, (ncclResult_t result), (result))                                                                  \
    F(const char *, ncclGetLastError, (ncclComm_t comm), (comm))                                                                          \
    F(ncclResult_t, ncclGroupStart, (void), ())                                                                                           \
    F(ncclResult_t, ncclGroupEnd, (void), ())                                                                                             \
    F(ncclResult_t, ncclAllReduce,                                                                                                        \
      (const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream),               \
      (in, out, count, type, op, comm, stream))                                                                                           \
    F(ncclResult_t, ncclReduceScatter,                                                                                                    \
      (const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream),               \
      (in, out, count, type, op, comm, stream))                                                                                           \
    F(ncclResult_t, ncclAllGather, (const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream),  \
      (in, out, count, type, comm, stream))                                                                                               \
    F(ncclResult_t, ncclBroadcast,                                                                                                        \
      (const void *in, void *out, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream),                     \
      (in, out, count, type, root, comm, stream))                                                                                         \
    F(ncclResult_t, ncclSend, (const void *in, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream),        \
      (in, count, type, peer, comm, stream))                                                                                              \
    F(ncclResult_t, ncclRecv, (void *out, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream),             \
      (out, count, type, peer, comm, stream))

/* Written once, by whoever makes the first group over several GPUs; only read behind that. */
static struct {
#define MEMBER(result, name, parameters, arguments) __typeof__(&name) name;
    FUNCTIONS(MEMBER)
} library;

#define PASS_ON(result, name, parameters, arguments) \
    result name parameters { return library.name arguments; }
FUNCTIONS(PASS_ON)

static pthread_once_t once = PTHREAD_ONCE_INIT;
static weft_status loaded;
static char failure[512];

static weft_status load(void)
{
    static const char file[] = "libnccl.so.2";
    void *handle = NULL;
    WEFT_TRY(weft_library_open(&handle, file, WEFT_NCCL_LIBRARIES));
#define FIND(result, name, parameters, arguments) WEFT_TRY(weft_library_function(handle, file, #name, (void **)&library.name));
    FUNCTIONS(FIND)
    return WEFT_OK;
}

static void load_once(void)
{
    loaded = load();
    if (loaded != WEFT_OK) snprintf(failure, sizeof failure, "%s", weft_error_message());
}

weft_status weft__nccl_load(void)
{
    pthread_once(&once, load_once);
    return loaded == WEFT_OK ? WEFT_OK : weft_fail(loaded, "ranks on several GPUs need NCCL: %s", failure);
}

#endif
