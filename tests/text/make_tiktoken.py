#!/usr/bin/env python3
"""Writes tests/text/data/tiktoken.json: a small vocabulary as tiktoken's files have it, with Moonshot's way of cutting words off, and the ids
that tiktoken gives the 10,000 strings (a hash of 24 bits a string).

    python3 -m venv /tmp/v && /tmp/v/bin/pip install tiktoken==0.12.0 && /tmp/v/bin/python tests/text/make_tiktoken.py
"""
import base64, json, os, zlib

import tiktoken

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
PATTERN = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
SPECIAL = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 7: "<|tool_call_begin|>", 255: "[PAD]"}


def byte_of():
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def main():
    letters = byte_of()
    tokens = dict.fromkeys(bytes([b]) for b in range(255, -1, -1))  # single bytes in no order that means anything
    for family in ("gpt-4o", "deepseek-v3"):
        with open(os.path.join(HERE, family + ".json")) as f:
            tokens |= dict.fromkeys(bytes(letters[c] for c in t) for t in json.load(f)["tokens"] if all(c in letters for c in t))
    ranks = {t: i for i, t in enumerate(tokens)}
    config = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
              "added_tokens_decoder": {str(len(ranks) + i): {"content": s, "special": s != "<|tool_call_begin|>"} for i, s in SPECIAL.items()}}
    t = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={s: len(ranks) + i for i, s in SPECIAL.items()})
    with open(os.path.join(HERE, "strings.json")) as f:
        texts = json.load(f)
    parts = [zlib.crc32(",".join(map(str, t.encode_ordinary(s))).encode()).to_bytes(4, "little")[:3] for s in texts]
    mixed = "<|im_user|>你好, world's 1234\n\n[EOS]"
    out = {"file": "".join(f"{base64.b64encode(b).decode()} {i}\n" for b, i in ranks.items()), "config": json.dumps(config), "tokens": len(ranks),
           "mixed": mixed, "mixed_ids": t.encode(mixed, allowed_special="all"), "hashes": base64.b64encode(b"".join(parts)).decode()}
    with open(os.path.join(HERE, "tiktoken.json"), "w") as f:
        json.dump(out, f, separators=(",", ":"))


main()
