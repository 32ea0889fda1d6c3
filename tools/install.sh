#!/usr/bin/env bash
# Make .venv from requirements.lock: what `make install` runs.
#
# Needs Python 3.11 or newer, and no compiler.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

# --- Python ------------------------------------------------------------------------------------

is_new_enough() {
    command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

python=
for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13; do
    if [[ -n $candidate ]] && is_new_enough "$candidate"; then
        python=$candidate
        break
    fi
done
[[ -n $python ]] || fail "Swarm needs Python 3.11 or newer; install it (Debian, Ubuntu: sudo apt-get install \
python3.11 python3.11-venv), or say where it is: make install PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments; type: sudo apt-get install python3-venv \
(or the python3.N-venv package of your Python)"

# --- the environment ---------------------------------------------------------------------------

if [[ -x .venv/bin/python ]] && ! is_new_enough .venv/bin/python; then
    fail ".venv holds an older Python; type: rm -r .venv && make install"
fi
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet --no-compile)

# torch first and by its exact version: an open range, or one resolved together with the rest,
# would take a CUDA build (several GB) even where a CPU build is at hand.
"${pip[@]}" "$(grep '^torch==' requirements.lock)"
# The lock is complete without fastecdsa, which libp2p requires for a handshake that Swarm leaves
# out, and which would be built from source.
rest=(--no-deps -r requirements.lock)
# uv is several times as fast, but knows nothing of pip's settings, such as an index of your own.
# Twice quiet: older versions of pip warn of how some packages are built.
{ "${pip[@]}" uv && .venv/bin/uv pip install --quiet --python .venv/bin/python "${rest[@]}"; } \
    2>/dev/null || "${pip[@]}" --quiet "${rest[@]}"
"${pip[@]}" --no-deps --no-build-isolation -e .
# Of 15,000 modules this compiles those that peers and the demo import: else each of the first
# processes would.
.venv/bin/swarm doctor --home build/nowhere >/dev/null 2>&1 || true
.venv/bin/python -c 'from importlib import import_module
from peers.demo.processes import PRELOAD_COMPUTE, PRELOAD_PEERS
for name in ("peers.demo.play", *PRELOAD_PEERS, *PRELOAD_COMPUTE): import_module(name)' || true

# libp2p installs `trio-stubs`, long out of date: mypy is to find trio's own types first.
mkdir -p build/typing
ln -sfn "$(.venv/bin/python -c 'import pathlib, trio; print(pathlib.Path(trio.__file__).parent)')" \
    build/typing/trio

touch .venv/installed
say "installed into .venv; type: make demo"
