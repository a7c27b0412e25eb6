# What ./run, ./test and .ci/run share: phases with their time, one log, and messages that say what to do.
# Source it from a script that has set `set -euo pipefail`.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/kvasir
LOG=${KVASIR_SETUP_LOG:-$ROOT/build/setup.log}
JOBS=${KVASIR_JOBS:-$(nproc)}

on_terminal() { [ -t 1 ] && [ -t 2 ]; }

# die 'what happened' 'what to do' [more lines]
die() {
  printf '\n%s: %s\n' "${KVASIR_ME:-kvasir}" "$1" >&2
  shift
  [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
  exit 1
}

say() { printf '%s\n' "$*"; }

start_log() {
  mkdir -p "$(dirname "$LOG")" 2>/dev/null || die "cannot write in $ROOT" "Clone the repository where you may write."
  : >"$LOG"
  say "details: ${LOG#"$PWD"/}"
}

# The last thing the log says, short enough for one line.
log_tail_line() { tail -n 1 "$LOG" 2>/dev/null | tr -d '\r' | tr -c '[:print:]' ' ' | cut -c1-60; }

# Shows on a terminal that something goes on, until it is killed.
ticker() {
  local title=$1 begin=$SECONDS
  while sleep 1; do printf '\r\033[K  %s ... %d s  %s' "$title" $((SECONDS - begin)) "$(log_tail_line)"; done
}

# phase 'Title' command...: runs it with its output in the log and prints the time it took.
# The command stays in the foreground, so that Ctrl-C reaches it and it can leave things whole. A function given to it
# must check each of its steps: where a caller writes `phase ... || die`, bash ignores `set -e` all the way down.
phase() {
  local title=$1 begin=$SECONDS tick='' rc=0
  shift
  mkdir -p "$(dirname "$LOG")"
  printf '\n== %s: %s\n' "$title" "$*" >>"$LOG"
  if on_terminal; then
    ticker "$title" &
    tick=$!
  else
    say "  $title ..."
  fi
  trap 'stop_ticker "$tick"; printf "\nstopped; nothing is broken: run it again to go on\n" >&2; exit 130' INT TERM
  ("$@") >>"$LOG" 2>&1 </dev/null || rc=$?
  trap - INT TERM
  stop_ticker "$tick"
  if [ $rc -ne 0 ]; then
    printf '  %s: failed after %d s\n\n' "$title" $((SECONDS - begin)) >&2
    tail -n "${KVASIR_TAIL:-15}" "$LOG" | sed 's/^/    /' >&2
    return $rc
  fi
  say "  $title: $((SECONDS - begin)) s"
}

stop_ticker() {
  [ -n "$1" ] || return 0
  kill "$1" 2>/dev/null || true
  wait "$1" 2>/dev/null || true
  printf '\r\033[K'
}

# version_at_least 1.75.0 1.63.0 -> false
version_at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]; }

# need_space MIB PATH: what is about to be written must fit.
need_space() {
  local dir=$2 free
  while [ ! -d "$dir" ]; do dir=$(dirname "$dir"); done
  free=$(df -Pm "$dir" | awk 'NR == 2 { print $4 }')
  [ "$free" -ge "$1" ] || die "only $free MiB are free under $dir; $1 MiB are needed" \
    "Make room there, or move the cache with XDG_CACHE_HOME, and run this again: it goes on where it stopped."
}

# fetch_wheels FOLDER REQUIREMENTS: what the file names, unpacked into FOLDER. Each file's checksum is compared before it
# is opened, and nothing is built: a package's own code never runs here.
fetch_wheels() {
  PIP_ROOT_USER_ACTION=ignore python3 -m pip install -q --no-deps --no-compile --no-cache-dir --only-binary :all: \
    --require-hashes --target "$1" -r "$2"
}

# as_root command...: with sudo where this is not root.
as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}
