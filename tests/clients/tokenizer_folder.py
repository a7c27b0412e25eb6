"""The vocabulary of a GGUF file as a folder that Hugging Face's libraries read, for clients that want a tokenizer of their own
to make prompts with and to count: a byte-level one, as the default model's."""
import json
import pathlib
import struct

NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, LIST, CONTROL = 8, 9, 3


def metadata(file):
    def number(form):
        return struct.unpack(form, file.read(struct.calcsize(form)))[0]

    def value(kind):
        if kind == STRING:
            return file.read(number("<Q")).decode()
        if kind == LIST:
            of, count = number("<I"), number("<Q")
            return [value(of) for _ in range(count)]
        return number(NUMBERS[kind])

    assert file.read(4) == b"GGUF"
    number("<I")
    number("<Q")
    out = {}
    for _ in range(number("<Q")):
        key = value(STRING)
        out[key] = value(number("<I"))
    return out


def write(gguf, folder):
    with open(gguf, "rb") as file:
        said = metadata(file)
    tokens, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    assert said["tokenizer.ggml.model"] == "gpt2", "this vocabulary is no byte-level one"
    special = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
               for i, (t, kind) in enumerate(zip(tokens, kinds)) if kind == CONTROL]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    folder = pathlib.Path(folder)
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": said["tokenizer.ggml.merges"]}}))
    end = tokens[said["tokenizer.ggml.eos_token_id"]]
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end, "bos_token": end,
        "model_max_length": said.get("llama.context_length", 8192), "chat_template": said["tokenizer.chat_template"]}))
