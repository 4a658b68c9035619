/* bind/main.c - the program: one Lua state on the main thread that reads the command line.
 *
 * Ranks are threads that `weft.spawn` starts; the main thread supervises them (lua_spawn.c). */
#include <fcntl.h>
#include <lauxlib.h>
#include <limits.h>
#include <locale.h>
#include <lua.h>
#include <lualib.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bind/core.h"
#include "bind/state.h"

static int traceback(lua_State *L)
{
    return weft_state_traceback(L);
}

/* Descriptors 0 to 2 are taken, so that nothing else becomes "standard input"; what was closed
 * fails when it is used. */
static void hold_standard_files(void)
{
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd) _exit(1);
}

/* One line of an error in the first chunk: weft's Lua files are missing, or broken. */
static void report_start(const char *message)
{
    if (message != NULL && strstr(message, "module 'weft.commands' not found") != NULL) {
        const char *named = getenv("WEFT_LUA");
        fprintf(stderr, "weft: no Lua files of weft %s%s\n", named != NULL ? "in WEFT_LUA=" : "beside the program", named != NULL ? named : "");
        return;
    }
    const char *cause = message != NULL ? strstr(message, ":\n\t") : NULL; /* as LuaJIT words what is wrong with a module */
    if (cause != NULL) fprintf(stderr, "weft: %.*s: %s\n", (int)(cause - message), message, cause + 3);
    else fprintf(stderr, "weft: %s\n", message != NULL ? message : "an error without a message");
}

int main(int argc, char **argv)
{
    hold_standard_files();
    signal(SIGXFSZ, SIG_IGN); /* a file above the limit of ulimit -f is a write that fails, and is told of */
    setlocale(LC_CTYPE, ""); /* letters typed at the prompt; before there are threads */
    lua_State *L = weft_state_open();
    if (L == NULL) {
        fputs("weft: no memory for a Lua state\n", stderr);
        return 1;
    }
    lua_createtable(L, argc, 0);
    for (int i = 0; i < argc; i++) {
        lua_pushstring(L, argv[i]);
        lua_rawseti(L, -2, i);
    }
    lua_setglobal(L, "arg");
    lua_pushcfunction(L, traceback);
    int handler = lua_gettop(L);
    int failed = luaL_loadstring(L, "return require('weft.commands').main(arg)") != 0 || lua_pcall(L, 0, 1, handler) != 0;
    int code = 1;
    if (failed) {
        report_start(lua_tostring(L, -1));
    } else {
        code = lua_isnumber(L, -1) ? (int)lua_tointeger(L, -1) : 0;
    }
    if ((fflush(stdout) != 0 || ferror(stdout)) && code == 0) {
        fputs("weft: the results could not be written to standard output (is it closed, or the disk full?)\n", stderr);
        code = 1;
    }
    if (code != 130) lua_close(L); /* behind a Ctrl-C a rank may still be in a loop of its own */
    fflush(NULL);
    _exit(code);
}
