#!/usr/bin/env python3
"""A real Prometheus with the configuration of docker/compose.yaml scrapes a server under load; then each query of the
dashboard has data, each rule is evaluated and its unit tests hold: dashboard.py KVASIR
With --schema in place of KVASIR: the dashboard is one by the types that Grafana generates from its own schemas."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

from kvasir_server import FLEET, ROOT, serving, skip

DASHBOARD = os.path.join(ROOT, "docker/grafana/dashboards/kvasir.json")
SECONDS = int(os.environ.get("KVASIR_DASHBOARD_SECONDS", "40"))


def api(port, path, **query):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30) as reply:
        return json.loads(reply.read())["data"]


def free_port():
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def configuration(folder, target):
    """The compose file's own, with the server's place in this test and a shorter interval."""
    shutil.copytree(os.path.join(ROOT, "docker", "prometheus"), folder, dirs_exist_ok=True)
    path = os.path.join(folder, "prometheus.yml")
    text = open(path, encoding="utf-8").read()
    for old, new in (("kvasir:8000", target), ("scrape_interval: 5s", "scrape_interval: 1s"), ("interval: 15s", "interval: 2s")):
        assert old in text, f"{path} no longer has '{old}'"
        text = text.replace(old, new)
    open(path, "w", encoding="utf-8").write(text)
    return path


def promtool(*words):
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def wait_ready(port, process):
    for _ in range(600):
        assert process.poll() is None, "Prometheus ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5).read()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("Prometheus is not ready")


def panels():
    with open(DASHBOARD, encoding="utf-8") as file:
        for panel in json.load(file)["panels"]:
            for target in panel["targets"]:
                yield panel["title"], target["expr"]


def has_data(port, expr, begin, end):
    found = api(port, "query_range", query=expr, start=begin, end=end, step=1)["result"]
    return [v for series in found for _, v in series["values"] if v not in ("NaN", "+Inf", "-Inf")]


def schema():
    judge = os.path.join(FLEET, "bin", "dashboard-schema")
    if not os.path.exists(judge):
        skip("no types of Grafana's (tools/fleet.sh builds dashboard-schema, with Go)")
    with open(DASHBOARD, encoding="utf-8") as file:
        text = file.read()
    # It sees what Grafana would ignore or choke on.
    with tempfile.NamedTemporaryFile("w+", suffix=".json") as broken:
        for old, new in (('"expr"', '"query_text"'), ('"type": "timeseries"', '"type": "graphs"'), ('"schemaVersion"', '"schema"'),
                         ('"decimals": 0', '"decimals": "0"'), ('"fieldConfig"', '"options": {"colour": 1}, "fieldConfig"')):
            assert old in text, f"the dashboard no longer has '{old}'"
            broken.seek(0)
            broken.truncate()
            broken.write(text.replace(old, new))
            broken.flush()
            assert subprocess.run([judge, broken.name], capture_output=True, check=False).returncode == 1, f"{new} for {old} is taken"
    done = subprocess.run([judge, DASHBOARD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout.strip())


def main():
    if sys.argv[1] == "--schema":
        return schema()
    kvasir = sys.argv[1]
    for tool in ("prometheus", "promtool"):
        if not shutil.which(tool):
            skip(f"no {tool} (tools/fleet.sh installs it)")
    promtool("test", "rules", os.path.join(ROOT, "tests/fleet/alerts.yml"))
    with tempfile.TemporaryDirectory() as folder, serving(kvasir, "--kv-memory", "8MiB", "--hosts", "kvasir") as server:
        config = configuration(folder, f"127.0.0.1:{server.http}")
        promtool("check", "config", config)
        port = free_port()
        prometheus = subprocess.Popen(
            ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}",
             "--log.level=warn"])
        try:
            wait_ready(port, prometheus)
            begin = time.time()
            subprocess.run([kvasir, "bench", f"127.0.0.1:{server.grpc}", "--rate", "5", "--duration", f"{SECONDS}s", "--input-len", "16-64",
                            "--output-len", "8-32", "--shared-prefix", "16"], check=True, stdout=subprocess.DEVNULL)
            time.sleep(3)  # one more scrape
            end, empty, asked = time.time(), [], 0
            for title, expr in panels():
                asked += 1
                expr = expr.replace("$__rate_interval", "10s").replace("$instance", ".*")
                if not has_data(port, expr, begin, end):
                    empty.append(f"{title}: {expr}")
            assert not empty, "no data: " + "; ".join(empty)
            rules = [r for g in api(port, "rules")["groups"] for r in g["rules"]]
            assert rules and all(r["health"] == "ok" for r in rules), rules
            firing = [r["name"] for r in rules if r["state"] == "firing"]
            assert not firing, f"a healthy server under load sets off {firing}"
            print(f"{asked} queries of the dashboard have data, {len(rules)} rules are evaluated and quiet")
        finally:
            prometheus.terminate()
            prometheus.wait(30)


main()
