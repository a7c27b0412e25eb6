# For tests that build for 64-bit ARM and run under qemu, sourced by them: $root, $out (their first argument), $compiler
# and $emulator. Exit status 77, which ctest shows as skipped, where there is no cross compiler or no emulator.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$1
compiler=${KVASIR_AARCH64_CXX:-aarch64-linux-gnu-g++}
emulator=$(command -v qemu-aarch64-static || command -v qemu-aarch64 || true)
command -v "$compiler" >/dev/null || { echo "skipped: no cross compiler (apt-get install g++-aarch64-linux-gnu)"; exit 77; }
[ -n "$emulator" ] || { echo "skipped: no emulator (apt-get install qemu-user-static)"; exit 77; }
mkdir -p "$out"
cd "$root"
