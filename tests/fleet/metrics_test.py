#!/usr/bin/env python3
"""Each metric that a dashboard, an alert, an autoscaler or a page about these names is one that a server really has:
metrics_test.py KVASIR"""
import os
import re
import sys

from kvasir_server import DUMMY, ROOT, serving

PLACES = ["docker", "deploy", "docs/operations.md", "docs/fleet.md", "docs/kubernetes.md"]
NAME = re.compile(r"(?<![A-Za-z0-9_:/.-])(?:kvasir_[a-z0-9_]+|vllm:[a-z0-9_]+|process_[a-z_]+)")
# Words of these files that look like a metric and are none: settings in configurations of others.
OTHERS = {"kvasir_servers", "kvasir_grpc", "kvasir_http"}


def files(place):
    path = os.path.join(ROOT, place)
    if os.path.isfile(path):
        yield path
    for folder, _, names in os.walk(path):
        for name in sorted(names):
            yield os.path.join(folder, name)


def served(kvasir):
    """The names of samples: a histogram has three of them and none of its own."""
    with serving(kvasir, "--draft-model", DUMMY, "--kv-memory", "1MiB", "--threads", "1", "--otlp-endpoint",
                 "http://127.0.0.1:9") as server:
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        text = server.get("/metrics")
    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M):
        names |= {name + part for part in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    return names


def main():
    names, used, wrong = served(sys.argv[1]), 0, []
    histograms = {n.removesuffix("_bucket") for n in names if n.endswith("_bucket")}
    for place in PLACES:
        for path in files(place):
            # A page may speak of a histogram by its own name; a query may not.
            known = names | histograms | OTHERS if path.endswith(".md") else names | OTHERS
            for number, line in enumerate(open(path, encoding="utf-8"), 1):
                for name in NAME.findall(line):
                    used += 1
                    if name not in known:
                        wrong.append(f"{os.path.relpath(path, ROOT)}:{number}: no server has the metric {name}")
    print("\n".join(wrong))
    assert used > 50, f"only {used} names found: were the files moved?"
    assert not wrong, f"{len(wrong)} of {used} uses are of metrics that do not exist"
    print(f"{used} uses of metrics, all of them served")


main()
