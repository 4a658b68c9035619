#!/usr/bin/env python3
"""Causal prefill attention through PyTorch: the peer of `scripts/gpu-bench-kernels BUILD attention`.

32 query heads over 8 KV heads of 128, bfloat16, one sequence. A product counts as 2 operations a pair,
only pairs that the mask leaves count: 4 * S * (S + 1) / 2 * heads * dim, as in weft's table.
Medians of 9 replays of a captured graph. Usage: scripts/peer_attention.py [LENGTH ...]
"""
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HEADS, KV_HEADS, DIM, CALLS, REPLAYS = 32, 8, 128, 2, 9


def microseconds(call):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        times = []
        for _ in range(REPLAYS + 2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times[2:])


def main():
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    for length in map(int, sys.argv[1:] or ["2048", "8192", "32768"]):
        q = torch.randn(1, HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(1, KV_HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)
        v = torch.randn_like(k)
        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            def call():
                with sdpa_kernel(backend):
                    scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            try:
                us = microseconds(call)
            except RuntimeError as error:
                print(f"{name} attention, {length} queries: {str(error).splitlines()[0]}")
                continue
            flop = 4 * length * (length + 1) / 2 * HEADS * DIM
            print(f"{name + ' attention, %d queries' % length:58s} {us:10.2f} us {flop / us * 1e-6:8.1f} TFLOP/s")


main()
