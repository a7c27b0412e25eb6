#!/usr/bin/env python3
"""A whole model on the GPU through the server: step times of decodes, time to the first token, throughput.

The model is a dummy of Llama-3.1-8B's shape unless --model says otherwise (random weights, made on the device). Beside
each figure stands what vLLM 0.25.1 reached on an H200 with dummy weights of that shape, and the floor: the time in
which weights and cache are read at 4.16 TB/s, or the arithmetic done, whichever is longer. Needs only Python's own
library.

A decode step is what passes between the ends of two steps in which all sequences decode and nothing else happens, by
the server's own trace, so whatever the host does between steps is in it. Time to the first token is a request's whole
round trip over HTTP.
"""
import argparse
import http.client
import json
import os
import random
import re
import statistics
import sys
import tempfile
import threading
import time

from served import RESULTS, command, driver, start

LLAMA_8B = ("dummy:llama,name=llama-3.1-8b,layers=32,hidden=4096,heads=32,kv_heads=8,head_dim=128,ffn=14336,"
            "vocab=128256,context=16384,type=bf16")
# vLLM and floor by batch, by prompt length, and by prompt and output length; with FP8, weights and cache are that.
FP8_DECODE = {1: (3.61, 1.95), 8: (None, 2.06), 32: (None, 2.48), 64: (5.71, 3.03), 128: (None, 4.13), 256: (13.55, 6.33)}
FP8_TTFT = {1024: (19.1, None), 8192: (139, None)}
FP8_OFFLINE = {(128, 128): 25805, (1000, 1000): 14086, (2048, 128): 3242}
DECODE = {1: (4.94, 3.64), 8: (5.24, 3.88), 32: (6.28, 4.71), 64: (7.57, 5.81), 128: (10.44, 8.00), 256: (17.40, 12.40)}
TTFT = {128: (9.9, 3.6), 1024: (28.2, 18.5), 8192: (212, 167)}
OFFLINE = {(128, 128): 17346, (1000, 1000): 8825, (2048, 128): 2056}


class Server:
    def __init__(self, a):
        self.trace = tempfile.NamedTemporaryFile(suffix=".json")
        flags = ["--device", "cuda", "--no-access-log", "--max-running", str(a.max_running),
                 "--max-tokens-per-step", str(a.max_tokens_per_step), "--max-step-ms", "0", "--max-waiting", "16384",
                 "--max-waiting-tokens", "100000000", "--max-wait", "24h", "--http-threads", "4", "--step-trace", self.trace.name,
                 *([] if a.shared else ["--no-prefix-cache"]), *a.serve.split()]
        began = time.perf_counter()
        self.process, log = start(a.kvasir, a.model, *flags)
        self.port, self.device = log[-1]["http_port"], next((e["device"] for e in log if "device" in e), None)
        self.start_seconds = time.perf_counter() - began
        threading.Thread(target=self.listen, daemon=True).start()
        self.random = random.Random(1)
        self.vocab = int(re.search(r"vocab=(\d+)", a.model).group(1)) if "vocab=" in a.model else 512
        self.temperature = a.temperature
        self.more = json.loads(a.ask)

    def listen(self):
        for line in self.process.stderr:
            if '"level":"warn"' in line or '"level":"error"' in line:
                print(line, file=sys.stderr, end="")

    def ask(self, connection, prompt, tokens):
        connection.request("POST", "/v1/completions", json.dumps(
            {"prompt": prompt, "max_tokens": tokens, "temperature": self.temperature, "ignore_eos": True, **self.more}),
            {"Content-Type": "application/json"})
        answer = connection.getresponse()
        body = json.loads(answer.read())
        if answer.status != 200 or body["usage"]["completion_tokens"] != tokens:
            print(f"a request failed: {answer.status} {body}", file=sys.stderr)
            self.process.terminate()
            os._exit(1)  # from whatever thread: figures without it would be of something else

    def prompt(self, length):
        return self.random.choices(range(260, self.vocab), k=length)

    def all_at_once(self, requests, clients, length, tokens, shared=()):
        """Seconds for all of them."""
        prompts = [[*shared, *self.prompt(length - len(shared))] for _ in range(requests)]
        lock = threading.Lock()

        def client():
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
            while True:
                with lock:
                    if not prompts:
                        return
                    prompt = prompts.pop()
                self.ask(connection, prompt, tokens)

        threads = [threading.Thread(target=client) for _ in range(min(clients, requests))]
        began = time.perf_counter()
        [t.start() for t in threads]
        [t.join() for t in threads]
        return time.perf_counter() - began

    def first_token(self, length, times):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        took = []
        for _ in range(times + 2):
            prompt = self.prompt(length)
            began = time.perf_counter()
            self.ask(connection, prompt, 1)
            took.append(1e3 * (time.perf_counter() - began))
        return statistics.median(took[2:])

    def stop(self):
        self.process.terminate()
        self.process.wait(60)
        events = json.loads(open(self.trace.name).read())
        return [e for e in events if e["name"] == "step"]


def decode_step(steps, batch):
    """Of the longest run of steps with `batch` decodes alone: milliseconds from end to end, and what of it is whose."""
    runs, run = [[]], []
    for s in steps:
        if s["args"]["decodes"] == batch and s["args"]["prefills"] == 0:
            run.append(s)
        else:
            runs.append(run)
            run = []
    run = max([*runs, run], key=len)[3:]  # the first ones capture graphs
    if len(run) < 8:
        return None
    ends = [s["ts"] + s["dur"] for s in run]
    between = [1e-3 * (b - a) for a, b in zip(ends, ends[1:])]
    of = {part: round(statistics.median(s["args"][part] for s in run), 1) for part in ("plan_us", "run_us", "advance_us")}
    return {"ms": round(statistics.median(between), 3), "steps": len(run), **of}


def beside(ours, theirs, less_is_better=True):
    if theirs is None:
        return ""
    return f"{theirs / ours if less_is_better else ours / theirs:.2f}"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kvasir", help="the program, built with -DKVASIR_CUDA=ON")
    p.add_argument("--model", default=LLAMA_8B, help="what to serve (default: a dummy of Llama-3.1-8B's shape)")
    p.add_argument("--batches", default="1,8,32,64,128,256", help="decodes at once; empty: none")
    p.add_argument("--context", type=int, default=1024, help="prompt of those decodes (default 1024)")
    p.add_argument("--shared", type=int, default=0, help="tokens of it that they all begin with (default none)")
    p.add_argument("--prompts", default="128,1024,8192", help="lengths for the time to the first token; empty: none")
    p.add_argument("--offline", default="128x128:2048",
                   help="PROMPTxOUTPUT:REQUESTS, by commas; empty: none (default 128x128:2048)")
    p.add_argument("--max-running", type=int, default=512)
    p.add_argument("--max-tokens-per-step", type=int, default=8192)
    p.add_argument("--temperature", type=float, default=0)
    p.add_argument("--ask", default="{}", help="more fields of each request, as JSON")
    p.add_argument("--serve", default="", help="more options of kvasir serve, in one word")
    p.add_argument("--commit", default="", help="what was built, for the record")
    p.add_argument("--out", default=RESULTS / "gpu-whole-model.json", help="the JSON record (bench/results/gpu-whole-model.json); empty: none")
    a = p.parse_args()
    fp8 = "--quantize fp8" in a.serve
    known = a.model.rsplit(",type=", 1)[0] == LLAMA_8B.rsplit(",type=", 1)[0] and (a.context, a.shared) == (1024, 0)

    decode, ttft, throughput = (FP8_DECODE, FP8_TTFT, FP8_OFFLINE) if fp8 else (DECODE, TTFT, OFFLINE)

    server = Server(a)
    offline = []
    for word in filter(None, a.offline.split(",")):
        length, tokens, requests = map(int, re.fullmatch(r"(\d+)x(\d+):(\d+)", word).groups())
        offline.append((length, tokens, requests))
    first = {n: server.first_token(n, 10) for n in map(int, filter(None, a.prompts.split(",")))}
    batches = [int(b) for b in a.batches.split(",") if b]
    shared = server.prompt(a.shared)
    if shared:
        server.all_at_once(1, 1, a.context, 1, shared)  # the others find it in the cache
    for b in batches:
        server.all_at_once(b, b, a.context, 128, shared)
    rates = {}
    for n, m, r in offline:
        server.all_at_once(min(r, a.max_running), 2 * a.max_running, n, min(m, 16))  # graphs of all sizes are made
        rates[n, m] = r * m / server.all_at_once(r, 2 * a.max_running, n, m)
    steps = server.stop()
    decodes = {b: decode_step(steps, b) for b in batches}

    print(f"{server.device}: {a.model}; ready after {server.start_seconds:.1f} s")
    print("decode batch | ms a step | vLLM | vLLM / ours | floor | host: plan, advance us")
    for b, d in decodes.items():
        theirs, floor = decode.get(b, (None, None)) if known else (None, None)
        if d is None:
            print(f"{b:12} | too few such steps")
        else:
            print(f"{b:12} | {d['ms']:9.3f} | {theirs} | {beside(d['ms'], theirs)} | {floor} | "
                  f"{d['plan_us']}, {d['advance_us']}")
    print("prompt | ms to first token | vLLM | vLLM / ours | floor")
    for n, ms in first.items():
        theirs, floor = ttft.get(n, (None, None)) if known else (None, None)
        print(f"{n:6} | {ms:17.2f} | {theirs} | {beside(ms, theirs)} | {floor}")
    print("offline | output tokens/s | vLLM | ours / vLLM")
    for (n, m), rate in rates.items():
        theirs = throughput.get((n, m)) if known else None
        print(f"{n}/{m} | {rate:.0f} | {theirs} | {beside(rate, theirs, False)}")
    if a.out:
        record = {
            "device": server.device, "driver": driver(), "commit": a.commit,
            "command": command("bench/gpu/whole_model.py"),
            "model": a.model, "ready_seconds": round(server.start_seconds, 2), "decode": decodes,
            "first_token_ms": {n: round(ms, 2) for n, ms in first.items()},
            "offline": {f"{n}x{m}": round(rate) for (n, m), rate in rates.items()},
            "vllm_0.25.1": {"decode_ms": {b: v for b, (v, _) in decode.items()},
                            "first_token_ms": {n: v for n, (v, _) in ttft.items()},
                            "offline": {f"{n}x{m}": v for (n, m), v in throughput.items()}} if known else None,
        }
        with open(a.out, "w") as f:
            json.dump(record, f, indent=1)


if __name__ == "__main__":
    main()
