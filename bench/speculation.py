#!/usr/bin/env python3
"""What speculation by prompt lookup (`--max-draft`) saves and costs, with and without it by turns.

    bench/speculation.py build/release/kvasir MODEL.gguf
    bench/speculation.py KVASIR MODEL.gguf --device cuda
    bench/speculation.py KVASIR MODEL.gguf --draft-model SMALLER.gguf
    bench/speculation.py KVASIR dummy:llama-3.1-8b,type=bf16 --device cuda --traces 1.0,.8,.5,0
    bench/speculation.py KVASIR dummy:llama-3.1-8b,type=bf16 --device cuda --random-head

Workloads, made of texts of this repository: "summary" asks to say again what a page says, "edit" to write a function
again with a name changed, "random" draws at temperature 1.5, where nothing repeats. Answers must be the same bytes; on a
GPU, where a near tie may fall otherwise among other rows, how many are is printed.

--draft-model compares drafts with that model with those without it (prompt lookup alone), so that what is shown is the
draft model's own share.

--traces is for weights that say nothing: each prompt is answered once, and its answer, with some tokens exchanged, is the
prediction of the next rounds; each of its tokens stays what it was with the probability given.

--random-head is what an EAGLE-3 head costs that is never right: one of random weights of the shape of Llama-3.1-8B's (a
vocabulary of 32,000), beside the same dummy without it. Shown are what a draft's token takes alone, as the server has
measured it, and how soon the head is asked no more.
"""
import argparse
import array
import http.client
import json
import os
import pathlib
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench/gpu"))
from served import command, driver, start  # noqa: E402


def prompts(kind, count):
    rng = random.Random(7)
    if kind == "random":
        words = [w for w in re.findall(r"[a-z]+", (ROOT / "LICENSE").read_text()) if len(w) > 2]
        return [" ".join(rng.choices(words, k=120)) for _ in range(count)]
    if kind == "summary":
        pages = [p for f in ("docs/operations.md", "docs/design.md", "docs/troubleshooting.md")
                 for p in re.split(r"\n\s*\n|\n- ", (ROOT / f).read_text()) if 300 < len(p) < 900]
        ask = "Text:\n{}\n\nThe same text once more, word for word:\n"
    else:
        pages = [p for f in ("scheduler/admission.cc", "scheduler/plan_step.cc", "engine/batch_builder.cc")
                 for p in re.split(r"\n}\n", (ROOT / f).read_text()) if 300 < len(p) < 1200]
        ask = "```cpp\n{}\n}}\n```\nThe same function with `state` renamed to `self`:\n```cpp\n"
    return [ask.format(pages[i % len(pages)].strip()) for i in range(count)]


def run(a, file, batch, more, temperature):
    out = subprocess.run([a.kvasir, "generate", "--model", a.model, "--device", a.device, "--file", file, "--json",
                          "--max-tokens", str(a.tokens), "--max-running", str(batch), "--threads", str(a.threads),
                          "--temperature", str(temperature), "--max-tokens-per-step", "1024", *more],
                         capture_output=True, text=True, check=True)
    rate = float(re.search(r"([\d.]+) output tokens a second", out.stderr).group(1))
    drafts = re.search(r"(\d+) of (\d+) draft tokens", out.stderr)
    texts = [json.loads(line).get("text") for line in out.stdout.splitlines()]
    return rate, texts, [int(n) for n in drafts.groups()] if drafts else [0, 0]


def by_workload(a, figures):
    """`kvasir generate` of real texts."""
    print("workload, batch | tokens/s without | with | ratio | draft tokens accepted | same answers")
    ways = {0: ["--max-draft", "8" if a.draft_model else "0"], 8: ["--max-draft", "8"]}
    if a.draft_model:
        ways[8] += ["--draft-model", a.draft_model]
    for kind in ("summary", "edit", "random"):
        for batch in map(int, a.batches.split(",")):
            with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as f:
                for text in prompts(kind, 6 if batch == 1 else 2 * batch):
                    f.write(json.dumps({"prompt": text}) + "\n")
                f.flush()
                rates, drafts = {0: [], 8: []}, [0, 0]
                for _ in range(a.rounds):
                    said = {}
                    for draft in rates:
                        rate, said[draft], came = run(a, f.name, batch, ways[draft], 1.5 if kind == "random" else 0)
                        rates[draft].append(rate)
                        drafts = came if draft else drafts
                    same = sum(x == y for x, y in zip(said[0], said[8]))
                    if a.device == "cpu" and same < len(said[0]):
                        sys.exit(f"{kind}, batch {batch}: the answers differ")
            note(figures, f"{kind}, {batch}", rates[0], rates[8], drafts, f"{same} of {len(said[0])}")


def note(figures, name, without, with_, drafts, same):
    ratio = statistics.median(w / o for o, w in zip(without, with_))
    figures[name] = {"without": without, "with": with_, "ratio": round(ratio, 3), "accepted": drafts[0], "drafted": drafts[1],
                     "same": same}
    print(f"{name} | {statistics.median(without):.1f} | {statistics.median(with_):.1f} | {ratio:.2f} | "
          f"{drafts[0]} of {drafts[1]} | {same}", flush=True)


def ask_all(port, bodies):
    """All at once; the answers' tokens, the draft tokens accepted and rejected, and output tokens a second."""
    answers = [None] * len(bodies)

    def ask(i):
        c = http.client.HTTPConnection("127.0.0.1", port)
        c.request("POST", "/v1/completions", json.dumps(bodies[i]), {"Content-Type": "application/json"})
        answers[i] = json.loads(c.getresponse().read())

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    began = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    took = time.perf_counter() - began
    tokens = [answer["choices"][0]["token_ids"] for answer in answers]
    details = [answer["usage"]["completion_tokens_details"] for answer in answers]
    accepted = sum(d["accepted_prediction_tokens"] for d in details)
    return tokens, [accepted, accepted + sum(d["rejected_prediction_tokens"] for d in details)], sum(map(len, tokens)) / took


def by_trace(a, figures):
    """Recorded answers as predictions, over HTTP."""
    rng = random.Random(3)
    print("acceptance of the trace, batch | tokens/s without | with | ratio | draft tokens accepted | same answers")
    for batch in map(int, a.batches.split(",")):
        servers = {}
        for draft in (0, 8):
            process, log = start(a.kvasir, a.model, "--device", a.device, "--no-access-log", "--max-draft", str(draft),
                                 "--max-running", str(batch), "--no-prefix-cache", "--max-wait", "1h", *a.serve.split())
            servers[draft] = process, log[-1]["http_port"]
            threading.Thread(target=process.stderr.read, daemon=True).start()
        # More than fit, so that the batch stays full while answers that come faster leave.
        bodies = [{"prompt": [rng.randrange(3, 250) for _ in range(128)], "max_tokens": a.tokens, "temperature": 0,
                   "ignore_eos": True, "return_token_ids": True} for _ in range(4 * batch)]
        for _, port in servers.values():
            recorded = ask_all(port, bodies)[0]
        for share in map(float, a.traces.split(",")):
            # A wrong token ends the copy; three right ones behind it find the place again.
            for body, answer in zip(bodies, recorded):
                body["prediction"] = {"type": "content",
                                      "content": [t if rng.random() < share else t ^ 1 for t in answer]}
            rates = {0: [], 8: []}
            for _ in range(a.rounds):
                for draft, (_, port) in servers.items():
                    said, came, rate = ask_all(port, bodies)
                    rates[draft].append(rate)
                    if draft:
                        drafts, same = came, sum(x == y for x, y in zip(said, recorded))
            note(figures, f"{share}, {batch}", rates[0], rates[8], drafts, f"{same} of {len(bodies)}")
        for process, _ in servers.values():
            process.terminate()
            process.wait()


# Of Llama-3.1-8B.
HIDDEN, FFN, QUERIES, KEYS, VOCAB, DRAWN = 4096, 14336, 32, 8, 128256, 32000


def write_head(folder):
    """An EAGLE-3 folder of random weights."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
              "intermediate_size": FFN, "num_hidden_layers": 1, "num_attention_heads": QUERIES, "num_key_value_heads": KEYS,
              "head_dim": 128, "vocab_size": VOCAB, "draft_vocab_size": DRAWN, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
              "max_position_embeddings": 16384, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    at = "midlayer."
    shapes = {"fc": (HIDDEN, 3 * HIDDEN), "norm": (HIDDEN,), "lm_head": (DRAWN, HIDDEN), at + "hidden_norm": (HIDDEN,),
              at + "input_layernorm": (HIDDEN,), at + "post_attention_layernorm": (HIDDEN,),
              at + "self_attn.q_proj": (QUERIES * 128, 2 * HIDDEN), at + "self_attn.k_proj": (KEYS * 128, 2 * HIDDEN),
              at + "self_attn.v_proj": (KEYS * 128, 2 * HIDDEN), at + "self_attn.o_proj": (HIDDEN, QUERIES * 128),
              at + "mlp.gate_proj": (FFN, HIDDEN), at + "mlp.up_proj": (FFN, HIDDEN), at + "mlp.down_proj": (HIDDEN, FFN)}
    rng = random.Random(1)
    some = array.array("f", (rng.gauss(0, .02) for _ in range(HIDDEN * 32 + 1)))  # again and again
    noise = b"".join(some.tobytes()[4 * i + 2:4 * i + 4] for i in range(len(some)))
    header, end = {"d2t": {"dtype": "I64", "shape": [DRAWN], "data_offsets": [0, 8 * DRAWN]}}, 8 * DRAWN
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name + ".weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + 2 * count]}
        end += 2 * count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + struct.pack(f"<{DRAWN}q", *(i * 3 for i in range(DRAWN))))
        for name, shape in shapes.items():
            left = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            while left > 0:
                left -= f.write(noise[:left])


def by_random_head(a, figures):
    """`kvasir generate` of what repeats nothing, round by round: the first ones ask the head."""
    print("batch | tokens/s without, by round | with | the last ones' ratio | a draft's token alone, us | accepted, by round")
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w", suffix=".jsonl") as f:
        write_head(pathlib.Path(folder))
        for batch in map(int, a.batches.split(",")):
            f.seek(0), f.truncate()
            for text in prompts("random", batch):
                f.write(json.dumps({"prompt": text}) + "\n")
            f.flush()
            rates, drafts = [], []
            for head in ([], ["--draft-model", folder]):
                out = subprocess.run([a.kvasir, "generate", "--model", a.model, "--device", a.device, "--file", f.name, "--json",
                                      "--max-tokens", str(a.tokens), "--ignore-eos", "--temperature", "1.5",
                                      "--max-running", str(batch), "--rounds", str(a.rounds), "--no-prefix-cache",
                                      "--log-level", "info", "--log-format", "json", *a.serve.split(), *head],
                                     capture_output=True, text=True, check=True).stderr
                rates.append([float(r) for r in re.findall(r"([\d.]+) output tokens a second", out)])
                drafts.append(re.findall(r"(\d+ of \d+) draft tokens", out))
            token_us = float(re.search(r'"token_us":([\d.e+]+)', out).group(1))
            ratio = rates[1][-1] / rates[0][-1]
            figures[batch] = {"without": rates[0], "with": rates[1], "last_ratio": round(ratio, 3), "token_us": round(token_us, 1),
                              "accepted": drafts[1], "accepted_without": drafts[0]}
            print(f"{batch} | {rates[0]} | {rates[1]} | {ratio:.3f} | {token_us:.1f} | {', '.join(drafts[1])}", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kvasir")
    p.add_argument("model")
    p.add_argument("--device", default="cpu")
    p.add_argument("--batches", default="1,64")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--traces", default="")
    p.add_argument("--draft-model", default="", help="with it beside without it, instead of drafts beside none")
    p.add_argument("--random-head", action="store_true", help="an EAGLE-3 head of random weights beside none")
    p.add_argument("--serve", default="", help="more options of kvasir, for --traces and --random-head")
    p.add_argument("--commit", default="", help="what was built, for the record")
    p.add_argument("--out", default="")
    a = p.parse_args()
    if a.traces and a.draft_model:
        p.error("--traces are predictions; --draft-model is measured on the workloads")
    figures = {}
    (by_random_head if a.random_head else by_trace if a.traces else by_workload)(a, figures)
    if a.out:
        record = {"commit": a.commit, "command": command("bench/speculation.py"), "threads": a.threads, "figures": figures}
        if a.device == "cuda":
            record["driver"] = driver()
        pathlib.Path(a.out).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
