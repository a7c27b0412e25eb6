"""Stubs of vLLM's own proto (proto/vllm_inference.proto and vllm_control.proto), as Dynamo's sidecar calls them."""
import os
import sys
import tempfile

try:
    import grpc
    from grpc_tools import protoc
except ImportError as missing:
    print(f"skipped: {missing} (pip install grpcio grpcio-tools)")
    sys.exit(77)

out = tempfile.mkdtemp()
proto = os.environ["KVASIR_PROTO"]
well_known = os.path.join(os.path.dirname(protoc.__file__), "_proto")
assert protoc.main(["protoc", f"-I{proto}", f"-I{well_known}", f"--python_out={out}", f"--grpc_python_out={out}",
                    f"{proto}/vllm_inference.proto", f"{proto}/vllm_control.proto"]) == 0
sys.path.insert(0, out)
import vllm_control_pb2 as control
import vllm_control_pb2_grpc as control_stubs
import vllm_inference_pb2 as vllm
import vllm_inference_pb2_grpc as stubs

channel = grpc.insecure_channel(os.environ["KVASIR_GRPC"])
inference, server = stubs.InferenceStub(channel), control_stubs.ControlStub(channel)


def refused(code, part, method, message):
    try:
        answer = method(message)
        list(answer) if hasattr(answer, "__next__") else None
        raise AssertionError(f"served: {message}")
    except grpc.RpcError as error:
        assert error.code() == code and part in error.details(), error


info = server.GetServerInfo(control.GetServerInfoRequest())
assert info.kv_block_size > 0 and info.total_kv_blocks > 0 and info.max_batched_tokens > 0, info
assert info.parallelism.world_size == 1, info
model = server.GetModelInfo(control.GetModelInfoRequest())
assert model.served_model_name and model.supports_text_input and model.supports_token_ids_input, model

PROMPT = "The capital of France is"
whole = inference.Generate(vllm.GenerateRequest(
    request_id="w", model=model.served_model_name, text=PROMPT, stopping=vllm.StoppingCriteria(max_new_tokens=6),
    response=vllm.ResponseOptions(prompt_token_ids=True, output_token_ids=True)))
assert "Paris" in whole.outputs.text and len(whole.outputs.token_ids) == 6, whole
assert whole.outputs.finish_info.finish_reason == vllm.FinishInfo.LENGTH, whole
ids = list(whole.prompt_info.token_ids)
assert len(ids) == whole.prompt_info.num_prompt_tokens

# The same by ids, in pieces, of two sequences, with log-probabilities.
texts, tokens, ends = {0: "", 1: ""}, {0: [], 1: []}, {}
for i, piece in enumerate(inference.GenerateStream(vllm.GenerateRequest(
        token_ids=vllm.TokenIds(ids=ids), sampling=vllm.RandomSampling(num_sequences=2),
        stopping=vllm.StoppingCriteria(max_new_tokens=6),
        response=vllm.ResponseOptions(output_token_ids=True, output_logprobs=True,
                                      output_candidates=vllm.CandidateTokens(top_n=3))))):
    assert piece.HasField("prompt_info") == (i == 0), piece
    o = piece.outputs
    texts[o.index] += o.text
    tokens[o.index] += o.token_ids
    assert len(o.logprobs) == len(o.ranks) == len(o.candidate_tokens) == len(o.token_ids) == o.num_tokens, piece
    assert all(rank == 1 for rank in o.ranks), "greedy draws are the likeliest"
    assert all(len(c.tokens) == 2 for c in o.candidate_tokens), piece
    if o.HasField("finish_info"):
        ends[o.index] = o.finish_info
assert texts == {0: whole.outputs.text, 1: whole.outputs.text}, texts
assert tokens == {i: list(whole.outputs.token_ids) for i in (0, 1)}, tokens
assert sorted(ends) == [0, 1] and all(e.num_output_tokens == 6 for e in ends.values()), ends

stop = whole.outputs.token_ids[2]
stopped = inference.Generate(vllm.GenerateRequest(
    text=PROMPT, stopping=vllm.StoppingCriteria(max_new_tokens=6, stop_token_ids=[stop]),
    response=vllm.ResponseOptions(output_text=False, output_token_ids=True))).outputs
assert stopped.finish_info.stop_token_id == stop and stopped.token_ids[-1] == stop and not stopped.text, stopped
letters = inference.Generate(vllm.GenerateRequest(
    text=PROMPT, decoding=vllm.DecodingParameters(regex="[A-Z]{3}"))).outputs
assert letters.text.isupper() and len(letters.text) == 3, letters

refused(grpc.StatusCode.INVALID_ARGUMENT, "temperature", inference.Generate, vllm.GenerateRequest(text="x", temperature=-1))
refused(grpc.StatusCode.INVALID_ARGUMENT, "media", inference.GenerateStream,
        vllm.GenerateRequest(text="x", media=[vllm.MediaItem(url="https://example.com/a.png")]))
refused(grpc.StatusCode.NOT_FOUND, "lora", inference.Generate, vllm.GenerateRequest(text="x", lora_name="lora"))
refused(grpc.StatusCode.UNIMPLEMENTED, "pause", server.PauseGeneration, control.PauseGenerationRequest())
assert not server.IsPaused(control.IsPausedRequest()).paused
assert not server.ListLoras(control.ListLorasRequest()).adapters
assert not server.GetKvEventSources(control.GetKvEventSourcesRequest()).sources

# Cancelled by its name while it runs: the stream ends, and says so.
long = inference.GenerateStream(vllm.GenerateRequest(
    request_id="long", text=PROMPT, stopping=vllm.StoppingCriteria(max_new_tokens=1500, ignore_eos=True)))
next(long)
server.Abort(control.AbortRequest(request_ids=["long", "never-was"]))
assert list(long)[-1].outputs.finish_info.finish_reason == vllm.FinishInfo.ABORTED

server.Shutdown(control.ShutdownRequest())
print("vllm: Inference and Control, to the end")
