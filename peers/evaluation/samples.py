"""Files of finished samples: what makes an evaluation resumable.

JSON lines: first the checkpoint and the settings that the samples depend on, then one per sample,
as they finished, written at once. Only complete lines count: none is lost or counted twice."""

import fcntl
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

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
    """Rows without a task and samples without a grade: counted, listed in a file, bounded."""

    def __init__(self, path: Path, share_max: float) -> None:
        """`path`: the file that lists them, made only if there are any."""
        self._path, self._share_max = path, share_max
        self._found: list[dict[str, str]] = []
        self._samples = 0

    def add_rows(self, environment: str, read: RowsRead) -> None:
        """Take the unusable rows of an environment; those too long for this model are no fault of
        its data. Raises `UserError` if too many are faulty."""
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


FORMAT = 1

SYNC_SECONDS = 5.0
"""Most seconds of finished samples that a power cut may take."""


class SampleFile:
    """The samples of one checkpoint."""

    def __init__(self, file: Path, descriptor: int, samples: list[Sample]) -> None:
        self.samples = samples
        self._file, self._descriptor = file, descriptor
        self._synced = time.monotonic()

    def append(self, sample: Sample) -> None:
        """Raises `UserError` on a full disk; the samples before it are kept."""
        line = to_json(msgspec.to_builtins(sample)).encode() + b"\n"
        try:
            if os.write(self._descriptor, line) < len(line):
                raise OSError(0, "the disk is full")
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                os.fsync(self._descriptor)
                self._synced = time.monotonic()
        except OSError as error:
            raise UserError(
                f"{self._file} cannot be written ({error.strerror}); the samples so far are "
                "kept, and the same command continues"
            ) from error
        self.samples.append(sample)


@contextmanager
def open_samples(file: Path, head: Mapping[str, Any]) -> Iterator[SampleFile]:
    """Begin or resume a file. Raises `UserError` for one with another checkpoint's or setting's
    samples, and for one that another process is writing."""
    first = {"format": FORMAT, **head}
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror})") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{file} is being written by another command") from error
        raw = file.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        samples = _read(file, whole, first) if whole else []
        if len(whole) < len(raw):
            os.ftruncate(descriptor, len(whole))
        if not whole:
            os.write(descriptor, to_json(first).encode() + b"\n")
        yield SampleFile(file, descriptor, samples)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(file: Path, whole: bytes, first: Mapping[str, Any]) -> list[Sample]:
    head, *lines = whole.splitlines()
    _compare(file, head, json.loads(to_json(first)))
    found: dict[tuple[int, int], Sample] = {}
    for number, line in enumerate(lines, 2):
        try:
            sample = msgspec.json.decode(line, type=Sample)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise UserError(
                f"{file}: line {number} is no sample ({error}); remove that line"
            ) from error
        if sample.key not in found or found[sample.key].problem:  # tried again
            found[sample.key] = sample
    return list(found.values())


def _compare(file: Path, head: bytes, first: Mapping[str, Any]) -> None:
    way_out = "choose another file, or remove it to begin anew"
    try:
        held = json.loads(head)
    except ValueError:
        held = None
    if not isinstance(held, dict) or "checkpoint" not in held:
        raise UserError(f"{file} is no file of samples; {way_out}")
    for name, value in first.items():
        if held.get(name) == value:
            continue
        if name == "checkpoint":
            raise UserError(
                f"{file} holds samples of another checkpoint (its hash begins with "
                f"{str(held[name])[:12]}, this one's with {str(value)[:12]}); {way_out}"
            )
        raise UserError(
            f"{file} holds samples of other settings: {name} is {held.get(name)!r:.200} "
            f"there and {value!r:.200} here; {way_out}"
        )
