#!/usr/bin/env python3
"""Writes tests/model/fixtures/t5_rounded.json: what becomes of the networks of t5.json where the operands of products and
of attention are rounded to bfloat16, as a GPU has them. Scores of T5 are not divided by anything, so that random weights
leave more of rounding there than elsewhere: some of transformers' close choices fall otherwise.

    tests/model/make_t5_rounded.py        # needs numpy alone

Without rounding it must be what transformers computes, within 1e-3.
"""
import json, math, sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import make_architectures as networks

STORED = json.loads((HERE / "fixtures/t5.json").read_text())
KEPT = 8  # likeliest tokens of a row


def bfloat16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + (bits >> 16 & 1) + 0x7fff) & 0xffff0000).astype(np.uint32).view(np.float32)


def bucket(distance, both_ways, buckets, reach):
    first = 0
    if both_ways:
        buckets //= 2
        first, distance = buckets * (distance > 0), abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    part = np.float32(np.log(np.float32(distance) / np.float32(exact))) / np.float32(math.log(reach / exact))
    return first + min(exact + int(part * (buckets - exact)), buckets - 1)


class Network:
    def __init__(self, one, rounded):
        self.c, self.rounded = one["configs"][0], bfloat16 if rounded else np.float32
        self.t = {name: networks.weights(name, shape, 1.0) for name, shape in one["tensors"]}
        self.heads = self.c["num_heads"]
        self.act = self.c["feed_forward_proj"]
        self.own_head = self.c["model_type"] == "mt5" or one["name"] == "t5 v1.1"
        self.scaled = one["name"] == "t5"

    def linear(self, x, name):
        return self.rounded(x) @ self.rounded(self.t[name + ".weight"]).T

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * self.t[name + ".weight"]

    def attend(self, queries, source, name, bias=None, causal=False):
        q, k, v = (self.rounded(self.linear(x, name + n)).reshape(len(x), self.heads, -1).transpose(1, 0, 2)
                   for x, n in ((queries, "q"), (source, "k"), (source, "v")))
        scores = q @ k.transpose(0, 2, 1)
        if bias:
            table = self.t[bias + ".weight"]
            of = [[bucket(j - i, not causal, self.c["relative_attention_num_buckets"],
                          self.c["relative_attention_max_distance"]) for j in range(k.shape[1])] for i in range(q.shape[1])]
            scores = scores + table[np.array(of)].transpose(2, 0, 1)
        if causal:
            scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, np.float32(-1e30))
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = (p @ v / p.sum(-1, keepdims=True)).transpose(1, 0, 2)
        return self.linear(out.reshape(len(queries), -1), name + "o")

    def feed_forward(self, x, name):
        if not self.act.startswith("gated-"):
            return self.linear(np.maximum(self.linear(x, name + "wi"), 0), name + "wo")
        gate, up = (self.rounded(self.linear(x, name + n)) for n in ("wi_0", "wi_1"))
        if "silu" in self.act:
            return self.linear(gate / (1 + np.exp(-gate)) * up, name + "wo")
        return self.linear(.5 * gate * (1 + np.tanh(.7978845608 * (gate + .044715 * gate ** 3))) * up, name + "wo")

    def run(self, prompt, answer):
        embedding = self.rounded(self.t["shared.weight"])
        x = embedding[prompt]
        for i in range(self.c["num_layers"]):
            at = f"encoder.block.{i}.layer."
            h = self.norm(x, at + "0.layer_norm")
            x = x + self.attend(h, h, at + "0.SelfAttention.", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias")
            x = x + self.feed_forward(self.norm(x, at + "1.layer_norm"), at + "1.DenseReluDense.")
        source = self.norm(x, "encoder.final_layer_norm")
        x = embedding[[self.c["decoder_start_token_id"], *answer]]
        for i in range(self.c["num_decoder_layers"] or self.c["num_layers"]):
            at = f"decoder.block.{i}.layer."
            h = self.norm(x, at + "0.layer_norm")
            x = x + self.attend(h, h, at + "0.SelfAttention.",
                                "decoder.block.0.layer.0.SelfAttention.relative_attention_bias", True)
            x = x + self.attend(self.norm(x, at + "1.layer_norm"), source, at + "1.EncDecAttention.")
            x = x + self.feed_forward(self.norm(x, at + "2.layer_norm"), at + "2.DenseReluDense.")
        h = self.norm(x, "decoder.final_layer_norm") * (self.c["d_model"] ** -.5 if self.scaled else 1)
        logits = self.linear(h, "lm_head" if self.own_head else "shared").astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def main():
    out = {}
    for one in STORED["cases"]:
        rows = []
        for p, prompt in enumerate(STORED["prompts"][:len(one["logprobs"])]):
            exact = Network(one, False).run(prompt, STORED["answer"])[STORED["rows"]]
            assert np.abs(exact - np.array(one["logprobs"][p])).max() < 1e-3, (one["name"], p)
            rows.append([[[int(t), round(float(row[t]), 4)] for t in np.argsort(-row, kind="stable")[:KEPT]]
                         for row in Network(one, True).run(prompt, STORED["answer"])[STORED["rows"]]])
        out[one["name"]] = rows
    (HERE / "fixtures/t5_rounded.json").write_text(json.dumps(out, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
