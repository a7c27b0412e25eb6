"""The cache-attention operators in numpy, float64, written from docs/attention-ops.md alone: a second reading of the
contract, so that one misreading cannot be shared by the reference and the back ends. Plain, never fast.

`Oracle(case, tensors)` takes case.json as a dictionary and the tensors as they lie in their files."""
import math

import numpy as np

from formats import Codec, decode
from rope import rotate

DEFAULTS = dict(is_causal=False, is_alibi=False, num_kv_heads=0, num_layer=1, layer_idx=0, quant_bit=0, quant_group=8,
                cache_mode=0, cache_layout=0, page_size=128, num_repeat=1, q_scale=1.0, k_scale=1.0, v_scale=1.0, q_scaling=1.0, softcap=0.0,
                window=0, cyclic_capacity=0, sinks=0, streaming_positions=False, rope=None, packed_qkv=False, append=True, out_dtype="float32", out_scale=1.0,
                return_lse=False)
# Axes of each layout: token, layer, key or value, head, element (section 3).
LAYOUTS = {2: ("TLKHD", "LTKHD", "LKTHD", "LKHTD"), 1: ("TLKHD", "LTKHD", "LHTKD", "KLHTD")}


def alibi_slopes(heads):
    p = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * n / p) for n in range(1, p + 1)]
    return np.array(slopes + [2 ** (-4 * n / p) for n in range(1, 2 * (heads - p), 2)])


class Oracle:
    def __init__(self, case, tensors):
        self.case, self.tensors = case, tensors
        a = self.a = {**DEFAULTS, **case["attributes"]}
        self.op, self.io = case["op"], case["io_dtype"]
        self.heads, self.dim = a["num_heads"], a["head_dim"]
        self.kv_heads = a["num_kv_heads"] or self.heads
        self.seqstarts, self.kvstarts = tensors["seqstarts"], tensors["kvstarts"]
        self.batch = len(self.seqstarts) - 1
        self.tokens = int(self.seqstarts[-1])
        self.streaming = a["streaming_positions"]
        scale = tensors.get("scale")
        dtype = a.get("cache_dtype") or {0: self.io, 8: "int8", 4: "int4"}[a["quant_bit"]]
        self.codec = Codec(dtype, a["quant_bit"], a["quant_group"], scale.dtype.name if scale is not None else None, a["k_scale"],
                           a["v_scale"])
        self.read_inputs()

    def read_inputs(self):
        t, a = self.tensors, self.a
        self.q = self.k = self.v = None
        self.raw = False  # K/V that are int8 already
        if a["packed_qkv"]:
            qkv = decode(t["qkv"], self.io)
            if "qkv_bias" in t:
                qkv = qkv + decode(t["qkv_bias"], self.io)
            qkv = qkv.reshape(self.tokens, self.heads + 2 * self.kv_heads, self.dim)
            self.q, self.k, self.v = np.split(qkv, [self.heads, self.heads + self.kv_heads], axis=1)
            return
        if "query" in t:
            self.q = decode(t["query"], self.io) * a["q_scale"]
        if "current_key" in t:
            self.raw = t["current_key"].dtype == np.int8
            kind = "int8" if self.raw else self.io
            self.k, self.v = decode(t["current_key"], kind), decode(t["current_value"], kind)
            if self.io == "float8_e4m3":
                self.k, self.v = self.k * a["k_scale"], self.v * a["v_scale"]

    # -- lengths -----------------------------------------------------------------------------------------------------------
    def lengths(self, b):
        """(new tokens, tokens to attend to, position of the first new token among them)."""
        seqlen, kvlen = int(self.seqstarts[b + 1] - self.seqstarts[b]), int(self.kvstarts[b + 1] - self.kvstarts[b])
        return seqlen, kvlen, kvlen - seqlen

    def rope_start(self, b):
        return int(self.tensors["start_pos"][b])

    # -- where a token lives (sections 2, 3 and 7's cyclic cache) ----------------------------------------------------------
    def slot(self, t):
        c, s = self.a["cyclic_capacity"], self.a["sinks"]
        return t if not c or t < s else s + (t - s) % (c - s)

    def place(self, b, t):
        starts, slot = self.tensors["cachestarts"], self.slot(t)
        if self.a["cache_mode"] == 0:
            return int(starts[b]) + slot
        if self.case["revision"] == 1:
            return int(starts[self.kvstarts[b] + slot])
        page = self.a["page_size"]
        return int(starts[b, slot // page]) + slot % page

    def layer(self, tensor):
        """A view [token, key or value, head, element] of this call's layer."""
        axes = LAYOUTS[self.case["revision"]][self.a["cache_layout"]]
        return tensor.transpose([axes.index(x) for x in "LTKHD"])[self.a["layer_idx"]]

    # -- storing (sections 4 and 5) ----------------------------------------------------------------------------------------
    def append(self):
        """The cache and scale after the call; self.touched says which elements were written."""
        cache = self.tensors["cache"].copy()
        scale = self.tensors["scale"].copy() if "scale" in self.tensors else None
        self.touched = np.zeros(cache.shape, bool)
        self.touched_scale = np.zeros(scale.shape, bool) if scale is not None else None
        self.new = [None, None]
        if not self.a["append"]:
            return cache, scale
        for kv, x in enumerate((self.k, self.v)):
            if kv == 0 and self.a["rope"] and not self.streaming:
                positions = [self.rope_start(b) + i for b in range(self.batch) for i in range(self.lengths(b)[0])]
                x = rotate(x, positions, self.a["rope"])
            stored, scales = (x.astype(np.int8), None) if self.raw else self.codec.store(x, kv)
            self.new[kv] = self.codec.load(stored, scales, kv).astype(np.float64)
            for b in range(self.batch):
                seqlen, kvlen, start = self.lengths(b)
                for i in range(seqlen):
                    if self.overwritten(start + i, kvlen):
                        continue
                    place, row = self.place(b, start + i), int(self.seqstarts[b]) + i
                    self.layer(cache)[place, kv] = stored[row]
                    self.layer(self.touched)[place, kv] = True
                    if scale is not None:
                        self.layer(scale)[place, kv] = scales[row]
                        self.layer(self.touched_scale)[place, kv] = True
        return cache, scale

    def overwritten(self, t, kvlen):
        """A later token of the same call takes this one's slot."""
        c, s = self.a["cyclic_capacity"], self.a["sinks"]
        return bool(c) and t >= s and t + (c - s) < kvlen

    # -- reading -----------------------------------------------------------------------------------------------------------
    def stored(self, cache, scale, kv, places):
        """float64 [token, head, element] of these places."""
        scales = self.layer(scale)[places, kv] if scale is not None else None
        return self.codec.load(self.layer(cache)[places, kv], scales, kv).astype(np.float64)

    def row_of(self, b, t):
        """The sequence whose index row token t of sequence b is read through."""
        indirection = self.tensors.get("cache_indirection")
        if indirection is None:
            return b
        beams = indirection.shape[1]
        return b // beams * beams + int(indirection[b // beams, b % beams, t])

    def keys(self, b, cache, scale, wanted):
        """K and V [kvlen, head, element] of sequence b; NaN where not wanted, for such places may not be read at all."""
        _, kvlen, start = self.lengths(b)
        out = np.full((2, kvlen, self.kv_heads, self.dim), np.nan)
        wanted = np.flatnonzero(wanted)
        if self.op == "MultiHeadAttention":
            rows = slice(self.kvstarts[b], self.kvstarts[b + 1])
            return self.k[rows], self.v[rows]
        cyclic = self.a["cyclic_capacity"] and self.a["append"]
        old = wanted[wanted < start] if cyclic else wanted
        source = (self.tensors["cache"], self.tensors.get("scale")) if cyclic else (cache, scale)
        for kv in (0, 1):
            if len(old):
                out[kv, old] = self.stored(*source, kv, [self.place(self.row_of(b, t), t) for t in old])
            if cyclic:
                out[kv, start:] = self.new[kv][self.seqstarts[b]:self.seqstarts[b + 1]]
        return out

    # -- attention (sections 6 and 7) --------------------------------------------------------------------------------------
    def visible(self, b, i):
        """Which of the sequence's tokens its i-th new token may see."""
        seqlen, kvlen, start = self.lengths(b)
        j, t, a = np.arange(kvlen), start + i, self.a
        seen = np.ones(kvlen, bool)
        if a["is_causal"] and seqlen > 1 and b >= self.case["scalars"].get("decoding_batches", 0):
            seen &= j <= t
        if a["is_alibi"]:
            seen &= j <= t
        w, s = a["window"], a["sinks"]
        if w:
            near = (j < s) | (j >= max(s, t - (w - s) + 1))
            if self.streaming:
                near |= j >= start  # a call is dense within itself
            seen &= near & (j <= t)
        return seen

    def mask_rows(self, b, i):
        """Additive mask [heads, kvlen], or None."""
        mask = self.tensors.get("attn_mask")
        if mask is None or mask.size == 0:
            return None
        values = decode(mask, self.io)[..., self.seqstarts[b] + i, self.kvstarts[b]:self.kvstarts[b + 1]]
        return np.broadcast_to(values, (self.heads, values.shape[-1]))

    def attend(self, cache, scale):
        """(output [T, heads, D], log-sum-exp [T, heads]) over the given cache."""
        out, lse = np.zeros((self.tokens, self.heads, self.dim)), np.full((self.tokens, self.heads), -np.inf)
        for b in range(self.batch):
            seqlen, kvlen, _ = self.lengths(b)
            seen = [self.visible(b, i) for i in range(seqlen)]
            if seqlen == 0 or kvlen == 0:
                continue
            k, v = self.keys(b, cache, scale, np.any(seen, axis=0))
            for i in range(seqlen):
                row = int(self.seqstarts[b]) + i
                out[row], lse[row] = self.attend_one(b, i, np.flatnonzero(seen[i]), k, v)
        return out, lse

    def attend_one(self, b, i, seen, k, v):
        a, group = self.a, self.heads // self.kv_heads
        t = self.lengths(b)[2] + i
        q, k, v = self.q[int(self.seqstarts[b]) + i][None], k[seen], v[seen]
        if self.streaming:  # positions are ranks among what is seen, of which the query's own key is the last
            q, k = rotate(q, [len(seen) - 1], a["rope"]), rotate(k, range(len(seen)), a["rope"])
        elif a["rope"]:
            q = rotate(q, [self.rope_start(b) + i], a["rope"])
        score = np.einsum("hd,jhd->hj", q[0], np.repeat(k, group, axis=1)) / (a["q_scaling"] * math.sqrt(self.dim))
        if a["softcap"]:
            score = a["softcap"] * np.tanh(score / a["softcap"])
        if a["is_alibi"]:
            given = self.tensors.get("alibi_slopes")
            slopes = given.astype(np.float64) if given is not None else alibi_slopes(self.heads)
            score = score + slopes[:, None] * (seen - t)
        bias = self.tensors.get("relative_bias")
        if bias is not None:
            reach = bias.shape[1] // 2
            score = score + bias.astype(np.float64)[:, np.clip(seen - t, -reach, reach) + reach]
        mask = self.mask_rows(b, i)
        if mask is not None:
            score = score + mask[:, seen]
        return self.softmax(score, np.repeat(v, group, axis=1))

    def softmax(self, score, v):
        out, lse = np.zeros((self.heads, self.dim)), np.full(self.heads, -np.inf)
        sink = self.tensors.get("sink_logits")
        for h in range(self.heads):
            allowed = score[h] > -np.inf
            if not allowed.any():
                continue
            logits = score[h][allowed]
            extra = [] if sink is None else [float(sink[h])]
            most = max([logits.max(), *extra])
            weights = np.exp(logits - most)
            total = weights.sum() + sum(math.exp(x - most) for x in extra)
            out[h], lse[h] = weights @ v[allowed, h] / total, most + math.log(total)
        return out, lse

    # -- KVC's packed outputs (section 4) ----------------------------------------------------------------------------------
    def packed(self, cache, scale):
        out = []
        for kv in (0, 1):
            places = [self.place(b, t) for b in range(self.batch) for t in range(self.lengths(b)[1])]
            values = self.stored(cache, scale, kv, places) if places else np.zeros((0, self.kv_heads, self.dim))
            out.append(np.repeat(values, self.a["num_repeat"], axis=1))
        return out
