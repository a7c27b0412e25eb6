#!/usr/bin/env bash
# Makes a CUDA toolkit out of pinned wheels, for machines where none is installed:
#   tools/cuda-toolkit.sh [PREFIX]        (default ~/.cache/kvasir/cuda; 700 MB to fetch, 1.1 GB on disk)
# An unpacked prefix with the same pins is left alone. Nothing half-made is ever left under PREFIX.
set -euo pipefail
# shellcheck source=tools/lib.sh
. "$(dirname "$0")/lib.sh"
KVASIR_ME=cuda-toolkit

wheels=$ROOT/tools/cuda-wheels.txt
pins=$(sed -n 's/^\([a-z][^ ]*==[^ ]*\) .*/\1/p' "$wheels" | tr '\n' ' ')
pins=${pins% }
prefix=${1:-$CACHE/cuda}
stamp=$prefix/kvasir-pins.txt

if [ -x "$prefix/bin/nvcc" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$pins" ]; then
  say "the CUDA toolkit is in $prefix"
  exit 0
fi
python3 -m pip --version >/dev/null 2>&1 || die "python3 with pip is needed to fetch the CUDA wheels" \
  "Install it (Debian: apt-get install python3-pip) and run this again."
mkdir -p "$(dirname "$prefix")"
need_space 2500 "$prefix"

work=$(mktemp -d "$prefix.XXXXXX")
trap 'rm -rf "$work"' EXIT
say "fetching the CUDA toolkit (700 MB)"
fetch_wheels "$work/wheels" "$wheels" ||
  die "the CUDA wheels could not be fetched" "Check the network (and PIP_INDEX_URL, if you use a mirror); then run this again."

new=$work/toolkit
mv "$work/wheels/nvidia/cu13" "$new"
cp -a "$work/wheels/nvidia/nccl/include/." "$new/include/"
cp -a "$work/wheels/nvidia/nccl/lib/." "$new/lib/"
chmod +x "$new"/bin/* "$new"/nvvm/bin/*
ln -s lib "$new/lib64"  # where nvcc.profile looks
for lib in cudart.so.13 cublas.so.13 cublasLt.so.13 nvvm.so.4 nccl.so.2; do
  ln -sf "lib$lib" "$new/lib/lib${lib%%.so*}.so"  # wheels carry no links
done
"$new/bin/nvcc" --version >/dev/null || die "the fetched nvcc does not run on this machine" "It needs glibc 2.28 or newer."
printf '%s\n' "$pins" >"$new/kvasir-pins.txt"
rm -rf "$prefix"
mv "$new" "$prefix"
say "the CUDA toolkit is in $prefix"
