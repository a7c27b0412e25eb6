#!/usr/bin/env python3
"""Writes tests/model/fixtures/adapters.json: what PEFT makes of the small networks of architectures.json with adapters,
merged, in float32.

    tests/model/make_adapters.py

Uses make_architectures.py's environment and formula of weights, and adds peft to it. Of an adapter its configuration and its
tensors' names, shapes and the formula's numbers are stored: value = formula(name) * scale + shift.
"""
import importlib.util, json, os, subprocess, sys, tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENV = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvasir" / "fixtures-venv"

if __name__ == "__main__" and Path(sys.prefix).resolve() != VENV.resolve():
    if not (VENV / "bin" / "python").exists():
        raise SystemExit("run tests/model/make_architectures.py first: it makes the environment")
    os.execv(VENV / "bin" / "python", [str(VENV / "bin" / "python"), *sys.argv])
if __name__ == "__main__" and importlib.util.find_spec("peft") is None:
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", "peft"])

sys.path.insert(0, str(HERE))
import make_architectures as networks

KEPT = ["peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "target_modules", "bias",
        "modules_to_save", "init_lora_weights", "layers_to_transform", "fan_in_fan_out", "task_type"]
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


# name: (network of architectures.json, LoraConfig)
def cases():
    return {
        "plain": ("llama", dict(r=4, lora_alpha=8, target_modules=LLAMA)),
        "rsLoRA": ("llama", dict(r=6, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"],
                                 rank_pattern={"layers.1.self_attn.q_proj": 3}, alpha_pattern={"down_proj": 9})),
        "DoRA": ("llama", dict(r=4, lora_alpha=6, use_dora=True, target_modules="all-linear")),
        "plain of qwen3": ("qwen3", dict(r=20, lora_alpha=10, target_modules=LLAMA)),
        "plain of gemma3": ("gemma3", dict(r=8, lora_alpha=8, target_modules=LLAMA)),
        "plain of granite": ("granite", dict(r=8, lora_alpha=8, target_modules=LLAMA)),
        "fused of phi3": ("phi3", dict(r=5, lora_alpha=5, target_modules="all-linear")),
        "DoRA of phi3": ("phi3", dict(r=3, lora_alpha=6, use_dora=True, target_modules=["qkv_proj", "gate_up_proj", "down_proj"])),
        "grouped of gpt_neox": ("gpt_neox", dict(r=4, lora_alpha=4, use_dora=True, target_modules="all-linear")),
        "grouped of falcon": ("falcon grouped", dict(r=4, lora_alpha=4, target_modules="all-linear")),
        "latent of deepseek_v3": ("deepseek_v3", dict(r=4, lora_alpha=4, target_modules=[
            "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"])),
        "attention of mixtral": ("mixtral", dict(r=4, lora_alpha=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])),
    }


def numbers(name):
    """The formula's scale and shift: changes that are seen, and magnitudes that are no lengths of rows."""
    return (.5, 1.5) if "magnitude" in name else (.5, 0.0)


def logprobs(model):
    import torch
    with torch.no_grad():
        logits = model(torch.tensor([networks.TOKENS])).logits[0, networks.ROWS].double()
    return [[round(float(v), 5) for v in row] for row in torch.log_softmax(logits, -1)]


def case(name, network, kw):
    import numpy as np, peft, torch, transformers
    from safetensors.numpy import load_file, save_file
    model_type, config, _ = networks.cases()[network]
    with tempfile.TemporaryDirectory() as work:
        base, adapter = str(Path(work) / "base"), Path(work) / "adapter"
        os.mkdir(base)
        networks.reference(network, model_type, config, base)  # leaves the folder
        load = lambda: transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
        peft.get_peft_model(load(), peft.LoraConfig(task_type="CAUSAL_LM", **kw)).save_pretrained(adapter)
        path = adapter / "adapter_model.safetensors"
        tensors = []
        made = {}
        for n, t in sorted(load_file(path).items()):
            scale, shift = numbers(n)
            made[n] = (networks.noise(n, t.size) * scale + shift).astype(np.float32).reshape(t.shape)
            tensors.append([n, list(t.shape), scale, shift])
        save_file(made, path, metadata={"format": "pt"})
        merged = peft.PeftModel.from_pretrained(load(), adapter).merge_and_unload().eval()
        stored = json.loads((adapter / "adapter_config.json").read_text())
        stored = {k: sorted(v) if isinstance(v, list) else v for k, v in stored.items() if k in KEPT}
        return {"name": name, "network": network, "config": stored, "tensors": tensors, "logprobs": logprobs(merged)}


def main():
    lines = []
    for name, (network, kw) in cases().items():
        lines.append(json.dumps(case(name, network, kw), separators=(",", ":")))
        print(name, file=sys.stderr)
    with open(HERE / "fixtures" / "adapters.json", "w") as f:
        f.write('{"cases":[\n%s\n]}\n' % ",\n".join(lines))


if __name__ == "__main__":
    main()
