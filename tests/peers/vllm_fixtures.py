"""A pytest plugin: vLLM's fixtures with kvasir and its default model in place of theirs.

What the suite imports of vLLM and torch is not installed: names that only a test's own body uses skip that test, since it
looks into vLLM's process and not at a server.
"""
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import types

import anthropic
import openai
import pytest

import served
import small_adapter
import small_tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
ABSENT = ("vllm", "torch", "transformers", "PIL", "schemathesis", "openai_harmony", "starlette", "fastapi", "uvicorn",
          "tests.models", "tests.conftest", "pybase64", "orjson", "rapidfuzz")
USUAL_LENGTH = 128
USUAL_THOUGHTS = 6
running = False


class Absent:
    """A name of what is not here: good for an import, a decorator, a base class; a test that uses it is skipped."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()

    def __call__(self, *_, **__):
        if running:
            pytest.skip("in process: uses vLLM's own classes")
        return Absent()

    __add__ = __radd__ = __sub__ = __truediv__ = __call__

    def __mro_entries__(self, _):
        return (object,)

    def __getitem__(self, _):
        return Absent()

    def __or__(self, _):
        return Absent()

    __ror__ = __or__

    def __bool__(self):
        return False

    def __iter__(self):
        return iter(())


class Never:
    """A platform: nothing that is asked of it is so."""

    def __getattr__(self, _):
        return lambda *__, **___: False


class Hub:
    """Where adapters come from: each name is one of the default model."""

    def snapshot_download(self, repo_id="", **_):
        return small_adapter.make(served.MODEL, os.path.join(os.path.dirname(os.environ["VLLM"]), "adapter"))


class Refused(Exception):
    pass


KNOWN = {
    "vllm.platforms": {"current_platform": Never()},
    "vllm.transformers_utils.repo_utils": {"hf_api": lambda *_: Hub()},
    "vllm.config": {"ModelConfig": lambda **_: types.SimpleNamespace(
        get_vocab_size=lambda: len(small_tokenizer.Tokenizer(served.MODEL)))},
    "vllm.tokenizers": {"get_tokenizer": lambda *_, **__: small_tokenizer.Tokenizer(served.MODEL)},
    "vllm.exceptions": {"VLLMValidationError": Refused, "VLLMNotFoundError": Refused},
    "vllm.version": {"__version__": served.version()},
    "transformers": {"AutoTokenizer": types.SimpleNamespace(
        from_pretrained=lambda *_, **__: small_tokenizer.Tokenizer(served.MODEL))},
    "torch": {"long": "long", "iinfo": lambda _: types.SimpleNamespace(min=-2**63, max=2**63 - 1)},
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if any(name == top or name.startswith(top + ".") for top in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        for name, value in KNOWN.get(spec.name, {}).items():
            setattr(module, name, value)

        def absent(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Absent()

        module.__getattr__ = absent
        return module

    def exec_module(self, module):
        pass


VALUED = {"--max-model-len": "--max-total-tokens-per-request", "--max-num-seqs": "--max-running", "--root-path": None,
          "--chat-template": None, "--tool-call-parser": None, "--served-model-name": "--served-model-name",
          "--max-logprobs": "--max-logprobs"}
SAME = ("--return-tokens-as-token-ids", "--enable-force-include-usage", "--enable-per-request-metrics")
THINKS = ["--chat-template", os.path.join(HERE, "thinking.jinja"), "--thinking-token-budget", str(USUAL_THOUGHTS)]
REFUSED = ("--root-path", "--enable-prompt-embeds", "--speculative-config", "--load-format", "--uds", "--watermark-config")


def adapters(words, model):
    """NAME=PATH up to the next flag; a path that is none is a name at the hub. What is called as the model is, is it."""
    flags = []
    for word in words:
        if word.startswith("--"):
            break
        name, _, path = word.partition("=")
        if name != model:
            flags += ["--lora", f"{name}={path if os.path.isdir(path) else Hub().snapshot_download(path)}"]
    return flags


class RemoteOpenAIServer(served.Server):
    """vLLM's flags for `vllm serve`, said as kvasir's."""

    show_hidden_metrics = False

    def __init__(self, model, vllm_serve_args=(), *, env_dict=None, **_):
        flags, named = [], model
        words = list(vllm_serve_args)
        if "--lora-modules" in words:
            flags += adapters(words[words.index("--lora-modules") + 1:], model)
        if "--reasoning-parser" in words:
            flags += THINKS
        for i, word in enumerate(words):
            word, _, inline = word.partition("=")
            if word in REFUSED:
                pytest.skip(f"{word} is not served by kvasir")
            value = inline or (words[i + 1] if i + 1 < len(words) else "")
            if word == "--served-model-name":
                named = value
            elif VALUED.get(word):
                flags += [VALUED[word], value]
            elif word in SAME:
                flags.append(word)
        super().__init__(flags, named)

    def client(self, kind, **named):
        named = {"api_key": "none", "max_retries": 0, "timeout": 600, **named}
        return with_usual(kind(base_url=self.url_for("v1"), **named))

    def get_client(self, **named):
        return self.client(openai.OpenAI, **named)

    def get_async_client(self, **named):
        return self.client(openai.AsyncOpenAI, **named)

    def get_client_anthropic(self, **named):
        return anthropic.Anthropic(base_url=self.url_root, api_key="none", max_retries=0, timeout=600, **named)

    def get_async_client_anthropic(self, **named):
        return anthropic.AsyncAnthropic(base_url=self.url_root, api_key="none", max_retries=0, timeout=600, **named)


def with_usual(client):
    """A request that leaves its length to the server gets one: a small model may go on to the end of its context. A
    response that leaves its temperature gets 0: at 1 such a model seldom comes to an end."""
    for made_by, usual in ((client.chat.completions, {"max_completion_tokens": USUAL_LENGTH, "max_tokens": None}),
                           (client.responses, {"max_output_tokens": USUAL_LENGTH, "temperature": 0})):
        def create(*more, make=made_by.create, usual=usual, **said):
            lengths = [name for name in usual if name != "temperature"]
            for name, value in usual.items():
                alike = lengths if name in lengths else [name]
                if value is not None and not any(n in said or n in (said.get("extra_body") or {}) for n in alike):
                    said[name] = value
            return make(*more, **said)

        made_by.create = create
    return client


# Before any conftest is read, which is before pytest_configure.
sys.meta_path.append(Finder())
utils = types.ModuleType("tests.utils")
utils.RemoteOpenAIServer = utils.RemoteLaunchRenderServer = utils.RemoteVLLMServer = RemoteOpenAIServer
utils.ROCM_EXTRA_ARGS = []
utils.__getattr__ = lambda name: Absent()
sys.modules["tests.utils"] = utils


@pytest.fixture(scope="session")
def local_asset_server():
    """Pictures: only tests of another model ask it for one."""


def in_process(item):
    """Whether a test asks no server: it has neither a fixture of one nor starts one."""
    return (not any("server" in name or "client" in name for name in item.fixturenames)
            and "RemoteOpenAIServer" not in inspect.getsource(item.function))


def pytest_collection_modifyitems(items):
    for item in items:
        if in_process(item):
            item.add_marker(pytest.mark.skip(reason="in process: uses vLLM's own classes"))
    served.mark_reasons(items, os.path.join(HERE, "vllm_reasons.txt"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    global running
    running = True
    try:
        return (yield)
    finally:
        running = False
