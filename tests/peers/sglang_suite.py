"""SGLang's tests of its server, which its wheel brings as mixins, over kvasir with the default model.

What they import of SGLang itself is not installed: a test that uses it looks into SGLang's process and is skipped.
"""
import importlib.util
import os
import sys
import types
import unittest

import openai
import pytest

import served

KITS = os.path.join(os.environ["SGLANG"], "sglang", "test", "kits")


class Absent:
    def __getattr__(self, _):
        raise unittest.SkipTest("in process: uses SGLang's own classes")

    def __call__(self, *_, **__):
        raise unittest.SkipTest("in process: uses SGLang's own classes")


def absent_module(name):
    module = types.ModuleType(name)
    module.__path__ = []
    module.__getattr__ = lambda wanted: Absent()
    sys.modules[name] = module


for name in ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.anthropic",
             "sglang.srt.entrypoints.anthropic.protocol", "sglang.srt.entrypoints.anthropic.serving", "sglang.srt.parser",
             "sglang.srt.parser.reasoning_parser", "sglang.srt.utils", "sglang.srt.utils.hf_transformers_utils"):
    absent_module(name)


def kit(file, mixin):
    spec = importlib.util.spec_from_file_location(file, os.path.join(KITS, file + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, mixin)


@pytest.fixture(scope="session")
def server():
    with served.Server(["--any-model-name"]) as one:
        yield one


class Over(unittest.TestCase):
    """What a mixin asks of its host."""

    model, api_key = "default", "none"

    @pytest.fixture(autouse=True)
    def host(self, server):
        self.base_url, self.process = server.url_root, server.proc
        self.client = openai.OpenAI(base_url=server.url_for("v1"), api_key=self.api_key, max_retries=0)


class TestMessages(kit("anthropic_messages_kit", "AnthropicMessagesMixin"), Over):
    pass


class TestContract(kit("basic_api_contract_kit", "BasicAPIContractMixin"), Over):
    pass


class TestDecode(kit("basic_decode_correctness_kit", "BasicDecodeCorrectnessMixin"), Over):
    pass


class TestStress(kit("basic_scheduler_stress_kit", "BasicSchedulerStressMixin"), Over):
    pass


class TestEbnf(kit("ebnf_constrained_kit", "EBNFConstrainedMixin"), Over):
    pass


class TestRegex(kit("regex_constrained_kit", "RegexConstrainedMixin"), Over):
    pass


class TestJson(kit("json_constrained_kit", "JSONConstrainedMixin"), Over):
    pass


class TestJsonMode(kit("json_mode_kit", "JSONModeMixin"), Over):
    pass


class TestStop(kit("matched_stop_kit", "MatchedStopMixin"), Over):
    pass


class TestAbortAll(kit("abort_timeout_kit", "AbortAllMixin"), Over):
    abort_all_max_new_tokens = 8000  # as the default model's context goes
