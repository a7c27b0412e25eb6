#!/usr/bin/env python3
"""`kvasir chat` as its user has it: in a terminal, in a pipe, with a server that goes away. chat.py KVASIR"""
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time

KVASIR = sys.argv[1]
MODEL = "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260,context=32768,step_ms=20"
PATIENCE = 60
ANSWERS = r"> hello\r\n\x1b\[\?2004l.+"  # the terminal is the answer's, which has begun


class Server:
    def __enter__(self):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([KVASIR, "serve", "--model", MODEL, "--grpc-port", "0", "--http-port", "-1", "--log-format", "json",
                                         "--kv-memory", "64MiB"], stderr=self.log)
        while True:
            self.log.seek(0)
            for line in self.log:
                if '"ready"' in line:
                    self.address = f"127.0.0.1:{json.loads(line)['grpc_port']}"
                    return self
            assert self.process.poll() is None, "the server ended"
            select.select([], [], [], 0.05)

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


class Terminal:
    """A child in a terminal of its own; `wait` reads until something is there."""

    def __init__(self, *arguments, columns=80, **environment):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update({"TERM": "xterm", "NO_COLOR": "", **environment})
            os.execv(KVASIR, [KVASIR, "chat", *arguments])
        self.resize(columns)
        self.all = self.seen = b""

    def resize(self, columns):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def type(self, keys):
        os.write(self.fd, keys.encode() if isinstance(keys, str) else keys)
        return self

    def wait(self, pattern):
        pattern, end = pattern.encode(), time.monotonic() + PATIENCE
        while True:
            found = re.search(pattern, self.seen, re.S)
            if found:
                self.seen = self.seen[found.end():]
                return self
            assert time.monotonic() < end, f"no {pattern} in {self.seen}"
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    more = os.read(self.fd, 65536)
                except OSError:
                    more = b""
                assert more, f"it ended without {pattern}: {self.seen}"
                self.all += more
                self.seen += more

    def prompt(self):
        return self.wait(r"\r> \x1b\[K")

    def leaves(self, code=0):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if not select.select([self.fd], [], [], 0.05)[0]:
                continue
            try:
                more = os.read(self.fd, 65536)
            except OSError:  # nobody has the other end any more, and all that was said is read
                more = b""
            self.all += more
            if not more:
                os.close(self.fd)
                status = os.waitpid(self.pid, 0)[1]
                assert os.waitstatus_to_exitcode(status) == code, status
                return self
        raise AssertionError(f"it does not leave: {self.all[-200:]}")

    def canonical(self):
        return bool(termios.tcgetattr(self.fd)[3] & termios.ICANON)


def piped(address, *arguments, **more):
    return subprocess.run([KVASIR, "chat", "--server", address, *arguments], capture_output=True, timeout=PATIENCE, **more)


def main():
    with Server() as server:
        at = ["--server", server.address, "--max-tokens", "4"]
        # Greedy: a token drawn at random may be the one that ends an answer.
        endless = ["--server", server.address, "--max-tokens", "20000", "--temperature", "0"]

        # A question, its figures, and ways to leave.
        t = Terminal(*at).prompt().type("hello\r").wait(r"> hello\r\n.*\x1b\[2m\d+ tokens.*\x1b\[0m").prompt()
        t.type("/exit\r").leaves()
        Terminal(*at).prompt().type("\x04").leaves()
        Terminal(*at).prompt().type("\x03").wait("once more leaves").prompt().type("\x03").leaves()
        t = Terminal(*at).prompt().type("half\x03").wait(r"\^C").prompt().type("\x03").wait("once more").prompt()
        t.type("hi\r").wait("tokens").prompt().type("\x03").wait("once more").prompt().type("\x03").leaves()

        # Ctrl-C stops the answer, not the program; the terminal is as it was found when it left.
        t = Terminal(*endless).prompt().type("hello\r").wait(ANSWERS)
        t.type("\x03").wait("stopped").prompt().type("/exit\r").leaves()
        t = Terminal(*endless).prompt()
        os.kill(t.pid, signal.SIGTERM)
        t.leaves(128 + signal.SIGTERM)
        assert t.all.endswith(b"\x1b[?2004l\r\n"), t.all[-40:]

        # History, wide characters, a narrow and a growing window, pastes.
        t = Terminal(*at).prompt().type("one\r").wait("tokens").prompt().type("\x1b[A").wait("> one").type("\x15/help\r").wait("/save FILE")
        t.prompt().type("日本語x\x7f\x7f\r").wait("> 日本\r\n.*tokens").prompt().type("\x1b[200~first\nsecond\x1b[201~").wait("first↵second")
        t.type("\r").wait("> first\r\nsecond\r\n.*tokens").prompt()
        t.type("\x1b[200~" + "y" * 20000 + "\x1b[201~\r").wait("kvasir chat: .*|tokens").prompt().type("/exit\r").leaves()
        t = Terminal(*at, columns=20).prompt().type("0123456789abcdefghij").wait("j")
        t.resize(60)
        t.wait("> 0123456789abcdefghij").type("\x15\x04").leaves()

        # Commands say what they did not understand.
        t = Terminal(*at).prompt()
        for line, says in (("/foo", "no command /foo; /help"), ("/temperature abc", "0 to 100, not 'abc'"), ("/temperature", "not ''"),
                           ("/temperature 500", "not '500'"), ("/max -5", "not '-5'"), ("/save", "name of a file"),
                           ("/save /nonexistent/x", "cannot write"), ("/retry", "nothing has been said"), ("/clear", "forgotten"),
                           ("/system be brief", "system message is set"), ("//x", "tokens"), ("/retry", "tokens")):
            t.type(line + "\r").wait(re.escape(says)).prompt()
        with tempfile.TemporaryDirectory() as folder:
            t.type(f"/save {folder}/talk\r").wait("saved").prompt()
            saved = [json.loads(line) for line in open(f"{folder}/talk", encoding="utf-8")]
            assert [m["role"] for m in saved] == ["system", "user", "assistant"] and saved[1]["content"] == "/x", saved
        t.type("/exit\r").leaves()

        # No colours when they are not wanted, no escapes at all on a dumb terminal; Ctrl-C there, too.
        t = Terminal(*at, NO_COLOR="1").prompt().type("hi\r").wait("tokens").prompt().type("/exit\r").leaves()
        assert b"\x1b[2m" not in t.all
        t = Terminal(*at, TERM="dumb").wait("> ").type("hi\n").wait("tokens.*> ").type("\x03").wait("once more").type("\x03").leaves()
        assert b"\x1b" not in t.all, t.all

        # Pipes.
        assert piped(server.address, "--max-tokens", "4", input=b"hello").returncode == 0
        one = piped(server.address, "--max-tokens", "4", "hello")
        assert one.returncode == 0 and one.stdout.endswith(b"\n") and one.stderr == b"", one
        for said, says in ((b"", b"empty"), (b" \n", b"empty"), (b"caf\xe9", b"not UTF-8")):
            refused = piped(server.address, input=said)
            assert refused.returncode == 1 and says in refused.stderr and not refused.stdout, refused
        began = time.monotonic()
        closed = subprocess.run(f"{KVASIR} chat --server {server.address} --max-tokens 20000 --temperature 0 hello | head -c 5", shell=True,
                                capture_output=True, timeout=PATIENCE)
        assert len(closed.stdout) <= 5 and time.monotonic() - began < PATIENCE, closed

        # Wrong addresses.
        for wrong, code, says in (("http://127.0.0.1:50051", 2, b"HOST:PORT"), ("127.0.0.1", 2, b"HOST:PORT"), ("127.0.0.1:1", 1, b"no answer at")):
            refused = piped(wrong, "hello")
            assert refused.returncode == code and says in refused.stderr, refused

        # A server that goes away in the middle.
        t = Terminal(*endless).prompt().type("hello\r").wait(ANSWERS)
        server.process.kill()
        t.wait("kvasir chat: .*/retry says it again").prompt().type("/retry\r").wait("kvasir chat: ").prompt().type("\x04").leaves()


main()
