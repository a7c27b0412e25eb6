#!/usr/bin/env python3
"""Writes tests/model/fixtures/architectures.json: a small network of every architecture, as transformers computes it in
float32, with its config.json, and as llama.cpp's converter writes it to GGUF.

    tests/model/make_architectures.py [NAME...]    # only these cases anew

Makes an environment of its own under ~/.cache/kvasir with what it needs. Weights are a formula of their names that
tests/model/architectures.h repeats, norms and biases too (far from 1 and 0, so that one that is forgotten is seen); of a GGUF
tensor only how it comes of those is stored.
"""
import json, math, os, subprocess, sys, tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvasir"
VENV = CACHE / "fixtures-venv"


def prepare():
    """The interpreter that has everything; run again by it."""
    python = VENV / "bin" / "python"
    have = python.exists() and subprocess.call([python, "-c", "import gguf, numpy, safetensors, torch, transformers"]) == 0
    if not have:
        subprocess.check_call([sys.executable, "-m", "venv", VENV])
        subprocess.check_call([python, "-m", "pip", "install", "-q", "numpy", "gguf", "safetensors", "torch", "transformers"])
    if Path(sys.prefix).resolve() != VENV.resolve():
        os.execv(python, [str(python), *sys.argv])


if __name__ == "__main__":
    prepare()

import numpy as np

VOCAB, ROWS = 256, [7, 20, 39]
TOKENS = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(40)]
SIZES = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=10000.0)


def noise(name, count):
    tag = 0
    for c in name.encode():
        tag = (tag * 31 + c) & 0xFFFFFFFF
    x = (np.arange(count, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(tag)) & np.uint64(0xFFFFFFFF)
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x45D9F3B)) & np.uint64(0xFFFFFFFF)
    x = (x ^ (x >> np.uint64(16))) & np.uint64(0xFFFF)
    return x.astype(np.float64) / 65536 - .5


def is_norm(name):
    if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        return True
    return name.endswith(".weight") and any(k in name.rsplit(".", 2)[-2] for k in ("norm", "ln_"))


def weights(name, shape, norm_base):
    """Matrices within +-.25, vectors too, norms around norm_base."""
    w = noise(name, math.prod(shape)) * .5
    if len(shape) == 1 and is_norm(name):
        w += norm_base
    return w.astype(np.float32).reshape(shape)


# name: (class of the model, its configuration, how else its config.json may say it)
def cases():
    base = dict(SIZES)
    plain = dict(base, head_dim=16)
    old = lambda **kw: [dict(rope_parameters=None, **kw)]
    neox = {k: v for k, v in base.items() if k != "num_key_value_heads"}
    gpt = dict(vocab_size=VOCAB, n_embd=64, n_layer=4, n_head=4, n_positions=128)
    long = lambda n: dict(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=.75,
                          original_max_position_embeddings=n,
                          short_factor=[1 + .1 * i for i in range(6)], long_factor=[1.5 + .3 * i for i in range(6)])
    bloom = dict(vocab_size=VOCAB, hidden_size=64, n_layer=4, n_head=4)
    falcon = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=4, num_attention_heads=4)
    mpt = dict(vocab_size=VOCAB, d_model=64, n_heads=4, n_layers=4, max_seq_len=128)
    experts = dict(base, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2)
    oss = dict(plain, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, rope_parameters=dict(
        YARN, beta_fast=32.0, beta_slow=1.0, truncate=False, rope_theta=150000.0))
    glm = dict(plain, moe_intermediate_size=32, n_routed_experts=6, num_experts_per_tok=3, routed_scaling_factor=1.5,
               first_k_dense_replace=1, num_nextn_predict_layers=0)
    latent = dict(base, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16,
                  v_head_dim=24, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3)
    deep = dict(YARN, mscale=.7, mscale_all_dim=.7, beta_fast=32.0, beta_slow=1.0)
    linear = dict(base, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
                  linear_value_head_dim=16)
    gemma = dict(plain, sliding_window=8, query_pre_attn_scalar=16)
    gemma4 = dict(plain, num_hidden_layers=6, sliding_window=8, global_head_dim=32, hidden_size_per_layer_input=0,
                  layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2)
    return {
        "llama": ("llama", dict(base, attention_bias=True, mlp_bias=True), old(rope_theta=10000.0)),
        "mistral": ("mistral", dict(plain, sliding_window=None), []),
        "mistral with windows": ("mistral", dict(plain, sliding_window=8), []),
        "gemma": ("gemma", plain, old(rope_theta=10000.0)),
        "gemma2": ("gemma2", dict(gemma, attn_logit_softcapping=2.0, final_logit_softcapping=3.0), old(rope_theta=10000.0)),
        "gemma2 of another scale": ("gemma2", dict(gemma, query_pre_attn_scalar=24), []),
        "gemma3": ("gemma3_text", dict(gemma, num_hidden_layers=6), []),
        "gemma3 in threes": ("gemma3_text", dict(gemma, sliding_window_pattern=3), []),
        "gemma4": ("gemma4_text", dict(gemma4, num_global_key_value_heads=1, attention_k_eq_v=True,
                                       final_logit_softcapping=3.0),
                   [dict(per_layer_config=None, global_head_dim=32, num_global_key_value_heads=1)]),
        "gemma4 of per-layer inputs": ("gemma4_text", dict(
            gemma4, hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=3,
            use_double_wide_mlp=True, num_key_value_heads=1), []),
        "gemma4 with experts": ("gemma4_text", dict(
            gemma4, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=48,
            num_global_key_value_heads=1, attention_k_eq_v=True), []),
        "qwen2": ("qwen2", base, old(rope_theta=10000.0)),
        "qwen2 with windows": ("qwen2", dict(base, use_sliding_window=True, sliding_window=8, max_window_layers=2), []),
        "qwen3": ("qwen3", dict(base, head_dim=32), old(rope_theta=10000.0)),
        "qwen3 yarn": ("qwen3", dict(base, head_dim=32, rope_parameters=YARN),
                       old(rope_theta=10000.0, rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=32))),
        "phi3": ("phi3", dict(base, pad_token_id=0, sliding_window=8), []),
        "phi3 short": ("phi3", dict(base, pad_token_id=0, original_max_position_embeddings=64, rope_parameters=long(64)), []),
        "phi3 long": ("phi3", dict(base, pad_token_id=0, original_max_position_embeddings=32, rope_parameters=long(32)), []),
        "smollm3": ("smollm3", dict(base, pad_token_id=0), old(rope_theta=2000000.0)),
        "granite": ("granite", dict(base, attention_bias=True, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=.4,
                                    attention_multiplier=.3), old(rope_theta=10000.0)),
        "olmo2": ("olmo2", dict(base, num_key_value_heads=4), old(rope_theta=10000.0)),
        "olmo3": ("olmo3", dict(base, num_key_value_heads=4, sliding_window=8), []),
        "olmo3 yarn": ("olmo3", dict(base, sliding_window=8, rope_parameters=dict(
            full_attention=dict(YARN, rope_theta=500000.0), sliding_attention=dict(rope_type="default", rope_theta=500000.0))), []),
        "seed_oss": ("seed_oss", dict(plain, attention_out_bias=True), old(rope_theta=10000.0)),
        "ministral3": ("ministral3", dict(plain, rope_parameters=dict(
            YARN, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0,
            llama_4_scaling_beta=.3)), []),
        "gpt_neox": ("gpt_neox", dict(neox, use_parallel_residual=True), old(rotary_pct=.25, rotary_emb_base=10000)),
        "gpt_neox in turn": ("gpt_neox", dict(neox, use_parallel_residual=False), old(rotary_pct=.25, rotary_emb_base=10000)),
        "gptj": ("gptj", dict(gpt, rotary_dim=8), []),
        "phi": ("phi", dict(base, num_key_value_heads=4, intermediate_size=256), old(partial_rotary_factor=.5, rope_theta=10000.0)),
        "falcon": ("falcon", dict(falcon, multi_query=True, parallel_attn=True), []),
        "falcon grouped": ("falcon", dict(falcon, new_decoder_architecture=True, num_kv_heads=2), []),
        "falcon rw": ("falcon", dict(falcon, multi_query=False, parallel_attn=False, alibi=True, bias=True), []),
        "bloom": ("bloom", bloom, []),
        "bloom of 6 heads": ("bloom", dict(bloom, hidden_size=96, n_head=6), []),
        "mpt": ("mpt", mpt, []),
        "qwen2_moe": ("qwen2_moe", dict(experts, shared_expert_intermediate_size=80), []),
        "qwen2_moe of some layers": ("qwen2_moe", dict(experts, shared_expert_intermediate_size=32, decoder_sparse_step=2,
                                                       mlp_only_layers=[3], norm_topk_prob=True), []),
        "qwen3_moe": ("qwen3_moe", dict(experts, head_dim=16, norm_topk_prob=True, num_experts=8, num_experts_per_tok=3), []),
        "qwen3_moe as it is": ("qwen3_moe", dict(experts, head_dim=16, mlp_only_layers=[0]), []),
        "qwen3_next": ("qwen3_next", dict(linear, linear_value_head_dim=32, moe_intermediate_size=32, num_experts=4,
                                          num_experts_per_tok=2, shared_expert_intermediate_size=48), []),
        "qwen3_5": ("qwen3_5_text", dict(linear, linear_num_value_heads=6), []),
        "qwen3_5 of other layers": ("qwen3_5_text", dict(linear, linear_num_value_heads=2, num_hidden_layers=3, layer_types=[
            "full_attention", "linear_attention", "full_attention"]), []),
        "qwen3_5_moe": ("qwen3_5_moe_text", dict({k: v for k, v in linear.items() if k != "intermediate_size"}, num_experts=4,
                                                 moe_intermediate_size=32, num_experts_per_tok=2,
                                                 shared_expert_intermediate_size=48), []),
        "gpt_oss": ("gpt_oss", dict(oss), []),
        "gpt_oss of a lower limit": ("gpt_oss", dict(oss, swiglu_limit=.2, num_experts_per_tok=3), []),
        "glm4_moe": ("glm4_moe", dict(glm, use_qk_norm=True, attention_bias=True, n_shared_experts=2), []),
        "glm4_moe in groups": ("glm4_moe", dict(glm, n_group=3, topk_group=2, norm_topk_prob=False), []),
        "minimax_m2": ("minimax_m2", dict(base, head_dim=32, intermediate_size=48, num_local_experts=6, num_experts_per_tok=2,
                                          rotary_dim=16), []),
        "deepseek_v2": ("deepseek_v2", dict(latent, q_lora_rank=None, n_shared_experts=2, first_k_dense_replace=1,
                                            rope_parameters=deep),
                        old(rope_theta=10000.0, rope_scaling={k: v for k, v in dict(deep, type="yarn").items()
                                                              if k not in ("rope_type", "rope_theta")},
                            scoring_func="softmax", moe_layer_freq=1, ep_size=1)),
        "deepseek_v2 in groups": ("deepseek_v2", dict(latent, topk_method="group_limited_greedy", n_group=4, topk_group=2,
                                                      first_k_dense_replace=1, routed_scaling_factor=4.0), []),
        "deepseek_v3": ("deepseek_v3", dict(latent, n_shared_experts=1, first_k_dense_replace=2, n_group=4, topk_group=2,
                                            num_mtp_layers=0, rope_parameters=dict(deep, mscale=1.0, mscale_all_dim=1.0)),
                        [dict(model_type="kimi_k2", topk_method="noaux_tc", scoring_func="sigmoid")]),
        "deepseek_v3 of halves": ("deepseek_v3", dict(latent, rope_interleave=False, attention_bias=True, n_group=1,
                                                      topk_group=1, norm_topk_prob=False, num_mtp_layers=0), []),
        "glm4_moe_lite": ("glm4_moe_lite", dict(latent, n_shared_experts=1), []),
        "mixtral": ("mixtral", dict(base, head_dim=16, num_local_experts=4, num_experts_per_tok=2), []),
    }


# Of the two of transformers' parameters that a config.json does not have in old files. (Without q_lora_rank there is a default.)
def written(config, also):
    out = dict(config, **also)
    return {k: v for k, v in out.items() if v is not None or k == "q_lora_rank"}


def reference(case, model_type, kw, work):
    import torch, transformers
    from safetensors.numpy import load_file, save_file
    config = transformers.AutoConfig.for_model(model_type, **kw)
    # Falcon's eager attention adds ALiBi twice, by itself and in its mask.
    attention = "sdpa" if kw.get("alibi") else "eager"
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(work, safe_serialization=True)
    path = Path(work) / "model.safetensors"
    zero_centred = model_type.startswith(("gemma", "qwen3_next", "qwen3_5")) and not model_type.startswith("gemma4")
    base = 0.0 if zero_centred else 1.0
    tensors = {n: weights(n, t.shape, base) for n, t in sorted(load_file(path).items())}
    save_file(tensors, path, metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(work, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0, ROWS].double()
    return json.loads((Path(work) / "config.json").read_text()), tensors, torch.log_softmax(logits, -1).numpy(), base


def convert(work, extra):
    """What llama.cpp's converter makes of the folder; None where it knows no such model."""
    peers = subprocess.check_output([HERE.parent.parent / "bench" / "peers", "--source"], text=True)
    converter = peers.strip().removeprefix("source=")
    sys.path[:0] = [converter, converter + "/gguf-py"]
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    import gguf
    out = Path(work) / "m.gguf"
    (Path(work) / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(VOCAB)}}, "added_tokens": []}))
    hparams = dict(ModelBase.load_hparams(Path(work), False), **extra)
    architecture = get_model_architecture(hparams, ModelType.TEXT)
    try:
        kind = get_model_class(architecture)
    except NotImplementedError:
        return None
    kind.no_mtp = True  # there is none
    model = kind(Path(work), gguf.LlamaFileType.ALL_F32, out, hparams=hparams)
    for one in (model, getattr(model, "impl", model)):
        one.set_vocab = lambda: None
    model.write()
    reader = gguf.GGUFReader(out)
    arch = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    kv = []
    for name, field in reader.fields.items():
        if name.startswith(arch + "."):
            kind = field.types[0]
            value = field.contents()
            kv.append([name[len(arch) + 1:], int(kind), value, int(field.types[-1])])
    return arch, kv, [(t.name, [int(n) for n in reversed(t.shape)], np.array(t.data, dtype=np.float32)) for t in reader.tensors]


def neighbours(w, heads):
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def straight(w, heads, kv):
    g = w.reshape(kv, heads // kv + 2, w.shape[0] // (heads + 2 * kv), *w.shape[1:])
    return np.concatenate([g[:, :-2].reshape(-1, *w.shape[1:]), g[:, -2].reshape(-1, *w.shape[1:]), g[:, -1].reshape(-1, *w.shape[1:])])


def of_experts(name, shape, data, tensors):
    """A tensor that is all experts' of one."""
    for source in tensors:
        names = [source.replace(".experts.0.", f".experts.{e}.") for e in range(shape[0])]
        if ".experts.0." not in source or not all(n in tensors for n in names):
            continue
        w = [tensors[n] for n in names]
        if w[0].size * len(w) == data.size and np.allclose(np.stack(w).ravel(), data.ravel(), atol=1e-7):
            return [name, shape, "experts", names]


def of_latent(name, shape, data, tensors):
    """Each head's part of kv_b_proj, of its keys (rows and columns exchanged) or of its values."""
    for source, w in tensors.items():
        if not source.endswith("kv_b_proj.weight"):
            continue
        w = w.reshape(shape[0], -1, w.shape[1])
        for first, count, part in ((0, shape[2], w[:, :shape[2]].swapaxes(1, 2)), (w.shape[1] - shape[1], shape[1], w[:, -shape[1]:])):
            if part.shape == data.shape and np.allclose(part, data, atol=1e-7):
                return [name, shape, "head keys" if first == 0 else "head values", source, first, count]


def runs(found):
    """Indices as [first, count] of those that follow one another."""
    out = []
    for i in found:
        if out and out[-1][0] + out[-1][1] == i:
            out[-1][1] += 1
        else:
            out.append([i, 1])
    return out


def moved(name, shape, data, tensors):
    """Rows, or columns, of one tensor in another order."""
    for how, turn in (("rows", lambda a: a), ("columns", lambda a: a.T)):
        want = turn(data.reshape(-1, data.shape[-1]))
        for source, w in tensors.items():
            if w.ndim < 2:
                continue
            have = turn(w.reshape(-1, w.shape[-1]))
            if have.shape[1] != want.shape[1] or (how == "columns" and have.shape[0] != want.shape[0]):
                continue
            place = {row.tobytes(): i for i, row in enumerate(np.ascontiguousarray(have))}
            found = [place.get(row.tobytes()) for row in np.ascontiguousarray(want)]
            if None not in found:
                return [name, shape, how, source, runs(found)]


def recipe(name, shape, data, tensors, heads, kv):
    """How a tensor of the GGUF file comes of the folder's."""
    same = lambda a: a.shape == data.shape and np.allclose(a, data, atol=1e-7)
    for source, w in tensors.items():
        if w.size != data.size:
            continue
        if same(w):
            return [name, shape, "same", source]
        if same(w + 1):
            return [name, shape, "plus one", source]
        for n in {heads, kv}:
            if w.shape[0] % (2 * n) == 0 and same(neighbours(w, n)):
                return [name, shape, "neighbours", source, n]
        if w.shape[0] % (heads + 2 * kv) == 0 and same(straight(w, heads, kv)):
            return [name, shape, "straight", source, heads, kv]
    for source, w in tensors.items():
        if ".experts." not in source or w.ndim < 2 or w.shape[0] != shape[0]:
            continue
        for turned in (w.swapaxes(1, 2) if w.ndim == 3 else w,):
            for step, first in (1, 0), (2, 0), (2, 1):
                if same(turned[:, first::step]):
                    return [name, shape, "turned", source, step, first]
    if len(shape) == 3 and (made := of_experts(name, shape, data, tensors)):
        return made
    if len(shape) == 3 and (made := of_latent(name, shape, data, tensors)):
        return made
    if data.ndim > 1 and (made := moved(name, shape, data, tensors)):
        return made
    if data.size <= 64:
        return [name, shape, "values", [float(v) for v in data.ravel()]]
    raise SystemExit(f"{name} {shape} comes of no tensor of the folder")


def make(case, model_type, kw, also):
    with tempfile.TemporaryDirectory() as work:
        config, tensors, logprobs, base = reference(case, model_type, kw, work)
        clean = {k: v for k, v in config.items() if k not in ("transformers_version",)}
        one = {"name": case, "configs": [written(clean, a) for a in [{}, *also]], "norm_base": base,
               "tensors": [[n, list(w.shape)] for n, w in tensors.items()],
               "logprobs": [[round(float(v), 5) for v in row] for row in logprobs]}
        gguf = None if case in NO_GGUF else convert(work, OLD_NAMES.get(case, {}))
        if gguf:
            arch, kv, parts = gguf
            heads = config.get("num_attention_heads", config.get("n_head", config.get("n_heads")))
            kv_heads = config.get("num_key_value_heads", config.get("num_kv_heads", heads)) or heads
            if model_type == "falcon" and not config.get("new_decoder_architecture") and config.get("multi_query"):
                kv_heads = 1
            one["gguf"] = {"arch": arch, "kv": kv,
                           "tensors": [recipe(n, s, d, tensors, heads, kv_heads) for n, s, d in parts]}
        return one


# What GGUF files do not say: ALiBi in Falcon, windows of Mistral and Qwen, Gemma's scale and pattern, which of Qwen's
# layers have experts and how these are weighed, gpt-oss' limit; which rows of DeepSeek's queries rope turns together.
NO_GGUF = {"falcon rw", "mistral with windows", "qwen2 with windows", "gemma2 of another scale",
           "gemma3 in threes", "deepseek_v3 of halves", "qwen2_moe of some layers", "qwen3_moe as it is", "gpt_oss of a lower limit"}
# What the converter reads and transformers no longer writes.
OLD_NAMES = {"gpt_neox": {"rotary_pct": .25}, "gpt_neox in turn": {"rotary_pct": .25}, "falcon": {"num_kv_heads": 1},
             "mpt": {"architectures": ["MPTForCausalLM"]}}


def main(names):
    path = HERE / "fixtures" / "architectures.json"
    all_cases = cases()
    done = {c["name"]: c for c in json.loads(path.read_text())["cases"]} if path.exists() and names else {}
    for name, (model_type, kw, also) in all_cases.items():
        if names and name not in names and name in done:
            continue
        try:
            done[name] = make(name, model_type, kw, also)
        except Exception as e:
            if not os.environ.get("KEEP_GOING"):
                raise
            print(name, "FAILED", repr(e)[:300], file=sys.stderr)
            continue
        print(name, "with GGUF" if "gguf" in done[name] else "", file=sys.stderr)
    out = {"tokens": TOKENS, "rows": ROWS, "cases": [done[n] for n in all_cases if n in done]}
    with open(path, "w") as f:
        f.write('{"tokens":%s,"rows":%s,"cases":[\n' % (json.dumps(TOKENS), json.dumps(ROWS)))
        f.write(",\n".join(json.dumps(c, separators=(",", ":")) for c in out["cases"]))
        f.write("\n]}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
