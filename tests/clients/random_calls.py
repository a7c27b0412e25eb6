"""Random calls that each contract allows: every choice that was asked for ends once, in time, and counts agree. Each call
has a few fields set at random, at their edges most of all; one that is refused must be refused as invalid."""
import collections
import json
import os
import random
import sys
import tempfile
import urllib.error
import urllib.request

try:
    import grpc
    from grpc_tools import protoc
except ImportError as missing:
    print(f"skipped: {missing} (pip install grpcio grpcio-tools)")
    sys.exit(77)

out = tempfile.mkdtemp()
proto = os.environ["KVASIR_PROTO"]
names = ["kvasir", "ppl_llm", "vllm_engine", "smg_common"]
assert protoc.main(["protoc", f"-I{proto}", f"--python_out={out}", f"--grpc_python_out={out}", *(f"{proto}/{n}.proto" for n in names)]) == 0
sys.path.insert(0, out)
import kvasir_pb2, kvasir_pb2_grpc, ppl_llm_pb2, ppl_llm_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc

CALLS, SECONDS = 60, 60  # of each contract; that one call may take
channel = grpc.insecure_channel(os.environ["KVASIR_GRPC"])
draw = random.Random(int(os.environ.get("KVASIR_SEED", "1")))
SHARED = {"temperature": [0, 1.5], "top_p": [1e-6, 0.5], "top_k": [1, 40], "seed": [0, 7]}
MORE = {"min_tokens": [0, 1], "stop": [["a"], ["e", "zz"]], "stop_token_ids": [[2], [28, 253]], "ignore_eos": [True], "n": [1, 2, 3]}
LENGTHS = [0, 1, 2, 9]


def some(choices):
    return {name: draw.choice(choices[name]) for name in draw.sample(sorted(choices), draw.choice([1, 2, 3]))}


def kvasir_v1():
    request = kvasir_pb2.GenerateRequest(max_tokens=draw.choice(LENGTHS), sampling=kvasir_pb2.Sampling(**some(SHARED)),
                                         **some(MORE | {"logprobs": [0, 2], "prompt_logprobs": [0, 2], "echo": [True], "include_stop": [True]}))
    if draw.random() < 0.3:
        request.chat.messages.add(role="user", content="Hello")
    else:
        request.prompt = "The sun is"
    if draw.random() < 0.3:
        request.grammar.regex = "[ab]{2,5}"
    events = list(kvasir_pb2_grpc.InferenceStub(channel).Generate(request, timeout=SECONDS))
    ends = [e.finished for e in events if e.HasField("finished")]
    n = request.n or 1
    assert sorted(e.choice for e in ends) == list(range(n)) and [e.last for e in ends] == [False] * (n - 1) + [True], request
    shown = sum(len(e.delta.tokens) for e in events if e.HasField("delta"))
    hidden = sum(e.reason == kvasir_pb2.GenerateResponse.Finished.STOP_TOKEN for e in ends) * (not request.include_stop)
    assert shown + hidden == ends[-1].usage.completion_tokens, (request, shown, hidden, ends)


def vllm():
    request = vllm_engine_pb2.GenerateRequest(request_id=f"r{draw.random()}", text="The sun is", stream=draw.random() < 0.5,
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=draw.choice(LENGTHS), **some(SHARED | MORE | {"logprobs": [0, 2]})))
    answers = list(vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request, timeout=SECONDS))
    ends = [a.complete for a in answers if a.HasField("complete")]
    assert sorted(e.index for e in ends) == list(range(request.sampling_params.n or 1)), request
    for end in ends:
        assert end.completion_tokens == len(end.output_ids), (request, end)
        chunks = [a.chunk for a in answers if a.HasField("chunk") and a.chunk.index == end.index]
        assert not request.stream or [i for c in chunks for i in c.token_ids] == list(end.output_ids), (request, end)


def ppl():
    call = ppl_llm_pb2.BatchedRequest()
    for _ in range(draw.choice([1, 2, 5])):
        one = call.req.add(id=draw.choice([0, 7]), prompt="The sun is")
        one.stopping_parameters.max_new_tokens = draw.choice([1, 5])
        one.stopping_parameters.ignore_eos_token = draw.random() < 0.5
        one.choosing_parameters.temperature = draw.choice([0, 1, -1])
    answers = ppl_llm_pb2_grpc.LLMServiceStub(channel).Generation(call, timeout=SECONDS)
    ends = [r.id for batch in answers for r in batch.rsp if r.status != ppl_llm_pb2.PROCESSING]
    assert sorted(ends) == sorted(r.id for r in call.req), (call, ends)


def http():
    body = {"prompt": draw.choice(["The sun is", ["a", "b"], [28, 253]]), "max_tokens": draw.choice(LENGTHS),
            **some(SHARED | MORE | {"best_of": [1, 3], "echo": [True], "logprobs": [0, 2], "stream": [True], "response_format": [{"type": "json_object"}]})}
    request = urllib.request.Request(os.environ["KVASIR_HTTP"] + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer = urllib.request.urlopen(request, timeout=SECONDS)
    prompts = 2 if body["prompt"] == ["a", "b"] else 1
    if body.get("stream"):
        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
        ends = [c["index"] for e in events for c in e["choices"] if c["finish_reason"]]
    else:
        ends = [c["index"] for c in json.load(answer)["choices"] if c["finish_reason"]]
    assert sorted(ends) == list(range(prompts * body.get("n", 1))), (body, ends)


counts = collections.Counter()
for call in (kvasir_v1, vllm, ppl, http):
    for _ in range(CALLS):
        try:
            call()
            counts[call.__name__] += 1
        except grpc.RpcError as refused:
            assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT, (call.__name__, refused)
        except urllib.error.HTTPError as refused:
            assert refused.code == 400, (call.__name__, refused.code, refused.read())
    assert counts[call.__name__] > CALLS / 2, counts
print("random calls answered:", dict(counts))
