#!/usr/bin/env python3
"""A whole model on the GPU under live load: clients that each ask again when answered, over gRPC, by `kvasir bench`.

The model is a dummy of Llama-3.1-8B's shape unless --model says otherwise, served at its default options. Beside each
figure stands what vLLM 0.25.1 reached on an H200 at 1,000 tokens in and 250 out, at its defaults and with small chunks.
"""
import argparse
import json
import subprocess
import sys
import tempfile
import threading

from served import RESULTS, command, driver, start
from whole_model import LLAMA_8B

# By clients: output tokens a second, and p99 between tokens (with small chunks), ms.
VLLM = {64: (4804, 185, 52), 256: (6263, 199, 61)}


def load(kvasir, port, clients, requests, words, tokens):
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        run = subprocess.run([kvasir, "bench", f"127.0.0.1:{port}", "--concurrency", str(clients), "--requests",
                              str(requests), "--input-len", str(words), "--output-len", str(tokens), "--json",
                              report.name], check=True, stdout=subprocess.PIPE, text=True)
        figures = json.load(open(report.name))["figures"]
        if figures["failed"]:  # figures without those would be of something else
            sys.exit(run.stdout)
        return figures


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kvasir", help="the program, built with -DKVASIR_CUDA=ON")
    p.add_argument("--model", default=LLAMA_8B, help="what to serve (default: a dummy of Llama-3.1-8B's shape)")
    p.add_argument("--clients", default="64,256", help="at once (default 64,256)")
    p.add_argument("--rounds", type=int, default=4, help="requests of each client (default 4)")
    p.add_argument("--input", type=int, default=1000, help="prompt tokens, about (default 1000)")
    p.add_argument("--output", type=int, default=250, help="tokens of an answer (default 250)")
    p.add_argument("--serve", default="", help="more options of kvasir serve, in one word")
    p.add_argument("--commit", default="", help="what was built, for the record")
    p.add_argument("--out", default=RESULTS / "gpu-serve.json", help="the JSON record; empty: none")
    a = p.parse_args()

    process, log = start(a.kvasir, a.model, "--device", "cuda", "--no-access-log", "--grpc-port", "0", *a.serve.split())
    threading.Thread(target=lambda: [None for _ in process.stderr], daemon=True).start()
    port, device = log[-1]["grpc_port"], next((e["device"] for e in log if "device" in e), None)
    try:
        # Words become as many tokens as the model's vocabulary makes of them; and graphs of all sizes are made.
        clients = [int(n) for n in a.clients.split(",")]
        few = load(a.kvasir, port, 4, 16, 100, 16)
        words = round(a.input * 100 / (few["prompt_tokens"] / few["requests"]))
        load(a.kvasir, port, max(clients), max(clients), 100, 16)
        figures = {n: load(a.kvasir, port, n, n * a.rounds, words, a.output) for n in clients}
    finally:
        process.terminate()
        process.wait(60)

    record = {"device": device, "driver": driver(), "commit": a.commit, "model": a.model,
              "command": command("bench/gpu/serve.py"), "clients": {}}
    print(f"{device}: {a.model}, {a.input} tokens in, {a.output} out")
    print("clients | tokens/s | vLLM | first token p50, p99 ms | between tokens p50, p99 ms | vLLM's p99, small chunks")
    for n, f in figures.items():
        one = {"tokens_per_second": round(f["output_tokens_per_second"]), "failed": f["failed"],
               "prompt_tokens": round(f["prompt_tokens"] / f["requests"]),
               **{f"{name}_{q}_ms": round(f[f"{name}_ms"][q], 2) for name in ("ttft", "itl") for q in ("p50", "p99")}}
        rate, p99, small = VLLM.get(n, (None, None, None)) if a.model == LLAMA_8B else (None, None, None)
        print(f"{n:7} | {one['tokens_per_second']} | {rate} | {one['ttft_p50_ms']}, {one['ttft_p99_ms']} | "
              f"{one['itl_p50_ms']}, {one['itl_p99_ms']} | {p99}, {small}")
        record["clients"][n] = {**one, "vllm_0.25.1": {"tokens_per_second": rate, "itl_p99_ms": [p99, small]} if rate else None}
    if a.out:
        with open(a.out, "w") as f:
            json.dump(record, f, indent=1)


if __name__ == "__main__":
    main()
