#!/usr/bin/env python3
"""The table "What bounds what" of docs/operations.md: every line names tests or files, and options, that exist."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def table():
    text = (ROOT / "docs/operations.md").read_text()
    section = re.search(r"^## What bounds what\n(.*?)(?=^## )", text, re.M | re.S).group(1)
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return rows[2:], section


def main():
    sources = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("*_test.cc"))
    tests = {f"{suite}.{name}" for suite, name in re.findall(r"^TEST(?:_F|_P)?\((\w+), (\w+)\)", sources, re.M)}
    suites = {t.split(".")[0] for t in tests}
    files = {p.name for folder in ("tests", "model", "server", "engine") for p in (ROOT / folder).rglob("*.*")}
    options = {o.replace("-", "_") for o in re.findall(r"^  --([a-z-]+)", (ROOT / "docs/configuration.md").read_text(), re.M)}
    wrong = []
    rows, section = table()
    for row in rows:
        cells = [c.strip() for c in row.strip("|").split("|")]
        if len(cells) != 3:
            wrong.append(f"not three columns: {row}")
            continue
        named = re.findall(r"`([^`]+)`", cells[2])
        if not named:
            wrong.append(f"neither a place nor a test is named: {cells[0]}")
        for n in named:
            here = n in tests or n in suites or ((ROOT / n).exists() if "/" in n else n in files)
            if not here:
                wrong.append(f"there is neither a test nor a file {n}: {cells[0]}")
        names = re.findall(r"`([a-z]+_[a-z_]+)`", cells[1])
        wrong += [f"there is no option {n}: {cells[0]}" for n in names if n not in options and n != "requests_per_minute"]
    wrong += [f"there is no test {n}" for n in re.findall(r"`(\w+\.\w+)`", section.split("|")[-1]) if n not in tests]
    print("\n".join(wrong) or f"{len(rows)} lines, all of them tested")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
