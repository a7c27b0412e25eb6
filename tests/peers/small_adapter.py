"""An adapter of the default model as PEFT writes it, for tests that name one: small, and the same each time."""
import json
import os
import struct

import gguf
import numpy

RANK = 4


def make(model, folder):
    """Writes it into the folder, unless it is there, and returns that."""
    if os.path.exists(os.path.join(folder, "adapter_config.json")):
        return folder
    os.makedirs(folder, exist_ok=True)
    random = numpy.random.default_rng(1)
    header, data = {}, b""

    def add(name, array):
        nonlocal data
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()

    for tensor in gguf.GGUFReader(model).tensors:
        block, _, rest = tensor.name.removeprefix("blk.").partition(".")
        kind = {"attn_q.weight": "q_proj", "attn_v.weight": "v_proj"}.get(rest)
        if kind is None:
            continue
        width, out = (int(n) for n in tensor.shape)
        name = f"base_model.model.model.layers.{block}.self_attn.{kind}"
        add(f"{name}.lora_A.weight", random.normal(0, 0.02, (RANK, width)).astype("float32"))
        add(f"{name}.lora_B.weight", random.normal(0, 0.02, (out, RANK)).astype("float32"))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "adapter_model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    with open(os.path.join(folder, "adapter_config.json"), "w") as file:
        json.dump({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "target_modules": ["q_proj", "v_proj"]},
                  file)
    return folder
