#!/usr/bin/env python3
"""A server in bad surroundings: standard error that nobody reads or that is closed, no threads and no memory to be had,
SIGTERM while schemas of seconds compile.

    surroundings.py KVASIR [stderr|threads|memory|schemas]...

Whatever is missing: a message and a refused request, and SIGTERM still ends it with 0.
"""
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

KVASIR = os.path.abspath(sys.argv[1])
MODEL = "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260"
MINUTE = 60


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, *arguments, **popen):
        self.port = free_port()
        ports = ["--http-port", str(self.port), "--grpc-port", "0"]
        self.process = subprocess.Popen(
            [KVASIR, "serve", "--model", MODEL, "--kv-memory", "1MiB", "--threads", "1", "--log-format", "json", *ports,
             *arguments], **popen)

    def ask(self, path, body=None, timeout=30):
        """The status, and the text; 0 where nobody answered."""
        headers = {"Content-Type": "application/json"} if body else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read()
        except OSError:
            return 0, b""

    def complete(self, prompt="x", tokens=2, **more):
        body = {"prompt": prompt, "max_tokens": tokens, **more}
        return self.ask("/v1/completions", json.dumps(body).encode())

    def ready(self):
        """True once it is, False when it ended first."""
        end = time.monotonic() + MINUTE
        while time.monotonic() < end:
            if self.process.poll() is not None:
                return False
            if self.ask("/ready", timeout=2)[0] == 200:
                return True
            time.sleep(0.02)
        raise AssertionError("neither ready nor over within a minute")

    def end(self, limit=MINUTE):
        """The exit code after SIGTERM; None where it did not end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            return None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def check(what, condition, seen=""):
    if not condition:
        print(f"FAILED: {what}: {seen}")
        check.failures += 1


check.failures = 0


def stderr_that_nobody_reads():
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with Server("--log-level", "debug", stderr=writer) as server:
        os.close(writer)
        check("a stalled log: ready", server.ready())
        for _ in range(300):  # a few lines each: a hundred times what the pipe holds
            status, text = server.complete()
            check("a stalled log: a request", status == 200, (status, text))
        code = server.end(10)
        check("a stalled log: SIGTERM", code == 0, code)
        os.close(reader)


def standard_streams_that_are_closed():
    for closed in ("2>&-", "<&-", ">&-", "<&- >&- 2>&-"):
        port = free_port()
        script = (f'exec "$0" serve --model "{MODEL}" --kv-memory 1MiB --threads 1 --http-port {port} --grpc-port 0 '
                  f"--log-level debug {closed}")
        streams = {} if "2>&-" in closed else {"stderr": subprocess.DEVNULL}
        server = Server.__new__(Server)
        server.port = port
        server.process = subprocess.Popen(["bash", "-c", script, KVASIR], **streams)
        with server:
            check(f"{closed}: ready", server.ready())
            for fd, sign in enumerate(("<&-", " >&-", "2>&-")):
                there = os.readlink(f"/proc/{server.process.pid}/fd/{fd}")
                if sign in " " + closed:
                    check(f"{closed}: descriptor {fd}", there == "/dev/null", there)
            for _ in range(20):
                status, text = server.complete()
                check(f"{closed}: a request", status == 200, (status, text))
            code = server.end()
            check(f"{closed}: SIGTERM", code == 0, code)


def schemas_that_compile():
    """SIGTERM while every compiling thread has a schema of seconds, and more of them wait."""
    dear = {"allOf": [{"type": "integer", "multipleOf": n} for n in (9991, 9973, 997, 991)]}
    with Server("--drain-seconds", "5s", stderr=subprocess.DEVNULL) as server:
        check("schemas: ready", server.ready())
        answers = []
        asked = [threading.Thread(target=lambda i=i: answers.append(server.complete(
            response_format={"type": "json_schema", "json_schema": {"name": f"s{i}", "schema": {**dear, "title": str(i)}}})))
            for i in range(24)]
        for thread in asked:
            thread.start()
        time.sleep(0.3)
        begun, left = time.monotonic(), 24 - len(answers)
        code = server.end(20)
        took = time.monotonic() - begun
        check("schemas: some were still being compiled", left > 0, left)
        check("schemas: SIGTERM", code == 0, code)
        check("schemas: over within the drain", took < 5 + 2.5, took)
        for thread in asked:
            thread.join(MINUTE)
        wrong = [a for a in answers if a[0] not in (0, 200, 400, 422, 503)]
        check("schemas: refused or cut, nothing else", not wrong and len(answers) == 24, (len(answers), wrong[:2]))


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>
// No more threads at once than MOST says, and none once the file NONE is there.
static atomic_int there;
struct start { void* (*f)(void*); void* x; };
static void gone(void* unused) { (void)unused; atomic_fetch_sub(&there, 1); }
static void* counted(void* p) {
  struct start s = *(struct start*)p;
  void* result;
  free(p);
  pthread_cleanup_push(gone, NULL);
  result = s.f(s.x);
  pthread_cleanup_pop(1);
  return result;
}
int pthread_create(pthread_t* t, const pthread_attr_t* a, void* (*f)(void*), void* x) {
  static int (*real)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (!real) real = dlsym(RTLD_NEXT, "pthread_create");
  const char *most = getenv("MOST"), *none = getenv("NONE");
  if (none && access(none, F_OK) == 0) return EAGAIN;
  if (most && atomic_load(&there) >= atoi(most)) return EAGAIN;
  struct start* s = malloc(sizeof *s);
  *s = (struct start){f, x};
  atomic_fetch_add(&there, 1);
  int failed = real(t, a, counted, s);
  if (failed) gone(NULL), free(s);
  return failed;
}
"""


def threads_that_cannot_be_had():
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        print("skipped: threads (no C compiler)")
        return
    with tempfile.TemporaryDirectory() as folder:
        shim, none = f"{folder}/shim.so", f"{folder}/none"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", shim, "-ldl"], input=SHIM, text=True, check=True)
        # None from here on: what runs is answered, and SIGTERM drains.
        with Server(stderr=subprocess.PIPE, env={**os.environ, "LD_PRELOAD": shim, "NONE": none}) as server:
            check("no more threads: ready", server.ready())
            open(none, "w").close()
            status, text = server.complete()
            check("no more threads: a request", status == 200, (status, text))
            code = server.end()
            check("no more threads: SIGTERM", code == 0, (code, server.process.stderr.read()[-500:] if code is not None else ""))
        # So many, and not one more: it says so, or it serves.
        fewest, served = 0, 0
        while served < 2 and fewest < 100:
            with tempfile.TemporaryFile() as said:
                with Server(stderr=said, env={**os.environ, "LD_PRELOAD": shim, "MOST": str(fewest)}) as server:
                    if server.ready():
                        served += 1
                        status, text = server.complete()
                        check(f"{fewest} threads: a request", status == 200, (status, text))
                        code = server.end()
                        check(f"{fewest} threads: SIGTERM", code == 0, code)
                    else:
                        said.seek(0)
                        text = said.read().decode()
                        check(f"{fewest} threads: the exit code", server.process.returncode == 1, (server.process.returncode, text[-300:]))
                        check(f"{fewest} threads: the message", "thread" in text, text[-300:])
            fewest += 1
        check("threads: it serves with enough of them", served == 2, fewest)


def address_space(pid):
    return int(re.search(r"VmSize:\s+(\d+)", open(f"/proc/{pid}/status").read()).group(1)) * 1024


def memory_that_cannot_be_had():
    with Server("--max-body", "64MiB", stderr=subprocess.DEVNULL) as server:
        check("no memory: ready", server.ready())
        check("no memory: before", server.complete()[0] == 200)
        pid = server.process.pid
        resource.prlimit(pid, resource.RLIMIT_AS, (address_space(pid) + (8 << 20), resource.RLIM_INFINITY))
        body = json.dumps({"input": "word " * (4 << 20)}).encode()
        for path in ("/tokenize", "/v1/completions"):
            large = body if path == "/tokenize" else json.dumps({"prompt": "x " * (8 << 20), "max_tokens": 1}).encode()
            for _ in range(4):
                status, _ = server.ask(path, large)
                check(f"no memory: {path} is refused", status != 200, status)
                check(f"no memory: the server lives after {path}", server.process.poll() is None, server.process.poll())
        status, text = server.complete()
        check("no memory: a small request beside", status == 200, (status, text))
        code = server.end()
        check("no memory: SIGTERM", code == 0, code)
    # Limits from hardly enough for the program to what it needs: a message each time, or it serves.
    for limit in (256 << 20, 320 << 20, 400 << 20, 512 << 20, 768 << 20):
        with tempfile.TemporaryFile() as said:
            keep = lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            with Server(stderr=said, preexec_fn=keep) as server:
                if server.ready():
                    check(f"{limit >> 20} MiB: SIGTERM", server.end() == 0)
                    continue
                said.seek(0)
                text = said.read().decode()
                check(f"{limit >> 20} MiB: the exit code", server.process.returncode in (1, 127, -signal.SIGABRT), (server.process.returncode, text[-300:]))
                check(f"{limit >> 20} MiB: the message", re.search("memory|thread|allocate|shared object", text), text)


CASES = {"stderr": [stderr_that_nobody_reads, standard_streams_that_are_closed], "threads": [threads_that_cannot_be_had],
         "memory": [memory_that_cannot_be_had], "schemas": [schemas_that_compile]}


def main():
    for name in sys.argv[2:] or CASES:
        for case in CASES[name]:
            began = time.monotonic()
            case()
            print(f"{case.__name__.replace('_', ' ')}: {time.monotonic() - began:.1f} s")
    return min(check.failures, 1)


sys.exit(main())
