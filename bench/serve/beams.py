#!/usr/bin/env python3
"""What a beam search of width 4 costs beside four plain choices of as many tokens, by turns on one server.

    bench/serve/beams.py build/release/kvasir MODEL [--device cuda] [--requests 1,8]

Both share their prompt's pages and run until --tokens each; choices are drawn at temperature 1. A search orders its beams anew each
step, which moves pages and needs the likeliest tokens of each. The bar: at most 1.3 times the choices.
"""
import argparse
import http.client
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))
from served import RESULTS, command, driver, start  # noqa: E402

KINDS = {"choices": {"n": 4, "temperature": 1}, "beams": {"n": 4, "use_beam_search": True}}
BAR = 1.3


def answer(port, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    said = connection.getresponse()
    text = said.read()
    if said.status != 200 or len(json.loads(text)["choices"]) != 4:
        sys.stderr.write(f"a request failed: {said.status} {text.decode()}\n")
        os._exit(1)  # from whatever thread: figures without it would be of something else


def seconds(a, port, kind, requests, turn):
    bodies = [{"prompt": [5 + (17 * i + 31 * j + turn) % 200 for j in range(a.prompt)], "max_tokens": a.tokens, "ignore_eos": True,
               **KINDS[kind]} for i in range(requests)]
    threads = [threading.Thread(target=answer, args=(port, body)) for body in bodies]
    began = time.perf_counter()
    [t.start() for t in threads]
    [t.join() for t in threads]
    return time.perf_counter() - began


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kvasir")
    p.add_argument("model")
    p.add_argument("--device", default="cpu")
    p.add_argument("--requests", default="1,8", help="at once, each of four beams or choices (default 1,8)")
    p.add_argument("--prompt", type=int, default=256)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--serve", default="", help="more options of kvasir serve")
    p.add_argument("--out", default="", help="the result's name in bench/results (default beams.json, gpu-beams.json)")
    a = p.parse_args()
    widest = max(map(int, a.requests.split(",")))
    process, log = start(a.kvasir, a.model, "--device", a.device, "--no-access-log", "--max-running", str(4 * widest),
                         "--max-wait", "1h", *a.serve.split())
    threading.Thread(target=process.stderr.read, daemon=True).start()
    figures, port = {}, log[-1]["http_port"]
    print(f"requests | seconds of 4 choices | of 4 beams | times (bar {BAR})")
    for requests in map(int, a.requests.split(",")):
        took = {kind: [] for kind in KINDS}
        for turn in range(a.rounds + 1):  # the first warms both up
            for kind in KINDS:
                took[kind].append(seconds(a, port, kind, requests, turn))
        took = {kind: of[1:] for kind, of in took.items()}
        times = statistics.median(b / c for b, c in zip(took["beams"], took["choices"]))
        figures[requests] = {**{kind: [round(s, 3) for s in of] for kind, of in took.items()}, "times": round(times, 3)}
        print(f"{requests:8} | {statistics.median(took['choices']):10.3f} | {statistics.median(took['beams']):10.3f} | {times:.2f}", flush=True)
    process.terminate()
    process.wait(60)
    version = subprocess.run([a.kvasir, "version"], capture_output=True, text=True, check=True).stdout
    commit = re.search(r"commit +(\S+)", version).group(1)
    result = {"commit": commit, "command": command("bench/serve/beams.py"), "driver": driver() if a.device == "cuda" else "",
              "load": round(os.getloadavg()[0], 2), "requests": figures}
    (RESULTS / (a.out or ("gpu-beams.json" if a.device == "cuda" else "beams.json"))).write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(f["times"] > BAR for f in figures.values()))


if __name__ == "__main__":
    main()
