"""From bench/results to what README and docs/measured show: tables between their marks, and one SVG with the curves."""
import html
import json
import math
import pathlib
import statistics

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
BEGIN, END = "<!-- bench: written by bench/all -->", "<!-- /bench -->"
OURS, THEIRS = "#2563eb", "#d97706"
LEFT, TOP, WIDTH, HEIGHT, STEP = 58, 40, 300, 190, 390

HELD = {"avx2": "AVX2", "avx512": "AVX-512 without VBMI and AMX", "avx512_vbmi": "AVX-512 without AMX"}


def load(name):
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def text(x, y, words, anchor="middle", more=""):
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'{more}>{html.escape(words)}</text>"


def frame(left, title, ticks, at):
    s = text(left, 22, title, "start", " class='t'")
    for v in ticks:
        s += f"<line class='g' x1='{left}' x2='{left + WIDTH}' y1='{at(v):.1f}' y2='{at(v):.1f}'/>"
        s += text(left - 6, at(v) + 4, f"{v:g}", "end")
    return s


def bars(left, title, rows):
    """rows: (name, ours, theirs)"""
    most = max(max(r[1:]) for r in rows) * 1.12
    step = 10 ** math.floor(math.log10(most / 2))
    step *= next(m for m in (1, 2, 5, 10) if most / (step * m) <= 6)
    at = lambda v: TOP + HEIGHT * (1 - v / most)
    s = frame(left, title, [i * step for i in range(int(most / step) + 1)], at)
    for i, (name, ours, theirs) in enumerate(rows):
        middle = left + WIDTH * (i + 0.5) / len(rows)
        for x, v, colour in ((middle - 52, ours, OURS), (middle + 4, theirs, THEIRS)):
            s += f"<rect x='{x:.1f}' y='{at(v):.1f}' width='48' height='{TOP + HEIGHT - at(v):.1f}' fill='{colour}'/>"
            s += text(x + 24, at(v) - 5, f"{v:.0f}")
        s += text(middle, TOP + HEIGHT + 18, name)
    return s


def curves(left, title, rows):
    """rows: (colour, percentiles 0 to 100), milliseconds on a logarithmic axis"""
    values = [v for _, curve in rows for v in curve if v > 0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    at = lambda v: TOP + HEIGHT * (1 - (math.log10(max(v, 10**low)) - low) / max(1, high - low))
    s = frame(left, title, [10**e for e in range(low, high + 1)], at)
    for colour, curve in rows:
        points = " ".join(f"{left + WIDTH * p / 100:.1f},{at(v):.1f}" for p, v in enumerate(curve))
        s += f"<polyline fill='none' stroke='{colour}' stroke-width='2' points='{points}'/>"
    for p in (0, 25, 50, 75, 99):
        s += text(left + WIDTH * p / 100, TOP + HEIGHT + 18, f"p{p}")
    return s


def middle_run(rounds, engine, load_name):
    """The round whose p99 is the median one."""
    runs = sorted((r[engine][load_name] for r in rounds), key=lambda run: run["itl_ms"]["p99"])
    return runs[(len(runs) - 1) // 2]


def serve_svg(result):
    panels = [bars(LEFT, "32 clients, 16 running: output tokens/s",
                   [(name.replace("SmolLM2-135M-Instruct.", ""), *(m["median"]["closed"]["output_tokens_per_second"][e]
                                                                   for e in ("kvasir", "llama.cpp")))
                    for name, m in result["models"].items()])]
    for name, m in result["models"].items():
        panels.append(curves(LEFT + STEP * len(panels), f"{name.split('.')[-1]}, 0.6 requests/s: ms between tokens",
                             [(c, middle_run(m["rounds"], e, "open")["itl_percentiles_ms"])
                              for c, e in ((OURS, "kvasir"), (THEIRS, "llama.cpp"))]))
    width = STEP * len(panels)
    s = (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} 280' width='{width}'>"
         "<style>text{font:11px system-ui,sans-serif;fill:#555}.t{font-size:13px;font-weight:600;fill:#111}"
         ".g{stroke:#e5e5e5}</style>"
         f"<rect width='{width}' height='280' fill='#fff'/>" + "".join(panels))
    for x, colour, name in ((LEFT, OURS, "kvasir serve"), (LEFT + 110, THEIRS, "llama-server")):
        s += f"<rect x='{x}' y='258' width='10' height='10' fill='{colour}'/>" + text(x + 15, 267, name, "start")
    return s + "</svg>\n"


def serve_rows(result):
    for name, m in result["models"].items():
        name = name.replace("SmolLM2-135M-Instruct.", "")
        for load_name, key, words in (("closed", "output_tokens_per_second", "32 clients, output tokens/s"),
                                      ("closed", "itl_ms p99", "32 clients, p99 between tokens, ms"),
                                      ("open", "itl_ms p99", "0.6 requests/s, p99 between tokens, ms"),
                                      ("open", "ttft_ms p50", "0.6 requests/s, p50 to first token, ms")):
            v = m["median"][load_name][key]
            yield f"{name}: {words}", v["kvasir"], v["llama.cpp"]


def cpu_rows():
    words = {"prefill512": "prefill of 512", "decode1": "decode, batch 1", "decode16": "decode, batch 16"}
    for path in sorted(RESULTS.glob("cpu_vs_llamacpp-*.json")):
        result = json.loads(path.read_text())
        threads = result["runs"][0]["threads"]
        name = result["model"].removesuffix(".gguf").split(".")[-1]
        held = f", both limited to {HELD.get(result['held_to'], result['held_to'])}" if result.get("held_to") else ""
        for key, word in words.items():
            rate = {e: statistics.median(r[key] for r in result["runs"] if r["engine"] == e) for e in ("kvasir", "llama.cpp")}
            yield f"{name}, {threads} thread{'s' * (threads > 1)}{held}: {word}, tokens/s", rate["kvasir"], rate["llama.cpp"]


def cpu_load():
    return max(json.loads(p.read_text())["load_average"] for p in RESULTS.glob("cpu_vs_llamacpp-*.json"))


def line(words, *values):
    digits = 0 if max(values) >= 100 else 1 if max(values) >= 10 else 2
    ours, theirs = values
    return f"| {words} | {ours:,.{digits}f} | {theirs:,.{digits}f} | {ours / theirs:.2f} |"


def table(rows, peer="llama.cpp"):
    return [f"| | kvasir | {peer} | ratio |", "| --- | ---: | ---: | ---: |", *(line(*row) for row in rows)]


def six_rows():
    """What README shows, each beside its peer in one run (vLLM: on another such card)."""
    if result := load("serve_vs_llamacpp.json"):
        rows = {words: (ours, theirs) for words, ours, theirs in serve_rows(result)}
        yield ("32 clients, output tokens/s (llama-server, Q4_1)", *rows["Q4_1: 32 clients, output tokens/s"])
        yield ("0.6 requests/s, p99 between tokens, ms (llama-server, Q4_0)", *rows["Q4_0: 0.6 requests/s, p99 between tokens, ms"])
    rows = {words: (ours, theirs) for words, ours, theirs in cpu_rows()}
    for key, name in (("prefill of 512", "prefill of 512, tokens/s"), ("decode, batch 1", "decode, one sequence, tokens/s")):
        if values := rows.get(f"Q4_0, 2 threads: {key}, tokens/s"):
            yield (f"{name} (llama.cpp, Q4_0, 2 threads)", *values)
    if result := load("gpu-whole-model.json"):
        theirs = result["vllm_0.25.1"]
        yield ("H200, Llama-3.1-8B's shape, bf16: 64 decodes, ms a step (vLLM 0.25.1)", result["decode"]["64"]["ms"], theirs["decode_ms"]["64"])
        yield ("H200, the same: 128 in, 128 out, output tokens/s (vLLM 0.25.1)", result["offline"]["128x128"], theirs["offline"]["128x128"])


def between(path, begin, end, words):
    """Puts `words` between the two marks of a page."""
    page = (ROOT / path).read_text()
    if begin not in page or end not in page:
        raise SystemExit(f"{path} has lost its marks {begin} and {end}")
    head, rest = page.split(begin, 1)
    (ROOT / path).write_text(head + begin + words + end + rest.split(end, 1)[1])


def everything():
    if result := load("serve_vs_llamacpp.json"):
        (RESULTS / "serve_vs_llamacpp.svg").write_text(serve_svg(result))
        lines = [f"`kvasir serve` beside `llama-server` on the same file, by turns in one run ({result['machine']}; "
                 f"{result['rounds']} round{'s' * (result['rounds'] > 1)}, medians; SmolLM2-135M, 128 words in, 128 tokens "
                 f"out; load average before {result['load_average_before']:.0f}):", "",
                 "![tokens a second and time between tokens](../../bench/results/serve_vs_llamacpp.svg)", "",
                 *table(serve_rows(result))]
        between("docs/measured/serving.md", BEGIN, END, "\n" + "\n".join(lines) + "\n")
    if rows := list(cpu_rows()):
        lines = [f"By turns, in one process each (load average meanwhile up to {cpu_load():.1f}; one thread by processor time, more by the "
                 "clock); SmolLM2-135M:", "", *table(rows)]
        between("docs/measured/cpu.md", BEGIN, END, "\n" + "\n".join(lines) + "\n")
    between("README.md", BEGIN, END, "\n" + "\n".join(table(six_rows(), "peer")) + "\n")
    if result := load("binary.json"):
        between("README.md", "<!-- binary -->", "<!-- /binary -->", f"{result['stripped_bytes'] / 1e6:.0f} MB")
    print("wrote the tables of README.md and docs/measured, and bench/results/serve_vs_llamacpp.svg")
