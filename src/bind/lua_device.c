/* bind/lua_device.c - the GPU of a rank, and weft.graph: captured steps.
 *
 *   core.gpu.count() -> GPUs that this process may use (0 in a build without CUDA)
 *   core.gpu.why_none() -> why there is none, in CUDA's words
 *   core.gpu.describe(i) -> name, free bytes, total bytes
 *   core.gpu.block_bytes(bytes) -> what a block of so many bytes takes of a GPU: up to an eighth more, from 64 MB on a 64th
 *   core.gpu.use(i [, limit])     this rank computes on GPU i from here; limit in bytes
 *   core.gpu.index() -> the GPU of this rank, or nil
 *   core.gpu.synchronize()        waits for the rank's stream
 *   core.gpu.pace()               waits for the work that was there at the call before
 *   core.gpu.forget_tokens()      what the GPU chose and nobody asked for is not wanted any more
 *   core.gpu.driver_seconds()     what this rank's calls into the driver for replayed steps took so far
 *   core.gpu.copy_speed([bytes]) -> bytes read plus written a second by copies within its memory
 *   core.gpu.built                whether this build has CUDA
 *   core.graph.capture(fn [, together]) -> weft.graph   runs fn and records what it launches, without
 *                 running it; .fresh is false once addresses have moved: capture again. together: operations
 *                 become few launches where they can; no other rank may use the GPU then
 *     :launch()     replays it
 *     :close()      gives it back
 *   core.graph.join(fn, ...) -> what fn gives   runs fn(...) launch by launch; where an operation follows a product of many
 *                 tokens they may be one launch, with the results of both */
#include <string.h>
#include <time.h>

#include "bind/box.h"
#include "bind/core.h"

#define GRAPH "weft.graph"

static int l_count(lua_State *L)
{
    lua_pushinteger(L, weft_cuda_device_count());
    return 1;
}

static int l_why_none(lua_State *L)
{
    lua_pushstring(L, weft_cuda_why_none());
    return 1;
}

static int l_describe(lua_State *L)
{
    char name[256];
    size_t available = 0, total = 0;
    weft_raise_if(L, weft_cuda_describe((int)luaL_checkinteger(L, 1), name, sizeof name, &available, &total));
    lua_pushstring(L, name);
    lua_pushnumber(L, (lua_Number)available);
    lua_pushnumber(L, (lua_Number)total);
    return 3;
}

static int l_block_bytes(lua_State *L)
{
    lua_Number bytes = luaL_checknumber(L, 1);
    luaL_argcheck(L, bytes >= 0 && bytes < 9e15, 1, "expected a number of bytes");
    lua_pushnumber(L, (lua_Number)weft_cuda_block_bytes((size_t)bytes));
    return 1;
}

static int l_use(lua_State *L)
{
    int index = (int)luaL_checkinteger(L, 1);
    lua_Number limit = luaL_optnumber(L, 2, 0);
    luaL_argcheck(L, limit >= 0 && limit < 9e15, 2, "expected a number of bytes");
    weft_raise_if(L, weft_rank_use_cuda(weft_lua_rank(L), index, (long long)limit));
    return 0;
}

static int l_index(lua_State *L)
{
    const weft_rank *rank = weft_lua_rank(L);
    if (rank->cuda == NULL) lua_pushnil(L);
    else lua_pushinteger(L, weft_cuda_index(rank->cuda));
    return 1;
}

static int l_synchronize(lua_State *L)
{
    weft_rank *rank = weft_lua_rank(L);
    if (rank->cuda != NULL) weft_raise_if(L, weft_cuda_wait(rank->cuda));
    return 0;
}

static int l_driver_seconds(lua_State *L)
{
    const weft_rank *rank = weft_lua_rank(L);
    lua_pushnumber(L, rank->cuda != NULL ? weft_cuda_driver_seconds(rank->cuda) : 0);
    return 1;
}

static int l_pace(lua_State *L)
{
    weft_rank *rank = weft_lua_rank(L);
    if (rank->cuda != NULL) weft_raise_if(L, weft_cuda_pace(rank->cuda));
    return 0;
}

static int l_forget_tokens(lua_State *L)
{
    weft_rank *rank = weft_lua_rank(L);
    if (rank->cuda != NULL) weft_cuda_forget_tokens(rank->cuda);
    return 0;
}

/* Outside the rank's account: its limit is for weights, cache and steps. */
static weft_status time_copies(weft_cuda *cuda, size_t bytes, double *speed)
{
    enum { ROUNDS = 10 };
    void *a = NULL, *b = NULL;
    weft_status status = weft_cuda_alloc(cuda, bytes, &a);
    if (status == WEFT_OK) status = weft_cuda_alloc(cuda, bytes, &b);
    struct timespec begin = {0}, end = {0};
    for (int i = 0; i <= ROUNDS && status == WEFT_OK; i++) {
        status = weft_cuda_copy(cuda, i % 2 ? a : b, i % 2 ? b : a, bytes);
        if (status == WEFT_OK && (i == 0 || i == ROUNDS)) status = weft_cuda_wait(cuda);
        clock_gettime(CLOCK_MONOTONIC, i == 0 ? &begin : &end);
    }
    *speed = 2.0 * (double)bytes * ROUNDS / ((double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec));
    if (a != NULL) weft_cuda_retire(cuda, a, bytes);
    if (b != NULL) weft_cuda_retire(cuda, b, bytes);
    return status;
}

static int l_copy_speed(lua_State *L)
{
    weft_rank *rank = weft_lua_rank(L);
    lua_Number bytes = luaL_optnumber(L, 1, 1 << 30);
    luaL_argcheck(L, bytes >= 4096 && bytes <= 1e11, 1, "expected a number of bytes");
    if (rank->cuda == NULL) return luaL_error(L, "this rank has no GPU");
    double speed = 0;
    weft_raise_if(L, time_copies(rank->cuda, (size_t)bytes, &speed));
    lua_pushnumber(L, speed);
    return 1;
}

/* Whatever fn does, the capture ends. */
static int l_capture(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    weft_rank *rank = weft_lua_rank(L);
    if (rank->cuda == NULL) return luaL_error(L, "graphs are captured on a GPU, and this rank computes on a CPU");
    const int together = lua_toboolean(L, 2);
    weft_object **slot = weft_box_new(L, GRAPH);
    lua_pushvalue(L, 1);
    weft_raise_if(L, weft_cuda_graph_begin(rank->cuda, together));
    if (lua_pcall(L, 0, 0, 0) != 0) {
        (void)weft_cuda_graph_end(rank->cuda, NULL);
        return lua_error(L);
    }
    weft_cuda_graph *graph = NULL;
    weft_raise_if(L, weft_cuda_graph_end(rank->cuda, &graph));
    *slot = (weft_object *)graph;
    return 1;
}

/* Whatever fn does, the joining ends. */
static int l_join(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    weft_rank *rank = weft_lua_rank(L);
    if (rank->cuda == NULL) return luaL_error(L, "operations are joined on a GPU, and this rank computes on a CPU");
    weft_raise_if(L, weft_cuda_join_begin(rank->cuda));
    if (lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0) != 0) {
        (void)weft_cuda_join_end(rank->cuda, 0);
        return lua_error(L);
    }
    weft_raise_if(L, weft_cuda_join_end(rank->cuda, 1));
    return lua_gettop(L);
}

static weft_cuda_graph *check_graph(lua_State *L)
{
    return (weft_cuda_graph *)weft_box_check(L, 1, GRAPH);
}

static int l_launch(lua_State *L)
{
    weft_raise_if(L, weft_cuda_graph_launch(check_graph(L)));
    return 0;
}

static int fields(lua_State *L)
{
    weft_cuda_graph *graph = check_graph(L);
    if (strcmp(luaL_checkstring(L, 2), "fresh") == 0) lua_pushboolean(L, weft_cuda_graph_fresh(graph));
    else lua_pushnil(L);
    return 1;
}

void weft_open_device(lua_State *L)
{
    static const luaL_Reg gpu[] = {{"count", l_count}, {"why_none", l_why_none},       {"describe", l_describe}, {"block_bytes", l_block_bytes}, {"use", l_use},
                                   {"index", l_index}, {"pace", l_pace}, {"driver_seconds", l_driver_seconds}, {"forget_tokens", l_forget_tokens}, {"synchronize", l_synchronize}, {"copy_speed", l_copy_speed}, {NULL, NULL}};
    static const luaL_Reg graph[] = {{"capture", l_capture}, {"join", l_join}, {NULL, NULL}};
    static const luaL_Reg methods[] = {{"launch", l_launch}, {NULL, NULL}};
    weft_box_class(L, GRAPH, methods, fields, NULL);
    lua_newtable(L);
    luaL_setfuncs(L, gpu, 0);
#ifdef WEFT_HAVE_CUDA
    lua_pushboolean(L, 1);
#else
    lua_pushboolean(L, 0);
#endif
    lua_setfield(L, -2, "built");
    lua_setfield(L, -2, "gpu");
    lua_newtable(L);
    luaL_setfuncs(L, graph, 0);
    lua_setfield(L, -2, "graph");
}
