#!/usr/bin/env python3
"""Three servers behind llm-d's router, without Kubernetes: llmd.py KVASIR [RESULT.json] [--check]
A real endpoint picker with deploy/gateways/llm-d/epp.yaml finds them in a file and is asked by a real Envoy: 200 requests are
answered, those that begin alike by the same server; one is killed, one drained, each taken out of the file.
--check: the picker takes its configuration and the file, and no more."""
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from gateway import Fleet, free_port, losses, process, shared_prefixes, wait
from kvasir_server import FLEET, MODEL, ROOT, skip

FILES = os.path.join(ROOT, "deploy/gateways/llm-d")
ENVOY = os.path.join(FLEET, "python", "bin", "envoy")
LISTENS = '"gRPC server listening","name":"ext-proc"'
PICKER = shutil.which("epp") or os.path.join(FLEET, "bin", "epp")


def changed(name, folder, *changes):
    """A file of deploy/gateways/llm-d with this machine's ports and paths."""
    with open(os.path.join(FILES, name), encoding="utf-8") as file:
        text = file.read()
    for old, new in changes:
        assert text.count(old) == 1, f"{name} no longer has '{old}'"
        text = text.replace(old, new)
    path = os.path.join(folder, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def endpoints(folder, ports):
    """The servers' file, put in place at once as an editor does."""
    path = os.path.join(folder, "endpoints.yaml")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump({"endpoints": [{"name": f"kvasir-{port}", "address": "127.0.0.1", "port": str(port),
                                  "labels": {"llm-d.ai/engine-type": "vllm"}} for port in ports]}, file)
    os.replace(path + ".new", path)
    return path


def picker(stack, folder, ports):
    config = changed("epp.yaml", folder, ("path: /etc/llm-d/endpoints.yaml", f"path: {folder}/endpoints.yaml"))
    log = os.path.join(folder, "epp.log")
    running = stack.enter_context(process(PICKER, "--pool-name", "kvasir", "--config-file", config, "--grpc-port", ports["picker"], "--grpc-health-port", ports["health"],
                                          "--metrics-port", ports["metrics"], "--secure-serving=false", log=log))
    def said(what):
        assert running.poll() is None, read(log)[-3000:]
        return what in read(log)
    return said


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def main():
    kvasir = sys.argv[1]
    if not os.path.exists(PICKER):
        skip("no epp on the path (go build ./cmd/epp in llm-d-router)")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ports = {name: free_port() for name in ("picker", "health", "metrics", "http", "admin")}
        if "--check" in sys.argv:
            shutil.copy(os.path.join(FILES, "endpoints.yaml"), folder)
            said = picker(stack, folder, ports)
            wait(lambda: said("EPP starting (file discovery mode)") and said(LISTENS))
            print("the picker takes its files")
            return
        if not os.path.exists(ENVOY):
            skip("no Envoy (tools/fleet.sh installs it)")
        if not os.path.exists(MODEL):
            skip(f"no model at {MODEL} (./test fetches it)")
        fleet = Fleet(stack, kvasir, folder)
        there = [s.http for s in fleet.servers]
        endpoints(folder, there)
        said = picker(stack, folder, ports)
        wait(lambda: said(LISTENS))
        config = changed("envoy.yaml", folder, ("address: 0.0.0.0, port_value: 8080", f"address: 127.0.0.1, port_value: {ports['http']}"),
                         ("port_value: 9901", f"port_value: {ports['admin']}"), ("port_value: 9002", f"port_value: {ports['picker']}"))
        stack.enter_context(process(ENVOY, "-c", config, "-l", "warn", "--concurrency", "1", "--disable-hot-restart",
                                    log=os.path.join(folder, "envoy.log")))
        url = f"http://127.0.0.1:{ports['http']}"
        def answers():
            return subprocess.run(["curl", "-sf", f"{url}/v1/models", "-o", "/dev/null"], check=False).returncode == 0
        wait(answers)
        result = shared_prefixes(url, fleet, 200, 10)
        assert result["same_server_share"] >= 0.9, result
        print(json.dumps(result), flush=True)

        stop = fleet.stop
        def stop_and_edit(which, how):
            """Who drains leaves the file first; who died leaves it when somebody has seen it."""
            if how == signal.SIGKILL:
                stop(which, how)
            there.remove(fleet.servers[which].http)
            endpoints(folder, there)
            time.sleep(2)  # until the picker has read it
            if how != signal.SIGKILL:
                stop(which, how)
        fleet.stop = stop_and_edit
        result |= losses(url, fleet, survives_kill=3)
        print(json.dumps({k: result[k] for k in ("killed", "drained")}), flush=True)
        if len(sys.argv) > 2:
            with open(sys.argv[2], "w", encoding="utf-8") as file:
                json.dump({"command": "tests/fleet/llmd.py build/release/kvasir bench/results/fleet-llmd.json", "router": "llm-d-router v0.10.0-rc.1-62-gebab68792",
                           "model": os.path.basename(MODEL), "servers": 3, **result}, file, indent=1)
                file.write("\n")


main()
