"""The child process that plays an environment: started on first use, killed when it hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from peers.environments.verifiers.messages import (
    FRAME_BYTES_MAX,
    LENGTH_BYTES,
    Failed,
    Open,
    Opened,
    Reply,
    Request,
    Ungradable,
    decode_reply,
    encode,
)
from swarm.errors import SwarmError
from swarm.world.child import CHILD_ENVIRONMENT

OPEN_SECONDS = 180.0
"""Deadline to import the libraries and load the environment: 10 s of computing, on a busy machine,
and longer for a large data set."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
"""Environment variables of the child: what a task needs is on this machine, else the machines of a
run would not agree on it."""

LAST_WORDS_BYTES = 4096

CHUNK_BYTES = 1 << 20

R = TypeVar("R")


class PlayError(SwarmError):
    """The environment could not do what was asked; one sentence says why."""


@dataclass(frozen=True)
class HostLimits:
    """What one child may use."""

    seconds: float
    """Deadline of a call."""
    memory_bytes: int


class Host:
    """A child process with one environment. Calls may come from several threads."""

    def __init__(self, interpreter: Path, opening: Open, limits: HostLimits) -> None:
        """Nothing is started before the first call."""
        self._interpreter = interpreter
        self._opening = opening
        self._limits = limits
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._opened: Opened | None = None

    def opened(self, seconds: float = OPEN_SECONDS) -> Opened:
        """What the child said when it loaded the environment; raises `PlayError`."""
        with self._lock:
            return self._start(seconds)

    def call(self, request: Request, kind: type[R]) -> R:
        """Ask the child; raises `PlayError`.

        A child that died is started again by the next call.
        """
        with self._lock:
            self._start()
            return _expect(self._ask(request, self._limits.seconds), kind)

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def _start(self, seconds: float = OPEN_SECONDS) -> Opened:
        if self._running is not None and self._opened is not None:
            return self._opened
        self._running = _Running(self._interpreter, self._limits.memory_bytes)
        weakref.finalize(self, self._running.kill)
        try:
            self._opened = _expect(self._ask(self._opening, seconds), Opened)
        except PlayError:
            self._end()
            raise
        return self._opened

    def _ask(self, request: Request, seconds: float) -> Reply:
        assert self._running is not None
        try:
            return self._running.ask(encode(request), seconds)
        except TimeoutError as error:
            self._end()
            raise PlayError(f"it did not answer within {seconds:g} s, and was killed") from error
        except (EOFError, OSError) as error:
            words = self._running.last_words()
            self._end()
            raise PlayError(f"its process ended ({words})") from error
        except (ValueError, msgspec.DecodeError) as error:
            self._end()
            raise PlayError(f"its process said something else than an answer ({error})") from error
        except BaseException:  # a call that was interrupted leaves its reply in the socket
            self._end()
            raise

    def _end(self) -> None:
        if self._running is not None:
            self._running.kill()
        self._running = self._opened = None


class _Running:
    """A started child."""

    def __init__(self, interpreter: Path, memory_bytes: int) -> None:
        """Raises `PlayError` when it cannot be started."""
        self._socket, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        program = [str(interpreter), "-m", "peers.environments.verifiers.child"]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*program, str(theirs.fileno()), str(lifeline), str(memory_bytes)],
                    pass_fds=(theirs.fileno(), lifeline),
                    stdin=subprocess.DEVNULL,
                    stdout=self._errors,
                    stderr=self._errors,
                    env=CHILD_ENVIRONMENT | os.environ | OFFLINE,
                    start_new_session=True,
                )
            except OSError as error:
                self._socket.close()
                self._errors.close()
                os.close(self._lifeline)
                raise PlayError(
                    f"the Python {interpreter} cannot be started ({error.strerror})"
                ) from error
            finally:
                os.close(lifeline)

    def ask(self, frame: bytes, seconds: float) -> Reply:
        """Send a request and wait for its reply.

        Raises `TimeoutError`, `EOFError`, `OSError`, `ValueError` or `msgspec.DecodeError`.
        """
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall(frame)
        length = int.from_bytes(self._receive(LENGTH_BYTES, deadline), "big")
        if length > FRAME_BYTES_MAX:
            raise ValueError(f"a message of {length} bytes")
        return decode_reply(self._receive(length, deadline))

    def _receive(self, length: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < length:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            chunk = self._socket.recv(min(length - len(received), CHUNK_BYTES))
            if not chunk:
                raise EOFError
            received += chunk
        return bytes(received)

    def last_words(self) -> str:
        """The last line that the child wrote, or how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - LAST_WORDS_BYTES))
        lines = self._errors.read().decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"status {self._process.returncode}"

    def kill(self) -> None:
        """Kill the child and the processes that it started; may be called again."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._lifeline)
        elif self._socket.fileno() >= 0:
            os.close(self._lifeline)
        self._socket.close()
        self._errors.close()


def _expect(reply: Reply, kind: type[R]) -> R:
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, Failed | Ungradable):
        raise PlayError(reply.reason)
    raise PlayError(f"its process answered with {type(reply).__name__}")
