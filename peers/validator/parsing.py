"""Reading hostile files in a process that may die.

As far as its fuzzers show, pyarrow has no memory errors. But it aborts on some garbled footers
(an unknown codec, a histogram of the wrong size). So the inspector reads files in a separate
process with a memory and a time limit, and starts a new one when a file kills it.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3

from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import BadSubmission, Header, ReadLimits, read

MEMORY_BYTES_MAX = 1 << 30
"""Memory limit of the reading process: several times the largest file (64 MiB by default), its
arrays and their canonical form together."""

SECONDS_MAX = 30
"""Time limit for one file; the largest takes less than 1 s."""

ANSWER_BYTES_MAX = 64 * 1024


@dataclass(frozen=True)
class Contents:
    """The content of a submission's file."""

    header: Header
    rollouts: Rollouts
    canonical_digest: bytes
    """BLAKE3 of the rollouts' canonical bytes."""
    canonical_bytes: int
    """Number of these bytes."""


class _Request(msgspec.Struct):
    path: str
    digest: bytes
    out_path: str
    limits: ReadLimits


class _Fault(msgspec.Struct):
    check: str
    figure: float
    threshold: float
    detail: str
    proven: bool


class _Answer(msgspec.Struct):
    """The reader's answer; exactly one field is set."""

    header: Header | None = None
    fault: _Fault | None = None
    trouble: str = ""
    """An error of this machine, not of the file."""


class Reader:
    """Reads submissions in another process."""

    def __init__(
        self, memory_bytes_max: int = MEMORY_BYTES_MAX, seconds_max: int = SECONDS_MAX
    ) -> None:
        self._limits = (str(memory_bytes_max), str(seconds_max))
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "peers.validator.parsing", *self._limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def read(self, path: Path, digest: bytes, out_path: Path, limits: ReadLimits) -> Contents:
        """Read a submission, and write its rollouts' canonical bytes to `out_path`.

        Raises `BadSubmission` for a file that `submission_file.read` refuses, and for a file that
        kills its reader, which is not a proven fault. Raises `OSError` when the file is missing,
        its hash differs or the disk is full.
        """
        request = _Request(str(path), digest, str(out_path), limits)
        if self._process.poll() is not None:
            self.close()
            self._process = self._start()
        line = self._exchange(msgspec.json.encode(request) + b"\n")
        if not line.endswith(b"\n"):
            self.close()
            self._process = self._start()  # now, so that the next file need not wait for it
            raise BadSubmission(
                "schema", 1, 0, "reading the file kills the reader or never ends", proven=False
            )
        answer = msgspec.json.decode(line, type=_Answer)
        if answer.trouble:
            raise OSError(answer.trouble)
        if answer.fault is not None:
            fault = answer.fault
            raise BadSubmission(
                fault.check, fault.figure, fault.threshold, fault.detail, proven=fault.proven
            )
        assert answer.header is not None
        canonical = out_path.read_bytes()
        return Contents(
            answer.header,
            Rollouts.from_bytes(canonical),
            blake3(canonical).digest(),
            len(canonical),
        )

    def _exchange(self, request: bytes) -> bytes:
        """Send a request and return the answer, an incomplete line if the reader died.

        No deadline is needed: either the reader answers or its own alarm kills it.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            os.write(self._process.stdin.fileno(), request)  # short: fits the pipe
        except BrokenPipeError:
            return b""
        return self._process.stdout.readline(ANSWER_BYTES_MAX)

    def close(self) -> None:
        """End the reading process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _answer(request: _Request) -> _Answer:
    try:
        submission = read(Path(request.path), request.limits, request.digest)
        Path(request.out_path).write_bytes(submission.rollouts.to_bytes())
    except BadSubmission as error:
        return _Answer(
            fault=_Fault(error.check, error.figure, error.threshold, error.detail, error.proven)
        )
    except OSError as error:
        return _Answer(trouble=str(error))
    return _Answer(header=submission.header)


def main(memory_bytes_max: int, seconds_max: int) -> None:
    """Answer requests on standard input until it ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # RLIMIT_DATA, not RLIMIT_AS: libraries reserve address space that they never write to.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = memory_bytes_max if hard == resource.RLIM_INFINITY else min(memory_bytes_max, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
    for line in sys.stdin.buffer:
        signal.alarm(seconds_max)
        answer = _answer(msgspec.json.decode(line, type=_Request))
        signal.alarm(0)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
