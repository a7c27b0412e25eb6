"""Three servers behind a gateway, and what a client of the gateway sees: shared by the gateways' tests."""
import collections
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

from kvasir_server import MODEL, serving

WORDS = ("river stone lantern harbour violet engine copper meadow thunder paper orchard signal winter marble garden anchor "
         "feather canyon bottle mirror").split()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Fleet:
    """The servers, each with its log, so that one can see who answered what."""

    def __init__(self, stack, kvasir, folder, count=3, options=lambda number: ()):
        self.servers, self.logs = [], []
        for i in range(count):
            log = stack.enter_context(open(os.path.join(folder, f"server{i}.log"), "w+", encoding="utf-8"))
            self.servers.append(stack.enter_context(serving(kvasir, "--threads", "1", "--kv-memory", "192MiB", "--served-model-name", "smol",
                                                            "--max-wait", "10m", "--drain-seconds", "120s", *options(i), model=MODEL, log=log)))
            self.logs.append(log.name)

    def answered(self):
        """Which server answered a request, by the id in its log."""
        out = {}
        for i, name in enumerate(self.logs):
            with open(name, encoding="utf-8") as file:
                for line in file:
                    if '"message":"request"' in line:
                        name = json.loads(line)["id"]
                        out[name] = out["cmpl-" + name] = i  # the gateway's, or the server's own
        return out

    def running(self):
        def of(server):
            try:
                return int(next(line.split()[1] for line in server.get("/metrics").splitlines() if line.startswith("kvasir_requests_running ")))
            except (OSError, urllib.error.URLError):
                return 0
        return [of(s) for s in self.servers]

    def stop(self, which, how):
        self.servers[which].process.send_signal(how)


def wait(what, seconds=120):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if what():
            return
        time.sleep(0.1)
    raise AssertionError(f"{what.__name__} did not come in {seconds} s")


@contextlib.contextmanager
def process(*words, log, env=None):
    with open(log, "w+", encoding="utf-8") as out:
        running = subprocess.Popen([str(w) for w in words], stdout=out, stderr=out, env=env)
        try:
            yield running
        finally:
            running.terminate()
            try:
                running.wait(10)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def prompt(group, number):
    """Some 350 tokens that a group shares, and some of its own."""
    shared = " ".join(WORDS[(group * 7 + i * (group + 3)) % len(WORDS)] for i in range(250))
    return f"Story {group}. {shared}. Question {number}: what comes next?"


def ask(url, text, tokens):
    body = {"model": "smol", "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        got = json.loads(reply.read())
    assert got["usage"]["completion_tokens"] == tokens, got
    return got["id"]


def load(url, prompts, clients, tokens):
    """Each prompt once, by so many clients: ids where there was an answer, what went wrong elsewhere."""
    def one(text):
        try:
            return ask(url, text, tokens), None
        except (OSError, AssertionError) as wrong:
            said = wrong.read().decode() if isinstance(wrong, urllib.error.HTTPError) else ""
            return None, f"{wrong} {said}"
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        return list(pool.map(one, prompts))


def shared_prefixes(url, fleet, requests, groups):
    """All are answered; the part of a group's requests that its favourite server has."""
    prompts = [(n % groups, prompt(n % groups, n)) for n in range(requests)]
    # The first of each group alone: nobody can know yet where its prefix is.
    first = load(url, [text for _, text in prompts[:groups]], 2, 8)
    rest = load(url, [text for _, text in prompts[groups:]], 8, 8)
    wrong = [w for _, w in first + rest if w]
    assert not wrong, wrong[:3]
    by_group = collections.defaultdict(collections.Counter)
    def all_logged():
        return fleet.answered().keys() >= {name for name, _ in first + rest}
    wait(all_logged)
    where = fleet.answered()
    for (group, _), (name, _) in zip(prompts, first + rest):
        by_group[group][where[name]] += 1
    alike = sum(max(counts.values()) for counts in by_group.values())
    return {"requests": requests, "failed": 0, "same_server_share": round(alike / requests, 3),
            "by_server": dict(sorted(collections.Counter(where[n] for n, _ in first + rest).items()))}


def in_flight(url, fleet, requests, tokens, act):
    """Requests under way on every server that is there; then act; what became of them."""
    results = []
    thread = threading.Thread(target=lambda: results.extend(load(url, [f"Number {n}: {WORDS[n % len(WORDS)]}" for n in range(requests)], requests, tokens)))
    thread.start()
    state = {}
    def all_run():
        state["running"] = fleet.running()
        return sum(state["running"]) >= requests * 3 // 4
    wait(all_run)
    act(state["running"])
    thread.join()
    return results, state["running"]


def losses(url, fleet, survives_kill):
    """One server is killed, another drained, under load. Returns what was lost, and fails where it must not be."""
    victim = []
    def kill(running):
        victim.append(max(range(len(running)), key=lambda i: running[i]))
        fleet.stop(victim[0], signal.SIGKILL)
    results, running = in_flight(url, fleet, 12, 200, kill)
    lost = sum(1 for _, wrong in results if wrong)
    assert lost <= running[victim[0]], f"{lost} lost of {running} when server {victim[0]} was killed: {results}"
    time.sleep(survives_kill)  # until the gateway has noticed
    after = [w for _, w in load(url, [prompt(70, n) for n in range(20)], 4, 4) if w]
    assert not after, f"after a server is gone requests still fail: {after[:3]}"

    left = [i for i in range(len(fleet.servers)) if i != victim[0]]
    drained = left[0]
    def drain(_):
        fleet.stop(drained, signal.SIGTERM)
    results, at_drain = in_flight(url, fleet, 8, 200, drain)
    wrong = [w for _, w in results if w]
    assert not wrong, f"lost while server {drained} drained: {wrong[:3]}"
    assert fleet.servers[drained].process.wait(150) == 0
    later = [w for _, w in load(url, [prompt(80, n) for n in range(20)], 4, 4) if w]
    assert not later, f"lost after server {drained} had drained: {later[:3]}"
    return {"killed": {"in_flight": running, "server": victim[0], "lost": lost, "later_requests": 20, "later_failed": 0},
            "drained": {"in_flight": at_drain, "server": drained, "lost": 0, "later_requests": 20, "later_failed": 0}}
