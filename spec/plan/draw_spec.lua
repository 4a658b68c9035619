-- spec/plan/draw_spec.lua - a plan drawn in characters and as SVG.
local config = require "weft.config"
local draw = require "weft.plan.draw"
local numbers = require "weft.plan_numbers"
local picture = require "weft.plan.picture"
local policies = require "weft.policy"
local svg = require "weft.plan.svg"

local function of(name, sizes)
  local cfg = config.load("spec/fixtures/configs/" .. name .. "_config.json")
  return numbers.of(policies.from_options { policy = sizes }, cfg, { context = 1024 })
end

local llama, minimax = "meta-llama--Meta-Llama-3.1-8B", "MiniMaxAI--MiniMax-M2.5"
local plans = {
  { llama, { tensor = 1 } }, { llama, { tensor = 8, attention = { tensor = 2 } } }, { llama, { tensor = 16, attention = { tensor = 16, context = 2 } } },
  { llama, { tensor = 32, attention = { tensor = 1 }, mlp = { tensor = 4 }, layers = { ["0-3"] = { attention = { tensor = 32 } } } } },
  { minimax, { tensor = 8, attention = { tensor = 4 }, experts = { expert = 4 } } },
}

-- Raises unless every element that opens also closes, in order.
local function check_xml(text)
  local open = {}
  for close, name, rest in text:gmatch "<(/?)(%a+)([^>]*)>" do
    if close == "/" then
      assert(table.remove(open) == name, "</" .. name .. "> closes nothing")
    elseif not rest:match "/$" then
      open[#open + 1] = name
    end
  end
  assert(#open == 0, "not closed: " .. table.concat(open, " "))
end

describe("the picture of a plan", function()
  it("shows every rank once in each panel", function()
    for _, case in ipairs(plans) do
      for _, panel in ipairs(picture.of(of(unpack(case))).panels) do
        local seen = {}
        for _, cell in ipairs(panel.cells) do
          assert.is_nil(seen[cell.rank])
          seen[cell.rank] = true
        end
        assert.equal(case[2].tensor, #panel.cells)
        assert.equal(#panel.cells, panel.columns * panel.rows)
      end
    end
  end)

  it("puts heads in one direction and the sequence in the other", function()
    local attention = picture.of(of(llama, { tensor = 8, attention = { tensor = 2 } })).panels[1]
    assert.same({ 4, 2, "sequence", "heads" }, { attention.columns, attention.rows, attention.x_label, attention.y_label })
    local ranks = {}
    for i, cell in ipairs(attention.cells) do ranks[i] = cell.rank end
    assert.same({ 0, 1, 2, 3, 4, 5, 6, 7 }, ranks)
    assert.same({ "q 0-15", "kv 0-3", "out 4-7" }, attention.cells[2].lines)
    assert.same({ kind = "tokens", strips = 4, mine = 1 }, attention.cells[2].bars[2])
    local experts = picture.of(of(minimax, { tensor = 8, experts = { expert = 4 } })).panels[2]
    assert.same({ "experts", "columns of each expert" }, { experts.x_label, experts.y_label })
  end)

  it("is text with colour only when asked, no line wider than the terminal", function()
    for _, case in ipairs(plans) do
      local text = draw.text(of(unpack(case)), { width = 80 })
      assert.is_nil(text:find("\27", 1, true))
      for line in text:gmatch "[^\n]+" do assert.is_true(select(2, line:gsub("[^\128-\191]", "")) <= 80, line) end
      local painted = case[2].tensor <= 16 and "\27[38;5;33m█" or "\27[38;5;33mq 0-31"
      assert.is_truthy(draw.text(of(unpack(case)), { width = 80, colour = true }):find(painted, 1, true))
    end
  end)

  it("is a table where there are many ranks, with what a column or a row shares at its head", function()
    local text = draw.text(of("meta-llama--Meta-Llama-3.1-405B", { tensor = 64, attention = { tensor = 8 } }), { width = 200 })
    assert.matches("\n +q 0%-15 +q 16%-31 .* q 112%-127\n +kv 0 +kv 1 .* kv 7\n  strip 0 of 8  rank 0   out 0%-1 +rank 8   out 16%-17", text)
    assert.matches("\n  strip 7 of 8  rank 7   out 14%-15 .* rank 63  out 126%-127\n", text)
    assert.matches("rank 63  52416%-53247\n", text)
    assert.is_nil(text:find("┌", 1, true))
  end)

  it("shows strips in whole rounds, a part of the bar where there are as many as it has cells", function()
    local text = draw.text(of(llama, { tensor = 16, attention = { tensor = 2 } }), { width = 200 })
    assert.matches("│ ██░░░░░░░░░░ │", text, 1, true)
    assert.matches("│ ░░░░░░░░░░░█ │", text, 1, true)
  end)

  it("is an SVG with marks wide enough to be seen, and no colour with two meanings", function()
    local parts = {}
    for i, name in ipairs { "embedding", "qkv", "attention", "exchange", "o_proj", "mlp", "experts", "lm_head", "collectives", "host" } do
      parts[i] = { part = name, ms = 0.1 }
    end
    local price = { machine = "h200", ms = 1, batch = 1, context = 1, tok_per_s_user = 1, tok_per_s_gpu = 1, parts = parts }
    local n = of("meta-llama--Meta-Llama-3.1-405B", { tensor = 64, attention = { tensor = 8 } })
    local cells, whole = svg.draw(n), svg.draw(n, price)
    local seen = {}
    for x, width, fill in cells:gmatch '<rect x="([%d.]+)" y="[%d.]+" width="([%d.]+)" height="5" fill="(#%x+)"' do
      assert.is_true(tonumber(width) >= 3, width)
      assert.is_true(x + width <= 676.01)
      seen[fill] = true
    end
    local step = whole:sub(whole:find("one decode step", 1, true), -1)
    for fill in step:gmatch 'height="16" fill="(#%x+)"' do
      assert.is_nil(seen[fill], fill)
      seen[fill] = true
    end
  end)

  it("says whole where nothing is cut", function()
    local notes = table.concat(picture.of(of(minimax, { tensor = 1 })).panels[2].notes, "; ")
    assert.matches("^every expert whole; ", notes)
    assert.equal("heads whole", picture.of(of(llama, { tensor = 1 })).panels[1].notes[1])
    assert.equal("cut 8 ways", picture.of(of(llama, { tensor = 8 })).panels[2].notes[1])
  end)

  it("is an SVG whose elements close, with every rank, the legend and nothing from elsewhere", function()
    for _, case in ipairs(plans) do
      local text = svg.draw(of(unpack(case)), { machine = "h200", ms = 2, batch = 1, context = 1, tok_per_s_user = 500, tok_per_s_gpu = 500,
        parts = { { part = "qkv", ms = 1.5 }, { part = "host", ms = 0.5 } } })
      check_xml(text)
      assert.matches('^<svg xmlns="http://www.w3.org/2000/svg" width="700"', text)
      for rank = 0, case[2].tensor - 1 do assert.is_truthy(text:find((">rank %d<"):format(rank), 1, true)) end
      assert.is_truthy(text:find("query heads worked on", 1, true))
      assert.is_truthy(text:find("predicted: 2 ms", 1, true))
      assert.is_nil(text:find("href", 1, true))
      assert.is_nil(text:find("nan", 1, true))
    end
  end)
end)
