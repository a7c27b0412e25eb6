#!/usr/bin/env python3
"""Manifests and chart in a real API server, with its controllers and scheduler and nodes by kwok: apiserver.py
Everything is taken without a warning and reads back as it was written; pods pass the `restricted` standard, are scheduled and
get their addresses into the services; budget and autoscaler find them; a roll leaves nothing of the old; the chart upgrades
from each set of values to the next; what is deleted leaves nothing but the claim that the chart keeps."""
import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

from kvasir_server import FLEET, ROOT, skip
from manifests_test import CASES, CHART, HELM, PLAIN, SECRETS, kustomized, load, rendered, yaml

import cluster
from gateway import wait

SPACE = """\
apiVersion: v1
kind: Namespace
metadata: {name: %s, labels: {pod-security.kubernetes.io/enforce: restricted, pod-security.kubernetes.io/warn: restricted}}
"""
# What the values of CASES name and a cluster has: classes, volumes for their claims.
CLUSTER = """\
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {name: high}
value: 1000
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: nvidia}
handler: nvidia
"""
VOLUME = """\
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: %s}
spec:
  capacity: {storage: 20Gi}
  accessModes: [ReadWriteOnce, ReadWriteMany]
  storageClassName: "%s"
  hostPath: {path: /nonexistent}
  persistentVolumeReclaimPolicy: Retain
"""
CLAIM = """\
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: c}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
"""


def written(sent, got, where):
    """Each field that was sent stands in what came back, with its value; the server adds its defaults."""
    if isinstance(sent, dict):
        assert isinstance(got, dict), f"{where}: {sent!r} became {got!r}"
        for key, value in sent.items():
            # Empty is the same as absent to the server.
            if value not in ({}, [], "", None) or key in got:
                assert key in got, f"{where}.{key} was dropped (of {sorted(got)})"
                written(value, got[key], f"{where}.{key}")
    elif isinstance(sent, list):
        assert isinstance(got, list) and len(sent) == len(got), f"{where}: {sent!r} became {got!r}"
        for i, pair in enumerate(zip(sent, got)):
            written(*pair, f"{where}[{i}]")
    else:
        # A count of something (a GPU) may be written as a number, and comes back as text.
        assert sent == got or str(sent) == got, f"{where}: {sent!r} became {got!r}"


class Kube:
    def __init__(self, of):
        self.of, self.kubectl, self.read = of, of.kubectl, 0

    def json(self, *words):
        return json.loads(self.kubectl(*words, "-o", "json").stdout)

    def space(self, name):
        self.kubectl("create", "-f", "-", text=SPACE % name)
        wait(lambda: self.kubectl("-n", name, "get", "serviceaccount", "default", check=False).returncode == 0)

    def reads_back(self, documents, space):
        for one in documents:
            kind, name = one["kind"], one["metadata"]["name"]
            if one.get("metadata", {}).get("annotations", {}).get("helm.sh/hook"):
                continue
            group = one["apiVersion"].rpartition("/")[0]
            version = one["apiVersion"].rpartition("/")[2]
            written(one, self.json("-n", space, "get", f"{kind}.{version}.{group}" if group else kind, name), f"{kind} {name}")
            self.read += 1

    def rolled(self, space, name="kvasir", seconds=300):
        """The Deployment's pods: all of its newest template, on nodes, ready, and no others."""
        self.kubectl("-n", space, "rollout", "status", f"deployment/{name}", f"--timeout={seconds}s")
        wanted = self.json("-n", space, "get", "deployment", name)["spec"]["replicas"]
        def only_new():
            pods = self.pods(space)
            return len(pods) == wanted and all(p["spec"].get("nodeName") and p["status"]["phase"] == "Running" for p in pods)
        wait(only_new, seconds)
        return self.pods(space)

    def pods(self, space):
        return self.json("-n", space, "get", "pods", "-l", "app.kubernetes.io/name=kvasir,app.kubernetes.io/instance=kvasir")["items"]

    def reached(self, space, count, service="kvasir"):
        """A service's pods, by the ports that the pods name."""
        def slices():
            found = self.json("-n", space, "get", "endpointslices", "-l", f"kubernetes.io/service-name={service}")["items"]
            ready = [e for s in found for e in s.get("endpoints", []) if e["conditions"]["ready"]]
            return len(ready) == count and all({(p["name"], p["port"]) for p in s["ports"]} == {("http", 8000), ("grpc", 50051)} for s in found)
        wait(slices)

    def budget(self, space, pods):
        def counted():
            status = self.json("-n", space, "get", "pdb", "kvasir")["status"]
            return (status.get("expectedPods"), status.get("currentHealthy"), status.get("disruptionsAllowed")) == (pods, pods, 1)
        wait(counted)

    def scales(self, space, name="kvasir"):
        """The autoscaler finds the Deployment; the metrics it asks for are an adapter's, which is not here."""
        def found():
            conditions = self.json("-n", space, "get", "hpa", name).get("status", {}).get("conditions", [])
            return any(c["type"] == "AbleToScale" and c["status"] == "True" for c in conditions)
        wait(found)

    def rest(self, space):
        """What a namespace holds beside what Kubernetes puts there itself."""
        kinds = [k for k in self.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").stdout.split()
                 if k != "endpoints" and not k.startswith(("events", "leases"))]  # the first: EndpointSlices' old form
        found = self.json("-n", space, "get", ",".join(kinds))["items"]
        return sorted((d["kind"], d["metadata"]["name"]) for d in found
                      if (d["kind"], d["metadata"]["name"]) not in (("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default")))

    def left(self, space, expected=()):
        def gone():
            return self.rest(space) == sorted(expected)
        try:
            wait(gone)
        except AssertionError as late:
            raise AssertionError(f"{space} holds {self.rest(space)}, not {sorted(expected)}") from late


def helm(kube, *words, values=None, check=True):
    more = []
    if values is not None:
        path = os.path.join(kube.of.folder, "values.yaml")
        with open(path, "w", encoding="utf-8") as file:
            yaml.safe_dump(values, file)
        more = ["-f", path]
    done = subprocess.run([HELM, "--kubeconfig", kube.of.config, *words, *more], capture_output=True, text=True, check=False, timeout=600,
                          env={**os.environ, "HOME": kube.of.folder, **{f"HELM_{k}_HOME": kube.of.folder for k in ("CACHE", "CONFIG", "DATA")}})
    if check:
        assert done.returncode == 0, f"helm {' '.join(words)} {values}: {done.stderr}{done.stdout}"
        assert "warn" not in done.stderr.lower(), f"helm {' '.join(words)} {values} warns: {done.stderr}"
    return done


def definitions(kube):
    for path in sorted(glob.glob(os.path.join(FLEET, "crds", "*.yaml"))):
        # The larger ones do not fit into the annotation that applying from this side leaves.
        kube.kubectl("apply", "--server-side", "-f", path)
    kube.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=120s")


def plain(kube, folder):
    """deploy/kubernetes as docs/kubernetes.md says, then the files beside it."""
    apply = ("apply", "--validate=strict", "-f", "-")
    documents = kustomized(folder)
    kube.kubectl("apply", "--validate=strict", "-k", PLAIN)
    kube.reads_back(documents, "kvasir")
    old = kube.rolled("kvasir")
    kube.reached("kvasir", 1)
    kube.reached("kvasir", 1, "kvasir-pods")
    kube.budget("kvasir", 1)
    kube.kubectl("-n", "kvasir", "rollout", "restart", "deployment/kvasir")
    new = kube.rolled("kvasir")
    assert {p["metadata"]["name"] for p in old}.isdisjoint(p["metadata"]["name"] for p in new), "restart kept a pod"
    for name in ("hpa", "keda", "podmonitor"):
        beside = load(os.path.join(PLAIN, f"{name}.yaml"))
        kube.kubectl(*apply, text=yaml.safe_dump_all(beside))
        kube.reads_back(beside, "kvasir")
        if name == "hpa":
            kube.scales("kvasir")
            kube.kubectl("delete", "-f", os.path.join(PLAIN, "hpa.yaml"))
    gateway = load(os.path.join(ROOT, "deploy/gateways/inference-pool.yaml"))
    kube.kubectl(*apply, text=yaml.safe_dump_all(gateway))
    kube.reads_back(gateway, "kvasir")
    # With the patch for a GPU the same objects change in place.
    kube.kubectl(*apply, text=yaml.safe_dump_all(kustomized(folder, gpu=True)))
    pod = kube.rolled("kvasir")[0]
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1", pod["spec"]
    kube.kubectl("delete", "-k", PLAIN, "--timeout=300s")
    assert kube.kubectl("get", "namespace", "kvasir", check=False).returncode != 0
    return len(documents)


def needed(kube, space):
    """What values name and a user makes: secrets, a claim."""
    for name in ("k", "m", "t", "hf"):
        kube.kubectl("-n", space, "create", "secret", "generic", name, "--from-literal=x=y")
    kube.kubectl("-n", space, "create", "-f", "-", text=CLAIM)


def chart(kube, folder):
    """Each rendering by kubectl, in a namespace of its own that holds nothing of it afterwards."""
    for i, (where, values) in enumerate(CASES.items()):
        space = f"case{i}"
        kube.space(space)
        needed(kube, space)
        before = kube.rest(space)
        documents = rendered(values, folder, space)
        text = yaml.safe_dump_all([d for d in documents if "helm.sh/hook" not in d["metadata"].get("annotations", {})])
        kube.kubectl("-n", space, "apply", "--validate=strict", "-f", "-", text=text)
        kube.reads_back(documents, space)
        pods = kube.rolled(space)
        kube.reached(space, len(pods))
        kinds = {d["kind"] for d in documents}
        if "PodDisruptionBudget" in kinds:
            kube.budget(space, len(pods))
        if "HorizontalPodAutoscaler" in kinds:
            kube.scales(space)
        if "NetworkPolicy" in kinds:
            policy = kube.json("-n", space, "get", "networkpolicy", "kvasir")["spec"]["podSelector"]["matchLabels"]
            assert all(policy.items() <= p["metadata"]["labels"].items() for p in pods), policy
        # The pod of `helm test` is one that the namespace takes.
        hooks = [d for d in documents if d["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"]
        assert len(hooks) == 1, hooks
        kube.kubectl("-n", space, "apply", "--validate=strict", "-f", "-", text=yaml.safe_dump(hooks[0]))
        kube.kubectl("-n", space, "delete", "--ignore-not-found", "-f", "-", text=yaml.safe_dump_all(documents))
        kube.left(space, before)
    return len(CASES)


def release(kube):
    """helm install, upgrades through all values that one claim allows, uninstall, and install again over the claim it kept."""
    space = "release"
    kube.space(space)
    needed(kube, space)
    before = kube.rest(space)
    where = ("kvasir", CHART, "-n", space)
    helm(kube, "install", *where, values={"replicas": 2})
    kube.rolled(space)
    claim = kube.json("-n", space, "get", "pvc", "kvasir")["metadata"]["uid"]
    steps = {name: values for name, values in CASES.items() if "accessMode" not in values.get("cache", {})}
    steps["a queue's autoscaler, later"] = {"autoscaling": {"kind": "hpa", "min": 2}, **SECRETS}
    steps["the first again"] = {"replicas": 2}
    scaled = False
    for values in steps.values():
        scales = "autoscaling" in values
        helm(kube, "upgrade", *where, *(["--force-conflicts"] if scaled and not scales else []), values=values)
        kube.rolled(space)
        scaled = scales
    assert len(kube.pods(space)) == 2
    # To turn the autoscaler on changes no pod; what it has set since is not the chart's to change.
    helm(kube, "upgrade", *where, "--force-conflicts", values={"replicas": 3})
    before_it = kube.rolled(space)
    on = {"autoscaling": {"kind": "hpa", "min": 2, "max": 5}}
    helm(kube, "upgrade", *where, values=on)
    kube.scales(space)
    after_it = kube.rolled(space)
    assert {p["metadata"]["uid"] for p in before_it} == {p["metadata"]["uid"] for p in after_it}, f"{len(before_it)} pods became {len(after_it)}"
    kube.kubectl("-n", space, "scale", "deployment/kvasir", "--replicas=4")
    kube.rolled(space)
    helm(kube, "upgrade", *where, values={**on, "config": {"max_running": 32}})
    assert len(kube.rolled(space)) == 4, "an upgrade set the replicas back"
    # Off again: how many was said by another, and Helm takes that over only where told to.
    refused = helm(kube, "upgrade", *where, values={"replicas": 2}, check=False)
    assert refused.returncode != 0 and ".spec.replicas" in refused.stderr, refused.stderr
    helm(kube, "upgrade", *where, "--force-conflicts", values={"replicas": 2})
    assert len(kube.rolled(space)) == 2
    # A claim cannot be changed: the server refuses, and the release goes on as it was.
    refused = helm(kube, "upgrade", *where, values={"cache": {"accessMode": "ReadWriteMany"}}, check=False)
    assert refused.returncode != 0 and "immutable" in refused.stderr, refused.stderr
    helm(kube, "uninstall", "kvasir", "-n", space, "--wait")
    kube.left(space, [*before, ("PersistentVolumeClaim", "kvasir")])
    helm(kube, "install", *where, values={})
    kube.rolled(space)
    assert kube.json("-n", space, "get", "pvc", "kvasir")["metadata"]["uid"] == claim, "the models were not kept"
    return len(steps) + 4


def main():
    for tool in (HELM, cluster.KUBECTL):
        if not os.path.exists(tool):
            skip(f"no {os.path.basename(tool)} (tools/fleet.sh installs it)")
    if not glob.glob(os.path.join(FLEET, "crds", "*.yaml")):
        skip("no definitions of KEDA and others (tools/fleet.sh installs them, with Go)")
    # Told to end, it unwinds as from Ctrl-C, and what it started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, cluster.cluster(folder) as of:
        kube = Kube(of)
        version = kube.json("version")["serverVersion"]["gitVersion"]
        definitions(kube)
        volumes = "".join(VOLUME % (f"v{i}", "nfs" if i % 4 == 3 else "") for i in range(32))
        kube.kubectl("create", "-f", "-", text=CLUSTER + volumes)
        manifests = plain(kube, folder)
        cases = chart(kube, folder)
        upgrades = release(kube)
        print(f"Kubernetes {version}: {manifests} plain manifests, {cases} renderings of the chart, {kube.read} objects read back as written, "
              f"{upgrades} upgrades; {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
