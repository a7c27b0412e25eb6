#!/usr/bin/env bash
# Builds a Kubernetes cluster without machines, for tests/fleet/apiserver.py: tools/control-plane.sh
# etcd, the API server, its controllers, its scheduler, and kwok, which answers for nodes that do not exist: from pinned
# modules, as there are no packages of them. 10 processor minutes once; what is there already is left alone. Where it cannot
# be had (no Go, no network), the test is skipped and says so.
set -euo pipefail
# shellcheck source=tools/lib.sh
. "$(dirname "$0")/lib.sh"
to=$CACHE/fleet/control-plane
kubernetes=1.37.2 etcd=3.7.0 kwok=0.8.0
programs='k8s.io/kubernetes/cmd/kube-apiserver
k8s.io/kubernetes/cmd/kube-controller-manager
k8s.io/kubernetes/cmd/kube-scheduler
go.etcd.io/etcd/server/v3
sigs.k8s.io/kwok/cmd/kwok'
pins="kubernetes $kubernetes, etcd $etcd, kwok $kwok"

# Kubernetes names its parts by folders of its own repository; as modules they carry its number with 0 for 1. Two are examples.
module() {
  local of=$1
  printf 'module control-plane\n\n'
  sed -n '/^go /p; /^godebug /p' "$of/go.mod"
  printf 'require (\n\tk8s.io/kubernetes v%s\n\tgo.etcd.io/etcd/server/v3 v%s\n\tsigs.k8s.io/kwok v%s\n)\nreplace (\n' "$kubernetes" "$etcd" "$kwok"
  sed -n '/k8s.io\/sample-c/d; s,^\t\(k8s.io/[a-z-]*\) => \./staging/.*,\t\1 => \1 v0.'"${kubernetes#1.}"',p' "$of/go.mod"
  printf ')\n'
}

# What becomes of kwok's nodes and pods, and when: it knows none by itself, its module has some. Here everything at once.
stages() {
  local of stage
  of=$(GOFLAGS='' go mod download -json "sigs.k8s.io/kwok@v$kwok" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p') && [ -d "$of" ] || return
  cd "$of/kustomize/stage" || return
  for stage in node/fast/node-initialize pod/fast/pod-ready pod/fast/pod-delete; do
    printf -- '---\n' && cat "$stage.yaml" || return
  done >"$to/stages" && mv "$to/stages" "$to/stages.yaml"
}

# Not optimized, without what debuggers read: compiled in half the time, and a test asks little of them.
build() {
  local work=$to/source of version=k8s.io/component-base/version number=${kubernetes%.*}
  mkdir -p "$work" "$to/bin" && cd "$work" || return
  of=$(GOFLAGS='' go mod download -json "k8s.io/kubernetes@v$kubernetes" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p') && [ -d "$of" ] || return
  module "$of" >go.mod && install -m 644 "$of/go.sum" go.sum || return
  # shellcheck disable=SC2086
  GOFLAGS="-mod=mod -buildvcs=false ${GOFLAGS:-}" go build -trimpath '-gcflags=all=-N -l -dwarf=false' -o "$to/bin/" \
    "-ldflags=-s -w -X $version.gitVersion=v$kubernetes -X $version.gitMajor=1 -X $version.gitMinor=${number#1.}" $programs &&
    mv "$to/bin/server" "$to/bin/etcd" && printf '%s\n' "$pins" >"$to/installed"
}

built() { [ "$(cat "$to/installed" 2>/dev/null)" = "$pins" ]; }

if built && [ -e "$to/stages.yaml" ]; then exit 0; fi
if ! command -v go >/dev/null || { ! built && ! phase "A Kubernetes control plane ($pins)" build; } ||
  ! phase "What kwok does with nodes and pods" stages; then
  say "  going on without: a Kubernetes control plane"
fi
