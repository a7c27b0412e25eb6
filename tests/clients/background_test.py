"""The openai client, unmodified, with responses that are made in the background of a server that keeps them."""
import os
import sys
import time

try:
    import openai
except ImportError:
    print("skipped: no openai package (pip install openai)")
    sys.exit(77)

client = openai.OpenAI(base_url=os.environ["KVASIR_HTTP"] + "/v1", api_key="none")
asked = {"model": client.models.list().data[0].id, "input": "What is the capital of France?", "max_output_tokens": 20,
         "temperature": 0}
said = client.responses.create(**asked).output_text
assert "Paris" in said, said


def ended(response):
    while response.status in ("queued", "in_progress"):
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    return response


made = client.responses.create(**asked, background=True)
assert made.background and made.status in ("queued", "in_progress", "completed", "incomplete"), made
made = ended(made)
assert made.status in ("completed", "incomplete") and made.output_text == said, made

# Streamed, left in the middle, and gone on with from there.
seen, response_id = [], None
for event in client.responses.create(**asked, background=True, stream=True):
    assert type(event).__module__.startswith("openai.types.responses"), event  # each is known by its type
    assert event.sequence_number == len(seen), event
    seen.append(event)
    if event.type == "response.created":
        response_id = event.response.id
        assert event.response.status == "queued", event
    if event.type == "response.output_text.delta":
        break
assert [e.type for e in seen[:3]] == ["response.created", "response.queued", "response.in_progress"], seen
for event in client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number):
    assert event.sequence_number == len(seen), event
    seen.append(event)
assert seen[-1].type in ("response.completed", "response.incomplete"), seen[-1]
assert seen[-1].response.output_text == said, seen[-1]
assert "".join(e.delta for e in seen if e.type == "response.output_text.delta") == said

long = client.responses.create(**{**asked, "max_output_tokens": 4000}, extra_body={"ignore_eos": True}, background=True)
gone = client.responses.cancel(long.id)
assert gone.status == "cancelled" and client.responses.retrieve(long.id).status == "cancelled", gone
client.responses.delete(long.id)
try:
    client.responses.retrieve(long.id)
    raise AssertionError("it is still there")
except openai.NotFoundError as refused:
    assert long.id in str(refused), refused
