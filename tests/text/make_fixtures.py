#!/usr/bin/env python3
"""Makes tests/text/data: 10,000 strings, and for each family of pre-tokenizer a small vocabulary with the ids
that Hugging Face's tokenizers gives those strings (a hash of 24 bits a string).

    python3 -m venv /tmp/v && /tmp/v/bin/pip install tokenizers==0.23.3 && /tmp/v/bin/python tests/text/make_fixtures.py

The pre-tokenizers are written here as the models' tokenizer.json files have them, not as kvasir's table does.
"""
import base64, json, os, random, re, zlib
from tokenizers import AddedToken, Tokenizer, models, trainers

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s|"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
DEEPSEEK3 = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""

# deepseek-llm spells out the letters it cuts by. Those that Unicode normalization would change are escaped.
LATIN = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
KIMI = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def digits(alone):
    return {"type": "Digits", "individual_digits": alone}


def bytelevel(regex=False):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}


FAMILIES = {
    "gpt2": ([bytelevel(True)], {}),
    "smollm": ([digits(True), bytelevel(True)], {}),
    "llama-bpe": ([split(LLAMA3), bytelevel()], {"ignore_merges": True}),
    "qwen2": ([split(QWEN2), bytelevel()], {"nfc": True}),
    "tekken": ([split(WORD % ("", "") + r"\p{N}" + TAIL), bytelevel()], {"ignore_merges": True}),
    "gpt-4o": ([split(WORD % (SUFFIX, SUFFIX) + r"\p{N}{1,3}" + TAIL), bytelevel()], {}),
    "kimi-k2": ([split(KIMI), bytelevel()], {}),
    "deepseek-llm": ([split(r"[\r\n]"), split(LATIN), split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"), split(r"\s+$"), split("[一-龥ࠀ-一가-퟿]+"), digits(True), bytelevel()], {}),
    "default": ([split(r"[\p{P}\$\+<=>\^~\|]+"), split(GPT2), split(r"\p{N}+"), split("[0-9][0-9][0-9]"), bytelevel()], {}),
    "deepseek-coder": ([split(r"[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split("[一-龥ࠀ-一가-퟿]+"), digits(True), bytelevel()], {}),
    "deepseek-v3": ([split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK3), bytelevel()], {}),
    "falcon": ([{"type": "Punctuation", "behavior": "Contiguous"}, bytelevel(True), digits(False), split("[0-9][0-9][0-9]")], {}),
    "bloom": ([split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), bytelevel()], {}),
    "command-r": ([digits(True), bytelevel(True)], {"nfc": True}),
}

PIECES = {
    "words": "the of and hello world It's we'll don't I'VE they'D tokenizer running naïve façade über señor Ελληνικά Привет мир MixedCaseWord iPhone McDonald's ﬁne ǅ ᲀ".split(),
    "numbers": "0 1 12 123 1234 12345678 3.14159 1,000,000 ½ ² ٣٤٥ १२३ Ⅷ 2024-01-31 0x7fff 1e-5 １２３".split(),
    "emoji": "😀 👨‍👩‍👧‍👦 🏳️‍🌈 🇳🇴 ❤️ 👍🏽 🫠 ☃ ✈️ 1️⃣".split(),
    "cjk": "日本語 中文字符 汉字 ひらがな カタカナ 한국어 안녕하세요 。 、 「引用」 ％ ！ ｶﾅ 𠀀𠮷 ㍿".split(),
    "rtl": "مرحبا بالعالم שָׁלוֹם العربية، ؟ ۔ \u202bx\u202c".split(),
    "indic": "नमस्ते हिन्दी। বাংলা தமிழ் ไทย ກ་བོད".split(),
    "marks": ["e\u0301", "a\u030a\u0323", "n\u0303o", "\u0301", "q\u0307\u0323", "\u1112\u1161\u11ab", "\u212b", "o\u0308"],
    "spaces": [" ", "  ", "   ", "    ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", " \n ", "\u00a0", "\u3000", "\u2009", "\u200b", "\u2028", "\x0b", "\x85"],
    "control": ["\x00", "\x01", "\x07", "\x1b[0m", "\x7f", "\ufeff", "\ufffd", "\ue000", "\U000f0000", "\U0010ffff"],
    "code": ["def f(x):", "    return x+1", "if (a!=b) {", "}", "//", "/*", "*/", "#include<stdio.h>", "a->b", "x_y_z", "$VAR", "http://a.b/c?d=e&f", "\\n", "```", "==", "<<=", "...", "---", "&&", "(", ")", "'", "\"", "''", "`"],
    "special": ["<|im_end|>", "<s>", "</s>", "[INST]", "<0x0A>", "<think>", "▁", "Ġ", "Ċ"],
}


def strings(n):
    rng = random.Random(20240131)
    kinds, out = list(PIECES), []
    while len(out) < n:
        mix = rng.sample(kinds, rng.choice([1, 1, 2, 3, 4]))
        s = ""
        for _ in range(rng.choice([1, 2, 3, 4, 6, 9])):
            s += rng.choice(PIECES[rng.choice(mix)])
            if rng.random() < 0.45:
                s += rng.choice([" ", " ", " ", "  ", "\n", ""])
        if rng.random() < 0.05:
            s += chr(rng.choice([rng.randrange(0x20, 0x3000), rng.randrange(0x3000, 0xD800), rng.randrange(0xE000, 0x30000)]))
        out.append(s[:80])
    return out


def hashes(tokenizer, texts):
    out = b""
    for e in tokenizer.encode_batch(texts, add_special_tokens=False):
        out += zlib.crc32(",".join(map(str, e.ids)).encode()).to_bytes(4, "little")[:3]
    return base64.b64encode(out).decode()


def parts(tokenizer):
    m = json.loads(tokenizer.to_str())["model"]
    tokens = [t for t, _ in sorted(m["vocab"].items(), key=lambda kv: kv[1])]
    return tokens, [x if isinstance(x, str) else " ".join(x) for x in m["merges"]]


def with_parts(tokenizer, **changes):
    j = json.loads(tokenizer.to_str())
    for key, value in changes.items():
        if key == "model":
            j["model"].update(value)
        else:
            j[key] = value
    return Tokenizer.from_str(json.dumps(j))


def write(name, content):
    with open(os.path.join(HERE, name), "w") as f:
        json.dump(content, f, ensure_ascii=True, separators=(",", ":"))
        f.write("\n")


def byte_level_family(name, steps, options, texts, corpus):
    alphabet = sorted(set(map(chr, [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)])))
    t = Tokenizer(models.BPE())
    t = with_parts(t, pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
                   normalizer={"type": "NFC"} if options.get("nfc") else None)
    t.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False))
    t = with_parts(t, model={"ignore_merges": options.get("ignore_merges", False)})
    t.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokens, merges = parts(t)
    write(name + ".json", {"model": "gpt2", "pre": name, "tokens": tokens + ["<think>"], "merges": merges,
                           "user_defined": [len(tokens)], "hashes": hashes(t, texts)})


def sentence_piece(texts, corpus, prefix):
    """Scores as SentencePiece has them; for Hugging Face every pair that makes a piece, as its converter lists them."""
    t = Tokenizer(models.BPE())
    normal = ([{"type": "Prepend", "prepend": "▁"}] if prefix else []) + [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    t = with_parts(t, normalizer={"type": "Sequence", "normalizers": normal})
    words = [w for text in corpus for w in text.split(" ")]
    t.train_from_iterator(words, trainers.BpeTrainer(vocab_size=900, show_progress=False, limit_alphabet=250))
    pieces, _ = parts(t)
    pieces = [p for p in pieces if len(p) > 1] + [p for p in pieces if len(p) == 1]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + pieces
    vocab = {p: i for i, p in enumerate(tokens)}
    scores = [0.0 if i < 259 else -float(i) for i in range(len(tokens))]
    merges = []
    for p in pieces:
        ways = [(p[:i], p[i:]) for i in range(1, len(p)) if vocab.get(p[:i], 0) >= 259 and vocab.get(p[i:], 0) >= 259]
        merges += sorted(ways, key=lambda w: (vocab[w[0]], vocab[w[1]]))
    t = with_parts(t, model={"vocab": vocab, "merges": merges, "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True})
    name = "spm" if prefix else "spm-no-prefix"
    write(name + ".json", {"model": "llama", "pre": "", "tokens": tokens, "scores": scores, "merges": [],
                           "add_space_prefix": prefix, "user_defined": [], "hashes": hashes(t, texts)})


def gemma(texts, corpus):
    """Gemma 4: SentencePiece's spaces and bytes, merges in their own order, over texts that nothing cuts."""
    t = Tokenizer(models.BPE())
    t = with_parts(t, normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    words = [w + " " for text in corpus for w in text.split(" ")]
    t.train_from_iterator(words, trainers.BpeTrainer(vocab_size=900, show_progress=False, limit_alphabet=250))
    pieces, merges = parts(t)
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>"] + [f"<0x{b:02X}>" for b in range(256)] + pieces
    vocab = {p: i for i, p in enumerate(tokens)}
    t = with_parts(t, model={"vocab": vocab, "merges": merges, "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True})
    write("gemma4.json", {"model": "gemma4", "pre": "", "tokens": tokens, "merges": merges, "user_defined": [],
                          "hashes": hashes(t, texts)})


def main():
    os.makedirs(HERE, exist_ok=True)
    texts = strings(10_000)
    write("strings.json", texts)
    # No learned piece may spell a special token.
    corpus = [re.sub(r"<\S*?>", "", t) for t in texts[::3]]
    for name, (steps, options) in FAMILIES.items():
        byte_level_family(name, steps, options, texts, corpus)
    for prefix in (True, False):
        sentence_piece(texts, corpus, prefix)
    gemma(texts, corpus)


main()
