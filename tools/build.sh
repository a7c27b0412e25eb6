#!/usr/bin/env bash
# Configures when needed and builds: tools/build.sh PRESET TITLE [TARGET...] [-- -DOPTION=VALUE...]
# Options are applied when the build folder does not have them yet, so a build that has more keeps it.
set -euo pipefail
# shellcheck source=tools/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
export PATH="$PATH:$HOME/.cargo/bin"
# What one clone compiled serves the next, wherever it lies.
export CCACHE_BASEDIR=$ROOT CCACHE_NOHASHDIR=1

preset=$1 title=$2
shift 2
targets=() options=()
while [ $# -gt 0 ]; do
  case $1 in
    --) shift && options=("$@") && break ;;
    *) targets+=("$1") ;;
  esac
  shift
done
dir=build/$preset

configured() {
  local option name
  [ -f "$dir/build.ninja" ] || return 1
  for option in ${options[@]+"${options[@]}"}; do
    name=${option#-D}
    grep -q "^${name%%=*}:[A-Z]*=${name#*=}\$" "$dir/CMakeCache.txt" || return 1
  done
}

# A compiler of ours takes up to 1.5 GB; more at once than fit would only swap.
fitting=$(awk -v jobs="$JOBS" '/MemAvailable/ { n = int($2 / 1572864); print n < 1 ? 1 : n < jobs ? n : jobs }' /proc/meminfo)
build() { NINJA_STATUS='[%f of %t] ' ninja -C "$dir" -j "$fitting" ${targets[@]+"${targets[@]}"}; }

if ! configured; then
  phase "Configure ($preset)" cmake --preset "$preset" ${options[@]+"${options[@]}"} ||
    die "the build could not be configured" "The whole output is in ${LOG#"$PWD"/}."
fi
if ! ninja -C "$dir" -n ${targets[@]+"${targets[@]}"} 2>/dev/null | grep -q 'no work to do'; then
  need_space 1500 "$ROOT"
  KVASIR_TAIL=40 phase "$title" build || die "the build failed (above are its last lines)" \
    "The whole output is in ${LOG#"$PWD"/}. \`Killed\` there means too little memory: try KVASIR_JOBS=1."
fi
