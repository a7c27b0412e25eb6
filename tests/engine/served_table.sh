#!/usr/bin/env bash
# Each `Suite.Name` (or `Suite.*`) that docs/served.md mentions is a test of a served model.
set -euo pipefail
cd "$(dirname "$0")/../.."
wrong=0 seen=0
while read -r name; do
  suite=${name%%.*} test=${name#*.}
  pattern="$suite, *$test\\)"
  [ "$test" != '*' ] || pattern="$suite, *[A-Za-z0-9]"
  seen=$((seen + 1))
  if ! grep -rqE "TEST(_P|_F)?\($pattern" tests/engine tests/model tests/cli tests/server; then
    echo "docs/served.md names $name, which is no test"
    wrong=1
  fi
done < <(grep -oE '`[A-Z][A-Za-z0-9]+\.([A-Z][A-Za-z0-9]*|\*)`' docs/served.md | tr -d '`' | sort -u)
echo "$seen names"
[ "$seen" -ge 15 ] && [ $wrong -eq 0 ]
