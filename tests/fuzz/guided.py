"""The process in which atheris runs one target; `python -m tests.fuzz` starts it.

    python -m tests.fuzz.guided TARGET FOLDER SECONDS

libFuzzer adds inputs with coverage of their own to FOLDER, and writes one that failed into FOLDER's
parent. It ends this process itself. atheris instruments modules when they are imported, so it is
imported first.
"""

from __future__ import annotations

import sys

import atheris

INPUT_BYTES_MAX = 8192
"""Longest input: longer ones make a parser slow without reaching other lines."""

INPUT_SECONDS_MAX = 20
"""Seconds of one input after which libFuzzer calls it a hang; the machine may be busy."""

MEMORY_MIB_MAX = 3072


def main(name: str, folder: str, seconds: str) -> None:
    """Fuzz one target; returns only if libFuzzer does."""
    with atheris.instrument_imports(include=["swarm", "peers"]):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    atheris.Setup(
        [
            sys.argv[0],
            f"-max_total_time={seconds}",
            f"-max_len={INPUT_BYTES_MAX}",
            f"-timeout={INPUT_SECONDS_MAX}",
            f"-rss_limit_mb={MEMORY_MIB_MAX}",
            f"-artifact_prefix={folder}/../",
            "-print_final_stats=1",
            folder,
        ],
        target,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:4])
