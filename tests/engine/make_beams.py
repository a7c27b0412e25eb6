#!/usr/bin/env python3
"""Writes tests/engine/fixtures/beams.json: what transformers' generate() finds by beam search in two small networks whose
weights are the formula of tests/model/small_network.h. Needs torch and transformers (PyPI):

    python3 tests/engine/make_beams.py
"""
import json, os
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))


def formula(name, count, scale):
    tag = 0
    for c in name.encode():
        tag = (tag * 31 + c) & 0xFFFFFFFF
    x = (torch.arange(count, dtype=torch.int64) * 2654435761 + tag) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    x ^= x >> 16
    return (((x & 0xFFFF).double() / 65536 - 0.5) * scale).float()


def network(config):
    model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager")).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            norm = p.dim() == 1
            w = formula(name, p.numel(), 0.5 if norm else 0.25)
            p.copy_((w + 1 if norm else w).reshape(p.shape))
    return model


def main():
    base = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                head_dim=8, vocab_size=64, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=128,
                tie_word_embeddings=True)
    wide = dict(base, hidden_size=96, intermediate_size=128, num_hidden_layers=3, num_attention_heads=6,
                num_key_value_heads=3, head_dim=16, vocab_size=200)
    out = []
    for config in (base, wide):
        model = network(config)
        runs = []
        for i, (width, n, penalty, early, new, eos) in enumerate([
                (1, 1, 1.0, False, 12, 1), (2, 1, 1.0, False, 20, 2), (4, 4, 1.0, False, 24, 3), (4, 2, 0.0, "never", 24, 3),
                (4, 4, 2.0, "never", 16, 2), (3, 3, 1.0, True, 24, 2), (6, 6, 0.5, True, 30, 4), (5, 5, -0.5, False, 18, 3),
                (8, 8, 1.0, False, 10, 0), (4, 4, 1.0, False, 40, 6)]):
            prompt = [(7 * (i + 1) * t + 5 * i + t * t) % config["vocab_size"] for t in range(3 + 4 * i)]
            asked = dict(attention_mask=torch.ones(1, len(prompt)), max_new_tokens=new, pad_token_id=0, do_sample=False)
            # Tokens that come are the ends, so that searches end in all ways.
            free = model.generate(torch.tensor([prompt]), num_beams=4, eos_token_id=None, **asked)
            eos = sorted(list(dict.fromkeys(free[0, len(prompt) + 4:].tolist()))[:eos])
            if width > 1:
                made = model.generate(torch.tensor([prompt]), num_beams=width, num_return_sequences=n,
                                      length_penalty=penalty, early_stopping=early, eos_token_id=eos or None,
                                      output_scores=True, return_dict_in_generate=True, **asked)
            else:  # generate() has no search of one beam: greedy, with its score
                made = model.generate(torch.tensor([prompt]), eos_token_id=eos or None, output_logits=True,
                                      return_dict_in_generate=True, **asked)
                tokens = made.sequences[0, len(prompt):].tolist()
                logs = [torch.log_softmax(l[0].float(), -1)[t].item() for l, t in zip(made.logits, tokens)]
                answers = [dict(tokens=tokens, score=sum(logs) / len(tokens) ** penalty)]
            if width > 1:
                answers = []
                for row, score in zip(made.sequences[:, len(prompt):].tolist(), made.sequences_scores.tolist()):
                    ends = [k for k, t in enumerate(row) if t in eos]
                    answers.append(dict(tokens=row[:ends[0] + 1] if ends else row[:new], score=score))
            runs.append(dict(prompt=prompt, width=width, n=n, length_penalty=penalty,
                             early={False: "no", True: "yes", "never": "never"}[early], max_new=new, stops=eos,
                             answers=answers))
        out.append(dict(config=dict(config, model_type="llama"), runs=runs))
    path = os.path.join(HERE, "fixtures", "beams.json")
    with open(path, "w") as f:
        json.dump(out, f)
        f.write("\n")


if __name__ == "__main__":
    main()
