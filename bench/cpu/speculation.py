#!/usr/bin/env python3
"""What speculation by prompt lookup (`--max-draft`) saves and costs on the CPU, with and without it by turns.

Workloads, made of texts of this repository: "summary" asks to say again what a page says, "edit" to write a function
again with a name changed, "random" draws at temperature 1.5, where nothing repeats. Answers must be the same bytes.
"""
import argparse
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]


def prompts(kind, count):
    rng = random.Random(7)
    if kind == "random":
        words = [w for w in re.findall(r"[a-z]+", (ROOT / "LICENSE").read_text()) if len(w) > 2]
        return [" ".join(rng.choices(words, k=120)) for _ in range(count)]
    if kind == "summary":
        pages = [p for f in ("docs/operations.md", "docs/design.md", "docs/troubleshooting.md")
                 for p in re.split(r"\n\s*\n|\n- ", (ROOT / f).read_text()) if 300 < len(p) < 900]
        ask = "Text:\n{}\n\nThe same text once more, word for word:\n"
    else:
        pages = [p for f in ("scheduler/admission.cc", "scheduler/plan_step.cc", "engine/batch_builder.cc")
                 for p in re.split(r"\n}\n", (ROOT / f).read_text()) if 300 < len(p) < 1200]
        ask = "```cpp\n{}\n}}\n```\nThe same function with `state` renamed to `self`:\n```cpp\n"
    return [ask.format(pages[i % len(pages)].strip()) for i in range(count)]


def run(kvasir, model, file, batch, draft, tokens, threads, temperature):
    out = subprocess.run([kvasir, "generate", "--model", model, "--file", file, "--json", "--max-tokens", str(tokens),
                          "--max-running", str(batch), "--max-draft", str(draft), "--threads", str(threads),
                          "--temperature", str(temperature), "--max-tokens-per-step", "1024"], capture_output=True, text=True, check=True)
    rate = float(re.search(r"([\d.]+) output tokens a second", out.stderr).group(1))
    drafts = re.search(r"(\d+) of (\d+) draft tokens", out.stderr)
    texts = [json.loads(line).get("text") for line in out.stdout.splitlines()]
    return rate, texts, [int(n) for n in drafts.groups()] if drafts else [0, 0]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kvasir")
    p.add_argument("model")
    p.add_argument("--batches", default="1,64")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--out", default="")
    a = p.parse_args()
    figures = {}
    print("workload, batch | tokens/s without | with | ratio | draft tokens accepted")
    for kind in ("summary", "edit", "random"):
        for batch in map(int, a.batches.split(",")):
            with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as f:
                for text in prompts(kind, 6 if batch == 1 else 2 * batch):
                    f.write(json.dumps({"prompt": text}) + "\n")
                f.flush()
                rates, drafts = {0: [], 8: []}, [0, 0]
                for _ in range(a.rounds):
                    said = {}
                    for draft in rates:
                        rate, said[draft], came = run(a.kvasir, a.model, f.name, batch, draft, a.tokens, a.threads,
                                                       1.5 if kind == "random" else 0)
                        rates[draft].append(rate)
                        drafts = came if draft else drafts
                    if said[0] != said[8]:
                        sys.exit(f"{kind}, batch {batch}: the answers differ")
            ratio = statistics.median(w / o for o, w in zip(rates[0], rates[8]))
            figures[f"{kind}, {batch}"] = {"without": rates[0], "with": rates[8], "ratio": round(ratio, 3),
                                           "accepted": drafts[0], "drafted": drafts[1]}
            print(f"{kind}, {batch} | {statistics.median(rates[0]):.1f} | {statistics.median(rates[8]):.1f} | {ratio:.2f} | "
                  f"{drafts[0]} of {drafts[1]}", flush=True)
    if a.out:
        pathlib.Path(a.out).write_text(json.dumps({"threads": a.threads, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
