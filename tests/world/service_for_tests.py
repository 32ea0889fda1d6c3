"""A child service that tests start: it answers, fails, stalls, hogs and dies on request."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec
import trio

from peers.sandbox import Limits, Program, SandboxError, run
from peers.sandbox.launcher import start_launcher
from swarm.errors import DiskFullError
from swarm.world import Job, Setup, frames, progress

progress.REPORT_SECONDS = 0.01  # in the child


class Nothing(Job, frozen=True, kw_only=True):
    """Asks for something that needs no words."""

    patience_seconds: ClassVar[float] = 30.0


class Impatient(Nothing, frozen=True, kw_only=True):
    patience_seconds: ClassVar[float] = 0.05


class Named(Nothing, frozen=True, kw_only=True):
    name: str


class Sized(Nothing, frozen=True, kw_only=True):
    count: int


class Raw(Nothing, frozen=True, kw_only=True):
    raw: bytes


class Rounds(Job, frozen=True, kw_only=True):
    """Work for so many rounds, until `folder` holds a file of that round's number."""

    patience_seconds: ClassVar[float] = 1.0
    folder: str
    rounds: int


class Surroundings(msgspec.Struct):
    folder: str
    for_tests: str | None
    openmp_threads: str
    session_leader: bool
    threads: int


class Greeting(Setup, frozen=True, kw_only=True):
    greeting: str


class Service:
    def __init__(self, setup: Greeting | None) -> None:
        self.greeting = setup.greeting if setup else "hello"
        self.runs = trio.Event()

    async def run(self) -> None:
        """Goes on beside the calls."""
        self.runs.set()
        await trio.sleep_forever()

    async def wait_for_run(self, job: Nothing) -> None:
        await self.runs.wait()

    async def greet(self, job: Named) -> str:
        return f"{self.greeting} {job.name}"

    async def pid(self, job: Nothing) -> int:
        return os.getpid()

    async def fail(self, job: Nothing) -> None:
        raise ValueError("on purpose")

    async def mistake(self, job: Nothing) -> None:
        raise DiskFullError("the person can put it right")

    async def stall(self, job: Nothing) -> None:
        """In a thread that nothing can stop."""
        print("stalling", file=sys.stderr)
        await trio.to_thread.run_sync(time.sleep, 600)

    async def rest(self, job: Nothing) -> None:
        await trio.sleep_forever()

    async def work(self, job: Rounds) -> int:
        """Rounds done; each reports progress and waits for its file."""
        return await trio.to_thread.run_sync(_work, job)

    async def report_last(self, job: Nothing) -> None:
        """Its report and its answer are due at once."""
        time.sleep(2 * progress.REPORT_SECONDS)  # noqa: ASYNC251
        progress.report()

    async def small_frames(self, job: Sized) -> None:
        frames.FRAME_BYTES_MAX = job.count

    async def grow(self, job: Sized) -> str:
        return "x" * job.count

    async def hog(self, job: Sized) -> int:
        return len(b"x" * job.count)

    async def die(self, job: Nothing) -> None:
        print("these are my last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    async def give_up(self, job: Nothing) -> None:
        print("a line\nthe call does not return", file=sys.stderr, flush=True)
        os._exit(progress.HUNG_STATUS)

    async def mutter_and_die(self, job: Nothing) -> None:
        print("said on stdout")
        print("\x1b[2Jan unfinished line", end="", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    async def say(self, job: Sized) -> None:
        for line in range(job.count):
            print(f"line {line}", file=sys.stderr)

    async def surroundings(self, job: Nothing) -> Surroundings:
        return Surroundings(
            folder=str(Path.cwd()),
            for_tests=os.environ.get("SWARM_FOR_TESTS"),
            openmp_threads=os.environ["OMP_NUM_THREADS"],
            session_leader=os.getsid(0) == os.getpid(),
            threads=len(os.listdir("/proc/self/task")),  # noqa: PTH208
        )

    async def variable(self, job: Named) -> str:
        return os.environ.get(job.name, "")

    async def draw(self, job: Nothing) -> tuple[float, float]:
        import numpy

        return random.random(), float(numpy.random.random())

    async def outstay(self, job: Nothing) -> None:
        threading.Thread(target=time.sleep, args=(600,)).start()

    async def answer_with(self, job: Raw) -> None:
        """What code that has taken over a parser could write to its owner."""
        for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as each:
                each.sendall(job.raw)  # trio's own do not mind
        await trio.sleep_forever()

    async def marker(self, job: Nothing) -> str:
        """A module that only another interpreter has."""
        import swarm_marker_for_tests  # type: ignore[import-not-found]

        text: str = swarm_marker_for_tests.TEXT
        return f"{text} {sys.executable}"


def _work(job: Rounds) -> int:
    for number in range(job.rounds):
        while not (Path(job.folder) / str(number)).exists():
            progress.checkpoint()
            time.sleep(0.001)
        Path(job.folder, f"{number}.done").touch()
    return job.rounds


class Unmakeable:
    def __init__(self) -> None:
        raise RuntimeError("no such engine")


class Closed:
    """A service to which the keys are closed."""

    reads_in_home = ("incoming",)

    async def read(self, job: Named) -> str:
        """The text of a file, or why it cannot be read."""
        try:
            return await trio.Path(job.name).read_text()
        except OSError as error:
            return type(error).__name__

    async def move(self, job: Named) -> str:
        """Move a file into the folder `incoming` beside it."""
        path = Path(job.name)
        try:
            os.replace(path, path.parent / "incoming" / path.name)  # noqa: PTH105
        except OSError as error:
            return type(error).__name__
        return "moved"


class Walled:
    """A service that runs programs in sandboxes, and does not say what it reads."""

    before_keys_close = staticmethod(start_launcher)

    read = Closed.read

    async def execute(self, job: Named) -> str:
        """What a Python program prints, in a sandbox."""
        program = Program(source=job.name)
        outcome = await trio.to_thread.run_sync(partial(run, program))
        return outcome.stdout.decode() + outcome.stderr.decode()

    async def exceed(self, job: Named) -> str:
        """Why a sandbox with 2⁶⁰ of something is refused."""
        limits = replace(Limits(), **{job.name: 1 << 60})
        try:
            run(Program(source="0"), limits)
        except SandboxError as error:
            return str(error)
        return "it ran"

    async def fork(self, job: Named) -> str:
        """What a fork server answers to a request for a child."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.settimeout(job.patience_seconds)
            server.connect(job.name)
            null = os.open(os.devnull, os.O_RDWR)
            try:
                socket.send_fds(server, [b"child"], [null, null])
                return server.recv(16).decode()
            except OSError as error:
                return type(error).__name__

    async def temporary(self, job: Nothing) -> str:
        """Read a temporary file back."""
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("17")
            file.flush()
            return await trio.Path(file.name).read_text()
