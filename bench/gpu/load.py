#!/usr/bin/env python3
"""How long a folder of safetensors takes from the page cache to a GPU that serves it: from the program's start to `ready`.

Folders of the shapes of Llama-3.1-8B (16 GB) and Qwen3-30B-A3B (61 GB) are made first, of random bfloat16 weights in files of 4 GiB,
under --folder, which should be a file system in memory. Beside each time stand that of a dummy of the same shape (whose weights the GPU makes: what
a start takes without reading any), the bar for what is between the two, and what the link alone takes at 55 GB/s.
"""
import argparse
import concurrent.futures
import json
import pathlib
import random
import shutil
import statistics
import struct
import sys
import time

from served import RESULTS, command, driver, start

LINK = 55e9
FILE = 4 << 30
COMMON = {"torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": False,
          "bos_token_id": 0, "eos_token_id": 1}
SHAPES = {
    "llama-3.1-8b": (2.0, {**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
                           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
                           "vocab_size": 128256, "rope_theta": 500000.0}),
    "qwen3-30b-a3b": (6.0, {**COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 48,
                            "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
                            "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
                            "vocab_size": 151936, "rope_theta": 1000000.0}),
}


def tensors(c):
    """Names and shapes, in the order of layers."""
    hidden, head = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", (hidden,)
        for name, shape in (("q", (q, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, q))):
            yield f"{at}self_attn.{name}_proj.weight", shape
        if "num_experts" in c:
            for name in "qk":
                yield f"{at}self_attn.{name}_norm.weight", (head,)
        yield at + "post_attention_layernorm.weight", (hidden,)
        if "num_experts" in c:
            yield at + "mlp.gate.weight", (c["num_experts"], hidden)
        ffn = c.get("moe_intermediate_size", c["intermediate_size"])
        for m in [f"experts.{e}." for e in range(c["num_experts"])] if "num_experts" in c else [""]:
            for name, shape in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn))):
                yield f"{at}mlp.{m}{name}_proj.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (c["vocab_size"], hidden)


def size(shape):
    return 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)


def write_file(path, some, noise):
    header, at = {}, 0
    for name, shape in some:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size(shape)]}
        at += size(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        while at > 0:
            f.write(noise[:min(at, len(noise))])
            at -= len(noise)


def byte_symbols():
    """Of byte-level vocabularies: a printable character for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return [chr(c) for _, c in sorted([(b, b) for b in plain] + [(b, 256 + i) for i, b in enumerate(rest)])]


def make(folder, config):
    """Returns its bytes."""
    folder.mkdir(parents=True)
    noise = bytearray(random.Random(1).randbytes(64 << 20))
    noise[1::2] = bytes(0x3c | b & 0x80 for b in noise[1::2])  # of about .01, either sign
    files, room = [[]], 0
    for name, shape in tensors(config):
        if room + size(shape) > FILE and files[-1]:
            files.append([])
            room = 0
        files[-1].append((name, shape))
        room += size(shape)
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda f: write_file(folder / f[0], f[1], noise), zip(names, files)))
    json.dump({"metadata": {}, "weight_map": {t: n for n, f in zip(names, files) for t, _ in f}}, open(folder / "model.safetensors.index.json", "w"))
    json.dump(config, open(folder / "config.json", "w"))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    json.dump({"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
               "model": {"type": "BPE", "vocab": {s: i for i, s in enumerate(byte_symbols())}, "merges": []}}, open(folder / "tokenizer.json", "w"))
    return sum(size(s) for _, s in tensors(config))


def ready_after(kvasir, model, flags):
    """Seconds, and what GPU it was."""
    began = time.perf_counter()
    process, log = start(kvasir, model, "--device", "cuda", *flags)
    taken = round(time.perf_counter() - began, 2)
    process.terminate()
    process.communicate(timeout=60)
    return taken, next((e["device"] for e in log if "device" in e), None)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kvasir", nargs="+", help="the program, built with -DKVASIR_CUDA=ON; several are timed by turns")
    p.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)} (default all)")
    p.add_argument("--folder", default="/dev/shm/kvasir-load", help="where they are made, and removed (default %(default)s)")
    p.add_argument("--rounds", type=int, default=3, help="starts of each program (default %(default)s)")
    p.add_argument("--serve", default="", help="more options of kvasir serve, in one word")
    p.add_argument("--commit", default="", help="what was built, for the record")
    p.add_argument("--out", default=RESULTS / "gpu-load.json", help="the JSON record; empty: none")
    a = p.parse_args()

    record = {"driver": driver(), "commit": a.commit, "command": command("bench/gpu/load.py"), "shapes": {}}
    print(f"{'':16} {'GB':>5} {'seconds to ready':>24} {'of a dummy':>24} {'loading':>8} {'bar':>5} {'link':>5}")
    for shape in a.shapes.split(","):
        bar, config = SHAPES[shape]
        folder = pathlib.Path(a.folder) / shape
        try:
            size_in_bytes = make(folder, config)
            times, dummies = {k: [] for k in a.kvasir}, {k: [] for k in a.kvasir}
            for _ in range(a.rounds):
                for kvasir in a.kvasir:
                    for model, to in ((str(folder), times), (f"dummy:{shape},type=bf16", dummies)):
                        taken, record["device"] = ready_after(kvasir, model, a.serve.split())
                        to[kvasir].append(taken)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for kvasir, taken in times.items():
            loading = round(statistics.median(taken) - statistics.median(dummies[kvasir]), 2)
            print(f"{shape:16} {size_in_bytes / 1e9:5.1f} {' '.join(map(str, taken)):>24} {' '.join(map(str, dummies[kvasir])):>24} {loading:8.2f} {bar:5.1f} "
                  f"{size_in_bytes / LINK:5.2f}  {pathlib.Path(kvasir).name}", flush=True)
            record["shapes"].setdefault(shape, {"bytes": size_in_bytes, "bar_s": bar, "link_s": round(size_in_bytes / LINK, 2), "programs": []})["programs"].append(
                {"program": pathlib.Path(kvasir).name, "ready_s": taken, "dummy_ready_s": dummies[kvasir], "loading_s": loading})
    if a.out:
        json.dump(record, open(a.out, "w"), indent=1)


if __name__ == "__main__":
    sys.exit(main())
