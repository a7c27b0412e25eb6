"""Frameworks that people write programs with, each over the route it knows: frameworks_test.py NAME."""
import os
import sys

HTTP = os.environ["KVASIR_HTTP"]
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or LiteLLM fetches a price list when it is imported
ASK = "What is the capital of France?"


def model():
    import json
    import urllib.request
    return json.load(urllib.request.urlopen(HTTP + "/v1/models"))["data"][0]["id"]


def langchain():
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(le=120)

    chat = ChatOpenAI(model=model(), base_url=HTTP + "/v1", api_key="none", temperature=0, max_tokens=60, max_retries=0)
    whole = chat.invoke(ASK)
    assert "Paris" in whole.content and whole.usage_metadata["output_tokens"] > 0, whole
    assert "".join(piece.content for piece in chat.stream(ASK)) == whole.content
    assert [a.content for a in chat.batch([ASK, ASK])] == [whole.content] * 2
    for method in ("json_schema", "function_calling"):
        person = chat.with_structured_output(Person, method=method).invoke("Describe a person.")
        assert isinstance(person, Person), (method, person)


def langchain_ollama():
    from langchain_ollama import ChatOllama, OllamaLLM

    chat = ChatOllama(model=model(), base_url=HTTP, temperature=0, num_predict=20)
    whole = chat.invoke(ASK)
    assert "Paris" in whole.content, whole
    assert "".join(piece.content for piece in chat.stream(ASK)) == whole.content
    assert "Paris" in OllamaLLM(model=model(), base_url=HTTP, temperature=0, num_predict=20).invoke(ASK)


def litellm():
    import litellm as lite

    lite.suppress_debug_info = True
    ask = [{"role": "user", "content": ASK}]
    texts = set()
    for name, base in (("hosted_vllm/", HTTP + "/v1"), ("openai/", HTTP + "/v1"), ("ollama_chat/", HTTP), ("anthropic/", HTTP)):
        told = dict(model=name + model(), api_base=base, api_key="none", messages=ask, temperature=0, max_tokens=12, num_retries=0)
        texts.add(lite.completion(**told).choices[0].message.content)
        texts.add("".join(c.choices[0].delta.content or "" for c in lite.completion(stream=True, **told)))
    assert len(texts) == 1 and "Paris" in texts.pop(), texts
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}}}
    told = dict(model="hosted_vllm/" + model(), api_base=HTTP + "/v1", api_key="none", tools=[tool], temperature=0, max_tokens=60)
    called = lite.completion(messages=ask, tool_choice="required", **told).choices[0].message
    assert called.tool_calls[0].function.name == "get_weather", called
    # The loop of an agent: the answer goes back as it came.
    loop = ask + [called.model_dump(), {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "18 degrees"}]
    assert lite.completion(messages=loop, **told).choices[0].message is not None


def instructor():
    import instructor as held
    import openai
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(le=120)

    client = openai.OpenAI(base_url=HTTP + "/v1", api_key="none", max_retries=0)
    for mode in (held.Mode.TOOLS, held.Mode.JSON_SCHEMA):
        person = held.from_openai(client, mode=mode).chat.completions.create(
            model=model(), response_model=Person, max_retries=0, temperature=0, max_tokens=100,
            messages=[{"role": "user", "content": "Describe a person."}])
        assert isinstance(person, Person), (mode, person)


def pydantic_ai():
    from pydantic import BaseModel, Field
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(le=120)

    served = OpenAIChatModel(model(), provider=OpenAIProvider(base_url=HTTP + "/v1", api_key="none"))
    settings = {"temperature": 0, "max_tokens": 100}
    assert "Paris" in Agent(served, model_settings=settings).run_sync(ASK).output
    person = Agent(served, output_type=Person, model_settings=settings).run_sync("Describe a person.").output
    assert isinstance(person, Person), person


if __name__ == "__main__":
    name = sys.argv[1]
    try:
        globals()[name]()
    except ImportError as missing:
        print(f"skipped: {missing} (tools/clients.sh installs it)")
        sys.exit(77)
    print(name, "all right")
