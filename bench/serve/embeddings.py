#!/usr/bin/env python3
"""A thousand texts of 128 tokens to vectors, by kvasir serve and by llama-server: the same file, the same ids, by turns.

    bench/serve/embeddings.py [MODEL.gguf] [--texts N] [--rounds N]
    bench/serve/embeddings.py --library LLAMACPP_PEER      llama.cpp's library instead of its server

Both pool the mean; each is started anew for each round and answers calls of 100 texts, two at a time. Seconds are those of the
wall, and what each process had of the processors is beside them. The vectors are compared, too.
--library needs no server of theirs (bench/cpu/cpu_vs_llamacpp builds the program beside the libraries it is given): random texts
straight into llama_decode, without HTTP and JSON, which ours still has.
"""
import argparse
import concurrent.futures
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request

from servers import THREADS, Server, about, default_model, peers, save


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


def library_round(program, model, texts):
    out = subprocess.run([program, "--embed", model, str(THREADS), str(len(texts)), str(len(texts[0]))], check=True,
                         capture_output=True, text=True).stdout
    return len(texts) / json.loads(out)["texts_per_second"], None, None


def cosine(a, b):
    dot = lambda x, y: sum(p * q for p, q in zip(x, y))
    return dot(a, b) / (dot(a, a) * dot(b, b)) ** .5


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", nargs="?", default=default_model())
    options.add_argument("--texts", type=int, default=1000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--library", default="", help="llamacpp_peer, instead of llama-server")
    o = options.parse_args()
    draw = random.Random(7)
    texts = [[draw.randrange(100, 40000) for _ in range(128)] for _ in range(o.texts)]
    result = about("texts of 128 tokens to vectors", " ".join(["bench/serve/embeddings.py", *sys.argv[1:]]))
    result["model"], result["texts"], result["rounds"] = os.path.basename(o.model), o.texts, []
    build, vectors = None if o.library else peers()["build"], {}
    for _ in range(o.rounds):
        for engine in ("llama.cpp", "kvasir"):
            if o.library and engine != "kvasir":
                seconds, used, vectors[engine] = library_round(o.library, o.model, texts)
            else:
                seconds, used, vectors[engine] = one_round(engine, o.model, build, texts)
            line = {"engine": engine, "seconds": round(seconds, 2), "texts_per_second": round(o.texts / seconds, 1),
                    "processor_seconds": used and round(used, 2)}
            result["rounds"].append(line)
            print(line, flush=True)
    middle = lambda engine, key: statistics.median(r[key] for r in result["rounds"] if r["engine"] == engine)
    made = {"by": "llama.cpp's library" if o.library else "llama-server"}
    for key in ("seconds", *([] if o.library else ["processor_seconds"])):
        made["times_by_" + key] = round(middle("llama.cpp", key) / middle("kvasir", key), 2)
    if not o.library:
        made["least_cosine"] = round(min(cosine(a, b) for a, b in zip(vectors["kvasir"], vectors["llama.cpp"])), 5)
    print(made)
    result |= made
    save("embeddings.json", result)


if __name__ == "__main__":
    main()
