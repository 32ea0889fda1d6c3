"""Child processes on this machine: started, supervised, and never outliving their owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import trio

from swarm import defaults
from swarm.errors import SwarmError
from swarm.events import Events
from swarm.world import Child, ChildDied, ChildError
from swarm.world.child import Assignment, encode
from swarm.world.fork_server import ENVIRONMENT

_decoder = msgspec.msgpack.Decoder(tuple[bool, Any])


class _Process:
    """A started process: killed through a pidfd, so never another that got its number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = -1

    def kill(self) -> None:
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> None:
        if self._pidfd >= 0:
            await trio.lowlevel.wait_readable(self._pidfd)

    async def how_it_ended(self) -> str:
        """In words; only after `wait`."""
        raise NotImplementedError

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class _Spawned(_Process):
    def __init__(self, connection: socket.socket, stderr: int) -> None:
        environment = {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            **os.environ,
        }
        # Not trio's open_process: it starts children from a worker thread, and when that thread
        # ends the kernel takes it for the parent's death (PR_SET_PDEATHSIG).
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "swarm.world.child", str(connection.fileno())],
            pass_fds=[connection.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
        super().__init__(self._popen.pid)

    async def how_it_ended(self) -> str:
        return _ending(self._popen.wait())


class _Forked(_Process):
    def __init__(self, server: socket.socket, pid: int) -> None:
        self._server = server
        super().__init__(pid)

    async def how_it_ended(self) -> str:
        with trio.move_on_after(defaults.CHILD_GRACE_SECONDS):
            await trio.lowlevel.wait_readable(self._server)
            return _ending(os.waitstatus_to_exitcode(int(self._server.recv(16) or b"0")))
        return "ended"

    def close(self) -> None:
        super().close()
        self._server.close()


def _ending(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


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
        self._stderr_ended = trio.Event()
        self._dead: str | None = None

    async def call(
        self, method: str, arguments: Mapping[str, Any] | None = None, *, deadline_seconds: float
    ) -> dict[str, Any]:
        frame = encode([method, dict(arguments or {})])
        return await self._exchange(method, frame, deadline_seconds)

    async def assign(self, assignment: Assignment, deadline_seconds: float) -> None:
        await self._exchange("start", encode(assignment), deadline_seconds)

    async def _exchange(self, what: str, frame: bytes, deadline_seconds: float) -> dict[str, Any]:
        async with self._turn:
            if self._dead is not None:
                raise ChildDied(self._dead)
            answered = False
            try:
                with trio.fail_after(deadline_seconds):
                    await self._connection.send_all(frame)
                    good, answer = _decoder.decode(await self._receive_frame())
                answered = True
            except trio.TooSlowError:
                self._process.kill()
                raise await self._died(
                    f"did not answer {what!r} within {deadline_seconds:g} s and was killed"
                ) from None
            except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
                raise await self._died("") from None
            finally:
                if not answered:  # cancelled too: a later answer would be out of step
                    self._process.kill()
                    self._dead = self._dead or f"child {self.name} was given up during {what!r}"
        if not good:
            kind, message = answer
            raise ChildError(f"{self.name}: {message}", kind)
        return answer  # type: ignore[no-any-return]

    async def _receive_frame(self) -> bytes:
        await self._fill(4)
        size = int.from_bytes(self._buffer[:4], "big")
        if size > defaults.CHILD_FRAME_BYTES_MAX:
            raise EOFError
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

    async def _died(self, why: str) -> ChildDied:
        with trio.CancelScope(shield=True):
            with trio.move_on_after(defaults.CHILD_GRACE_SECONDS) as grace:
                await self._process.wait()
            if grace.cancelled_caught:
                self._process.kill()
                await self._process.wait()
            ended = why or await self._process.how_it_ended()
            with trio.move_on_after(defaults.CHILD_GRACE_SECONDS):
                await self._stderr_ended.wait()
        words = "; its last lines: " + " | ".join(self._last_lines) if self._last_lines else ""
        self._dead = f"child {self.name} {ended}{words}"
        if self._events is not None:
            self._events.emit(
                "compute.child_died", name=self.name, how=ended, last=list(self._last_lines)
            )
        return ChildDied(self._dead)

    async def read_stderr(self, stderr: int) -> None:
        """Keep the child's last lines."""
        rest = b""
        try:
            async with trio.lowlevel.FdStream(stderr) as stream:
                async for block in stream:
                    *lines, rest = (rest + block).split(b"\n")
                    rest = rest[-4096:]
                    for line in lines:
                        self._last_lines.append(line.decode("utf-8", "replace")[:400])
        finally:
            self._stderr_ended.set()


class LocalCompute:
    """Implements `swarm.world.Compute`: by the fork server if there is one, else by subprocess."""

    def __init__(self, *, events: Events | None = None, fork_server: str | None = None) -> None:
        """`fork_server`: path of its socket; by default what SWARM_FORK_SERVER names."""
        self._events = events
        self._fork_server = fork_server or os.environ.get(ENVIRONMENT)

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
        """See `swarm.world.Compute.child`."""
        ours, theirs = socket.socketpair()
        stderr_read, stderr_write = os.pipe()
        with theirs:
            try:
                process = await self._start(theirs, stderr_write)
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
            nursery.start_soon(child.read_stderr, stderr_read)
            try:
                assignment = Assignment(
                    service, dict(arguments or {}), memory_limit_bytes, list(sys.path)
                )
                await child.assign(assignment, start_deadline_seconds)
                yield child
            except Exception as error:  # re-raised below, outside the nursery's group
                failed = error
            finally:
                await self._end(stream, process)
                nursery.cancel_scope.cancel()
        if failed is not None:
            raise failed

    async def _end(self, stream: trio.SocketStream, process: _Process) -> None:
        """Close the socket, which ends the child; kill it if it does not."""
        with trio.CancelScope(shield=True):
            await stream.aclose()
            with trio.move_on_after(defaults.CHILD_GRACE_SECONDS) as grace:
                await process.wait()
            if grace.cancelled_caught:
                process.kill()
                await process.wait()
            await process.how_it_ended()
            process.close()

    async def _start(self, connection: socket.socket, stderr: int) -> _Process:
        if self._fork_server is None:
            return _Spawned(connection, stderr)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            server.connect(self._fork_server)
            socket.send_fds(server, [b"fork"], [connection.fileno(), stderr])
            server.setblocking(False)
            with trio.fail_after(defaults.CHILD_GRACE_SECONDS * 5):
                await trio.lowlevel.wait_readable(server)
            pid = int(server.recv(16))
        except (OSError, ValueError, trio.TooSlowError) as error:
            server.close()
            raise _StartError(
                f"the fork server at {self._fork_server} does not answer ({error!r}); unset "
                f"{ENVIRONMENT} to start children without it"
            ) from error
        return _Forked(server, pid)


class _StartError(SwarmError):
    """The fork server could not be used."""
