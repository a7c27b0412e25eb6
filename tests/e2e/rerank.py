#!/usr/bin/env python3
"""Cross-encoders over HTTP: each stored network of pairs as a folder with a tokenizer, served by the real binary, whose
/v1/rerank and /v1/score are what transformers makes of the pairs. rerank.py KVASIR"""
import json
import math
import pathlib
import struct
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

KVASIR = sys.argv[1]
FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "model" / "fixtures"
BEGIN, END = 2, 3  # make_embeddings.py's


def values(name, shape, base):
    """make_architectures.py's weights()."""
    tag = 0
    for c in name.encode():
        tag = (tag * 31 + c) & 0xFFFFFFFF
    norm = len(shape) == 1 and name.endswith(".weight") and any(k in name.rsplit(".", 2)[-2] for k in ("norm", "ln_"))
    out = []
    for i in range(math.prod(shape)):
        x = (i * 2654435761 + tag) & 0xFFFFFFFF
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
        x = (x ^ (x >> 16)) & 0xFFFF
        out.append((x / 65536 - .5) * .5 + (base if norm else 0))
    return out


def write(folder, one):
    header, data = {}, b""
    for name, shape in one["tensors"]:
        w = struct.pack(f"<{math.prod(shape)}f", *values(name, shape, one["norm_base"]))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(w)]}
        data += w
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps(one["configs"][0]))
    special = lambda i: {"id": f"w{i}", "ids": [i], "tokens": [f"w{i}"]}
    around = [{"SpecialToken": {"id": f"w{BEGIN}", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
              {"SpecialToken": {"id": f"w{END}", "type_id": 0}}]
    vocab = {f"w{i}": i for i in range(256)}
    words = {  # BERT's kind, and one of whole words in place of a learned vocabulary
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "vocab": vocab, "unk_token": "w0", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    } if one["name"].startswith("bert") else {
        "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": f"w{i}", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                          "special": True} for i in (BEGIN, END)],
        "post_processor": {"type": "TemplateProcessing", "single": around, "pair": around + around[1:],
                           "special_tokens": {f"w{i}": special(i) for i in (BEGIN, END)}}, **words}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def text(ids):
    return " ".join(f"w{i}" for i in ids if i not in (BEGIN, END))


def post(port, path, **body):
    ask = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=json.dumps(body).encode(),
                                 headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(ask, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


def near(score, logit):
    want = 1 / (1 + math.exp(-logit))
    assert abs(score - want) < 2e-5, f"{score} is not {want}"


def check(one, port):
    pairs = [p for p in one["pairs"] if p[0][0] == BEGIN]
    assert len(pairs) == 2
    query, documents = text(pairs[0][0]), [text(p[1]) for p in pairs]
    code, got = post(port, "/v1/rerank", query=query, documents=documents)
    assert code == 200, got
    order = sorted(range(2), key=lambda i: -pairs[i][2])
    assert [r["index"] for r in got["results"]] == order, got
    for r in got["results"]:
        near(r["relevance_score"], pairs[r["index"]][2])
        assert r["document"]["text"] == documents[r["index"]]
    assert got["usage"]["prompt_tokens"] == sum(len(p[0]) + len(p[1]) for p in pairs), got["usage"]
    code, got = post(port, "/v1/rerank", query=query, documents=documents, top_n=1, return_documents=False)
    assert code == 200 and [r["index"] for r in got["results"]] == order[:1] and "document" not in got["results"][0], got
    for first in (query, [query, query]):
        code, got = post(port, "/v1/score", text_1=first, text_2=documents)
        assert code == 200, got
        for d, p in zip(got["data"], pairs, strict=True):
            near(d["score"], p[2])
    code, got = post(port, "/v1/rerank", query=query, documents=["w9 " * 100])
    assert code == 400 and "documents" in json.dumps(got), (code, got)
    code, got = post(port, "/v1/embeddings", input=query)
    assert code >= 400 and "/v1/rerank" in json.dumps(got), (code, got)


def main():
    stored = json.loads((FIXTURES / "embeddings.json").read_text())
    seen = 0
    for one in stored["encoders"]:
        if "pairs" not in one:
            continue
        with tempfile.TemporaryDirectory() as work:
            write(pathlib.Path(work), one)
            server = subprocess.Popen([KVASIR, "serve", "--model", work, "--device", "cpu", "--precise", "--threads", "1", "--grpc-port",
                                       "-1", "--http-port", "0", "--log-format", "json", "--kv-memory", "16MiB"],
                                      stderr=subprocess.PIPE, text=True)
            try:
                said, port = [], None
                for line in server.stderr:
                    said.append(line)
                    if line.startswith("{") and json.loads(line)["message"] == "ready":
                        port = json.loads(line)["http_port"]
                        break
                assert port, f"{one['name']}: the server ended: {said}"
                check(one, port)
            finally:
                server.kill()
                server.wait()
        print(one["name"], "is as transformers has it")
        seen += 1
    assert seen >= 2


if __name__ == "__main__":
    main()
