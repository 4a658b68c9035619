/* bind/lua_spawn.c - core.spawn: ranks as threads, each with its own Lua state.
 *
 *   core.spawn(n, fn, ...)      core.spawn{ranks =, fn =, args = {...}, timeout =, total_threads =,
 *                                           fault =, verbose =, on_interrupt = "abort" | "flag" | "evaluate"}
 *   core.lead{the same} -> ranks   this state becomes rank 0, the others run fn; ranks:close() waits for them
 *
 * fn is a Lua function (it crosses as bytecode; see value.h for its upvalues) or
 * {module =, ["function"] =}. The global `weft` that `weft lua` gives a script is at hand in its ranks too. Every rank calls fn(...); the first result of each comes back in a
 * list, rank 0's first. The first rank that fails ends all, and its error is raised here:
 * {message = "rank 2: ...", code =, rank = 2} with the other plain fields of what it raised.
 *
 * The calling thread supervises. SIGINT is blocked in it and in all ranks, and read from a
 * descriptor: no handler and no global are needed, and a spawn inside a rank leaves it to the
 * outermost. "abort": the first Ctrl-C ends the ranks (code "interrupted"), the second one kills.
 * "flag": it sets what core.interrupted() reads; if nobody has read it by the next one, that one
 * aborts, and the third kills. "evaluate": it ends the core.evaluate that is on, on all ranks, which go
 * on (before the first one it ends the ranks); when they have not come back by the next one, the third kills. Between evaluations it waits for
 * the next one, unless core.interrupted() forgets it. */
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "bind/box.h"
#include "bind/core.h"
#include "bind/rank_thread.h"
#include "bind/value.h"

#define SPAWN_BOX "weft.spawn.box"

/* Seconds that ranks have to leave after a Ctrl-C: a compiled loop of a script never looks. */
static const double INTERRUPT_GRACE = 3;
/* Seconds that ranks with GPUs of their own have to leave behind a failure: what has not left by then waits in the
 * driver for a GPU that does not come to rest. */
static const double FAILURE_GRACE = 4;
static const double INTERRUPT_HINT = 2; /* seconds after which a Ctrl-C that nothing answers is explained */

typedef struct options {
    weft_world_options world;
    int verbose, interrupt; /* index in interrupt_modes */
} options;

enum { ON_ABORT, ON_FLAG, ON_EVALUATE };
static const char *const interrupt_modes[] = {"abort", "flag", "evaluate"};

/* ---- the spawn's own memory ---- */

static void free_spawn(weft_spawn *spawn)
{
    for (int r = 0; r < spawn->count; r++) {
        free(spawn->threads[r].result);
        free(spawn->threads[r].error);
    }
    weft_world_release(spawn->world);
    if (spawn->done_fd >= 0) close(spawn->done_fd);
    free(spawn->job);
    free(spawn);
}

static int spawn_gc(lua_State *L)
{
    weft_spawn **slot = lua_touserdata(L, 1);
    if (*slot != NULL) free_spawn(*slot);
    *slot = NULL;
    return 0;
}

/* What a world refuses is what the command line and the environment asked for. */
static void raise_refused(lua_State *L, weft_status status)
{
    weft_push_error(L, weft_status_name(status), weft_error_message());
    lua_pushboolean(L, status == WEFT_INVALID);
    lua_setfield(L, -2, "usage");
    lua_error(L);
}

/* Pushes a box that frees the spawn, whatever raises. */
static weft_spawn **push_spawn(lua_State *L, weft_packed *job, const options *options, int num_args, int by_name)
{
    int count = options->world.world_size;
    weft_spawn **slot = lua_newuserdata(L, sizeof *slot);
    *slot = NULL;
    if (luaL_newmetatable(L, SPAWN_BOX)) {
        lua_pushcfunction(L, spawn_gc);
        lua_setfield(L, -2, "__gc");
    }
    lua_setmetatable(L, -2);
    weft_world *world = NULL;
    weft_status status = weft_world_create(&world, &options->world);
    if (status != WEFT_OK) raise_refused(L, status);
    weft_spawn *spawn = calloc(1, sizeof *spawn + (size_t)count * sizeof *spawn->threads);
    if (spawn == NULL) {
        weft_world_release(world);
        luaL_error(L, "no memory for %d ranks", count);
    }
    spawn->world = world;
    spawn->count = count;
    spawn->num_args = num_args;
    spawn->by_name = by_name;
    spawn->verbose = options->verbose;
    spawn->job = job->bytes;
    *job = (weft_packed){NULL, 0, 0};
    spawn->done_fd = eventfd(0, EFD_CLOEXEC);
    for (int r = 0; r < count; r++) {
        spawn->threads[r].spawn = spawn;
        spawn->threads[r].rank = r;
    }
    *slot = spawn;
    if (spawn->done_fd < 0) luaL_error(L, "the system gave no event descriptor for the ranks");
    return slot;
}

/* ---- supervising ---- */

typedef struct supervisor {
    weft_spawn *spawn;
    weft_world *outer; /* of the rank that spawns, or NULL */
    int interrupt;
    double timeout;
    int signal_fd; /* -1: SIGINT is not ours */
    int armed;     /* the next Ctrl-C kills */
    int on_terminal; /* SIGTERM is ours too: the terminal, which may be raw, goes back to what it was */
    struct termios terminal;
    sigset_t old_mask;
    struct sigaction old_action;
} supervisor;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void take_sigint(supervisor *s)
{
    sigset_t ours;
    sigemptyset(&ours);
    sigaddset(&ours, SIGINT);
    s->on_terminal = s->outer == NULL && tcgetattr(STDIN_FILENO, &s->terminal) == 0;
    if (s->on_terminal) sigaddset(&ours, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &ours, &s->old_mask);
    s->signal_fd = s->outer == NULL ? signalfd(-1, &ours, SFD_CLOEXEC | SFD_NONBLOCK) : -1;
}

/* From here a Ctrl-C does what it does to any program. */
static void arm_default(supervisor *s)
{
    struct sigaction action = {.sa_handler = SIG_DFL};
    sigset_t only_int;
    sigemptyset(&only_int);
    sigaddset(&only_int, SIGINT);
    sigaction(SIGINT, &action, &s->old_action);
    s->armed = 1;
    pthread_sigmask(SIG_UNBLOCK, &only_int, NULL);
}

static void disarm(supervisor *s)
{
    sigset_t only_int;
    sigemptyset(&only_int);
    sigaddset(&only_int, SIGINT);
    pthread_sigmask(SIG_BLOCK, &only_int, NULL);
    sigaction(SIGINT, &s->old_action, NULL);
    s->armed = 0;
}

static void give_sigint_back(supervisor *s)
{
    if (s->armed) disarm(s);
    if (s->signal_fd >= 0) close(s->signal_fd);
    pthread_sigmask(SIG_SETMASK, &s->old_mask, NULL);
}

/* Ends as SIGTERM ends any program, the terminal as it was found. */
static void on_sigterm(supervisor *s)
{
    sigset_t only_term;
    sigemptyset(&only_term);
    sigaddset(&only_term, SIGTERM);
    tcsetattr(STDIN_FILENO, TCSANOW, &s->terminal);
    raise(SIGTERM);
    pthread_sigmask(SIG_UNBLOCK, &only_term, NULL);
}

static void on_signal(supervisor *s)
{
    struct signalfd_siginfo details;
    if (read(s->signal_fd, &details, sizeof details) != sizeof details) return;
    if (details.ssi_signo == SIGTERM) {
        on_sigterm(s);
        return;
    }
    if (s->interrupt == ON_EVALUATE) {
        if (weft_world_interrupt_evaluation(s->spawn->world) == 2) arm_default(s);
        return;
    }
    if (s->interrupt == ON_FLAG && atomic_exchange(&s->spawn->interrupts, 1) == 0) return;
    weft_world_interrupt(s->spawn->world);
    arm_default(s);
}

static int start_ranks(weft_spawn *spawn, int first)
{
    int started = 0;
    for (int r = first; r < spawn->count; r++) {
        weft_rank_thread *t = &spawn->threads[r];
        t->started = pthread_create(&t->thread, NULL, weft_rank_thread_main, t) == 0;
        if (!t->started) {
            weft_world_abort(spawn->world, r, WEFT_MEMORY, "the system gave no thread for this rank");
            break;
        }
        started++;
    }
    return started;
}

/* Waits for the ranks. Behind an abort it waits no longer than the timeout: a rank in a compiled
 * loop may never look. Returns how many did not come back. */
static int supervise(supervisor *s, int running)
{
    weft_spawn *spawn = s->spawn;
    double aborted_at = 0;
    int told = 0;
    while (running > 0) {
        struct pollfd fds[] = {{.fd = spawn->done_fd, .events = POLLIN}, {.fd = s->signal_fd, .events = POLLIN}};
        poll(fds, s->signal_fd >= 0 ? 2 : 1, 50);
        uint64_t finished = 0;
        if ((fds[0].revents & POLLIN) && read(spawn->done_fd, &finished, sizeof finished) == sizeof finished) running -= (int)finished;
        if (s->signal_fd >= 0 && (fds[1].revents & POLLIN)) on_signal(s);
        if (s->outer != NULL && weft_world_check(s->outer) != WEFT_OK)
            weft_world_abort(spawn->world, 0, WEFT_ABORTED, weft_error_message());
        if (weft_world_check(spawn->world) == WEFT_OK) aborted_at = told = 0; /* or taken back: core.evaluate */
        else if (aborted_at == 0) aborted_at = now();
        if (s->armed && s->interrupt == ON_EVALUATE && aborted_at == 0) disarm(s);
        if (s->interrupt == ON_EVALUATE && !s->armed && !told && aborted_at != 0 && now() - aborted_at > INTERRUPT_HINT) {
            told = 1;
            fputs("weft: what runs is inside a call that cannot be stopped; Ctrl-C again ends weft\n", stderr);
        }
        double grace = s->timeout, most = s->armed ? INTERRUPT_GRACE : FAILURE_GRACE;
        if ((s->armed || (s->interrupt != ON_EVALUATE && weft_world_spans_gpus(spawn->world))) && grace > most) grace = most;
        if (aborted_at != 0 && now() - aborted_at > grace) break;
    }
    int lost = 0;
    for (int r = 0; r < spawn->count; r++) {
        weft_rank_thread *t = &spawn->threads[r];
        if (!t->started) continue;
        if (running == 0 || atomic_load(&t->done)) {
            pthread_join(t->thread, NULL);
        } else {
            pthread_detach(t->thread);
            lost++;
        }
    }
    return lost;
}

/* ---- results ---- */

/* Raises the first failure, if there was one. */
static void raise_failure(lua_State *L, const weft_spawn *spawn)
{
    weft_status code = WEFT_OK;
    const char *message = NULL;
    int rank = weft_world_failure(spawn->world, &code, &message);
    if (rank < 0) return;
    if (code == WEFT_INTERRUPTED) {
        weft_push_error(L, weft_status_name(code), message);
        lua_error(L);
    }
    weft_push_rank_message(L, rank, message, " ");
    weft_push_error(L, weft_status_name(code), lua_tostring(L, -1));
    int mine = lua_gettop(L);
    if (spawn->threads[rank].error != NULL) {
        /* The rank's own fields, unless its error came behind another reason (a stall). */
        weft_unpack(L, spawn->threads[rank].error);
        lua_getfield(L, -1, "message");
        int same = !lua_isstring(L, -1) || strncmp(lua_tostring(L, -1), message, strlen(message)) == 0;
        lua_pop(L, 1);
        for (lua_pushnil(L); same && lua_next(L, mine + 1) != 0; lua_pop(L, 1)) {
            if (lua_type(L, -2) == LUA_TSTRING && strcmp(lua_tostring(L, -2), "message") == 0) continue;
            lua_pushvalue(L, -2);
            lua_pushvalue(L, -2);
            lua_rawset(L, mine);
        }
        lua_settop(L, mine);
    }
    lua_pushinteger(L, rank);
    lua_setfield(L, mine, "rank");
    lua_error(L);
}

static int push_results(lua_State *L, const weft_spawn *spawn)
{
    lua_createtable(L, spawn->count, 0);
    for (int r = 0; r < spawn->count; r++) {
        weft_unpack(L, spawn->threads[r].result);
        lua_rawseti(L, -2, r + 1);
    }
    return 1;
}

/* ---- arguments ---- */

static void pack_field(lua_State *L, weft_packed *job, const char *table, const char *field)
{
    lua_getglobal(L, table);
    if (field != NULL) lua_getfield(L, -1, field);
    weft_pack(L, job, -1, field != NULL ? field : table);
    lua_pop(L, field != NULL ? 2 : 1);
}

/* Whether the function at index, or the module that one is named from, has `weft` at hand as a global: its ranks then do too. */
static void pack_at_hand(lua_State *L, weft_packed *job, int index)
{
    if (lua_isfunction(L, index)) lua_getfenv(L, index);
    else lua_pushvalue(L, LUA_GLOBALSINDEX);
    lua_pushliteral(L, "weft");
    lua_rawget(L, -2);
    lua_getfield(L, LUA_REGISTRYINDEX, "_LOADED");
    lua_getfield(L, -1, "weft"); /* env global loaded module */
    lua_pushboolean(L, lua_istable(L, -1) && lua_rawequal(L, -1, -3));
    weft_pack(L, job, -1, "weft");
    lua_pop(L, 5);
}

/* Returns whether the function is named rather than given. */
static int pack_function(lua_State *L, weft_packed *job, int index)
{
    if (lua_isfunction(L, index)) {
        weft_pack_function(L, job, index, "the function");
        return 0;
    }
    if (!lua_istable(L, index))
        luaL_error(L, "spawn: a function or {module =, [\"function\"] =} expected, got %s", luaL_typename(L, index));
    static const char *const names[] = {"module", "function"};
    for (int i = 0; i < 2; i++) {
        lua_getfield(L, index, names[i]);
        if (!lua_isstring(L, -1)) luaL_error(L, "spawn: %s must be a string, got %s", names[i], luaL_typename(L, -1));
        weft_pack(L, job, -1, names[i]);
        lua_pop(L, 1);
    }
    return 1;
}

static options default_options(int world_size)
{
    return (options){.world = {.world_size = world_size, .fault = getenv("WEFT_FAULT")}};
}

static void check_option_names(lua_State *L)
{
    static const char *const known[] = {"ranks", "fn", "args", "timeout", "total_threads", "fault", "verbose", "on_interrupt"};
    for (lua_pushnil(L); lua_next(L, 1) != 0; lua_pop(L, 1)) {
        int found = 0;
        for (size_t i = 0; i < sizeof known / sizeof *known && !found; i++)
            found = lua_type(L, -2) == LUA_TSTRING && strcmp(lua_tostring(L, -2), known[i]) == 0;
        if (!found)
            luaL_error(L, "spawn: unknown option '%s' (known: ranks, fn, args, timeout, total_threads, fault, verbose, on_interrupt)",
                       lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : luaL_typename(L, -2));
    }
}

static options check_options(lua_State *L)
{
    check_option_names(L);
    options o = default_options((int)weft_field_int(L, 1, "ranks", 1, 1024));
    o.world.total_threads = (int)weft_field_int_or(L, 1, "total_threads", 0, 1 << 20, 0);
    o.world.timeout_seconds = weft_field_number_or(L, 1, "timeout", 0);
    o.world.fault = weft_field_string_or(L, 1, "fault", o.world.fault);
    o.verbose = weft_field_bool_or(L, 1, "verbose", 0);
    const char *mode = weft_field_string_or(L, 1, "on_interrupt", "abort");
    while (o.interrupt <= ON_EVALUATE && strcmp(mode, interrupt_modes[o.interrupt]) != 0) o.interrupt++;
    if (o.interrupt > ON_EVALUATE) luaL_error(L, "spawn: on_interrupt must be abort, flag or evaluate, got '%s'", mode);
    return o;
}

/* ---- core.spawn ---- */

static void pack_argument(lua_State *L, weft_packed *job, int index, int number)
{
    const char *what = lua_pushfstring(L, "argument %d", number);
    weft_pack(L, job, index, what);
    lua_pop(L, 1);
}

/* args of the options table at 1; nil holes need args.n. */
static int pack_args_field(lua_State *L, weft_packed *job)
{
    lua_getfield(L, 1, "args");
    if (lua_isnil(L, -1)) {
        lua_pop(L, 1);
        return 0;
    }
    if (!lua_istable(L, -1)) luaL_error(L, "spawn: args must be a list, got %s", luaL_typename(L, -1));
    int args = lua_gettop(L);
    int count = (int)weft_field_int_or(L, args, "n", 0, 1 << 20, (int64_t)lua_objlen(L, args));
    for (int i = 1; i <= count; i++) {
        lua_rawgeti(L, args, i);
        pack_argument(L, job, args + 1, i);
        lua_settop(L, args);
    }
    lua_pop(L, 1);
    return count;
}

/* Packs function and arguments and pushes the spawn's box; starts nothing. */
static weft_spawn **prepare(lua_State *L, options *o)
{
    int top = lua_gettop(L), by_name, num_args;
    int named = lua_istable(L, 1);
    *o = named ? check_options(L) : default_options((int)luaL_checkinteger(L, 1));
    weft_packed *job = weft_packed_new(L);
    pack_field(L, job, "package", "path");
    pack_field(L, job, "package", "cpath");
    pack_field(L, job, "arg", NULL);
    if (named) {
        lua_getfield(L, 1, "fn");
        pack_at_hand(L, job, lua_gettop(L));
        by_name = pack_function(L, job, lua_gettop(L));
        num_args = pack_args_field(L, job);
    } else {
        luaL_checkany(L, 2);
        pack_at_hand(L, job, 2);
        by_name = pack_function(L, job, 2);
        num_args = top - 2;
        for (int i = 0; i < num_args; i++) pack_argument(L, job, 3 + i, i + 1);
    }
    return push_spawn(L, job, o, num_args, by_name);
}

/* Raises when ranks did not come back: their threads still use the spawn, which stays for as long
 * as the process. */
static void raise_lost(lua_State *L, weft_spawn **slot, int lost)
{
    weft_spawn *spawn = *slot;
    *slot = NULL;
    const char *message = "";
    weft_status code = WEFT_OK;
    int rank = weft_world_failure(spawn->world, &code, &message);
    if (code == WEFT_INTERRUPTED) {
        weft_push_error(L, weft_status_name(code), message);
        lua_error(L);
    }
    weft_push_error(L, "timeout", lua_pushfstring(L, "rank %d: %s (and %d of %d ranks did not stop)", rank, message, lost, spawn->count));
    lua_error(L);
}

static int l_spawn(lua_State *L)
{
    options o;
    weft_spawn **slot = prepare(L, &o), *spawn = *slot, *outer = weft_lua_spawn(L);
    supervisor s = {.spawn = spawn, .outer = outer != NULL ? outer->world : NULL, .interrupt = o.interrupt};
    s.timeout = o.world.timeout_seconds > 0 ? o.world.timeout_seconds : 300;
    take_sigint(&s);
    int running = start_ranks(spawn, 0);
    int lost = supervise(&s, running);
    give_sigint_back(&s);
    if (lost > 0) raise_lost(L, slot, lost);
    raise_failure(L, spawn);
    return push_results(L, spawn);
}

/* ---- core.lead: this state becomes rank 0 ---- */

#define LEAD "weft.ranks"

typedef struct {
    weft_spawn *spawn;
    int running;
    double timeout;
} lead;

/* Nobody closed it: the other ranks are told to stop, and what they use stays. */
static int lead_gc(lua_State *L)
{
    lead *l = lua_touserdata(L, 1);
    if (l->spawn != NULL) weft_world_abort(l->spawn->world, 0, WEFT_ABORTED, "the script that led the ranks is gone");
    l->spawn = NULL;
    return 0;
}

/* ranks:close() waits for the other ranks' functions to return, and makes this state a world of
 * one again. Raises the first failure, if there was one. */
static int lead_close(lua_State *L)
{
    lead *l = luaL_checkudata(L, 1, LEAD);
    if (l->spawn == NULL) return 0;
    weft_spawn **slot = lua_newuserdata(L, sizeof *slot);
    *slot = NULL;
    luaL_getmetatable(L, SPAWN_BOX);
    lua_setmetatable(L, -2);
    weft_lua_set_rank(L, NULL);
    *slot = l->spawn;
    l->spawn = NULL;
    supervisor s = {.spawn = *slot, .signal_fd = -1, .timeout = l->timeout};
    int lost = supervise(&s, l->running);
    if (lost > 0) raise_lost(L, slot, lost);
    raise_failure(L, *slot);
    return 0;
}

/* core.lead{ranks =, fn =, args = ...} -> weft.ranks: this state becomes rank 0 of a new world whose
 * other ranks run fn, as under spawn. Ctrl-C stays what the script made of it. */
static int l_lead(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    if (weft_lua_spawn(L) != NULL) weft_raise_if(L, weft_fail(WEFT_INVALID, "a rank cannot lead other ranks"));
    if (weft_lua_rank(L)->world_size > 1)
        weft_raise_if(L, weft_fail(WEFT_INVALID, "this script leads ranks already: close the first engine before the next"));
    lead *l = lua_newuserdata(L, sizeof *l);
    l->spawn = NULL;
    if (luaL_newmetatable(L, LEAD)) {
        static const luaL_Reg methods[] = {{"close", lead_close}, {NULL, NULL}};
        lua_newtable(L);
        luaL_setfuncs(L, methods, 0);
        lua_setfield(L, -2, "__index");
        lua_pushcfunction(L, lead_gc);
        lua_setfield(L, -2, "__gc");
        lua_pushliteral(L, LEAD);
        lua_setfield(L, -2, "__metatable");
    }
    lua_setmetatable(L, -2);
    int handle = lua_gettop(L);
    options o;
    weft_spawn **slot = prepare(L, &o);
    l->spawn = *slot;
    *slot = NULL;
    l->timeout = o.world.timeout_seconds > 0 ? o.world.timeout_seconds : 300;
    sigset_t only_int, old;
    sigemptyset(&only_int);
    sigaddset(&only_int, SIGINT);
    pthread_sigmask(SIG_BLOCK, &only_int, &old);
    l->running = start_ranks(l->spawn, 1);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    weft_rank *rank = NULL;
    weft_raise_if(L, weft_rank_create(&rank, l->spawn->world, 0));
    weft_lua_set_rank(L, rank);
    lua_pushvalue(L, handle);
    return 1;
}

void weft_open_spawn(lua_State *L)
{
    lua_pushcfunction(L, l_spawn);
    lua_setfield(L, -2, "spawn");
    lua_pushcfunction(L, l_lead);
    lua_setfield(L, -2, "lead");
    weft_open_rank(L);
    weft_push_error(L, "ok", ""); /* the class must exist before an error is unpacked */
    lua_pop(L, 1);
}
