"""The gateway's own stubs through every method of VllmEngine."""
import hashlib
import os
import sys

try:
    import grpc
    from smg_grpc_proto.generated import common_pb2 as common
    from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc as stubs
except ImportError as missing:
    print(f"skipped: {missing} (pip install grpcio smg-grpc-proto)")
    sys.exit(77)

stub = stubs.VllmEngineStub(grpc.insecure_channel(os.environ["KVASIR_GRPC"]))
assert stub.HealthCheck(vllm.HealthCheckRequest()).healthy
info = stub.GetModelInfo(vllm.GetModelInfoRequest())
assert info.vocab_size == 49152, info
stub.GetServerInfo(vllm.GetServerInfoRequest())
stub.GetLoads(vllm.GetLoadsRequest())

def request(name, stream, **sampling):
    return vllm.GenerateRequest(request_id=name, text="The capital of France is", stream=stream,
                                sampling_params=vllm.SamplingParams(temperature=0, max_tokens=6, **sampling))

streamed, completes = [], 0
for r in stub.Generate(request("s", True)):
    if r.HasField("chunk"):
        streamed += r.chunk.token_ids
    else:
        completes += 1
assert completes == 1 and len(streamed) == 6, (completes, streamed)
whole = list(stub.Generate(request("w", False)))
assert len(whole) == 1 and list(whole[0].complete.output_ids) == streamed
assert whole[0].complete.finish_reason == "length"
assert len({tuple(r.complete.output_ids) for r in stub.Generate(request("n", False, n=3))}) == 1

stop = streamed.index(streamed[2])
stopped = next(stub.Generate(request("t", False, stop_token_ids=[streamed[stop]]))).complete
assert list(stopped.output_ids) == streamed[:stop + 1] and stopped.finish_reason == "stop", stopped
assert stopped.completion_tokens == stop + 1, "the token that stopped it was drawn, too"

chunks = list(stub.GetTokenizer(common.GetTokenizerRequest()))
data = b"".join(c.data for c in chunks)
assert hashlib.sha256(data).hexdigest() == chunks[-1].sha256, "the tokenizer's digest is wrong"

stub.Abort(vllm.AbortRequest(request_ids=["not-there", "nor-this"]))
stub.FlushCache(common.FlushCacheRequest())
for method, message in ((stub.Embed, vllm.EmbedRequest()), (stub.StartProfile, common.StartProfileRequest())):
    try:
        method(message)
        raise AssertionError("served")
    except grpc.RpcError as refused:
        assert refused.code() == grpc.StatusCode.UNIMPLEMENTED, refused
try:
    list(stub.Generate(vllm.GenerateRequest(request_id="bad", text="x", sampling_params=vllm.SamplingParams(temperature=-1))))
    raise AssertionError("a negative temperature was taken")
except grpc.RpcError as refused:
    assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT and "temperature" in refused.details(), refused

events = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=20)
list(stub.Generate(vllm.GenerateRequest(request_id="kv", text="A prefix that fills a page or two. " * 6,
                                        sampling_params=vllm.SamplingParams(temperature=0, max_tokens=4))))
batch = next(iter(events))
assert batch.sequence_number >= 0, batch
events.cancel()
print("smg: every method of VllmEngine")
