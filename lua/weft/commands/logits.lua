--- weft logits: the logits of every position of a prompt, into a safetensors file.
local core = require "weft.core"
local errors = require "weft.errors"
local run = require "weft.commands.run"

local logits = {}

--- The job on rank 0.
function logits.job(engine, options)
  local ids = options.prompt_ids or engine.tokenizer:encode(options.prompt)
  local all = core.tensor({ #ids, engine.vocab_size }, "float32")
  local _, request = engine:score(ids, function(first, rows)
    all:narrow(0, first, rows.shape[1]):copy(rows)
    if core.isatty(2) and #ids > engine.prefill_chunk then io.stderr:write(("\r%d of %d tokens"):format(first + rows.shape[1], #ids)) end
  end)
  engine:release(request)
  core.save_safetensors(options.out, { logits = all })
  if options.json then
    io.stdout:write(core.json.encode { tokens = #ids, vocab = engine.vocab_size, out = options.out }, "\n")
  end
  return 0
end

function logits.run(options)
  run.check_prompt(options, "--prompt TEXT or --prompt-ids 5,6,7")
  if not options.out then errors.usage "--out FILE.safetensors is missing" end
  for _, path in ipairs { options.plan or "", options.script or "" } do
    if core.same_file(options.out, path) then errors.usage(("--out %s: this command reads that file; name another"):format(options.out)) end
  end
  if options.model and core.same_file(options.out, options.model) then
    errors.usage(("--out %s is a file of the model"):format(options.out))
  end
  core.can_save_safetensors(options.out) -- before weights are read and logits computed
  options.needs_tokenizer = options.prompt and "give --prompt-ids" or nil
  options.cache_tokens = (options.prompt_ids and #options.prompt_ids or #options.prompt + 8) + 64
  return require("weft.runtime").launch(options, "weft.commands.logits", "job")
end

return logits
