/* bind/lua_sampler.c - core.sampler and weft.sampler: the next tokens.
 *
 *   core.sampler.new(lm_head | {vocab_size=, axis= | parallel_plan=}) -> weft.sampler
 *     :forward(logits, {temperature={..}, seed={..}, position={..}}) -> {id, ...}; logits is this rank's shard
 *     :forward_step(logits, step) -> {id, ...}; parameters from the step record
 *     :launch(logits, step)     first half of forward_step, on a GPU
 *     :take(step) -> {id, ...}  second half: waits for the ids
 *     :decide()                 instead, the ids stay on the GPUs; a later step may name them
 *     :follow(step)             the record of an uploaded step arrives; its ids below zero, -1 - r, become what row r of
 *                               the last choice was
 *     :told(rows) -> {id, ...}  waits for the oldest choice that was not asked for, of two at most
 *   core.sampler.draw(row, {temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1, history={ids}, seed=, position=}) -> id
 *   core.sampler.logprobs(row, n [, id]) -> {{id=, logprob=}, ...} best first [, log-probability of id] */
#include <string.h>

#include "bind/box.h"
#include "bind/core.h"
#include "bind/layer_args.h"
#include "bind/step_args.h"
#include "layers/lm_head.h"
#include "layers/sampler.h"

#define SAMPLER "weft.sampler"

static int l_new(lua_State *L)
{
    static const char *const keys[] = {"vocab_size", "axis", "parallel_plan", "disable_tp", NULL};
    weft_axis axis;
    int64_t vocab_size;
    if (lua_istable(L, 1)) {
        weft_check_keys(L, 1, "sampler", keys);
        vocab_size = weft_field_int(L, 1, "vocab_size", 1, 1 << 30);
        axis = weft_check_layer_axis(L, 1, 0);
    } else {
        const weft_lm_head *head = (const weft_lm_head *)weft_box_check(L, 1, "weft.lm_head");
        axis = head->axis;
        vocab_size = head->vocab_size;
    }
    weft_object **slot = weft_box_new(L, SAMPLER);
    weft_sampler *sampler = NULL;
    weft_raise_if(L, weft_sampler_create(&sampler, weft_lua_rank(L), axis, vocab_size));
    *slot = &sampler->object;
    return 1;
}

/* table[name], which must hold `rows` numbers; left on the stack. */
static void check_list(lua_State *L, const char *name, int64_t rows)
{
    lua_getfield(L, 3, name);
    if (!lua_istable(L, -1) || (int64_t)lua_objlen(L, -1) != rows)
        luaL_error(L, "%s must be a table of %d numbers, one for each row of logits", name, (int)rows);
}

static double list_number(lua_State *L, int64_t row, const char *name)
{
    lua_rawgeti(L, -1, (int)row + 1);
    if (!lua_isnumber(L, -1)) luaL_error(L, "%s of row %d is not a number", name, (int)row);
    double value = lua_tonumber(L, -1);
    lua_pop(L, 1);
    return value;
}

/* The rows' parameters in Lua's own memory, so that an error on the way loses nothing. */
typedef struct {
    uint64_t *seed;
    int32_t *position;
    float *temperature;
} row_parameters;

static row_parameters parameters_from_table(lua_State *L, int64_t rows)
{
    row_parameters p;
    p.seed = lua_newuserdata(L, (size_t)rows * (sizeof *p.seed + sizeof *p.position + sizeof *p.temperature) + 8);
    p.position = (int32_t *)(p.seed + rows);
    p.temperature = (float *)(p.position + rows);
    check_list(L, "temperature", rows);
    for (int64_t r = 0; r < rows; r++) {
        double value = list_number(L, r, "temperature");
        if (!(value >= 0 && value <= 1e6)) luaL_error(L, "temperature of row %d must be 0 or more, got %f", (int)r, value);
        p.temperature[r] = (float)value;
    }
    check_list(L, "seed", rows);
    for (int64_t r = 0; r < rows; r++) {
        double value = list_number(L, r, "seed");
        if (!(value >= 0 && value <= 9007199254740992.0)) luaL_error(L, "seed of row %d must be from 0 to 2^53", (int)r);
        p.seed[r] = (uint64_t)value;
    }
    check_list(L, "position", rows);
    for (int64_t r = 0; r < rows; r++) {
        double value = list_number(L, r, "position");
        if (!(value >= 0 && value <= INT32_MAX)) luaL_error(L, "position of row %d must be from 0 to 2^31 - 1", (int)r);
        p.position[r] = (int32_t)value;
    }
    lua_pop(L, 3);
    return p;
}

static int push_ids(lua_State *L, const weft_tensor *ids)
{
    lua_createtable(L, (int)ids->shape[0], 0);
    for (int64_t r = 0; r < ids->shape[0]; r++) {
        lua_pushnumber(L, ((const int32_t *)ids->data)[r]);
        lua_rawseti(L, -2, (int)r + 1);
    }
    return 1;
}

static int l_forward(lua_State *L)
{
    weft_sampler *sampler = (weft_sampler *)weft_box_check(L, 1, SAMPLER);
    weft_tensor *logits = weft_check_tensor(L, 2), *ids = NULL;
    if (logits->ndim != 2) luaL_argerror(L, 2, "expected logits [rows, local vocabulary]");
    luaL_checktype(L, 3, LUA_TTABLE);
    row_parameters p = parameters_from_table(L, logits->shape[0]);
    weft_object **slot = weft_box_new(L, WEFT_TENSOR);
    weft_raise_if(L, weft_sampler_forward(sampler, logits, p.temperature, p.seed, p.position, &ids));
    *slot = &ids->object;
    return push_ids(L, ids);
}

/* sampler:forward_step(logits, step): the rows' parameters are the step record's. */
static int l_forward_step(lua_State *L)
{
    weft_sampler *sampler = (weft_sampler *)weft_box_check(L, 1, SAMPLER);
    const weft_tensor *logits = weft_check_tensor(L, 2);
    weft_step *step = weft_check_step(L, 3);
    if (logits->ndim != 2 || logits->shape[0] != step->header->num_logits)
        luaL_error(L, "expected logits of the step's %d rows", step->header->num_logits);
    weft_tensor *ids = NULL;
    weft_object **slot = weft_box_new(L, WEFT_TENSOR);
    weft_raise_if(L, weft_sampler_forward(sampler, logits, step->temperature, step->seeds, step->sample_positions, &ids));
    *slot = &ids->object;
    return push_ids(L, ids);
}

/* sampler:launch(logits, step) and sampler:take(step): forward_step in two halves, on a GPU. */
static int l_launch(lua_State *L)
{
    weft_sampler *sampler = (weft_sampler *)weft_box_check(L, 1, SAMPLER);
    const weft_tensor *logits = weft_check_tensor(L, 2);
    const weft_step *step = weft_check_step(L, 3);
    weft_step_arrays arrays = weft_step_arrays_of(step);
    if (!step->uploaded) luaL_error(L, "the step was not uploaded");
    if (logits->ndim != 2 || logits->shape[0] != arrays.logits) luaL_error(L, "expected logits of the step's %d rows", (int)arrays.logits);
    weft_raise_if(L, weft_sampler_launch(sampler, logits, arrays.temperature, arrays.seeds, arrays.sample_positions));
    return 0;
}

static int l_take(lua_State *L)
{
    weft_sampler *sampler = (weft_sampler *)weft_box_check(L, 1, SAMPLER);
    const weft_step *step = weft_check_step(L, 2);
    weft_tensor *ids = NULL;
    sampler->drawn_rows = weft_step_arrays_of(step).logits; /* a replayed graph drew as many as its step has */
    weft_object **slot = weft_box_new(L, WEFT_TENSOR);
    weft_raise_if(L, weft_sampler_take(sampler, step->header->num_logits, &ids));
    *slot = &ids->object;
    return push_ids(L, ids);
}

/* sampler:decide(): behind launch, the choice stays on the GPUs. */
static int l_decide(lua_State *L)
{
    weft_raise_if(L, weft_sampler_decide((weft_sampler *)weft_box_check(L, 1, SAMPLER)));
    return 0;
}

/* sampler:follow(step): the record of an uploaded step arrives, and its ids below zero, -1 - r, become what row r of
 * the last choice was. */
static int l_follow(lua_State *L)
{
    weft_sampler *sampler = (weft_sampler *)weft_box_check(L, 1, SAMPLER);
    weft_step *step = weft_check_step(L, 2);
    if (!step->uploaded) luaL_error(L, "the step was not uploaded");
    weft_raise_if(L, weft_sampler_follow(sampler, step));
    return 0;
}

/* sampler:told(rows): waits for the oldest choice that was not asked for, of two at most, and gives its ids. */
static int l_told(lua_State *L)
{
    weft_sampler *sampler = (weft_sampler *)weft_box_check(L, 1, SAMPLER);
    int64_t rows = (int64_t)luaL_checkinteger(L, 2);
    luaL_argcheck(L, rows >= 0 && rows <= INT32_MAX, 2, "expected a number of rows");
    const int32_t *ids = NULL;
    weft_raise_if(L, weft_sampler_told(sampler, rows, &ids));
    lua_createtable(L, (int)rows, 0);
    for (int r = 0; r < (int)rows; r++) {
        lua_pushnumber(L, ids[r]);
        lua_rawseti(L, -2, r + 1);
    }
    return 1;
}

/* A whole row of logits: float32 [vocab] or [1, vocab]. */
static const float *check_row(lua_State *L, int index, int64_t *vocab)
{
    const weft_tensor *row = weft_check_tensor(L, index);
    int last = row->ndim - 1;
    if (row->dtype != WEFT_F32 || row->ndim < 1 || row->ndim > 2 || (row->ndim == 2 && row->shape[0] != 1) ||
        (row->stride[last] != 1 && row->shape[last] > 1))
        luaL_argerror(L, index, "expected one dense row of float32 logits");
    if (row->storage->cuda != NULL) luaL_argerror(L, index, "the row is on a GPU: give core.to_host(row)");
    *vocab = row->shape[last];
    return row->data;
}

/* history: a table of ids, into Lua's own memory. */
static void check_history(lua_State *L, weft_draw_options *options)
{
    lua_getfield(L, 2, "history");
    if (lua_isnil(L, -1)) return;
    if (!lua_istable(L, -1)) luaL_error(L, "history must be a table of token ids, got %s", luaL_typename(L, -1));
    size_t length = lua_objlen(L, -1);
    int32_t *history = lua_newuserdata(L, length * sizeof *history + sizeof *history);
    for (size_t i = 0; i < length; i++) {
        lua_rawgeti(L, -2, (int)i + 1);
        history[i] = (int32_t)lua_tointeger(L, -1);
        lua_pop(L, 1);
    }
    options->history = history;
    options->history_length = (int64_t)length;
}

static int l_draw(lua_State *L)
{
    static const char *const keys[] = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "history", "seed",
                                       "position", NULL};
    int64_t vocab;
    const float *row = check_row(L, 1, &vocab);
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_settop(L, 2);
    weft_check_keys(L, 2, "sampler.draw", keys);
    weft_draw_options options = {
        .temperature = weft_field_number_or(L, 2, "temperature", 0),
        .top_k = weft_field_int_or(L, 2, "top_k", 0, 1 << 30, 0),
        .top_p = weft_field_number_or(L, 2, "top_p", 1),
        .min_p = weft_field_number_or(L, 2, "min_p", 0),
        .repetition_penalty = weft_field_number_or(L, 2, "repetition_penalty", 1),
        .seed = (uint64_t)weft_field_int_or(L, 2, "seed", 0, (int64_t)1 << 53, 0),
        .position = (int32_t)weft_field_int_or(L, 2, "position", 0, INT32_MAX, 0),
    };
    check_history(L, &options);
    int32_t id = 0;
    weft_raise_if(L, weft_sampler_draw(weft_lua_rank(L), row, vocab, &options, &id));
    lua_pushnumber(L, id);
    return 1;
}

static int l_logprobs(lua_State *L)
{
    int64_t vocab;
    const float *row = check_row(L, 1, &vocab);
    lua_Number n = luaL_checknumber(L, 2);
    luaL_argcheck(L, n >= 0 && n == (lua_Number)(int64_t)n, 2, "expected a number of ids");
    if (n > (lua_Number)vocab) n = (lua_Number)vocab;
    lua_Number asked = luaL_optnumber(L, 3, -1);
    luaL_argcheck(L, lua_isnoneornil(L, 3) || (asked >= 0 && asked < (lua_Number)vocab), 3, "expected an id of the row");
    int32_t *ids = lua_newuserdata(L, ((size_t)n + 1) * (sizeof(int32_t) + sizeof(float)));
    float *logprobs = (float *)(ids + (size_t)n + 1);
    double log_sum = 0;
    weft_raise_if(L, weft_sampler_top_logprobs(weft_lua_rank(L), row, vocab, (int64_t)n, ids, logprobs, &log_sum));
    lua_createtable(L, (int)n, 0);
    for (int i = 0; i < (int)n; i++) {
        lua_createtable(L, 0, 2);
        lua_pushnumber(L, ids[i]);
        lua_setfield(L, -2, "id");
        lua_pushnumber(L, logprobs[i]);
        lua_setfield(L, -2, "logprob");
        lua_rawseti(L, -2, i + 1);
    }
    if (asked < 0) return 1;
    lua_pushnumber(L, row[(int64_t)asked] - log_sum);
    return 2;
}

void weft_open_sampler(lua_State *L)
{
    static const luaL_Reg methods[] = {{"forward", l_forward}, {"forward_step", l_forward_step}, {"launch", l_launch}, {"take", l_take},
                                       {"decide", l_decide},   {"follow", l_follow},             {"told", l_told},     {NULL, NULL}};
    static const luaL_Reg functions[] = {{"new", l_new}, {"draw", l_draw}, {"logprobs", l_logprobs}, {NULL, NULL}};
    weft_box_class(L, SAMPLER, methods, NULL, NULL);
    lua_newtable(L);
    luaL_setfuncs(L, functions, 0);
    lua_setfield(L, -2, "sampler");
}
