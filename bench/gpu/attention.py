#!/usr/bin/env python3
"""cuDNN and FlashAttention-2 (both through PyTorch) on the shapes of attention.cu, in CUDA graphs, and our own
program between them, so that every figure is of one run.   attention.py PROGRAM [OUT.json [COMMIT]]
OUT.json is bench/results/gpu-attention.json unless it is named."""
import json
import statistics
import subprocess
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from served import RESULTS

PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}


def timed(run, count):
    """Median microseconds of one of `count` runs in a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(count, 3)):
            run(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                run(i)
        times = []
        time.sleep(0.1)  # as in attention.cu: every shape begins rested
        for i in range(9):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(times[2:]) / count


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def decode(peer, batch, kv):
    bytes_ = batch * kv * 8 * 128 * 2 * 2
    copies = max(2, min(40, (300 << 20) // bytes_ + 1))
    q = random(batch, 32, 1, 128)
    caches = [(random(batch, 8, kv, 128), random(batch, 8, kv, 128)) for _ in range(copies)]
    with sdpa_kernel(PEERS[peer]):
        us = timed(lambda i: sdpa(q, *caches[i % copies], enable_gqa=True), max(copies, 8))
    return {"peer": peer, "decode": [batch, kv], "us": round(us, 2), "tb_s": round(bytes_ / us * 1e-6, 3)}


def prefill(peer, batch, tokens, dim=128):
    q, k, v = random(batch, 32, tokens, dim), random(batch, 8, tokens, dim), random(batch, 8, tokens, dim)
    with sdpa_kernel(PEERS[peer]):
        us = timed(lambda i: sdpa(q, k, v, is_causal=True, enable_gqa=True), 4)
    flops = 4 * 32 * dim * batch * tokens * tokens / 2
    return {"peer": peer, "prefill": [batch, tokens], "dim": dim, "us": round(us, 1), "tflops": round(flops / us * 1e-6, 1)}


def matmul():
    a, b = random(8192, 8192), random(8192, 8192)
    us = timed(lambda i: torch.matmul(a, b), 4)
    return {"matmul": 8192, "us": round(us, 1), "tflops": round(2 * 8192**3 / us * 1e-6, 1)}


def main():
    program, out = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else RESULTS / "gpu-attention.json"
    rows = [matmul()]
    for peer in PEERS:
        for shape in [(256, 1024), (64, 2048), (16, 4096), (1, 131072), (1, 8192)]:
            rows.append(decode(peer, *shape))
        for shape in [(1, 8192), (4, 2048), (16, 512)]:
            rows.append(prefill(peer, *shape))
        rows.append(prefill(peer, 1, 8192, 64))
    torch.cuda.empty_cache()
    ours = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    rows += [json.loads(line) for line in ours.splitlines() if line.startswith("{")]
    driver = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True,
                            text=True).stdout.strip()
    result = {"what": "bench/gpu/attention", "commit": sys.argv[3] if len(sys.argv) > 3 else "", "device": driver,
              "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
              "command": "python3 bench/gpu/attention.py gpu_attention_bench OUT.json COMMIT", "rows": rows}
    with open(out, "w") as f:
        f.write(json.dumps(result, indent=0).replace('\n"', '\n  "'))
    for r in rows:
        print(json.dumps(r))


main()
