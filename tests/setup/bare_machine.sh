#!/usr/bin/env bash
# The stranger's first day, for real: a fresh Debian 12 with git and certificates alone, a clone, ./run twice, ./test
# twice, each timed; then the binary in an empty Debian 13. By hand (root, debootstrap, 6 GB, most of an hour):
#   tests/setup/bare_machine.sh FOLDER
# Writes bench/results/bare-machine.json. FOLDER is removed first when it holds an earlier run.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:?"usage: tests/setup/bare_machine.sh FOLDER"}
http=28080 grpc=28051
bookworm=$folder/bookworm trixie=$folder/trixie
[ "$(id -u)" -eq 0 ] || { echo 'skipped: a chroot needs root'; exit 77; }
command -v debootstrap >/dev/null || { echo 'skipped: debootstrap is not installed'; exit 77; }

unmount() { for each in proc sys dev; do umount -l "$1/$each" 2>/dev/null || true; done; }
trap 'unmount "$bookworm"; unmount "$trixie"' EXIT

# The chroot reaches its packages as this machine does, and trusts whom it trusts.
make_chroot() {
  local suite=$1 dir=$2
  unmount "$dir"
  rm -rf --one-file-system "$dir"
  mkdir -p "$dir"
  debootstrap --variant=minbase ${3:+"--include=$3"} "$suite" "$dir" >"$folder/$suite.log"
  cp /etc/resolv.conf /etc/hosts "$dir/etc/"
  cp /etc/apt/apt.conf.d/*registry* "$dir/etc/apt/apt.conf.d/" 2>/dev/null || true
  if [ "$suite" = bookworm ]; then
    rm -f "$dir/etc/apt/sources.list" && cp /etc/apt/sources.list.d/*.sources "$dir/etc/apt/sources.list.d/"
    cp /etc/pip.conf "$dir/etc/" 2>/dev/null || true
    cp -r /usr/local/share/ca-certificates/. "$dir/usr/local/share/ca-certificates/"
    chroot "$dir" update-ca-certificates >/dev/null
  fi
  for each in proc sys dev; do mkdir -p "$dir/$each" && mount --rbind "/$each" "$dir/$each" && mount --make-rslave "$dir/$each"; done
}

inside() { env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TERM=dumb LANG=C.UTF-8 \
  chroot "$bookworm" bash -c "cd /kvasir && $1" </dev/null; }

answers() {
  local said
  said=$(curl -s --max-time 30 "http://127.0.0.1:$http/v1/chat/completions" -H 'Content-Type: application/json' \
    -d '{"messages":[{"role":"user","content":"What is the capital of France?"}],"max_tokens":12,"temperature":0}')
  grep -q Paris <<<"$said" || { echo "no answer: $said" >&2; return 1; }
}

# run_once LOG: ./run until it answers; prints its seconds, and stops it by SIGINT as Ctrl-C would.
run_once() {
  local begin=$EPOCHREALTIME end server
  inside "exec ./run --http-port $http --grpc-port $grpc" >"$1" 2>&1 &
  server=$!
  until grep -q 'kvasir is ready' "$1" 2>/dev/null; do
    kill -0 $server 2>/dev/null || { cat "$1" >&2; return 1; }
    sleep 0.05
  done
  end=$EPOCHREALTIME
  answers >&2
  kill -INT "$(pgrep -P $server -x kvasir || pgrep -nx kvasir)" && wait $server || true
  awk -v a="$begin" -v b="$end" 'BEGIN { printf "%.2f", b - a }'
}

test_once() {
  local begin=$EPOCHREALTIME
  inside './test' >"$1" 2>&1 || { tail -n 60 "$1" >&2; return 1; }
  tail -n 1 "$1" >&2
  awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }'
}

mkdir -p "$folder"
echo "a fresh Debian 12 in $bookworm"
make_chroot bookworm "$bookworm" ca-certificates,git
git clone -q "$root" "$bookworm/kvasir"
before=$(du -sm --one-file-system "$bookworm" | cut -f1)
run_cold=$(run_once "$folder/run-cold.log") && echo "./run, cold: $run_cold s until it answered"
run_mib=$(($(du -sm --one-file-system "$bookworm" | cut -f1) - before)) && echo "  and $run_mib MiB of disk"
run_again=$(run_once "$folder/run-again.log") && echo "./run, again: $run_again s"
test_cold=$(test_once "$folder/test-cold.log") && echo "./test, cold: $test_cold s"
test_again=$(test_once "$folder/test-again.log") && echo "./test, again: $test_again s"

echo "the binary in an empty Debian 13 in $trixie"
make_chroot trixie "$trixie"
cp "$bookworm/kvasir/build/release/kvasir" "$(find "$bookworm/root" -name SmolLM2-135M-Instruct.Q4_1.gguf -print -quit)" "$trixie/"
chroot "$trixie" /kvasir serve --model /SmolLM2-135M-Instruct.Q4_1.gguf --http-port $http --grpc-port $grpc >"$folder/trixie-serve.log" 2>&1 &
server=$!
for _ in $(seq 100); do curl -sf "http://127.0.0.1:$http/ready" >/dev/null && break; sleep 0.1; done
answers
echo "it answered there"
kill -TERM $server && wait $server

cat >"$root/bench/results/bare-machine.json" <<JSON
{"commit": "$(git -C "$root" rev-parse --short HEAD)", "command": "tests/setup/bare_machine.sh", "cores": $(nproc),
 "run_cold_s": $run_cold, "run_cold_mib": $run_mib, "run_again_s": $run_again,
 "test_cold_s": $test_cold, "test_again_s": $test_again, "answers_in_debian_13": true,
 "linked": "$(ldd "$bookworm/kvasir/build/release/kvasir" | awk '{ printf "%s%s", sep, $1; sep = " " }')"}
JSON
cat "$root/bench/results/bare-machine.json"
