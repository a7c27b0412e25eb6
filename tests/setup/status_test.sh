#!/usr/bin/env bash
# Each test that docs/status.md names is one of this build: status_test.sh BUILD
set -euo pipefail
cd "$(dirname "$0")/../.."
known=$(ctest --test-dir "$1" -N | awk '/Test +#/ { print $NF }')
wrong=0 seen=0
while read -r name; do
  seen=$((seen + 1))
  # A program that only a GPU build has is named with its suffix.
  if ! grep -qx "$name" <<<"$known" && ! grep -rqF "kvasir_test(${name%_test} " tests --include=CMakeLists.txt; then
    echo "docs/status.md names $name, which is no test"
    wrong=1
  fi
done < <(grep -oE '`(setup|core|kvcache|attention|model|text|scheduler|engine|server|clients?|cli|e2e|hostile|fuzz)_[a-z0-9_]+`' docs/status.md | tr -d '`' | sort -u)
echo "$seen names"
[ "$seen" -ge 60 ] && [ $wrong -eq 0 ]
