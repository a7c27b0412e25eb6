#!/usr/bin/env bash
# Builds the operators for 64-bit ARM and runs random cases under qemu: run.sh BUILD_DIR [COUNT]
# Exit status 77, which ctest shows as skipped, where there is no cross compiler or no emulator.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
out=$1 count=${2:-2000}
compiler=${KVASIR_AARCH64_CXX:-aarch64-linux-gnu-g++}
emulator=$(command -v qemu-aarch64-static || command -v qemu-aarch64 || true)
command -v "$compiler" >/dev/null || { echo "skipped: no cross compiler (apt-get install g++-aarch64-linux-gnu)"; exit 77; }
[ -n "$emulator" ] || { echo "skipped: no emulator (apt-get install qemu-user-static)"; exit 77; }

mkdir -p "$out"
cd "$root"
sources=(core/{dtype,status,check,thread_pool,cpu}.cc kvcache/{view,quant}.cc
  attention/{registry,rope,validate,validate_step}.cc attention/reference/reference.cc
  attention/cases/{case,random_case,compare}.cc attention/cpu/*.cc tests/attention/neon/neon_main.cc)
objects=()
for source in "${sources[@]}"; do
  object=$out/${source//\//_}.o
  objects+=("$object")
  "$compiler" -std=c++20 -O2 -ffp-contract=off -Wall -Wextra -Wno-missing-field-initializers -I. -c "$source" -o "$object"
done
"$compiler" -static -pthread "${objects[@]}" -o "$out/neon_cases"
"$emulator" "$out/neon_cases" 1 "$count"
