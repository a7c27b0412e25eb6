#!/usr/bin/env python3
"""A thousand texts of 128 tokens to vectors, by kvasir serve and by llama-server: the same file, the same ids, by turns.

    bench/serve/embeddings.py [MODEL.gguf] [--texts N] [--rounds N]

Both pool the mean; each is started anew for each round and answers calls of 100 texts, two at a time. Seconds are those of the
wall, and what each process had of the processors is beside them. The vectors are compared, too.
"""
import argparse
import concurrent.futures
import json
import os
import random
import statistics
import sys
import time
import urllib.request

from servers import Server, about, default_model, peers, save


def ask(port, texts):
    body = json.dumps({"input": texts}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/embeddings", data=body,
                                     headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        data = json.load(answer)["data"]
    return [d["embedding"] for d in sorted(data, key=lambda d: d["index"])]


def one_round(engine, model, build, texts):
    server = Server(engine, model, 16, build)
    if engine == "kvasir":
        server.command += ["--pooling", "mean"]
    else:
        server.command += ["--embedding", "--pooling", "mean", "-b", "2048", "-ub", "2048"]
    calls = [texts[i:i + 100] for i in range(0, len(texts), 100)]
    with server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        ask(server.port, texts[:2])  # what is mapped is read
        began, used = time.monotonic(), server.processor_seconds()
        answers = list(pool.map(lambda c: ask(server.port, c), calls))
        seconds, used = time.monotonic() - began, server.processor_seconds() - used
    return seconds, used, [e for answer in answers for e in answer]


def cosine(a, b):
    dot = lambda x, y: sum(p * q for p, q in zip(x, y))
    return dot(a, b) / (dot(a, a) * dot(b, b)) ** .5


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", nargs="?", default=default_model())
    options.add_argument("--texts", type=int, default=1000)
    options.add_argument("--rounds", type=int, default=3)
    o = options.parse_args()
    draw = random.Random(7)
    texts = [[draw.randrange(100, 40000) for _ in range(128)] for _ in range(o.texts)]
    result = about("texts of 128 tokens to vectors", " ".join(["bench/serve/embeddings.py", *sys.argv[1:]]))
    result["model"], result["texts"], result["rounds"] = os.path.basename(o.model), o.texts, []
    build, vectors = peers()["build"], {}
    for _ in range(o.rounds):
        for engine in ("llama.cpp", "kvasir"):
            seconds, used, vectors[engine] = one_round(engine, o.model, build, texts)
            line = {"engine": engine, "seconds": round(seconds, 2), "texts_per_second": round(o.texts / seconds, 1),
                    "processor_seconds": round(used, 2)}
            result["rounds"].append(line)
            print(line, flush=True)
    middle = lambda engine, key: statistics.median(r[key] for r in result["rounds"] if r["engine"] == engine)
    for key in ("seconds", "processor_seconds"):
        result["times_by_" + key] = round(middle("llama.cpp", key) / middle("kvasir", key), 2)
    result["least_cosine"] = round(min(cosine(a, b) for a, b in zip(vectors["kvasir"], vectors["llama.cpp"])), 5)
    print({k: result[k] for k in ("times_by_seconds", "times_by_processor_seconds", "least_cosine")})
    save("embeddings.json", result)


if __name__ == "__main__":
    main()
