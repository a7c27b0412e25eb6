#!/usr/bin/env python3
"""Encoder-decoders over HTTP and on the command line: each stored network as a folder with a SentencePiece tokenizer, served
by the real binary, whose answers are transformers' own. encoder_decoders.py KVASIR"""
import json
import math
import pathlib
import struct
import subprocess
import sys
import tempfile
import urllib.request

from rerank import FIXTURES, KVASIR, post, values

END, VOCAB = 1, 256
SPECIAL = {0: "<pad>", END: "</s>", 2: "<unk>"}
ON_CPU = ["--device", "cpu", "--precise", "--threads", "1", "--kv-memory", "16MiB"]


def write(folder, one):
    header, data = {}, b""
    for name, shape in one["tensors"]:
        w = struct.pack(f"<{math.prod(shape)}f", *values(name, shape, one["norm_base"]))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(w)]}
        data += w
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps(one["configs"][0]))
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": i, "content": s, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                          "special": True} for i, s in SPECIAL.items()],
        "pre_tokenizer": metaspace, "decoder": metaspace,
        "post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}},
                                                                   {"SpecialToken": {"id": "</s>", "type_id": 0}}],
                           "pair": [], "special_tokens": {"</s>": {"id": "</s>", "ids": [END], "tokens": ["</s>"]}}},
        "model": {"type": "Unigram", "unk_id": 2, "byte_fallback": False,
                  "vocab": [[SPECIAL.get(i, f"▁w{i}"), -1.0 - i / 1000] for i in range(VOCAB)]}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>"}))


def write_gguf(path, one):
    """As llama.cpp's converter writes it."""
    name = lambda s: struct.pack("<Q", len(s.encode())) + s.encode()
    value = lambda kind, v: name(v) if kind == 8 else struct.pack({4: "<I", 5: "<i", 6: "<f", 7: "<?"}[kind], v)
    array = lambda kind, all: struct.pack("<IQ", kind, len(all)) + b"".join(value(kind, v) for v in all)
    pieces = range(VOCAB)
    keys = {"general.architecture": (8, one["gguf"]["arch"]), "tokenizer.ggml.model": (8, "t5"),
            "tokenizer.ggml.tokens": (9, array(8, [SPECIAL.get(i, f"▁w{i}") for i in pieces])),
            "tokenizer.ggml.scores": (9, array(6, [-1.0 - i / 1000 for i in pieces])),
            "tokenizer.ggml.token_type": (9, array(5, [{0: 3, END: 3, 2: 2}.get(i, 1) for i in pieces])),
            "tokenizer.ggml.remove_extra_whitespaces": (7, True)}
    keys.update({f"{one['gguf']['arch']}.{key}": (kind, v) for key, kind, v, _ in one["gguf"]["kv"]})
    shapes = dict((n, s) for n, s in one["tensors"])
    head, data = b"", b""
    for tensor, shape, how, source in one["gguf"]["tensors"]:
        assert how == "same", tensor
        head += name(tensor) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 0, len(data))
        data += struct.pack(f"<{math.prod(shape)}f", *values(source, shapes[source], one["norm_base"]))
        data += bytes(-len(data) % 32)
    out = struct.pack("<IIQQ", 0x46554747, 3, len(one["gguf"]["tensors"]), len(keys))
    for key, (kind, v) in keys.items():
        out += name(key) + struct.pack("<I", kind) + (v if kind == 9 else value(kind, v))
    out += head
    path.write_bytes(out + bytes(-len(out) % 32) + data)


def text(ids):
    return " ".join(f"w{i}" for i in ids if i not in SPECIAL)


def check(one, prompt, greedy, port):
    ask = dict(prompt=text(prompt), max_tokens=len(greedy), temperature=0, ignore_eos=True)
    code, got = post(port, "/v1/completions", **ask)
    assert code == 200, got
    assert got["choices"][0]["text"] == text(greedy), (got, greedy)
    assert got["usage"] == dict(got["usage"], prompt_tokens=len(prompt) + 1, completion_tokens=len(greedy)), got["usage"]
    # By ids, several at once, and streamed.
    code, got = post(port, "/v1/completions", **dict(ask, prompt=[prompt, prompt[3:], prompt]))
    assert code == 200 and [c["text"] == text(greedy) for c in got["choices"]][::2] == [True, True], got
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data=json.dumps(dict(ask, stream=True)).encode(),
                                     headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        parts = [json.loads(line[6:]) for line in answer.read().decode().split("\n") if line.startswith("data: {")]
    assert "".join(p["choices"][0]["text"] for p in parts) == text(greedy), parts
    # Its answer ends where the model says so.
    end = next((i for i, t in enumerate(greedy) if t == END), None)
    code, got = post(port, "/v1/completions", **dict(ask, ignore_eos=False))
    assert code == 200 and got["choices"][0]["finish_reason"] == ("length" if end is None else "stop"), got
    beams = one["beams"][3]
    code, got = post(port, "/v1/completions", **dict(ask, use_beam_search=True, n=4, beam_width=4, stop_token_ids=beams["stops"]))
    assert code == 200, got
    kept = [[t for t in a["tokens"] if t not in beams["stops"]] for a in beams["answers"]]
    assert [c["text"] for c in got["choices"]] == [text(k) for k in kept], (got, beams)
    # What it cannot do.
    for path, body, says in (("/v1/completions", dict(ask, echo=True, logprobs=1), "encoder-decoder"),
                             ("/v1/embeddings", dict(input=text(prompt)), "encoder-decoder"),
                             ("/v1/completions", dict(ask, prompt="w9 " * 600), "max_tokens_per_step")):
        code, got = post(port, path, **body)
        assert 400 <= code <= 501 and says in json.dumps(got), (path, code, got)


def main():
    stored = json.loads((FIXTURES / "t5.json").read_text())
    prompt = stored["prompts"][3]
    for one in stored["cases"]:
        with tempfile.TemporaryDirectory() as work:
            write(pathlib.Path(work), one)
            greedy = one["greedy"][3]
            models = [work]
            if "gguf" in one:
                models.append(f"{work}/of.gguf/m.gguf")
                pathlib.Path(models[1]).parent.mkdir()
                write_gguf(pathlib.Path(models[1]), one)
            for model in models:
                said = subprocess.run([KVASIR, "generate", "--model", model, *ON_CPU, "--max-tokens", str(len(greedy)), "--ignore-eos",
                                       "--json", text(prompt)], capture_output=True, text=True, timeout=60)
                assert said.returncode == 0 and json.loads(said.stdout)["text"] == text(greedy), (said, greedy)
            said = subprocess.run([KVASIR, "inspect", work], capture_output=True, text=True, timeout=60)
            assert said.returncode == 0 and "encoder-decoder" in said.stdout, said
            said = subprocess.run([KVASIR, "perplexity", "--model", work, "--file", f"{work}/config.json"],
                                  capture_output=True, text=True, timeout=60)
            assert said.returncode != 0 and "encoder-decoder" in said.stderr, said
            server = subprocess.Popen([KVASIR, "serve", "--model", work, *ON_CPU, "--grpc-port", "-1", "--http-port", "0", "--log-format",
                                       "json"], stderr=subprocess.PIPE, text=True)
            try:
                log, port = [], None
                for line in server.stderr:
                    log.append(line)
                    if line.startswith("{") and json.loads(line)["message"] == "ready":
                        port = json.loads(line)["http_port"]
                        break
                assert port, f"{one['name']}: the server ended: {log}"
                check(one, prompt, greedy, port)
            finally:
                server.kill()
                server.wait()
        print(one["name"], "answers as transformers does")


if __name__ == "__main__":
    main()
