#!/usr/bin/env python3
"""Writes tests/text/data/unigrams.json: a small vocabulary of unigrams as SentencePiece trains it, with a table of characters
of its own, as llama.cpp's converter writes T5's to GGUF; and the ids that SentencePiece gives some texts.

    python3 -m venv /tmp/v && /tmp/v/bin/pip install sentencepiece==0.2.3 protobuf && /tmp/v/bin/python tests/text/make_unigrams.py
"""
import io, json, os, random, tempfile
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
WORDS = "the of and hello world translate English to German summarize tokenizer running naïve façade über señor Привет мир".split()
RULES = {"\t": " ", "\n": " ", "\u3000": " ", "½": "1/2", "Ａ": "A", "ﬁ": "fi", "²": "2", "e\u0301": "\u00e9"}


def texts(rng, count, letters):
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(0, 9)):
            word = rng.choice(WORDS + list(RULES) + ["", " ", "x", "12", "3.14", "don't", ":"])
            if rng.random() < .3:
                word += "".join(rng.choice(letters) for _ in range(rng.randint(1, 4)))
            parts.append(word)
        yield rng.choice(["", " ", "  "]) + rng.choice([" ", " ", "  ", ""]).join(parts) + rng.choice(["", " "])


def main():
    rng = random.Random(5)
    with tempfile.TemporaryDirectory() as work:
        rules = os.path.join(work, "rules.tsv")
        with open(rules, "w") as f:
            for old, new in RULES.items():
                f.write(" ".join(f"{ord(c):X}" for c in old) + "\t" + " ".join(f"{ord(c):X}" for c in new) + "\n")
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(list(texts(rng, 3000, "abcdefgh"))), model_writer=model, vocab_size=220, model_type="unigram",
            pad_id=0, eos_id=1, unk_id=2, bos_id=-1, normalization_rule_tsv=rules, character_coverage=.999, num_threads=1)
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(sp.vocab_size())
    kind = lambda i: 2 if sp.IsUnknown(i) else 3 if sp.IsControl(i) else 1
    normalizer = proto.normalizer_spec
    cases = [[t, sp.encode(t)] for t in texts(rng, 400, "abcdefghĳ€中")]
    out = {"tokens": [sp.IdToPiece(i) for i in ids], "scores": [sp.GetScore(i) for i in ids], "types": [kind(i) for i in ids],
           "charsmap": list(normalizer.precompiled_charsmap), "remove_extra_spaces": normalizer.remove_extra_whitespaces,
           "add_space_prefix": normalizer.add_dummy_prefix, "texts": cases}
    with open(os.path.join(HERE, "unigrams.json"), "w") as f:
        f.write("{" + ",\n".join(f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in out.items()) + "}\n")


if __name__ == "__main__":
    main()
