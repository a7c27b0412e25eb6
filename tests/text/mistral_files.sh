#!/usr/bin/env bash
# mistral_files.sh PROGRAM [ARGUMENT...]: runs a test with KVASIR_MISTRAL_FILES, the folder of Mistral's real tokenizer files: out of
# mistral-common's wheel, which is fetched once. Exit status 77, which ctest shows as skipped, where it cannot be had.
set -euo pipefail
# shellcheck source=tools/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../tools/lib.sh"
wheel=$ROOT/tools/mistral-wheel.txt
to=$CACHE/mistral-common

fetch() {
  local work
  mkdir -p "$CACHE"
  work=$(mktemp -d "$CACHE/mistral-common.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  fetch_wheels "$work" "$wheel" >&2 || return
  rm -rf "$to"
  cp "$wheel" "$work/mistral_common/data/fetched" && mv "$work/mistral_common/data" "$to"
}

if ! cmp -s "$wheel" "$to/fetched"; then
  fetch || { echo "skipped: mistral-common's wheel cannot be fetched here"; exit 77; }
fi
KVASIR_MISTRAL_FILES=$to exec "$@"
