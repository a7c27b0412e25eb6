#!/usr/bin/env python3
"""Everything at once beside well-behaved clients of five protocols: chaos.py KVASIR [--json FILE] [SERVE-OPTION...]

KVASIR_CHAOS_SECONDS says how long (60; an hour in ./test long); KVASIR_CHAOS_MODEL what is served. On GPUs, for example:
chaos.py KVASIR --device cuda --ranks 2 --batch-invariant (else answers in other company may differ in near ties). None of the behaving clients' requests may fail, and none of
their answers differ by a byte from what the server said alone. Rounds beside the hostile take turns with calm ones of the same
five clients at once, so that what else the machine does is in both: the median of their p99s is at most twice that of the calm
ones (KVASIR_QUIET) or, on a machine that others use, twice the slowest calm one. Afterwards all pages are back, memory is, and
SIGTERM ends it with 0.
"""
import argparse
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

import results

ASK = argparse.ArgumentParser()
ASK.add_argument("kvasir")
ASK.add_argument("--json", metavar="FILE")
SAID, MORE = ASK.parse_known_args()
KVASIR = os.path.abspath(SAID.kvasir)
SECONDS = int(os.environ.get("KVASIR_CHAOS_SECONDS", "60"))
MODEL = os.environ.get("KVASIR_CHAOS_MODEL") or "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=512,step_ms=5"
PROTOCOLS = ("kvasir", "ppl", "vllm", "openai", "openai-chat")
REQUESTS = 40  # of a round
PHASES = 6  # hostile ones, each followed by a calm round


def make_key(folder, tenant, role="user"):
    said = subprocess.run([KVASIR, "keys", "add", "--keys", f"{folder}/keys.json", "--tenant", tenant, "--role", role],
                          capture_output=True, text=True, check=True)
    return re.search("kvasir-[0-9a-f]{64}", said.stdout + said.stderr).group(0)


class Server:
    def __init__(self, folder):
        self.process = subprocess.Popen(
            [KVASIR, "serve", "--model", MODEL, "--kv-memory", "64MiB", "--threads", "1", "--max-running", "32", "--policy", "fair",
             "--keys", f"{folder}/keys.json", "--http-port", "0", "--grpc-port", "0", "--log-format", "json", "--no-access-log", *MORE],
            stderr=open(f"{folder}/log", "w"))
        self.ports = self.find_ports(f"{folder}/log")

    def find_ports(self, log):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for line in open(log):
                if '"message":"ready"' in line and line.endswith("\n"):
                    event = json.loads(line)
                    return {"http": event["http_port"], "grpc": event["grpc_port"]}
            time.sleep(0.05)
        sys.exit(f"the server did not become ready: {open(log).read()}")

    def memory(self):
        return int(re.search(r"VmRSS:\s+(\d+)", open(f"/proc/{self.process.pid}/status").read()).group(1)) / 1024


def behave(server, key, protocol, folder):
    """One round: each request's answer by its prompt, the p99 in ms, and how many failed and why."""
    port = server.ports["http" if protocol.startswith("openai") else "grpc"]
    answers, report = (f"{folder}/{protocol}.{what}" for what in ("answers", "json"))
    run = subprocess.run(
        [KVASIR, "bench", f"127.0.0.1:{port}", "--protocol", protocol, "--concurrency", "1", "--requests", str(REQUESTS), "--input-len",
         "10-60", "--output-len", "5-30", "--ignore-eos", "--timeout", "60s", "--seed", str(7 + PROTOCOLS.index(protocol)), "--answers",
         answers, "--json", report], capture_output=True, text=True, env={**os.environ, "KVASIR_API_KEY": key}, check=False)
    if not os.path.exists(report):
        return {}, 0, REQUESTS, run.stderr[-300:]
    figures = json.load(open(report))["figures"]
    rows = [json.loads(line) for line in open(answers)]
    os.remove(report)
    return {r["prompt"]: r["answer"] for r in rows}, figures["e2e_ms"]["p99"], figures["failed"], figures.get("errors", "")


def quiet_down(server, key):
    """Until the server runs nothing that the hostile asked for."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        ask = urllib.request.Request(f"http://127.0.0.1:{server.ports['http']}/load", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(ask, timeout=60) as answer:
            if json.load(answer).get("server_load", 0) == 0:
                return
        time.sleep(0.1)


class Hostile:
    """What strangers and one tenant with a key do, each until told to stop."""

    def __init__(self, server, key):
        self.server, self.key, self.over, self.count = server, key, threading.Event(), 0
        ways = [self.flood] * 6 + [self.leave, self.leave, self.tokenize, self.schema, self.chunks, self.garbage_http, self.garbage_grpc,
                                   self.idle, self.without_a_key, self.slow_reader]
        self.threads = [threading.Thread(target=self.repeat, args=(way, random.Random(i)), daemon=True) for i, way in enumerate(ways)]
        for t in self.threads:
            t.start()

    def repeat(self, way, chance):
        while not self.over.is_set():
            try:
                way(chance)
            except (OSError, urllib.error.URLError, ValueError):
                pass
            self.count += 1
            self.over.wait(0.005)

    def stop(self):
        self.over.set()
        for t in self.threads:
            t.join(90)

    def post(self, path, body, timeout=20, key=None):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or self.key}"}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{self.server.ports['http']}{path}", data, headers), timeout=timeout) as r:
            return r.read()

    def connect(self, port="http", timeout=5):
        return socket.create_connection(("127.0.0.1", self.server.ports[port]), timeout=timeout)

    def flood(self, chance):
        self.post("/v1/completions", {"prompt": "x" * chance.randrange(1, 400), "max_tokens": 100, "ignore_eos": True, "n": chance.randrange(1, 5)})

    def leave(self, chance):
        body = json.dumps({"prompt": "leaves", "max_tokens": 1000, "stream": True, "ignore_eos": True})
        with self.connect() as s:
            s.sendall((f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.key}\r\nContent-Type: application/json\r\n"
                       f"Content-Length: {len(body)}\r\n\r\n{body}").encode())
            time.sleep(chance.random() * 0.2)

    def slow_reader(self, chance):
        body = json.dumps({"prompt": "slow", "max_tokens": 1500, "stream": True, "ignore_eos": True, "logprobs": 5})
        with self.connect() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            s.sendall((f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.key}\r\nContent-Type: application/json\r\n"
                       f"Content-Length: {len(body)}\r\n\r\n{body}").encode())
            for _ in range(chance.randrange(1, 5)):
                s.recv(100)
                time.sleep(0.3)

    def tokenize(self, chance):
        self.post("/tokenize", {"prompt": "word " * chance.randrange(1000, 200000)})

    def schema(self, chance):
        schema = chance.choice([{"type": "integer", "multipleOf": 9999991}, {"type": "string", "pattern": "(a|a)*(b|b)*$" * 20},
                                {"allOf": [{"multipleOf": p} for p in (9973, 9967, 9949)]}])
        self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "response_format":
                  {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})

    def chunks(self, chance):
        with self.connect() as s:
            s.sendall((f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.key}\r\n"
                       "Transfer-Encoding: chunked\r\n\r\n1").encode())
            for _ in range(chance.randrange(1, 200)):
                s.sendall(b";a=" + b"b" * 1000)

    def garbage_http(self, chance):
        with self.connect() as s:
            s.sendall(chance.randbytes(chance.randrange(1, 3000)) + b"\r\n\r\n")
            s.recv(1000)

    def garbage_grpc(self, chance):
        with self.connect("grpc") as s:
            s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + chance.randbytes(chance.randrange(1, 2000)))
            s.recv(1000)

    def idle(self, chance):
        held = [self.connect(chance.choice(("http", "grpc"))) for _ in range(50)]
        self.over.wait(2)
        for s in held:
            s.close()

    def without_a_key(self, chance):
        self.post("/v1/completions", b"{" + b" " * chance.randrange(1, 1 << 20), key="wrong")


def main():
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        good, bad, looks = make_key(folder, "good"), make_key(folder, "bad"), make_key(folder, "looks", "metrics")
        server = Server(folder)
        resting = server.memory()
        usual, right = {}, {}

        def round_of(protocol, check):
            answers, p99, failed, why = behave(server, good, protocol, folder)
            if failed:
                failures.append(f"{protocol}: {failed} failed: {why}")
            if check is None:
                right[protocol], usual[protocol] = answers, p99
                return
            differ = sum(right[protocol].get(prompt) != answer for prompt, answer in answers.items())
            if differ or (not failed and len(answers) != len(right[protocol])):
                failures.append(f"{protocol}: {differ} of {len(answers)} answers differ from those of a server alone")
            check.setdefault(protocol, []).append(p99)

        def all_protocols(check, until):
            def rounds(protocol):
                while True:
                    round_of(protocol, check)
                    if time.monotonic() >= until or len(failures) > 20:
                        return
            clients = [threading.Thread(target=rounds, args=(p,)) for p in PROTOCOLS]
            for c in clients:
                c.start()
            for c in clients:
                c.join()

        all_protocols(None, 0)
        end, acts, calm, beside = time.monotonic() + SECONDS, 0, {p: [usual[p]] for p in PROTOCOLS}, {}
        begin = time.monotonic()
        while not failures and time.monotonic() < end:
            print(f"{time.monotonic() - begin:6.0f} s: {sum(map(len, beside.values()))} rounds beside {acts} hostile acts, {server.memory():.0f} MiB", flush=True)
            hostile = Hostile(server, bad)
            all_protocols(beside, min(end, time.monotonic() + max(10, SECONDS / PHASES)))
            hostile.stop()
            acts += hostile.count
            quiet_down(server, looks)
            all_protocols(calm, 0)
        table = []
        for p in PROTOCOLS if beside else ():
            p99, usually = statistics.median(beside[p]), statistics.median(calm[p])
            bound = 2 * (usually if os.environ.get("KVASIR_QUIET") else max(calm[p]))
            print(f"{p:12} {len(beside[p]):4} rounds; p99 {usually:7.1f} ms calm ({len(calm[p])} rounds, at most {max(calm[p]):.1f}), "
                  f"{p99:7.1f} ms beside {acts} hostile acts")
            table.append({"protocol": p, "rounds": len(beside[p]), "p99_ms": round(p99, 1), "calm_rounds": len(calm[p]), "calm_p99_ms": round(usually, 1),
                          "calm_most_ms": round(max(calm[p]), 1)})
            if p99 > bound:
                failures.append(f"{p}: its p99 is {usually:.1f} ms (at most {max(calm[p]):.1f}) and became {p99:.1f} ms")
        memory = server.memory()
        print(f"memory: {resting:.0f} MiB, then {memory:.0f} MiB")
        if memory > resting + 1024:
            failures.append(f"memory grew from {resting:.0f} to {memory:.0f} MiB")
        server.process.terminate()
        try:
            code = server.process.wait(90)
        except subprocess.TimeoutExpired:
            server.process.kill()
            code = "nothing"
        if code != 0:
            failures.append(f"SIGTERM ended it with {code}: {open(f'{folder}/log').read()[-500:]}")
    if SAID.json:
        results.save(SAID.json, "clients of five protocols beside everything hostile at once", seconds=SECONDS, options=MORE, hostile_acts=acts,
                     requests_of_a_round=REQUESTS, protocols=table, memory_mib=[round(resting), round(memory)], failures=failures)
    print("\n".join(failures) or "nobody who behaved noticed")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
