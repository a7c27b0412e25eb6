#!/usr/bin/env bash
# Installs the outside clients that `./test clients` talks to us with: tools/clients.sh
# Each by itself and only where it is missing; one that cannot be had (no network, no Go, no Node) is left out, and its
# test then says that it was skipped and why. Everything but Chromium lies in the cache directory, under clients/.
set -euo pipefail
# shellcheck source=tools/lib.sh
. "$(dirname "$0")/lib.sh"
clients=$CACHE/clients

python_packages='openai>=2,<3 anthropic>=2,<3 grpcio>=1.60 grpcio-tools>=1.60 smg-grpc-proto jsonschema>=4
  ollama>=0.6,<1 langchain-openai>=1.7,<2 langchain-ollama>=1.1,<2 litellm>=1.100,<2 instructor>=1.17,<2
  pydantic-ai-slim[openai]>=2,<3'
# Those that pin versions of their own, each in its own folder: name and packages. genai-perf runs perf_analyzer, which its
# package brings only where glibc is 2.38 or newer.
own_folders=(
  'tritonclient tritonclient[grpc]==2.73.0'
  'aiperf aiperf==0.13.0'
  'genai_perf genai-perf==0.0.16'
  'guidellm guidellm==0.8.1'
)
grpcurl=github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.4
node_packages='openai@6 @anthropic-ai/sdk@1 ollama@0.6 ai@6 @ai-sdk/openai-compatible@2'

python_clients() {
  # shellcheck disable=SC2086
  { python3 -m venv "$clients/python" 2>/dev/null || { as_root apt-get install -y -q --no-install-recommends python3-venv && python3 -m venv "$clients/python"; }; } &&
    "$clients/python/bin/pip" install --quiet uv &&  # pip takes minutes to choose versions of so many
    "$clients/python/bin/uv" pip install --quiet --python "$clients/python/bin/python" $python_packages &&
    echo "$python_packages" >"$clients/python/installed"
}
uv() {
  [ -x "$clients/uv/bin/uv" ] || { python3 -m venv "$clients/uv" && "$clients/uv/bin/pip" install --quiet uv; } || return 1
  "$clients/uv/bin/uv" "$@"
}
# in_own_folder NAME PACKAGE: guidellm wants PyTorch, of which the CPU's build is asked for first; the other takes 5 GB.
in_own_folder() {
  local name=$1 package=$2
  uv venv --quiet --clear --python python3 "$clients/$name" || return 1
  local install=(pip install --quiet --python "$clients/$name/bin/python" "$package")
  if [ "$name" = guidellm ]; then
    uv "${install[@]}" --torch-backend cpu 2>/dev/null || { (need_space 8000 "$clients") && uv "${install[@]}"; } || return 1
  else
    uv "${install[@]}" || return 1
  fi
  echo "$package" >"$clients/$name/installed"
}
node_clients() {
  # shellcheck disable=SC2086
  npm install --prefix "$clients/node" --no-audit --no-fund $node_packages && echo "$node_packages" >"$clients/node/installed"
}
go_clients() { GOBIN=$clients/bin go install "$grpcurl"; }
browser() { as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium; }

# optional 'Title' command...: a client we do without where it cannot be had.
optional() { phase "$@" || say "  going on without: $1"; }

mkdir -p "$clients/bin"
[ "$(cat "$clients/python/installed" 2>/dev/null)" = "$python_packages" ] || optional 'Python clients (openai, anthropic, ollama, LangChain, LiteLLM, gRPC, SMG)' python_clients
for one in "${own_folders[@]}"; do
  read -r name package <<<"$one"
  [ "$(cat "$clients/$name/installed" 2>/dev/null)" = "$package" ] || optional "$name" in_own_folder "$name" "$package"
done
if command -v npm >/dev/null && [ "$(cat "$clients/node/installed" 2>/dev/null)" != "$node_packages" ]; then
  optional 'Node clients (openai, anthropic, ollama, ai)' node_clients
fi
if command -v go >/dev/null && [ ! -x "$clients/bin/grpcurl" ] && ! command -v grpcurl >/dev/null; then optional 'grpcurl' go_clients; fi
if ! command -v chromium >/dev/null && { [ "$(id -u)" -eq 0 ] || sudo -n true 2>/dev/null; }; then optional 'Chromium' browser; fi
