#!/usr/bin/env python3
"""Writes tests/model/fixtures/outside.json: small networks in every quantized type, and Gemma 3, as llama.cpp computes
them in float32. Needs numpy and gguf (PyPI), and what bench/peers has built:

    python3 tests/model/make_outside.py "$(bench/peers | sed -n s/^source=//p)" "$(bench/peers | sed -n s/^build=//p)"

The weights are a formula that tests/model/small_gguf.h repeats (of a quantized tensor, its bytes), so none is stored.
"""
import glob, json, os, shutil, subprocess, sys, tempfile
import gguf
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
VOCAB, HIDDEN, FFN, HEADS, KV = 64, 256, 256, 8, 4
TOKENS = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(40)]
ROWS = [7, 20, 39]


def noise(name, count):
    tag = 0
    for c in name.encode():
        tag = (tag * 31 + c) & 0xFFFFFFFF
    x = (np.arange(count, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(tag)) & np.uint64(0xFFFFFFFF)
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x45D9F3B)) & np.uint64(0xFFFFFFFF)
    return (x ^ (x >> np.uint64(16))) & np.uint64(0xFFFF)


# Of each type: where a block has its float16 scales, and values that make ordinary weights of any bytes.
SCALES = {
    "Q4_0": [(0, .015)], "Q4_1": [(0, .015), (2, -.1125)], "Q5_0": [(0, .0075)], "Q5_1": [(0, .0075), (2, -.11625)],
    "Q8_0": [(0, .001)], "Q2_K": [(80, .007), (82, .0105)], "Q3_K": [(108, .0017)],
    "Q4_K": [(0, .00035), (2, .002625)], "Q5_K": [(0, .000175), (2, .0027125)], "Q6_K": [(208, .00006)],
}


def half(v):
    return int(np.float16(v).view(np.uint16))


def tensor(name, kind, cols, rows):
    if kind == "F32":
        w = (noise(name, rows * cols).astype(np.float64) / 65536 - .5) * (.5 if rows == 1 else .25) + (rows == 1)
        return w.astype(np.float32).reshape((rows, cols) if rows > 1 else cols)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = (noise(name, rows * cols // block * size) & np.uint64(255)).astype(np.uint8).reshape(-1, size)
    for at, value in SCALES[kind]:
        data[:, at:at + 2] = np.array([half(value)], np.uint16).view(np.uint8)
    return data.reshape(rows, -1)


def network(arch, layers, kind, head_dim):
    gemma = arch == "gemma3"
    kv = [["context_length", 512], ["block_count", layers], ["embedding_length", HIDDEN], ["feed_forward_length", FFN],
          ["attention.head_count", HEADS], ["attention.head_count_kv", KV], ["attention.key_length", head_dim],
          ["attention.value_length", head_dim], ["rope.dimension_count", head_dim], ["vocab_size", VOCAB],
          ["attention.layer_norm_rms_epsilon", 1e-6], ["rope.freq_base", 1e6 if gemma else 1e4]]
    if gemma:
        kv.append(["attention.sliding_window", 8])
    tensors = [["token_embd.weight", kind, HIDDEN, VOCAB], ["output_norm.weight", "F32", HIDDEN, 1]]
    for i in range(layers):
        q, k = HEADS * head_dim, KV * head_dim
        norms = [("attn_norm", HIDDEN), ("ffn_norm", HIDDEN)]
        if gemma:
            norms += [("attn_q_norm", head_dim), ("attn_k_norm", head_dim), ("post_attention_norm", HIDDEN), ("post_ffw_norm", HIDDEN)]
        tensors += [[f"blk.{i}.{n}.weight", "F32", size, 1] for n, size in norms]
        tensors += [[f"blk.{i}.{n}.weight", kind, cols, rows] for n, cols, rows in [
            ("attn_q", HIDDEN, q), ("attn_k", HIDDEN, k), ("attn_v", HIDDEN, k), ("attn_output", q, HIDDEN),
            ("ffn_gate", HIDDEN, FFN), ("ffn_up", HIDDEN, FFN), ("ffn_down", FFN, HIDDEN)]]
    return kv, tensors


def write(path, arch, kv, tensors):
    w = gguf.GGUFWriter(path, arch)
    w.add_string("tokenizer.ggml.model", "no_vocab")
    for key, value in kv:
        (w.add_float32 if isinstance(value, float) else w.add_uint32)(f"{arch}.{key}", value)
    for name, kind, cols, rows in tensors:
        w.add_tensor(name, tensor(name, kind, cols, rows), raw_dtype=gguf.GGMLQuantizationType[kind])
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()


def main(source, build):
    work = tempfile.TemporaryDirectory()
    tool = os.path.join(work.name, "llamacpp_logits")
    archives = [f for pattern in ("libllama.a", "libggml*.a") for f in glob.glob(f"{build}/**/{pattern}", recursive=True)]
    # llama.cpp looks its GELU up in a table of float16; here it computes it.
    cpu = os.path.join(work.name, "ggml-cpu")
    shutil.copytree(f"{source}/ggml/src/ggml-cpu", cpu)
    with open(f"{cpu}/vec.h") as f:
        text = f.read()
    with open(f"{cpu}/vec.h", "w") as f:
        f.write(text.replace("#define GGML_GELU_FP16", ""))
    objects = []
    for name in ["ops", "vec"]:
        objects.append(f"{work.name}/{name}.o")
        subprocess.check_call(["g++", "-w", "-O1", "-std=c++17", "-mavx2", "-mfma", "-mf16c", f"-I{cpu}", f"-I{source}/ggml/src", f"-I{source}/ggml/include",
                               "-c", f"{cpu}/{name}.cpp", "-o", objects[-1]])
    subprocess.check_call(["g++", "-O1", f"-I{source}/include", f"-I{source}/ggml/include", f"{HERE}/llamacpp_logits.cc", "-o", tool, *objects,
                           "-Wl,--start-group", *archives, "-Wl,--end-group", "-fopenmp", "-lpthread", "-ldl", "-lm"])
    cases = [(kind, "llama", 2, kind, 32) for kind in SCALES] + [("Gemma 3", "gemma3", 7, "F32", 32),
                                                                 ("Gemma 3 in Q4_K", "gemma3", 7, "Q4_K", 64)]
    out = {"tokens": TOKENS, "rows": ROWS, "scales": {k: [[at, half(v)] for at, v in s] for k, s in SCALES.items()}, "cases": []}
    for name, arch, layers, kind, head_dim in cases:
        kv, tensors = network(arch, layers, kind, head_dim)
        model, scratch = (os.path.join(work.name, f) for f in ("m.gguf", "f32.gguf"))
        write(model, arch, kv, tensors)
        text = subprocess.check_output([tool, model, scratch, *map(str, TOKENS)], text=True).splitlines()
        logits = [[round(float(v), 5) for v in text[i].split()] for i in ROWS]
        print(name, max(map(max, logits)), min(map(min, logits)), file=sys.stderr)
        out["cases"].append({"name": name, "arch": arch, "kv": kv, "tensors": tensors, "logits": logits})
    with open(f"{HERE}/fixtures/outside.json", "w") as f:
        json.dump(out, f, separators=(",", ":"))
        f.write("\n")


main(*sys.argv[1:])
