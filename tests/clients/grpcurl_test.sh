#!/usr/bin/env bash
# grpcurl finds, describes and calls every service by reflection alone.
set -euo pipefail
PATH=$PATH:$HOME/go/bin
command -v grpcurl >/dev/null || { echo "skipped: grpcurl is not installed (see README.md here)"; exit 77; }
call() { grpcurl -plaintext "$@"; }
expect() { grep -qF -- "$1" <<<"$2" || { echo "expected '$1' in: $2"; exit 1; }; }

services=$(call "$KVASIR_GRPC" list)
for s in kvasir.v1.Inference ppl.llm.proto.LLMService vllm.grpc.engine.VllmEngine vllm.Inference vllm.Control inference.GRPCInferenceService grpc.health.v1.Health; do
  expect "$s" "$services"
done
expect 'rpc Generate' "$(call "$KVASIR_GRPC" describe kvasir.v1.Inference)"
expect '"SERVING"' "$(call "$KVASIR_GRPC" grpc.health.v1.Health/Check)"
expect 'rpc GenerateStream' "$(call "$KVASIR_GRPC" describe vllm.Inference)"
answer=$(call -d '{"prompt":"The capital of France is","max_tokens":4,"sampling":{"temperature":0}}' "$KVASIR_GRPC" kvasir.v1.Inference/Generate)
expect '" Paris' "$answer"  # a slow reader gets several tokens in one event
expect '"reason": "LENGTH"' "$answer"
wrong=$(call -d '{"prompt":"x","sampling":{"temperature":-1}}' "$KVASIR_GRPC" kvasir.v1.Inference/Generate 2>&1 || true)
expect 'InvalidArgument' "$wrong"
expect 'temperature' "$wrong"
echo "grpcurl: seven services, health, a stream and a refusal"
