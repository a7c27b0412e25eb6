"""Random stored cases (docs/attention-ops.md, section 11). A seed gives one case; all that no rule lets an operator read is
poison: NaN in the cache, places beyond it in the tables."""
import json
import pathlib

import numpy as np

import formats
from oracle import DEFAULTS, LAYOUTS, Oracle

KINDS = ("plain", "kvc", "mha", "alibi", "window", "sinks", "cyclic", "cyclic sinks", "streaming", "streaming cyclic", "beams",
         "cross", "rope", "rope window", "packed", "decodes", "mask", "fp8")


class Dice:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def one(self, *choices):
        return choices[int(self.rng.integers(len(choices)))]

    def below(self, n):
        return int(self.rng.integers(n))

    def between(self, low, high):
        return int(self.rng.integers(low, high + 1))

    def chance(self, percent):
        return self.rng.random() * 100 < percent


def rope(d, dim):
    rotary = dim if d.chance(60) else 2 * d.between(1, dim // 2)
    scaling = d.one(None, dict(type="linear", factor=d.one(2.0, 4.0)), "llama3", "yarn", "longrope")
    context = d.one(16, 64, 4096)
    if scaling == "llama3":
        scaling = dict(type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=context)
    elif scaling == "yarn":
        scaling = dict(type="yarn", factor=d.one(2.0, 16.0), original_max_position_embeddings=context)
        if d.chance(40):
            scaling |= dict(beta_fast=24.0, beta_slow=2.0)
        scaling |= d.one({}, {}, dict(attention_factor=1.25), dict(mscale=1.0, mscale_all_dim=0.8))
    elif scaling == "longrope":
        scaling = dict(type="longrope", original_max_position_embeddings=context, max_position_embeddings=context * d.one(1, 4),
                       short_factor=[1 + d.below(9) / 8 for _ in range(rotary // 2)],
                       long_factor=[1 + d.below(9) for _ in range(rotary // 2)])
        scaling |= d.one({}, dict(attention_factor=1.5))
    out = dict(style=d.one("neox", "gptj"), rotary_dim=rotary, base=d.one(10000.0, 500.0))
    return out | ({"scaling": scaling} if scaling else {})


class Builder:
    """One case of a kind: shapes first, then where tokens live, then the numbers."""

    def __init__(self, kind, seed):
        d = self.d = Dice(seed)
        self.kind = kind
        self.attributes, self.tensors = {}, {}
        self.revision, self.io = d.one(1, 2, 2), d.one("float32", "float32", "float16", "bfloat16")
        if kind == "fp8":
            self.io = "float8_e4m3"
        self.kv_heads, group = d.one((1, 1), (1, 4), (2, 1), (2, 2), (3, 1), (1, 7), (2, 3), (4, 2), (1, 8), (8, 1))
        self.heads = self.kv_heads * group
        self.dim = d.one(8, 16, 16, 32, 40, 64, 64, 80, 96, 128)
        self.rng = d.rng
        self.shapes()
        self.attribute_choices()
        if kind != "mha":
            self.cache()
        self.inputs()
        self.case = dict(op=dict(kvc="KeyValueCache", mha="MultiHeadAttention").get(kind, "MultiHeadCacheAttention"),
                         revision=self.revision, io_dtype=self.io, attributes=self.attributes, scalars=self.scalars)

    # -- lengths -----------------------------------------------------------------------------------------------------------
    def shapes(self):
        d = self.d
        longest = d.one(6, 40, 40, 150, 400)
        if self.kind == "beams":
            beams, groups = d.between(2, 4), d.between(1, 3)
            self.start = np.repeat([d.between(0, longest) for _ in range(groups)], beams)
            self.seqlen, self.beams, self.decodes = np.ones(len(self.start), int), beams, d.one(0, len(self.start))
        else:
            batch = d.between(1, 5)
            self.start = np.array([d.below(longest) if d.chance(70) else 0 for _ in range(batch)])
            self.seqlen = np.array([d.one(1, 1, 2, d.between(2, 8), d.between(1, 70)) for _ in range(batch)])
            self.decodes = d.below(batch + 1) if d.chance(60) else 0
            if self.kind == "decodes":
                self.seqlen[:] = 1
            if d.chance(15):
                self.seqlen[d.below(batch)] = 0
        self.kvlen = self.start + self.seqlen
        if self.kind in ("cross", "mha"):
            self.kvlen = np.array([d.below(longest) + (1 if d.chance(80) else 0) for _ in self.start])
        self.batch, self.tokens = len(self.start), int(self.seqlen.sum())
        self.scalars = dict(decoding_batches=int(self.decodes), max_seqlen=int(self.seqlen.max()), max_kvlen=int(self.kvlen.max()))
        self.tensors |= dict(seqstarts=np.append(0, np.cumsum(self.seqlen)), kvstarts=np.append(0, np.cumsum(self.kvlen)))
        if self.kind != "mha":
            self.tensors["start_pos"] = self.start.astype(np.int64)

    # -- attributes --------------------------------------------------------------------------------------------------------
    def attribute_choices(self):
        d, a, kind = self.d, self.attributes, self.kind
        a |= dict(num_heads=self.heads, head_dim=self.dim)
        if self.kv_heads != self.heads or d.chance(50):
            a["num_kv_heads"] = self.kv_heads
        if kind == "kvc":
            a["num_repeat"] = d.one(1, 2, 3)
            return
        a["is_causal"] = d.chance(75) and kind != "cross"
        if kind == "alibi" or kind == "mask" and d.chance(30):
            a["is_alibi"] = True
        if kind in ("window", "sinks", "rope window", "cyclic", "cyclic sinks", "streaming", "streaming cyclic"):
            a["window"] = d.one(1, 2, d.between(1, 40), d.between(1, 150))
        if "streaming" in kind:
            a["streaming_positions"] = True
        if "sinks" in kind or "streaming" in kind and d.chance(70):
            a["window"] += 1
            a["sinks"] = d.between(1, min(a["window"] - 1, 8))
        if "cyclic" in kind:
            a["cyclic_capacity"] = a["window"] + d.one(0, 0, 1, d.below(60))
        if "streaming" in kind or kind in ("rope", "rope window") or kind in ("packed", "beams", "cyclic", "cyclic sinks") and d.chance(50):
            a["rope"] = rope(d, self.dim)
        if kind == "packed":
            a["packed_qkv"] = True
        if kind == "cross":
            a["append"] = False
        if kind == "fp8":
            a |= dict(q_scale=d.one(0.5, 1.5), k_scale=d.one(0.25, 0.3), v_scale=d.one(0.125, 1.7))
        if d.chance(20):
            a["q_scaling"] = d.one(0.5, 2.0)
        if d.chance(20):
            a["softcap"] = d.one(1.5, 30.0)
        if d.chance(40):
            a["return_lse"] = True
        if d.chance(10) and kind != "mha":
            a |= dict(out_dtype="float8_e4m3", out_scale=d.one(0.01, 0.3, 1.0))

    # -- the cache ---------------------------------------------------------------------------------------------------------
    def cache(self):
        d, a = self.d, self.attributes
        a |= dict(num_layer=d.between(1, 3), cache_layout=d.below(4), cache_mode=d.below(2))
        a["layer_idx"] = d.below(a["num_layer"])
        storage = d.one("io", "io", "io", "other", 8, 8, 4, "int8", "float8_e4m3") if self.kind != "fp8" else "io"
        self.raw = self.kind == "kvc" and storage == "int8" and d.chance(60)
        if storage in (8, 4):
            a["quant_bit"] = storage
            a["quant_group"] = d.one(*[g for g in (1, 2, 4, 8, 16, 32, 64) if self.dim % g == 0])
        elif storage == "other":
            a["cache_dtype"] = d.one("float32", "float16", "bfloat16")
        elif storage != "io":
            a["cache_dtype"] = storage
            if not self.raw:
                a |= dict(k_scale=d.one(0.02, 0.03125, 1.0), v_scale=d.one(0.015, 0.5))
        self.place_tokens()
        full = {**DEFAULTS, **a}
        dtype = a.get("cache_dtype") or {0: self.io, 8: "int8", 4: "int4"}[full["quant_bit"]]
        sizes = dict(T=self.max_tokens, L=a["num_layer"], K=2, H=self.kv_heads, D=self.dim // (2 if dtype == "int4" else 1))
        axes = LAYOUTS[self.revision][a["cache_layout"]]
        shape = [sizes[x] for x in axes]
        if dtype in ("float32", "float16"):
            self.tensors["cache"] = np.full(shape, np.nan, formats.STORED[dtype])
        elif dtype in ("int8", "int4"):
            self.tensors["cache"] = self.rng.integers(0, 256, shape).astype(np.uint8).view(formats.STORED[dtype])
        else:
            self.tensors["cache"] = np.full(shape, 0x7FC1 if dtype == "bfloat16" else 0x7F, formats.STORED[dtype])
        if full["quant_bit"]:
            sizes["D"] = self.dim // a["quant_group"]
            self.tensors["scale"] = np.full([sizes[x] for x in axes], np.nan, d.one(np.float32, np.float16))

    def slots(self, b):
        """Slots that sequence b may use at all."""
        return min(int(self.kvlen[b]), self.attributes.get("cyclic_capacity", 0) or int(self.kvlen[b]))

    def place_tokens(self):
        d, a = self.d, self.attributes
        poison = d.one(-1, 2**40, -2**62)
        need = [self.slots(b) for b in range(self.batch)]
        if a["cache_mode"] == 0:
            order, starts, at = self.rng.permutation(self.batch), np.zeros(self.batch, np.int64), d.below(5)
            for b in order:
                starts[b] = at
                at += need[b] + d.below(3)
            self.max_tokens = at + d.below(4) + 1
        elif self.revision == 1:
            self.max_tokens = sum(need) + d.below(30) + 1
            places = list(self.rng.permutation(self.max_tokens))
            starts = np.full(int(self.tensors["kvstarts"][-1]), poison, np.int64)
            for b, n in enumerate(need):
                at = self.tensors["kvstarts"][b]
                starts[at:at + n] = [places.pop() for _ in range(n)]
        else:
            page = a["page_size"] = d.one(1, 2, 3, 4, 16, 16, 24, 64, 100, 128, 256, 300)
            pages = [-(-n // page) for n in need]
            ids = list(self.rng.permutation(sum(pages) + d.below(4)))
            first = d.one(0, 0, d.below(page + 1))  # pages begin anywhere
            self.max_tokens = max(len(ids), 1) * page + first
            starts = np.full((self.batch, max(pages) + d.below(3)), poison, np.int64)
            for b, n in enumerate(pages):
                starts[b, :n] = [first + ids.pop() * page for _ in range(n)]
                if not a.get("cyclic_capacity") and self.kind != "beams" and min(self.start[0], self.start[b]) >= page and d.chance(40):
                    starts[b, 0] = starts[0, 0]  # a prefix that two sequences share
                self.hide_pages_behind_window(starts, b, page, poison)
        self.tensors["cachestarts"] = starts

    def hide_pages_behind_window(self, starts, b, page, poison):
        w, s = self.attributes.get("window", 0), self.attributes.get("sinks", 0)
        if self.kind not in ("window", "sinks") or not self.seqlen[b]:
            return
        first = max(int(self.kvlen[b] - self.seqlen[b]) - (w - s) + 1, 0)
        for p in range(-(-s // page), first // page):
            starts[b, p] = poison

    # -- numbers -----------------------------------------------------------------------------------------------------------
    def normal(self, shape, size=1.0):
        x = self.rng.standard_normal(shape) * size
        zeros = self.rng.random(shape) < 0.01
        return formats.encode(np.where(zeros, np.copysign(0.0, x), x), self.io)

    def inputs(self):
        d, a, t, kind = self.d, self.attributes, self.tensors, self.kind
        size, kv = d.one(0.3, 1.0, 3.0), (self.tokens if kind != "mha" else int(self.kvlen.sum()), self.kv_heads, self.dim)
        if kind == "packed":
            width = (self.heads + 2 * self.kv_heads) * self.dim
            t["qkv"] = self.normal((self.tokens, width), size)
            if d.chance(60):
                t["qkv_bias"] = self.normal(width)
        else:
            if kind != "kvc":
                t["query"] = self.normal((self.tokens, self.heads, self.dim), size)
            if kind != "cross":
                for name in ("current_key", "current_value"):
                    raw = kind == "kvc" and self.raw
                    t[name] = self.rng.integers(-128, 128, kv).astype(np.int8) if raw else self.normal(kv, size)
        if kind == "kvc":
            self.fill_old()
            return
        if kind == "beams":
            self.indirection()
        if kind == "mask" or d.chance(10) and kind != "fp8":
            shape = (self.tokens, int(self.kvlen.sum()) + d.below(9))
            mask = self.rng.standard_normal((self.heads, *shape) if d.chance(50) else shape)
            mask[self.rng.random(mask.shape) < d.one(0, 0.3, 0.9)] = -np.inf
            if d.chance(50) and self.tokens:
                mask[..., d.below(self.tokens), :] = -np.inf
            t["attn_mask"] = formats.encode(mask, self.io)
        if a.get("is_alibi") and d.chance(40):
            t["alibi_slopes"] = (self.rng.random(self.heads) * 0.5).astype(np.float32)
        if d.chance(15):
            t["relative_bias"] = self.rng.standard_normal((self.heads, 2 * d.one(0, 1, 7, 100) + 1)).astype(np.float32)
        if d.chance(15):
            t["sink_logits"] = self.rng.standard_normal(self.heads).astype(np.float32)
        if kind != "mha":
            self.fill_old()

    def indirection(self):
        beams, groups = self.beams, self.batch // self.beams
        longest = int(self.kvlen.max()) + self.d.below(3)
        table = self.rng.integers(0, beams, (groups, beams, longest)).astype(np.int32)
        for g in range(groups):
            start = int(self.start[g * beams])
            table[g, :, :self.d.below(start + 1)] = 0  # the prompt is beam 0's
            table[g, :, start] = np.arange(beams)
            table[g, :, start + 1:] = self.d.one(-1, beams, 2**30)
        self.tensors["cache_indirection"] = table

    def fill_old(self):
        """Values of the tokens stored before this call, written through the oracle's own addressing and quantization."""
        o = Oracle(dict(op="", revision=self.revision, io_dtype=self.io, attributes=self.attributes, scalars=self.scalars),
                   {**self.tensors})
        append = self.attributes.get("append", True)
        poisoned = self.tensors["cachestarts"]
        for b in range(self.batch):
            for t in range(int(self.start[b] if append else self.kvlen[b])):
                if self.attributes["cache_mode"] == 1 and self.revision == 2:
                    if not 0 <= poisoned[b, o.slot(t) // self.attributes["page_size"]] < 2**40:
                        continue
                for kv in (0, 1):
                    value = formats.decode(self.normal((self.kv_heads, self.dim)), self.io)
                    stored, scale = o.codec.store(value, kv)
                    place = o.place(b, t)
                    o.layer(self.tensors["cache"])[place, kv] = stored
                    if scale is not None:
                        o.layer(self.tensors["scale"])[place, kv] = scale


def build(kind, seed):
    b = Builder(kind, [KINDS.index(kind), seed])
    return b.case, b.tensors


def write(folder, case, tensors):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    (folder / "case.json").write_text(json.dumps(case, indent=1))
    for name, tensor in tensors.items():
        np.save(folder / f"{name}.npy", tensor)
