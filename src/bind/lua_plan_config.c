/* bind/lua_plan_config.c - weft.parallel_config and weft.rank_grid.
 *
 *   core.parallel_config{tensor_parallel_size=, ...}    the fields of plan/parallel_config.h, dcp_comm_backend a string
 *       the same fields, .attention_tp_size .world_size, :validate_model{...}; tostring shows every size
 *   core.rank_grid(config or its table [, external_data_parallel_size])
 *       :rows(kind) -> {{...}, ...}  :place(kind, rank) -> row, index  :check()  .world_size */
#include <string.h>

#include "bind/box.h"
#include "bind/plan_args.h"

#define WEFT_PARALLEL_CONFIG "weft.parallel_config"
#define WEFT_RANK_GRID "weft.rank_grid"

/* ---- parallel_config ---- */

#define FIELD(name) {#name, offsetof(weft_parallel_config, name)}
static const struct {
    const char *name;
    size_t offset;
} size_fields[] = {
    FIELD(tensor_parallel_size),        FIELD(tensor_parallel_size_attention), FIELD(decode_context_parallel_size),
    FIELD(prefill_context_parallel_size), FIELD(pipeline_parallel_size),       FIELD(data_parallel_size),
    FIELD(expert_parallel_size),        FIELD(tensor_parallel_size_mlp),       FIELD(cp_kv_cache_interleave_size),
    FIELD(block_size),
};
#undef FIELD
enum { SIZE_FIELDS = sizeof size_fields / sizeof *size_fields };

static int *size_field(weft_parallel_config *config, int i)
{
    return (int *)((char *)config + size_fields[i].offset);
}

/* A size is given or nil; 0 stands for "not given" in C only, and for decode context where 0 means: follow. */
static weft_parallel_config check_sizes(lua_State *L, int index)
{
    static const char *const names[] = {"tensor_parallel_size", "tensor_parallel_size_attention", "decode_context_parallel_size",
                                        "prefill_context_parallel_size", "pipeline_parallel_size", "data_parallel_size",
                                        "expert_parallel_size", "tensor_parallel_size_mlp", "cp_kv_cache_interleave_size",
                                        "block_size", "dcp_comm_backend", NULL};
    weft_check_keys(L, index, "parallel_config", names);
    weft_parallel_config given = weft_parallel_config_default();
    for (int i = 0; i < SIZE_FIELDS; i++) {
        const char *name = size_fields[i].name;
        lua_getfield(L, index, name);
        if (!lua_isnil(L, -1)) {
            int value = weft_check_int(L, -1, name);
            if (value != 0 || strcmp(name, "decode_context_parallel_size") != 0)
                weft_raise_if(L, weft_rule_positive(name, value));
            *size_field(&given, i) = value;
        }
        lua_pop(L, 1);
    }
    const char *backend = weft_field_string_or(L, index, "dcp_comm_backend", "ag_rs");
    given.exchange_a2a = strcmp(backend, "a2a") == 0;
    if (!given.exchange_a2a && strcmp(backend, "ag_rs") != 0)
        luaL_error(L, "dcp_comm_backend must be 'ag_rs' or 'a2a', got '%s'", backend);
    weft_parallel_config config = given;
    weft_raise_if(L, weft_parallel_config_make(&config, &given));
    return config;
}

static int l_parallel_config(lua_State *L)
{
    lua_settop(L, 1);
    weft_parallel_config config = check_sizes(L, 1);
    *(weft_parallel_config *)lua_newuserdata(L, sizeof config) = config;
    luaL_setmetatable(L, WEFT_PARALLEL_CONFIG);
    return 1;
}

static weft_parallel_config *check_config(lua_State *L, int index)
{
    return luaL_checkudata(L, index, WEFT_PARALLEL_CONFIG);
}

weft_model_numbers weft_check_model_numbers(lua_State *L, int index)
{
    static const char *const names[] = {"architecture", "num_attention_heads", "num_key_value_heads", "intermediate_size",
                                        "moe_intermediate_size", "vocab_size", "num_experts", "num_hidden_layers",
                                        "supported_layer_types", NULL};
    const int64_t most = (int64_t)1 << 40, heads = 1 << 20;
    weft_check_keys(L, index, "the model's numbers", names);
    weft_model_numbers m = {0};
    m.architecture = weft_field_string_or(L, index, "architecture", NULL);
    m.num_attention_heads = (int)weft_field_int(L, index, "num_attention_heads", 1, heads);
    m.num_key_value_heads = (int)weft_field_int_or(L, index, "num_key_value_heads", 1, heads, m.num_attention_heads);
    m.intermediate_size = weft_field_int_or(L, index, "intermediate_size", 0, most, 0);
    m.moe_intermediate_size = weft_field_int_or(L, index, "moe_intermediate_size", 0, most, 0);
    m.vocab_size = weft_field_int_or(L, index, "vocab_size", 0, most, 0);
    m.num_experts = (int)weft_field_int_or(L, index, "num_experts", 0, 1 << 20, 0);
    m.num_hidden_layers = (int)weft_field_int_or(L, index, "num_hidden_layers", 0, 1 << 20, 0);
    lua_getfield(L, index, "supported_layer_types");
    if (!lua_isnil(L, -1)) {
        luaL_checktype(L, -1, LUA_TTABLE);
        int count = (int)lua_objlen(L, -1);
        for (int i = 1; i <= count; i++) {
            lua_rawgeti(L, -1, i);
            m.supported_layer_types |= 1u << weft_check_layer_type(L, lua_gettop(L));
            lua_pop(L, 1);
        }
    }
    lua_pop(L, 1);
    return m;
}

static int l_validate_model(lua_State *L)
{
    weft_parallel_config *config = check_config(L, 1);
    weft_model_numbers model = weft_check_model_numbers(L, 2);
    weft_raise_if(L, weft_parallel_config_check_model(config, &model));
    lua_settop(L, 1);
    return 1;
}

static int config_index(lua_State *L)
{
    weft_parallel_config *config = check_config(L, 1);
    const char *name = luaL_checkstring(L, 2);
    if (strcmp(name, "attention_tp_size") == 0) lua_pushinteger(L, weft_attention_tp_size(config));
    else if (strcmp(name, "world_size") == 0) lua_pushinteger(L, weft_config_world_size(config));
    else if (strcmp(name, "dcp_comm_backend") == 0) lua_pushstring(L, config->exchange_a2a ? "a2a" : "ag_rs");
    else if (strcmp(name, "validate_model") == 0) lua_pushcfunction(L, l_validate_model);
    else {
        int i = 0;
        while (i < SIZE_FIELDS && strcmp(name, size_fields[i].name) != 0) i++;
        if (i == SIZE_FIELDS || *size_field(config, i) == 0) lua_pushnil(L);
        else lua_pushinteger(L, *size_field(config, i));
    }
    return 1;
}

static int config_tostring(lua_State *L)
{
    char text[512];
    lua_pushstring(L, weft_parallel_config_describe(check_config(L, 1), text, sizeof text));
    return 1;
}

/* ---- rank_grid ---- */

static weft_rank_grid *check_grid(lua_State *L, int index)
{
    return luaL_checkudata(L, index, WEFT_RANK_GRID);
}

static weft_grid_kind check_kind(lua_State *L, int index)
{
    weft_grid_kind kind = WEFT_GRID_TENSOR;
    const char *name = luaL_checkstring(L, index);
    if (!weft_grid_kind_from_name(name, &kind))
        luaL_error(L, "unknown kind of group '%s' (known: tensor, attention_tensor, context, expert, expert_tensor, mlp_tensor, "
                      "pipeline, data, prefill_context, expert_parallel, expert_balance)", name);
    return kind;
}

static int l_rank_grid(lua_State *L)
{
    weft_rank_grid grid;
    weft_parallel_config *given = luaL_testudata(L, 1, WEFT_PARALLEL_CONFIG), config;
    int external = lua_isnoneornil(L, 2) ? 1 : weft_check_int(L, 2, "external_data_parallel_size");
    lua_settop(L, 1);
    config = given != NULL ? *given : check_sizes(L, 1);
    weft_raise_if(L, weft_rank_grid_make(&grid, &config, external));
    *(weft_rank_grid *)lua_newuserdata(L, sizeof grid) = grid;
    luaL_setmetatable(L, WEFT_RANK_GRID);
    return 1;
}

static void set_rows(lua_State *L, const weft_rank_rows *rows)
{
    lua_createtable(L, rows->num_rows, 0);
    for (int r = 0; r < rows->num_rows; r++) {
        lua_createtable(L, rows->row_size, 0);
        for (int i = 0; i < rows->row_size; i++) {
            lua_pushinteger(L, rows->ranks[r * rows->row_size + i]);
            lua_rawseti(L, -2, i + 1);
        }
        lua_rawseti(L, -2, r + 1);
    }
}

static int protected_rows(lua_State *L)
{
    set_rows(L, lua_touserdata(L, 1));
    return 1;
}

/* Protected, so that the rows' owner can free them when Lua has no memory. */
int weft_try_push_rows(lua_State *L, const weft_rank_rows *rows)
{
    lua_pushcfunction(L, protected_rows);
    lua_pushlightuserdata(L, (void *)rows);
    return lua_pcall(L, 1, 1, 0);
}

static int l_rows(lua_State *L)
{
    weft_rank_grid *grid = check_grid(L, 1);
    weft_grid_kind kind = check_kind(L, 2);
    weft_rank_rows rows;
    luaL_checkstack(L, 4, "rows");
    weft_raise_if(L, weft_rank_grid_rows(grid, kind, &rows));
    int failed = weft_try_push_rows(L, &rows);
    weft_rank_rows_free(&rows);
    if (failed) lua_error(L);
    return 1;
}

static int l_place(lua_State *L)
{
    weft_rank_grid *grid = check_grid(L, 1);
    int row = 0, index = 0;
    weft_raise_if(L, weft_rank_grid_place(grid, check_kind(L, 2), weft_check_int(L, 3, "rank"), &row, &index));
    lua_pushinteger(L, row);
    lua_pushinteger(L, index);
    return 2;
}

static int l_check(lua_State *L)
{
    weft_raise_if(L, weft_rank_grid_check(check_grid(L, 1)));
    lua_settop(L, 1);
    return 1;
}

static int grid_index(lua_State *L)
{
    weft_rank_grid *grid = check_grid(L, 1);
    const char *name = luaL_checkstring(L, 2);
    if (strcmp(name, "rows") == 0) lua_pushcfunction(L, l_rows);
    else if (strcmp(name, "place") == 0) lua_pushcfunction(L, l_place);
    else if (strcmp(name, "check") == 0) lua_pushcfunction(L, l_check);
    else if (strcmp(name, "world_size") == 0) lua_pushinteger(L, weft_rank_grid_world_size(grid));
    else lua_pushnil(L);
    return 1;
}

static int grid_tostring(lua_State *L)
{
    lua_pushfstring(L, "weft.rank_grid of %d ranks", weft_rank_grid_world_size(check_grid(L, 1)));
    return 1;
}

void weft_open_parallel_config(lua_State *L)
{
    static const luaL_Reg functions[] = {{"parallel_config", l_parallel_config}, {"rank_grid", l_rank_grid}, {NULL, NULL}};
    weft_value_class(L, WEFT_PARALLEL_CONFIG, config_index, NULL, config_tostring);
    weft_value_class(L, WEFT_RANK_GRID, grid_index, NULL, grid_tostring);
    luaL_setfuncs(L, functions, 0);
}
