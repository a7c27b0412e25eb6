#!/usr/bin/env bash
# curl reads server-sent events as they come, and a body that is too large is refused.
set -euo pipefail
command -v curl >/dev/null || { echo "skipped: curl is not installed"; exit 77; }
body='{"messages":[{"role":"user","content":"What is the capital of France?"}],"max_tokens":12,"temperature":0,"stream":true}'
stream=$(curl -sN -H 'Content-Type: application/json' -d "$body" "$KVASIR_HTTP/v1/chat/completions")
[ "$(tail -n 2 <<<"$stream" | head -n 1)" = 'data: [DONE]' ] || [ "$(tail -n 1 <<<"$stream")" = 'data: [DONE]' ] || { echo "no [DONE]: $stream"; exit 1; }
grep -q 'Paris' <<<"$(tr -d '\n' <<<"$stream")" || { echo "no Paris: $stream"; exit 1; }
code=$(head -c 9000000 /dev/zero | tr '\0' ' ' | curl -s -o /dev/null -w '%{http_code}' -H 'Content-Type: application/json' --data-binary @- "$KVASIR_HTTP/v1/completions")
[ "$code" = 413 ] || { echo "a body of 9 MB answered $code, not 413"; exit 1; }
echo "sse: $(grep -c '^data: ' <<<"$stream") events"
