#!/usr/bin/env python3
"""What adapters (LoRA of rank 16, every projection) cost beside the model alone, by turns.

    bench/adapters.py build/release/kvasir MODEL.gguf
    bench/adapters.py KVASIR dummy:llama-3.1-8b,type=bf16 --device cuda --adapters 32 --batches 64

The adapters are random, made here in the model's sizes. Of each batch every sequence decodes with the model as it is, with
one adapter for all, and with one of its own each, as far as there are so many. The bar: with eight on a CPU at most 25 %
slower than without any, with 32 on a GPU 15 %.
"""
import argparse
import json
import os
import pathlib
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile

BARS = {"cpu": 1.25, "cuda": 1.15}


def sizes(kvasir, model):
    text = subprocess.run([kvasir, "inspect", model], capture_output=True, text=True, check=True).stdout
    number = lambda pattern: int(re.search(pattern, text).group(1))
    heads, dim = map(int, re.search(r"heads (\d+) of (\d+)", text).groups())
    return dict(layers=number(r"layers +(\d+)"), hidden=number(r"hidden (\d+)"), ffn=number(r"ffn (\d+)"), q=heads * dim,
                kv=number(r"kv heads (\d+)") * dim)


def values(count, rng):
    """bfloat16 of either sign, 0.008 to 0.03."""
    out = bytearray(2 * count)
    out[0::2] = rng.randbytes(count)
    out[1::2] = rng.randbytes(count).translate(bytes(0x3C | (b & 1) << 7 for b in range(256)))
    return bytes(out)


def write_adapter(folder, s, rank, seed):
    rng = random.Random(seed)
    modules = {"self_attn.q_proj": (s["q"], s["hidden"]), "self_attn.k_proj": (s["kv"], s["hidden"]),
               "self_attn.v_proj": (s["kv"], s["hidden"]), "self_attn.o_proj": (s["hidden"], s["q"]),
               "mlp.gate_proj": (s["ffn"], s["hidden"]), "mlp.up_proj": (s["ffn"], s["hidden"]),
               "mlp.down_proj": (s["hidden"], s["ffn"])}
    header, data = {}, []
    at = 0
    for layer in range(s["layers"]):
        for module, (rows, cols) in modules.items():
            for part, shape in (("A", [rank, cols]), ("B", [rows, rank])):
                count = shape[0] * shape[1]
                header[f"base_model.model.model.layers.{layer}.{module}.lora_{part}.weight"] = {
                    "dtype": "BF16", "shape": shape, "data_offsets": [at, at + 2 * count]}
                data.append(values(count, rng))
                at += 2 * count
    folder.mkdir()
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def run(a, loras, file, batch):
    out = subprocess.run([a.kvasir, "generate", "--model", a.model, "--device", a.device, *a.more.split(), *loras, "--file", file, "--json", "--ignore-eos",
                          "--max-tokens", str(a.tokens), "--max-running", str(batch), "--max-draft", "0", "--threads",
                          str(a.threads), "--max-tokens-per-step", "1024"], capture_output=True, text=True, check=True)
    return float(re.search(r"([\d.]+) output tokens a second", out.stderr).group(1))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kvasir")
    p.add_argument("model")
    p.add_argument("--device", default="cpu", choices=BARS)
    p.add_argument("--adapters", type=int, default=8)
    p.add_argument("--batches", default="8,16")
    p.add_argument("--more", default="", help="more options of kvasir generate")
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--tokens", type=int, default=96)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--out", default="")
    a = p.parse_args()
    figures, worst = {}, 0.0
    with tempfile.TemporaryDirectory() as work:
        work, loras = pathlib.Path(work), []
        s = sizes(a.kvasir, a.model)
        for i in range(min(a.adapters, 8)):
            write_adapter(work / f"a{i}", s, a.rank, i)
        for i in range(a.adapters):  # each is loaded by itself, from eight folders
            loras += ["--lora", f"a{i}={work / f'a{i % 8}'}"]
        print(f"batch | tokens/s of the model alone | one adapter | {a.adapters} | slower with {a.adapters}")
        for batch in map(int, a.batches.split(",")):
            rates = {"none": [], "one": [], "all": []}
            for kind in rates:
                with open(work / kind, "w") as f:
                    for i in range(batch):
                        line = {"prompt": f"Tell me of the number {i}, and why it is the best of all numbers."}
                        if kind != "none":
                            line["adapter"] = f"a{i % a.adapters if kind == 'all' else 0}"
                        f.write(json.dumps(line) + "\n")
            for _ in range(a.rounds):
                for kind in rates:
                    rates[kind].append(run(a, loras, str(work / kind), batch))
            best = {k: statistics.median(v) for k, v in rates.items()}
            slower = best["none"] / best["all"]
            worst = max(worst, slower)
            figures[str(batch)] = {**best, "slower": round(slower, 3), "runs": rates}
            print(f"{batch:5} | {best['none']:9.1f} | {best['one']:9.1f} | {best['all']:9.1f} | {100 * (slower - 1):5.1f} %")
    if a.out:
        commit = subprocess.run([a.kvasir, "version"], capture_output=True, text=True, check=True).stdout
        commit = re.search(r"commit +(\S+)", commit).group(1)
        given = sys.argv[3:sys.argv.index("--out")] if "--out" in sys.argv else sys.argv[3:]
        gpu = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        about = {"commit": commit, "command": " ".join(["bench/adapters.py kvasir", os.path.basename(a.model), *given]),
                 "load": os.getloadavg(), "rank": a.rank, "threads": a.threads, "device": a.device, "adapters": a.adapters}
        if a.device == "cuda":
            about["gpu"] = subprocess.run(gpu, capture_output=True, text=True, check=True).stdout.strip()
        pathlib.Path(a.out).write_text(json.dumps({**about, "batches": figures}, indent=1) + "\n")
    sys.exit(worst > BARS[a.device])


if __name__ == "__main__":
    main()
