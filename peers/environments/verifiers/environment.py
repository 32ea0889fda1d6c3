"""The environment `verifiers`: any package of the `verifiers` library."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from peers.environments.interface import (
    Episodes,
    Grade,
    Message,
    NotGradable,
    Split,
    Task,
    Transcript,
)
from peers.environments.tasks import split_of
from peers.environments.verifiers import messages
from peers.environments.verifiers.installed import install_command, interpreter_for
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
from swarm.errors import SwarmError, UserError
from swarm.rollouts.seeds import digest
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


ALIKE = 4
"""The tasks of a game may differ in nothing that the model sees. A package whose first tasks have
one prompt is taken for such a game."""

DRAWS_MAX = 1000
"""Attempts to draw a task of a split. If one task in sixteen is held out, all attempts miss it with
a probability of 1e-28."""

COMPLETION_ROLE = "text"
"""The role of a prompt that the model continues rather than answers, in the older interface."""


Spoken = str | tuple[Message, ...]


class VerifiersOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which package, and what it may use."""

    package: str
    """Module of the package, such as `marble-v1`."""
    version: str = ""
    """Version of the package that every machine must have; empty: any."""
    library: Literal["0.4.0", "0.3.1"] = "0.4.0"
    """Version of `verifiers`: 0.4.0 for the 1.x interface, 0.3.1 for `load_environment`."""
    arguments: str = "{}"
    """JSON object of the package's own options."""
    tasks: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000
    """Tasks used of a package that has more, or infinitely many; the first ones."""
    reward_low: float = 0.0
    """The package's reward that counts as 0."""
    reward_high: float = 1.0
    """The package's reward that counts as 1."""
    seconds: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    """Deadline of a call: a prompt, an observation or a grade."""
    memory_mib: Annotated[int, Meta(ge=256)] = 4096
    """Memory of the process that plays the package."""


@dataclass(frozen=True)
class PackageTasks:
    """The tasks of a package by index, uniform within each split."""

    count: int
    make: Callable[[int], Task]
    by_index: bool
    """Whether the split is that of the index, because all prompts are alike."""

    def draw(self, seed: bytes, split: Split, step: int) -> Task:
        """See `Tasks.draw`; raises `UserError` when a split has no task."""
        for attempt in range(DRAWS_MAX):
            randomness = digest("swarm/1/draw", seed, attempt.to_bytes(4, "big"))
            index = int.from_bytes(randomness, "big") % self.count
            if self.by_index and split_of(str(index)) != split:
                continue
            task = self.make(index)
            if self.by_index or split_of(task.prompt) == split:
                return task
        raise UserError(
            f"environment 'verifiers': none of {self.count} tasks is of the split {split}; one in "
            "sixteen is held out: raise the option tasks"
        )


@dataclass
class _Played:
    """The state of an episode."""

    index: int
    texts: list[str] = field(default_factory=list)


class Verifiers(Episodes):
    """Plays a package of `verifiers` in a child process under that library's own Python."""

    name = "verifiers"
    version = "1"
    Options = VerifiersOptions
    options: VerifiersOptions

    def __init__(self, options: VerifiersOptions | None = None) -> None:
        """Check the options; raises `UserError`. The child starts with the first task."""
        if options is None or not options.package:
            raise UserError(
                "environment 'verifiers' plays a package; name one with the option package"
            )
        super().__init__(options)
        if options.reward_high <= options.reward_low:
            raise UserError(
                f"environment 'verifiers': reward_high {options.reward_high:g} is not above "
                f"reward_low {options.reward_low:g}; raise it"
            )
        # The first call starts the child, and a task may take several; each has its own deadline.
        self.call_seconds = OPEN_SECONDS + 4 * options.seconds
        limits = HostLimits(options.seconds, options.memory_mib << 20)
        opening = messages.Open(options.package, self._arguments(), options.tasks)
        self._host = Host(interpreter_for(options.library), opening, limits)

    def tasks(self) -> PackageTasks:
        """The package's first tasks, uniform within each split; raises `UserError`."""
        count = self._count
        alike = len({self._task(index).prompt for index in range(min(count, ALIKE))}) == 1
        return PackageTasks(count, self._task, by_index=count > 1 and alike)

    def start(self, task: Task) -> _Played:
        return _Played(task.data["index"])

    def step(self, state: _Played, text: str) -> Spoken | None:
        """What the package says next; raises `UserError` when its code fails."""
        state.texts.append(text)
        try:
            reply = self._host.call(messages.Step(state.index, state.texts), messages.Observed)
        except PlayError as error:
            raise self._failed(error) from error
        return _prompt(reply.messages) if reply.messages else None

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        """The package's own reward, scaled to [0, 1], with the parts that it names.

        Raises `NotGradable` when its code fails or needs what a transcript does not have.
        """
        texts = [turn.text for turn in transcript.turns if turn.kind == "model"]
        request = messages.Grade(task.data["index"], texts, transcript.finished)
        try:
            reply = self._host.call(request, messages.Graded)
        except PlayError as error:
            raise NotGradable(f"package {self.options.package!r}: {error}") from error
        low, high = self.options.reward_low, self.options.reward_high
        if not low <= reply.reward <= high:
            raise NotGradable(
                f"package {self.options.package!r} gives the reward {reply.reward:g}, outside "
                f"reward_low {low:g} to reward_high {high:g}; widen these options"
            )
        parts = {name: part for name, part in reply.parts.items() if math.isfinite(part)}
        return Grade((reply.reward - low) / (high - low), parts)

    @cached_property
    def _count(self) -> int:
        options = self.options
        try:
            opened = self._host.opened()
        except PlayError as error:
            raise self._failed(error) from error
        if options.version and opened.package_version != options.version:
            there = opened.package_version or "an unknown version"
            raise UserError(
                f"package {options.package!r} is installed in version {there!r}, but the run wants "
                f"{options.version!r}; type: {install_command(options.library)} --package "
                f"{options.package}=={options.version}"
            )
        return opened.tasks

    def _task(self, index: int) -> Task:
        try:
            drawn = self._host.call(messages.Draw(index), messages.Drawn)
        except PlayError as error:
            raise self._failed(error) from error
        return Task(_prompt(drawn.messages), drawn.answer, {"index": index})

    def _arguments(self) -> dict[str, Any]:
        arguments: Any = None
        with suppress(ValueError):
            arguments = json.loads(self.options.arguments)
        if not isinstance(arguments, dict):
            raise UserError(
                f"environment 'verifiers': arguments {self.options.arguments!r:.60} is no JSON "
                "object; write it like '{\"difficulty\": 2}'"
            )
        return arguments

    def _failed(self, error: PlayError) -> UserError:
        package, library = self.options.package, self.options.library
        return UserError(
            f"package {package!r} cannot be played with verifiers {library}: {error}; correct its "
            f"options, or install it: {install_command(library)} --package {package}"
        )


def _prompt(said: list[messages.Said]) -> Spoken:
    if all(each.role == COMPLETION_ROLE for each in said):
        return "".join(each.content for each in said)
    return tuple(Message(each.role, each.content) for each in said)
