"""The tokenizer of a GGUF file with byte-level BPE, as the tokenizers library has it: what suites check the server against."""
import functools

import gguf
import jinja2
from tokenizers import AddedToken, Regex, Tokenizer as Fast, decoders, models, pre_tokenizers


def text_of(field):
    return bytes(field.parts[field.data[0]]).decode()


@functools.lru_cache
def load(path):
    fields = gguf.GGUFReader(path).fields
    words = [bytes(fields["tokenizer.ggml.tokens"].parts[i]).decode() for i in fields["tokenizer.ggml.tokens"].data]
    merges = [bytes(fields["tokenizer.ggml.merges"].parts[i]).decode() for i in fields["tokenizer.ggml.merges"].data]
    kinds = [int(fields["tokenizer.ggml.token_type"].parts[i][0]) for i in fields["tokenizer.ggml.token_type"].data]
    fast = Fast(models.BPE({word: i for i, word in enumerate(words)}, [tuple(m.split(" ", 1)) for m in merges]))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(word, special=True, normalized=False) for word, kind in zip(words, kinds) if kind == 3])
    return fast, text_of(fields["tokenizer.chat_template"])


class Tokenizer:
    """What suites use of transformers' tokenizer. The default model's adds nothing to a text."""

    def __init__(self, path):
        self.fast, self.template = load(path)

    def encode(self, text, add_special_tokens=True):
        return self.fast.encode(text, add_special_tokens=False).ids

    def __call__(self, text, **named):
        return {"input_ids": self.encode(text)}

    def decode(self, ids, skip_special_tokens=False, **_):
        return self.fast.decode([ids] if isinstance(ids, int) else list(ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids):
        return self.fast.id_to_token(ids) if isinstance(ids, int) else [self.fast.id_to_token(i) for i in ids]

    def convert_tokens_to_ids(self, words):
        return self.fast.token_to_id(words) if isinstance(words, str) else [self.fast.token_to_id(w) for w in words]

    def get_vocab(self):
        return self.fast.get_vocab()

    def __len__(self):
        return self.fast.get_vocab_size()

    @property
    def eos_token_id(self):
        return self.fast.token_to_id("<|im_end|>")

    def apply_chat_template(self, conversation, add_generation_prompt=False, continue_final_message=False, tokenize=True,
                            tools=None, **_):
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        text = environment.from_string(self.template).render(
            messages=conversation, add_generation_prompt=add_generation_prompt, tools=tools, bos_token="<|im_start|>",
            eos_token="<|im_end|>")
        if continue_final_message:
            last = conversation[-1]["content"]
            text = text[:text.rindex(last) + len(last)]
        return self.encode(text) if tokenize else text
