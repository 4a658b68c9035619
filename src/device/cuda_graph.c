/* device/cuda_graph.c - a step's work recorded once and replayed. */
#ifdef WEFT_HAVE_CUDA

#include <stdlib.h>

#include "device/cuda_internal.h"

struct weft_cuda_graph {
    weft_object object;
    weft_cuda *cuda;
    cudaGraphExec_t exec;
    uint64_t generation;
    struct weft_cuda_graph *next; /* of the GPU's */
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
    weft_cuda_release(graph->cuda);
    free(graph);
}

weft_status weft_cuda_graph_begin(weft_cuda *cuda)
{
    WEFT_TRY(weft__cuda_usable(cuda));
    if (cuda->capturing) return weft_fail(WEFT_INVALID, "a graph is being captured already");
    cudaError_t error = cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal);
    if (error != cudaSuccess) return weft__cuda_fail(cuda, "capturing a graph", error);
    cuda->capturing = 1;
    return WEFT_OK;
}

weft_status weft_cuda_graph_end(weft_cuda *cuda, weft_cuda_graph **out)
{
    cudaGraph_t recorded = NULL;
    if (!cuda->capturing) return weft_fail(WEFT_INVALID, "no graph is being captured");
    cuda->capturing = 0;
    cudaError_t error = cudaStreamEndCapture(cuda->stream, &recorded);
    if (error != cudaSuccess) return weft__cuda_fail(cuda, "ending a graph", error);
    weft_cuda_graph *graph = out != NULL ? calloc(1, sizeof *graph) : NULL;
    if (graph != NULL) error = cudaGraphInstantiate(&graph->exec, recorded, 0);
    (void)cudaGraphDestroy(recorded);
    if (out == NULL) return WEFT_OK;
    if (graph == NULL) return weft_fail(WEFT_MEMORY, "no memory for a graph");
    if (error != cudaSuccess) {
        free(graph);
        return weft__cuda_fail(cuda, "making a graph", error);
    }
    weft_object_init(&graph->object, destroy);
    graph->cuda = weft_cuda_retain(cuda);
    graph->generation = cuda->generation;
    graph->next = cuda->graphs;
    cuda->graphs = graph;
    *out = graph;
    return WEFT_OK;
}

weft_status weft_cuda_graph_launch(weft_cuda_graph *graph)
{
    WEFT_TRY(weft__cuda_usable(graph->cuda));
    if (graph->exec == NULL) return weft_fail(WEFT_CLOSED, "a graph was launched behind a failure that ended it; capture it again");
    cudaError_t error = cudaGraphLaunch(graph->exec, graph->cuda->stream);
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
