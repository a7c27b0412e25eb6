#!/usr/bin/env python3
"""What four machines take with prefill and decode apart, and together: apart.py KVASIR [OUT.json] [--only PROMPT:ANSWER]
The most requests a second (to 3 % of what the arithmetic alone allows) at which 99 % of gaps between tokens are within the bound, 90 %
of first tokens within 2 s and 99 % within 4 s, 90 % of answers within 2 s and 1.5 times their tokens at the bound, and nobody is refused.
Simulated: requests come at random, lengths are spread evenly from half to one and a half. Apart is the best of three splits."""
import json
import os
import random
import subprocess
import sys
import tempfile

COST = os.path.join(os.path.dirname(__file__), "../../configs/cost/h200-8b-bf16.json")
BYTES = 131072  # of a token of Llama-3.1-8B's cache in 16 bits
MACHINES, LINKS = 4, (25, 100, 3128)  # gigabits a second; the last is NVLink as gpu-ranks.json measured it
BOUNDS = {0.02: 18, 0.05: 40}  # seconds, and the --max-step-ms that machines that do both keep it by
LENGTHS = ((512, 512), (2048, 128), (2048, 512), (8192, 512))


def requests(prompt, answer, rate):
    draw, now, lines = random.Random(1), 0.0, []
    for _ in range(max(200, int(rate * 25))):
        now += draw.expovariate(rate)
        lines.append(json.dumps({"arrival_s": round(now, 5), "prompt_tokens": max(1, int(prompt * draw.uniform(.5, 1.5))),
                                 "output_tokens": max(2, int(answer * draw.uniform(.5, 1.5)))}))
    return "\n".join(lines) + "\n"


def kept(seen, bound, answer):
    return (seen["refused"] == 0 and seen["itl_s"]["p99"] <= bound and seen["ttft_s"]["p90"] <= 2 and seen["ttft_s"]["p99"] <= 4
            and seen["latency_s"]["p90"] <= 2 + 1.5 * answer * bound)


def most(kvasir, folder, lengths, prefill, link, bound, which):
    prompt, answer = lengths
    with open(COST, encoding="utf-8") as file:
        cost = {name: us * 1e-6 for name, us in json.load(file)["cost"].items()}
    alone = prompt * cost["token_us"] + prompt ** 2 / 2 * cost["context_us"]
    alone += answer * (cost["decode_token_us"] + (prompt + answer / 2) * cost["decode_context_us"])
    workload, options = os.path.join(folder, "w.jsonl"), os.path.join(folder, "o.json")
    with open(options, "w", encoding="utf-8") as file:
        json.dump({"max_step_ms": BOUNDS[bound]}, file)
    low, high = 0.0, 1.1 * MACHINES / alone
    for _ in range(5):
        rate = (low + high) / 2
        with open(workload, "w", encoding="utf-8") as file:
            file.write(requests(prompt, answer, rate))
        said = subprocess.run([kvasir, "simulate", "--policy", "fcfs", "--workload", workload, "--config", COST, "--config", options,
                               "--prefill-pool", str(prefill), "--decode-pool", str(MACHINES - prefill), "--link-gbps", str(link),
                               "--kv-bytes-per-token", str(BYTES)], capture_output=True, text=True, check=True).stdout
        if kept(json.loads(said)[0][which], bound, answer):
            low = rate
        else:
            high = rate
    return round(low, 2)


def main():
    words = [w for w in sys.argv[1:] if not w.startswith("--") and ":" not in w]
    only = [tuple(map(int, w.split(":"))) for w in sys.argv[1:] if ":" in w]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for bound in BOUNDS:
            for lengths in only or LENGTHS:
                row = {"prompt": lengths[0], "answer": lengths[1], "gap_ms": round(bound * 1000),
                       "together": most(words[0], folder, lengths, 2, LINKS[0], bound, "together")}
                for link in LINKS:
                    row[f"{link}_gbps"] = max([most(words[0], folder, lengths, p, link, bound, "apart"), f"{p}:{MACHINES - p}"] for p in (1, 2, 3))
                rows.append(row)
                print(json.dumps(row), flush=True)
    if len(words) > 1:
        with open(words[1], "w", encoding="utf-8") as file:
            json.dump({"command": "bench/scheduler/apart.py kvasir prefill-apart.json", "requests_per_s": rows}, file, indent=1)
            file.write("\n")


main()
