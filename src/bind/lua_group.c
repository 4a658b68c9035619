/* bind/lua_group.c - weft.group: ranks that talk.
 *
 *   core.groups.get(type [, world_size])    the registered group; world_size may be left out when
 *                                           the type has one group of more than one rank
 *   core.groups.create(type, ranks)         collective over ranks (world ranks, in order)
 *   core.groups.add(group)                  makes it the one that get finds
 *   core.groups.create_all{{type =, world_size =, rows = {{...}, ...}}, ...}
 *                                           on every rank: this rank's row of each, created and added
 *   core.groups.everyone()                  all ranks, in order
 *   core.groups.close()                     collective: closes all that were added
 *
 *   g.size g.rank g.ranks g.type g.name
 *   g:all_reduce(t [, "sum" | "max"]) -> a new tensor     g:all_gather(t, dim) -> tensor
 *   g:reduce_scatter(t, dim) -> tensor                    g:all_to_all(t) -> tensor, parts along dim 0
 *   g:broadcast(t [, root]) -> t, in place                g:broadcast_value(v [, root]) -> plain value
 *   g:barrier() g:split(color, key) -> group or nil       g:close() g:traffic()
 *   g.transport                             what carries it: "peer memory up to 128 KB, NCCL above"
 *   g:set_peer_limit(bytes)                 calls up to so many bytes for each rank go over peer memory;
 *                                           the same on all members
 * root is a place in the list. With one rank the first three give the same tensor back. */
#include <stdlib.h>
#include <string.h>

#include "bind/box.h"
#include "bind/core.h"
#include "bind/group_args.h"
#include "bind/value.h"

weft_group *weft_check_group(lua_State *L, int index)
{
    return (weft_group *)weft_box_check(L, index, WEFT_GROUP);
}

weft_group *weft_opt_group(lua_State *L, int index)
{
    return lua_isnoneornil(L, index) ? NULL : weft_check_group(L, index);
}

void weft_push_group(lua_State *L, weft_group *group)
{
    weft_box_push(L, WEFT_GROUP, (weft_object *)group);
}

weft_group_type weft_check_group_type(lua_State *L, int index)
{
    weft_group_type type = WEFT_GROUP_TENSOR;
    const char *name = luaL_checkstring(L, index);
    if (weft_group_type_from_name(name, &type)) return type;
    lua_pushfstring(L, "unknown group type '%s' (known:", name);
    for (int t = 0; t < WEFT_GROUP_TYPE_COUNT; t++)
        lua_pushfstring(L, "%s %s", t > 0 ? "," : "", weft_group_type_name((weft_group_type)t));
    lua_pushliteral(L, ")");
    lua_concat(L, WEFT_GROUP_TYPE_COUNT + 2);
    luaL_argerror(L, index, lua_tostring(L, -1));
    return type;
}

/* ---- collectives ---- */

static weft_reduce check_reduce(lua_State *L, int index)
{
    static const char *const names[] = {"sum", "max", NULL};
    return luaL_checkoption(L, index, "sum", names) == 0 ? WEFT_REDUCE_SUM : WEFT_REDUCE_MAX;
}

/* Pushes a new tensor with the shape of `like`, dimension dim being `length` (dim < 0: as it is). */
static weft_tensor *push_like(lua_State *L, const weft_tensor *like, int dim, int64_t length)
{
    int64_t shape[WEFT_MAX_DIMS];
    weft_tensor *tensor = NULL;
    memcpy(shape, like->shape, sizeof shape);
    if (dim >= 0) shape[dim] = length;
    weft_raise_if(L, weft_tensor_create(&tensor, weft_lua_memory_like(L, like), like->dtype, like->ndim, shape));
    weft_push_tensor(L, tensor);
    return tensor;
}

/* Pushes t itself, or a contiguous copy. */
static weft_tensor *push_contiguous(lua_State *L, int index)
{
    weft_tensor *tensor = weft_check_tensor(L, index);
    lua_pushvalue(L, index);
    if (weft_tensor_is_contiguous(tensor)) return tensor;
    weft_tensor *copy = push_like(L, tensor, -1, 0);
    weft_raise_if(L, weft_tensor_copy(copy, tensor));
    lua_remove(L, -2);
    return copy;
}

static int l_all_reduce(lua_State *L)
{
    weft_group *group = weft_check_group(L, 1);
    weft_tensor *tensor = weft_check_tensor(L, 2);
    weft_reduce op = check_reduce(L, 3);
    if (weft_group_size(group) == 1) {
        weft_raise_if(L, weft_group_barrier(group)); /* closed? */
        lua_settop(L, 2);
        return 1;
    }
    const weft_tensor *in = push_contiguous(L, 2);
    weft_tensor *out = push_like(L, tensor, -1, 0);
    weft_raise_if(L, weft_group_all_reduce(group, in->data, out->data, weft_tensor_numel(in), in->dtype, op));
    return 1;
}

static int check_dim(lua_State *L, int index, const weft_tensor *tensor)
{
    int dim = luaL_checkint(L, index);
    if (dim < 0 || dim >= tensor->ndim)
        luaL_argerror(L, index, lua_pushfstring(L, "dimension %d of a tensor with %d", dim, tensor->ndim));
    return dim;
}

static int l_all_gather(lua_State *L)
{
    weft_group *group = weft_check_group(L, 1);
    weft_tensor *in = weft_check_tensor(L, 2);
    int dim = check_dim(L, 3, in), size = weft_group_size(group);
    if (size == 1) {
        weft_raise_if(L, weft_group_barrier(group));
        lua_settop(L, 2);
        return 1;
    }
    weft_tensor *out = push_like(L, in, dim, in->shape[dim] * size);
    weft_raise_if(L, weft_group_all_gather_dim(group, in, dim, out));
    return 1;
}

static void check_divides(lua_State *L, const weft_group *group, const weft_tensor *in, int dim, const char *what)
{
    int size = weft_group_size(group);
    if (in->shape[dim] % size != 0)
        luaL_error(L, "%s: dimension %d holds %d, which does not divide over the %d ranks of %s", what, dim, (int)in->shape[dim], size,
                   weft_group_name(group));
}

static int l_reduce_scatter(lua_State *L)
{
    weft_group *group = weft_check_group(L, 1);
    weft_tensor *in = weft_check_tensor(L, 2);
    int dim = check_dim(L, 3, in);
    check_divides(L, group, in, dim, "reduce_scatter");
    if (weft_group_size(group) == 1) {
        weft_raise_if(L, weft_group_barrier(group));
        lua_settop(L, 2);
        return 1;
    }
    weft_tensor *out = push_like(L, in, dim, in->shape[dim] / weft_group_size(group));
    weft_raise_if(L, weft_group_reduce_scatter_dim(group, in, dim, out));
    return 1;
}

static int l_all_to_all(lua_State *L)
{
    weft_group *group = weft_check_group(L, 1);
    weft_tensor *tensor = weft_check_tensor(L, 2);
    luaL_argcheck(L, tensor->ndim >= 1, 2, "all_to_all needs a tensor with a dimension to cut");
    check_divides(L, group, tensor, 0, "all_to_all");
    const weft_tensor *in = push_contiguous(L, 2);
    weft_tensor *out = push_like(L, tensor, -1, 0);
    int64_t count = weft_tensor_numel(in) / weft_group_size(group);
    weft_raise_if(L, weft_group_all_to_all(group, in->data, out->data, count, in->dtype));
    return 1;
}

static int l_broadcast(lua_State *L)
{
    weft_group *group = weft_check_group(L, 1);
    weft_tensor *tensor = weft_check_tensor(L, 2);
    int root = luaL_optint(L, 3, 0);
    luaL_argcheck(L, weft_tensor_is_contiguous(tensor), 2, "broadcast writes in place: the tensor must be contiguous");
    weft_raise_if(L, weft_group_broadcast(group, tensor->data, weft_tensor_numel(tensor), tensor->dtype, root));
    lua_settop(L, 2);
    return 1;
}

static int l_broadcast_value(lua_State *L)
{
    weft_group *group = weft_check_group(L, 1);
    int root = luaL_optint(L, 3, 0), is_root = weft_group_rank(group) == root;
    lua_settop(L, 2);
    weft_packed *packed = weft_packed_new(L);
    if (is_root) weft_pack(L, packed, 2, "the value");
    int64_t size = (int64_t)packed->size;
    weft_raise_if(L, weft_group_broadcast_bytes(group, &size, sizeof size, root));
    if (!is_root) {
        packed->bytes = malloc((size_t)size);
        if (packed->bytes == NULL) luaL_error(L, "no memory for a value of %d bytes", (int)size);
        packed->size = packed->capacity = (size_t)size;
    }
    weft_raise_if(L, weft_group_broadcast_bytes(group, packed->bytes, packed->size, root));
    weft_unpack(L, packed->bytes);
    return 1;
}

static int l_barrier(lua_State *L)
{
    weft_raise_if(L, weft_group_barrier(weft_check_group(L, 1)));
    return 0;
}

static int l_split(lua_State *L)
{
    weft_group *group = weft_check_group(L, 1);
    int color = luaL_checkint(L, 2), key = luaL_optint(L, 3, 0);
    weft_object **slot = weft_box_new(L, WEFT_GROUP);
    weft_group *part = NULL;
    weft_raise_if(L, weft_group_split(group, color, key, &part));
    *slot = (weft_object *)part;
    if (part == NULL) lua_pushnil(L);
    return 1;
}

/* Collective, unlike the finaliser, which only lets go. The box stays, so that later calls say "closed". */
static int l_close(lua_State *L)
{
    weft_raise_if(L, weft_group_close(weft_check_group(L, 1)));
    return 0;
}

static int l_set_peer_limit(lua_State *L)
{
    weft_group *group = weft_check_group(L, 1);
    lua_Number bytes = luaL_checknumber(L, 2);
    if (!(bytes >= 0 && bytes <= 1 << 30)) luaL_argerror(L, 2, "bytes from 0 to 2^30");
    weft_group_set_peer_limit(group, (size_t)bytes);
    return 0;
}

static int l_traffic(lua_State *L)
{
    weft_group_traffic traffic = weft_group_get_traffic(weft_check_group(L, 1));
    lua_createtable(L, 0, 3);
    lua_pushnumber(L, (lua_Number)traffic.calls);
    lua_setfield(L, -2, "calls");
    lua_pushnumber(L, (lua_Number)traffic.bytes_sent);
    lua_setfield(L, -2, "bytes_sent");
    lua_pushnumber(L, traffic.seconds);
    lua_setfield(L, -2, "seconds");
    return 1;
}

/* ---- fields ---- */

static int fields(lua_State *L)
{
    weft_group *group = weft_check_group(L, 1);
    const char *name = luaL_checkstring(L, 2);
    if (strcmp(name, "size") == 0) lua_pushinteger(L, weft_group_size(group));
    else if (strcmp(name, "rank") == 0) lua_pushinteger(L, weft_group_rank(group));
    else if (strcmp(name, "type") == 0) lua_pushstring(L, weft_group_type_name(weft_group_get_type(group)));
    else if (strcmp(name, "name") == 0) lua_pushstring(L, weft_group_name(group));
    else if (strcmp(name, "transport") == 0) lua_pushstring(L, weft_group_transport(group));
    else if (strcmp(name, "ranks") == 0) {
        lua_createtable(L, weft_group_size(group), 0);
        for (int i = 0; i < weft_group_size(group); i++) {
            lua_pushinteger(L, weft_group_ranks(group)[i]);
            lua_rawseti(L, -2, i + 1);
        }
    } else lua_pushnil(L);
    return 1;
}

static int to_string(lua_State *L)
{
    weft_group *group = (weft_group *)weft_box_test(L, 1, WEFT_GROUP);
    if (group == NULL) lua_pushliteral(L, "weft.group (closed)");
    else lua_pushfstring(L, "weft.group %s", weft_group_name(group));
    return 1;
}

/* ---- core.groups ---- */

static int l_get(lua_State *L)
{
    weft_group_type type = weft_check_group_type(L, 1);
    int world_size = luaL_optint(L, 2, 0);
    luaL_argcheck(L, world_size >= 0, 2, "a world_size is positive");
    weft_group *group = NULL;
    if (world_size > 0) weft_raise_if(L, weft_rank_group(weft_lua_rank(L), type, world_size, &group));
    else weft_raise_if(L, weft_rank_only_group(weft_lua_rank(L), type, &group));
    weft_push_group(L, group);
    return 1;
}

/* Pushes a group made from the list at index. */
static weft_group *push_created(lua_State *L, weft_group_type type, int index)
{
    int size = (int)lua_objlen(L, index);
    int *ranks = lua_newuserdata(L, (size_t)(size > 0 ? size : 1) * sizeof *ranks);
    for (int i = 0; i < size; i++) {
        lua_rawgeti(L, index, i + 1);
        if (!lua_isnumber(L, -1)) luaL_error(L, "entry %d of the list of ranks is a %s", i + 1, luaL_typename(L, -1));
        ranks[i] = (int)lua_tointeger(L, -1);
        lua_pop(L, 1);
    }
    weft_object **slot = weft_box_new(L, WEFT_GROUP);
    weft_group *group = NULL;
    weft_raise_if(L, weft_group_create(&group, weft_lua_rank(L), type, ranks, size));
    *slot = (weft_object *)group;
    lua_remove(L, -2);
    return group;
}

static int l_create(lua_State *L)
{
    weft_group_type type = weft_check_group_type(L, 1);
    luaL_checktype(L, 2, LUA_TTABLE);
    push_created(L, type, 2);
    return 1;
}

static int l_add(lua_State *L)
{
    weft_raise_if(L, weft_rank_add_group(weft_lua_rank(L), weft_check_group(L, 1)));
    lua_settop(L, 1);
    return 1;
}

static int holds(lua_State *L, int index, int rank)
{
    int found = 0, size = (int)lua_objlen(L, index);
    for (int i = 1; i <= size && !found; i++) {
        lua_rawgeti(L, index, i);
        found = lua_isnumber(L, -1) && (int)lua_tointeger(L, -1) == rank;
        lua_pop(L, 1);
    }
    return found;
}

/* The entry on top: creates and adds this rank's row. */
static void create_entry(lua_State *L, int number)
{
    weft_rank *rank = weft_lua_rank(L);
    int entry = lua_gettop(L);
    if (!lua_istable(L, entry)) luaL_error(L, "entry %d is a %s, expected {type =, world_size =, rows =}", number, luaL_typename(L, entry));
    lua_getfield(L, entry, "type");
    weft_group_type type = weft_check_group_type(L, -1);
    int world_size = (int)weft_field_int(L, entry, "world_size", 1, 1 << 20);
    lua_getfield(L, entry, "rows");
    if (!lua_istable(L, -1)) luaL_error(L, "entry %d has no rows", number);
    int rows = lua_gettop(L), count = (int)lua_objlen(L, rows);
    for (int i = 1; world_size > 1 && i <= count; i++) {
        lua_rawgeti(L, rows, i);
        if (!lua_istable(L, -1) || (int)lua_objlen(L, -1) != world_size)
            luaL_error(L, "row %d of the %s groups is not a list of %d ranks", i, weft_group_type_name(type), world_size);
        if (holds(L, rows + 1, rank->rank)) weft_raise_if(L, weft_rank_add_group(rank, push_created(L, type, rows + 1)));
        lua_settop(L, rows);
    }
    lua_settop(L, entry);
}

static int l_create_all(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    for (int i = 1, count = (int)lua_objlen(L, 1); i <= count; i++) {
        lua_rawgeti(L, 1, i);
        create_entry(L, i);
        lua_settop(L, 1);
    }
    return 0;
}

static int l_everyone(lua_State *L)
{
    weft_push_group(L, weft_lua_rank(L)->everyone);
    return 1;
}

static int l_close_all(lua_State *L)
{
    weft_raise_if(L, weft_rank_close_groups(weft_lua_rank(L)));
    return 0;
}

void weft_open_group(lua_State *L)
{
    static const luaL_Reg methods[] = {
        {"all_reduce", l_all_reduce}, {"all_gather", l_all_gather}, {"reduce_scatter", l_reduce_scatter},
        {"all_to_all", l_all_to_all}, {"broadcast", l_broadcast},   {"broadcast_value", l_broadcast_value},
        {"barrier", l_barrier},       {"split", l_split},           {"traffic", l_traffic},
        {"set_peer_limit", l_set_peer_limit}, {NULL, NULL},
    };
    static const luaL_Reg groups[] = {
        {"get", l_get},           {"create", l_create},     {"add", l_add}, {"create_all", l_create_all},
        {"everyone", l_everyone}, {"close", l_close_all}, {NULL, NULL},
    };
    weft_box_class(L, WEFT_GROUP, methods, fields, to_string);
    /* close is not the finaliser here: see l_close. */
    luaL_getmetatable(L, WEFT_GROUP);
    lua_getfield(L, -1, "__methods");
    lua_pushcfunction(L, l_close);
    lua_setfield(L, -2, "close");
    lua_pop(L, 2);
    lua_newtable(L);
    luaL_setfuncs(L, groups, 0);
    lua_setfield(L, -2, "groups");
}
