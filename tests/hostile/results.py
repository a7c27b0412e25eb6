"""Results of the long tests as JSON, with what is needed to make them again."""
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def save(file, what, **results):
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    processor = re.search(r"model name\s*: (.*)", open("/proc/cpuinfo").read())
    set_by_hand = (f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("KVASIR_") and "KEY" not in k)
    words = [w.replace(f"{ROOT}/", "") for w in sys.argv]
    about = {"what": what, "date": datetime.datetime.now().strftime("%Y-%m-%d %H:%M"), "commit": commit, "command": " ".join([*set_by_hand, *words]),
             "machine": f"{processor.group(1) if processor else 'unknown'}, {os.cpu_count()} processors"}
    pathlib.Path(file).write_text(json.dumps(about | results, indent=1) + "\n")
