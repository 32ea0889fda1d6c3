#!/usr/bin/env bash
# Make .venv from requirements.lock: what `make install` runs.
#
# Needs Python 3.11 or newer. One dependency (fastecdsa, of libp2p) is built from source, so a C
# compiler and the headers of GMP are needed too: root on Debian or Ubuntu gets them installed,
# everybody else is told what to type.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

# --- Python ------------------------------------------------------------------------------------

is_new_enough() {
    command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

python=
for candidate in "${PYTHON:-}" python3.11 python3 python3.12; do
    if [[ -n $candidate ]] && is_new_enough "$candidate"; then
        python=$candidate
        break
    fi
done
[[ -n $python ]] || fail "Swarm needs Python 3.11; install it (Debian, Ubuntu: sudo apt-get install \
python3.11 python3.11-venv), or say where it is: make install PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments; type: sudo apt-get install python3-venv \
(or the python3.N-venv package of your Python)"

# --- compiler and headers ----------------------------------------------------------------------

missing_headers() {
    local compiler
    compiler=$(command -v gcc || command -v cc) || return 0
    ! printf '#include <gmp.h>\nint main(void){return 0;}\n' |
        "$compiler" -x c - -lgmp -o /dev/null 2>/dev/null && return 0
    ! printf '#include <Python.h>\nint main(void){return 0;}\n' |
        "$compiler" -x c - -fsyntax-only \
            "-I$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')" \
            2>/dev/null && return 0
    return 1
}

if missing_headers; then
    version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    packages=(gcc libc6-dev libgmp-dev)
    "$python" -c 'import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").exists())' ||
        packages+=("$version-dev")
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        say "installing ${packages[*]} (fastecdsa is built from source)"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
        ! missing_headers || fail "the C compiler still cannot build with gmp.h and Python.h"
    elif command -v apt-get >/dev/null; then
        fail "a C compiler with the headers of GMP and Python is needed; type:
    sudo apt-get install ${packages[*]}
and then again: make install"
    elif command -v dnf >/dev/null; then
        fail "a C compiler with the headers of GMP and Python is needed; type:
    sudo dnf install gcc gmp-devel python3-devel
and then again: make install"
    elif command -v brew >/dev/null; then
        fail "a C compiler and GMP are needed; type:
    xcode-select --install; brew install gmp
    export CFLAGS=-I$(brew --prefix)/include LDFLAGS=-L$(brew --prefix)/lib
and then again: make install"
    else
        fail "a C compiler (gcc) and the headers of GMP (gmp.h) and Python (Python.h) are needed; \
install them with your system's package manager, then type: make install"
    fi
fi

# --- the environment ---------------------------------------------------------------------------

if [[ -x .venv/bin/python ]] && ! is_new_enough .venv/bin/python; then
    fail ".venv holds an older Python; type: rm -r .venv && make install"
fi
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check)

# torch first and by its exact version: an open range, or one resolved together with the rest,
# would take a CUDA build (several GB) even where a CPU build is at hand.
"${pip[@]}" install --quiet "$(grep '^torch==' requirements.lock)"
# Twice: older versions of pip warn of how some packages are built.
"${pip[@]}" install --quiet --quiet -r requirements.lock
"${pip[@]}" install --quiet --no-deps --no-build-isolation -e .

# libp2p installs `trio-stubs`, long out of date: mypy is to find trio's own types first.
mkdir -p build/typing
ln -sfn "$(.venv/bin/python -c 'import pathlib, trio; print(pathlib.Path(trio.__file__).parent)')" \
    build/typing/trio

touch .venv/installed
say "installed into .venv; type: make demo"
