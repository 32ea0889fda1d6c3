"""What proofs cost: ours against the toploc package's.

    python -m benchmarks.proofs
    python -m benchmarks.proofs --tokens 512 --widths 512

Prints one JSON object. Seconds are processor seconds of this process, all its threads together:
the median, minimum and maximum of `--repeats` runs in which both sides take turns.

`proofs`: building and verifying the proofs of `--tokens` tokens at each hidden width.
`build_ratio` and `verify_ratio` are our seconds divided by the package's, and null without it:

    pip install --no-binary toploc --no-build-isolation --no-deps --target FOLDER toploc==0.1.6
    PYTHONPATH=FOLDER:. python -m benchmarks.proofs

(three minutes and a C++ compiler; the published wheel does not fit our torch). With it, both sides
must give the same bytes.
"""

from __future__ import annotations

import argparse
import importlib
from collections import defaultdict
from typing import Any

import torch

from benchmarks.common import at_least, load_average, several, spread, timed
from peers.proofs import toploc
from swarm.terminal.output import print_json


def package() -> Any:
    """The toploc package; None if it is not installed."""
    try:
        return importlib.import_module("toploc")
    except ImportError:
        return None


def measure_proofs(tokens: int, width: int, repeats: int) -> dict[str, Any]:
    """Build and verify the proofs of random hidden states, ours and the package's in turn."""
    generator = torch.Generator().manual_seed(width)
    hidden = torch.randn(tokens, width, generator=generator).bfloat16()
    near = (hidden.float() * 1.004).bfloat16()
    theirs, seconds = package(), defaultdict[str, list[float]](list)

    def build() -> list[bytes]:
        return toploc.build(toploc.chunk_rows(hidden[:0], hidden))

    def verify(proofs: list[bytes]) -> list[toploc.ChunkResult]:
        return toploc.verify(toploc.chunk_rows(near[:0], near), proofs)

    def build_theirs() -> list[bytes]:
        made: list[bytes] = theirs.build_proofs_bytes(list(hidden), 32, 128, skip_prefill=True)
        return made

    def verify_theirs(proofs: list[bytes]) -> Any:
        return theirs.verify_proofs_bytes(near, proofs, 32, 128, skip_prefill=True)

    for _ in range(repeats):
        proofs, took = timed(build)
        seconds["build_seconds"].append(took)
        results, took = timed(verify, proofs)
        seconds["verify_seconds"].append(took)
        if not all(result.accepted for result in results):
            raise RuntimeError("an honest proof was refused")
        if theirs is not None:
            same, took = timed(build_theirs)
            seconds["package_build_seconds"].append(took)
            if same != proofs:
                raise RuntimeError("the package's proofs are others")
            _, took = timed(verify_theirs, proofs)
            seconds["package_verify_seconds"].append(took)
    told: dict[str, Any] = {}
    for name, values in seconds.items():
        told |= spread(name, values, 4)
    for name in ("build", "verify"):
        other = told.get(f"package_{name}_seconds")
        told[f"{name}_ratio"] = other and round(told[f"{name}_seconds"] / other, 3)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=at_least(32), default=4096)
    parser.add_argument("--widths", type=several(at_least(4)), default=[1024, 4096])
    parser.add_argument("--repeats", type=at_least(1), default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    told: dict[str, Any] = {**vars(given), "load_average": load_average()}
    toploc.build([torch.randn(32, 64).bfloat16()])  # builds the tables
    told["proofs"] = {
        str(width): measure_proofs(given.tokens, width, given.repeats) for width in given.widths
    }
    print_json(told)


if __name__ == "__main__":
    main()
