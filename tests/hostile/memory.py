#!/usr/bin/env python3
"""Every hostile way one after another against one server at its default limits:
memory.py KVASIR [--tls] [--seconds N] [--json FILE] [WAY]...

The server's memory stays within 1 GiB of what it was at rest, and comes back. Meanwhile another process asks both ports for
health, and an idle server beside it: p99 is within 50 ms or, where the machine is so crowded that the idle one takes long,
within three times the longest that the idle one took. A way during which it was not is tried twice more, to the same bound.
"""
import argparse
import gzip
import json
import multiprocessing
import os
import random
import re
import resource
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time

import results

MODEL = "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=512"
GIB = 1 << 30
KEPT = 256 << 20  # grammars that are kept (128 MiB), answers, and what an allocator of many threads holds on to
SERVICE = "/kvasir.v1.Inference/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
HEALTH = "/grpc.health.v1.Health/"
HEADERS, RESET, SETTINGS, PING, CONTINUATION = 1, 3, 4, 6, 9


def frame(kind, flags, stream, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name, value):
    def text(t):
        return bytes([len(t)]) + t if len(t) < 127 else bytes([127, (len(t) - 127) & 127 | (128 if len(t) >= 255 else 0)]) + (
            bytes([(len(t) - 127) >> 7]) if len(t) >= 255 else b"") + t
    return b"\0" + text(name.encode()) + text(value.encode())


def call_headers(path, key=None, **more):
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost", "content-type": "application/grpc",
              "te": "trailers", **({"authorization": f"Bearer {key}"} if key else {}), **more}
    return b"".join(literal(*f) for f in fields.items())


def message(body, compressed=False):
    return bytes([compressed]) + len(body).to_bytes(4, "big") + body


def opened(stream, path, **more):
    return frame(HEADERS, 4, stream, call_headers(path, **more))


class Http2:
    PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0)

    def __init__(self, at, timeout=5):
        self.socket, self.rest, self.stream = at.connect("grpc", timeout), b"", 1
        self.socket.sendall(self.PREFACE)
        self.rest = self.socket.recv(1000)
        self.socket.sendall(frame(SETTINGS, 1, 0))

    def check(self):
        """Asks grpc.health.v1, and waits for the end of the answer."""
        stream, self.stream = self.stream, self.stream + 2
        self.socket.sendall(opened(stream, HEALTH + "Check") + frame(0, 1, stream, message(b"")))
        while True:
            while len(self.rest) >= 9 and len(self.rest) >= 9 + (size := int.from_bytes(self.rest[:3], "big")):
                kind, flags, of = self.rest[3], self.rest[4], int.from_bytes(self.rest[5:9], "big")
                self.rest = self.rest[9 + size:]
                if kind == HEADERS and flags & 1 and of == stream:
                    return
            more = self.socket.recv(65536)
            if not more:
                raise OSError("the connection ended")
            self.rest += more


class Address:
    """A server's ports, and how to speak to them."""

    def __init__(self, ports, tls):
        self.ports, self.tls = ports, tls

    def connect(self, port, timeout=5):
        s = socket.create_connection(("127.0.0.1", self.ports[port]), timeout=timeout)
        # As every client of gRPC has it: a request right after the acknowledged settings would wait for the server's late ACK, 40 ms.
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self.tls:
            return s
        context = ssl.create_default_context(cafile=self.tls)
        context.set_alpn_protocols(["h2"] if port == "grpc" else ["http/1.1"])
        return context.wrap_socket(s, server_hostname="localhost")

    def get_health(self):
        with self.connect("http", 60) as s:
            s.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            if b" 200 " not in s.recv(4096)[:20]:
                raise OSError("/health did not answer 200")


class Server:
    def __init__(self, kvasir, folder, name, tls, *more):
        self.log = f"{folder}/{name}.log"
        pair = ["--tls-cert", f"{folder}/tls.pem", "--tls-key", f"{folder}/tls.key"] if tls else []
        self.process = subprocess.Popen([kvasir, "serve", "--model", MODEL, "--kv-memory", "16MiB", "--threads", "1", "--http-port", "0", "--grpc-port", "0",
                                         "--log-format", "json", "--no-access-log", *pair, *more], stderr=open(self.log, "w"))
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            for line in open(self.log):
                if '"message":"ready"' in line and line.endswith("\n"):
                    event = json.loads(line)
                    self.address = Address({"http": event["http_port"], "grpc": event["grpc_port"]}, f"{folder}/tls.pem" if tls else None)
                    return
            time.sleep(0.05)
        sys.exit(f"the server did not become ready: {open(self.log).read()[-2000:]}")

    def memory(self):
        return int(open(f"/proc/{self.process.pid}/statm").read().split()[1]) * resource.getpagesize()


def ask_for_health(at, idle, pipe):
    """In a process of its own: until told, then the times in ms of both ports and of the idle server's."""
    times, wrong, calls = {"http": [], "grpc": [], "idle": []}, [], {}

    def timed(name, ask):
        began = time.monotonic()
        try:
            ask()
        except OSError as e:
            wrong.append(f"{name}: {e!r}")
            calls.clear()
        times[name].append(1e3 * (time.monotonic() - began))

    def check(name, of):
        """A few times on each connection, as those do who look after servers."""
        connection = calls.pop(name, None) or Http2(of, 60)
        connection.check()
        if connection.stream < 2 * 8:
            calls[name] = connection
        else:
            connection.socket.close()

    while not pipe.poll(0.005):
        timed("http", at.get_health)
        timed("grpc", lambda: check("grpc", at))
        timed("idle", idle.get_health)
        timed("idle", lambda: check("idle", idle))
    pipe.send((times, wrong))


class Hostile:
    """What strangers and somebody with a key do. Each way takes about so many seconds."""

    def __init__(self, at, key, seconds):
        self.at, self.key, self.seconds = at, key, seconds

    def crowd(self, many, one):
        """So many at once, each over and over until the time is over."""
        end = time.monotonic() + self.seconds

        def loop(i):
            chance = random.Random(i)
            while time.monotonic() < end:
                try:
                    one(chance, end)
                except (OSError, ValueError):
                    pass
        threads = [threading.Thread(target=loop, args=(i,), daemon=True) for i in range(many)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(self.seconds + 120)

    def head(self, path, length=None, key=None, more=""):
        body = "Transfer-Encoding: chunked\r\n" if length is None else f"Content-Length: {length}\r\n"
        return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer {key or self.key}\r\n{body}{more}\r\n").encode()

    def post(self, path, body, key=None, limit=60):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.at.connect("http", limit) as s:
            s.sendall(self.head(path, len(data), key, "Connection: close\r\n") + data)
            answer = b""
            while part := s.recv(65536):
                answer = (answer + part)[-65536:]
            return answer

    def hold(self, port, many, send):
        """So many connections, held until the time is over; `send` puts something into each."""
        held = []
        for i in range(many):
            try:
                s = Http2(self.at, 2) if port == "grpc" else self.at.connect("http", 2)
                held.append(s)
                send(s, i)
            except OSError:
                pass
        time.sleep(min(2, self.seconds))
        for s in held:
            (s.socket if port == "grpc" else s).close()

    # HTTP: bytes without end, without a key, or held.
    def fields_and_chunks_without_end(self):
        def one(chance, end):
            begin, piece = chance.choice(((b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"X-%d: " % chance.randrange(99999) + b"x" * 4000 + b"\r\n"),
                                          (self.head("/v1/completions") + b"1;a=", b"x" * 65536), (self.head("/v1/completions") + b"0\r\n", b"X: y\r\n" * 9000),
                                          (self.head("/v1/completions"), b"0" * 65536)))
            with self.at.connect("http") as s:
                s.sendall(begin)
                while time.monotonic() < end:
                    s.sendall(piece)
        self.crowd(8, one)

    def bodies_of_strangers(self):
        self.hold("http", 500, lambda s, i: (s.settimeout(0.05), s.sendall(self.head("/v1/completions", 8 << 20, "wrong") + b" " * (1 << 20))))

    def bodies_that_are_held(self):
        self.hold("http", 150, lambda s, i: (s.settimeout(0.3), s.sendall(self.head("/tokenize", (8 << 20) - 1) + b" " * (7 << 20))))

    def large_json(self):
        bodies = [("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 150_000}), ("/v1/completions", {"prompt": ["x"] * 500_000}),
                  ("/v1/completions", {"prompt": "x", "stop": ["s"] * 500_000}), ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(300_000)}}),
                  ("/v1/embeddings", {"input": ["x"] * 500_000}), ("/v1/rerank", {"query": "x", "documents": ["y"] * 500_000}),
                  ("/detokenize", {"tokens": [7] * 2_000_000}), ("/v1/responses", {"input": "x" * (7 << 20), "store": True}),
                  ("/v1/completions", b"[" * (8 << 20)), ("/v1/completions", b'{"a":' * (1 << 20)), ("/v1/completions", b'{"prompt":"' + b"\\u0041" * (1 << 20) + b'"}')]
        bodies = [(path, body if isinstance(body, bytes) else json.dumps(body).encode()) for path, body in bodies]
        self.crowd(8, lambda chance, end: self.post(*chance.choice(bodies)))

    def texts_to_be_tokenized(self):
        bodies = [json.dumps({"prompt": (part * (1 + (8 << 20) // len(part)))[:7_900_000]}).encode() for part in ("The quick brown fox. ", "1234567890", "a1 ")]
        self.crowd(8, lambda chance, end: self.post("/tokenize", chance.choice(bodies)))

    # What is dear to compile and to follow.
    def schemas_and_grammars(self):
        schemas = [{"type": "integer", "multipleOf": 9999991}, {"type": "string", "pattern": "(a|a)*(b|b)*$" * 20}, {"type": "string", "pattern": "(x+x+)+y{1,9999}"},
                   {"allOf": [{"multipleOf": p} for p in (9973, 9967, 9949)]}, {"type": "array", "items": {"type": "string", "maxLength": 5000}, "maxItems": 5000},
                   {"enum": [f"value {i}" for i in range(20_000)]}]

        def one(chance, end):
            schema = dict(chance.choice(schemas), title=str(chance.random()))
            self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "response_format":
                      {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})
        self.crowd(12, one)

    # More than it can do, and nobody who reads the answers.
    def more_than_it_can_do(self):
        self.crowd(64, lambda chance, end: self.post("/v1/completions", {"prompt": "x" * chance.randrange(1, 2000), "max_tokens": 500, "ignore_eos": True, "n": chance.randrange(1, 9)}))

    def answers_that_nobody_reads(self):
        body = json.dumps({"prompt": "slow", "max_tokens": 1500, "stream": True, "ignore_eos": True, "logprobs": 5, "n": 4}).encode()

        def send(s, i):
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            s.sendall(self.head("/v1/completions", len(body)) + body)
        self.hold("http", 200, send)

    def leaving(self):
        body = json.dumps({"prompt": "leaves", "max_tokens": 1000, "stream": True, "ignore_eos": True}).encode()

        def one(chance, end):
            with self.at.connect("http") as s:
                s.sendall(self.head("/v1/completions", len(body)) + body)
                time.sleep(chance.random() * 0.05)
        self.crowd(16, one)

    def idle_connections(self):
        for port in ("http", "grpc"):
            held = []
            for _ in range(700):
                try:
                    held.append(self.at.connect(port, 1))
                except OSError:
                    pass
            time.sleep(1)
            for s in held:
                s.close()

    def garbage(self):
        def one(chance, end):
            with self.at.connect(chance.choice(("http", "grpc")), 1) as s:
                s.sendall(chance.choice((b"", Http2.PREFACE)) + chance.randbytes(chance.randrange(1, 3000)) + b"\r\n\r\n")
                s.recv(1000)
        self.crowd(8, one)

    # gRPC.
    def streams(self, path, said=None, connections=20, key=None):
        def send(c, i):
            for s in range(0, 1000, 50):
                c.socket.sendall(b"".join(opened(2 * k + 1, path, key=key) + (b"" if said is None else frame(0, 0, 2 * k + 1, said)) for k in range(s, s + 50)))
        self.hold("grpc", connections, send)

    def streams_that_need_no_key(self):
        self.streams(REFLECTION)
        self.streams(REFLECTION, message(b"\x3a\x01*"))
        self.streams(HEALTH + "Watch", message(b""))

    def streams_without_a_key(self):
        self.streams(SERVICE + "Generate")
        self.streams(SERVICE + "Nothing")
        self.streams(SERVICE + "Generate", bytes([0]) + (8 << 20).to_bytes(4, "big") + b"x" * 4000)

    def streams_that_say_nothing(self):
        self.streams(SERVICE + "Generate", key=self.key)

    def messages_half_sent(self):
        def send(c, i):
            c.socket.settimeout(0.3)
            c.socket.sendall(opened(1, SERVICE + "Generate", key=self.key) + frame(0, 0, 1, bytes([0]) + (8 << 20).to_bytes(4, "big")))
            for _ in range(450):
                c.socket.sendall(frame(0, 0, 1, b"x" * 16000))
        self.hold("grpc", 60, send)

    def messages_that_unfold(self):
        bomb = gzip.compress(b"\x0a\0" * (100 << 20), 9)
        head = {"key": self.key, "grpc-encoding": "gzip"}

        def one(chance, end):
            c = Http2(self.at)
            with c.socket:
                c.socket.sendall(opened(1, SERVICE + "Generate", **head))
                whole = message(bomb, True)
                for at in range(0, len(whole), 16000):
                    c.socket.sendall(frame(0, 0, 1, whole[at:at + 16000]))
                c.socket.recv(1000)
        self.crowd(4, one)

    def frames_without_end(self):
        def one(chance, end):
            pieces = {"headers": lambda s: frame(HEADERS, 0, s, call_headers(SERVICE + "Generate")) + frame(CONTINUATION, 0, s, b"\0" * 16000) * 50,
                      "resets": lambda s: opened(s, SERVICE + "Generate") + frame(RESET, 0, s, struct.pack(">I", 8)),
                      "pings": lambda s: frame(PING, 0, 0, b"12345678"), "settings": lambda s: frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65535)) * 10}
            piece, c = pieces[chance.choice(sorted(pieces))], Http2(self.at, 1)
            with c.socket:
                for s in range(1, 4001, 2):
                    c.socket.sendall(piece(s))
                    if time.monotonic() > end:
                        return
        self.crowd(6, one)

    WAYS = (fields_and_chunks_without_end, bodies_of_strangers, bodies_that_are_held, large_json, texts_to_be_tokenized, schemas_and_grammars, more_than_it_can_do,
            answers_that_nobody_reads, leaving, idle_connections, garbage, streams_that_need_no_key, streams_without_a_key, streams_that_say_nothing,
            messages_half_sent, messages_that_unfold, frames_without_end)


def p99(times):
    return sorted(times)[len(times) * 99 // 100]


def beside(server, idle, way):
    """What it was like during it: the most memory, what health took, and what was wrong."""
    ours, theirs = multiprocessing.Pipe()
    asker = multiprocessing.Process(target=ask_for_health, args=(server.address, idle.address, theirs), daemon=True)
    asker.start()
    most, over = [server.memory()], threading.Event()

    def look():
        while not over.wait(0.02):
            most[0] = max(most[0], server.memory())
    looks = threading.Thread(target=look)
    looks.start()
    try:
        way()
    finally:
        over.set()
        looks.join()
        ours.send("stop")
        times, wrong = ours.recv() if ours.poll(120) else ({"http": [9e9], "grpc": [9e9], "idle": [0]}, ["health was not answered"])
        asker.join(10)
    bound = max(50, 3 * max(times["idle"]))
    said = {"health_p99_ms": round(p99(times["http"])), "grpc_health_p99_ms": round(p99(times["grpc"])), "idle_most_ms": round(max(times["idle"])),
            "asked": len(times["http"])}
    return most[0], said, wrong, max(p99(times["http"]), p99(times["grpc"])) <= bound


def main():
    ask = argparse.ArgumentParser()
    ask.add_argument("kvasir")
    ask.add_argument("--tls", action="store_true")
    ask.add_argument("--seconds", type=float, default=4)
    ask.add_argument("--json", metavar="FILE")
    ask.add_argument("ways", nargs="*", metavar="WAY")
    said = ask.parse_intermixed_args()
    kvasir, failures, table = os.path.abspath(said.kvasir), [], []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=server",
                        "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", f"{folder}/tls.key", "-out", f"{folder}/tls.pem"],
                       stderr=subprocess.DEVNULL, check=True)
        made = subprocess.run([kvasir, "keys", "add", "--keys", f"{folder}/keys.json", "--tenant", "bad", "--role", "user"], capture_output=True, text=True, check=True)
        key = re.search("kvasir-[0-9a-f]{64}", made.stdout + made.stderr).group(0)
        server = Server(kvasir, folder, "server", said.tls, "--keys", f"{folder}/keys.json")
        idle = Server(kvasir, folder, "idle", said.tls)
        hostile = Hostile(server.address, key, said.seconds)
        hostile.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        time.sleep(1)
        rest = server.memory()
        print(f"at rest: {rest >> 20} MiB\n\n{'p99 in ms':32} {'memory, MiB':>11} {'/health':>8} {'grpc.health':>12} {'idle at most':>13} {'asked':>6}", flush=True)
        for way in Hostile.WAYS:
            name = way.__name__.replace("_", " ")
            if said.ways and way.__name__ not in said.ways:
                continue
            for _ in range(3):
                most, health, wrong, prompt = beside(server, idle, lambda: way(hostile))
                figures = {"way": name, "memory_mib": (most - rest) >> 20, **health}
                table.append(figures)
                print(f"{name:32} {'+' + str(figures['memory_mib']):>11} {health['health_p99_ms']:>8} {health['grpc_health_p99_ms']:>12} "
                      f"{health['idle_most_ms']:>13} {health['asked']:>6}", flush=True)
                if wrong or prompt or most - rest > GIB:
                    break
            if most - rest > GIB:
                failures.append(f"{name}: memory grew by {(most - rest) >> 20} MiB")
            if not prompt:
                failures.append(f"{name}: health was slow three times: {health}")
            if wrong:
                failures.append(f"{name}: {len(wrong)} times health failed: {wrong[0]}")
            if server.process.poll() is not None:
                sys.exit(f"{name}: the server ended with {server.process.returncode}: {open(server.log).read()[-1000:]}")
        left, end = server.memory(), time.monotonic() + 120
        while left > rest + KEPT and time.monotonic() < end:
            time.sleep(0.2)
            left = server.memory()
        print(f"{'afterwards':32} {'+' + str((left - rest) >> 20):>11}\n")
        if left > rest + KEPT:
            failures.append(f"memory did not come back: {left >> 20} MiB, {rest >> 20} at rest")
        for one in (server, idle):
            one.process.terminate()
            try:
                code = one.process.wait(90)
            except subprocess.TimeoutExpired:
                one.process.kill()
                code = "nothing"
            if code != 0:
                failures.append(f"SIGTERM ended it with {code}: {open(one.log).read()[-500:]}")
    if said.json:
        results.save(said.json, "memory over rest and health beside every hostile way", rest_mib=rest >> 20, afterwards_mib=(left - rest) >> 20, ways=table,
                     failures=failures)
    print("\n".join(failures) or "memory stayed within 1 GiB of rest and came back; health was prompt")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
