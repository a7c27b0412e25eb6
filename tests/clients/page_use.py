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
    for _ in range(28):
        b.press("Tab", 9)
        seen.append(b.run("document.activeElement.id"))
    for wanted in ("send", "clear", "temperature", "top_p", "max_tokens", "seed", "beams", "choice", "tools", "prediction", "system", "key"):
        assert wanted in seen, f"Tab does not reach {wanted}: {seen}"
    nameless = b.run("[...document.querySelectorAll('input,textarea,button,select')].filter(e => "
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


def set_to(b, **values):
    b.run(";".join(f"document.getElementById('{name}').value = {json.dumps(value)}" for name, value in values.items()))


def ask(b, text):
    b.run("document.getElementById('text').focus()")
    b.call("Input.insertText", text=text)
    b.press("Enter", 13, "\r")
    b.until("the answer begins", "document.getElementById('send').textContent === 'Stop'", 30)
    b.until("the answer ends", "document.getElementById('send').textContent === 'Send'", 120)
    assert b.run("document.querySelectorAll('.turn.error').length") == 0, b.run("document.querySelector('.turn.error').textContent")


# A search shows every beam with its score, the best first.
def beams_are_shown(b):
    b.run("document.getElementById('clear').click()")
    set_to(b, beams="3", max_tokens="8")
    ask(b, "Name a colour")
    scores = b.run("[...document.querySelectorAll('.turn.assistant .beam .score')].map(e => +e.textContent.slice(6))")
    assert len(scores) == 3 and scores == sorted(scores, reverse=True), scores
    set_to(b, beams="1")


# A call is shown as it was written; the next message is what its tool answers, and goes there.
def calls_are_shown(b):
    b.run("document.getElementById('clear').click()")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {
        "type": "object", "properties": {"where": {"type": "string", "enum": ["up", "down"]}}, "required": ["where"]}}}]
    set_to(b, tools=json.dumps(tools), choice="required", temperature="0", max_tokens="60")
    b.run("window.sent = []; const real = window.fetch; window.fetch = (to, how) => "
          "{ if (how?.body) window.sent.push(JSON.parse(how.body)); return real(to, how); }; 0")
    ask(b, "Look up")
    name, given = b.run("document.querySelector('.turn.assistant .call').textContent").split(" ", 1)
    assert name == "look" and json.loads(given)["where"] in ("up", "down"), given
    calls = b.run("document.querySelectorAll('.turn.assistant .call').length")
    assert "look" in b.run("document.getElementById('text').placeholder")
    set_to(b, choice="none", max_tokens="8")
    for i in range(calls - 1):  # others wait for theirs
        b.call("Input.insertText", text=f"Sky {i}")
        b.press("Enter", 13, "\r")
    ask(b, "Blue sky")
    last = b.run("window.sent.at(-1).messages")
    assert [m["role"] for m in last] == ["user", "assistant"] + ["tool"] * calls, last
    assert last[1]["tool_calls"][0]["function"]["arguments"] == given and last[-1]["content"] == "Blue sky", last
    assert last[2]["tool_call_id"] == last[1]["tool_calls"][0]["id"], last
    set_to(b, tools="", choice="auto")


# What was predicted and comes so is told, of the answer and of the server.
def drafts_are_told(b):
    b.run("document.getElementById('clear').click()")
    set_to(b, temperature="0", max_tokens="24")
    ask(b, "Name three rivers")
    said = b.run("document.querySelector('.turn.assistant .text').textContent")
    b.run("document.getElementById('clear').click()")
    set_to(b, prediction=said)
    ask(b, "Name three rivers")
    note = b.run("document.querySelector('.turn.assistant > small').textContent")
    right, of = (int(word) for word in note.split("; ")[1].split(" draft")[0].split(" of "))
    assert 0 < right <= of, note
    b.until("the server's drafts are told", "/^[1-9][0-9]* of [1-9]/.test(document.getElementById('drafts').textContent)", 20)
    set_to(b, prediction="")


# As an answer of a model that thinks comes: folded, and opened by a click.
def thoughts_are_folded(b):
    b.run("document.getElementById('clear').click(); const one = choiceIn(show('assistant', ''));"
          "one.add({reasoning_content: 'Hm, '}); one.add({reasoning_content: 'why.'}); one.add({content: 'So.'}); 0")
    hidden = "document.querySelector('.turn details > div').checkVisibility()"
    assert b.run("document.querySelector('.turn details > div').textContent") == "Hm, why."
    assert b.run("document.querySelector('.turn .text').textContent") == "So." and not b.run(hidden)
    b.run("document.querySelector('.turn summary').click()")
    assert b.run(hidden), "opened by a click"


def load_is_drawn(b):
    b.until("requests are drawn at each instant", "document.getElementById('runs').getAttribute('points')?.split(' ').length > 3", 30)


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
            beams_are_shown(b)
            calls_are_shown(b)
            drafts_are_told(b)
            thoughts_are_folded(b)
            load_is_drawn(b)
            markup_is_text(b)
            on_a_phone(b, url)
            in_the_dark(b, url)
            assert not b.said, b.said
        finally:
            b.process.kill()
            b.process.wait()
    print("page: used by keyboard, on a phone and in the dark; beams, calls, drafts and thoughts are shown; model output stays text")


main()
