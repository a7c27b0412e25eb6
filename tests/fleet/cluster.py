"""A Kubernetes cluster without machines, on loopback: etcd, the API server, its controllers and scheduler, and kwok, which
answers for nodes that do not exist (a pod there is running and ready as soon as it is scheduled; nothing starts). Certificates
are made here. tools/control-plane.sh builds the programs."""
import contextlib
import os
import subprocess
import time

from gateway import free_port, process, wait
from kvasir_server import FLEET, skip

BIN = os.path.join(FLEET, "control-plane", "bin")
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok")
STAGES = os.path.join(FLEET, "control-plane", "stages.yaml")
KUBECTL = os.path.join(FLEET, "bin", "kubectl")

KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: test
clusters: [{{name: test, cluster: {{server: "https://127.0.0.1:{port}", certificate-authority: {folder}/ca.crt}}}}]
users: [{{name: test, user: {{client-certificate: {folder}/admin.crt, client-key: {folder}/admin.key}}}}]
contexts: [{{name: test, context: {{cluster: test, user: test}}}}]
"""
NODE = """\
apiVersion: v1
kind: Node
metadata: {{name: {name}, labels: {{kubernetes.io/hostname: {name}, kubernetes.io/os: linux, kubernetes.io/arch: amd64, gpu: "yes"}}}}
status:
  capacity: &all {{cpu: "16", memory: 256Gi, pods: "110", ephemeral-storage: 500Gi, nvidia.com/gpu: "8"}}
  allocatable: *all
---
"""


def installed():
    return all(os.path.exists(path) for path in (STAGES, *(os.path.join(BIN, name) for name in PROGRAMS)))


def certificates(folder):
    """An authority, the servers' certificate (API server and etcd), the administrator's, and the key of service accounts."""
    def openssl(*words):
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=test", "-days", "2")
    names = "subjectAltName=IP:127.0.0.1,IP:10.96.0.1,DNS:localhost,DNS:kubernetes.default.svc"
    for name, subject, more in (("server", "/CN=server", names), ("admin", "/O=system:masters/CN=admin", "basicConstraints=CA:FALSE")):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
        with open(os.path.join(folder, "extensions"), "w", encoding="utf-8") as file:
            file.write(f"{more}\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-out", f"{name}.crt", "-days", "2",
                "-extfile", "extensions")
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "accounts.key")


class Cluster:
    def __init__(self, folder):
        self.folder, self.config = folder, os.path.join(folder, "kubeconfig")

    def kubectl(self, *words, text=None, check=True):
        """What kubectl does; a warning of the server's is an error here."""
        done = subprocess.run([KUBECTL, "--kubeconfig", self.config, "--warnings-as-errors", *words], input=text, capture_output=True, text=True,
                              check=False, timeout=600, env={**os.environ, "HOME": self.folder})
        if check:
            assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}{done.stdout}"
            assert "Warning:" not in done.stderr, f"kubectl {' '.join(words)} warns: {done.stderr}"
        return done

    def answers(self):
        return self.kubectl("get", "--raw", "/readyz", check=False).stdout == "ok"


@contextlib.contextmanager
def cluster(folder, nodes=2):
    if not installed():
        skip("no control plane (./test long builds it, with Go: tools/control-plane.sh)")
    certificates(folder)
    here = lambda name: os.path.join(folder, name)
    ports = {name: free_port() for name in ("etcd", "peer", "api", "kwok")}
    out = Cluster(folder)
    with open(out.config, "w", encoding="utf-8") as file:
        file.write(KUBECONFIG.format(port=ports["api"], folder=folder))
    etcd, peer = (f"https://127.0.0.1:{ports[p]}" for p in ("etcd", "peer"))
    commands = {
        "etcd": (f"--data-dir={here('etcd')}", f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peer}",
                 f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}", f"--cert-file={here('server.crt')}",
                 f"--key-file={here('server.key')}", f"--trusted-ca-file={here('ca.crt')}", "--client-cert-auth",
                 f"--peer-cert-file={here('server.crt')}", f"--peer-key-file={here('server.key')}", f"--peer-trusted-ca-file={here('ca.crt')}",
                 "--peer-client-cert-auth", "--unsafe-no-fsync"),
        "kube-apiserver": (f"--etcd-servers={etcd}", f"--etcd-cafile={here('ca.crt')}", f"--etcd-certfile={here('admin.crt')}",
                           f"--etcd-keyfile={here('admin.key')}", "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={ports['api']}",
                           "--endpoint-reconciler-type=none", f"--tls-cert-file={here('server.crt')}", f"--tls-private-key-file={here('server.key')}",
                           f"--client-ca-file={here('ca.crt')}", "--authorization-mode=RBAC", "--service-cluster-ip-range=10.96.0.0/16",
                           "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={here('accounts.key')}",
                           f"--service-account-signing-key-file={here('accounts.key')}"),
        # Nodes are ready once and for all: nobody says again that they are.
        "kube-controller-manager": (f"--kubeconfig={out.config}", "--secure-port=0", "--leader-elect=false", f"--root-ca-file={here('ca.crt')}",
                                    f"--service-account-private-key-file={here('accounts.key')}", "--node-monitor-grace-period=24h"),
        "kube-scheduler": (f"--kubeconfig={out.config}", "--secure-port=0", "--leader-elect=false"),
        "kwok": (f"--kubeconfig={out.config}", f"--config={STAGES}", "--manage-all-nodes", f"--server-address=127.0.0.1:{ports['kwok']}",
                 "--node-ip=127.0.0.1", "--cidr=10.244.0.0/16"),
    }
    with contextlib.ExitStack() as stack:
        def start(name):
            # Ended with the block, and by the kernel where this process is killed.
            running = stack.enter_context(process("setpriv", "--pdeathsig", "KILL", os.path.join(BIN, name), *commands[name], log=here(f"{name}.log"),
                                                  env={**os.environ, "HOME": folder}))
            time.sleep(0.2)
            assert running.poll() is None, f"{name} ended: {said(here(f'{name}.log'))}"
            return running
        start("etcd")
        api = start("kube-apiserver")
        def ready():
            assert api.poll() is None, f"the API server ended: {said(here('kube-apiserver.log'))}"
            return out.answers()
        wait(ready, 300)
        out.kubectl("create", "-f", "-", text="".join(NODE.format(name=f"node{i}") for i in range(nodes)))
        for name in ("kube-controller-manager", "kube-scheduler", "kwok"):
            start(name)
        out.kubectl("wait", "--for=condition=Ready", "nodes", "--all", "--timeout=300s")
        yield out


def said(log):
    with open(log, encoding="utf-8") as file:
        return file.read()[-3000:]
