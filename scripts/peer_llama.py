#!/usr/bin/env python3
"""What PyTorch makes of the same work: a decoder of Llama-3.1-8B's shape with random weights.

    python3 scripts/peer_llama.py [--batch 1 8 32] [--context 1024] [--prefill 8192] [--no-compile] [--no-transformers]

A decode step is written by hand (packed q/k/v and gate/up products, a static cache, SDPA), each layer through
torch.compile, the whole captured into one CUDA graph: milliseconds, median of the replays. The prefill is that of
transformers' LlamaForCausalLM with SDPA. One JSON object a line on standard output. Needs PyTorch with CUDA.
"""
import argparse
import json
import statistics
import sys

import torch
import torch.nn.functional as F

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS, VOCAB = 4096, 32, 8, 128, 14336, 32, 128256
EPS, THETA = 1e-5, 500000.0


def random(*shape, scale=0.02):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def rms_norm(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def layer(residual, w, k_cache, v_cache, position, cos, sin):
    batch = residual.shape[0]
    x = F.linear(rms_norm(residual, w["input_norm"]), w["qkv"])
    q, k, v = x.split((HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM), dim=-1)
    q = rotate(q.view(batch, HEADS, 1, HEAD_DIM), cos, sin)
    k = rotate(k.view(batch, KV_HEADS, 1, HEAD_DIM), cos, sin)
    k_cache.index_copy_(2, position, k)
    v_cache.index_copy_(2, position, v.view(batch, KV_HEADS, 1, HEAD_DIM))
    attended = F.scaled_dot_product_attention(q, k_cache, v_cache, enable_gqa=True)
    residual = residual + F.linear(attended.reshape(batch, HEADS * HEAD_DIM), w["o"])
    gate, up = F.linear(rms_norm(residual, w["post_norm"]), w["gate_up"]).chunk(2, dim=-1)
    return residual + F.linear(F.silu(gate) * up, w["down"])


def weights():
    layers = [
        {
            "input_norm": torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16),
            "post_norm": torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16),
            "qkv": random((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            "o": random(HIDDEN, HEADS * HEAD_DIM),
            "gate_up": random(2 * INTERMEDIATE, HIDDEN),
            "down": random(HIDDEN, INTERMEDIATE),
        }
        for _ in range(LAYERS)
    ]
    norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    return layers, norm, random(VOCAB, HIDDEN), random(VOCAB, HIDDEN)


@torch.no_grad()
def decode(batch, context, model, compiled):
    layers, norm, embed, head = model
    run = torch.compile(layer, dynamic=False) if compiled else layer
    caches = [(random(batch, KV_HEADS, context, HEAD_DIM, scale=1), random(batch, KV_HEADS, context, HEAD_DIM, scale=1)) for _ in layers]
    position = torch.tensor([context - 1], device="cuda")
    inverse = THETA ** (-torch.arange(0, HEAD_DIM, 2, device="cuda").float() / HEAD_DIM)
    angle = position.float()[:, None] * inverse
    cos, sin = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
    ids = torch.randint(VOCAB, (batch,), device="cuda")

    def step():
        residual = F.embedding(ids, embed)
        for w, (k, v) in zip(layers, caches):
            residual = run(residual, w, k, v, position, cos, sin)
        ids.copy_(F.linear(rms_norm(residual, norm), head).argmax(-1))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(10):
        graph.replay()
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 10)
    return statistics.median(times)


@torch.no_grad()
def prefill(tokens):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                         num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=VOCAB, rms_norm_eps=EPS, max_position_embeddings=131072,
                         rope_parameters={"rope_type": "default", "rope_theta": THETA}, attn_implementation="sdpa")
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    ids = torch.randint(VOCAB, (1, tokens), device="cuda")
    times = []
    for i in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        model(ids, use_cache=True, logits_to_keep=1)
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_speed():
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * source.numel() / statistics.median(times) / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prefill", type=int, default=8192, help="0: none")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-transformers", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("peer_llama: wanted a GPU that PyTorch can use, found none")
    torch.manual_seed(1)
    print(json.dumps({"copy_tb_per_s": round(copy_speed(), 3)}), flush=True)
    torch.cuda.empty_cache()
    if arguments.batch:
        model = weights()
        for batch in arguments.batch:
            ms = decode(batch, arguments.context, model, not arguments.no_compile)
            print(json.dumps({"decode_batch": batch, "context": arguments.context, "ms": round(ms, 3),
                              "tok_per_s": round(1000 * batch / ms, 1)}), flush=True)
        del model
        torch.cuda.empty_cache()
    if arguments.prefill and not arguments.no_transformers:
        ms = prefill(arguments.prefill)
        print(json.dumps({"prefill": arguments.prefill, "ms": round(ms, 1), "tok_per_s": round(1000 * arguments.prefill / ms, 1)}), flush=True)


if __name__ == "__main__":
    main()
