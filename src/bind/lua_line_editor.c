/* bind/lua_line_editor.c - weft.line_editor: lines typed at a terminal, edited with libedit.
 *
 *   core.line_editor{history = FILE or nil, complete = function or nil} -> editor
 *     complete(text before the cursor) -> text to insert, list of choices to show (a text)
 *   editor:read(prompt) -> line | nil, "eof" | nil, "interrupt" (Ctrl-C: the line is dropped)
 *   editor:add(entry)      to the history, and to its file; the same entry twice in a row is one
 *   editor:close()
 *
 * Ctrl-C arrives as a key while a line is read (no signal), so nothing is left half done. core.line_editor
 * is nil where weft was built without libedit, and gives nil, message where there is no terminal. */
#include "bind/box.h"
#include "bind/core.h"

#ifdef WEFT_HAVE_LIBEDIT
#include <histedit.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EDITOR "weft.line_editor"

enum { HISTORY_LINES = 1000 };

typedef struct {
    EditLine *el;
    History *history;
    lua_State *L; /* of the read that is going on */
    int complete; /* references in the registry, or LUA_NOREF */
    char *history_file;
    char prompt[64];
    int interrupted;
} editor;

static editor *of(EditLine *el)
{
    void *data = NULL;
    el_get(el, EL_CLIENTDATA, &data);
    return data;
}

static char *prompt(EditLine *el)
{
    return of(el)->prompt;
}

static unsigned char on_interrupt(EditLine *el, int key)
{
    (void)key;
    of(el)->interrupted = 1;
    return CC_EOF;
}

/* Asks Lua; errors of the callback only beep. */
static unsigned char on_complete(EditLine *el, int key)
{
    (void)key;
    editor *e = of(el);
    lua_State *L = e->L;
    if (e->complete == LUA_NOREF) return CC_ERROR;
    const LineInfo *line = el_line(el);
    int top = lua_gettop(L), result = CC_ERROR;
    lua_rawgeti(L, LUA_REGISTRYINDEX, e->complete);
    lua_pushlstring(L, line->buffer, (size_t)(line->cursor - line->buffer));
    if (lua_pcall(L, 1, 2, 0) == 0) {
        const char *insert = lua_tostring(L, -2), *choices = lua_tostring(L, -1);
        if (insert != NULL && *insert != 0) result = el_insertstr(el, insert) == 0 ? CC_REFRESH : CC_ERROR;
        else if (choices != NULL && *choices != 0) {
            printf("\n%s\n", choices);
            fflush(stdout);
            result = CC_REDISPLAY;
        }
    }
    lua_settop(L, top);
    return (unsigned char)result;
}

static void free_editor(editor *e)
{
    if (e->el != NULL) el_end(e->el);
    if (e->history != NULL) history_end(e->history);
    free(e->history_file);
    e->el = NULL;
    e->history = NULL;
    e->history_file = NULL;
}

static int l_close(lua_State *L)
{
    editor *e = luaL_checkudata(L, 1, EDITOR);
    free_editor(e);
    luaL_unref(L, LUA_REGISTRYINDEX, e->complete);
    e->complete = LUA_NOREF;
    return 0;
}

static editor *check_editor(lua_State *L)
{
    editor *e = luaL_checkudata(L, 1, EDITOR);
    luaL_argcheck(L, e->el != NULL, 1, "object is closed");
    return e;
}

static int l_read(lua_State *L)
{
    editor *e = check_editor(L);
    snprintf(e->prompt, sizeof e->prompt, "%s", luaL_checkstring(L, 2));
    e->L = L;
    e->interrupted = 0;
    int length = 0;
    el_set(e->el, EL_PREP_TERM, 1); /* before the prompt is seen: keys of a fast typist are edited too */
    const char *line = el_gets(e->el, &length);
    if (e->interrupted) {
        el_reset(e->el);
        putchar('\n');
        lua_pushnil(L);
        lua_pushliteral(L, "interrupt");
        return 2;
    }
    if (line == NULL || length <= 0) {
        lua_pushnil(L);
        lua_pushliteral(L, "eof");
        return 2;
    }
    if (line[length - 1] == '\n') length--;
    lua_pushlstring(L, line, (size_t)length);
    return 1;
}

static int l_add(lua_State *L)
{
    editor *e = check_editor(L);
    HistEvent event;
    history(e->history, &event, H_ENTER, luaL_checkstring(L, 2));
    if (e->history_file != NULL) history(e->history, &event, H_SAVE, e->history_file);
    return 0;
}

static void bind_keys(editor *e)
{
    EditLine *el = e->el;
    el_set(el, EL_CLIENTDATA, e);
    el_set(el, EL_PROMPT, prompt);
    el_set(el, EL_HIST, history, e->history);
    el_set(el, EL_EDITOR, "emacs");
    el_source(el, NULL);
    el_set(el, EL_ADDFN, "weft-complete", "complete the name", on_complete);
    el_set(el, EL_ADDFN, "weft-interrupt", "drop the line", on_interrupt);
    el_set(el, EL_SETTY, "-d", "-isig", NULL);
    el_set(el, EL_BIND, "^I", "weft-complete", NULL);
    el_set(el, EL_BIND, "^C", "weft-interrupt", NULL);
    el_set(el, EL_BIND, "^R", "em-inc-search-prev", NULL);
    static const char *const keys[][2] = { /* what terminals send for Delete, Home, End, and Control with an arrow */
        {"\033[3~", "ed-delete-next-char"}, {"\033[1~", "ed-move-to-beg"}, {"\033[4~", "ed-move-to-end"},
        {"\033[1;5C", "em-next-word"},      {"\033[1;5D", "ed-prev-word"},
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) el_set(el, EL_BIND, keys[i][0], keys[i][1], NULL);
}

static int l_line_editor(lua_State *L)
{
    static const char *const keys[] = {"history", "complete", NULL};
    luaL_checktype(L, 1, LUA_TTABLE);
    for (lua_pushnil(L); lua_next(L, 1) != 0; lua_pop(L, 1)) {
        const char *key = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "";
        if (strcmp(key, keys[0]) != 0 && strcmp(key, keys[1]) != 0) luaL_error(L, "line_editor knows history and complete, got '%s'", key);
    }
    const char *file = weft_field_string_or(L, 1, "history", NULL);
    editor *e = lua_newuserdata(L, sizeof *e);
    *e = (editor){.complete = LUA_NOREF};
    luaL_getmetatable(L, EDITOR);
    lua_setmetatable(L, -2);
    if (!isatty(0) || !isatty(1)) return weft_push_failure(L, weft_fail(WEFT_INVALID, "standard input and output are not a terminal"));
    lua_getfield(L, 1, "complete");
    if (lua_isfunction(L, -1)) e->complete = luaL_ref(L, LUA_REGISTRYINDEX);
    else lua_pop(L, 1);
    e->el = el_init("weft", stdin, stdout, stderr);
    e->history = history_init();
    e->history_file = file != NULL ? strdup(file) : NULL;
    if (e->el == NULL || e->history == NULL) {
        free_editor(e);
        return weft_push_failure(L, weft_fail(WEFT_MEMORY, "the line editor did not start"));
    }
    HistEvent event;
    history(e->history, &event, H_SETSIZE, HISTORY_LINES);
    history(e->history, &event, H_SETUNIQUE, 1);
    if (e->history_file != NULL) history(e->history, &event, H_LOAD, e->history_file); /* the first time there is none */
    bind_keys(e);
    return 1;
}

void weft_open_line_editor(lua_State *L)
{
    static const luaL_Reg methods[] = {{"read", l_read}, {"add", l_add}, {"close", l_close}, {NULL, NULL}};
    luaL_newmetatable(L, EDITOR);
    lua_newtable(L);
    luaL_setfuncs(L, methods, 0);
    lua_pushvalue(L, -1);
    lua_setfield(L, -3, "__methods");
    lua_setfield(L, -2, "__index");
    lua_pushcfunction(L, l_close);
    lua_setfield(L, -2, "__gc");
    lua_pushliteral(L, EDITOR);
    lua_setfield(L, -2, "__metatable");
    lua_pop(L, 1);
    lua_pushcfunction(L, l_line_editor);
    lua_setfield(L, -2, "line_editor");
}
#else
void weft_open_line_editor(lua_State *L)
{
    (void)L;
}
#endif
