#!/usr/bin/env bash
# h2spec's cases against the gRPC port, compared with the list of what is gRPC core's own: h2spec.sh KVASIR [--list]
# With --list the failing cases are printed and nothing is compared.
set -euo pipefail
kvasir=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvasir/h2spec
command -v go >/dev/null || { echo "skipped: go, which h2spec is built with, is not installed"; exit 77; }
[ -x "$cache/h2spec" ] || GOBIN=$cache go install github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible ||
  { echo "skipped: h2spec cannot be fetched"; exit 77; }
work=$(mktemp -d)
"$kvasir" serve --model "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260" --kv-memory 1MiB \
  --threads 1 --grpc-port 0 --http-port -1 2>"$work/log" &
server=$!
trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true; rm -rf "$work"' EXIT
for _ in $(seq 600); do
  ! grep -q '"message":"ready"' "$work/log" || break
  sleep 0.1
done
port=$(sed -n 's/.*"grpc_port":\([0-9]*\).*/\1/p' "$work/log" | head -n 1)
"$cache/h2spec" -h 127.0.0.1 -p "$port" -o 2 -j "$work/report.xml" >"$work/out" 2>&1 || true
python3 - "$work/report.xml" <<'PY' >"$work/failed"
import sys
import xml.etree.ElementTree as tree
for case in tree.parse(sys.argv[1]).iter("testcase"):
    if case.find("failure") is not None or case.find("error") is not None:
        print(f"{case.get('package')}: {case.get('classname')}")
PY
kill -0 $server || { echo "the server has ended"; exit 1; }
if [ "${2:-}" = --list ]; then
  sort "$work/failed"
  tail -n 2 "$work/out"
  exit
fi
new=$(sort "$work/failed" | comm -23 - <(grep -v '^#' "$here/h2spec.known" | sort))
[ -z "$new" ] || { echo "these failed, and are not in tests/hostile/h2spec.known:"; echo "$new"; exit 1; }
tail -n 2 "$work/out"
