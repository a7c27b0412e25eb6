#!/usr/bin/env bash
# The table "What bounds what" of docs/operations.md: the places, tests and options that its lines name are there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
lines=0 wrong=0
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
done < <(sed -n '/^## What bounds what/,/^## Alerts/p' docs/operations.md | grep '^| ' | tail -n +3)
[ "$lines" -gt 0 ] || { echo "docs/operations.md has no such table" && wrong=1; }
[ $wrong -ne 0 ] || echo "$lines lines; what they name is there"
exit $wrong
