#!/usr/bin/env bash
# Installs the C library into a folder of its own and builds its example against that, by pkg-config: c_installed.sh BUILD
# Skipped (77) where there is no pkg-config or no C compiler.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v pkg-config >/dev/null && command -v cc >/dev/null || exit 77
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
cmake --install "$1" --component attention_c --prefix "$where/there" >/dev/null
mv "$where/there" "$where/moved" # nothing may remember where it was built
pc=$(find "$where/moved" -name kvasir-attention.pc)
export PKG_CONFIG_PATH=${pc%/*}
mapfile -t flags < <(pkg-config --cflags --libs kvasir-attention | xargs -n 1)
cc -std=c11 -Wall -Wextra -Werror -pedantic attention/example/decode.c "${flags[@]}" -lm -o "$where/decode"
LD_LIBRARY_PATH=$(pkg-config --variable=libdir kvasir-attention) "$where/decode"
version=$(sed -n 's/^project(kvasir VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
[ "$(pkg-config --modversion kvasir-attention)" = "$version" ] || { echo "the package says another version than $version"; exit 1; }
# Only the interface leaves the library, and it needs the C library alone.
library=$(find "$where/moved" -name 'libkvasir_attention_c.so.0')
strange=$(nm -D --defined-only "$library" | awk '{ print $3 }' | grep -vE '^kvasir_(attention|kvc)_' || true)
[ -z "$strange" ] || { echo "other symbols leave the library: $strange"; exit 1; }
needs=$(ldd "$library" | grep -vE 'linux-vdso|libc\.so|libm\.so|ld-linux' || true)
[ -z "$needs" ] || { echo "the library needs more than the C library: $needs"; exit 1; }
