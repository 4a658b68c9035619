-- spec/plan/rank_grid_spec.lua - which ranks talk, for any world.
local core = require "weft.core"

-- {dp=2, pp=2, tp=4, tpa=, dcp=, pcp=, ep=, mlp=, ext=}
local function grid(s)
  return core.rank_grid({ tensor_parallel_size = s.tp, tensor_parallel_size_attention = s.tpa, decode_context_parallel_size = s.dcp,
    prefill_context_parallel_size = s.pcp, pipeline_parallel_size = s.pp, data_parallel_size = s.dp, expert_parallel_size = s.ep,
    tensor_parallel_size_mlp = s.mlp }, s.ext)
end

local function rows(s, kind)
  local text = {}
  for i, row in ipairs(grid(s):rows(kind)) do text[i] = table.concat(row, ",") end
  return table.concat(text, " ")
end

describe("weft.rank_grid", function()
  it("gives the rows of TP8, DCP4", function()
    local s = { tp = 8, tpa = 2, dcp = 4 }
    assert.equal("0,1,2,3,4,5,6,7", rows(s, "tensor"))
    assert.equal("0,1,2,3 4,5,6,7", rows(s, "context"))
    assert.equal("0,4 1,5 2,6 3,7", rows(s, "attention_tensor"))
  end)

  it("gives singleton attention groups at attention size 1", function()
    assert.equal("0 1 2 3", rows({ tp = 4, tpa = 1 }, "attention_tensor"))
    assert.equal("0,1,2,3", rows({ tp = 4, tpa = 1 }, "context"))
  end)

  it("gives the rows of PP2 TP4 DCP2", function()
    local s = { pp = 2, tp = 4, tpa = 2, dcp = 2 }
    assert.equal("0,1,2,3 4,5,6,7", rows(s, "tp"))
    assert.equal("0,1 2,3 4,5 6,7", rows(s, "dcp"))
    assert.equal("0,2 1,3 4,6 5,7", rows(s, "attention_tp"))
    assert.equal("0,4 1,5 2,6 3,7", rows(s, "pp"))
    assert.equal("0,1,2,3 4,5,6,7", rows(s, "ep"))
    assert.equal("0,1,2,3 4,5,6,7", rows(s, "eplb"))
  end)

  it("gives the rows of DP2 TP4 DCP2", function()
    local s = { dp = 2, tp = 4, tpa = 2, dcp = 2 }
    assert.equal("0,4 1,5 2,6 3,7", rows(s, "data"))
    assert.equal("0,1,2,3,4,5,6,7", rows(s, "expert_parallel"))
    assert.equal("0,2 1,3 4,6 5,7", rows(s, "attention_tensor"))
  end)

  it("gives the rows of DP2 PP2 TP2, data rows in their own order", function()
    local s = { dp = 2, pp = 2, tp = 2 }
    assert.equal("0,1 2,3 4,5 6,7", rows(s, "tensor"))
    assert.equal("0,2 1,3 4,6 5,7", rows(s, "pipeline"))
    assert.equal("0,4 2,6 1,5 3,7", rows(s, "data"))
    assert.equal("0,1,4,5 2,3,6,7", rows(s, "expert_parallel"))
    assert.equal("0 1 2 3 4 5 6 7", rows(s, "context"))
  end)

  it("lets context rows run through prefill context ranks first", function()
    assert.equal("0,2 1,3", rows({ pcp = 2, tp = 2, dcp = 2 }, "context"))
    assert.equal("0,2,1,3", rows({ pcp = 2, tp = 2, dcp = 4 }, "context"))
    assert.equal("0,4,1,5,2,6,3,7", rows({ pcp = 2, tp = 4, dcp = 8 }, "context"))
    assert.equal("0,2 1,3", rows({ pcp = 2, tp = 2 }, "prefill_context"))
  end)

  it("cuts a tensor row by experts: part t / m, width part t mod m", function()
    local s = { tp = 8, ep = 4 }
    assert.equal("0,2,4,6 1,3,5,7", rows(s, "expert"))
    assert.equal("0,1 2,3 4,5 6,7", rows(s, "expert_tensor"))
    assert.equal("0,2,4,6 1,3,5,7", rows({ tp = 8, mlp = 4 }, "mlp_tensor"))
  end)

  it("agrees with grouping all ranks by their coordinates", function()
    local kinds = { tensor = "ext dp pp pcp", prefill_context = "ext dp pp tp", pipeline = "ext dp pcp tp", data = "ext pp pcp tp",
      expert_parallel = "ext pp" }
    for _, s in ipairs { { ext = 2, dp = 3, pp = 2, pcp = 1, tp = 4 }, { ext = 1, dp = 1, pp = 3, pcp = 2, tp = 6 }, { ext = 3, dp = 1, pp = 1, pcp = 1, tp = 1 } } do
      local g = grid(s)
      local function at(rank)
        local c = {}
        for _, axis in ipairs { "tp", "pcp", "pp", "dp", "ext" } do c[axis], rank = rank % s[axis], math.floor(rank / s[axis]) end
        return c
      end
      for kind, fixed in pairs(kinds) do
        local seen = 0
        for r, row in ipairs(g:rows(kind)) do
          local first = at(row[1])
          for i, rank in ipairs(row) do
            seen = seen + 1
            for axis in fixed:gmatch "%a+" do assert(at(rank)[axis] == first[axis]) end
            if i > 1 then assert(rank > row[i - 1]) end
            local pr, pi = g:place(kind, rank)
            assert(pr == r - 1 and pi == i - 1)
          end
        end
        assert.equal(g.world_size, seen)
      end
    end
  end)

  it("keeps d = t mod N, a = t / N, t = a N + d in every world without prefill context ranks", function()
    for _, tp in ipairs { 1, 2, 4, 6, 8, 12 } do
      for tpa = 1, tp do
        if tp % tpa == 0 then
          local g, n = grid { tp = tp, tpa = tpa, dp = 2, pp = 3 }, tp / tpa
          g:check()
          for rank = 0, g.world_size - 1 do
            local _, d = g:place("context", rank)
            local _, a = g:place("attention_tensor", rank)
            assert(d == rank % n and a == math.floor(rank % tp / n))
          end
        end
      end
    end
    grid({ tp = 4, dcp = 2 }):check()
  end)

  it("refuses a rank outside of the world and unknown kinds", function()
    assert.error_matches(function() grid({ tp = 4 }):place("tensor", 4) end, "rank 4 is outside of the world of 4 ranks", 1, true)
    assert.error_matches(function() grid({ tp = 4 }):place("tensor", -1) end, "rank -1 is outside", 1, true)
    assert.error_matches(function() grid({ tp = 4 }):rows "tenser" end, "unknown kind of group 'tenser'", 1, true)
    assert.error_matches(function() grid { tp = 4, ext = 0 } end, "external_data_parallel_size must be positive, got 0", 1, true)
  end)
end)
