#!/usr/bin/env bash
# The table "What bounds what" of docs/operations.md, and the one of this folder's README.md: the places, tests and
# options that their lines name are there, and each of the 19 points has its line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
lines=0 wrong=0
rows_of() { sed -n "/^## $2/,/^## [^${2:0:1}]/p" "$1" | grep '^| ' | tail -n +3; }
for point in {1..19}; do
  grep -q "^| $point\. " tests/hostile/README.md || { echo "tests/hostile/README.md has no line of point $point" && wrong=1; }
done
while IFS= read -r row; do
  lines=$((lines + 1))
  place=${row%|}
  names=$(grep -o '`[^`]*`' <<<"${place##*|}" | tr -d '`') || { echo "no place and no test: $row" && wrong=1; }
  for option in $(grep -o '`[a-z]*_[a-z_]*`' <<<"$row" | tr -d '`'); do
    grep -qe "^  --${option//_/-}\b" docs/configuration.md && continue
    echo "there is no option $option: $row" && wrong=1
  done
  for name in $names; do
    if [[ $name == */* ]]; then
      [ ! -e "$name" ] || continue
    elif [[ $name =~ ^[A-Z][A-Za-z0-9]+([.][A-Za-z0-9]+)?$ ]]; then
      ! grep -rqE --include='*_test.cc' "^TEST(_F|_P)?[(]${name/./, }" tests || continue
    else
      [ -z "$(find tests model server engine -name "$name" -print -quit)" ] || continue
    fi
    echo "there is no test and no file $name: $row" && wrong=1
  done
done < <(rows_of docs/operations.md 'What bounds what' && rows_of tests/hostile/README.md 'Each way that once worked')
[ "$lines" -gt 50 ] || { echo "docs/operations.md or README.md has no such table" && wrong=1; }
[ $wrong -ne 0 ] || echo "$lines lines; what they name is there"
exit $wrong
