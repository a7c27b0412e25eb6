"""A pytest plugin: the table of reasons of SGLang's suite."""
import os

import served


def pytest_collection_modifyitems(items):
    served.mark_reasons(items, os.path.join(os.path.dirname(os.path.abspath(__file__)), "sglang_reasons.txt"))
