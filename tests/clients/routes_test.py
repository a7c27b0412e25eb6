"""The same prompt, and the same chat, gives the same greedy text, and with one seed the same sampled text, whichever way it
travels."""
import json
import os
import sys
import tempfile
import urllib.request

try:
    import grpc
    from grpc_tools import protoc
except ImportError as missing:
    print(f"skipped: {missing} (pip install grpcio grpcio-tools)")
    sys.exit(77)

out = tempfile.mkdtemp()
proto = os.environ["KVASIR_PROTO"]
names = ["kvasir", "ppl_llm", "kserve", "vllm_engine", "smg_common"]
assert protoc.main(["protoc", f"-I{proto}", f"--python_out={out}", f"--grpc_python_out={out}", *(f"{proto}/{n}.proto" for n in names)]) == 0
sys.path.insert(0, out)
import kserve_pb2, kserve_pb2_grpc, kvasir_pb2, kvasir_pb2_grpc, ppl_llm_pb2, ppl_llm_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc

channel = grpc.insecure_channel(os.environ["KVASIR_GRPC"])
PROMPT, TOKENS, SEED = "The three primary colours are", 24, 1234


def kvasir(temperature, ids=None):
    request = kvasir_pb2.GenerateRequest(prompt=PROMPT, max_tokens=TOKENS,
                                         sampling=kvasir_pb2.Sampling(temperature=temperature, seed=SEED))
    return "".join(e.delta.text for e in kvasir_pb2_grpc.InferenceStub(channel).Generate(request))


def ppl(temperature):
    request = ppl_llm_pb2.BatchedRequest(req=[ppl_llm_pb2.Request(
        id=1, prompt=PROMPT,
        choosing_parameters=ppl_llm_pb2.NextTokenChooserParameters(temperature=temperature, do_sample=temperature > 0, seed=SEED),
        stopping_parameters=ppl_llm_pb2.StoppingCriteriaParameters(max_new_tokens=TOKENS))])
    return "".join(r.generated for b in ppl_llm_pb2_grpc.LLMServiceStub(channel).Generation(request) for r in b.rsp)


def vllm(temperature):
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    request = vllm_engine_pb2.GenerateRequest(request_id="r", text=PROMPT, sampling_params=vllm_engine_pb2.SamplingParams(
        temperature=temperature, seed=SEED, max_tokens=TOKENS))
    ids = [i for r in stub.Generate(request) for i in r.complete.output_ids]
    detokenize = kvasir_pb2.DetokenizeRequest(ids=ids, skip_special_tokens=True)
    return kvasir_pb2_grpc.InferenceStub(channel).Detokenize(detokenize).text


def kserve(temperature):
    stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
    model = kvasir_pb2_grpc.InferenceStub(channel).ListModels(kvasir_pb2.ListModelsRequest()).models[0].id
    request = kserve_pb2.ModelInferRequest(model_name=model)
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(PROMPT.encode())
    request.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.parameters["temperature"].double_param = temperature
    request.parameters["max_tokens"].int64_param = TOKENS
    request.parameters["seed"].int64_param = SEED
    answer = stub.ModelInfer(request)
    if answer.raw_output_contents:
        raw = answer.raw_output_contents[0]
        return raw[4:4 + int.from_bytes(raw[:4], "little")].decode()
    return answer.outputs[0].contents.bytes_contents[0].decode()


def post(path, body):
    request = urllib.request.Request(os.environ["KVASIR_HTTP"] + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request)


def events(answer):  # server-sent, or a line each
    lines = (line.removeprefix(b"data: ").strip() for line in answer)
    return [json.loads(line) for line in lines if line.startswith(b"{")]


def http(temperature):
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": temperature, "seed": SEED}
    return json.load(post("/v1/completions", body))["choices"][0]["text"]


def llama(temperature, **more):
    return post("/completion", {"prompt": PROMPT, "n_predict": TOKENS, "temperature": temperature, "seed": SEED, **more})


def llama_whole(temperature):
    return json.load(llama(temperature))["content"]


def llama_streamed(temperature):
    return "".join(e["content"] for e in events(llama(temperature, stream=True)))


def llama_uncached(temperature):
    return json.load(llama(temperature, cache_prompt=False))["content"]


def sglang(temperature, **more):
    sampling = {"max_new_tokens": TOKENS, "temperature": temperature, "sampling_seed": SEED}
    return post("/generate", {"text": PROMPT, "sampling_params": sampling, **more})


def sglang_whole(temperature):
    return json.load(sglang(temperature))["text"]


def sglang_streamed(temperature):
    return events(sglang(temperature, stream=True))[-1]["text"]


def ollama(temperature, path, **more):
    name = json.load(urllib.request.urlopen(os.environ["KVASIR_HTTP"] + "/api/tags"))["models"][0]["name"]
    options = {"num_predict": TOKENS, "temperature": temperature, "seed": SEED}
    return events(post(path, {"model": name, "options": options, **more}))


def ollama_raw(temperature):
    return "".join(e["response"] for e in ollama(temperature, "/api/generate", prompt=PROMPT, raw=True))


def chat_ollama(temperature):
    return "".join(e["message"]["content"] for e in ollama(temperature, "/api/chat", messages=MESSAGES))


def chat_ollama_generate(temperature):
    system, user = (m["content"] for m in MESSAGES)
    return "".join(e["response"] for e in ollama(temperature, "/api/generate", system=system, prompt=user))


def chat_llama(temperature):
    prompt = json.load(post("/apply-template", {"messages": MESSAGES}))["prompt"]
    ids = json.load(post("/tokenize", {"content": prompt}))["tokens"]
    body = {"prompt": ids, "n_predict": TOKENS, "temperature": temperature, "seed": SEED}
    return json.load(post("/completion", body))["content"]


MESSAGES = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Name three colours."}]


def chat_request(chat, temperature):
    request = kvasir_pb2.GenerateRequest(chat=chat, max_tokens=TOKENS,
                                         sampling=kvasir_pb2.Sampling(temperature=temperature, seed=SEED))
    return "".join(e.delta.text for e in kvasir_pb2_grpc.InferenceStub(channel).Generate(request))


def typed_chat():
    return kvasir_pb2.Chat(messages=[kvasir_pb2.ChatMessage(**m) for m in MESSAGES])


def chat_kvasir(temperature):
    return chat_request(typed_chat(), temperature)


def chat_kvasir_json(temperature):
    return chat_request(kvasir_pb2.Chat(messages_json=json.dumps(MESSAGES)), temperature)


def chat_http(temperature, stream=False):
    answer = post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": TOKENS, "temperature": temperature,
                                           "seed": SEED, "stream": stream})
    if not stream:
        return json.load(answer)["choices"][0]["message"]["content"]
    return "".join(c["delta"].get("content") or "" for e in events(answer) for c in e["choices"])


def chat_http_streamed(temperature):
    return chat_http(temperature, stream=True)


# As gateways do it: they render the chat and send its tokens.
def chat_vllm(temperature):
    ids = kvasir_pb2_grpc.InferenceStub(channel).Tokenize(kvasir_pb2.TokenizeRequest(chat=typed_chat())).ids
    request = vllm_engine_pb2.GenerateRequest(
        request_id="c", tokenized=vllm_engine_pb2.TokenizedInput(input_ids=ids),
        sampling_params=vllm_engine_pb2.SamplingParams(temperature=temperature, seed=SEED, max_tokens=TOKENS))
    out = [i for r in vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request) for i in r.complete.output_ids]
    detokenize = kvasir_pb2.DetokenizeRequest(ids=out, skip_special_tokens=True)
    return kvasir_pb2_grpc.InferenceStub(channel).Detokenize(detokenize).text


# As vLLM's routers do it.
def chat_rendered(temperature):
    request = json.load(post("/v1/chat/completions/render", {"messages": MESSAGES, "max_tokens": TOKENS, "seed": SEED,
                                                             "temperature": temperature}))
    out = json.load(post("/inference/v1/generate", request))["choices"][0]["token_ids"]
    detokenize = kvasir_pb2.DetokenizeRequest(ids=out, skip_special_tokens=True)
    return kvasir_pb2_grpc.InferenceStub(channel).Detokenize(detokenize).text


raw = (kvasir, ppl, vllm, kserve, http, llama_whole, llama_streamed, llama_uncached, sglang_whole, sglang_streamed, ollama_raw)
chat = (chat_kvasir, chat_kvasir_json, chat_http, chat_http_streamed, chat_vllm, chat_rendered, chat_llama, chat_ollama, chat_ollama_generate)
for routes in (raw, chat):
    for temperature in (0.0, 0.8):
        texts = {route.__name__: route(temperature) for route in routes}
        assert len(set(texts.values())) == 1, texts
        assert len(next(iter(texts.values()))) > 10, texts
print(f"routes: {len(raw)} raw ways and {len(chat)} for chats, one text each")
