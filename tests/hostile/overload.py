#!/usr/bin/env python3
"""A live server of sixteen slots at 2, 5 and 10 times what it can do: what is in time, against its best. overload.py KVASIR [SECONDS]

Clients with deadlines (gRPC), clients that leave (HTTP) and patient ones; fcfs, fair and deadline. At least 95 % of the best.
"""
import json
import os
import subprocess
import sys
import tempfile

KVASIR, SECONDS = os.path.abspath(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20
MODEL = "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=512,step_ms=20"
OUTPUT, PATIENCE = 34, "6s"


class Server:
    def __init__(self, policy):
        self.process = subprocess.Popen(
            [KVASIR, "serve", "--model", MODEL, "--kv-memory", "64MiB", "--threads", "1", "--max-running", "16", "--policy", policy,
             "--http-port", "0", "--grpc-port", "0", "--log-format", "json", "--no-access-log"], stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            event = json.loads(line)
            if event["message"] == "ready":
                self.ports = {"kvasir": event["grpc_port"], "openai": event["http_port"]}
                return
        sys.exit("the server did not become ready")

    def load(self, protocol, rate=None, concurrency=None, timeout="60s"):
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            how = ["--rate", f"{rate:.2f}"] if rate else ["--concurrency", str(concurrency)]
            subprocess.run([KVASIR, "bench", f"127.0.0.1:{self.ports[protocol]}", "--protocol", protocol, *how,
                            "--duration", f"{SECONDS}s", "--input-len", "2", "--output-len", str(OUTPUT), "--ignore-eos",
                            "--timeout", timeout, "--json", report.name], stdout=subprocess.DEVNULL, check=False)
            return json.load(open(report.name))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(120)
        self.process.stderr.close()


def in_time(report):
    """Whole answers a second."""
    point = report["points"][0] if "points" in report else report
    figures = point.get("figures", point)
    return figures["requests_per_second"]


def main():
    worst = 1.0
    for policy in ("fcfs", "fair", "deadline"):
        with Server(policy) as server:
            best = in_time(server.load("openai", concurrency=24))
            for clients, protocol, timeout in (("patient", "openai", "60s"), ("leave", "openai", PATIENCE), ("deadlines", "kvasir", PATIENCE)):
                shares = [in_time(server.load(protocol, rate=times * best, timeout=timeout)) / best for times in (2, 5, 10)]
                worst = min(worst, *shares)
                print(f"{policy:9} {clients:10} best {best:5.1f}/s: " + "  ".join(f"{t} x {s:.3f}" for t, s in zip((2, 5, 10), shares)), flush=True)
    return worst < 0.95


if __name__ == "__main__":
    sys.exit(main())
