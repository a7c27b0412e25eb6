#!/usr/bin/env python3
"""Model files made wrong, byte by byte and meaning by meaning: `kvasir inspect`, `generate` and `serve` refuse them or serve
them, within a limit on memory and processor time, and none is ended by a signal.

usage: model_files.py KVASIR [--mutations 20000] [--seed 7] [--keep FOLDER]"""
import argparse
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

MEMORY = 4 << 30  # address space: stacks and maps are reserved in it, and mostly never touched
PROCESSOR_SECONDS = 20
DIM, FFN, LAYERS, HEADS = 32, 64, 1, 1


def text(s):
    s = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(s)) + s


def value(v):
    if isinstance(v, (str, bytes)):
        return struct.pack("<I", 8) + text(v)
    if isinstance(v, float):
        return struct.pack("<If", 6, v)
    if isinstance(v, int):
        return struct.pack("<II", 4, v)
    if isinstance(v[0], (str, bytes)):
        return struct.pack("<IIQ", 9, 8, len(v)) + b"".join(text(s) for s in v)
    return struct.pack("<IIQ", 9, 5, len(v)) + b"".join(struct.pack("<i", n) for n in v)


def byte_tokens():
    """GPT-2's characters for bytes."""
    spare = 0x100
    for b in range(256):
        printable = 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or 0xAE <= b <= 0xFF
        yield chr(b if printable else spare)
        spare += not printable


def gguf(changed=None):
    tokens = ["<|end|>"] + list(byte_tokens()) + ["he", "hel"]
    keys = {
        "general.architecture": "llama",
        "general.name": "small",
        "llama.context_length": 128,
        "llama.block_count": LAYERS,
        "llama.embedding_length": DIM,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ["h e", "he l"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    keys.update(changed or {})
    shapes = {"token_embd.weight": (DIM, len(tokens)), "output_norm.weight": (DIM,), "output.weight": (DIM, len(tokens))}
    for i in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{i}.{name}.weight"] = (DIM, DIM)
        shapes |= {f"blk.{i}.attn_norm.weight": (DIM,), f"blk.{i}.ffn_norm.weight": (DIM,),
                   f"blk.{i}.ffn_gate.weight": (DIM, FFN), f"blk.{i}.ffn_up.weight": (DIM, FFN),
                   f"blk.{i}.ffn_down.weight": (FFN, DIM)}
    head = struct.pack("<IIQQ", 0x46554747, 3, len(shapes), len(keys))
    head += b"".join(text(k) + value(v) for k, v in keys.items())
    random_ = random.Random(1)
    data = b""
    for name, shape in shapes.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        head += struct.pack("<IQ", 0, len(data))
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        data += struct.pack(f"<{count}f", *(random_.uniform(-.2, .2) for _ in range(count)))
        data += bytes(-len(data) % 32)
    return head + bytes(-len(head) % 32) + data


# What was seen to hurt, and may not again.
CRAFTED = {
    "a name that is not UTF-8": {"general.name": b"\xff\xfe\x80 \xed\xa0\x80"},
    "an architecture that is not UTF-8": {"general.architecture": b"\xff"},
    "a template 200,000 deep": {"tokenizer.chat_template": "{{ " + "not " * 200000 + "x }}"},
    "a template of 200,000 signs": {"tokenizer.chat_template": "{{ " + "-" * 200000 + "1 }}"},
    "a template of 100,000 filters": {"tokenizer.chat_template": "{{ x" + "|e" * 100000 + " }}"},
    "a namespace in itself": {"tokenizer.chat_template": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}"},
    "a text that doubles": {"tokenizer.chat_template": "{% set ns = namespace(x='aa') %}{% for i in range(60) %}"
                            "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"},
    "a wide format": {"tokenizer.chat_template": "{{ '%999999999d'|format(1) }}"},
    "a template that is not UTF-8": {"tokenizer.chat_template": b"\xff{{ messages }}"},
    "tokens that are not UTF-8": {"tokenizer.ggml.tokens": [b"\xff" * n for n in range(259)]},
    "no heads": {"llama.attention.head_count": 0},
    "a context past all memory": {"llama.context_length": 0xFFFFFFFF},
    "layers past all memory": {"llama.block_count": 0x7FFFFFFF},
}


def mutated(base, random_):
    """The header more often than the weights; some bytes, a number, a piece moved, the end cut off."""
    out = bytearray(base)
    for _ in range(random_.choice((1, 1, 1, 2, 4, 16))):
        at = random_.randrange(min(len(out), 6000) if random_.random() < .9 else len(out))
        kind = random_.randrange(6)
        if kind == 0:
            out[at] ^= 1 << random_.randrange(8)
        elif kind == 1:
            out[at] = random_.randrange(256)
        elif kind == 2:
            number = random_.choice((0, 1, 2, 3, 31, 32, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
            packed = struct.pack("<Q", number)[: random_.choice((4, 8))]
            out[at:at + len(packed)] = packed
        elif kind == 3:
            end = min(len(out), at + random_.randrange(1, 64))
            del out[at:end]
        elif kind == 4:
            out[at:at] = out[at:at + random_.randrange(1, 64)]
        else:
            del out[max(at, 8):]
        if not out:
            break
    return bytes(out)


def limited():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Tests:
    def __init__(self, kvasir, keep):
        self.kvasir, self.keep, self.wrong, self.served, self.refused = kvasir, keep, 0, 0, 0

    def fail(self, what, path, said):
        self.wrong += 1
        print(f"{what}: {said}", file=sys.stderr)
        if self.keep:
            os.makedirs(self.keep, exist_ok=True)
            shutil.copy(path, os.path.join(self.keep, f"{self.wrong}.gguf"))

    def run(self, what, path, *command):
        done = subprocess.run([self.kvasir, *command], stdin=subprocess.DEVNULL, capture_output=True, preexec_fn=limited)
        if done.returncode not in (0, 1, 2):
            self.fail(f"{what}: {command[0]}", path, f"exit {done.returncode}: {done.stderr[-500:]!r}")
        self.served += done.returncode == 0
        self.refused += done.returncode != 0
        return done

    def inspect(self, what, path):
        done = self.run(what, path, "inspect", path, "--json", "--tensors")
        if done.returncode == 0:
            try:
                json.loads(done.stdout.decode("utf-8"))
            except ValueError as e:
                self.fail(f"{what}: inspect", path, f"no JSON: {e}")

    def generate(self, what, path):
        self.run(what, path, "generate", "--model", path, "hello", "--max-tokens", "2", "--kv-memory", "1MiB",
                 "--threads", "1")

    def serve(self, what, path):
        """Serves, or ends; a signal ends it in time whatever it does."""
        process = subprocess.Popen([self.kvasir, "serve", "--model", path, "--http-port", "0", "--grpc-port", "0", "--threads",
                                    "1", "--kv-memory", "1MiB", "--log-format", "json"], stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=limited)
        said = b""
        for line in process.stderr:
            said += line
            if b'"message":"ready"' in line:
                break
        process.send_signal(signal.SIGTERM)
        try:
            said += process.communicate(timeout=60)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            self.fail(f"{what}: serve", path, "did not end")
        if process.returncode not in (0, 1, 2, -signal.SIGTERM):
            self.fail(f"{what}: serve", path, f"exit {process.returncode}: {said[-500:]!r}")


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("kvasir")
    arguments.add_argument("--mutations", type=int, default=20000)
    arguments.add_argument("--seed", type=int, default=7)
    arguments.add_argument("--keep")
    a = arguments.parse_args()
    tests = Tests(a.kvasir, a.keep)
    folder = tempfile.mkdtemp(prefix="kvasir-model-files-")
    path = os.path.join(folder, "model.gguf")

    def write(content):
        with open(path, "wb") as f:
            f.write(content)

    try:
        began = time.monotonic()
        base = gguf()
        write(base)
        tests.inspect("as it should be", path)
        tests.generate("as it should be", path)
        if tests.refused:
            sys.exit("the file that is not mutated is refused")
        for what, changed in CRAFTED.items():
            write(gguf(changed))
            tests.inspect(what, path)
            tests.generate(what, path)
        for what in list(CRAFTED)[:2] if a.mutations < 1000 else CRAFTED:
            write(gguf(CRAFTED[what]))
            tests.serve(what, path)
        random_ = random.Random(a.seed)
        for n in range(a.mutations):
            write(mutated(base, random_))
            what = f"seed {a.seed}, mutation {n}"
            tests.inspect(what, path)
            if n % 4 == 0:
                tests.generate(what, path)
            if n % 100 == 50:
                tests.serve(what, path)
        print(f"{a.mutations} mutations in {time.monotonic() - began:.0f} s: {tests.served} runs served, {tests.refused} refused, "
              f"{tests.wrong} wrong")
        sys.exit(tests.wrong > 0)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
