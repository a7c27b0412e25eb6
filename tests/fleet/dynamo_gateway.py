#!/usr/bin/env python3
"""Three servers behind NVIDIA Dynamo by deploy/gateways/dynamo.sh, each with Dynamo's vLLM sidecar: dynamo_gateway.py KVASIR [RESULT.json]
Chats, streams, stops, schemas and refusals are those of the server itself; who goes away ends what it asked. 200 requests of 10
shared prefixes are all answered, a prefix by the same server, which Dynamo knows by the servers' ZeroMQ events; a server killed
with its sidecar costs at most what ran on it, a drained one nothing."""
import contextlib
import ctypes.util
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

from gateway import Fleet, free_port, load, losses, process, shared_prefixes, wait
from kvasir_server import FLEET, MODEL, ROOT, skip

sys.path.insert(0, os.path.join(ROOT, "tests", "clients"))
import tokenizer_folder

PYTHON = os.path.join(FLEET, "dynamo", "bin", "python3")
SCRIPT = os.path.join(ROOT, "deploy/gateways/dynamo.sh")
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


def model_source(folder):
    """What Dynamo reads of a model: its tokenizer, its template, and a configuration that says how long it may get."""
    os.mkdir(folder)
    tokenizer_folder.write(MODEL, folder)
    with open(MODEL, "rb") as file:
        said = tokenizer_folder.metadata(file)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": len(said["tokenizer.ggml.tokens"]),
                   "max_position_embeddings": said["llama.context_length"], "eos_token_id": said["tokenizer.ggml.eos_token_id"]}, file)
    return folder


def environment(folder, port):
    """Discovery in files of this run; every address that can be set is of loopback."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVASIR_"))}
    return {**kept, "DYNAMO_PYTHON": PYTHON, "DYNAMO_PORT": str(port), "DYN_FILE_KV": os.path.join(folder, "discovery"), "HOME": folder,
            "HF_HUB_OFFLINE": "1", "DYN_SYSTEM_HOST": "127.0.0.1", "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1", "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1"}


class Dynamo(Fleet):
    """A server and its sidecar are one, as in a pod: who kills one kills the other; who drains lets the sidecar end first."""

    def __init__(self, stack, kvasir, folder):
        source = model_source(os.path.join(folder, "source"))
        super().__init__(stack, kvasir, folder, options=lambda i: ("--model-source", source, "--kv-events", f"ipc://{folder}/events{i}"))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        env = environment(folder, self.port)
        self.sidecars = [stack.enter_context(process(SCRIPT, "sidecar", f"127.0.0.1:{s.grpc}", env=env, log=os.path.join(folder, f"sidecar{i}.log")))
                         for i, s in enumerate(self.servers)]
        self.log = os.path.join(folder, "frontend.log")
        stack.enter_context(process(SCRIPT, "frontend", env=env, log=self.log))

    def instances(self):
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as reply:
                return sum(i["endpoint"] == "generate" for i in json.loads(reply.read())["instances"])
        except OSError:
            return 0

    def stop(self, which, how):
        if how == signal.SIGKILL:
            self.sidecars[which].kill()
        else:
            self.sidecars[which].terminate()
            self.sidecars[which].wait(120)
        super().stop(which, how)


def ask(url, path, body):
    request = urllib.request.Request(f"{url}{path}", data=json.dumps({"model": "smol", "temperature": 0, **body}).encode(),
                                     headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        return reply.read().decode()


def chat(url, **more):
    return json.loads(ask(url, "/v1/chat/completions", {"messages": FRANCE, "max_tokens": 40, **more}))


def told(answer):
    """What has to be the same whichever way a request travels."""
    choice, usage = answer["choices"][0], answer["usage"]
    return (choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"], usage["prompt_tokens"],
            usage["completion_tokens"])


def streamed(url, **more):
    body = ask(url, "/v1/chat/completions", {"messages": FRANCE, "max_tokens": 40, "stream": True, **more})
    pieces = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    choices = [c for p in pieces for c in p["choices"]]
    ends = [c["finish_reason"] for c in choices if c.get("finish_reason")]
    return "".join(c["delta"].get("content") or "" for c in choices), ends


def same_answers(fleet):
    """Dynamo's answers beside the server's own."""
    own = f"http://127.0.0.1:{fleet.servers[0].http}"
    whole = chat(fleet.url)
    assert told(whole) == told(chat(own)) and whole["choices"][0]["finish_reason"] == "stop", whole
    assert streamed(fleet.url) == (whole["choices"][0]["message"]["content"], ["stop"])
    for path, body in (("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 8}),
                       ("/v1/completions", {"prompt": "One, two, three, four,", "max_tokens": 40, "stop": ["seven", "numbers"]}),
                       ("/v1/completions", {"prompt": [504, 3575, 282, 4649, 314], "max_tokens": 5, "ignore_eos": True}),
                       ("/v1/chat/completions", {"messages": FRANCE, "max_tokens": 3})):
        got, expected = (told(json.loads(ask(url, path, body))) for url in (fleet.url, own))
        assert got == expected, (body, got, expected)
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}
    shaped = chat(fleet.url, response_format={"type": "json_schema", "json_schema": {"name": "age", "schema": schema}})
    assert isinstance(json.loads(shaped["choices"][0]["message"]["content"])["age"], int), shaped
    try:
        raise AssertionError(f"served: {chat(fleet.url, max_tokens=9000)}")
    except urllib.error.HTTPError as refused:
        assert refused.code == 400, refused
        refused.close()


def disconnect(fleet):
    """Who goes away in the middle of a stream leaves nothing running."""
    def cancelled():
        return sum(int(re.search(r"^kvasir_requests_cancelled_total (\d+)", s.get("/metrics"), re.M)[1]) for s in fleet.servers)
    before = cancelled()
    connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps({"model": "smol", "prompt": "On and on", "max_tokens": 8000, "ignore_eos": True,
                                                              "stream": True}), {"Content-Type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data: ")
    connection.sock.shutdown(2)
    connection.close()
    def ended():
        return cancelled() == before + 1 and sum(fleet.running()) == 0
    wait(ended)


def reused(fleet):
    """Tokens that the servers had already of all that they were sent, by their logs."""
    sent = had = 0
    for name in fleet.logs:
        with open(name, encoding="utf-8") as file:
            for line in file:
                if '"message":"request"' in line:
                    said = json.loads(line)
                    sent, had = sent + said["prompt_tokens"], had + said["cached_tokens"]
    return round(had / sent, 3)


def main():
    if not os.path.exists(PYTHON):
        skip("no Dynamo (tools/fleet.sh installs it)")
    if not ctypes.util.find_library("zmq"):
        skip("no libzmq5 (tools/fleet.sh installs it)")
    if not os.path.exists(MODEL):
        skip(f"no model at {MODEL} (./test fetches it)")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        fleet = Dynamo(stack, sys.argv[1], folder)
        def all_found():
            return fleet.instances() == 3
        wait(all_found)
        def answers():  # the frontend reads the model's files when it has found a server
            return not load(fleet.url, ["Hello"], 1, 1)[0][1]
        wait(answers)
        same_answers(fleet)
        disconnect(fleet)
        print("the answers are the server's own, and who goes away is noticed", flush=True)
        result = shared_prefixes(fleet.url, fleet, 200, 10)
        result["cached_share"] = reused(fleet)
        print(json.dumps(result), flush=True)
        assert result["same_server_share"] >= 0.9, "shared prefixes are spread over the servers"
        result |= losses(fleet.url, fleet, survives_kill=15)
        print(json.dumps({k: result[k] for k in ("killed", "drained")}), flush=True)
    version = subprocess.run([PYTHON, "-c", "import importlib.metadata as m; print(m.version('ai-dynamo'))"], capture_output=True, text=True,
                             check=True).stdout.strip()
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w", encoding="utf-8") as file:
            json.dump({"command": "tests/fleet/dynamo_gateway.py build/release/kvasir bench/results/fleet-dynamo.json", "ai-dynamo": version,
                       "model": os.path.basename(MODEL), "servers": 3, **result}, file, indent=1)
            file.write("\n")


main()
