/* bind/lua_machine.c - what the machine is and can do: clock, terminal, cores, copy speed.
 *
 *   core.now() -> seconds of a clock that only runs forward     core.isatty(fd) -> whether it is a terminal
 *   core.terminal_width() -> columns of the terminal on standard output, nil where it is none
 *   core.cpu_cores() -> cores of this process                   core.cpu_isa() -> "avx2": what the kernels use
 *   core.same_file(path, place) -> whether path exists and is place, or lies in that folder
 *   core.file_ending(folder, ending) -> the first file name in the folder that ends so (".gguf"), or nil
 *   core.write_file(path, text)     replaces the file when all is written; raises "cannot write PATH: why"
 *   core.read_file(path, limit) -> the text of a regular file of at most limit bytes; raises for anything else
 *   core.copy_speed([bytes]) -> bytes read plus written a second, the best of three
 *   core.live_objects() -> objects of the core that live now, over all states of the process */
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/pool.h"
#include "bind/box.h"
#include "bind/core.h"
#include "kernels/weft_kernels.h"

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* core.now() -> seconds of a clock that only runs forward */
static int l_now(lua_State *L)
{
    lua_pushnumber(L, now());
    return 1;
}

/* core.isatty(fd) */
static int l_isatty(lua_State *L)
{
    lua_pushboolean(L, isatty((int)luaL_checkinteger(L, 1)));
    return 1;
}

static int l_terminal_width(lua_State *L)
{
    struct winsize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 0;
    lua_pushinteger(L, size.ws_col);
    return 1;
}

/* core.same_file(path, place) -> whether path exists and is place or lies in that folder */
static int l_same_file(lua_State *L)
{
    char *path = realpath(luaL_checkstring(L, 1), NULL), *place = realpath(luaL_checkstring(L, 2), NULL);
    size_t length = place != NULL ? strlen(place) : 0;
    int inside = path != NULL && place != NULL && strncmp(path, place, length) == 0 && (path[length] == '/' || path[length] == 0);
    free(path);
    free(place);
    lua_pushboolean(L, inside);
    return 1;
}

static int l_file_ending(lua_State *L)
{
    char name[256];
    const char *folder = luaL_checkstring(L, 1);
    if (weft_file_find_ending(folder, luaL_checkstring(L, 2), name, sizeof name)) lua_pushstring(L, name);
    else lua_pushnil(L);
    return 1;
}

static int push_text(lua_State *L)
{
    lua_pushlstring(L, lua_touserdata(L, 1), (size_t)lua_tonumber(L, 2));
    return 1;
}

/* core.read_file(path, limit) -> text; "PATH: not a regular file" and what else weft_file_read refuses is raised */
static int l_read_file(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    lua_Number limit = luaL_checknumber(L, 2);
    luaL_argcheck(L, limit >= 0 && limit <= 1e15, 2, "a number of bytes expected");
    char *text;
    size_t bytes;
    lua_pushcfunction(L, push_text);
    weft_raise_if(L, weft_file_read(path, (size_t)limit, &text, &bytes));
    lua_pushlightuserdata(L, text);
    lua_pushnumber(L, (lua_Number)bytes);
    int failed = lua_pcall(L, 2, 1, 0); /* when Lua has no room, the text goes all the same */
    free(text);
    return failed ? lua_error(L) : 1;
}

static int l_write_file(lua_State *L)
{
    size_t bytes;
    const char *text = luaL_checklstring(L, 2, &bytes);
    weft_raise_if(L, weft_file_write(luaL_checkstring(L, 1), text, bytes));
    return 0;
}

static int l_cpu_cores(lua_State *L)
{
    lua_pushinteger(L, weft_cpu_cores());
    return 1;
}

static int l_cpu_isa(lua_State *L)
{
    lua_pushstring(L, weft_cpu_isa());
    return 1;
}

typedef struct {
    char *to;
    const char *from;
    size_t bytes;
} copy_job;

static void copy_part(void *context, int part, int parts)
{
    const copy_job *job = context;
    long begin, end;
    weft_pool_range((long)job->bytes, 4096, part, parts, &begin, &end);
    memcpy(job->to + begin, job->from + begin, (size_t)(end - begin));
}

/* core.copy_speed([bytes]) -> bytes read plus written a second, copying between two buffers larger
 * than any cache with all cores: the best of three. */
static int l_copy_speed(lua_State *L)
{
    size_t bytes = (size_t)luaL_optnumber(L, 1, 128 << 20);
    luaL_argcheck(L, bytes >= 4096 && bytes <= ((size_t)1 << 34), 1, "4096 bytes to 16 GiB expected");
    weft_pool *pool = NULL;
    weft_raise_if(L, weft_pool_create(&pool, weft_cpu_cores(), 0));
    char *from = malloc(bytes), *to = malloc(bytes);
    double best = 1e30;
    if (from != NULL && to != NULL) {
        memset(from, 1, bytes);
        memset(to, 2, bytes);
        copy_job job = {to, from, bytes};
        for (int i = 0; i < 3; i++) {
            double began = now();
            weft_pool_run(pool, copy_part, &job);
            double seconds = now() - began;
            if (seconds < best) best = seconds;
        }
    }
    int failed = from == NULL || to == NULL;
    free(from);
    free(to);
    weft_pool_destroy(pool);
    if (failed) weft_raise_if(L, weft_fail(WEFT_MEMORY, "no memory for two buffers of %zu bytes", bytes));
    lua_pushnumber(L, 2.0 * (double)bytes / best);
    return 1;
}

void weft_open_machine(lua_State *L)
{
    static const luaL_Reg functions[] = {{"now", l_now}, {"same_file", l_same_file}, {"file_ending", l_file_ending}, {"read_file", l_read_file}, {"write_file", l_write_file}, {"isatty", l_isatty}, {"terminal_width", l_terminal_width}, {"cpu_cores", l_cpu_cores},
                                         {"cpu_isa", l_cpu_isa}, {"copy_speed", l_copy_speed}, {NULL, NULL}};
    luaL_setfuncs(L, functions, 0);
}
