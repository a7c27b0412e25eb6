#!/usr/bin/env bash
# Who listens on a TCP port: tools/port-owner.sh PORT prints "name (pid 123)"; exit code 1 when nobody does.
# Reads /proc alone: a bare machine has neither ss nor lsof.
set -euo pipefail
hex=$(printf '%04X' "$1")
inodes=$(awk -v port=":$hex" '$4 == "0A" && substr($2, length($2) - 4) == port { print $10 }' /proc/net/tcp /proc/net/tcp6 2>/dev/null)
[ -n "$inodes" ] || exit 1
for inode in $inodes; do
  for fd in /proc/[0-9]*/fd/*; do
    if [ "$(readlink "$fd" 2>/dev/null)" = "socket:[$inode]" ]; then
      pid=${fd#/proc/} && pid=${pid%%/*}
      printf '%s (pid %s)\n' "$(cat "/proc/$pid/comm")" "$pid"
      exit 0
    fi
  done
done
echo 'a process of another user'
