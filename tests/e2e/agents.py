#!/usr/bin/env python3
"""An agent's conversation of 30 turns with tools over chat, responses and messages, each with its history as that protocol's
clients keep it: the same prompts and answers over all three, and what a prompt shares with the turn before is found in the
cache. Once with the model's own template, which knows no tools, once with one that writes calls itself.
agents.py KVASIR [TURNS]"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

KVASIR = sys.argv[1]
TURNS = int(sys.argv[2]) if len(sys.argv) > 2 else 30
MODEL = os.environ.get("KVASIR_MODEL") or str(pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") /
                                              "kvasir" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
MOST = {"some": 96, "one": 48, "auto": 20, "none": 12}  # tokens an answer; a call that is cut is sent back as it is
SYSTEM = "You are a careful agent that works on a repository of source files. Read before you write, and say what you saw."
TOOLS = [
    ("read_file", "The lines of a file", {"path": {"type": "string", "maxLength": 12}, "line": {"type": "integer", "enum": [1, 40, 80]}}),
    ("list_folder", "The names in a folder", {"path": {"type": "string", "maxLength": 8}}),
]
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n' + messages[0].content + '\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ 'Call by <tool_call></tool_call>.<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages[1:] %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>' + m.tool_call_id + '\\n' + m.content + '</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def schema(properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def header(turn):
    """What some agents put first, other in each call."""
    return f"x-anthropic-billing-header: cc_version=2.1; cch={turn:05x};"


def plan(turn):
    """What a turn may answer: calls, one call, either, or text."""
    return ("some", "one", "auto", "none")[turn % 4]


def asked(turn):
    return f"Step {turn}: go on with the next file and tell me what changed in it."


def result(turn, name, arguments):
    return f"{name} at turn {turn} of {json.dumps(arguments)}: 12 lines, the last says return {turn};"


class Chat:
    """Messages as the openai package keeps them."""
    path, choices = "/v1/chat/completions", {"some": "required", "one": "required", "auto": "auto", "none": "none"}

    def __init__(self):
        self.messages = []

    def ask(self, port, turn):
        body = post(port, self.path, max_tokens=MOST[plan(turn)], temperature=0, return_token_ids=True, tool_choice=self.choices[plan(turn)],
                    parallel_tool_calls=plan(turn) != "one",
                    messages=[{"role": "system", "content": [{"type": "text", "text": t} for t in (header(turn), SYSTEM)]}] + self.messages,
                    tools=[{"type": "function", "function": {"name": n, "description": d, "parameters": schema(p)}} for n, d, p in TOOLS])
        message = body["choices"][0]["message"]
        self.messages.append(message)
        self.ids = body["prompt_token_ids"], body["choices"][0]["token_ids"]
        calls = [(c["function"]["name"], arguments(c["function"]["arguments"]), c["id"]) for c in message.get("tool_calls") or []]
        usage = body["usage"]
        return message.get("content") or "", calls, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def tell(self, results):
        self.messages += [{"role": "tool", "tool_call_id": i, "content": text} for i, text in results]

    def say(self, text):
        self.messages.append({"role": "user", "content": text})


class Responses:
    """Items as they came."""
    path, choices = "/v1/responses", Chat.choices

    def __init__(self):
        self.items = []

    def ask(self, port, turn):
        body = post(port, self.path, max_output_tokens=MOST[plan(turn)], temperature=0, tool_choice=self.choices[plan(turn)],
                    parallel_tool_calls=plan(turn) != "one", instructions=header(turn) + "\n" + SYSTEM, input=self.items,
                    tools=[{"type": "function", "name": n, "description": d, "parameters": schema(p)} for n, d, p in TOOLS])
        self.items += body["output"]
        text = "".join(part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"])
        calls = [(i["name"], arguments(i["arguments"]), i["call_id"]) for i in body["output"] if i["type"] == "function_call"]
        return text, calls, body["usage"]["input_tokens"], body["usage"]["input_tokens_details"]["cached_tokens"]

    def tell(self, results):
        self.items += [{"type": "function_call_output", "call_id": i, "output": text} for i, text in results]

    def say(self, text):
        self.items.append({"role": "user", "content": [{"type": "input_text", "text": text}]})


class Messages:
    """Content blocks, the results of tools in one message of the user's."""
    path, choices = "/v1/messages", {"some": "any", "one": "any", "auto": "auto", "none": "none"}

    def __init__(self):
        self.messages = []

    def ask(self, port, turn):
        choice = {"type": self.choices[plan(turn)]} | ({"disable_parallel_tool_use": True} if plan(turn) == "one" else {})
        body = post(port, self.path, max_tokens=MOST[plan(turn)], temperature=0, tool_choice=choice, messages=self.messages,
                    system=[{"type": "text", "text": header(turn)},
                            {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
                    tools=[{"name": n, "description": d, "input_schema": schema(p)} for n, d, p in TOOLS])
        self.messages.append({"role": "assistant", "content": body["content"]})
        text = "".join(block["text"] for block in body["content"] if block["type"] == "text")
        calls = [(b["name"], b["input"], b["id"]) for b in body["content"] if b["type"] == "tool_use"]
        usage = body["usage"]
        return text, calls, usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]

    def tell(self, results):
        self.messages.append({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": i, "content": [{"type": "text", "text": text}]} for i, text in results]})

    def say(self, text):
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})


def arguments(text):
    """A call that was cut at the token limit has a piece of them."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def post(port, path, **body):
    ask = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=json.dumps(body).encode(),
                                 headers={"Content-Type": "application/json", "anthropic-version": "2023-06-01"})
    try:
        with urllib.request.urlopen(ask, timeout=240) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        raise AssertionError(f"{path}: {e.code} {e.read().decode()}")


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def converse(port, kind):
    """What each turn answered: text, calls, the prompt's length, what was cached of it; and its ids, where they are told."""
    agent, turns = kind(), []
    agent.say(asked(0))
    for turn in range(TURNS):
        text, calls, prompt, cached = agent.ask(port, turn)
        assert calls or plan(turn) in ("auto", "none"), (turn, text)
        if plan(turn) == "one":
            assert len(calls) == 1, calls
        turns.append((text, [(name, given) for name, given, _ in calls], prompt, cached, getattr(agent, "ids", None)))
        if calls:
            agent.tell([(i, result(turn, name, given)) for name, given, i in calls])
        else:
            agent.say(asked(turn + 1))
    return turns


def check(port):
    before = None
    for kind in (Chat, Responses, Messages):
        post(port, "/flush_cache")
        turns = converse(port, kind)
        before = before or turns
        cached = shared = answers = kept = 0
        for turn, ((text, calls, prompt, found, _), first) in enumerate(zip(turns, before, strict=True)):
            where = f"{kind.__name__}, turn {turn}"
            assert (text, calls, prompt) == first[:3], f"{where}: {(text, calls, prompt)} beside chat's {first[:3]}"
            if turn == 0:
                continue
            (was, said), now = before[turn - 1][4], first[4][0]
            same = common(was + said, now)
            assert same >= len(was), f"{where}: of {len(was)} tokens of the prompt before only {same} come again"
            assert found >= .95 * same, f"{where}: of {same} tokens that were there before, {found} were cached"
            cached, shared, answers, kept = cached + found, shared + same, answers + len(said), kept + same - len(was)
        print(f"  {kind.__name__}: {len(turns)} turns, {sum(len(t[1]) for t in turns)} calls, the last prompt {turns[-1][2]} tokens; "
              f"cached {cached} of {shared} shared ({cached / shared:.4f}); of {answers} tokens answered {kept} come back as they were")
        assert sum(len(t[1]) > 1 for t in turns) or TURNS < 30, "no calls in parallel"


def serve(more, what):
    server = subprocess.Popen([KVASIR, "serve", "--model", MODEL, "--device", "cpu", "--grpc-port", "-1", "--http-port", "0",
                               "--log-format", "json", *more], stderr=subprocess.PIPE, text=True)
    try:
        said, port = [], None
        for line in server.stderr:
            said.append(line)
            if line.startswith("{") and json.loads(line)["message"] == "ready":
                port = json.loads(line)["http_port"]
                break
        assert port, f"the server ended: {said}"
        print(what)
        check(port)
    finally:
        server.kill()
        server.wait()


def main():
    if not os.path.exists(MODEL):
        print(f"skipped: no model at {MODEL} (./test fetches it)")
        sys.exit(77)
    serve([], "the model's own template, which knows no tools")
    with tempfile.TemporaryDirectory() as work:
        file = pathlib.Path(work) / "template.jinja"
        file.write_text(TEMPLATE.strip())
        serve(["--chat-template", str(file)], "a template that writes calls")


if __name__ == "__main__":
    main()
