#!/usr/bin/env bash
# Each `Suite.Name` (or `Suite.Prefix*`) that a page mentions is a test of the folders given, and there are so many at least:
#   table.sh [PAGE LEAST FOLDER...]   (attention/README.md, where nothing is said)
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -gt 0 ] || set -- attention/README.md 40 tests/attention tests/kvcache tests/cli
page=$1 least=$2
shift 2
wrong=0 seen=0
while read -r name; do
  suite=${name%%.*} test=${name#*.}
  case $test in
    '*') pattern="$suite, *[A-Za-z0-9]" ;;
    *'*') pattern="$suite, *${test%\*}" ;;
    *) pattern="$suite, *$test\\)" ;;
  esac
  seen=$((seen + 1))
  if ! grep -rqE "TEST(_P|_F)?\($pattern" "$@"; then
    echo "$page names $name, which is no test"
    wrong=1
  fi
done < <(grep -oE '`[A-Z][A-Za-z0-9]+\.([A-Z][A-Za-z0-9]*)?\*?`' "$page" | tr -d '`' | sort -u)
echo "$seen names"
[ "$seen" -ge "$least" ] && [ $wrong -eq 0 ]
