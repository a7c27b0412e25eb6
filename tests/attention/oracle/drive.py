"""Random stored cases through `kvasir op`, judged by an oracle written from the contract alone.

  drive.py KVASIR [--cases 150] [--seed 1] [--backend reference,cpu] [--kind KIND] [--jobs 1] [--keep FOLDER] [--simd avx2]
      KEEP: wrong cases stay there, each with its case.json"""
import argparse
import collections
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

try:
    import numpy as np
except ImportError:  # a python3 of one's own does not see the distribution's packages
    if sys.executable != "/usr/bin/python3" and not subprocess.run(["/usr/bin/python3", "-c", "import numpy"], stderr=subprocess.DEVNULL).returncode:
        os.execv("/usr/bin/python3", ["/usr/bin/python3", *sys.argv])
    print("skipped: python3 has no numpy (tools/setup.sh test installs it)")
    sys.exit(77)

import cases
from compare import compare
from oracle import Oracle


def run_case(o, kind, seed, work):
    """Sentences about what is wrong."""
    case, tensors = cases.build(kind, seed)
    folder, wrong = work / f"{kind.replace(' ', '_')}_{seed}", []
    cases.write(folder, case, tensors)
    for backend in o.backend.split(","):
        out = work / f"{folder.name}.{backend}"
        done = subprocess.run([o.kvasir, "op", folder, "--backend", backend, "--out", out], capture_output=True, text=True)
        if o.isa and "KVASIR_ISA is" in done.stderr:
            return kind, seed, None
        if done.returncode:
            wrong.append(f"{backend}: exit code {done.returncode}: {done.stderr.strip()}")
            continue
        result = {f.stem: np.load(f) for f in out.iterdir()}
        wrong += [f"{backend}: {x}" for x in compare(Oracle(case, tensors), result)]
        shutil.rmtree(out)
    if wrong and o.keep:
        shutil.copytree(folder, pathlib.Path(o.keep) / folder.name, dirs_exist_ok=True)
    shutil.rmtree(folder)
    return kind, seed, wrong


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kvasir")
    p.add_argument("--cases", type=int, default=150)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--backend", default="reference,cpu")
    p.add_argument("--kind", choices=cases.KINDS)
    p.add_argument("--jobs", type=int, default=1)
    p.add_argument("--keep")
    p.add_argument("--isa", help="KVASIR_ISA of the processes; skipped where this processor has it not")
    o = p.parse_args()
    if o.isa:
        os.environ["KVASIR_ISA"] = o.isa
    kinds = [o.kind] if o.kind else cases.KINDS
    todo = [(kinds[i % len(kinds)], o.seed * 1000000 + i) for i in range(o.cases)]
    ran, bad, began = collections.Counter(), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as work, concurrent.futures.ProcessPoolExecutor(o.jobs) as pool:
        for kind, seed, wrong in pool.map(run_case, *zip(*[(o, *t, pathlib.Path(work)) for t in todo])):
            if wrong is None:
                print(f"skipped: this processor has no {o.isa}")
                return 77
            ran[kind] += 1
            bad += bool(wrong)
            for line in wrong:
                print(f"WRONG {kind} {seed}: {line}", flush=True)
    print(f"{o.cases} cases, {bad} wrong, {time.monotonic() - began:.0f} s; " + ", ".join(f"{k} {n}" for k, n in ran.items()))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
