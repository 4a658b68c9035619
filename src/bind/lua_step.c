/* bind/lua_step.c - weft.step: what one step computes, as rank 0 decides it.
 *
 *   step = core.step()                    an empty step whose memory is used again by each build
 *   step:build{ ... } -> step             see below
 *   step:follow(previous, grown) -> whether   the record behind `previous`, whose requests drew one token each: one token
 *                                         more for each, what its row draws. grown[row] is the list of a request's blocks,
 *                                         from 1, where it has got more (or nil). false: previous is no such record
 *   step:publish()                        rank 0: to all other ranks
 *   core.step_receive([step]) -> step     other ranks: the next step, into `step` or a new one
 *   step:record() -> string   step:decode(string) -> step     the flat record itself
 * build takes requests one by one
 *   { block_tokens=, requests={ { ids={..} or number, start=0, blocks={..}, sample=false,
 *                                 logits="none"|"last"|"all", temperature=0, seed=0 }, .. } }
 * or flat lists
 *   { ids=, query_start_loc=, seq_lens= [, positions=] [, block_table={{..},..}, block_tokens=]
 *     [, logits_indices=, temperature= (number or list), seed= (number or list)] }
 * and with both: kind="forward"|"stop"|"command", payload=string, bucket=, pad_to=, gather_logits=,
 * want_hidden=, graph= (one token and one row of logits for each request). sample=true is logits="last". A block may be false where a request has given it back.
 * An id below zero, -1 - r, is what row r of the step before drew (sampler:follow, session.lua).
 * Fields: kind, follows (whether there is such an id), num_tokens, num_requests, num_logits, max_context_len, block_tokens, bucket,
 * gather_logits, want_hidden, payload, seeds (a list), rows (logits_indices where the rank computes),
 * graph_key (a text, or nil when no graph may run it); step:upload() copies the arrays to the rank's GPU; tensors over the record: ids, positions,
 * query_start_loc, seq_lens, block_table, logits_indices, sample_positions, temperature. */
#include <stdio.h>
#include <string.h>

#include "bind/box.h"
#include "bind/core.h"
#include "bind/plan_args.h"
#include "bind/step_args.h"

/* 2^53: seeds cross as doubles. */
#define MAX_SEED 9007199254740992

weft_step *weft_check_step(lua_State *L, int index)
{
    weft_step *step = (weft_step *)weft_box_check(L, index, WEFT_STEP);
    if (weft_step_ready(step) != WEFT_OK) luaL_argerror(L, index, weft_error_message());
    return step;
}

static int new_step(lua_State *L)
{
    weft_rank *rank = weft_lua_rank(L);
    weft_object **slot = weft_box_new(L, WEFT_STEP);
    weft_step *step = NULL;
    weft_raise_if(L, weft_step_create(&step, rank->memory));
    *slot = &step->object;
    return 1;
}

/* ---- lists ---- */

/* The list t[name] onto the stack; 0 (and nil) when it is not there. */
static int list_field(lua_State *L, int index, const char *name)
{
    lua_getfield(L, index, name);
    if (lua_isnil(L, -1)) return 0;
    if (!lua_istable(L, -1)) luaL_error(L, "%s must be a list, got %s", name, luaL_typename(L, -1));
    return 1;
}

static int64_t list_length(lua_State *L, int index, const char *name)
{
    int64_t length = list_field(L, index, name) ? (int64_t)lua_objlen(L, -1) : 0;
    lua_pop(L, 1);
    return length;
}

/* The integers of the list on top, which has `wanted` of them, into out. Pops it. */
static void take_ints(lua_State *L, const char *name, int32_t *out, int64_t wanted)
{
    if ((int64_t)lua_objlen(L, -1) != wanted)
        luaL_error(L, "%s has %d numbers, wanted %d", name, (int)lua_objlen(L, -1), (int)wanted);
    for (int64_t i = 0; i < wanted; i++) {
        lua_rawgeti(L, -1, (int)(i + 1));
        out[i] = weft_check_int(L, -1, name);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

/* The blocks of the list on top into a row of the table; false, given back, becomes block 0, which
 * no window reaches any more. Pops it. */
static void take_blocks(lua_State *L, int32_t *row)
{
    int count = (int)lua_objlen(L, -1);
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, -1, i + 1);
        row[i] = lua_isboolean(L, -1) && !lua_toboolean(L, -1) ? 0 : weft_check_int(L, -1, "a block");
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

/* ---- requests one by one ---- */

typedef struct {
    int64_t tokens, blocks, logits;
    int32_t start;
    float temperature;
    uint64_t seed;
} request;

static int64_t logits_rows(lua_State *L, int64_t tokens)
{
    const char *which = weft_field_string_or(L, -1, "logits", weft_field_bool_or(L, -1, "sample", 0) ? "last" : "none");
    if (strcmp(which, "none") == 0) return 0;
    if (strcmp(which, "last") == 0) return 1;
    if (strcmp(which, "all") != 0) luaL_error(L, "logits must be 'none', 'last' or 'all', got '%s'", which);
    return tokens;
}

/* requests[r + 1] onto the stack, with its sizes. */
static request push_request(lua_State *L, int requests, int64_t r)
{
    static const char *const names[] = {"ids", "start", "blocks", "sample", "logits", "temperature", "seed", NULL};
    request q;
    lua_rawgeti(L, requests, (int)(r + 1));
    if (!lua_istable(L, -1)) luaL_error(L, "request %d is not a table", (int)r);
    int self = lua_gettop(L);
    lua_getfield(L, self, "ids");
    if (lua_istable(L, -1)) q.tokens = (int64_t)lua_objlen(L, -1);
    else if (lua_isnumber(L, -1)) q.tokens = 1;
    else luaL_error(L, "request %d: ids must be a list or a number, got %s", (int)r, luaL_typename(L, -1));
    lua_pop(L, 1);
    weft_check_keys(L, self, "a request", names);
    if (q.tokens == 0) luaL_error(L, "request %d has no tokens", (int)r);
    q.blocks = list_length(L, self, "blocks");
    q.start = (int32_t)weft_field_int_or(L, self, "start", 0, INT32_MAX / 2, 0);
    if (q.tokens > INT32_MAX / 2) luaL_error(L, "request %d has too many tokens", (int)r);
    q.logits = logits_rows(L, q.tokens);
    q.temperature = (float)weft_field_number_or(L, self, "temperature", 0);
    q.seed = (uint64_t)weft_field_int_or(L, self, "seed", 0, MAX_SEED, 0);
    return q;
}

static void measure_requests(lua_State *L, int requests, weft_step_shape *shape)
{
    shape->num_requests = (int64_t)lua_objlen(L, requests);
    for (int64_t r = 0; r < shape->num_requests; r++) {
        request q = push_request(L, requests, r);
        shape->num_tokens += q.tokens;
        shape->num_logits += q.logits;
        if (q.blocks > shape->block_table_stride) shape->block_table_stride = q.blocks;
        lua_pop(L, 1);
    }
}

static void fill_requests(lua_State *L, int requests, weft_step *step)
{
    int32_t token = 0, row = 0;
    for (int32_t r = 0; r < step->header->num_requests; r++) {
        request q = push_request(L, requests, r);
        lua_getfield(L, -1, "ids");
        if (lua_istable(L, -1)) {
            take_ints(L, "ids", step->ids + token, q.tokens);
        } else {
            step->ids[token] = weft_check_int(L, -1, "ids");
            lua_pop(L, 1);
        }
        for (int32_t i = 0; i < (int32_t)q.tokens; i++) step->positions[token + i] = q.start + i;
        for (int32_t i = (int32_t)(q.tokens - q.logits); i < (int32_t)q.tokens; i++, row++) {
            step->logits_indices[row] = token + i;
            step->sample_positions[row] = q.start + i + 1;
            step->temperature[row] = q.temperature;
            step->seeds[row] = q.seed;
        }
        if (q.blocks > 0) {
            lua_getfield(L, -1, "blocks");
            take_blocks(L, step->block_table + (size_t)r * (size_t)step->header->block_table_stride);
        }
        token += (int32_t)q.tokens;
        step->query_start_loc[r + 1] = token;
        step->seq_lens[r] = q.start + (int32_t)q.tokens;
        lua_pop(L, 1);
    }
}

/* ---- flat lists ---- */

static void measure_lists(lua_State *L, weft_step_shape *shape)
{
    shape->num_tokens = list_length(L, 2, "ids");
    shape->num_requests = list_length(L, 2, "seq_lens");
    shape->num_logits = list_length(L, 2, "logits_indices");
    if (list_field(L, 2, "block_table")) {
        if ((int64_t)lua_objlen(L, -1) != shape->num_requests)
            luaL_error(L, "block_table has %d rows, wanted %d", (int)lua_objlen(L, -1), (int)shape->num_requests);
        for (int64_t r = 0; r < shape->num_requests; r++) {
            lua_rawgeti(L, -1, (int)(r + 1));
            if (!lua_istable(L, -1)) luaL_error(L, "row %d of block_table is not a list", (int)r);
            if ((int64_t)lua_objlen(L, -1) > shape->block_table_stride) shape->block_table_stride = (int64_t)lua_objlen(L, -1);
            lua_pop(L, 1);
        }
    }
    lua_pop(L, 1);
}

/* A number for all rows, or a list with one for each: the value of row i. */
static double row_value(lua_State *L, const char *name, int64_t i, double fallback)
{
    lua_getfield(L, 2, name);
    if (lua_istable(L, -1)) {
        lua_rawgeti(L, -1, (int)(i + 1));
        lua_replace(L, -2);
    } else if (lua_isnil(L, -1)) {
        lua_pop(L, 1);
        return fallback;
    }
    if (lua_type(L, -1) != LUA_TNUMBER) luaL_error(L, "%s of row %d is not a number", name, (int)i);
    double value = lua_tonumber(L, -1);
    lua_pop(L, 1);
    return value;
}

/* Each token's place in its request, when no positions were given. */
static void derive_positions(weft_step *step)
{
    const weft_step_header *h = step->header;
    for (int32_t r = 0; r < h->num_requests; r++) {
        int32_t end = step->query_start_loc[r + 1];
        for (int32_t t = step->query_start_loc[r]; t >= 0 && t < end && t < h->num_tokens; t++)
            step->positions[t] = (int32_t)((int64_t)step->seq_lens[r] - end + t);
    }
}

static void fill_lists(lua_State *L, weft_step *step, int64_t tokens)
{
    const weft_step_header *h = step->header;
    if (list_field(L, 2, "ids")) take_ints(L, "ids", step->ids, tokens);
    else lua_pop(L, 1);
    if (list_field(L, 2, "query_start_loc")) take_ints(L, "query_start_loc", step->query_start_loc, h->num_requests + 1);
    else lua_pop(L, 1);
    if (list_field(L, 2, "seq_lens")) take_ints(L, "seq_lens", step->seq_lens, h->num_requests);
    else lua_pop(L, 1);
    derive_positions(step);
    if (list_field(L, 2, "positions")) take_ints(L, "positions", step->positions, tokens);
    else lua_pop(L, 1);
    if (list_field(L, 2, "block_table")) {
        for (int32_t r = 0; r < h->num_requests; r++) {
            lua_rawgeti(L, -1, r + 1);
            take_blocks(L, step->block_table + (size_t)r * (size_t)h->block_table_stride);
        }
    }
    lua_pop(L, 1);
    if (list_field(L, 2, "logits_indices")) take_ints(L, "logits_indices", step->logits_indices, h->num_logits);
    else lua_pop(L, 1);
    for (int32_t i = 0; i < h->num_logits; i++) {
        int32_t row = step->logits_indices[i];
        double seed = row_value(L, "seed", i, 0);
        if (!(seed >= 0 && seed <= MAX_SEED)) luaL_error(L, "seed of row %d must be from 0 to 2^53", (int)i);
        step->seeds[i] = (uint64_t)seed;
        step->temperature[i] = (float)row_value(L, "temperature", i, 0);
        step->sample_positions[i] = row >= 0 && row < h->num_tokens ? step->positions[row] + 1 : 0;
    }
}

/* ---- methods ---- */

static const char *const build_names[] = {
    "requests",      "kind",           "payload", "bucket",          "pad_to",        "gather_logits", "want_hidden",
    "block_tokens",  "ids",            "positions", "query_start_loc", "seq_lens",    "block_table",   "logits_indices",
    "temperature",   "seed",           "graph",   NULL};

static int l_build(lua_State *L)
{
    weft_step *step = (weft_step *)weft_box_check(L, 1, WEFT_STEP);
    weft_check_keys(L, 2, "step:build", build_names);
    lua_settop(L, 2);
    weft_step_shape shape = {.block_tokens = weft_field_int_or(L, 2, "block_tokens", 0, INT32_MAX, 0),
                             .bucket = weft_field_int_or(L, 2, "bucket", 1, INT32_MAX, 0)};
    const char *kind = weft_field_string_or(L, 2, "kind", "forward"), *payload = weft_field_string_or(L, 2, "payload", "");
    if (!weft_step_kind_from_name(kind, &shape.kind)) luaL_error(L, "unknown kind of step '%s' (known: forward, stop, command)", kind);
    if (weft_field_bool_or(L, 2, "gather_logits", 0)) shape.flags |= WEFT_STEP_GATHER_LOGITS;
    if (weft_field_bool_or(L, 2, "want_hidden", 0)) shape.flags |= WEFT_STEP_WANT_HIDDEN;
    if (weft_field_bool_or(L, 2, "graph", 0)) shape.flags |= WEFT_STEP_GRAPH;
    lua_getfield(L, 2, "payload");
    shape.payload_bytes = (int64_t)lua_objlen(L, -1);
    lua_settop(L, 2);
    int one_by_one = list_field(L, 2, "requests"); /* step options requests */
    if (one_by_one) measure_requests(L, 3, &shape);
    else measure_lists(L, &shape);
    int64_t tokens = shape.num_tokens;
    shape.num_tokens = weft_field_int_or(L, 2, "pad_to", tokens, INT32_MAX, tokens);
    weft_raise_if(L, weft_step_begin(step, &shape));
    if (one_by_one) fill_requests(L, 3, step);
    else fill_lists(L, step, tokens);
    memcpy(step->payload, payload, (size_t)shape.payload_bytes);
    weft_raise_if(L, weft_step_finish(step));
    lua_settop(L, 1);
    return 1;
}

/* The new blocks of one row; value on top: the list of all. Memory of the state, of the garbage collector's. */
static weft_step_growth take_growth(lua_State *L, const weft_step *previous, int32_t row)
{
    if (!lua_istable(L, -1)) luaL_error(L, "the blocks of row %d must be a list, got %s", (int)row + 1, luaL_typename(L, -1));
    int first = (int)weft_step_filled_blocks(previous, row), count = (int)lua_objlen(L, -1) - first;
    weft_step_growth growth = {.row = row, .count = count > 0 ? count : 0};
    int32_t *blocks = lua_newuserdata(L, ((size_t)growth.count + 1) * sizeof *blocks);
    for (int i = 0; i < (int)growth.count; i++) {
        lua_rawgeti(L, -2, first + i + 1);
        blocks[i] = weft_check_int(L, -1, "a block");
        lua_pop(L, 1);
    }
    growth.blocks = blocks;
    return growth;
}

static int l_follow(lua_State *L)
{
    weft_step *step = (weft_step *)weft_box_check(L, 1, WEFT_STEP);
    const weft_step *previous = (const weft_step *)weft_box_check(L, 2, WEFT_STEP);
    lua_settop(L, 3);
    luaL_argcheck(L, step != previous, 2, "expected another step");
    weft_step_growth *grown = NULL;
    int64_t count = 0;
    if (!lua_isnil(L, 3) && weft_step_ready(previous) == WEFT_OK) {
        luaL_checktype(L, 3, LUA_TTABLE);
        int32_t requests = previous->header->num_requests;
        grown = lua_newuserdata(L, ((size_t)requests + 1) * sizeof *grown);
        lua_newtable(L); /* keeps the new blocks for as long as this runs */
        for (int32_t r = 0; r < requests; r++) {
            lua_rawgeti(L, 3, r + 1);
            if (!lua_isnil(L, -1)) {
                grown[count++] = take_growth(L, previous, r);
                lua_rawseti(L, -3, (int)count);
            }
            lua_settop(L, 5);
        }
    }
    int built = 0;
    weft_raise_if(L, weft_step_follow(step, previous, grown, count, &built));
    lua_pushboolean(L, built);
    return 1;
}

static int l_publish(lua_State *L)
{
    weft_raise_if(L, weft_step_publish(weft_check_step(L, 1), weft_lua_rank(L)));
    return 0;
}

static int l_receive(lua_State *L)
{
    lua_settop(L, 1);
    if (lua_isnil(L, 1)) {
        new_step(L);
        lua_replace(L, 1);
    }
    weft_step *step = (weft_step *)weft_box_check(L, 1, WEFT_STEP);
    weft_raise_if(L, weft_step_receive(step, weft_lua_rank(L)));
    return 1;
}

static int l_record(lua_State *L)
{
    weft_step *step = weft_check_step(L, 1);
    lua_pushlstring(L, (const char *)step->header, step->bytes);
    return 1;
}

static int l_decode(lua_State *L)
{
    weft_step *step = (weft_step *)weft_box_check(L, 1, WEFT_STEP);
    size_t bytes;
    const char *record = luaL_checklstring(L, 2, &bytes);
    weft_raise_if(L, weft_step_decode(step, record, bytes));
    lua_settop(L, 1);
    return 1;
}

/* ---- fields ---- */

/* device: the same array on the rank's GPU, or `data`. */
static void push_view(lua_State *L, weft_step *step, void *data, const void *device, weft_dtype dtype, int ndim, int64_t rows, int64_t cols)
{
    weft_tensor *view = NULL;
    weft_raise_if(L, weft_tensor_wrap(&view, &step->buffer->storage->object, data, dtype, ndim, (int64_t[]){rows, cols}));
    if (device != data) view->device_data = (void *)device;
    weft_push_tensor(L, view);
}

static int push_array(lua_State *L, weft_step *step, const char *name)
{
    const weft_step_header *h = step->header;
    const weft_step_arrays a = weft_step_arrays_of(step);
    const struct {
        const char *name;
        void *data;
        const void *device;
        int64_t count;
        weft_dtype dtype;
    } arrays[] = {
        {"ids", step->ids, a.ids, h->num_tokens, WEFT_I32},
        {"positions", step->positions, a.positions, h->num_tokens, WEFT_I32},
        {"query_start_loc", step->query_start_loc, a.query_start_loc, (int64_t)h->num_requests + 1, WEFT_I32},
        {"seq_lens", step->seq_lens, a.seq_lens, h->num_requests, WEFT_I32},
        {"logits_indices", step->logits_indices, a.logits_indices, h->num_logits, WEFT_I32},
        {"sample_positions", step->sample_positions, a.sample_positions, h->num_logits, WEFT_I32},
        {"temperature", step->temperature, a.temperature, h->num_logits, WEFT_F32},
    };
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        if (strcmp(name, arrays[i].name) != 0) continue;
        push_view(L, step, arrays[i].data, arrays[i].device, arrays[i].dtype, 1, arrays[i].count, 0);
        return 1;
    }
    if (strcmp(name, "block_table") != 0) return 0;
    push_view(L, step, step->block_table, step->block_table, WEFT_I32, 2, h->num_requests, h->block_table_stride);
    return 1;
}

/* The rows that get logits, where the rank computes and with the padding of its graphs. */
static void push_rows(lua_State *L, weft_step *step)
{
    const weft_step_arrays a = weft_step_arrays_of(step);
    weft_storage *storage = step->uploaded ? weft_lua_rank(L)->step_buffer->storage : step->buffer->storage;
    weft_tensor *view = NULL;
    weft_raise_if(L, weft_tensor_wrap(&view, &storage->object, (void *)a.logits_indices, WEFT_I32, 1, &a.logits));
    view->storage->cuda = storage->cuda;
    weft_push_tensor(L, view);
}

/* Steps of one key may run as one captured graph; nil: this one may not. */
static void push_graph_key(lua_State *L, const weft_step *step)
{
    const weft_step_header *h = step->header;
    if (!step->uploaded || !(h->flags & WEFT_STEP_GRAPH) || h->max_context_len == 0) lua_pushnil(L);
    else lua_pushfstring(L, "%d rows, %d blocks", h->num_tokens, (int)step->device.block_table_stride);
}

static int l_upload(lua_State *L)
{
    weft_raise_if(L, weft_step_upload(weft_check_step(L, 1), weft_lua_rank(L)));
    lua_settop(L, 1);
    return 1;
}

static void push_seeds(lua_State *L, const weft_step *step)
{
    lua_createtable(L, step->header->num_logits, 0);
    for (int i = 0; i < step->header->num_logits; i++) {
        lua_pushnumber(L, (lua_Number)step->seeds[i]);
        lua_rawseti(L, -2, i + 1);
    }
}

/* Whether an id names a row of the step before. */
static int follows(const weft_step *step)
{
    for (int32_t t = 0; t < step->header->num_tokens; t++)
        if (step->ids[t] < 0) return 1;
    return 0;
}

static int fields(lua_State *L)
{
    const char *name = luaL_checkstring(L, 2);
    weft_step *step = weft_check_step(L, 1);
    const weft_step_header *h = step->header;
    if (push_array(L, step, name)) return 1;
    if (strcmp(name, "kind") == 0) lua_pushstring(L, weft_step_kind_name(h->kind));
    else if (strcmp(name, "num_tokens") == 0) lua_pushinteger(L, h->num_tokens);
    else if (strcmp(name, "num_requests") == 0) lua_pushinteger(L, h->num_requests);
    else if (strcmp(name, "num_logits") == 0) lua_pushinteger(L, h->num_logits);
    else if (strcmp(name, "max_context_len") == 0) lua_pushinteger(L, h->max_context_len);
    else if (strcmp(name, "block_tokens") == 0) lua_pushinteger(L, h->block_tokens);
    else if (strcmp(name, "bucket") == 0) lua_pushinteger(L, h->bucket);
    else if (strcmp(name, "follows") == 0) lua_pushboolean(L, follows(step));
    else if (strcmp(name, "gather_logits") == 0) lua_pushboolean(L, h->flags & WEFT_STEP_GATHER_LOGITS);
    else if (strcmp(name, "want_hidden") == 0) lua_pushboolean(L, h->flags & WEFT_STEP_WANT_HIDDEN);
    else if (strcmp(name, "payload") == 0) lua_pushlstring(L, step->payload, (size_t)h->payload_bytes);
    else if (strcmp(name, "seeds") == 0) push_seeds(L, step);
    else if (strcmp(name, "rows") == 0) push_rows(L, step);
    else if (strcmp(name, "graph_key") == 0) push_graph_key(L, step);
    else lua_pushnil(L);
    return 1;
}

static int to_string(lua_State *L)
{
    weft_step *step = (weft_step *)weft_box_test(L, 1, WEFT_STEP);
    char text[128];
    if (step == NULL) snprintf(text, sizeof text, "weft.step (closed)");
    else if (weft_step_ready(step) != WEFT_OK) snprintf(text, sizeof text, "weft.step (not built)");
    else
        snprintf(text, sizeof text, "weft.step %s, %d tokens of %d requests, %d logits rows", weft_step_kind_name(step->header->kind),
                 step->header->num_tokens, step->header->num_requests, step->header->num_logits);
    lua_pushstring(L, text);
    return 1;
}

void weft_open_step(lua_State *L)
{
    static const luaL_Reg methods[] = {
        {"build", l_build}, {"follow", l_follow}, {"publish", l_publish}, {"record", l_record}, {"decode", l_decode}, {"upload", l_upload}, {NULL, NULL},
    };
    weft_box_class(L, WEFT_STEP, methods, fields, to_string);
    lua_pushcfunction(L, new_step);
    lua_setfield(L, -2, "step");
    lua_pushcfunction(L, l_receive);
    lua_setfield(L, -2, "step_receive");
}
