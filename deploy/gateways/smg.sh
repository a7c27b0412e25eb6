#!/bin/sh
# SMG before a fleet, by gRPC: deploy/gateways/smg.sh grpc://10.0.0.1:50051 grpc://10.0.0.2:50051 ...
# A prefix goes to the server that has it (by the servers' own events of their caches). docs/fleet.md
#   pip install smg && SMG_HOST=0.0.0.0 SMG_PORT=30000 deploy/gateways/smg.sh ...
exec smg launch --host "${SMG_HOST:-127.0.0.1}" --port "${SMG_PORT:-30000}" --policy cache_aware \
  --health-check-interval-secs 2 --health-failure-threshold 1 --prometheus-host 127.0.0.1 --prometheus-port "${SMG_METRICS_PORT:-29000}" \
  --worker-urls "$@"
