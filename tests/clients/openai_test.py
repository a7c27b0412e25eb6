"""The openai client, unmodified: chat, completions, streams, tools, schemas, log-probabilities, errors."""
import json
import os
import sys

try:
    import openai
except ImportError:
    print("skipped: no openai package (pip install openai)")
    sys.exit(77)

client = openai.OpenAI(base_url=os.environ["KVASIR_HTTP"] + "/v1", api_key="none")
model = client.models.list().data[0].id
ask = [{"role": "user", "content": "What is the capital of France?"}]

whole = client.chat.completions.create(model=model, messages=ask, max_tokens=16, temperature=0)
assert "Paris" in whole.choices[0].message.content, whole
assert whole.usage.completion_tokens > 0

text, usage = "", None
for chunk in client.chat.completions.create(model=model, messages=ask, max_tokens=16, temperature=0, stream=True,
                                            stream_options={"include_usage": True}):
    usage = chunk.usage or usage
    if chunk.choices:
        text += chunk.choices[0].delta.content or ""
assert text == whole.choices[0].message.content, (text, whole)
assert usage.completion_tokens == whole.usage.completion_tokens

two = client.completions.create(model=model, prompt=["The capital of France is", "2 + 2 ="], max_tokens=4, n=2,
                                temperature=0, logprobs=3, echo=True)
assert len(two.choices) == 4
assert two.choices[0].text == two.choices[1].text and "Paris" in two.choices[0].text
first = two.choices[0].logprobs
assert first.token_logprobs[0] is None and len(first.tokens) == len(first.token_logprobs) == len(first.text_offset)
assert "".join(first.tokens) == two.choices[0].text

seeded = [client.completions.create(model=model, prompt="Once", max_tokens=12, seed=7).choices[0].text for _ in range(2)]
assert seeded[0] == seeded[1]
drawn = client.completions.create(model=model, prompt=["Once", "The"], max_tokens=12, n=2).choices
assert drawn[0].seed == drawn[1].seed != drawn[2].seed, drawn
again = client.completions.create(model=model, prompt="The", max_tokens=12, n=2, seed=drawn[2].seed).choices
assert [c.text for c in again] == [c.text for c in drawn[2:]], (again, drawn)

logged = client.chat.completions.create(model=model, messages=ask, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2)
content = logged.choices[0].logprobs.content
assert len(content) == 3 and all(len(t.top_logprobs) == 2 and t.logprob <= 0 for t in content)

schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
          "required": ["name", "age"], "additionalProperties": False}
person = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Describe a person."}], max_tokens=120, temperature=0,
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}})
assert set(json.loads(person.choices[0].message.content)) == {"name", "age"}

tool = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"], "additionalProperties": False}}}
for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
    called = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Weather in Paris?"}],
                                            max_tokens=120, temperature=0, tools=[tool], tool_choice=choice)
    call = called.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather" and "city" in json.loads(call.function.arguments), called

# A model may call or not; if it does, a strict tool's schema holds, whatever the calls before looked like.
seen = [{"role": "user", "content": "Weather in Rome?"},
        {"role": "assistant", "content": '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "unit": "celsius"}}</tool_call>'},
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}</tool_call>'},
        {"role": "user", "content": "Weather in Paris?"}]
for strict, unit in ((False, "celsius"), (True, "kelvin")):
    held = {"type": "function", "function": {"name": "get_weather", "strict": strict, "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"$ref": "#/$defs/unit"}},
        "required": ["city", "unit"], "additionalProperties": False, "$defs": {"unit": {"enum": ["kelvin"]}}}}}
    chosen = client.chat.completions.create(model=model, messages=seen, max_tokens=120, temperature=0, tools=[held])
    call = chosen.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["unit"] == unit, chosen
    freely = client.chat.completions.create(model=model, messages=ask, max_tokens=16, temperature=0, tools=[held])
    assert "Paris" in freely.choices[0].message.content and not freely.choices[0].message.tool_calls, freely

begun = ask + [{"role": "assistant", "content": "The capital of France is the city of"}]
more = client.chat.completions.create(model=model, messages=begun, max_tokens=8, temperature=0,
                                      extra_body={"continue_final_message": True, "add_generation_prompt": False})
assert more.choices[0].message.content.startswith(" Paris"), more

# What .parse() gave goes back as it is, with what the client's library added to it.
parsed = client.chat.completions.create(
    model=model, max_tokens=8, messages=ask + [{**whole.choices[0].message.model_dump(), "parsed": {"city": "Paris"}},
                                               {"role": "user", "content": "Sure?"}])
assert parsed.choices, parsed

answer = client.responses.create(model=model, input="What is the capital of France?", max_output_tokens=20, temperature=0)
assert answer.status in ("completed", "incomplete") and "Paris" in answer.output_text, answer
assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens, answer
kinds, streamed = [], ""
for event in client.responses.create(model=model, input="What is the capital of France?", max_output_tokens=20,
                                     temperature=0, stream=True):
    assert type(event).__module__.startswith("openai.types.responses"), event  # each is known by its type
    assert event.sequence_number == len(kinds), event
    kinds.append(event.type)
    streamed += event.delta if event.type == "response.output_text.delta" else ""
assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                     "response.content_part.added"], kinds
assert kinds[-1] in ("response.completed", "response.incomplete") and streamed == answer.output_text, (kinds, streamed)
with client.responses.stream(model=model, input="What is the capital of France?", max_output_tokens=20,
                             temperature=0) as stream:
    stream.until_done()
    assert stream.get_final_response().output_text == answer.output_text
weather = {"type": "function", "name": "get_weather", "strict": True, "parameters": tool["function"]["parameters"]}
asked = [{"role": "user", "content": "Weather in Paris?"}]
called = client.responses.create(model=model, input=asked, tools=[weather], tool_choice="required", temperature=0,
                                 max_output_tokens=120)
call = called.output[-1]
assert call.type == "function_call" and "city" in json.loads(call.arguments), called
after = client.responses.create(model=model, tools=[weather], max_output_tokens=12, input=asked + called.output + [
    {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}])
assert after.output, after
formed = client.responses.create(model=model, input="Describe a person.", max_output_tokens=120, temperature=0, text={
    "format": {"type": "json_schema", "name": "person", "strict": True, "schema": schema}})
assert set(json.loads(formed.output_text)) == {"name", "age"}, formed
try:
    client.responses.create(model=model, input="x", store=True)
    raise AssertionError("store was taken")
except openai.BadRequestError as refused:
    assert "--response-store" in str(refused), refused

for wrong, error in (({"temperature": -1}, openai.BadRequestError), ({"model": "nobody"}, openai.NotFoundError),
                     ({"n": 100000}, openai.BadRequestError)):
    try:
        client.chat.completions.create(**{"model": model, "messages": ask, **wrong})
        raise AssertionError(f"{wrong} was taken")
    except error as refused:
        assert next(iter(wrong)) in str(refused), refused
vectors = client.embeddings.create(model=model, input=["a text", "another text"], dimensions=32)  # it asks for base64
assert [len(d.embedding) for d in vectors.data] == [32, 32], vectors
assert all(abs(sum(x * x for x in d.embedding) - 1) < 1e-4 for d in vectors.data)
alone = client.embeddings.create(model=model, input="another text", dimensions=32, encoding_format="float").data[0]
assert max(abs(a - b) for a, b in zip(alone.embedding, vectors.data[1].embedding)) < 1e-6
print("openai", openai.__version__, "all right")
