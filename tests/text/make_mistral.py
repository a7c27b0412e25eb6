#!/usr/bin/env python3
"""Writes tests/text/data/mistral.json: small vocabularies as Mistral's tekken.json and SentencePiece's tokenizer.model have
them, and the ids that mistral-common and sentencepiece give the 10,000 strings (a hash of 24 bits a string); and
mistral_files.json: those that they have by the real files in mistral-common's wheel.

    python3 -m venv /tmp/v && /tmp/v/bin/pip install mistral-common==1.13.1 sentencepiece==0.2.3 && /tmp/v/bin/python tests/text/make_mistral.py
"""
import base64, io, json, os, pathlib, re, tempfile, zlib

import mistral_common
import sentencepiece
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
PATTERN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
           r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
           r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def hashes(ids_of, texts):
    parts = [zlib.crc32(",".join(map(str, ids_of(t))).encode()).to_bytes(4, "little")[:3] for t in texts]
    return base64.b64encode(b"".join(parts)).decode()


def byte_of():
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    out, spare = {}, 256
    for b in range(256):
        if b in plain:
            out[chr(b)] = b
        else:
            out[chr(spare)] = b
            spare += 1
    return out


def tekken(texts):
    """The vocabulary of the family's fixture, single bytes first."""
    letters = byte_of()
    with open(os.path.join(HERE, "tekken.json")) as f:
        tokens = [bytes(letters[c] for c in t) for t in json.load(f)["tokens"] if all(c in letters for c in t)]
    tokens = [t for t in tokens if t != b"<think>"]
    tokens = sorted(t for t in tokens if len(t) == 1) + [t for t in tokens if len(t) > 1]
    assert len(set(tokens)) == len(tokens) and tokens[:256] == [bytes([b]) for b in range(256)]
    special = [{"rank": i, "token_str": s, "is_control": True} for i, s in enumerate(SPECIAL)]
    file = {"config": {"pattern": PATTERN, "num_vocab_tokens": len(tokens), "default_vocab_size": len(tokens) + 10,
                       "default_num_special_tokens": 10, "version": "v11"},
            "vocab": [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)],
            "special_tokens": special}
    with tempfile.TemporaryDirectory() as work:
        path = os.path.join(work, "tekken.json")
        with open(path, "w") as f:
            json.dump(file, f)
        t = Tekkenizer.from_file(path)
    return {"file": json.dumps(file, separators=(",", ":")), "hashes": hashes(lambda s: t.encode(s, bos=False, eos=False), texts)}


def sentence_piece(texts, prefix):
    out = io.BytesIO()
    # Strings with these come out otherwise of SentencePiece itself: it takes a zero byte for the end.
    corpus = [re.sub(r"<\S*?>|\x00", "", t).replace("\n", " ") for t in texts[::3]]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=out, vocab_size=900, model_type="bpe", byte_fallback=True,
        character_coverage=0.98, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=prefix, split_digits=True, allow_whitespace_only_pieces=True, num_threads=1, minloglevel=2)
    model = out.getvalue()
    s = sentencepiece.SentencePieceProcessor(model_proto=model)
    return {"file": base64.b64encode(model).decode(), "hashes": hashes(s.encode, texts)}


def unigrams(texts, changes):
    """As T5's, with the map of characters of its makers, or with nothing that changes texts and a token for each byte."""
    out = io.BytesIO()
    corpus = [re.sub(r"<\S*?>|\x00", "", t).replace("\n", " ") for t in texts[::3]]
    own = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1) if changes else dict(
        normalization_rule_name="identity", remove_extra_whitespaces=False, byte_fallback=True, allow_whitespace_only_pieces=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=out, vocab_size=800, model_type="unigram", character_coverage=0.98,
        num_threads=1, minloglevel=2, **own)
    model = out.getvalue()
    s = sentencepiece.SentencePieceProcessor(model_proto=model)
    return {"file": base64.b64encode(model).decode(), "hashes": hashes(s.encode, texts)}


def real(path, texts):
    if path.suffix == ".json":
        t = Tekkenizer.from_file(path)
        encode = lambda s: t.encode(s, bos=False, eos=False)
        special = {p["token_str"]: p["rank"] for p in t._all_special_tokens}
        size = t.n_words
    else:
        t = sentencepiece.SentencePieceProcessor(model_file=str(path))
        encode = t.encode
        size = t.vocab_size()
        special = {t.id_to_piece(i): i for i in range(size) if t.IsControl(i)}
    shown = {name: rank for name, rank in special.items() if not re.search(r"control_|SPECIAL_", name)}
    return {"tokens": size, "special": shown, "hashes": hashes(encode, texts)}


def real_files(texts):
    folder = pathlib.Path(mistral_common.__file__).parent / "data"
    # The same file is there once more with the name of a model that sees.
    return {p.name: real(p, texts) for p in sorted(folder.iterdir()) if p.suffix != ".v7m1"}


def write(name, content):
    with open(os.path.join(HERE, name), "w") as f:
        json.dump(content, f, separators=(",", ":"))
        f.write("\n")


def main():
    with open(os.path.join(HERE, "strings.json")) as f:
        texts = json.load(f)
    out = {"tekken": tekken(texts), "spm": sentence_piece(texts, True), "spm without a prefix": sentence_piece(texts, False),
           "unigrams": unigrams(texts, True), "unigrams as they are": unigrams(texts, False)}
    write("mistral.json", out)
    write("mistral_files.json", real_files(texts))


if __name__ == "__main__":
    main()
