#!/usr/bin/env bash
# Install programs that some tests need: PROGRAM or PROGRAM=PACKAGE of Debian or Ubuntu, as root or
# by sudo where it asks for no password. What cannot be had is named, and its tests are skipped.
set -euo pipefail

lacks() { ! command -v "${1%%=*}" >/dev/null; }

as_root=(env DEBIAN_FRONTEND=noninteractive)
[[ $(id -u) == 0 ]] || as_root=(sudo -n "${as_root[@]}")
apt=("${as_root[@]}" apt-get -qq -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20
    -o Acquire::Retries=1)

packages=()
for each in "$@"; do
    ! lacks "$each" || packages+=("${each##*=}")
done
if [[ ${#packages[@]} != 0 ]] && command -v apt-get >/dev/null; then
    printf 'installing %s\n' "${packages[*]}" >&2
    {
        # Lists of packages that are there already are used.
        apt-cache show "${packages[@]}" || "${apt[@]}" update
        "${apt[@]}" install --yes --no-install-recommends "${packages[@]}"
    } >/dev/null 2>&1 || true
fi
for each in "$@"; do
    ! lacks "$each" || printf 'warning: %s is not to be had here; its tests are skipped\n' "${each%%=*}" >&2
done
