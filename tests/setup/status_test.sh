#!/usr/bin/env bash
# Each test that docs/status.md names is one of this build, and what the pages of docs, README and CONTRIBUTING link to is there:
# status_test.sh BUILD (a configured build folder)
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
while IFS=: read -r page link; do
  there=$(dirname "$page")/${link%%#*}
  [ -e "$there" ] || { echo "$page links to $link, which is not there"; wrong=1; }
done < <(grep -oHE '\]\([^) ]+\)' README.md CONTRIBUTING.md docs/*.md docs/*/*.md | sed 's/](\(.*\))$/\1/' | grep -vE ':(https?|mailto):?')
echo "$seen names"
[ "$seen" -ge 70 ] && [ $wrong -eq 0 ]
