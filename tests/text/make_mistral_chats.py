#!/usr/bin/env python3
"""Writes tests/text/data/mistral_chats.json: conversations, and the ids that mistral-common makes of them by each version of
its tokenizers: with small vocabularies (that of mistral.json's tekken, and one of SentencePiece that is stored here), and with
the real files of its wheel (a hash of 24 bits).

    python3 -m venv /tmp/v && /tmp/v/bin/pip install mistral-common==1.13.1 sentencepiece==0.2.3 && /tmp/v/bin/python tests/text/make_mistral_chats.py
"""
import base64, io, json, os, pathlib, re, tempfile, zlib

import mistral_common
import sentencepiece
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import SpecialTokens
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
TAGS = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[IMG]",
        "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[IMG_BREAK]", "[IMG_END]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather, “now”", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}}, "required": ["city"]}}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(id, name, **arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def result(id, text, name="weather"):
    return {"role": "tool", "tool_call_id": id, "name": name, "content": text}


ROME = call("abcdefgh1", "weather", city="Róma", days=2)
CHATS = {
    "one": [user("Hello, world!")],
    "a system": [system("Be brief."), user("Hi")],
    "turns": [user("Hi"), says("Hello.  "), user(" and now?"), says("\nNothing"), user("naïve 日本 😀\n")],
    "a system and turns": [system("Be brief."), user("Hi"), says("Hello."), user("Again")],
    "two systems": [system("One."), system("Two."), user("Hi"), says("Hello."), user("Again")],
    "a system between": [user("Hi"), system("Be brief."), user("Again")],
    "the same twice": [user("Hi"), user("there"), says("Hello."), says("You."), user("Again")],
    "parts": [system([{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]),
              user([{"type": "text", "text": "Hi"}, {"type": "text", "text": ""}, {"type": "text", "text": "there"}])],
    "the assistant first": [system("Be brief."), says("Hello."), user("Hi")],
    "tools": [user("The weather?")],
    "a call": [system("Use tools."), user("In Rome?"), says("", tool_calls=[ROME]), result("abcdefgh1", '{"sun": true, "t": 21.5}')],
    "a call and text": [user("In Rome?"), says("I look.", tool_calls=[ROME]), result("abcdefgh1", "sunny"), says("Sunny."), user("Now?")],
    "calls before": [user("In Rome?"), says("", tool_calls=[ROME]), result("abcdefgh1", "[1, 2]"), says("Sunny."), user("And the time?"),
                     says(None, tool_calls=[call("abcdefgh2", "now")]), result("abcdefgh2", "", "now")],
    "two calls": [user("Both?"), says("", tool_calls=[ROME, call("abcdefgh2", "now")]), result("abcdefgh2", "12:00", "now"),
                  result("abcdefgh1", "“sunny”")],
    "thoughts": [system([{"type": "text", "text": "Think."}, {"type": "thinking", "thinking": "Here.", "closed": True},
                         {"type": "text", "text": "Then say."}]), user("Hi"),
                 says([{"type": "thinking", "thinking": "They greet."}, {"type": "text", "text": "Hello. "}]), user("Again")],
    "thoughts beside": [user("Hi"), says("Hello.", reasoning_content="They greet."), user("Again")],
}
TOOLS = {"tools": [WEATHER, NOW], "a call": [WEATHER], "a call and text": [WEATHER], "calls before": [NOW, WEATHER], "two calls": [WEATHER, NOW]}


def encode(tokenizer, name):
    try:
        request = ChatCompletionRequest.from_openai(messages=CHATS[name], tools=TOOLS.get(name))
        return tokenizer.encode_chat_completion(request).tokens
    except Exception as e:
        print(f"  not {name}: {type(e).__name__} {str(e)[:90]}")


def tekken(version, work):
    with open(os.path.join(HERE, "mistral.json")) as f:
        file = json.loads(json.load(f)["tekken"]["file"])
    file["config"]["version"] = version
    file["config"]["default_vocab_size"] += 40 - file["config"]["default_num_special_tokens"]
    file["config"]["default_num_special_tokens"] = 40
    names = [t.value for t in SpecialTokens if not t.value.startswith("[STREAMING")]
    file["special_tokens"] = [{"rank": i, "token_str": n, "is_control": True} for i, n in enumerate(names)]
    if version == "v3":
        file["special_tokens"] = None
    path = os.path.join(work, f"tekken.json")
    with open(path, "w") as f:
        json.dump(file, f)
    return MistralTokenizer.from_file(path), {"version": version, "special_tokens": file["special_tokens"]}


def sentence_piece():
    with open(os.path.join(HERE, "strings.json")) as f:
        texts = json.load(f)
    corpus = [re.sub(r"<\S*?>|\x00", "", t).replace("\n", " ") for t in texts[::6]]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=out, vocab_size=700, model_type="bpe", byte_fallback=True, character_coverage=0.98,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True, split_digits=True,
        allow_whitespace_only_pieces=True, num_threads=1, minloglevel=2, control_symbols=TAGS)
    return out.getvalue()


def crc24(ids):
    return zlib.crc32(",".join(map(str, ids)).encode()) & 0xFFFFFF


def main():
    out = {"chats": [{"name": n, "messages": m, "tools": TOOLS.get(n)} for n, m in CHATS.items()], "small": [], "real": []}
    model = sentence_piece()
    out["spm"] = base64.b64encode(model).decode()
    with open(os.path.join(HERE, "mistral.json")) as f:
        without_tags = base64.b64decode(json.load(f)["spm"]["file"])  # as version 1 is
    with tempfile.TemporaryDirectory() as work:
        for version in ("v1", "v2", "v3", "v7"):
            path = os.path.join(work, f"tokenizer.model.{version}")
            with open(path, "wb") as f:
                f.write(without_tags if version == "v1" else model)
            print("SentencePiece", version)
            t = MistralTokenizer.from_file(path)
            out["small"].append({"version": version, "ids": [encode(t, n) for n in CHATS]})
        for version in ("v3", "v7", "v11", "v13"):
            print("tekken", version)
            t, file = tekken(version, work)
            out["small"].append({"tekken": file, "version": version, "ids": [encode(t, n) for n in CHATS]})
    for path in sorted((pathlib.Path(mistral_common.__file__).parent / "data").iterdir()):
        if path.suffix == ".v7m1":
            continue
        print(path.name)
        t = MistralTokenizer.from_file(path)
        ids = [encode(t, n) for n in CHATS]
        out["real"].append({"file": path.name, "version": t.version.value, "hashes": [None if i is None else crc24(i) for i in ids]})
    with open(os.path.join(HERE, "mistral_chats.json"), "w") as f:
        f.write("{" + ",\n".join(f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in out.items()) + "}\n")


if __name__ == "__main__":
    main()
