"""Run fuzz targets for longer than the tests do.

    python -m tests.fuzz [TARGET …] --seconds 60 [--keep]

With atheris (`pip install atheris`), libFuzzer changes the valid examples and the kept corpus,
guided by the coverage of `swarm` and `peers`. Without it, hypothesis makes the same inputs as in
the tests until the time is over, unguided. The first line of each target says which of the two it
is. Exit status 1: a target failed; the input is in the folder that the last line names.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, given, settings

from benchmarks.common import at_least
from tests.fuzz import files
from tests.fuzz.target import CORPUS, Target
from tests.fuzz.targets import TARGETS

KEPT_BYTES_MAX = 8 << 10
"""Bytes kept of one target's corpus: 200 KiB for all of them."""


def fuzz(target: Target, seconds: int, *, keep: bool = False) -> bool:
    """Run a target for `seconds`; returns whether it held."""
    if importlib.util.find_spec("atheris") is not None:
        return guided(target, seconds, keep)
    return unguided(target, seconds)


def guided(target: Target, seconds: int, keep: bool) -> bool:
    """Run a target under atheris; returns whether it held."""
    print(f"{target.name}: atheris, guided by coverage, {seconds} s", flush=True)
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{target.name}-"))
    corpus = folder / "corpus"
    corpus.mkdir()
    known = {hashlib.sha1(raw).hexdigest(): raw for raw in [*target.seeds, *target.kept()]}
    for name, raw in known.items():
        (corpus / name).write_bytes(raw)
    command = [sys.executable, "-m", "tests.fuzz.guided", target.name, str(corpus), str(seconds)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (ran.stdout + ran.stderr).splitlines()
    if ran.returncode:
        print("\n".join(lines[-60:]))
        print(f"{target.name} failed: {folder}")
        return False
    runs = [line for line in lines if "number_of_executed_units" in line or line.startswith("Done")]
    found = sorted(
        (path for path in corpus.iterdir() if path.name not in known),
        key=lambda path: path.stat().st_size,
    )
    print(f"  {'; '.join(runs)}; {len(found)} inputs with coverage of their own")
    if keep:
        _keep(target, found)
    shutil.rmtree(folder)
    return True


def _keep(target: Target, found: list[Path]) -> None:
    """Add the smallest new inputs to the kept corpus, as far as they fit."""
    place = CORPUS / target.name
    place.mkdir(parents=True, exist_ok=True)
    left = KEPT_BYTES_MAX - sum(path.stat().st_size for path in place.iterdir())
    for path in found:
        left -= path.stat().st_size
        if left < 0:
            break
        shutil.copy(path, place / path.name[:16])


def unguided(target: Target, seconds: int) -> bool:
    """Run a target under hypothesis; returns whether it held."""
    print(f"{target.name}: hypothesis, unguided, {seconds} s (for coverage: pip install atheris)")
    until, count = time.monotonic() + seconds, 0

    @settings(
        max_examples=1000, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(target.inputs())
    def run(raw: bytes) -> None:
        nonlocal count
        count += 1
        if time.monotonic() < until:
            target(raw)

    try:
        while time.monotonic() < until:
            run()
    except Exception as error:
        print(f"{target.name} failed: {error!r} {getattr(error, '__notes__', '')}")
        return False
    print(f"  {count} inputs")
    return True


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=at_least(1), default=60, help="for each target")
    parser.add_argument(
        "--keep", action="store_true", help="add the smallest new inputs to tests/fuzz/corpus"
    )
    given_ = parser.parse_args()
    if unknown := set(given_.targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are: {', '.join(TARGETS)}")
    held = []
    try:
        for name in given_.targets or TARGETS:
            held.append(fuzz(TARGETS[name], given_.seconds, keep=given_.keep))
    finally:
        files.close()
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
