"""Child processes on this machine: started, supervised, and never outliving their owner.

A child is reached over one socket and watched through a pidfd. It runs in a session of its own, so
Ctrl-C in a terminal reaches its owner only, who ends it by closing the socket. The kernel kills it
when its owner dies.
"""

from __future__ import annotations

import abc
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import msgspec
import trio

from swarm import defaults
from swarm.errors import DECODE_ERRORS, UserError
from swarm.events import Events
from swarm.world import Child, ChildDied, ChildError, ChildUserError, Job
from swarm.world.child import ONE_THREAD, Assignment, encode
from swarm.world.fork_server import ENVIRONMENT
from swarm.world.machine import free_memory_bytes

_decoder = msgspec.msgpack.Decoder(tuple[bool, dict[str, Any] | tuple[str, str]])
"""What a child may answer, which may have been taken over by a file that it parsed."""


T = TypeVar("T")


class _Process(abc.ABC):
    """A started process: killed through a pidfd, so never another that got its number."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd

    def pid(self) -> int:
        """The process's number while it runs; below 1 afterwards."""
        with open(f"/proc/self/fdinfo/{self._pidfd}", encoding="ascii") as file:  # noqa: PTH123
            return next(int(line[4:]) for line in file if line.startswith("Pid:"))

    def kill(self) -> None:
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> None:
        await trio.lowlevel.wait_readable(self._pidfd)

    @abc.abstractmethod
    async def how_it_ended(self) -> str:
        """In words; once, after `wait`."""

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class _Spawned(_Process):
    def __init__(self, connection: socket.socket, stderr: int) -> None:
        # Not trio's open_process: it starts children from a worker thread, and when that thread
        # ends the kernel takes it for the parent's death (PR_SET_PDEATHSIG).
        self._popen = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "swarm.world.child",
                str(connection.fileno()),
                str(os.getpid()),
            ],
            pass_fds=[connection.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            env=ONE_THREAD | {"PYTHONUNBUFFERED": "1"} | os.environ,
            start_new_session=True,
        )
        super().__init__(os.pidfd_open(self._popen.pid))

    async def how_it_ended(self) -> str:
        return _ending(self._popen.wait())


class _Forked(_Process):
    """A child of the fork server, which kills it when `server` is closed."""

    def __init__(self, server: socket.socket, pidfd: int) -> None:
        self._server = server
        super().__init__(pidfd)

    async def how_it_ended(self) -> str:
        with trio.move_on_after(defaults.CHILD_GRACE_SECONDS):
            await trio.lowlevel.wait_readable(self._server)
            with suppress(ConnectionError):
                if status := self._server.recv(16):
                    return _ending(os.waitstatus_to_exitcode(int(status)))
        return "ended with its fork server"

    def close(self) -> None:
        super().close()
        self._server.close()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"


class LocalChild:
    """Implements `swarm.world.Child`."""

    def __init__(
        self, name: str, process: _Process, connection: trio.SocketStream, events: Events | None
    ) -> None:
        self.name = name
        self._process = process
        self._connection = connection
        self._events = events
        self._buffer = bytearray()
        self._turn = trio.Lock()
        self._last_lines: deque[str] = deque(maxlen=defaults.CHILD_LAST_LINES)
        self._said_second, self._said_count = 0, 0
        self._stderr_ended = trio.Event()
        self._why = ""
        """Why it was killed, if it was."""
        self._how = "does not end though it was killed"
        self._ended = False
        """Its process has; what it said may still be read."""
        self._gone = trio.Event()
        self._supervision = trio.CancelScope(shield=True)
        self._ending = False
        """Its owner wants no more of it: its end is no news."""

    # --- calls -------------------------------------------------------------------------------

    async def request(self, method: str, job: Job, reply: type[T]) -> T:
        """See `swarm.world.Child.request`."""
        answer = await self.call(method, {"job": job}, deadline_seconds=job.patience_seconds)
        return msgspec.convert(answer, reply)

    async def call(
        self, method: str, arguments: Mapping[str, Any] | None = None, *, deadline_seconds: float
    ) -> dict[str, Any]:
        """See `swarm.world.Child.call`. A cancelled call kills the child."""
        frame = encode([method, dict(arguments or {})])
        return await self._exchange(method, frame, deadline_seconds)

    async def assign(self, assignment: Assignment, deadline_seconds: float) -> None:
        """Tell the child what to be; raises as `call` does."""
        await self._exchange("start", encode(assignment), deadline_seconds)

    async def _exchange(self, what: str, frame: bytes, deadline_seconds: float) -> dict[str, Any]:
        if len(frame) > defaults.CHILD_FRAME_BYTES_MAX:
            raise ValueError(
                f"{what!r} of child {self.name} was called with {len(frame)} bytes; at most "
                f"{defaults.CHILD_FRAME_BYTES_MAX} are allowed"
            )
        async with self._turn:
            if self._why or self._ended:
                raise await self._died(between_calls=True)
            answered = False
            try:
                with trio.fail_after(deadline_seconds):
                    await self._connection.send_all(frame)
                    good, answer = _decoder.decode(await self._receive_frame())
                answered = True
            except trio.TooSlowError:
                self._kill(f"did not answer {what!r} within {deadline_seconds:g} s and was killed")
                raise await self._died() from None
            except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
                raise await self._died() from None
            except DECODE_ERRORS as error:
                self._kill(f"answered {what!r} with what is no answer ({error}) and was killed")
                raise await self._died() from None
            finally:
                if not answered and not self._gone.is_set():
                    # Cancelled: its answer would be taken for that to the next call.
                    self._ending = True
                    self._kill(f"was given up during {what!r}")
        if good and isinstance(answer, dict):
            return answer
        kind, message = answer if isinstance(answer, tuple) else ("Error", "")
        raised = ChildUserError if kind == UserError.__name__ else ChildError
        raise raised(f"{self.name}: {message}", kind)

    async def _receive_frame(self) -> bytes:
        await self._fill(4)
        size = int.from_bytes(self._buffer[:4], "big")
        if size > defaults.CHILD_FRAME_BYTES_MAX:
            raise msgspec.DecodeError(f"{size} bytes announced")
        await self._fill(4 + size)
        frame = bytes(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        return frame

    async def _fill(self, count: int) -> None:
        while len(self._buffer) < count:
            block = await self._connection.receive_some(1 << 20)
            if not block:
                raise EOFError
            self._buffer += block

    # --- the end -----------------------------------------------------------------------------

    def _kill(self, why: str) -> None:
        self._why = self._why or why
        self._process.kill()

    async def _died(self, *, between_calls: bool = False) -> ChildDied:
        """The error that tells how this child ended, once it has."""
        with trio.CancelScope(shield=True):
            await self._wait_gone()
        words = "; its last lines: " + " | ".join(self._last_lines) if self._last_lines else ""
        message = f"child {self.name} {self._how}{words}"
        return ChildDied(message, self.name, between_calls=between_calls)

    async def _wait_gone(self) -> None:
        """Until the process has ended: by itself within the grace, else killed."""
        with trio.move_on_after(defaults.CHILD_GRACE_SECONDS):
            await self._gone.wait()
        self._process.kill()
        with trio.move_on_after(defaults.CHILD_KILLED_SECONDS):
            await self._gone.wait()

    async def end(self) -> None:
        """Close the socket, which ends the child; kill it if it does not."""
        self._ending = True
        with trio.CancelScope(shield=True):
            await self._connection.aclose()
            await self._wait_gone()
            self._supervision.cancel()
            self._process.close()

    async def supervise(self, stderr: int) -> None:
        """Hear what the child says, and how it ends: told as an event at once."""
        with self._supervision:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_stderr, stderr)
                await self._process.wait()
                self._ended = True
                with trio.move_on_after(defaults.CHILD_GRACE_SECONDS):  # its own child may hold it
                    await self._stderr_ended.wait()
                nursery.cancel_scope.cancel()
            ended = await self._process.how_it_ended()
            self._how = self._why or ended
            self._gone.set()
            if self._events is not None and not self._ending:
                self._events.emit(
                    "compute.child_died", name=self.name, how=self._how, last=[*self._last_lines]
                )

    async def _read_stderr(self, stderr: int) -> None:
        rest = b""
        async with trio.lowlevel.FdStream(stderr) as stream:
            async for block in stream:
                *lines, rest = (rest + block).split(b"\n")
                rest = rest[-4096:]
                for line in lines:
                    self._hear(line)
        if rest:
            self._hear(rest)
        self._stderr_ended.set()

    def _hear(self, raw: bytes) -> None:
        """Keep a line, and pass it on unless there are too many."""
        text = raw[:400].decode("utf-8", "replace")
        # A hostile file may speak through an error message: nothing that steers a terminal.
        line = "".join(c if c.isprintable() else " " for c in text).rstrip()
        self._last_lines.append(line)
        second = int(trio.current_time())
        if second != self._said_second:
            self._said_second, self._said_count = second, 0
        self._said_count += 1
        if self._events is not None and self._said_count <= defaults.CHILD_LINES_PER_SECOND_MAX:
            self._events.emit("compute.child_said", name=self.name, line=line)


class LocalCompute:
    """Implements `swarm.world.Compute`: by the fork server if one listens, else by subprocess."""

    def __init__(self, *, events: Events | None = None, fork_server: str | None = None) -> None:
        """`fork_server`: path of its socket; by default what SWARM_FORK_SERVER names.

        Emits `compute.child_started`, `compute.child_said` (a line of stderr),
        `compute.child_died` and `compute.fork_server_missing`.
        """
        self._events = events
        self._fork_server = fork_server or os.environ.get(ENVIRONMENT)

    def free_memory_bytes(self) -> int:
        """See `swarm.world.Compute.free_memory_bytes`."""
        return free_memory_bytes()

    @asynccontextmanager
    async def child(
        self,
        service: str,
        *,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        memory_limit_bytes: int | None = None,
        start_deadline_seconds: float = 60.0,
    ) -> AsyncIterator[Child]:
        """See `swarm.world.Compute.child`; `ChildError` when `Class(**arguments)` raised."""
        assignment = Assignment(
            service,
            dict(arguments or {}),
            memory_limit_bytes,
            list(sys.path),
            os.getcwd(),  # noqa: PTH109
            dict(os.environb),
        )
        ours, theirs = socket.socketpair()
        stderr_read, stderr_write = os.pipe()
        with theirs:
            try:
                process = await self._start(name, theirs, stderr_write, start_deadline_seconds)
            except BaseException:
                ours.close()
                os.close(stderr_read)
                raise
            finally:
                os.close(stderr_write)
        ours.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        child = LocalChild(name, process, stream, self._events)
        failed: BaseException | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.supervise, stderr_read)
            try:
                await child.assign(assignment, start_deadline_seconds)
                if self._events is not None:
                    self._events.emit("compute.child_started", name=name, pid=process.pid())
                yield child
            except Exception as error:  # re-raised below, outside the nursery's group
                failed = error
            finally:
                await child.end()
        if failed is not None:
            raise failed

    async def _start(
        self, name: str, connection: socket.socket, stderr: int, deadline_seconds: float
    ) -> _Process:
        try:
            server = self._reach_fork_server()
            if server is None:
                return _Spawned(connection, stderr)
        except OSError as error:
            raise ChildDied(f"child {name} could not be started: {error}", name) from error
        try:
            socket.send_fds(server, [b"fork"], [connection.fileno(), stderr])
            with trio.fail_after(deadline_seconds):
                await trio.lowlevel.wait_readable(server)
            _, (pidfd,), _, _ = socket.recv_fds(server, 16, 1)
        except BaseException as error:
            server.close()
            if not isinstance(error, (OSError, ValueError, trio.TooSlowError)):
                raise
            raise ChildDied(
                f"child {name} could not be started: the fork server at {self._fork_server} did "
                f"not answer within {deadline_seconds:g} s ({error!r})",
                name,
            ) from error
        return _Forked(server, pidfd)

    def _reach_fork_server(self) -> socket.socket | None:
        """A connection to it, or None when children must start without it."""
        if self._fork_server is None:
            return None
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.setblocking(False)  # a full backlog fails at once
        try:
            server.connect(self._fork_server)
        except OSError as error:
            server.close()
            if self._events is not None:
                self._events.emit(
                    "compute.fork_server_missing", path=self._fork_server, reason=str(error)
                )
            return None
        return server
