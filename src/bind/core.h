/* bind/core.h - the parts of the module `weft.core`. Each opens with the module table on top. */
#pragma once

#include <lua.h>

void weft_open_base(lua_State *L);      /* status, live objects, versions (core.c) */
void weft_open_machine(lua_State *L);   /* lua_machine.c: clock, terminal, cores, copy speed */
void weft_open_tensor(lua_State *L);    /* lua_tensor.c */
void weft_open_plan(lua_State *L);      /* lua_plan.c: axis, plan, layer_parallel, parallel_config, rank_grid, layout */
void weft_open_group(lua_State *L);     /* lua_group.c: groups, rank, world */
void weft_open_spawn(lua_State *L);     /* lua_spawn.c: rank threads and plain values between states */
void weft_open_evaluate(lua_State *L);  /* lua_evaluate.c: work that may fail on any rank, for a prompt */
void weft_open_line_editor(lua_State *L); /* lua_line_editor.c: lines typed at a terminal */
void weft_open_json(lua_State *L);      /* lua_json.c */
void weft_open_checkpoint(lua_State *L); /* lua_checkpoint.c: safetensors, sources of weights */
void weft_open_safetensors(lua_State *L); /* lua_safetensors.c: tensors into a file */
void weft_open_device(lua_State *L);      /* lua_device.c: GPUs and captured graphs */
void weft_open_rows(lua_State *L);        /* lua_rows.c: rows of a step's tensors */
void weft_open_tokenizer(lua_State *L); /* lua_tokenizer.c */
void weft_open_ops(lua_State *L);       /* lua_ops.c: every kernel contract, for specs and scripts */
void weft_open_linear(lua_State *L);    /* lua_linear.c: column, row, merged, qkv, embedding, lm_head */
void weft_open_norm(lua_State *L);      /* lua_norm.c: rms_norm, minimax_rms_norm, rope */
void weft_open_cache(lua_State *L);     /* lua_cache.c: block pool, kv cache, step */
void weft_open_attention(lua_State *L); /* lua_attention.c: attention, hetero_attention, merge, combine */
void weft_open_sampler(lua_State *L);   /* lua_sampler.c */
void weft_open_experts(lua_State *L);   /* lua_experts.c: router, experts */

int luaopen_weft_core(lua_State *L);
