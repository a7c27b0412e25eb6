#!/usr/bin/env python3
"""An open loop at 70% of what the server carries, then each answer of a sample again alone: bench/serve/soak.py

A sweep finds the highest rate within the SLO; the long run follows at 70% of it and must end with no error and every
compared answer the same. Short runs over the other protocols, and one of the same command against llama-server, come
after it. The result is bench/results/serve_soak.json."""
import argparse
import sys

from servers import Server, about, default_model, figures_of, peers, save

SIZE = ["--input-len", "32-160", "--output-len", "32-160"]
SLO = ["--slo", "ttft=5s,itl=150ms", "--slo-share", 0.9]


def run(server, rate, duration, verify, protocol="openai"):
    report = server.bench("--rate", rate, "--duration", duration, "--verify", verify, *SIZE, *SLO, protocol=protocol)
    v = report.get("verification", {})
    kept = figures_of(report) | {"command": report["command"].split(" --json")[0], "partial": report["figures"]["partial"],
                                 "verification": {k: v.get(k) for k in ("compared", "equal", "near_ties", "different", "failed")},
                                 "resident_mb": server.resident_mb()}
    print(f"  {server.engine:9} {protocol:12} {duration:5} at {rate:.2f}/s: {kept['succeeded']} answered, {kept['failed']} failed, "
          f"{kept['output_tokens_per_second']:.0f} tok/s, ITL p99 {kept['itl_ms']['p99']:.0f} ms; {kept['verification']}; "
          f"{kept['resident_mb']} MB", flush=True)
    return kept


def right(result):
    """No error, and nothing that differs but at a near-tie."""
    v = result["verification"]
    return not result["failed"] and not result["partial"] and v["compared"] and v["equal"] + v["near_ties"] == v["compared"]


def grpc_view(server):
    """The same server through its gRPC port."""
    server.log.seek(0)
    text = server.log.read().decode(errors="replace")
    server.port = int(text.split("grpc_port")[1].lstrip('"=: ').split(",")[0].split()[0].rstrip('"}'))
    return server


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--duration", default="10m", help="of the long run")
    a.add_argument("--short", default="1m", help="of the others")
    a.add_argument("--verify", type=int, default=100)
    o = a.parse_args()
    result = about("open loop at 70% of capacity, and the answers under load against those alone", "bench/serve/soak.py")
    with Server("kvasir", default_model(), 64) as server:
        sweep = server.bench("--sweep", "rate", "--sweep-low", 0.25, "--duration", "20s", *SIZE, *SLO)
        capacity = sweep["sweep"]["best"]
        rate = round(0.7 * capacity, 3)
        print(f"  capacity {capacity:.2f} requests a second within {SLO[1]}", flush=True)
        if not rate:
            sys.exit("no rate was within the SLO: the machine is too busy for this")
        result |= {"capacity": capacity, "slo": SLO[1], "resident_mb_before": server.resident_mb(),
                   "long": run(server, rate, o.duration, o.verify)}
        grpc_view(server)
        result["others"] = {p: run(server, rate, o.short, 20, p) for p in ("kvasir", "ppl", "vllm")}
    with Server("llama.cpp", default_model(), 16, peers()["build"]) as server:
        result["llama-server"] = run(server, round(rate / 4, 3), o.short, 10)
    result["right"] = all(map(right, [result["long"], *result["others"].values()]))
    save("serve_soak.json", result)
    sys.exit(0 if result["right"] else "something failed or differs")


if __name__ == "__main__":
    main()
