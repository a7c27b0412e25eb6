"""A kvasir of our own for the tests of this folder: started on free ports of loopback, ended with its block."""
import contextlib
import json
import os
import subprocess
import sys
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvasir")
FLEET = os.path.join(CACHE, "fleet")  # what tools/fleet.sh installed
MODEL = os.path.join(CACHE, "models", "SmolLM2-135M-Instruct.Q4_1.gguf")
DUMMY = "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260"


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


class Server:
    def __init__(self, process, ready):
        self.process, self.http, self.grpc = process, ready["http_port"], ready["grpc_port"]

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", timeout=30) as reply:
            return reply.read().decode()

    def post(self, path, body):
        ask = urllib.request.Request(f"http://127.0.0.1:{self.http}{path}", data=json.dumps(body).encode(),
                                     headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(ask, timeout=60) as reply:
            return json.loads(reply.read())


@contextlib.contextmanager
def serving(kvasir, *options, model=DUMMY, log=None):
    """log: a file that standard error goes on to; else it is thrown away once the server is ready."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVASIR_")}
    process = subprocess.Popen([kvasir, "serve", "--model", model, "--grpc-port", "0", "--http-port", "0", "--log-format", "json",
                                *options], stderr=subprocess.PIPE, text=True, env=environment)
    reader, said = None, []
    try:
        for line in process.stderr:
            said.append(line)
            if '"message":"ready"' in line:
                break
        else:
            raise AssertionError(f"no start: {''.join(said)}")
        # What it says later would fill the pipe.
        reader = subprocess.Popen(["cat"], stdin=process.stderr, stdout=log or subprocess.DEVNULL)
        process.stderr.close()
        yield Server(process, json.loads(said[-1]))
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
        if reader:
            reader.wait(10)
