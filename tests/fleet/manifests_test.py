#!/usr/bin/env python3
"""Manifests, chart and compose file against the schemas of those who read them, and against each other:
manifests_test.py KVASIR"""
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile

from kvasir_server import FLEET, ROOT, skip

try:
    import jsonschema
    import kubernetes_validate
    import yaml
except ImportError as missing:
    python = os.path.join(FLEET, "python", "bin", "python3")
    if os.path.exists(python) and sys.executable != python and "VIRTUAL_ENV" not in os.environ:
        os.execve(python, [python, *sys.argv], {**os.environ, "VIRTUAL_ENV": os.path.join(FLEET, "python")})
    skip(f"{missing} (tools/fleet.sh installs it)")

HELM, KUBECTL = (os.path.join(FLEET, "bin", name) for name in ("helm", "kubectl"))
CHART = os.path.join(ROOT, "deploy/helm/kvasir")
PLAIN = os.path.join(ROOT, "deploy/kubernetes")
SECRETS = {"auth": {"keysSecret": "k", "metricsKey": {"secret": "m"}}, "tls": {"secret": "t"}}
# name, values: what each asks the chart for.
CASES = {
    "defaults": {},
    "keys and TLS": SECRETS,
    "mutual TLS": {**SECRETS, "tls": {"secret": "t", "clientCa": True}},
    "GPUs and an own volume": {"gpus": 2, "cache": {"kind": "existing", "existingClaim": "c", "readOnly": True}, "model": "/models/m.gguf",
                               "nodeSelector": {"gpu": "yes"}, "tolerations": [{"operator": "Exists"}], "runtimeClassName": "nvidia",
                               "priorityClassName": "high", "affinity": {"nodeAffinity": {}}},
    "HPA and monitoring": {"autoscaling": {"kind": "hpa"}, "monitoring": {"podMonitor": True, "rules": True, "dashboard": True,
                                                                       "labels": {"release": "p"}}, **SECRETS},
    "KEDA on many nodes": {"autoscaling": {"kind": "keda", "max": 16}, "cache": {"accessMode": "ReadWriteMany", "storageClass": "nfs"},
                           "config": {"max_running": 128, "policy": "fair"}, "huggingFaceToken": {"secret": "hf"},
                           "hosts": ["llm.example.org"], "podAnnotations": {"a": "b"}, "extraEnv": [{"name": "A", "value": "b"}]},
    "little": {"cache": {"kind": "ephemeral"}, "podDisruptionBudget": {"enabled": False}, "networkPolicy": {"enabled": False},
               "service": {"type": "LoadBalancer", "annotations": {"a": "b"}}, "image": {"digest": "sha256:" + "0" * 64}},
}
REFUSED = {
    "a word that is none": {"replica": 2},
    "what the chart decides": {"config": {"host": "0.0.0.0"}},
    "no model": {"model": ""},
    "a tag for a digest": {"image": {"digest": "latest"}},
    "a volume without a name": {"cache": {"kind": "existing"}},
    "more at least than at most": {"autoscaling": {"kind": "hpa", "min": 9}},
}


def definitions():
    """Schemas of the kinds that others define, by (apiVersion, kind); unknown fields are refused."""
    def closed(schema):
        if isinstance(schema, dict):
            if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
                schema.setdefault("additionalProperties", False)
            if schema.pop("x-kubernetes-int-or-string", False):
                schema.pop("type", None)
            if "(?i)" in str(schema.get("pattern", "")):  # Go's, and nobody else's
                schema.pop("pattern")
            return {k: closed(v) for k, v in schema.items()}
        return [closed(v) for v in schema] if isinstance(schema, list) else schema

    out = {}
    for path in glob.glob(os.path.join(FLEET, "crds", "*.yaml")):
        with open(path, encoding="utf-8") as file:
            crd = yaml.safe_load(file)["spec"]
        for version in crd["versions"]:
            schema = closed(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            out[f"{crd['group']}/{version['name']}", crd["names"]["kind"]] = schema
    return out


def judge(documents, known, where):
    for one in documents:
        what = f"{where}: {one['kind']} {one.get('metadata', {}).get('name')}"
        schema = known.get((one["apiVersion"], one["kind"]))
        try:
            if schema:
                jsonschema.validate(one, schema)
            else:
                kubernetes_validate.validate(one, "1.37", strict=True)
        except Exception as wrong:  # pylint: disable=broad-except
            raise AssertionError(f"{what}: {wrong}") from wrong


def load(path):
    with open(path, encoding="utf-8") as file:
        return [d for d in yaml.safe_load_all(file) if d]


def helm(values, folder, space="kvasir"):
    path = os.path.join(folder, "values.yaml")
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(values, file)
    return subprocess.run([HELM, "template", "kvasir", CHART, "-n", space, "-f", path], capture_output=True, text=True, check=False,
                          env={**os.environ, "HELM_CACHE_HOME": folder, "HELM_CONFIG_HOME": folder, "HELM_DATA_HOME": folder})


def rendered(values, folder, space="kvasir"):
    done = helm(values, folder, space)
    assert done.returncode == 0, done.stderr
    return [d for d in yaml.safe_load_all(done.stdout) if d]


def strip_json_comments(text):
    return "\n".join(line.split("//")[0] if line.lstrip().startswith("//") else line for line in text.splitlines())


def kustomized(folder, gpu=False):
    """What `kubectl apply -k deploy/kubernetes` would send, as it is or with the patch for a GPU."""
    copy = os.path.join(folder, "gpu" if gpu else "plain")
    shutil.copytree(PLAIN, copy)
    if gpu:
        with open(os.path.join(copy, "kustomization.yaml"), "a", encoding="utf-8") as file:
            file.write("patches: [{path: gpu.yaml}]\n")
    done = subprocess.run([KUBECTL, "kustomize", copy], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [d for d in yaml.safe_load_all(done.stdout) if d]


def essence(document):
    """What a document says, without what Helm alone writes."""
    one = json.loads(json.dumps(document))
    meta = one["metadata"]
    meta.pop("annotations", None)
    for label in ("app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart"):
        meta.get("labels", {}).pop(label, None)
    if one["kind"] == "Deployment":
        one["spec"]["template"]["metadata"].pop("annotations", None)
    if one["kind"] == "ConfigMap":
        one["data"] = {k: json.loads(strip_json_comments(v)) for k, v in one["data"].items()}
    return one


def same(plain, chart):
    name = lambda d: (d["kind"], d["metadata"]["name"])
    ours, theirs = {name(d): essence(d) for d in plain}, {name(d): essence(d) for d in chart}
    for key, one in ours.items():
        assert one == theirs.get(key), f"deploy/kubernetes and the chart differ in {key}:\n{json.dumps(one, sort_keys=True)}\n" \
                                       f"{json.dumps(theirs.get(key), sort_keys=True)}"
    return len(ours)


def check_config(kvasir, documents, folder, where):
    """The server itself takes the file that the pod would give it, with secrets where the pod has them."""
    text = next(d["data"]["kvasir.json"] for d in documents if d["kind"] == "ConfigMap" and "kvasir.json" in d["data"]
                and d["metadata"]["name"] == "kvasir")
    for name in ("/secrets/keys", "/secrets/tls"):
        text = text.replace(name, folder)
    path = os.path.join(folder, "kvasir.json")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    done = subprocess.run([kvasir, "serve", "--config", path, "--host", "0.0.0.0", "--check-config"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"


def mounted(documents, where):
    """Secrets, configuration and probes of the pod belong together: what is named is mounted, what is mounted is there."""
    pod = next(d for d in documents if d["kind"] == "Deployment")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    volumes, mounts = {v["name"] for v in pod["volumes"]}, {m["name"] for m in container["volumeMounts"]}
    assert volumes == mounts, f"{where}: volumes {volumes}, mounts {mounts}"
    ports = {p["name"] for p in container["ports"]}
    probes = [container[p] for p in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert all("exec" in p or p["httpGet"]["port"] in ports for p in probes), where
    hook = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    config = next(d["data"]["kvasir.json"] for d in documents if d["kind"] == "ConfigMap" and d["metadata"]["name"] == "kvasir")
    drain = int(json.loads(strip_json_comments(config))["drain_seconds"].removesuffix("s"))
    assert pod["terminationGracePeriodSeconds"] >= hook + drain + 5, f"{where}: killed before it is drained"


def main():
    kvasir = sys.argv[1]
    if not os.path.exists(HELM) or not os.path.exists(KUBECTL):
        skip("no helm or kubectl (tools/fleet.sh installs them)")
    known = definitions()
    if not known:
        skip("no definitions of KEDA and others (tools/fleet.sh installs them, with Go)")
    plain = {p: load(p) for p in sorted(glob.glob(os.path.join(PLAIN, "*.yaml")))
             if os.path.basename(p) not in ("kustomization.yaml", "prometheus-adapter.yaml")}
    for path, documents in plain.items():
        if os.path.basename(path) != "gpu.yaml":  # a patch: judged together with what it changes
            judge(documents, known, os.path.relpath(path, ROOT))
    judge(load(os.path.join(ROOT, "deploy/gateways/inference-pool.yaml")), known, "deploy/gateways/inference-pool.yaml")
    listed = load(os.path.join(PLAIN, "kustomization.yaml"))[0]["resources"]
    resources = [d for name in listed for d in plain[os.path.join(PLAIN, name)]]
    mounted(resources, "deploy/kubernetes")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([kvasir, "keys", "add", "--keys", f"{folder}/keys.json", "--tenant", "t"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-keyout", f"{folder}/tls.key", "-out", f"{folder}/tls.crt",
                        "-subj", "/CN=kvasir", "-addext", "subjectAltName=DNS:kvasir"], check=True, capture_output=True)
        os.link(f"{folder}/tls.crt", f"{folder}/ca.crt")
        for where, values in CASES.items():
            documents = rendered(values, folder)
            judge(documents, known, f"chart, {where}")
            mounted(documents, where)
            check_config(kvasir, documents, folder, where)
        for where, values in REFUSED.items():
            assert helm(values, folder).returncode != 0, f"the chart takes {where}: {values}"
        compared = same([d for d in resources if d["kind"] != "Namespace"], rendered({}, folder))
        for kind in ("hpa", "keda"):
            compared += same(plain[os.path.join(PLAIN, f"{kind}.yaml")], rendered({"autoscaling": {"kind": kind}}, folder))
        compared += same(plain[os.path.join(PLAIN, "podmonitor.yaml")], rendered({"monitoring": {"podMonitor": True}}, folder))
        check_config(kvasir, resources, folder, "deploy/kubernetes")
        for gpu in (False, True):
            documents = kustomized(folder, gpu)
            judge(documents, known, "kubectl kustomize")
            pod = next(d for d in documents if d["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"][0]
            assert (pod["resources"]["limits"].get("nvidia.com/gpu") == 1) == gpu and len(pod["env"]) == 1 + gpu, pod
    with open(os.path.join(FLEET, "crds/compose-spec.json"), encoding="utf-8") as file:
        jsonschema.validate(load(os.path.join(ROOT, "docker/compose.yaml"))[0], json.load(file))
    print(f"{len(CASES)} renderings of the chart, {len(resources)} plain manifests ({compared} the same as the chart's), compose.yaml")


if __name__ == "__main__":
    main()
