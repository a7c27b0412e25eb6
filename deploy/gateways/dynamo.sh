#!/bin/sh
# NVIDIA Dynamo before a fleet: its frontend, which routes by the servers' own caches, and beside each server its vLLM
# sidecar, which drives the server by gRPC (vllm.Inference, vllm.Control). docs/fleet.md
#   deploy/gateways/dynamo.sh frontend
#   deploy/gateways/dynamo.sh sidecar 127.0.0.1:50051
# They find each other by files in DYN_FILE_KV, which suits one machine or a volume that all see; with etcd or in Kubernetes set
# DYN_DISCOVERY_BACKEND. A server names the tokenizer it needs by --model-source, and --kv-events tells of its cache.
set -eu
export DYN_DISCOVERY_BACKEND="${DYN_DISCOVERY_BACKEND:-file}" DYN_REQUEST_PLANE="${DYN_REQUEST_PLANE:-tcp}" DYN_EVENT_PLANE="${DYN_EVENT_PLANE:-zmq}"
export DYN_SELF_HOST_METADATA="${DYN_SELF_HOST_METADATA:-0}" # the model's files are read from where they are
if [ "${1:-}" = sidecar ] && [ $# -eq 2 ]; then
  # After SIGTERM it waits so long, then cuts off what still runs and calls that "stop". Dynamo's own default is 5.
  export DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="${DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS:-60}"
  exec "${DYNAMO_PYTHON:-python3}" -m dynamo.vllm.sidecar --grpc-endpoint "$2"
elif [ "${1:-}" = frontend ] && [ $# -eq 1 ]; then
  exec "${DYNAMO_PYTHON:-python3}" -m dynamo.frontend --http-host "${DYNAMO_HOST:-127.0.0.1}" --http-port "${DYNAMO_PORT:-8000}" \
    --router-mode kv --router-prefill-load-scale "${DYN_ROUTER_PREFILL_LOAD_SCALE:-16}" --migration-limit "${DYN_MIGRATION_LIMIT:-3}"
fi
echo "usage: $0 frontend | sidecar HOST:PORT" >&2
exit 2
