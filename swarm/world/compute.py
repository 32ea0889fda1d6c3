"""Child processes on this machine: started, supervised, and ended with their owner."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from swarm.errors import UserError
from swarm.events import Events
from swarm.world import Child, ChildDied, Setup
from swarm.world.child import CHILD_ENVIRONMENT
from swarm.world.fork_server import CHILD_REQUEST
from swarm.world.frames import Assignment, raw
from swarm.world.local_child import LocalChild
from swarm.world.machine import free_memory_bytes, most_memory_bytes
from swarm.world.process import FORK_SERVER_VARIABLE, Process, childs_environment
from swarm.world.tasks import open_guarded


class LocalCompute:
    """Implements `swarm.world.Compute`, with the fork server if one listens, else by subprocess."""

    def __init__(self, *, events: Events | None = None, fork_server: str | None = None) -> None:
        """`fork_server`: path of its socket; by default the value of SWARM_FORK_SERVER.

        Emits `compute.child_started`, `compute.child_said` (a line of stderr),
        `compute.child_died` and `compute.fork_server_missing`.
        """
        self._events = events
        self._fork_server = fork_server or os.environ.get(FORK_SERVER_VARIABLE)

    def free_memory_bytes(self) -> int:
        """See `swarm.world.Compute.free_memory_bytes`."""
        return free_memory_bytes()

    @asynccontextmanager
    async def child(
        self,
        service: str,
        setup: Setup | None = None,
        *,
        name: str,
        memory_limit_bytes: int | None = None,
        start_deadline_seconds: float = 60.0,
        interpreter: str | None = None,
    ) -> AsyncIterator[Child]:
        """See `swarm.world.Compute.child`. Raises `ChildError` when the class raised."""
        environment = childs_environment(os.environb)
        if interpreter is not None:
            environment.pop(FORK_SERVER_VARIABLE.encode(), None)  # so do its own children
        assignment = Assignment(
            service,
            raw(setup),
            most_memory_bytes() if memory_limit_bytes is None else memory_limit_bytes,
            list(sys.path) if interpreter is None else None,
            os.getcwd(),  # noqa: PTH109
            environment,
        )
        ours, theirs = socket.socketpair()
        stderr_read, stderr_write = os.pipe()
        with theirs:
            try:
                process = await self._start(
                    name, theirs, stderr_write, start_deadline_seconds, interpreter
                )
            except BaseException:
                ours.close()
                os.close(stderr_read)
                raise
            finally:
                os.close(stderr_write)
        ours.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        child = LocalChild(name, process, stream, self._events)
        async with open_guarded() as guarded:
            await guarded.nursery.start(child.supervise, stderr_read)
            try:
                await child.assign(assignment, start_deadline_seconds)
                if self._events is not None:
                    self._events.emit("compute.child_started", name=name, pid=process.pid())
                yield child
            finally:
                await child.end()

    async def _start(
        self,
        name: str,
        connection: socket.socket,
        stderr: int,
        deadline_seconds: float,
        interpreter: str | None,
    ) -> Process:
        try:
            server = self._reach_fork_server() if interpreter is None else None
            if server is None:
                program = [interpreter or sys.executable, "-m", "swarm.world.child"]
                started = {
                    name.encode(): value.encode() for name, value in CHILD_ENVIRONMENT.items()
                }
                started |= {b"PYTHONUNBUFFERED": b"1"} | childs_environment(os.environb)
                return Process.spawn(
                    [*program, str(connection.fileno()), str(os.getpid())],
                    output=stderr,
                    errors=stderr,
                    environment=started,
                    keep_open=[connection.fileno()],
                )
        except OSError as error:
            if interpreter is not None:
                raise UserError(
                    f"child {name} should run under the interpreter {interpreter}, which cannot "
                    f"be started ({error.strerror}); give the path of a Python"
                ) from error
            raise ChildDied(f"child {name} could not be started: {error}", name) from error
        try:
            return await Process.fork(
                server, CHILD_REQUEST, [connection.fileno(), stderr], deadline_seconds
            )
        except (OSError, ValueError, trio.TooSlowError) as error:
            raise ChildDied(
                f"child {name} could not be started: the fork server at {self._fork_server} did "
                f"not answer within {deadline_seconds:g} s ({error!r})",
                name,
            ) from error

    def _reach_fork_server(self) -> socket.socket | None:
        """A connection to the fork server; None when children must start without it."""
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
