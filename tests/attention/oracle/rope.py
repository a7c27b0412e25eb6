"""Rotary embedding (section 7): frequencies of each scaling, its magnitude factor, and the two ways to pair elements."""
import math

import numpy as np


def frequencies(rope):
    """(angle per position of each pair, factor that cosine and sine are multiplied by)."""
    dim, base = rope["rotary_dim"], rope["base"]
    plain = base ** (-np.arange(0, dim, 2) / dim)
    s = rope.get("scaling") or {"type": "default"}
    kind, factor = s["type"], s.get("factor", 1.0)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / factor, 1.0
    context = s["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = s["low_freq_factor"], s["high_freq_factor"]
        smooth = np.clip((context * plain / (2 * math.pi) - low) / (high - low), 0, 1)
        return (1 - smooth) * plain / factor + smooth * plain, 1.0
    if kind == "yarn":
        def dimension(turns):  # the pair that makes so many turns over the original context
            return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

        def magnitude(m):
            return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0
        first = max(math.floor(dimension(s.get("beta_fast", 32))), 0)
        last = min(math.ceil(dimension(s.get("beta_slow", 1))), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - first) / (max(last - first, 0.001)), 0, 1)
        if "attention_factor" in s:
            size = s["attention_factor"]
        elif s.get("mscale") and s.get("mscale_all_dim"):
            size = magnitude(s["mscale"]) / magnitude(s["mscale_all_dim"])
        else:
            size = magnitude(1.0)
        return ramp * plain / factor + (1 - ramp) * plain, size
    if kind == "longrope":
        longest = s["max_position_embeddings"]
        factor = s.get("factor", longest / context)
        size = s.get("attention_factor", math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0)
        return plain / np.array(s["long_factor"] if longest > context else s["short_factor"]), size
    raise ValueError(kind)


def rotate(x, positions, rope):
    """x [tokens, heads, D] with one position a token. Frequencies are kept as float32, as models have them."""
    angles, size = frequencies(rope)
    angles = angles.astype(np.float32).astype(np.float64)
    angles = np.asarray(positions, np.float64)[:, None] * angles
    cos, sin = size * np.cos(angles)[:, None, :], size * np.sin(angles)[:, None, :]
    dim = rope["rotary_dim"]
    out = np.array(x, np.float64)
    if rope["style"] == "neox":
        first, second = slice(0, dim // 2), slice(dim // 2, dim)
    else:
        first, second = slice(0, dim, 2), slice(1, dim, 2)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out
