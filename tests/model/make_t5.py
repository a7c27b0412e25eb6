#!/usr/bin/env python3
"""Writes tests/model/fixtures/t5.json: small encoder-decoders as transformers computes them in float32, forced through an
answer, greedily and by beam search, and the buckets of their biases.

    tests/model/make_t5.py

Uses make_architectures.py's environment and formula of weights.
"""
import json, os, sys, tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENV = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvasir" / "fixtures-venv"

if __name__ == "__main__" and Path(sys.prefix).resolve() != VENV.resolve():
    if not (VENV / "bin" / "python").exists():
        raise SystemExit("run tests/model/make_architectures.py first: it makes the environment")
    os.execv(VENV / "bin" / "python", [str(VENV / "bin" / "python"), *sys.argv])

sys.path.insert(0, str(HERE))
import make_architectures as networks

# The last as tests/e2e/encoder_decoders.py's tokenizer has it, which ends a text with 1.
PROMPTS = [networks.TOKENS, networks.TOKENS[3:20], networks.TOKENS[11:14], [10, 11, 12, 13, 40, 41, 200, 1]]
ANSWER = [(5 * i * i + 11 * i + 2) % networks.VOCAB for i in range(30)]
ROWS = [0, 7, 29]
GREEDY = 24


def cases():
    usual = dict(vocab_size=networks.VOCAB, d_model=64, d_kv=16, d_ff=96, num_layers=3, num_heads=4, decoder_start_token_id=0)
    base = dict(usual, relative_attention_num_buckets=12, relative_attention_max_distance=24)
    # name: (model type, configuration, has a head of its own, how else its config.json may say it)
    return {
        "t5": ("t5", dict(usual, num_decoder_layers=2), False, []),
        "t5 v1.1": ("t5", dict(base, feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_decoder_layers=2, d_kv=32),
                    True, [dict(scale_decoder_outputs=None, tie_word_embeddings=False, dense_act_fn=None, is_gated_act=None)]),
        "t5 of one head": ("t5", dict(base, feed_forward_proj="gated-silu", tie_word_embeddings=False, num_layers=2,
                                      num_decoder_layers=4, decoder_start_token_id=9), False, []),
        "mt5": ("mt5", dict(usual, feed_forward_proj="gated-gelu"), True, []),
    }


def make(name, model_type, kw, own_head, also):
    import numpy as np, torch, transformers
    from safetensors.numpy import load_file, save_file
    with tempfile.TemporaryDirectory() as work:
        config = transformers.AutoConfig.for_model(model_type, **kw)
        transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).save_pretrained(work, safe_serialization=True)
        path = Path(work) / "model.safetensors"
        shapes = {n: t.shape for n, t in load_file(path).items()}
        if own_head:
            shapes["lm_head.weight"] = shapes["shared.weight"]
        tensors = {n: networks.weights(n, s, 1.0) for n, s in sorted(shapes.items())}
        save_file(tensors, path, metadata={"format": "pt"})
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(work, dtype=torch.float32, attn_implementation="eager").eval()
        if own_head:
            assert np.array_equal(model.lm_head.weight.detach().numpy(), tensors["lm_head.weight"]), "the head is not its own"
        start = kw["decoder_start_token_id"]
        logprobs, greedy, beams = [], [], []
        # transformers makes a cache of as many layers as the encoder has.
        asked = dict(do_sample=False, pad_token_id=0, use_cache=kw["num_layers"] >= kw.get("num_decoder_layers", 0))
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            with torch.no_grad():
                logits = model(input_ids=ids, decoder_input_ids=torch.tensor([[start, *ANSWER]])).logits[0, ROWS].double()
                out = model.generate(ids, max_new_tokens=GREEDY, eos_token_id=None, **asked)[0].tolist()
                # Tokens that come are the ends, so that searches end.
                stops = sorted(list(dict.fromkeys(model.generate(ids, max_new_tokens=GREEDY, num_beams=4, eos_token_id=None,
                                                                 **asked)[0, 6:].tolist()))[:3])
                made = model.generate(ids, max_new_tokens=GREEDY, num_beams=4, num_return_sequences=4, eos_token_id=stops,
                                      output_scores=True, return_dict_in_generate=True, **asked)
            assert out[0] == start and len(out) == GREEDY + 1, out
            logprobs.append([[round(float(v), 5) for v in row] for row in torch.log_softmax(logits, -1)])
            greedy.append(out[1:])
            answers = []
            for row, score in zip(made.sequences[:, 1:].tolist(), made.sequences_scores.tolist()):
                ends = [k for k, t in enumerate(row) if t in stops]
                answers.append(dict(tokens=row[:ends[0] + 1] if ends else row, score=round(score, 5)))
            beams.append(dict(stops=stops, answers=answers))
        clean = json.loads((Path(work) / "config.json").read_text())
        clean.pop("transformers_version", None)
        one = {"name": name, "configs": [networks.written(clean, a) for a in [{}, *also]], "norm_base": 1.0,
                "tensors": [[n, list(w.shape)] for n, w in tensors.items()], "logprobs": logprobs, "greedy": greedy, "beams": beams}
        if "relative_attention_max_distance" not in kw:  # of which llama.cpp's files say nothing
            arch, kv, parts = networks.convert(work, {})
            one["gguf"] = {"arch": arch, "kv": kv, "tensors": [networks.recipe(n, s, d, tensors, 4, 4) for n, s, d in parts]}
        return one


def buckets():
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention
    distances = list(range(-300, 301))
    return {"distances": [distances[0], distances[-1]], "cases": [
        [both, count, reach, T5Attention._relative_position_bucket(torch.tensor(distances), both, count, reach).tolist()]
        for both in (True, False) for count, reach in ((32, 128), (12, 24), (64, 256))]}


def main():
    lines = []
    for name, case in cases().items():
        lines.append(json.dumps(make(name, *case), separators=(",", ":")))
        print(name, file=sys.stderr)
    with open(HERE / "fixtures" / "t5.json", "w") as f:
        f.write('{"prompts":%s,"answer":%s,"rows":%s,"buckets":%s,"cases":[\n%s\n]}\n' % (
            json.dumps(PROMPTS), json.dumps(ANSWER), json.dumps(ROWS), json.dumps(buckets(), separators=(",", ":")),
            ",\n".join(lines)))


if __name__ == "__main__":
    main()
