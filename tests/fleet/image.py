#!/usr/bin/env python3
"""The image's files, and the image itself: image.py KVASIR [--container] [--cuda]
By itself: the folder that tools/image-root makes, its size, and (as root) a server that starts in it. With --container (root,
buildah, podman): the last stage of docker/Dockerfile around these files, run with a read-only root, no capabilities and the
image's own user, asked for its health, driven by kvasir bench and stopped by SIGTERM in mid-load. --cuda: the same of
docker/Dockerfile.cuda around a program with the GPU's part, which serves from the processor where there is no GPU."""
import ctypes.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from kvasir_server import CACHE, DUMMY, MODEL, ROOT, skip

CUDA = "--cuda" in sys.argv
DOCKERFILE = "docker/Dockerfile.cuda" if CUDA else "docker/Dockerfile"
CUBLASLT = os.environ.get("KVASIR_CUBLASLT") or os.path.join(CACHE, "cuda/lib/libcublasLt.so.13")
NAME = f"kvasir-test-{os.getpid()}"
PODMAN = ("podman", "--storage-driver", "vfs", "--runtime", "runc")


def run(*words, **more):
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def compressed(folder):
    tar = subprocess.Popen(["tar", "-cf", "-", "-C", folder, "."], stdout=subprocess.PIPE)
    out = subprocess.run(["sh", "-c", "gzip -6 | wc -c"], stdin=tar.stdout, capture_output=True, check=True).stdout
    assert tar.wait() == 0
    return int(out)


def files(kvasir, folder):
    # What docker/Dockerfile adds, where it is installed here.
    opened = ["libzmq.so.5"] if ctypes.util.find_library("zmq") else []
    if CUDA:
        if not os.path.exists(CUBLASLT):
            skip(f"no {CUBLASLT} (tools/cuda-toolkit.sh fetches it)")
        opened.append(CUBLASLT)
    run(os.path.join(ROOT, "tools/image-root"), kvasir, folder, *opened)
    programs = [os.path.join(at, n) for at, _, names in os.walk(folder) for n in names if os.access(os.path.join(at, n), os.X_OK)]
    wrong = [p for p in programs if not p.endswith(("/usr/bin/kvasir", ".so.6", ".so.2", ".so.1"))]
    assert not wrong, f"an image without a shell has {wrong}"
    whole = int(run("du", "-sb", folder).split()[0])
    if CUDA:
        large = [(os.path.getsize(p), p) for p in programs if not os.path.islink(p)]
        library = os.path.join(folder, "usr/lib", os.path.basename(CUBLASLT))
        large = sorted([*large, (os.path.getsize(library), library)], reverse=True)[:3]
        print(f"the image's files: {whole / 1e6:.1f} MB, of which " + ", ".join(f"{n / 1e6:.1f} {os.path.basename(p)}" for n, p in large))
        assert whole < 1e9, "the image is to have at most 1 GB unpacked"
    else:
        size = compressed(folder)
        print(f"the image's files: {whole / 1e6:.1f} MB, compressed {size / 1e6:.1f} MB")
        assert size < 60e6, "the image is to have at most 60 MB compressed"
    if os.geteuid() == 0:
        os.chmod(os.path.dirname(folder), 0o755)
        # Only what lies there: nothing of this machine's /usr helps it to start.
        said = run("chroot", "--userspec=65532:65532", folder, "/usr/bin/kvasir", "generate", "--model", DUMMY, "--json", "x",
                   "--max-tokens", "3", "--threads", "1", "--kv-memory", "1MiB")
        assert said.strip(), "it answers nothing"


def wait(what, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if what():
            return
        time.sleep(0.1)
    raise AssertionError(f"{what.__name__} did not come")


def container(kvasir, folder):
    for tool in ("buildah", "podman", "runc"):
        if os.geteuid() != 0 or not shutil.which(tool):
            skip(f"no {tool}, or not root")
    if not os.path.exists(MODEL):
        skip(f"no model at {MODEL} (./test fetches it)")
    context = os.path.dirname(folder)
    # The stage `build` is these very files; compiling in a container is the builder's to show, not this test's.
    run("buildah", "--storage-driver", "vfs", "bud", "--format", "docker", "--isolation", "chroot", "--build-context", f"build={context}",
        "-f", os.path.join(ROOT, DOCKERFILE), "-t", NAME, ROOT)
    config = json.loads(run("buildah", "--storage-driver", "vfs", "inspect", "--type", "image", NAME))["Docker"]["config"]
    assert config["User"] == "65532:65532" and config["StopSignal"] == "SIGTERM", config
    health = config["Healthcheck"]["Test"]
    assert health[0] == "CMD", health
    log = open(os.path.join(context, "log"), "w+", encoding="utf-8")
    ports = ("--http-port", "18380", "--grpc-port", "18381")  # known, as its health is asked by what it was started with
    process = subprocess.Popen([*PODMAN, "run", "--rm", "--name", NAME, "--network", "host", "--read-only", "--cap-drop", "ALL",
                                "--security-opt", "no-new-privileges", "--ulimit", "nofile=20000:20000", "--ulimit", "nproc=4096:4096",
                                "-e", "KVASIR_HOST=127.0.0.1", "-v", f"{os.path.dirname(MODEL)}:/models:ro", f"localhost/{NAME}",
                                "--model", os.path.basename(MODEL), "--kv-memory", "64MiB", *ports],
                               stdout=log, stderr=log)
    load = None
    try:
        def healthy():
            assert process.poll() is None, open(log.name, encoding="utf-8").read()
            return subprocess.run([*PODMAN, "exec", NAME, *health[1:]], capture_output=True, check=False).returncode == 0
        wait(healthy)
        run(kvasir, "bench", "127.0.0.1:18381", "--requests", "50", "--concurrency", "8", "--input-len", "16", "--output-len", "8", "--json", f"{context}/a.json")
        with open(f"{context}/a.json", encoding="utf-8") as file:
            report = file.read()
        assert '"failed": 0' in report or '"failed":0' in report, report[:2000]
        # Answers under way when the signal comes are finished, and the process ends by itself.
        load = subprocess.Popen([kvasir, "bench", "127.0.0.1:18381", "--requests", "8", "--concurrency", "8", "--input-len", "16", "--output-len", "150",
                                 "--json", f"{context}/b.json"], stdout=subprocess.PIPE, text=True)
        def running():
            return "kvasir_requests_running 8" in run("curl", "-s", "http://127.0.0.1:18380/metrics")
        wait(running)
        run(*PODMAN, "stop", "--time", "40", NAME)
        assert load.wait(60) == 0, load.stdout.read()
        assert process.wait(60) == 0, "SIGTERM did not end it well"
        with open(log.name, encoding="utf-8") as file:
            said = file.read()
        assert '"draining"' in said and '"stopped"' in said, said
        print("built, healthy, 50 requests answered, 8 finished after SIGTERM, exit code 0")
    finally:
        for each in (load, process):
            if each and each.poll() is None:
                each.send_signal(signal.SIGKILL)
        subprocess.run([*PODMAN, "rm", "-f", NAME], capture_output=True, check=False)
        subprocess.run([*PODMAN, "rmi", "-f", NAME], capture_output=True, check=False)
        log.close()


def main():
    with tempfile.TemporaryDirectory() as context:
        folder = os.path.join(context, "image")
        files(sys.argv[1], folder)
        if "--container" in sys.argv:
            container(sys.argv[1], folder)


main()
