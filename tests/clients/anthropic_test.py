"""Anthropic's own client for Python, as people use it: text, streams, tools, thoughts, counting, errors."""
import os
import sys

try:
    import anthropic
except ImportError:
    print("skipped: no anthropic package (tools/clients.sh installs it)")
    sys.exit(77)

client = anthropic.Anthropic(base_url=os.environ["KVASIR_HTTP"], api_key="none", max_retries=0)
model = client.get("/v1/models", cast_to=object)["data"][0]["id"]
ask = [{"role": "user", "content": "What is the capital of France?"}]

whole = client.messages.create(model=model, max_tokens=20, temperature=0, messages=ask)
assert whole.role == "assistant" and whole.content[0].type == "text" and "Paris" in whole.content[0].text, whole
assert whole.stop_reason in ("end_turn", "max_tokens") and whole.usage.output_tokens > 0, whole

with client.messages.stream(model=model, max_tokens=20, temperature=0, messages=ask) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == whole.content[0].text and final.content[0].text == text, (text, whole)
assert final.usage.output_tokens == whole.usage.output_tokens, final

kinds = [event.type for event in client.messages.create(model=model, max_tokens=4, messages=ask, stream=True)]
assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "content_block_delta" in kinds, kinds

billed = [{"type": "text", "text": "x-anthropic-billing-header: cch=%d"}, {"type": "text", "text": "Answer in one word."}]
counts = set()
for turn in (1, 22222):
    billed[0]["text"] = f"x-anthropic-billing-header: cch={turn}"
    counts.add(client.messages.count_tokens(model=model, system=billed, messages=ask).input_tokens)
assert len(counts) == 1 and counts.pop() > 10, counts

stopped = client.messages.create(model=model, max_tokens=40, temperature=0, messages=ask, stop_sequences=["Paris"])
assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "Paris", stopped

tool = {"name": "get_weather", "description": "The weather of a city.", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}}
called = client.messages.create(model=model, max_tokens=100, temperature=0, tools=[tool], tool_choice={"type": "any"},
                                messages=[{"role": "user", "content": "Weather in Paris?"}])
use = called.content[-1]
assert called.stop_reason == "tool_use" and use.type == "tool_use" and set(use.input) == {"city"}, called
after = client.messages.create(model=model, max_tokens=20, tools=[tool], messages=[
    {"role": "user", "content": "Weather in Paris?"}, {"role": "assistant", "content": called.content},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "18 degrees"}]}])
assert after.content, after
with client.messages.stream(model=model, max_tokens=100, temperature=0, tools=[tool], messages=ask,
                            tool_choice={"type": "tool", "name": "get_weather"}) as stream:
    streamed = stream.get_final_message()
assert streamed.content[0].name == "get_weather" and "city" in streamed.content[0].input, streamed

begun = client.messages.create(model=model, max_tokens=8, temperature=0, messages=ask + [
    {"role": "assistant", "content": "The capital of France is the city of"}])
assert begun.content[0].text.startswith(" Paris"), begun

for wrong, error in (({"temperature": -1}, anthropic.BadRequestError), ({"model": "nobody"}, anthropic.NotFoundError),
                     ({"max_tokens": 10**9}, anthropic.BadRequestError)):
    try:
        client.messages.create(**{"model": model, "max_tokens": 4, "messages": ask, **wrong})
        raise AssertionError(f"{wrong} was taken")
    except error as refused:
        assert refused.body["type"] == "error" and next(iter(wrong)) in str(refused), refused
print("anthropic", anthropic.__version__, "all right")
