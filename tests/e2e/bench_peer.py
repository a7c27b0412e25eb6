"""One command line of kvasir bench, open loop and verified, against kvasir serve and then against llama-server on the
same port: nothing of it is changed. Skipped where llama-server (bench/peers) or the model is not there."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/serve"))
import servers  # noqa: E402

servers.KVASIR = pathlib.Path(sys.argv[1])
built, model = servers.peers(build=False), servers.default_model()
if not built or not os.access(model, os.R_OK):
    print(f"skipped: {'llama-server is not built (bench/peers)' if not built else model + ' is not there'}")
    sys.exit(77)

REQUESTS, VERIFIED = 12, 4
port = servers.free_port()
with tempfile.NamedTemporaryFile(suffix=".json") as report:
    command = [str(servers.KVASIR), "bench", f"127.0.0.1:{port}", "--protocol", "openai", "--rate", "1", "--requests", REQUESTS,
               "--input-len", "16-48", "--output-len", "8-24", "--verify", VERIFIED, "--seed", "3", "--json", report.name]
    command = list(map(str, command))
    print(" ".join(command))
    for engine in ("kvasir", "llama.cpp"):
        with servers.Server(engine, model, 8, built["build"], port):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(f"== {engine}: exit {done.returncode}\n{done.stdout}")
        said = json.load(open(report.name))
        f, v = said["figures"], said["verification"]
        assert f["succeeded"] == REQUESTS and f["failed"] == 0 and not f["partial"] and not f["errors"], f
        assert f["output_tokens"] > 8 * REQUESTS - 1 and f["ttft_ms"]["count"] == REQUESTS, f
        assert v["compared"] == VERIFIED and v["failed"] == 0, v
        assert v["equal"] + v["near_ties"] + v["different"] == VERIFIED, v
        # llama.cpp adds in another order alone than in a batch, so its answers may differ; ours may not.
        assert engine != "kvasir" or (v["different"] == 0 and done.returncode == 0), v
        assert len(said["server"]) >= 2, "its metrics page is read beside"
