"""What cannot be graded in an evaluation: counted by kind, listed in a file, bounded by a share."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from swarm.errors import UserError
from swarm.jobs.evaluation import RowsRead, Sample
from swarm.sentences import numbered
from swarm.terminal.output import to_json, write_text

_VARYING = re.compile(r"(?<!\w)'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|\d[\d,.]*|\{.*?\}")
_PLACE = re.compile(r".*(?:row …|completion …(?: of [^:]*)?): ", re.DOTALL)
KINDS_SHOWN = 10


def kind_of(problem: str) -> str:
    """A problem without what differs from row to row: its place, quoted texts and numbers."""
    plain = re.sub(r"…(?:\s*…)+", "…", _VARYING.sub("…", problem))
    return re.split(r"[;(]", _PLACE.sub("", plain))[0].strip()


class Ungradable:
    """Rows of which no task can be made, and samples that nobody can grade."""

    def __init__(self, path: Path, share_max: float) -> None:
        """`path`: the file that lists them, made only if there are any."""
        self._path, self._share_max = path, share_max
        self._found: list[dict[str, str]] = []
        self._samples = 0

    def add_rows(self, environment: str, read: RowsRead) -> None:
        """Take the unusable rows of an environment. Raises `UserError` if too many are faulty.

        A row that is only too long for this model is no fault of its data.
        """
        for problem in read.unusable:
            self._add("row", environment, problem)
        self._check(read.faults, read.rows, f"rows of {environment}")

    def add(self, environment: str, sample: Sample, total: int) -> None:
        """Take a sample if it has a problem; raises `UserError` if too many of `total` have."""
        if sample.problem:
            self._add("sample", environment, sample.problem)
            self._samples += 1
            self._check(self._samples, total, "samples")

    def close(self) -> None:
        """Write the file, and say how many of what kind there are."""
        if not self._found:
            self._path.unlink(missing_ok=True)
            return
        write_text("the list", "\n".join(map(to_json, self._found)), self._path)
        kinds = Counter(f"{each['what']}s: {each['kind']}" for each in self._found)
        print(
            f"warning: {len(self._found):,} rows and samples cannot be graded and are left out, "
            f"see {self._path}",
            *(numbered(f"{count:,} {kind}") for kind, count in kinds.most_common(KINDS_SHOWN)),
            sep="\n  ",
            file=sys.stderr,
        )

    def _add(self, what: str, environment: str, problem: str) -> None:
        each = {"what": what, "environment": environment, "kind": kind_of(problem)}
        self._found.append({**each, "problem": problem})

    def _check(self, count: int, total: int, what: str) -> None:
        if count > self._share_max * total:
            raise UserError(
                f"{count:,} of {total:,} {what} cannot be graded, more than the share "
                f"--ungradable-max {self._share_max:g}; repair or leave out what {self._path} "
                "lists, or raise --ungradable-max; the same command continues"
            )
