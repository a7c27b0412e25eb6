#!/usr/bin/env python3
"""Three servers behind the SMG gateway by deploy/gateways/smg.sh, over gRPC and then HTTP: smg.py KVASIR [RESULT.json]
200 requests of 10 shared prefixes are all answered, a prefix by the same server; a killed server costs at most what ran on
it, a drained one nothing."""
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.request

from gateway import Fleet, free_port, load, losses, process, shared_prefixes, wait
from kvasir_server import FLEET, MODEL, ROOT, skip

SMG = os.path.join(FLEET, "python", "bin", "smg")


def workers(url):
    try:
        with urllib.request.urlopen(f"{url}/workers", timeout=10) as reply:
            return json.loads(reply.read())["workers"]
    except OSError:
        return []


def behind(kvasir, kind, folder):
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack, kvasir, folder)
        urls = [f"grpc://127.0.0.1:{s.grpc}" if kind == "grpc" else f"http://127.0.0.1:{s.http}" for s in fleet.servers]
        port = free_port()
        environment = {**os.environ, "PATH": f"{os.path.dirname(SMG)}:{os.environ['PATH']}", "SMG_PORT": str(port),
                       "SMG_METRICS_PORT": str(free_port())}
        stack.enter_context(process(os.path.join(ROOT, "deploy/gateways/smg.sh"), *urls, env=environment,
                                    log=os.path.join(folder, f"smg-{kind}.log")))
        url = f"http://127.0.0.1:{port}"
        def all_ready():
            return sum(w["is_healthy"] and w["status"] == "ready" for w in workers(url)) == 3
        wait(all_ready)
        def answers():  # over gRPC it fetches the tokenizer from a worker first
            return not load(url, ["Hello"], 1, 1)[0][1]
        wait(answers)
        kinds = {w["runtime_type"] for w in workers(url)}
        result = {"workers": kind, "recognized_as": sorted(kinds), **shared_prefixes(url, fleet, 200, 10)}
        print(json.dumps(result), flush=True)
        assert result["same_server_share"] >= 0.9, "shared prefixes are spread over the servers"
        result |= losses(url, fleet, survives_kill=3)
        print(json.dumps({k: result[k] for k in ("killed", "drained")}), flush=True)
        return result


def main():
    if not os.path.exists(SMG):
        skip("no SMG (tools/fleet.sh installs it)")
    if not os.path.exists(MODEL):
        skip(f"no model at {MODEL} (./test fetches it)")
    with tempfile.TemporaryDirectory() as folder:
        results = [behind(sys.argv[1], kind, folder) for kind in ("grpc", "http")]
    version = subprocess.run([os.path.join(FLEET, "python/bin/pip"), "show", "smg"], capture_output=True, text=True, check=True).stdout
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w", encoding="utf-8") as file:
            json.dump({"command": "tests/fleet/smg.py build/release/kvasir bench/results/fleet-smg.json", "smg": version.split("\n")[1].split()[1],
                       "model": os.path.basename(MODEL), "servers": 3, "results": results}, file, indent=1)
            file.write("\n")


main()
