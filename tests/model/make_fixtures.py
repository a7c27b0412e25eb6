#!/usr/bin/env python3
"""Writes tests/model/fixtures/{quants,networks}.json: needs numpy and gguf (PyPI) in any virtual environment.

quants.json: blocks of every quantized type, as gguf's own Python reader dequantizes them.
networks.json: logits of small seeded networks from the plain float64 forward below. The weights are a
formula that tests/model/small_network.h repeats, so no weight is stored.
"""
import json
import math
import os

import gguf
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))


def quants():
    rng = np.random.default_rng(7)
    out = {}
    for name in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]:
        kind = gguf.GGMLQuantizationType[name]
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 256, (2, size), dtype=np.uint8)
        # float16 scales at these places must be ordinary numbers.
        for at in {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2],
                   "Q6_K": [208], "MXFP4": []}.get(name, [0]):
            data[:, at:at + 2] = rng.uniform(0.001, 0.1, 2).astype(np.float16).view(np.uint8).reshape(2, 2)
        if name == "MXFP4":
            data[:, 0] = 100 + data[:, 0] % 40
        values = gguf.quants.dequantize(data, kind)
        out[name] = {"hex": data.tobytes().hex(), "values": [float(v) for v in values.reshape(-1)]}
    return out


def weight(name, rows, cols, scale):
    tag = np.uint64(0)
    for c in name.encode():
        tag = np.uint64((int(tag) * 31 + c) & 0xFFFFFFFF)
    x = (np.arange(rows * cols, dtype=np.uint64) * np.uint64(2654435761) + tag) & np.uint64(0xFFFFFFFF)
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x45D9F3B)) & np.uint64(0xFFFFFFFF)
    x = x ^ (x >> np.uint64(16))
    values = ((x & np.uint64(0xFFFF)).astype(np.float64) / 65536 - 0.5) * scale
    return values.reshape(rows, cols)


def frequencies(dim, rope):
    f = rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    kind, factor, magnitude = rope.get("rope_type", "default"), rope.get("factor", 1.0), 1.0
    old = rope.get("original_max_position_embeddings", 0)
    if kind == "linear":
        f = f / factor
    elif kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        wavelength = 2 * math.pi / f
        smooth = (old / wavelength - low) / (high - low)
        blended = (1 - smooth) * f / factor + smooth * f
        f = np.where(wavelength > old / low, f / factor, np.where(wavelength < old / high, f, blended))
    elif kind == "yarn":
        at = lambda turns: dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))
        low, high = max(math.floor(at(32)), 0), min(math.ceil(at(1)), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
        f = f / factor * ramp + f * (1 - ramp)
        magnitude = 0.1 * math.log(factor) + 1
    return f, magnitude


def rotate(x, f, magnitude):  # x: [T, heads, dim], halves paired
    angle = np.arange(len(x))[:, None] * f
    cos, sin = np.cos(angle)[:, None] * magnitude, np.sin(angle)[:, None] * magnitude
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def forward(c, tokens):
    gemma = c["model_type"] == "gemma3_text"
    H, F, D, Q, K = (c[k] for k in ["hidden_size", "intermediate_size", "head_dim", "num_attention_heads",
                                    "num_key_value_heads"])
    shift = 1.0 if gemma else 0.0

    def norm(x, name, n=H):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"]) * (
            weight(name, 1, n, 0.5)[0] + (shift if gemma else 1.0))

    embedding = weight("model.embed_tokens.weight", c["vocab_size"], H, 0.25)
    x = embedding[tokens] * (math.sqrt(H) if gemma else 1.0)
    T = len(tokens)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        full = not gemma or (i + 1) % c["sliding_window_pattern"] == 0
        window = 0 if gemma and full else c.get("sliding_window") or 0
        rope = dict(c.get("rope_scaling") or {}, rope_theta=c["rope_theta"])
        if gemma and not full:
            rope = {"rope_theta": c["rope_local_base_freq"]}
        h = norm(x, p + "input_layernorm.weight")
        q, k, v = ((h @ weight(f"{p}self_attn.{n}_proj.weight", m * D, H, 0.25).T).reshape(T, m, D)
                   for n, m in [("q", Q), ("k", K), ("v", K)])
        if gemma:
            q, k = norm(q, p + "self_attn.q_norm.weight", D), norm(k, p + "self_attn.k_norm.weight", D)
        f, magnitude = frequencies(D, rope)
        q, k = rotate(q, f, magnitude), rotate(k, f, magnitude)
        k, v = np.repeat(k, Q // K, 1), np.repeat(v, Q // K, 1)
        scale = c.get("query_pre_attn_scalar", D) ** -0.5
        s = np.einsum("qhd,khd->hqk", q, k) * scale
        far = np.arange(T)[:, None] - np.arange(T)[None]
        s = np.where((far < 0) | ((far >= window) if window else False), -np.inf, s)
        s = np.exp(s - s.max(-1, keepdims=True))
        o = np.einsum("hqk,khd->qhd", s / s.sum(-1, keepdims=True), v).reshape(T, Q * D)
        o = o @ weight(p + "self_attn.o_proj.weight", H, Q * D, 0.25).T
        if gemma:
            o = norm(o, p + "post_attention_layernorm.weight")
        x = x + o
        h = norm(x, p + ("pre_feedforward_layernorm.weight" if gemma else "post_attention_layernorm.weight"))
        g, u = (h @ weight(f"{p}mlp.{n}_proj.weight", F, H, 0.25).T for n in ["gate", "up"])
        act = 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) if gemma else g / (1 + np.exp(-g))
        o = (act * u) @ weight(p + "mlp.down_proj.weight", H, F, 0.25).T
        if gemma:
            o = norm(o, p + "post_feedforward_layernorm.weight")
        x = x + o
    return norm(x, "model.norm.weight") @ embedding.T


def networks():
    base = dict(hidden_size=256, intermediate_size=256, head_dim=32, num_attention_heads=8, num_key_value_heads=4,
                vocab_size=64, rms_norm_eps=1e-6, num_hidden_layers=3, max_position_embeddings=512,
                tie_word_embeddings=True, rope_theta=10000.0)
    scaled = lambda **kw: dict(base, model_type="llama", rope_scaling=kw)
    cases = {
        "llama": dict(base, model_type="llama"),
        "llama linear": scaled(rope_type="linear", factor=4.0),
        "llama 3": scaled(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                          original_max_position_embeddings=64),
        "llama yarn": scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
        "mistral": dict(base, model_type="mistral", sliding_window=8),
        "gemma3": dict(base, model_type="gemma3_text", sliding_window=8, sliding_window_pattern=3, rope_theta=1e6,
                       rope_local_base_freq=10000.0, query_pre_attn_scalar=48, rope_scaling=None),
    }
    tokens = [(7 * i * i + 3 * i + 1) % 64 for i in range(40)]
    return {"tokens": tokens, "cases": [
        {"name": n, "config": c, "logits": [[round(v, 6) for v in row] for row in forward(c, tokens)[[7, 20, 39]].tolist()]}
        for n, c in cases.items()]}


for name, make in [("quants", quants), ("networks", networks)]:
    with open(f"{HERE}/fixtures/{name}.json", "w") as f:
        json.dump(make(), f, separators=(",", ":"))
        f.write("\n")
