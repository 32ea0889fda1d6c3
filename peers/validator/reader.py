"""Reading hostile files in a process that may die: pyarrow aborts on some garbled footers (an
unknown codec, a histogram of the wrong size). Memory and time are limited."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
import trio
from blake3 import blake3

from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import BadSubmission, Header, ReadLimits, read
from swarm.world import Child, ChildDied, ChildError, Job
from swarm.world.compute import LocalCompute
from swarm.world.observable import Observable
from swarm.world.progress import report

MEMORY_BYTES_MAX = 1 << 30
"""Memory limit of the reading process: several times the largest file (64 MiB by default), its
arrays and their canonical form together."""


ATTEMPTS_MAX = 2
"""Readers that may die of a file before it is refused: the first may have died as memory ran
out."""


@dataclass(frozen=True)
class Contents:
    """The content of a submission's file."""

    header: Header
    rollouts: Rollouts
    turns: list[list[bytes]]
    """[rows] Signed turns of environment peers; empty for a file without any."""
    canonical_digest: bytes
    """BLAKE3 of the rollouts' canonical bytes."""
    canonical_bytes: int
    """Number of these bytes."""


class ReadFile(Job, frozen=True, kw_only=True):
    """Read a submission, and write its rollouts' canonical bytes to `out_path`."""

    patience_seconds: ClassVar[float] = 30.0
    """Reading reports no progress; the largest file takes less than 1 s."""

    path: str
    digest: bytes
    out_path: str
    limits: ReadLimits


class FileRead(msgspec.Struct, frozen=True, kw_only=True):
    """The result of reading: a header, and its turns; or a fault; or trouble."""

    header: Header | None = None
    turns: list[list[bytes]] = []
    fault: tuple[str, float, float, str, bool] | None = None
    """Arguments of a `BadSubmission`; the last is `proven`."""
    trouble: str = ""
    """An error of this machine, not of the file."""


class ReadingService:
    """Reads one file at a time; may die of it."""

    reads_in_home = ("incoming",)  # `peers.validator.inbox.FOLDER`

    def __init__(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    async def read(self, job: ReadFile) -> FileRead:
        """Read a file, blocking: the owner kills a process that takes too long."""
        try:
            submission = read(Path(job.path), job.limits, job.digest)
            Path(job.out_path).write_bytes(submission.rollouts.to_bytes())  # noqa: ASYNC240
        except BadSubmission as error:
            fault = (error.check, error.figure, error.threshold, error.detail, error.proven)
            return FileRead(fault=fault)
        except OSError as error:
            return FileRead(trouble=str(error))
        return FileRead(header=submission.header, turns=submission.turns)


class Reader:
    """Reads submissions in another process."""

    def __init__(self, memory_bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self._memory_bytes_max = memory_bytes_max
        self._child: Observable[Child | None] = Observable(None)

    async def run(self) -> None:
        """Keep a reading process running; raises when none starts."""
        while True:
            async with LocalCompute().child(
                "peers.validator.reader:ReadingService",
                name="reader",
                memory_limit_bytes=self._memory_bytes_max,
            ) as child:
                self._child.set(child)
                await self._child.wait_until(lambda child: child is None)

    def read(self, path: Path, digest: bytes, out_path: Path, limits: ReadLimits) -> Contents:
        """Read a submission, and write its rollouts' canonical bytes to `out_path`.

        Call it in a worker thread. Raises `BadSubmission` for a file that `submission_file.read`
        refuses, and for a file that kills its reader, which is not a proven fault. Raises `OSError`
        when the file is missing, its hash differs or the disk is full."""
        job = ReadFile(path=str(path), digest=digest, out_path=str(out_path), limits=limits)
        found = trio.from_thread.run(self._ask, job)
        if found.trouble:
            raise OSError(found.trouble)
        if found.fault is not None:
            raise BadSubmission(*found.fault[:4], proven=found.fault[4])
        assert found.header is not None
        canonical = out_path.read_bytes()
        return Contents(
            found.header,
            Rollouts.from_bytes(canonical),
            found.turns,
            blake3(canonical).digest(),
            len(canonical),
        )

    async def _ask(self, job: ReadFile) -> FileRead:
        failures = 0
        while True:
            child = await self._child.wait_until(lambda child: child is not None)
            assert child is not None
            try:
                return await child.request("read", job, FileRead)
            except (ChildDied, ChildError) as error:
                self._child.set(None)
                report()  # a new reader starts with all of its time
                if isinstance(error, ChildDied) and error.blameless:
                    continue
                print(error, file=sys.stderr)
                failures += 1
                if failures < ATTEMPTS_MAX:
                    continue
                raise BadSubmission(
                    "schema", 1, 0, "reading the file kills the reader or never ends", proven=False
                ) from error
