#!/usr/bin/env bash
# What stands where a model is expected and is no file: a pipe that nobody writes to, a device, a folder, a link to nowhere. Each is
# refused, by its name, before long: special_files.sh KVASIR
set -euo pipefail
kvasir=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkfifo "$folder/pipe.gguf"
mkdir -p "$folder/empty" "$folder/folder/model.safetensors" "$folder/pipes"
echo '{}' >"$folder/folder/config.json"
mkfifo "$folder/pipes/config.json" "$folder/pipes/model.safetensors"
: >"$folder/nothing.gguf"
ln -s "$folder/away" "$folder/link.gguf"
ln -s "$folder/itself.gguf" "$folder/itself.gguf"
failed=0

# One command, its name for the messages first: it ends by itself, refuses, and says which file.
refused() {
  local what=$1 out code=0
  shift
  out=$(timeout -k 1 60 "$@" 2>&1) || code=$?
  if [ "$code" -eq 0 ] || [ "$code" -ge 124 ] || ! grep -q -- "$what" <<<"$out"; then
    echo "$*: exit $code: ${out:0:500}"
    failed=1
  fi
}

for file in "$folder"/{pipe.gguf,empty,folder,pipes,nothing.gguf,link.gguf,itself.gguf} /dev/zero /dev/null; do
  refused "$(basename "$file")" "$kvasir" inspect "$file"
  refused "$(basename "$file")" "$kvasir" inspect "$file" --json
  refused "$(basename "$file")" "$kvasir" generate --model "$file" x --max-tokens 1
  refused "$(basename "$file")" "$kvasir" serve --model "$file" --grpc-port 0 --http-port 0
done
dummy="dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260"
for file in "$folder/pipe.gguf" "$folder/empty" /dev/zero; do
  refused "chat template" "$kvasir" serve --model "$dummy" --chat-template "$file" --grpc-port 0 --http-port 0
done
exit $failed
