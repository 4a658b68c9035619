#!/usr/bin/env python3
"""Makes small random checkpoints with reference results from Hugging Face transformers.

    python3 scripts/make_references.py [--out spec/fixtures/models] [NAME ...]

Needs torch, transformers and safetensors (any CPU build); weft itself needs none of them. Each
folder gets config.json, model.safetensors, expected.json (prompts, greedy continuations, the
smallest gap between the best two logits on the way) and expected.safetensors (logits of every
position in float32, computed from the weights as they are stored).
"""
import argparse
import json
import os

import torch
import transformers
from safetensors.torch import save_file

COMMON = dict(vocab_size=256, num_hidden_layers=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
              hidden_act="silu", rms_norm_eps=1e-6)

# name: (class prefix, config, seed, names of experts in the file)
MODELS = {
    "qwen2_random": ("Qwen2", dict(
        COMMON, hidden_size=96, intermediate_size=128, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
        use_sliding_window=True, sliding_window=12, max_window_layers=1), 21, None),
    "qwen3_random": ("Qwen3", dict(
        COMMON, hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
        tie_word_embeddings=False), 22, None),
    "qwen3_moe_random": ("Qwen3Moe", dict(
        COMMON, hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
        tie_word_embeddings=False, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=False,
        decoder_sparse_step=1, mlp_only_layers=[]), 26, "single"),
    "mixtral_random": ("Mixtral", dict(
        COMMON, hidden_size=64, intermediate_size=48, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False,
        num_local_experts=8, num_experts_per_tok=2, sliding_window=None), 28, "fused"),
}
THETA = 10000.0
LENGTHS = (1, 17, 60)
STEPS = 24


def fill(model, seed, tied):
    """Random weights large enough that logits spread; norms around one. Tied embeddings are small, or the
    last token would only repeat itself."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(0.5 + torch.rand(p.shape, generator=generator))
            elif name.endswith("bias"):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
            else:
                scale = (0.05 if tied else 1.0) if "embed" in name else 0.4 if "gate.weight" in name else 0.12
                p.copy_(torch.randn(p.shape, generator=generator) * scale)
            p.copy_(p.to(torch.bfloat16).float())  # what the file will hold


def stored(model, tied, experts):
    """The tensors of the file: one matrix for each expert ("single"), or all in one ("fused")."""
    out = {}
    for name, value in model.state_dict().items():
        value = value.to(torch.bfloat16)
        if tied and name == "lm_head.weight":
            continue
        if experts == "single" and name.endswith("experts.gate_up_proj"):
            base = name[:-len("gate_up_proj")]
            for e, both in enumerate(value):
                gate, up = both.chunk(2)
                out[f"{base}{e}.gate_proj.weight"] = gate.contiguous()
                out[f"{base}{e}.up_proj.weight"] = up.contiguous()
        elif experts == "single" and name.endswith("experts.down_proj"):
            base = name[:-len("down_proj")]
            for e, down in enumerate(value):
                out[f"{base}{e}.down_proj.weight"] = down.contiguous()
        else:
            out[name] = value.contiguous()
    return out


def greedy(model, prompt):
    ids, margin = list(prompt), float("inf")
    for _ in range(STEPS):
        best = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float().topk(2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        ids.append(int(best.indices[0]))
    return ids[len(prompt):], margin


def make(folder, prefix, config, seed, experts):
    os.makedirs(folder, exist_ok=True)
    rope = dict(rope_type="default", rope_theta=THETA)
    config_class = getattr(transformers, prefix + "Config")
    model_class = getattr(transformers, prefix + "ForCausalLM")
    model = model_class(config_class(**config, rope_parameters=rope, attn_implementation="eager")).float().eval()
    fill(model, seed, config["tie_word_embeddings"])
    save_file(stored(model, config["tie_word_embeddings"], experts), os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    described = dict(config, architectures=[prefix + "ForCausalLM"], model_type=config_class.model_type, rope_theta=THETA,
                     torch_dtype="bfloat16")
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(described, file, indent=2, sort_keys=True)
        file.write("\n")
    generator = torch.Generator().manual_seed(seed + 1000)
    tensors, cases = {}, []
    with torch.inference_mode():
        for i, length in enumerate(LENGTHS):
            prompt = torch.randint(0, config["vocab_size"], (length,), generator=generator)
            logits = model(prompt[None], use_cache=False).logits[0].float()
            tensors[f"case{i}.input_ids"] = prompt.to(torch.int32)
            tensors[f"case{i}.logits"] = logits.contiguous()
            ids, margin = greedy(model, prompt.tolist())
            cases.append(dict(prompt_ids=prompt.tolist(), greedy_ids=ids, smallest_top2_margin=margin))
    save_file(tensors, os.path.join(folder, "expected.safetensors"))
    with open(os.path.join(folder, "expected.json"), "w") as file:
        json.dump(cases, file)
        file.write("\n")
    size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder))
    print(f"{folder}: {size} bytes, largest logit {logits.abs().max().item():.2f}, margins",
          [round(c["smallest_top2_margin"], 4) for c in cases], "distinct", [len(set(c["greedy_ids"])) for c in cases])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.path.join(os.path.dirname(__file__), "..", "spec", "fixtures", "models"))
    parser.add_argument("names", nargs="*", default=list(MODELS), help="which (default: all): " + ", ".join(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation
    for name in options.names or MODELS:
        make(os.path.join(options.out, name), *MODELS[name])


if __name__ == "__main__":
    main()
