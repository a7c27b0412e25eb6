#!/usr/bin/env bash
# Builds the model's kernels for 64-bit ARM and runs them beside the plain ones under qemu: run.sh BUILD_DIR
# Skipped (77) where there is no cross compiler or no emulator.
set -euo pipefail
# shellcheck source=tests/neon_tools.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../neon_tools.sh"
sources=(core/{dtype,status,check,thread_pool,cpu}.cc model/formats/weight_type.cc
  model/cpu/{elementwise,pack_stored,packed,kernels,kernels_portable,kernels_neon,kernels_neon_dot}.cc tests/model/neon/neon_main.cc)
objects=()
for source in "${sources[@]}"; do
  object=$out/${source//\//_}.o
  objects+=("$object")
  flags=(-O2)
  [[ $source == */kernels_* ]] && flags=(-O3)
  [[ $source == *_dot.cc ]] && flags+=(-march=armv8.2-a+dotprod)
  "$compiler" -std=c++20 -ffp-contract=off -Wall -Wextra -Wno-missing-field-initializers "${flags[@]}" -I. \
    -c "$source" -o "$object"
done
"$compiler" -static -pthread "${objects[@]}" -o "$out/neon_kernels"
"$emulator" "$out/neon_kernels"
