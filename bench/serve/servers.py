"""kvasir serve and llama-server as processes of their own, one at a time, and kvasir bench against either."""
import json
import os
import pathlib
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
KVASIR = pathlib.Path(os.environ.get("KVASIR_BUILD", ROOT / "build/release")) / "kvasir"
RESULTS = pathlib.Path(os.environ.get("KVASIR_BENCH_RESULTS", ROOT / "bench/results"))
THREADS = len(os.sched_getaffinity(0))


def peers(build=True):
    """What bench/peers has built: {"source": ..., "build": ..., "q4_0": ...}. Without `build`, None where nothing is."""
    done = subprocess.run([ROOT / "bench/peers", *([] if build else ["--built"])], stdout=subprocess.PIPE, text=True)
    if done.returncode == 77 and not build:
        return None
    if done.returncode:
        raise SystemExit("bench: llama.cpp could not be built to measure beside; what bench/peers said stands above")
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def prebuilt_peer():
    """Somebody's build of llama.cpp's libraries, which is there in seconds: {"source": ..., "build": ...}."""
    done = subprocess.run([ROOT / "bench/peers", "--prebuilt"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit("bench: llama.cpp could not be fetched; what bench/peers said stands above")
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def default_model():
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    return f"{cache}/kvasir/models/SmolLM2-135M-Instruct.Q4_1.gguf"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """Runs `engine` ("kvasir" or "llama.cpp") on `model` with room for `running` sequences until the block ends."""

    def __init__(self, engine, model, running, llama_build=None, port=None):
        self.engine, self.port = engine, port or free_port()
        if engine == "kvasir":
            self.command = [str(KVASIR), "serve", "--model", model, "--grpc-port", "0", "--http-port", str(self.port),
                            "--max-running", str(running), "--threads", str(THREADS)]
        else:
            self.command = [f"{llama_build}/bin/llama-server", "-m", model, "--host", "127.0.0.1",
                            "--port", str(self.port), "-np", str(running), "-c", str(running * 512),
                            "-t", str(THREADS), "-tb", str(THREADS), "--metrics"]

    def __enter__(self):
        self.log = tempfile.TemporaryFile()
        began = time.monotonic()
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=subprocess.STDOUT)
        path = "/ready" if self.engine == "kvasir" else "/health"
        while not self.answers(path):
            if self.process.poll() is not None or time.monotonic() - began > 120:
                self.log.seek(0)
                raise SystemExit(f"{' '.join(self.command)} does not serve:\n" + self.log.read()[-3000:].decode(errors="replace"))
            time.sleep(0.01)
        self.seconds_to_ready = time.monotonic() - began
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(60)

    def answers(self, path):
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=1).status == 200
        except (OSError, urllib.error.URLError):
            return False

    def resident_mb(self):
        with open(f"/proc/{self.process.pid}/status") as f:
            return next(int(line.split()[1]) // 1024 for line in f if line.startswith("VmRSS"))

    def processor_seconds(self):
        fields = open(f"/proc/{self.process.pid}/stat").read().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def bench(self, *arguments, protocol="openai"):
        """kvasir bench's report; the same command whatever serves, but for the address."""
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            command = [str(KVASIR), "bench", f"127.0.0.1:{self.port}", "--protocol", protocol,
                       *map(str, arguments), "--json", report.name]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            text = open(report.name).read()
            if not text:
                raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
            return json.loads(text)


def figures_of(report):
    """What is kept of a report."""
    f = report["figures"]
    kept = {k: f[k] for k in ("succeeded", "failed", "seconds", "output_tokens", "output_tokens_per_second",
                              "requests_per_second")}
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        kept[name] = {k: round(f[name][k], 2) for k in ("p50", "p90", "p95", "p99", "max")}
    if f["errors"]:
        kept["errors"] = f["errors"]
    return kept


def about(what, command):
    """How a figure came about: kept in each result."""
    git = lambda *a: subprocess.run(["git", "-C", ROOT, *a], stdout=subprocess.PIPE, text=True).stdout.strip()
    cpu = next((l.split(":", 1)[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "unknown")
    changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return {"what": what, "date": time.strftime("%Y-%m-%d %H:%M"), "commit": git("rev-parse", "--short", "HEAD") + changed,
            "command": command, "machine": f"{cpu}, {THREADS} processors", "load_average_before": round(os.getloadavg()[0], 2)}


def save(name, result):
    result["load_average_after"] = round(os.getloadavg()[0], 2)
    path = RESULTS / name
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {os.path.relpath(path, ROOT)}", flush=True)
