/* bind/rank_thread.h - one spawn: the caller's side (lua_spawn.c) and the ranks' side (rank_thread.c). */
#pragma once

#include <lua.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "comm/world.h"

struct weft_spawn;

typedef struct weft_rank_thread {
    struct weft_spawn *spawn;
    pthread_t thread;
    int rank, started;
    /* Written by the rank, read once it is done. */
    char *result, *error; /* packed values, or NULL */
    atomic_int done;
} weft_rank_thread;

typedef struct weft_spawn {
    weft_world *world;
    char *job; /* packed: package.path, package.cpath, arg, whether `weft` is a global, function or {module, name}, arguments */
    int num_args, by_name;
    int verbose;
    int done_fd;               /* an eventfd: each rank that is done adds one */
    atomic_int interrupts;     /* Ctrl-C not yet read by core.interrupted, in flag mode */
    int count;
    weft_rank_thread threads[];
} weft_spawn;

void *weft_rank_thread_main(void *rank_thread);
/* Sets the hook that watches the abort flag; only in the state of a rank's thread. */
void weft_rank_thread_watch(lua_State *L);
/* The status that an error's code names. */
weft_status weft_status_of(const char *name);
/* Pushes the text of the error at index. */
const char *weft_push_error_text(lua_State *L, int index, weft_status *code);
/* Pushes "rank 2: message"; the message alone where it begins with a rank already, as in "rank 1 has another policy".
 * behind: what may follow that rank's number; " " alone where ranks may have started ranks. */
void weft_push_rank_message(lua_State *L, int rank, const char *message, const char *behind);
/* The spawn that this state is a rank of, or NULL. */
weft_spawn *weft_lua_spawn(lua_State *L);
void weft_open_rank(lua_State *L); /* core.rank, publish, receive, abort, interrupted, ... */
