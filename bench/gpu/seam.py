#!/usr/bin/env python3
"""The whole model on the GPU against the float32 forward on the CPU, through the server.

usage: seam.py KVASIR MODEL IDS.json [OUT.json [TOKENS [COMMIT]]]      (OUT.json: bench/results/gpu-seam.json)

Starts `kvasir serve` once with --device cuda and once with --device cpu --precise, teacher-forces the same
windows of token ids through both (/v1/completions with echo and logprobs), and compares every position's best
token. Then it measures decoding on the GPU. Needs only Python's own library.
"""
import json
import math
import statistics
import sys
import threading
import time
import urllib.request

from served import RESULTS, driver, start

WINDOW = 512


class Server:
    def __init__(self, kvasir, model, *flags):
        self.process, self.log = start(kvasir, model, "--no-prefix-cache", *flags)
        self.url = f"http://127.0.0.1:{self.log[-1]['http_port']}"
        threading.Thread(target=lambda: [None for _ in self.process.stderr], daemon=True).start()

    def complete(self, **body):
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def stop(self):
        self.process.terminate()
        self.process.wait(30)


def forced(server, ids):
    """For each position but the first: (best token, its margin over the second, log-probability of the real one)."""
    out = []
    for begin in range(0, len(ids), WINDOW):
        window = ids[begin:begin + WINDOW]
        if len(window) < 2:
            break
        lp = server.complete(prompt=window, max_tokens=0, echo=True, logprobs=2)["choices"][0]["logprobs"]
        for real, top in zip(lp["token_logprobs"][1:], lp["top_logprobs"][1:]):
            (best, a), (_, b) = sorted(top.items(), key=lambda kv: -kv[1])[:2]
            out.append((best, a - b, real))
    return out


def decode(server, batch, tokens=128):
    """Output tokens a second with `batch` requests at once: the first time, when graphs are made, and after."""
    def one():
        server.complete(prompt="Once upon a time", max_tokens=tokens, temperature=0, ignore_eos=True)
    one()
    rates = []
    for _ in range(5):
        threads = [threading.Thread(target=one) for _ in range(batch)]
        begin = time.perf_counter()
        [t.start() for t in threads]
        [t.join() for t in threads]
        rates.append(batch * tokens / (time.perf_counter() - begin))
    return {"first": rates[0], "warm": statistics.median(rates[1:])}


def main():
    kvasir, model, ids_file = sys.argv[1:4]
    out_file = sys.argv[4] if len(sys.argv) > 4 else RESULTS / "gpu-seam.json"
    count = int(sys.argv[5]) if len(sys.argv) > 5 else 2000
    data = json.load(open(ids_file))
    ids = (data if isinstance(data, list) else data["ids"])[:count + count // WINDOW + 1]
    options = sys.argv[7:]
    gpu = Server(kvasir, model, "--device", "cuda", *options)
    got = forced(gpu, ids)
    rates = {b: decode(gpu, b) for b in (1, 16, 64)}
    device = next((e.get("device") for e in gpu.log if e["message"] == "gpu"), None)
    load = next(e["seconds"] for e in gpu.log if e["message"] == "ready")
    gpu.stop()
    cpu = Server(kvasir, model, "--device", "cpu", "--precise")
    want = forced(cpu, ids)
    cpu.stop()
    misses = [(w[1], g[0], w[0]) for g, w in zip(got, want) if g[0] != w[0]]
    result = {
        "device": device, "driver": driver(), "commit": sys.argv[6] if len(sys.argv) > 6 else "",
        "tokens": len(want), "agreement": 1 - len(misses) / len(want),
        "misses": len(misses), "widest_miss": max((m[0] for m in misses), default=0.0),
        "mean_logprob_difference": sum(abs(g[2] - w[2]) for g, w in zip(got, want)) / len(want),
        "decode_tokens_per_second": rates, "load_seconds": load,
        "perplexity": {name: math.exp(-statistics.mean(x[2] for x in run)) for name, run in (("gpu", got), ("float32", want))},
        "command": " ".join(["bench/gpu/seam.py KVASIR MODEL tests/model/fixtures/gpl3_20k_ids.json OUT.json", *sys.argv[5:]]),
    }
    json.dump(result, open(out_file, "w"), indent=1)
    print(json.dumps(result, indent=1))


main()
