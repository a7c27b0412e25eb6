#!/usr/bin/env bash
# What the build fetches is what it was when it was chosen: a checksum for every file, compared before it is opened.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
files=0 wrong=0
for list in tools/*-wheel.txt tools/*-wheels.txt; do
  files=$((files + 1))
  while IFS= read -r line; do
    [[ $line =~ ^[A-Za-z0-9._-]+==[^\ ]+(\ --hash=sha256:[0-9a-f]{64})+$ ]] && continue
    echo "$list: not one version with its checksums: $line" && wrong=1
  done < <(grep -vE '^ *(#|$)' "$list")
done
[ $files -ge 3 ] || { echo "the lists of wheels are not where they were" && wrong=1; }
for word in --require-hashes '--only-binary :all:' --no-deps; do
  grep -q -e "$word" tools/lib.sh || { echo "tools/lib.sh: fetch_wheels lacks $word" && wrong=1; }
done
# Whoever fetches a wheel to build with it does so through fetch_wheels; other tools than the build's may not.
if grep -nE 'pip3? (install|download)' tools/setup.sh tools/build.sh tools/cuda-toolkit.sh tools/fleet.sh; then
  echo "a build script asks pip itself" && wrong=1
fi
for script in tools/setup.sh tools/cuda-toolkit.sh; do
  grep -q '^ *fetch_wheels ' "$script" || { echo "$script no longer compares checksums" && wrong=1; }
done
# The images' base can be named by digest.
for image in docker/Dockerfile*; do
  grep -q '^ARG BASE=' "$image" && continue
  echo "$image: its base cannot be named by digest" && wrong=1
done
grep -q -- '--locked' model/text/CMakeLists.txt || { echo "cargo may take other versions than Cargo.lock's" && wrong=1; }
[ $wrong -ne 0 ] || echo "$files lists; each file has its checksum"
exit $wrong
