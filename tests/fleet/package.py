#!/usr/bin/env python3
"""The package as a machine meets it: package.py BUILD_FOLDER [--install]
Unpacked: the unit, the user, the configuration, the pages, the completions, the list of components; and it serves. With
--install (root, debootstrap): in a fresh Debian it is installed, serves as its user, is upgraded with an edited
configuration, removed and purged."""
import contextlib
import glob
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request

from kvasir_server import DUMMY, FLEET, serving, skip


def run(*words, **more):
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def make(build, folder):
    run("cpack", "-G", "DEB", "-B", folder, "-D", "CPACK_DEBIAN_COMPRESSION_TYPE=gzip", cwd=build)
    package, = glob.glob(f"{folder}/*.deb")
    run("sha256sum", "--check", package + ".sha256", cwd=folder)
    return package


def optional(tool, *words, **more):
    """What a tool says, where it is installed."""
    return run(tool, *words, **more) if shutil.which(tool) else ""


def unit(root):
    """No warning of systemd's, and little that the service could reach if it were taken over."""
    for tool in ("systemd-analyze", "systemd-sysusers"):
        if not shutil.which(tool):
            print(f"the unit was not looked at: there is no {tool}")
            return
    # Units that it names are the system's, and a root of one package has none.
    said = [line for line in run("systemd-analyze", "verify", f"--root={root}", "--man=no", "--recursive-errors=no", "kvasir.service").splitlines() if line]
    assert not said, said
    text = run("systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=25", f"{root}/usr/lib/systemd/system/kvasir.service")
    print(re.search(r"Overall exposure level.*", text).group().strip())
    run("systemd-sysusers", f"--root={root}", "kvasir.conf")
    with open(f"{root}/etc/passwd", encoding="utf-8") as file:
        assert re.search(r"^kvasir:.*:/var/lib/kvasir:/usr/sbin/nologin$", file.read(), re.M)


def pages(root):
    shown = {os.path.basename(p) for p in glob.glob(f"{root}/usr/share/man/man1/*.gz")}
    commands = re.findall(r"^  (\S+) ", run(f"{root}/usr/bin/kvasir", "--help"), re.M)
    assert "serve" in commands and shown == {"kvasir.1.gz", *(f"kvasir-{c}.1.gz" for c in commands)}, (shown, commands)
    with gzip.open(f"{root}/usr/share/man/man1/kvasir-serve.1.gz", "rt") as file:
        text = file.read()
    helped = run(f"{root}/usr/bin/kvasir", "serve", "--help")
    for option in re.findall(r"^  (--[a-z-]+)", helped, re.M):
        assert f".B {option.replace('-', chr(92) + '-')}" in text, f"{option} is not on its page"
    for page in sorted(shown):
        with gzip.open(f"{root}/usr/share/man/man1/{page}", "rt") as file:
            warned = optional("groff", "-man", "-Tutf8", "-ww", "-z", "-", input=file.read())
        assert not warned, f"{page}: {warned}"
    return len(shown)


def completions(root):
    share = f"{root}/usr/share"
    options = set(re.findall(r"--[a-z-]+", run(f"{root}/usr/bin/kvasir", "serve", "--help")))
    # What bash itself answers when somebody presses the key.
    words = run("bash", "-c", f". {share}/bash-completion/completions/kvasir && COMP_WORDS=(kvasir serve --kv-) COMP_CWORD=2 && _kvasir && "
                              "printf '%s\\n' \"${COMPREPLY[@]}\"").split()
    assert set(words) == {o for o in options if o.startswith("--kv-")}, words
    optional("zsh", "-n", f"{share}/zsh/vendor-completions/_kvasir")
    optional("fish", "--no-execute", f"{share}/fish/vendor_completions.d/kvasir.fish")
    for path in (f"{share}/zsh/vendor-completions/_kvasir", f"{share}/fish/vendor_completions.d/kvasir.fish"):
        with open(path, encoding="utf-8") as file:
            assert "kv-dtype" in file.read(), path


def components(root):
    with open(f"{root}/usr/share/doc/kvasir/kvasir.cdx.json", encoding="utf-8") as file:
        bom = json.load(file)
    names = {c["name"] for c in bom["components"]}
    assert {"libgrpc++-dev", "libssl-dev", "nlohmann-json3-dev", "tokenizers", "minijinja", "llguidance"} <= names, sorted(names)
    assert not {"libgtest-dev", "librapidcheck-dev"} & names, "tests are not in the binary"
    return len(bom["components"])


def schema(root):
    """By CycloneDX's own schema, where tools/fleet.sh has installed it."""
    python = os.path.join(FLEET, "python", "bin", "python3")
    check = ("import sys\nfrom cyclonedx.schema import SchemaVersion\nfrom cyclonedx.validation.json import JsonStrictValidator\n"
             "wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read())\nsys.exit(str(wrong) if wrong else 0)")
    if not os.path.exists(python) or subprocess.run([python, "-c", "import cyclonedx"], capture_output=True, check=False).returncode != 0:
        print("the list of components was not held to its schema (tools/fleet.sh installs it)")
        return
    run(python, "-c", check, f"{root}/usr/share/doc/kvasir/kvasir.cdx.json")


def answers(server):
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 3})["usage"]["completion_tokens"] >= 1


def unpacked(package, folder):
    root = os.path.join(folder, "root")
    run("dpkg-deb", "-x", package, root)
    control = run("dpkg-deb", "-f", package)
    assert "Depends: libc6" in control and os.path.getsize(package) < 40 << 20, control
    unit(root)
    shown, parts = pages(root), components(root)
    completions(root)
    schema(root)
    config = f"{root}/etc/kvasir/kvasir.json"
    with serving(f"{root}/usr/bin/kvasir", "--config", config, "--kv-memory", "1MiB", "--threads", "1") as server:
        answers(server)
    refused = subprocess.run([f"{root}/usr/bin/kvasir", "serve", "--config", config], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "model is not set" in refused.stderr, refused
    print(f"unpacked: {shown} pages, {parts} components, it serves, and without a model it says so")


def installed(package, folder):
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        skip("a fresh Debian needs root and debootstrap")
    root = os.path.join(folder, "debian")
    run("debootstrap", "--variant=minbase", "bookworm", root)
    shutil.copy(package, f"{root}/kvasir.deb")
    chroot = ("chroot", root, "env", "DEBIAN_FRONTEND=noninteractive", "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
    run(*chroot, "dpkg", "-i", "/kvasir.deb")
    assert ":/usr/sbin/nologin" in run(*chroot, "getent", "passwd", "kvasir")
    config = f"{root}/etc/kvasir/kvasir.json"
    with open(config, encoding="utf-8") as file:
        edited = file.read().replace('"log_format"', f'"model": "{DUMMY}", "kv_memory": "1MiB", "threads": 1,\n  "log_format"')
    with open(config, "w", encoding="utf-8") as file:
        file.write(edited)
    process = subprocess.Popen(["chroot", "--userspec=kvasir:kvasir", root, "/usr/bin/kvasir", "serve", "--config", "/etc/kvasir/kvasir.json",
                                "--http-port", "0", "--grpc-port", "-1"], stderr=subprocess.PIPE, text=True)
    try:
        port = next(json.loads(line)["http_port"] for line in process.stderr if '"ready"' in line)
        ask = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data=b'{"prompt":"x","max_tokens":3}',
                                     headers={"Content-Type": "application/json"})
        assert json.loads(urllib.request.urlopen(ask, timeout=30).read())["usage"]["completion_tokens"] >= 1
        process.terminate()
        assert process.wait(30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
    run(*chroot, "dpkg", "-i", "/kvasir.deb")  # again, as an upgrade
    with open(config, encoding="utf-8") as file:
        assert file.read() == edited, "an upgrade changes what was configured"
    os.makedirs(f"{root}/var/lib/kvasir/models")
    run(*chroot, "dpkg", "--remove", "kvasir")
    assert os.path.exists(config) and os.path.exists(f"{root}/var/lib/kvasir/models") and not os.path.exists(f"{root}/usr/bin/kvasir")
    run(*chroot, "dpkg", "--purge", "kvasir")
    left = [p for p in run("find", root, "-name", "*kvasir*", "-not", "-path", "*/proc/*").split() if p != f"{root}/kvasir.deb"]
    assert not left, left
    print("installed, served as its user, drained, upgraded, removed, purged: nothing is left")


def main():
    for tool in ("cpack", "dpkg-deb"):
        if not shutil.which(tool):
            skip(f"no {tool}")
    with tempfile.TemporaryDirectory() as folder:
        package = make(sys.argv[1], folder)
        print(f"{os.path.basename(package)}: {os.path.getsize(package) / 1e6:.1f} MB")
        (installed if "--install" in sys.argv else unpacked)(package, folder)


main()
