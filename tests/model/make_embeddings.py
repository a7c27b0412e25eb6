#!/usr/bin/env python3
"""Writes tests/model/fixtures/embeddings.json: what sentence-transformers makes of tokens with the small networks of
architectures.json and with small encoders, pooled each way.

    tests/model/make_embeddings.py [NAME...]    # only these encoders anew

Uses make_architectures.py's environment and formula of weights, and adds sentence-transformers to it.
"""
import importlib.util, json, os, subprocess, sys, tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENV = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvasir" / "fixtures-venv"

if __name__ == "__main__" and Path(sys.prefix).resolve() != VENV.resolve():
    if not (VENV / "bin" / "python").exists():
        raise SystemExit("run tests/model/make_architectures.py first: it makes the environment")
    os.execv(VENV / "bin" / "python", [str(VENV / "bin" / "python"), *sys.argv])
if __name__ == "__main__" and importlib.util.find_spec("sentence_transformers") is None:
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", "sentence-transformers"])

sys.path.insert(0, str(HERE))
import make_architectures as networks

POOLINGS = {"last": "lasttoken", "mean": "mean", "cls": "cls"}
TEXTS = [networks.TOKENS, networks.TOKENS[5:18]]


def tokenizer(folder):
    """Of no use to token ids, but a model is not loaded without one."""
    from tokenizers import Tokenizer, models
    words = Tokenizer(models.WordLevel({str(i): i for i in range(networks.VOCAB)}, unk_token="0"))
    words.save(str(Path(folder) / "tokenizer.json"))
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "0"}))


def embeddings(folder, **kw):
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer
    tokenizer(folder)
    base = Transformer(folder, model_kwargs={"dtype": torch.float32, **kw})
    size = base.auto_model.config.hidden_size
    out = {}
    for name, mode in POOLINGS.items():
        model = SentenceTransformer(modules=[base, Pooling(size, pooling_mode=mode), Normalize()], device="cpu").eval()
        with torch.no_grad():
            out[name] = []
            for tokens in TEXTS:
                ids = torch.tensor([tokens])
                got = model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"][0]
                out[name].append([round(float(v), 6) for v in got])
    return out


def decoder(name):
    model_type, kw, _ = networks.cases()[name]
    with tempfile.TemporaryDirectory() as work:
        networks.reference(name, model_type, kw, work)  # leaves the folder
        attention = "sdpa" if kw.get("alibi") else "eager"
        return {"network": name, "embeddings": embeddings(work, attn_implementation=attention)}


PAIRS = [(networks.TOKENS[:9], networks.TOKENS[9:30]), (networks.TOKENS[3:7], networks.TOKENS[30:37])]
# As a tokenizer has them that begins a text with 2 and ends it with 3 (tests/e2e/rerank.py); RoBERTa's begins the second
# with its end.
BEGIN, END = 2, 3
SPOKEN = [([10, 11, 12, 13], [20, 21, 22, 23, 24]), ([10, 11, 12, 13], [40, 41])]


def pairs_of(name):
    again = [END] if "roberta" in name else []
    return PAIRS + [([BEGIN, *a, END], [*again, *b, END]) for a, b in SPOKEN]


def encoders():
    kw = dict(vocab_size=networks.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
    pad = min(set(range(networks.VOCAB)) - set(networks.TOKENS))
    roberta = dict(kw, pad_token_id=pad, max_position_embeddings=64 + pad + 1, type_vocab_size=1)
    bert = dict(kw, max_position_embeddings=64)
    # Layers 1 and 2 see four tokens to each side.
    modern = dict(kw, num_hidden_layers=5, max_position_embeddings=64, local_attention=8, pad_token_id=pad, bos_token_id=pad,
                  eos_token_id=pad, cls_token_id=pad, sep_token_id=pad)
    return {"bert": ("BertModel", "BertConfig", bert), "bert with a head": ("BertForMaskedLM", "BertConfig", bert),
            "bert of pairs": ("BertForSequenceClassification", "BertConfig", dict(bert, num_labels=1)),
            "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", roberta),
            "xlm-roberta of pairs": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", dict(roberta, num_labels=1)),
            "roberta": ("RobertaModel", "RobertaConfig", roberta),
            "modernbert": ("ModernBertModel", "ModernBertConfig", modern),
            "modernbert of pairs": ("ModernBertForSequenceClassification", "ModernBertConfig", dict(modern, num_labels=1))}


def encoder(name, kind, config, kw):
    import torch, transformers
    from safetensors.numpy import load_file, save_file
    with tempfile.TemporaryDirectory() as work:
        getattr(transformers, kind)(getattr(transformers, config)(**kw)).save_pretrained(work, safe_serialization=True)
        path = Path(work) / "model.safetensors"
        tensors = {n: networks.weights(n, t.shape, 1.0) for n, t in sorted(load_file(path).items())}
        save_file(tensors, path, metadata={"format": "pt"})
        clean = json.loads((Path(work) / "config.json").read_text())
        clean.pop("transformers_version", None)
        out = {"name": name, "configs": [clean], "norm_base": 1.0, "tensors": [[n, list(w.shape)] for n, w in tensors.items()]}
        if "pairs" not in name:
            return dict(out, embeddings=embeddings(work))
        model = getattr(transformers, kind).from_pretrained(work, dtype=torch.float32).eval()
        out["pairs"] = []
        for first, second in pairs_of(name):
            types = [0] * len(first) + [1 if kw.get("type_vocab_size", 2) > 1 else 0] * len(second)
            types = {} if "modern" in name else {"token_type_ids": torch.tensor([types])}
            with torch.no_grad():
                score = model(torch.tensor([first + second]), **types).logits[0, 0]
            out["pairs"].append([first, second, round(float(score), 6)])
        return out


def main():
    named = sys.argv[1:]
    if unknown := set(named) - set(encoders()):
        sys.exit(f"unknown encoders: {', '.join(sorted(unknown))}")
    stored = json.loads((HERE / "fixtures" / "architectures.json").read_text())
    before = json.loads((HERE / "fixtures" / "embeddings.json").read_text()) if named else {}
    cases = before.get("cases", [])
    for one in [] if named else stored["cases"]:
        cases.append(decoder(one["name"]))
        print(one["name"], file=sys.stderr)
    kept = {one["name"]: one for one in before.get("encoders", []) if one["name"] not in named}
    lines = lambda cases: ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases)
    with open(HERE / "fixtures" / "embeddings.json", "w") as f:
        f.write('{"texts":%s,"cases":[\n%s\n],"encoders":[\n%s\n]}\n' % (
            json.dumps(TEXTS), lines(cases), lines([kept.get(n) or encoder(n, *e) for n, e in encoders().items()])))


if __name__ == "__main__":
    main()
