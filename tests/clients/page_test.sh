#!/usr/bin/env bash
# Headless Chromium opens the page: its script runs under the policy and shows the live figures.
set -euo pipefail
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)
[ -n "$browser" ] || { echo "skipped: chromium is not installed"; exit 77; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
flags=(--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
       --disable-component-update --disable-sync --user-data-dir="$dir/profile" --virtual-time-budget=5000)
timeout 60 "$browser" "${flags[@]}" --window-size=1200,800 --screenshot="$dir/page.png" "$KVASIR_HTTP/" >/dev/null 2>&1
[ "$(stat -c %s "$dir/page.png")" -gt 20000 ] || { echo "the screenshot is empty"; exit 1; }
dom=$(timeout 60 "$browser" "${flags[@]}" --enable-logging=stderr --dump-dom "$KVASIR_HTTP/" 2>"$dir/console")
grep -q '<span id="state" role="status">serving</span>' <<<"$dom" || { echo "the state is not shown: $(grep -o 'id="state"[^<]*<' <<<"$dom")"; exit 1; }
grep -Eq 'id="used">[0-9]+ of [1-9]' <<<"$dom" || { echo "no cache figures"; exit 1; }
! grep -E 'Content Security Policy|Uncaught' "$dir/console" || exit 1
echo "page: live figures shown, nothing refused by the policy"
