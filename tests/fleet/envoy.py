#!/usr/bin/env python3
"""Three servers behind a real Envoy with deploy/gateways/envoy.yaml: envoy.py KVASIR [RESULT.json] [--check]
200 requests over HTTP and 60 over gRPC are answered and spread; a killed server costs at most what ran on it, a drained one
nothing. --check: Envoy's own judgement of its files, llm-d's too, and no more."""
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.request

from gateway import Fleet, free_port, losses, process, shared_prefixes, wait
from kvasir_server import FLEET, MODEL, ROOT, skip

ENVOY = os.path.join(FLEET, "python", "bin", "envoy")
FILE = os.path.join(ROOT, "deploy/gateways/envoy.yaml")


def configured(folder, fleet, ports):
    """The file itself with this machine's ports, and with three addresses for the one name."""
    with open(FILE, encoding="utf-8") as file:
        text = file.read()
    for old, new in (("0.0.0.0, port_value: 8080", f"127.0.0.1, port_value: {ports['http']}"),
                     ("0.0.0.0, port_value: 8081", f"127.0.0.1, port_value: {ports['grpc']}"),
                     ("port_value: 9901", f"port_value: {ports['admin']}")):
        assert text.count(old) == 1, f"{FILE} no longer has '{old}'"
        text = text.replace(old, new)
    for kind, port in (("http", 8000), ("grpc", 50051)):
        line = f"              - endpoint: {{address: {{socket_address: {{address: KVASIR_PODS, port_value: {port}}}}}}}\n"
        assert text.count(line) == 1, f"{FILE} no longer has '{line}'"
        text = text.replace(line, "".join(line.replace("KVASIR_PODS", "127.0.0.1").replace(f"value: {port}", f"value: {getattr(s, kind)}")
                                          for s in fleet.servers))
    path = os.path.join(folder, "envoy.yaml")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def requests_of(server):
    return int(next(line.split()[1] for line in server.get("/metrics").splitlines() if line.startswith("kvasir_requests_total ")))


def main():
    kvasir = sys.argv[1]
    if not os.path.exists(ENVOY):
        skip("no Envoy (tools/fleet.sh installs it)")
    for each in (FILE, os.path.join(ROOT, "deploy/gateways/llm-d/envoy.yaml")):
        said = subprocess.run([ENVOY, "--mode", "validate", "-c", each, "-l", "error"], capture_output=True, text=True, check=False)
        assert said.returncode == 0 and "OK" in said.stdout, said.stdout + said.stderr
    version = subprocess.run([ENVOY, "--version"], capture_output=True, text=True, check=True).stdout.split("version: ")[1].split("/")[1]
    print(f"Envoy {version} takes its files")
    if "--check" in sys.argv:
        return
    if not os.path.exists(MODEL):
        skip(f"no model at {MODEL} (./test fetches it)")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        fleet = Fleet(stack, kvasir, folder)
        ports = {name: free_port() for name in ("http", "grpc", "admin")}
        stack.enter_context(process(ENVOY, "-c", configured(folder, fleet, ports), "-l", "warn", "--concurrency", "1", "--disable-hot-restart",
                                    log=os.path.join(folder, "envoy.log")))
        url = f"http://127.0.0.1:{ports['http']}"
        def all_healthy():
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{ports['admin']}/clusters", timeout=5) as reply:
                    return reply.read().decode().count("health_flags::healthy") == 6
            except OSError:
                return False
        wait(all_healthy)
        result = shared_prefixes(url, fleet, 200, 10)
        result.pop("same_server_share")  # it knows of no prefixes
        assert min(result["by_server"].values()) > 30, f"not spread: {result}"
        before = [requests_of(s) for s in fleet.servers]
        subprocess.run([kvasir, "bench", f"127.0.0.1:{ports['grpc']}", "--requests", "60", "--concurrency", "6", "--connections", "1", "--input-len",
                        "16", "--output-len", "8", "--json", f"{folder}/bench.json"], check=True, stdout=subprocess.DEVNULL)
        with open(f"{folder}/bench.json", encoding="utf-8") as file:
            assert '"failed":0' in file.read().replace(" ", ""), "requests over gRPC failed"
        over_grpc = [requests_of(s) - b for s, b in zip(fleet.servers, before)]
        assert sum(over_grpc) == 60 and min(over_grpc) > 9, f"one connection of a client is to reach all servers: {over_grpc}"
        result["grpc_by_server"] = over_grpc
        print(json.dumps(result), flush=True)
        result |= losses(url, fleet, survives_kill=5)
        print(json.dumps({k: result[k] for k in ("killed", "drained")}), flush=True)
        if len(sys.argv) > 2:
            with open(sys.argv[2], "w", encoding="utf-8") as file:
                json.dump({"command": "tests/fleet/envoy.py build/release/kvasir bench/results/fleet-envoy.json", "envoy": version,
                           "model": os.path.basename(MODEL), "servers": 3, **result}, file, indent=1)
                file.write("\n")


main()
