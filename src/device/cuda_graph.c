/* device/cuda_graph.c - a step's work recorded once and replayed. */
#ifdef WEFT_HAVE_CUDA

#include <stdlib.h>

#include "device/cuda_internal.h"
#include "kernels/weft_fused.h"

struct weft_cuda_graph {
    weft_object object;
    weft_cuda *cuda;
    cudaGraphExec_t exec;
    uint64_t generation;
    struct weft_cuda_graph *next; /* of the GPU's */
    unsigned records, tokens; /* calls of the mail that a launch makes */
    void *fused_memory; /* what its launches of many operations read */
};

static void end_exec(weft_cuda_graph *graph)
{
    /* A launch that still runs keeps what it needs. */
    if (graph->exec != NULL && graph->cuda->cause[0] == 0) (void)cudaGraphExecDestroy(graph->exec);
    graph->exec = NULL;
}

static void destroy(weft_object *object)
{
    weft_cuda_graph *graph = (weft_cuda_graph *)object;
    weft_cuda_graph **link = &graph->cuda->graphs;
    while (*link != graph) link = &(*link)->next;
    *link = graph->next;
    end_exec(graph);
    if (graph->fused_memory != NULL) weft_cuda_retire(graph->cuda, graph->fused_memory, WEFT_FUSED_BYTES);
    weft_cuda_release(graph->cuda);
    free(graph);
}

/* The recorder of operations that run together. Without memory for it they are launched one by one. */
static weft_status begin_together(weft_cuda *cuda)
{
    if (weft_cuda_alloc(cuda, WEFT_FUSED_BYTES, &cuda->fused_memory) != WEFT_OK) return WEFT_OK;
    weft_status status = weft_fused_begin(&cuda->fused, cuda->kernels, cuda->fused_memory, 0, cuda->stream);
    if (status == WEFT_OK) return WEFT_OK;
    weft_cuda_retire(cuda, cuda->fused_memory, WEFT_FUSED_BYTES);
    cuda->fused_memory = NULL;
    return status;
}

/* Behind the capture. *memory: what the graph must keep. */
static weft_status end_together(weft_cuda *cuda, int keep, void **memory)
{
    struct weft_fused *fused = cuda->fused;
    *memory = cuda->fused_memory;
    cuda->fused = NULL;
    cuda->fused_memory = NULL;
    return fused != NULL ? weft_fused_end(fused, keep) : WEFT_OK;
}

/* WEFT_SYNC waits for each operation, so there none waits for another. */
weft_status weft_cuda_join_begin(weft_cuda *cuda)
{
    WEFT_TRY(weft__cuda_usable(cuda));
    if (cuda->fused != NULL || cuda->capturing) return weft_fail(WEFT_INVALID, "operations are being joined or captured already");
    return cuda->sync ? WEFT_OK : weft_fused_begin(&cuda->fused, cuda->kernels, NULL, 0, cuda->stream);
}

weft_status weft_cuda_join_end(weft_cuda *cuda, int keep)
{
    struct weft_fused *fused = cuda->fused;
    if (fused == NULL) return WEFT_OK;
    if (keep) (void)weft_fused_flush(fused); /* a failure comes out at the end */
    cuda->fused = NULL;
    return weft_fused_end(fused, keep);
}

int weft_cuda_take(weft_cuda *cuda, int op, const void *args)
{
    return cuda->fused != NULL && weft_fused_take(cuda->fused, (weft_fused_op)op, args);
}

weft_status weft_cuda_graph_begin(weft_cuda *cuda, int together)
{
    WEFT_TRY(weft__cuda_usable(cuda));
    if (cuda->capturing || cuda->fused != NULL) return weft_fail(WEFT_INVALID, "a graph is being captured already, or operations are being joined");
    if (together) WEFT_TRY(begin_together(cuda));
    cudaError_t error = cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal);
    if (error == cudaSuccess) {
        cuda->capturing = 1;
        cuda->records.captured = cuda->tokens.captured = 0;
        return WEFT_OK;
    }
    void *memory;
    (void)end_together(cuda, 0, &memory);
    if (memory != NULL) weft_cuda_retire(cuda, memory, WEFT_FUSED_BYTES);
    return weft__cuda_fail(cuda, "capturing a graph", error);
}

weft_status weft_cuda_graph_end(weft_cuda *cuda, weft_cuda_graph **out)
{
    cudaGraph_t recorded = NULL;
    void *memory = NULL;
    if (!cuda->capturing) return weft_fail(WEFT_INVALID, "no graph is being captured");
    (void)weft_cuda_stream(cuda); /* what is still to be launched */
    cuda->capturing = 0;
    cudaError_t error = cudaStreamEndCapture(cuda->stream, &recorded);
    weft_status status = end_together(cuda, out != NULL && error == cudaSuccess, &memory);
    if (error != cudaSuccess) status = weft__cuda_fail(cuda, "ending a graph", error);
    weft_cuda_graph *graph = out != NULL && status == WEFT_OK ? calloc(1, sizeof *graph) : NULL;
    if (graph != NULL) error = cudaGraphInstantiate(&graph->exec, recorded, 0);
    if (recorded != NULL) (void)cudaGraphDestroy(recorded);
    if (graph != NULL && error == cudaSuccess) {
        weft_object_init(&graph->object, destroy);
        graph->cuda = weft_cuda_retain(cuda);
        graph->generation = cuda->generation;
        graph->records = cuda->records.captured;
        graph->tokens = cuda->tokens.captured;
        graph->fused_memory = memory;
        graph->next = cuda->graphs;
        cuda->graphs = graph;
        *out = graph;
        return WEFT_OK;
    }
    if (memory != NULL) weft_cuda_retire(cuda, memory, WEFT_FUSED_BYTES);
    if (graph == NULL) return out == NULL || status != WEFT_OK ? status : weft_fail(WEFT_MEMORY, "no memory for a graph");
    free(graph);
    return weft__cuda_fail(cuda, "making a graph", error);
}

weft_status weft_cuda_graph_launch(weft_cuda_graph *graph)
{
    WEFT_TRY(weft__cuda_usable(graph->cuda));
    if (graph->exec == NULL) return weft_fail(WEFT_CLOSED, "a graph was launched behind a failure that ended it; capture it again");
    double began = weft__cuda_now();
    cudaError_t error = cudaGraphLaunch(graph->exec, graph->cuda->stream);
    graph->cuda->driver_seconds += weft__cuda_now() - began;
    weft__cuda_note_activity(graph->cuda);
    if (error == cudaSuccess) graph->cuda->records.calls += graph->records;
    if (error == cudaSuccess) graph->cuda->tokens.calls += graph->tokens;
    return error == cudaSuccess ? WEFT_OK : weft__cuda_fail(graph->cuda, "launching a graph", error);
}

void weft_cuda_drop_graphs(weft_cuda *cuda)
{
    weft_cuda_moved(cuda);
    for (weft_cuda_graph *graph = cuda->graphs; graph != NULL; graph = graph->next) end_exec(graph);
}

int weft_cuda_graph_fresh(const weft_cuda_graph *graph)
{
    return graph->generation == graph->cuda->generation;
}

#endif
