"""A kvasir serve of one's own, and the driver that a record names."""
import json
import os
import pathlib
import subprocess
import sys


# One current file a benchmark, under a name that stays.
RESULTS = pathlib.Path(os.environ.get("KVASIR_BENCH_RESULTS", pathlib.Path(__file__).resolve().parents[1] / "results"))


def start(kvasir, model, *flags):
    """The process, once it is ready, and what it has logged; the rest of its log is for the caller to read."""
    flags = ["--log-format", "json", "--http-port", "0", *flags]
    if "--grpc-port" not in flags:
        flags += ["--grpc-port", "-1"]
    process = subprocess.Popen([kvasir, "serve", "--model", model, *flags], stderr=subprocess.PIPE, text=True)
    log = []
    for line in process.stderr:
        if not line.startswith("{"):
            sys.exit(f"the server did not start: {line.strip()}")
        log.append(json.loads(line))
        if log[-1]["message"] == "ready":
            return process, log
    sys.exit(f"the server did not start: {log}")


def command(script):
    """What was run, for a record: files by their names, wherever they lie."""
    return " ".join([script, *(pathlib.Path(a).name if a.startswith("/") else a for a in sys.argv[1:])])


def driver():
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return ""
