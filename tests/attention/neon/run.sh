#!/usr/bin/env bash
# Builds the operators for 64-bit ARM and runs random cases under qemu: run.sh BUILD_DIR [COUNT]
# Skipped (77) where there is no cross compiler or no emulator.
set -euo pipefail
# shellcheck source=tests/neon_tools.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../neon_tools.sh"
count=${2:-2000}
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
