"""Ollama's own client for Python, unmodified: lists, chats, texts, streams, formats, calls, errors."""
import json
import os
import sys

try:
    import ollama
except ImportError:
    print("skipped: no ollama package (tools/clients.sh installs it)")
    sys.exit(77)

client = ollama.Client(host=os.environ["KVASIR_HTTP"])
model = client.list().models[0].model
assert client.ps().models[0].model == model
shown = client.show(model)
assert "completion" in shown.capabilities and shown.modelinfo["general.parameter_count"] > 10**8, shown

ask = [{"role": "user", "content": "What is the capital of France?"}]
greedy = {"temperature": 0, "num_predict": 20}
whole = client.chat(model, ask, options=greedy)
assert "Paris" in whole.message.content and whole.done_reason in ("stop", "length"), whole
assert whole.eval_count > 0 and whole.prompt_eval_count > 5 and whole.total_duration >= whole.eval_duration > 0, whole
pieces = list(client.chat(model + ":latest", ask, options=greedy, stream=True, keep_alive="5m"))
assert "".join(p.message.content for p in pieces) == whole.message.content and pieces[-1].done, pieces
assert pieces[-1].eval_count == whole.eval_count

raw = client.generate(model, "The capital of France is", raw=True, options=greedy)
assert "Paris" in raw.response, raw
said = client.generate(model, ask[0]["content"], system="Answer in one word.", options=greedy)
assert said.response == client.chat(model, [{"role": "system", "content": "Answer in one word."}] + ask,
                                    options=greedy).message.content

schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
          "required": ["name", "age"]}
person = client.chat(model, [{"role": "user", "content": "Describe a person."}], format=schema,
                     options={"temperature": 0, "num_predict": 120})
assert set(json.loads(person.message.content)) == {"name", "age"}, person


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
      city: its name
    """
    return "18 degrees in " + city


# What the model says of a tool is its own; that its calls go there and back is the client's.
seen = ask + [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]},
              {"role": "tool", "content": get_weather("Paris"), "tool_name": "get_weather"}]
after = client.chat(model, seen, tools=[get_weather], options=greedy)
assert after.message.content or after.message.tool_calls, after
assert client.generate(model).done_reason == "load"

vectors = client.embed(model, ["one text", "another"]).embeddings
assert len(vectors) == 2 and vectors[0] != vectors[1], vectors
assert list(client.embeddings(model, "another").embedding) == list(vectors[1])

for call, status in ((lambda: client.chat("nobody", ask), 404),
                     (lambda: client.chat(model, ask, options={"temperature": -1}), 400),
                     (lambda: client.generate(model, "x", context=[1]), 400)):
    try:
        call()
        raise AssertionError("it was taken")
    except ollama.ResponseError as refused:
        assert refused.status_code == status and refused.error, refused
print("ollama: all right")
