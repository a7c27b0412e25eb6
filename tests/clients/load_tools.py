#!/usr/bin/env python3
"""Load generators of others, unmodified, a few requests each: load_tools.py aiperf|guidellm|genai_perf. Every request must be
answered, and the tokens they count be the ones that were asked for. Each has a folder of its own (tools/clients.sh), and a
tokenizer made from the served model's file."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import tokenizer_folder

CLIENTS, URL, MODEL = pathlib.Path(os.environ["KVASIR_CLIENTS"]), os.environ["KVASIR_HTTP"], os.environ["KVASIR_NAME"]
REQUESTS, PROMPT, ANSWER = 4, 32, 8


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def program(name, folder=None):
    path = CLIENTS / (folder or name) / "bin" / name
    if not path.exists():
        skip(f"{name} is not installed (tools/clients.sh)")
    return str(path)


def run(command, work):
    alone = {"HOME": str(work), "NO_COLOR": "1"}  # no HF_HUB_OFFLINE: with it aiperf takes a folder for the name of a repository
    path = f"{pathlib.Path(command[0]).parent}:{os.environ['PATH']}"
    done = subprocess.run(command, cwd=work, env=os.environ | alone | {"PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


def found(work, pattern):
    files = sorted(work.rglob(pattern))
    assert files, f"no {pattern} in {sorted(p.name for p in work.rglob('*') if p.is_file())}"
    return json.loads(files[0].read_text())


def aiperf(work, tokenizer):
    run([program("aiperf"), "profile", "--model", MODEL, "--url", URL, "--endpoint-type", "chat", "--streaming", "--tokenizer", tokenizer,
         "--request-count", str(REQUESTS), "--concurrency", "2", "--isl", str(PROMPT), "--osl", str(ANSWER), "--artifact-dir", "out",
         "--extra-inputs", "ignore_eos:true", "--ui", "none"], work)
    said = found(work, "profile_export_aiperf.json")
    assert said["request_count"]["avg"] == REQUESTS and not said.get("error_request_count", {}).get("avg"), said
    assert said["output_sequence_length"]["avg"] > 0 and said["time_to_first_token"]["avg"] > 0, said
    return f"{REQUESTS} answers, first token after {said['time_to_first_token']['avg']:.0f} ms"


def guidellm(work, tokenizer):
    run([program("guidellm"), "run", "--backend", f"kind=openai_http,target={URL},model={MODEL}", "--profile", "kind=synchronous",
         "--constraint", f"kind=max_requests,count={REQUESTS}", "--tokenizer", f"kind=hf_auto,model={tokenizer}",
         "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}", "--output", "kind=json,path=out.json",
         "--disable-console-interactive"], work)
    said = found(work, "out.json")["benchmarks"][0]
    totals, tokens = said["metrics"]["request_totals"], said["metrics"]["output_token_count"]["successful"]
    assert totals["successful"] == REQUESTS and not totals["errored"], totals
    assert tokens["min"] == tokens["max"] == ANSWER, tokens
    return f"{REQUESTS} answers of {ANSWER} tokens"


def genai_perf(work, tokenizer):
    path = program("genai-perf", "genai_perf")
    if not (pathlib.Path(path).parent / "perf_analyzer").exists():
        skip("genai-perf runs perf_analyzer, whose packages want glibc 2.38 or newer")
    run([path, "profile", "-m", MODEL, "--service-kind", "openai", "--endpoint-type", "chat", "--streaming", "-u", URL, "--tokenizer",
         tokenizer, "--request-count", str(REQUESTS), "--concurrency", "2", "--synthetic-input-tokens-mean", str(PROMPT),
         "--output-tokens-mean", str(ANSWER), "--artifact-dir", "out"], work)
    said = found(work, "*_genai_perf.json")
    assert said["request_count"]["avg"] == REQUESTS, said
    return f"{REQUESTS} answers"


def main():
    name = sys.argv[1]
    model = os.environ["KVASIR_MODEL_FILE"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = pathlib.Path(folder)
        (work / "tokenizer").mkdir()
        tokenizer_folder.write(model, work / "tokenizer")
        print(f"{name}:", {"aiperf": aiperf, "guidellm": guidellm, "genai_perf": genai_perf}[name](work, str(work / "tokenizer")))


main()
