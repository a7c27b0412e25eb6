"""Random JSON schemas, answered by SmolLM2 in a batch of 16: every answer that ended by itself must be valid, in the eyes
of an outside validator (python3-jsonschema). Half are greedy, half drawn with a seed; half asked as a conversation with
response_format, half as a completion with guided_json.

  schemas.py KVASIR [--schemas 500] [--seed 1] [--keep FILE]     FILE: each schema and answer, as JSON lines"""
import argparse
import concurrent.futures
import datetime
import http.client
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile

RUNNING, LONGEST = 16, 384

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvasir"

try:
    import jsonschema
except ImportError:  # a python3 of one's own does not see the distribution's packages
    for python in ("/usr/bin/python3", CACHE / "clients/python/bin/python"):
        if os.access(python, os.X_OK) and not subprocess.run([python, "-c", "import jsonschema"], stderr=subprocess.DEVNULL).returncode:
            os.execv(python, [python, *sys.argv])
    print("skipped: python3 has no jsonschema (tools/setup.sh test installs it)")
    sys.exit(77)
MODEL = pathlib.Path(os.environ.get("KVASIR_MODEL") or CACHE / "models/SmolLM2-135M-Instruct.Q4_1.gguf")
if not MODEL.exists():
    print(f"skipped: no model at {MODEL} (./test fetches it)")
    sys.exit(77)

formats = jsonschema.FormatChecker(formats=["date", "email", "ipv4", "ipv6", "uuid"])
TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"


@formats.checks("time")
def is_time(text):
    return not isinstance(text, str) or re.fullmatch(TIME, text, re.ASCII) is not None


@formats.checks("date-time", raises=ValueError)
def is_date_time(text):
    if not isinstance(text, str):
        return True
    datetime.date.fromisoformat(text[:10])
    return text[10:11] in ("T", "t") and is_time(text[11:])


class Generator:
    """One schema of everything the server promises, sized so that most answers end."""

    def __init__(self, seed):
        self.dice = random.Random(seed)

    def chance(self, percent):
        return self.dice.randrange(100) < percent

    def schema(self):
        shape = self.dice.randrange(30)
        if shape == 0:
            made = self.recursive()
        else:
            made = self.array(2) if shape < 4 else self.scalar() if shape < 6 else self.object(3)
            # References stay inside the schema: a plain one, one to a sibling, and one under the older name.
            made["$defs"] = {"leaf": self.scalar(), "pair": {"type": "object", "properties": {"first": {"$ref": "#/$defs/leaf"},
                             "second": self.scalar()}, "required": ["first", "second"], "additionalProperties": False}}
            made["definitions"] = {"old/er": self.scalar()}
        if self.chance(20):
            made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return made

    def recursive(self):
        node = {"type": "object", "properties": {"value": self.scalar(), "children": {"type": "array", "items": {"$ref": "#/$defs/node"},
                "maxItems": 1}}, "required": ["value"], "additionalProperties": False}
        return {"$ref": "#/$defs/node", "$defs": {"node": node}}

    def any(self, depth):
        simple = [self.scalar, self.scalar, self.enum, self.const, self.reference]
        nested = [lambda: self.object(depth - 1), lambda: self.object(depth - 1), lambda: self.array(depth - 1),
                  lambda: self.any_of(depth - 1), lambda: self.one_of(depth - 1), lambda: self.all_of()]
        return self.dice.choice(simple + nested if depth > 0 else simple)()

    def enum(self):
        values = ["red", "dark blue", 7, -1.5, None, True, "gr\u00fcn \"x\"", [], {"a": 1}, "line\nbreak"]
        return {"enum": self.dice.sample(values, self.dice.randint(1, 5))}

    def const(self):
        return {"const": self.dice.choice(["fixed", 0, False, None, [1, "two"], {"a": [1, 2]}, "\u65e5\u672c \\"])}

    def reference(self):
        return {"$ref": self.dice.choice(["#/$defs/leaf", "#/$defs/pair", "#/definitions/old~1er"])}

    def any_of(self, depth):
        return {"anyOf": [self.any(depth), {"type": "null"}, self.any(0)]}

    def one_of(self, depth):  # of kinds that exclude one another: the library refuses others
        kinds = [{"type": "boolean"}, self.string(), self.number(), self.object(depth)]
        if self.chance(50):  # told apart by a tag, as APIs do
            kinds = [{"type": "object", "properties": {"kind": {"const": tag}, "value": self.scalar()}, "required": ["kind", "value"],
                      "additionalProperties": False} for tag in ("circle", "square", "line")]
        return {"oneOf": self.dice.sample(kinds, 2)}

    def all_of(self):
        return self.dice.choice([
            {"allOf": [self.number(), {"maximum": 5000}]},
            {"allOf": [{"$ref": "#/$defs/pair"}], "description": "as generators of schemas write a reference with a comment"},
            {"allOf": [{"type": "object", "properties": {"id": self.number()}, "required": ["id"]},
                       {"type": "object", "properties": {"name": self.string()}, "required": ["name"]}], "maxProperties": 2}])

    def scalar(self):
        return self.dice.choice([lambda: {"type": "boolean"}, lambda: {"type": "null"}, self.number, self.number, self.string, self.string,
                                 lambda: {"type": self.dice.sample(["string", "integer", "null", "boolean"], 2), "maxLength": 8}])()

    def number(self):
        low = self.dice.randint(-1000, 1000)
        return self.dice.choice([
            {"type": "integer", "minimum": low, "maximum": low + self.dice.randint(0, 500)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 2 + self.dice.randint(0, 50)},
            {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": self.dice.choice([2, 5, 12])},
            {"type": "number", "minimum": -1.5, "maximum": 1000}, {"type": "number", "exclusiveMinimum": 0, "maximum": 0.75},
            {"type": "number", "minimum": low - 0.25, "exclusiveMaximum": low + 0.125}, {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0},
            {"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": 3.5}, {"type": self.dice.choice(["integer", "number"])}])

    def string(self):
        low = self.dice.randrange(5)
        return self.dice.choice([
            {"type": "string", "minLength": low, "maxLength": low + self.dice.randrange(30), "description": "a short text"},
            {"type": "string", "maxLength": 24}, {"type": "string", "maxLength": 60, "title": "A sentence"},
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"}, {"type": "string", "pattern": "^(?:a|bc)*d+\\.\\w$", "maxLength": 20},
            {"type": "string", "pattern": "[0-9]{2}", "maxLength": 12}, {"type": "string", "pattern": "^\\S+@\\S+$", "maxLength": 20},
            {"type": "string", "format": self.dice.choice(["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid"])},
            {"type": "string", "minLength": 3, "maxLength": 3}])

    def array(self, depth):
        low = self.dice.randrange(3)
        made = {"type": "array", "items": self.any(depth), "minItems": low, "maxItems": low + self.dice.randrange(3)}
        if self.chance(25):
            made |= {"prefixItems": [self.scalar(), self.any(0)], "minItems": 2, "maxItems": 3}
            if self.chance(50):
                made |= {"items": False, "maxItems": 2}
        return made

    def object(self, depth):
        names = ["name", "id", "a b", "\u00e9t\u00e9", "x\"y", "tags", "next", "1", "price", "is_open"]
        some = self.dice.sample(names, self.dice.randint(1, 4))
        made = {"type": "object", "properties": {name: self.any(depth) for name in some}, "required": [n for n in some if self.chance(70)]}
        more = self.dice.randrange(20)
        if more < 17:
            made["additionalProperties"] = False
        elif more == 17:  # so many are counted only where all that are named must be there
            made |= {"additionalProperties": self.scalar(), "maxProperties": len(some) + 1, "required": some}
        elif more == 18:
            made |= {"patternProperties": {"^x_[a-z]{1,3}$": self.scalar()}, "additionalProperties": False}
        return made


class Server:
    def __init__(self, kvasir):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([kvasir, "serve", "--model", str(MODEL), "--grpc-port", "-1", "--http-port", "0", "--max-running",
                                         str(RUNNING), "--max-wait", "1h", "--log-format", "json", "--no-access-log"], stderr=self.log)

    def __enter__(self):
        while True:  # `serve` says its ports, or ends
            self.log.seek(0)
            for line in self.log:
                if '"ready"' in line:
                    self.port = json.loads(line)["http_port"]
                    return self
            if self.process.poll() is not None:
                self.log.seek(0)
                sys.exit("kvasir serve ended: " + self.log.read())
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                pass

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def ask(self, path, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = json.loads(answer.read())
        connection.close()
        return answer.status, said


def no_constant(name):
    raise ValueError(f"{name} is not JSON")


TOPICS = ["a city", "a book", "an animal", "a meal", "a train", "a person", "a house", "the weather"]


def one(server, number):
    schema = Generator(number).schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    topic = TOPICS[number % len(TOPICS)]
    body = {"max_tokens": LONGEST, "seed": number, "temperature": [0, 0.7, 0, 1.0][number % 4]}
    if number // 4 % 2:
        path = "/v1/completions"
        body |= {"prompt": f"A short record about {topic}, as JSON:\n", "guided_json": schema}
    else:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": f"Describe {topic} as JSON. Be short."}],
                 "response_format": {"type": "json_schema", "json_schema": {"name": "record", "strict": True, "schema": schema}}}
    status, said = server.ask(path, body)
    record = {"number": number, "schema": schema, "status": status, "tokens": 0}
    if status != 200:
        return record | {"verdict": "refused", "why": said}
    choice = said["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    record |= {"text": text, "tokens": said["usage"]["completion_tokens"]}
    if choice["finish_reason"] == "length":
        return record | {"verdict": "cut"}
    try:
        value = json.loads(text, parse_constant=no_constant)
    except ValueError as error:
        return record | {"verdict": "not JSON", "why": str(error)}
    wrong = [e.message for e in jsonschema.Draft202012Validator(schema, format_checker=formats).iter_errors(value)]
    return record | ({"verdict": "invalid", "why": wrong} if wrong else {"verdict": "valid"})


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("kvasir")
    a.add_argument("--schemas", type=int, default=500)
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--keep")
    o = a.parse_args()
    numbers = range(o.seed * 1000, o.seed * 1000 + o.schemas)
    with Server(o.kvasir) as server, concurrent.futures.ThreadPoolExecutor(2 * RUNNING) as pool:
        records = list(pool.map(lambda n: one(server, n), numbers))
    if o.keep:
        pathlib.Path(o.keep).write_text("".join(json.dumps(r) + "\n" for r in records))
    count = {v: sum(r["verdict"] == v for r in records) for v in ("valid", "cut", "invalid", "not JSON", "refused")}
    print(f"{len(records)} schemas, {sum(r['tokens'] for r in records)} tokens: " + ", ".join(f"{n} {v}" for v, n in count.items()))
    wrong = [r for r in records if r["verdict"] not in ("valid", "cut")]
    for r in wrong[:10]:
        print(json.dumps(r, indent=1))
    if wrong or count["cut"] * 2 > len(records):
        sys.exit("answers that are not valid, or too many that were cut to say")


main()
