"""A pytest plugin: llama.cpp's fixtures, with kvasir and its default model in place of theirs."""
import os
import time

import jinja2
import pytest
import requests

import llama_templates
import served
import small_tokenizer

CHATS = ("/chat/completions", "/v1/chat/completions")
GENERATES = ("/completion", "/completions", "/v1/completions", "/infill", *CHATS)
LENGTHS = ("n_predict", "max_tokens", "max_completion_tokens")


def tokens(text):
    return len(small_tokenizer.Tokenizer(served.MODEL).encode(text))


def chat_ids(system, user, template=None):
    """Of such a chat's prompt, as transformers would make it; a content of parts is their texts, one a line."""
    if not isinstance(user, str):
        user = "\n".join(part["text"] for part in user)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    tokenizer = small_tokenizer.Tokenizer(served.MODEL)
    if template is None:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    source = llama_templates.NAMED.get(template, template)
    text = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source).render(
        messages=messages, add_generation_prompt=True)
    return tokenizer.encode(text)


def chat_tokens(system, user, template=None):
    return len(chat_ids(system, user, template))


def with_shared_tokens(system, users):
    """Of each chat its user's text, its tokens, and how many it begins with as an earlier one does: one is always computed."""
    out, before = [], []
    for user in users:
        ids = chat_ids(system, user)
        shared = max((len(os.path.commonprefix([ids, other])) for other in before), default=0)
        out.append((user, len(ids), min(shared, len(ids) - 1)))
        before.append(ids)
    return out


def with_usual(server, path, data):
    if not isinstance(data, dict):
        return data
    out = dict(data)
    if path == "/apply-template" and server.reasoning:  # a flag of that server, which here each request says
        out.setdefault("chat_template_kwargs", {"enable_thinking": server.reasoning != "off"})
    if path in CHATS:
        if server.debug:  # a flag there
            out.setdefault("verbose", True)
        messages = out.get("messages")
        last = messages[-1] if isinstance(messages, list) and messages else None
        if isinstance(last, dict) and last.get("role") == "assistant" and "continue_final_message" not in out:
            out |= {"continue_final_message": True, "add_generation_prompt": False}  # --prefill-assistant, usual there
    if path not in GENERATES:
        return out
    length = "max_tokens" if path == "/v1/completions" else "n_predict"
    most = server.n_predict or 64
    said = [name for name in LENGTHS if name in out]
    for name in said:
        if out[name] == -1:
            out[name] = most
    if not said:
        out[length] = most
    if most == -1:  # as far as the context goes: their model does not end before
        out.setdefault("ignore_eos", True)
    out.setdefault("temperature", server.temperature)
    return out


def pytest_configure(config):
    import utils
    utils.ServerPreset.load_all = staticmethod(lambda: None)  # it would start servers for models that are not here
    utils.match_regex = lambda regex, text: isinstance(text, str)
    utils.tokens, utils.chat_tokens, utils.with_shared_tokens = tokens, chat_tokens, with_shared_tokens
    server = utils.ServerProcess
    ask, stream, start = server.make_request, server.make_stream_request, server.start

    def make_request(self, method, path, data=None, *more, **named):
        return ask(self, method, path, with_usual(self, path, data), *more, **named)

    def make_stream_request(self, method, path, data=None, *more, **named):
        return stream(self, method, path, with_usual(self, path, data), *more, **named)

    def started(self, *more, **named):
        try:
            start(self, *more, **named)  # until /health is well, which here it is while the model loads
            while requests.get(self.make_url("/ready")).status_code != 200:
                time.sleep(0.05)
        except RuntimeError as died:
            if str(died).endswith("code 3"):
                pytest.skip("asks for what kvasir does not serve")
            raise

    server.make_request, server.make_stream_request, server.start = make_request, make_stream_request, started


def pytest_collection_modifyitems(items):
    served.mark_reasons(items, os.path.join(os.path.dirname(os.path.abspath(__file__)), "llama_reasons.txt"))
