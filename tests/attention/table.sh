#!/usr/bin/env bash
# Each `Suite.Name` (or `Suite.Prefix*`) that attention/README.md mentions is a test of tests/attention or
# tests/kvcache, and each script or program it mentions is there.
set -euo pipefail
cd "$(dirname "$0")/../.."
wrong=0 seen=0
while read -r name; do
  suite=${name%%.*} test=${name#*.}
  case $test in
    '*') pattern="$suite, *[A-Za-z0-9]" ;;
    *'*') pattern="$suite, *${test%\*}" ;;
    *) pattern="$suite, *$test\\)" ;;
  esac
  seen=$((seen + 1))
  if ! grep -rqE "TEST(_P|_F)?\($pattern" tests/attention tests/kvcache tests/cli; then
    echo "attention/README.md names $name, which is no test"
    wrong=1
  fi
done < <(grep -oE '`[A-Z][A-Za-z0-9]+\.([A-Z][A-Za-z0-9]*)?\*?`' attention/README.md | tr -d '`' | sort -u)
echo "$seen names"
[ "$seen" -ge 40 ] && [ $wrong -eq 0 ]
