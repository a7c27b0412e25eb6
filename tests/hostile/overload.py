#!/usr/bin/env python3
"""A live server of sixteen slots at 2, 5 and 10 times what it can do: overload.py KVASIR [--seconds N] [--json FILE] [SERVE-OPTION...]

Clients with deadlines (gRPC), clients that leave (HTTP) and patient ones; fcfs, fair and deadline; at least 95 % of the best.
The best is what 24 clients get who ask again when answered: by the same protocol, of the same server, in a turn right before
and one right after, of which the mean counts. Everybody asks the same, so that a draft is as often right in every turn. A turn
counts from its third second to its last, when as many run as can: of each whole answer that part of its time that lies there.
Beside each figure what tells the server's share from the machine's: the cores that the server took and its clients took, how
much of the machine was busy in all, and how long a step took against the 20 ms that the model takes.
"""
import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request

import results

MODEL = "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=512,step_ms=20"
OUTPUT, PATIENCE, WARM = "28-40", "6s", 3
TICKS = os.sysconf("SC_CLK_TCK")
CLIENTS = (("patient", "openai", "60s"), ("leave", "openai", PATIENCE), ("deadlines", "kvasir", PATIENCE))


def machine_seconds():
    """Of all cores: busy, and in all."""
    times = [int(t) for t in open("/proc/stat").readline().split()[1:9]]
    return (sum(times) - times[3] - times[4]) / TICKS, sum(times) / TICKS


class Server:
    def __init__(self, said, more, policy, folder):
        self.kvasir, self.time, self.folder = os.path.abspath(said.kvasir), said.seconds, folder
        self.process = subprocess.Popen(
            [self.kvasir, "serve", "--model", MODEL, "--kv-memory", "64MiB", "--threads", "1", "--max-running", "16", "--policy", policy,
             "--http-port", "0", "--grpc-port", "0", "--log-format", "json", "--no-access-log", *more], stderr=subprocess.PIPE, text=True)
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

    def turn(self, *load, timeout="60s"):
        """Whole answers a second, and where the machine's time went meanwhile."""
        clients, machine, mine, begin = os.times(), machine_seconds(), self.seconds(), time.monotonic()
        useful = self.useful(*load, timeout=timeout)
        took, after, machine_after, own = time.monotonic() - begin, os.times(), machine_seconds(), self.seconds()
        by_clients = after.children_user + after.children_system - clients.children_user - clients.children_system
        busy = (machine_after[0] - machine[0]) / max(machine_after[1] - machine[1], 1e-9)
        return {"answers_a_second": round(useful, 2), "server_cores": round((own[0] - mine[0]) / took, 2), "client_cores": round(by_clients / took, 2),
                "machine_busy": round(busy, 2), "ms_a_step": round(1e3 * took / max(own[1] - mine[1], 1), 1)}

    def useful(self, protocol, *load, timeout):
        rows = f"{self.folder}/rows.csv"
        subprocess.run([self.kvasir, "bench", f"127.0.0.1:{self.ports[protocol]}", "--protocol", protocol, *load, "--duration", f"{self.time}s",
                        "--prompts", f"{self.folder}/prompts.jsonl", "--output-len", OUTPUT, "--ignore-eos", "--timeout", timeout, "--csv", rows],
                       stdout=subprocess.DEVNULL, check=False)
        times = [(float(row["first_s"]), float(row["end_s"])) for row in csv.DictReader(open(rows)) if row["status"] == "OK"]
        within = sum(max(0, min(end, self.time) - max(first, WARM)) / (end - first) for first, end in times if end > first >= 0)
        return within / (self.time - WARM)

    def best(self, protocol):
        return self.turn(protocol, "--concurrency", "24")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(120)
        self.process.stderr.close()


def main():
    ask = argparse.ArgumentParser()
    ask.add_argument("kvasir")
    ask.add_argument("--seconds", type=int, default=15, help="of a turn")
    ask.add_argument("--json", metavar="FILE")
    said, more = ask.parse_known_args()
    points = []
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/prompts.jsonl", "w") as file:
            file.write((json.dumps({"prompt": "the same"}) + "\n") * (said.seconds * 1000))
        for policy in ("fcfs", "fair", "deadline"):
            with Server(said, more, policy, folder) as server:
                for clients, protocol, timeout in CLIENTS:
                    before = server.best(protocol)
                    print(f"{policy:9} {clients:10} best {before['answers_a_second']:5.1f}/s", flush=True)
                    for times in (2, 5, 10):
                        here = server.turn(protocol, "--rate", f"{times * before['answers_a_second']:.2f}", timeout=timeout)
                        after = server.best(protocol)
                        best = (before["answers_a_second"] + after["answers_a_second"]) / 2
                        point = {"policy": policy, "clients": clients, "times": times, "share": round(here["answers_a_second"] / best, 3), "best": round(best, 2), **here}
                        points.append(point)
                        print(f"{policy:9} {clients:10} {times:2} x {point['share']:.3f} of {best:5.1f}/s: server {here['server_cores']}, clients "
                              f"{here['client_cores']} cores, machine {100 * here['machine_busy']:.0f} % busy, {here['ms_a_step']} ms a step", flush=True)
                        before = after
    worst = min(points, key=lambda p: p["share"])
    print(f"at worst {worst['share']:.3f}: {worst['policy']}, {worst['clients']}, {worst['times']} times; {sum(p['share'] >= 0.95 for p in points)} of {len(points)} hold")
    if said.json:
        results.save(said.json, "answers in time at 2, 5 and 10 times what a server of 16 slots can do, against its best; the bar is .95", options=more, points=points)
    return worst["share"] < 0.95


if __name__ == "__main__":
    sys.exit(main())
