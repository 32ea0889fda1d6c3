"""Killable processes, for libraries that may hang or swallow all memory.

Each loads its library once and answers one request at a time. One that misses its deadline or dies
is replaced by the next request. The functions are synchronous, for several threads."""

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from peers.environments.graders import START_SECONDS, TIMEOUT_SECONDS, worker
from peers.environments.graders.worker import Reply, Setup
from peers.sandbox import SandboxError
from peers.sandbox.frames import receive, send
from peers.sandbox.launcher import handed_down
from swarm.errors import DECODE_ERRORS, SwarmError
from swarm.world.child import CHILD_ENVIRONMENT
from swarm.world.process import INSTALLED_VARIABLE, describe_status

END_SECONDS = 5.0
"""Wall time for a process to end once it has closed its connection."""
MEMORY_BYTES = 512 << 20
"""Memory of a process beyond its libraries."""
REQUESTS_PER_PROCESS = 20_000
"""Then a process is replaced, because libraries keep what they computed."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
"""Environment variables of a process that is not confined: what a task needs is on this machine,
else the machines of a run would not agree on it."""
LAST_WORDS = 300
"""Characters of a dead process's stderr in an error."""


class ProcessFailed(SwarmError):
    """A process ended before it answered, or could not be started."""


class Overdue(ProcessFailed):
    """A process was killed at its deadline, or had used up its CPU time."""


class OutOfTime(Overdue):
    """A process had used up its CPU time, as it would on any machine."""


class OutOfMemory(ProcessFailed):
    """A process had used up its memory, as it would on any machine."""


class ServiceError(SwarmError):
    """The service raised an exception; its process lives on."""


class Pool:
    """A process that runs one service; it starts when it is needed."""

    def __init__(
        self,
        service: str,
        timeout_seconds: float,
        memory_bytes: int = MEMORY_BYTES,
        cpu_seconds: float = 0.0,
        *,
        arguments: Mapping[str, Any] | None = None,
        interpreter: Path | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """`service`: the `module:Class` of a callable object (see `worker`), made with the
        `arguments`. `cpu_seconds`: CPU time for each request, beside `timeout_seconds` of wall
        time; 0: any.

        `interpreter`: another Python, for a service that needs the owner's variables and
        network."""
        self.timeout_seconds, self.memory_bytes = timeout_seconds, memory_bytes
        self._start_seconds, self._interpreter = start_seconds, interpreter
        self._setup = Setup(
            service, memory_bytes, cpu_seconds, dict(arguments or {}), interpreter is None
        )
        self._turn = threading.Lock()
        self._idle: list[_Process] = []
        self.replaced = 0
        """Processes that were replaced because they hung or died."""
        weakref.finalize(self, _kill_all, self._idle)

    def ask(self, request: Any, timeout_seconds: float | None = None) -> Any:
        """The service's reply to a JSON value.

        Raises `ServiceError` with the exception that the service raised, `SandboxError` where a
        sandbox failed it, `Overdue` at the deadline and `ProcessFailed` when the process dies or
        runs out of memory. If that process had answered before, another one tries once more: an
        earlier request may have spoilt the first."""
        seconds = timeout_seconds or self.timeout_seconds
        with self._turn:
            process = self._taken()
            if process.answered:
                try:
                    return self._asked(process, request, seconds)
                except Overdue:
                    raise
                except ProcessFailed:
                    process = self._taken()
            return self._asked(process, request, seconds)

    def close(self) -> None:
        """End the process, unless it is at work."""
        _kill_all(self._idle)

    def _taken(self) -> "_Process":
        if self._idle:
            return self._idle.pop()
        return _Process(self._setup, self._interpreter, self._start_seconds)

    def _asked(self, process: "_Process", request: Any, seconds: float) -> Any:
        try:
            reply = process.ask(request, seconds)
            if reply.out_of_memory:
                raise OutOfMemory(f"it used all of its {self.memory_bytes >> 20} MiB of memory")
        except BaseException:
            self.replaced += 1
            process.kill()
            raise
        if process.answered < REQUESTS_PER_PROCESS:
            self._idle.append(process)
        else:
            process.kill()
        if reply.without_sandbox:
            raise SandboxError(reply.without_sandbox)
        if reply.error:
            raise ServiceError(reply.error)
        return reply.value


def _kill_all(processes: "list[_Process]") -> None:
    while processes:
        processes.pop().kill()


@cache
def pool_of(service: str, cpu_seconds: float = 0.0) -> Pool:
    """This process's pool of a grader's service, shared by all that ask for it."""
    return Pool(service, TIMEOUT_SECONDS, cpu_seconds=cpu_seconds)


@cache
def starter() -> ThreadPoolExecutor:
    """The thread that starts all processes: the kernel kills them when their thread ends."""
    return ThreadPoolExecutor(1, "graders")


class _Process:
    def __init__(self, setup: Setup, interpreter: Path | None, start_seconds: float) -> None:
        self.answered = 0
        self._setup, self._start_seconds = setup, start_seconds
        self._ours, self._theirs = socket.socketpair()
        send(self._ours, setup)
        self._words = b""
        """The end of its standard error: a process that may write without end fills no disk."""
        self._is_ready = False
        try:
            self._process = starter().submit(self._start, interpreter).result()
        except OSError as error:
            self._ours.close()
            raise ProcessFailed(f"it cannot be started ({error.strerror})") from error
        self._listener = threading.Thread(target=self._listen, name="words", daemon=True)
        self._listener.start()

    def ask(self, request: Any, seconds: float) -> Reply:
        """Raises `ProcessFailed`, of which `Overdue` is one."""
        if not self._is_ready:
            loaded = self._next(self._start_seconds, "loading its library")
            if loaded.error:
                raise ProcessFailed(loaded.error)
            if loaded.out_of_memory:
                return loaded
            self._is_ready = True
        self._ours.settimeout(seconds)
        try:
            send(self._ours, request)
        except OSError:
            raise self._ended() from None
        reply = self._next(seconds, "answering")
        self.answered += 1
        return reply

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._ours.close()

    def _start(self, interpreter: Path | None) -> subprocess.Popen[bytes]:
        with self._theirs:
            descriptor = self._theirs.fileno()
            program = [str(interpreter or sys.executable), "-P", "-m", worker.__name__]
            handed = {} if interpreter is None else handed_down()
            return subprocess.Popen(
                [*program, str(descriptor), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(descriptor, *map(int, handed.values())),
                env=_confined()
                if interpreter is None
                else CHILD_ENVIRONMENT | os.environ | OFFLINE | handed,
                cwd="/",
                start_new_session=True,
            )

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as written:
            while chunk := os.read(written.fileno(), 1 << 16):
                self._words = (self._words + chunk)[-4 * LAST_WORDS :]

    def _next(self, seconds: float, what: str) -> Reply:
        try:
            return msgspec.msgpack.decode(receive(self._ours, seconds), type=Reply)
        except TimeoutError:
            raise Overdue(f"it was still {what} after {seconds:g} s and was killed") from None
        except (EOFError, OSError):
            raise self._ended() from None
        except (ValueError, *DECODE_ERRORS) as error:
            raise ProcessFailed(f"it sent no reply ({error})") from None

    def _ended(self) -> ProcessFailed:
        """The error that says how it ended."""
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return ProcessFailed("it closed its connection")
        if status == -signal.SIGPROF:
            return OutOfTime(
                f"it took more than {self._setup.cpu_seconds:g} s of CPU time and was killed"
            )
        how = describe_status(status)
        self._listener.join(END_SECONDS)
        said = " ".join(self._words.decode("utf-8", "replace").split())[-LAST_WORDS:]
        return ProcessFailed(f"it ended {how}" + (f", and said: {said}" if said else ""))


def _confined() -> dict[str, str]:
    """Variables of a process: nothing of the owner's but where its modules lie. Equal hash seeds
    let libraries that iterate over sets of texts do the same everywhere."""
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)  # noqa: PTH100
    installed = os.environ.get(INSTALLED_VARIABLE)
    return {
        **({} if installed is None else {INSTALLED_VARIABLE: installed}),  # whose keys to close
        **CHILD_ENVIRONMENT,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": path,
        "LANG": "C.UTF-8",
    }
