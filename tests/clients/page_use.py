#!/usr/bin/env python3
"""The page as people use it: by keyboard alone, on a phone, in the dark. Drives headless Chromium over its pipe."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time


class Browser:
    def __init__(self, folder):
        path = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
        if not path:
            print("skipped: chromium is not installed")
            sys.exit(77)
        ours, theirs = os.pipe(), os.pipe()  # what it reads as 3, what it writes as 4

        def pipes():
            # The numbers may be taken by one another: first out of the way, then into place.
            read, write = os.dup(ours[0]), os.dup(theirs[1])
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen(
            [path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             "--remote-debugging-pipe", f"--user-data-dir={folder}/profile", "about:blank"],
            preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(ours[0])
        os.close(theirs[1])
        self.to, self.of = ours[1], theirs[0]
        self.rest, self.last, self.session, self.said = b"", 0, None, []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")

    def call(self, method, **params):
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                block = os.read(self.of, 1 << 20)
                if not block:
                    raise RuntimeError("the browser went away")
                self.rest += block
            one, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(one)
            if answer.get("id") == self.last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            said = answer.get("params", {})
            if answer.get("method") == "Runtime.exceptionThrown" or said.get("entry", {}).get("level") in ("error", "warning"):
                self.said.append(json.dumps(said))

    def run(self, script):
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, what, script, seconds=60):
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise AssertionError(f"{what}: not within {seconds} s")
            time.sleep(0.05)
        return value

    def press(self, key, code=0, text="", modifiers=0):
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until("the page serves", "document.getElementById('state')?.textContent === 'serving'")


def luminance(colour):
    red, green, blue = (int(v) for v in colour[colour.index("(") + 1:-1].split(",")[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


ANSWER = "[...document.querySelectorAll('.turn.assistant')].at(-1)?.textContent ?? ''"


def by_keyboard(b):
    assert b.run("document.activeElement.id") == "text", "the message has the focus from the start"
    b.call("Input.insertText", text="Say hello")
    b.press("Enter", 13, "\r", modifiers=8)  # Shift+Enter is a new line
    assert b.run("document.getElementById('text').value") == "Say hello\n"
    b.press("Enter", 13, "\r")
    b.until("an answer streams", f"({ANSWER}).length > 0")
    b.until("the answer ends, and says how long it took", "document.querySelector('.turn.assistant small') !== null")
    assert b.run("document.activeElement.id") == "text", "the focus is back"
    assert "Say hello" in b.run("document.querySelector('.turn.user').textContent")
    # Settings are reached by Tab, from the message on, each with a name to read aloud.
    seen = []
    for _ in range(20):
        b.press("Tab", 9)
        seen.append(b.run("document.activeElement.id"))
    for wanted in ("send", "clear", "temperature", "top_p", "max_tokens", "seed", "system", "key"):
        assert wanted in seen, f"Tab does not reach {wanted}: {seen}"
    nameless = b.run("[...document.querySelectorAll('input,textarea,button')].filter(e => "
                     "!e.labels?.length && !e.getAttribute('aria-label') && !e.textContent.trim()).map(e => e.id)")
    assert not nameless, f"without a name: {nameless}"
    # A long answer, stopped by Escape: what came stays, and the next one can be asked.
    b.run("document.getElementById('max_tokens').value = 2000; document.getElementById('seed').value = 1;"
          "document.getElementById('text').focus()")
    b.call("Input.insertText", text="Count from one to five hundred, in words")
    b.press("Enter", 13, "\r")
    b.until("the button stops", "document.getElementById('send').textContent === 'Stop'")
    b.until("a long answer streams", f"({ANSWER}).length > 10")
    b.press("Escape", 27)
    b.until("it stopped", "document.getElementById('send').textContent === 'Send'", 10)
    assert b.run("document.querySelectorAll('.turn.error').length") == 0
    b.until("its request is gone", "document.getElementById('running').textContent === '0'", 20)
    b.until("the steps are drawn", "document.getElementById('decodes').getAttribute('d')?.split('M').length > 5", 20)


# Whatever a model writes is text.
def markup_is_text(b):
    b.run("show('assistant', '<img src=x onerror=\"document.title=1\"><b>bold</b>')")
    assert b.run("document.querySelectorAll('.turn b, .turn img').length") == 0
    assert b.run("document.title") == "kvasir"


def on_a_phone(b, url):
    b.call("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=2, mobile=True)
    b.open(url)
    assert b.run("document.documentElement.scrollWidth") <= 360, "nothing is wider than the screen"
    for element in ("text", "send", "log"):
        box = b.run(f"(r => [r.left, r.top, r.right, r.bottom, r.height])(document.getElementById('{element}').getBoundingClientRect())")
        assert box[0] >= 0 and box[1] >= 0 and box[2] <= 360 and box[3] <= 640 and box[4] >= 24, f"{element}: {box}"
    b.call("Emulation.clearDeviceMetricsOverride")


def in_the_dark(b, url):
    pictures = {}
    for scheme in ("light", "dark"):
        b.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        b.open(url)
        ground, ink = (luminance(b.run(f"getComputedStyle(document.body).{p}")) for p in ("backgroundColor", "color"))
        assert (ground < 0.2 and ink > 0.7) if scheme == "dark" else (ground > 0.8 and ink < 0.3), (scheme, ground, ink)
        pictures[scheme] = b.call("Page.captureScreenshot", format="png")["data"]
    assert len(pictures["dark"]) > 20000 and pictures["dark"] != pictures["light"]


def main():
    url = os.environ["KVASIR_HTTP"] + "/"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        b = Browser(folder)
        try:
            b.open(url)
            by_keyboard(b)
            markup_is_text(b)
            on_a_phone(b, url)
            in_the_dark(b, url)
            assert not b.said, b.said
        finally:
            b.process.kill()
            b.process.wait()
    print("page: used by keyboard, on a phone and in the dark; model output stays text")


main()
