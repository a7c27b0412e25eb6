#!/usr/bin/env bash
# No kernel compiled for a wider instruction set runs anything when the program starts: there a processor without it would
# end the program before anybody looked. initializers.sh LIBRARY.a...
set -euo pipefail
wrong=0 seen=0
for library in "$@"; do
  while read -r symbol; do
    echo "$library: $symbol runs when the program starts"
    wrong=1
  done < <(nm "$library" 2>/dev/null | grep -oE '_GLOBAL__sub_I_(.*/)?(kernels_|amx|byte_vectors)[^ ]*' || true)
  seen=$((seen + $(nm "$library" 2>/dev/null | grep -cE '^(kernels_|amx|byte_vectors)[^ ]*\.o:' || true)))
done
echo "$seen objects of kernels"
[ "$seen" -ge 4 ] && [ $wrong -eq 0 ]
