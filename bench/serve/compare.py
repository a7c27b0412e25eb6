#!/usr/bin/env python3
"""kvasir serve beside llama-server on the same files, by turns in one run: bench/serve/compare.py [--rounds N]

Closed loop: 32 clients, 16 running, 128 words in and 128 tokens out. Open loop: Poisson at 0.6 requests a second of the
same size. Each server is started anew for each round, so nothing is left in its cache. Medians of the rounds; the result
is bench/results/serve_vs_llamacpp.json."""
import argparse
import os
import statistics

from servers import Server, about, default_model, figures_of, peers, save

SIZE = ["--input-len", 128, "--output-len", 128]
LOADS = {
    "closed": ["--concurrency", 32, "--requests", 64, "--seed", 11],
    "open": ["--rate", 0.6, "--requests", 40, "--seed", 12],
}
BARS = {"closed": {"output_tokens_per_second": 2.5}, "open": {"itl_ms p99": 0.25, "ttft_ms p50": 1.0}}


def one_round(engine, model, build, loads):
    result = {}
    for name in loads:
        with Server(engine, model, 16, build) as server:
            server.bench("--concurrency", 4, "--requests", 4, "--input-len", 32, "--output-len", 16, "--seed", 999)  # warm
            before = server.processor_seconds()
            report = server.bench(*LOADS[name], *SIZE)
            result[name] = figures_of(report) | {
                "itl_percentiles_ms": [round(v, 2) for v in report["figures"]["itl_ms"]["percentiles"]],
                "processor_seconds": round(server.processor_seconds() - before, 1),
                "resident_mb": server.resident_mb(), "seconds_to_ready": round(server.seconds_to_ready, 2)}
        f = result[name]
        print(f"  {name:6} {engine:9} {f['output_tokens_per_second']:7.1f} tok/s   ITL p50 {f['itl_ms']['p50']:7.1f} "
              f"p99 {f['itl_ms']['p99']:7.1f}   TTFT p50 {f['ttft_ms']['p50']:8.1f} ms   {f['failed']} failed", flush=True)
    return result


def value(run, key):
    for part in key.split():
        run = run[part]
    return run


def median_of(rounds, load, engine, key):
    return statistics.median(value(r[engine][load], key) for r in rounds)


def summary(rounds, loads):
    keys = ["output_tokens_per_second", "itl_ms p50", "itl_ms p95", "itl_ms p99", "itl_ms max", "ttft_ms p50", "ttft_ms p99",
            "processor_seconds", "resident_mb", "seconds_to_ready"]
    out = {}
    for load in loads:
        out[load] = {k: {e: median_of(rounds, load, e, k) for e in ("kvasir", "llama.cpp")} for k in keys}
        for k, bar in BARS[load].items():
            ours, theirs = out[load][k]["kvasir"], out[load][k]["llama.cpp"]
            ratio = ours / theirs
            met = ratio >= bar if bar > 1 else ratio <= bar
            out[load][k] |= {"ratio": round(ratio, 3), "bar": bar, "met": met}
            print(f"  {load} {k}: {ours:.1f} against {theirs:.1f}, ratio {ratio:.3f} (bar {'at least' if bar > 1 else 'at most'} "
                  f"{bar}: {'met' if met else 'MISSED'})")
    return out


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--model", action="append", help="a GGUF file; more than once for several (default: Q4_1 and Q4_0)")
    a.add_argument("--load", action="append", choices=list(LOADS), help="only this one")
    a.add_argument("--quick", action="store_true", help="half of the requests, one round: to see that it works")
    o = a.parse_args()
    if o.quick:
        o.rounds = 1
        for load in LOADS.values():
            load[3] //= 2
    built = peers()
    models = o.model or [default_model(), built["q4_0"]]
    loads = o.load or list(LOADS)
    result = about("kvasir serve beside llama-server (llama.cpp of llama-cpp-python 0.3.36)", "bench/serve/compare.py")
    result |= {"rounds": o.rounds, "loads": {k: " ".join(map(str, v + SIZE)) for k, v in LOADS.items()}, "models": {}}
    for model in models:
        name = os.path.basename(model).removesuffix(".gguf")
        print(name, flush=True)
        rounds = []
        for turn in range(o.rounds):
            order = ["kvasir", "llama.cpp"] if turn % 2 == 0 else ["llama.cpp", "kvasir"]
            rounds.append({e: one_round(e, model, built["build"], loads) for e in order})
        result["models"][name] = {"median": summary(rounds, loads), "rounds": rounds}
    save("serve_vs_llamacpp.json", result)


if __name__ == "__main__":
    main()
