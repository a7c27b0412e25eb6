#!/usr/bin/env python3
"""One model over several GPUs beside one, in one run: the link and sums by size, steps, first tokens, throughput.

usage: ranks.py KVASIR GPU_RANKS_BENCH [--gpus N] [--model MODEL] [--nccl LIBNCCL.SO.2] [--commit C] [--out OUT.json]

Sums are what a step has two of in each layer (gpu_ranks_bench), beside the time in which their bytes cross the link and,
with --nccl, beside NCCL's all-reduce. Steps are whole_model.py's, once with one GPU and once with N.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

from served import RESULTS, command, driver
from whole_model import LLAMA_8B

HERE = os.path.dirname(os.path.abspath(__file__))


def links(program, gpus, nccl):
    lines = subprocess.run([program, str(gpus), *([nccl] if nccl else [])], capture_output=True, text=True, timeout=120)
    found = [json.loads(line) for line in lines.stdout.splitlines()]
    if lines.returncode != 0 or not found:
        print(f"{program} ended with {lines.returncode}: {lines.stderr.strip()}", file=sys.stderr)
    return found


def whole_model(a, gpus):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        subprocess.run([sys.executable, os.path.join(HERE, "whole_model.py"), a.kvasir, "--model", a.model,
                        "--batches", a.batches, "--prompts", a.prompts, "--offline", a.offline,
                        "--serve", f"--ranks {gpus} {a.serve}", "--out", out.name], check=True, stdout=subprocess.DEVNULL)
        return json.load(open(out.name))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kvasir", help="the program, built with -DKVASIR_CUDA=ON")
    p.add_argument("bench", help="gpu_ranks_bench of the same build")
    p.add_argument("--gpus", type=int, default=2)
    p.add_argument("--model", default=LLAMA_8B)
    p.add_argument("--batches", default="1,64,256")
    p.add_argument("--prompts", default="1024,8192")
    p.add_argument("--offline", default="")
    p.add_argument("--serve", default="", help="more options of kvasir serve, in one word")
    p.add_argument("--nccl", default="", help="a libnccl.so.2 to measure beside")
    p.add_argument("--commit", default="")
    p.add_argument("--out", default=RESULTS / "gpu-ranks.json")
    a = p.parse_args()

    found = links(a.bench, a.gpus, "")
    link = next((f for f in found if f["name"] == "link"), None)
    sums = {f["bytes"]: {"us": round(f["us"], 2), "link_us": round(f["link_us"], 2)} for f in found if f["name"] == "sum"}
    for f in links(a.bench, a.gpus, a.nccl) if a.nccl else []:
        if f["name"] == "nccl":
            sums[f["bytes"]]["nccl_us"] = round(f["us"], 2)
    runs = {n: whole_model(a, n) for n in (1, a.gpus)}

    print(f"{a.gpus} x {runs[1]['device']}, link {link['gb_s']:.0f} GB/s: {a.model}" if link else "no link measured")
    print("sum of bytes | us | NCCL us | bytes over the link us")
    for size, s in sums.items():
        print(f"{size:12} | {s['us']:7.2f} | {s.get('nccl_us')} | {s['link_us']}")
    print(f"decode batch | ms a step on 1 | on {a.gpus} | times")
    for b in runs[1]["decode"]:
        one, many = (runs[n]["decode"][b] for n in runs)
        if one and many:
            print(f"{b:>12} | {one['ms']} | {many['ms']} | {one['ms'] / many['ms']:.2f}")
    print("prompt | ms to first token on 1 | on several | times")
    for n, one in runs[1]["first_token_ms"].items():
        many = runs[a.gpus]["first_token_ms"][n]
        print(f"{n:>6} | {one} | {many} | {one / many:.2f}")
    print("offline | output tokens/s on 1 | on several | times")
    for n, one in runs[1]["offline"].items():
        many = runs[a.gpus]["offline"][n]
        print(f"{n} | {one} | {many} | {many / one:.2f}")
    if a.out:
        keep = ("ready_seconds", "decode", "first_token_ms", "offline")
        record = {"device": f"{a.gpus} x {runs[1]['device']}", "driver": driver(), "commit": a.commit,
                  "command": command("bench/gpu/ranks.py"), "model": a.model, "link": link, "sums": sums,
                  "by_gpus": {n: {k: r[k] for k in keep} for n, r in runs.items()}}
        with open(a.out, "w") as f:
            json.dump(record, f, indent=1)


if __name__ == "__main__":
    main()
