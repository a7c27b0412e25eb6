#!/usr/bin/env python3
"""A live server of sixteen slots at 2, 5 and 10 times what it can do: what is in time, against its best. overload.py KVASIR [SECONDS]

Clients with deadlines (gRPC), clients that leave (HTTP) and patient ones; fcfs, fair and deadline. At least 95 % of the best.
Beside each figure what tells the server's share from the machine's: the cores that the server took and its clients took, how
much of the machine was busy in all, and how long a step took against the 20 ms that the model takes.
Nothing is drafted: a dummy repeats itself, and how many drafts are right would say what the best is (24 to 34 a second), not its slots.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request

KVASIR, SECONDS = os.path.abspath(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20
MODEL = "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=512,step_ms=20"
OUTPUT, PATIENCE = 34, "6s"
TICKS = os.sysconf("SC_CLK_TCK")


def machine_seconds():
    """Of all cores: busy, and in all."""
    times = [int(t) for t in open("/proc/stat").readline().split()[1:9]]
    return (sum(times) - times[3] - times[4]) / TICKS, sum(times) / TICKS


class Server:
    def __init__(self, policy):
        self.process = subprocess.Popen(
            [KVASIR, "serve", "--model", MODEL, "--kv-memory", "64MiB", "--threads", "1", "--max-running", "16", "--max-draft", "0", "--policy", policy,
             "--http-port", "0", "--grpc-port", "0", "--log-format", "json", "--no-access-log"], stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            event = json.loads(line)
            if event["message"] == "ready":
                self.ports = {"kvasir": event["grpc_port"], "openai": event["http_port"]}
                return
        sys.exit("the server did not become ready")

    def seconds(self):
        """Of a core, that the server has taken; steps that it has made, each of which takes 20 ms at least."""
        stat = open(f"/proc/{self.process.pid}/stat").read().rsplit(")", 1)[1].split()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['openai']}/metrics", timeout=60) as answer:
            steps = re.search(rb"^kvasir_steps_total\S* (\S+)$", answer.read(), re.M)
        return (int(stat[11]) + int(stat[12])) / TICKS, float(steps.group(1)) if steps else 0.0

    def shares(self, *how, **more):
        """Whole answers a second, and where the machine's time went meanwhile."""
        clients, machine, mine, begin = os.times(), machine_seconds(), self.seconds(), time.monotonic()
        useful = in_time(self.load(*how, **more))
        took, after, machine_after, own = time.monotonic() - begin, os.times(), machine_seconds(), self.seconds()
        by_clients = after.children_user + after.children_system - clients.children_user - clients.children_system
        steps = own[1] - mine[1]
        busy = (machine_after[0] - machine[0]) / max(machine_after[1] - machine[1], 1e-9)
        return useful, (f"server {(own[0] - mine[0]) / took:.2f}, clients {by_clients / took:.2f} cores, machine {100 * busy:.0f} % busy, "
                        f"{1e3 * took / max(steps, 1):.1f} ms a step")

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
            best, where = server.shares("openai", concurrency=24)
            print(f"{policy:9} best {best:5.1f}/s: {where}", flush=True)
            for clients, protocol, timeout in (("patient", "openai", "60s"), ("leave", "openai", PATIENCE), ("deadlines", "kvasir", PATIENCE)):
                for times in (2, 5, 10):
                    useful, where = server.shares(protocol, rate=times * best, timeout=timeout)
                    worst = min(worst, useful / best)
                    print(f"{policy:9} {clients:10} {times:2} x {useful / best:.3f} of {best:5.1f}/s: {where}", flush=True)
    return worst < 0.95


if __name__ == "__main__":
    sys.exit(main())
