"""Child processes on this machine: started, supervised, and ended with their owner."""

import itertools
import os
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import trio

from swarm.errors import DECODE_ERRORS, UserError
from swarm.events import Events
from swarm.world import Child, ChildDied, Job, Setup, error_of, process
from swarm.world import frames as framing
from swarm.world.child import CHILD_ENVIRONMENT
from swarm.world.fork_server import CHILD_REQUEST
from swarm.world.machine import free_memory_bytes, most_memory_bytes
from swarm.world.process import FORK_SERVER_VARIABLE, Process, childs_environment, lines_of
from swarm.world.progress import HUNG_STATUS
from swarm.world.tasks import open_guarded

T = TypeVar("T")

KILLED_SECONDS = 30.0
"""Wait for the end of a killed child: releasing memory, above all a GPU's, may take this long."""

LAST_LINES = 20
"""Last lines of stderr reported when a child dies."""

LINES_PER_SECOND_MAX = 20
"""Lines of a child's stderr emitted as events; further lines are only kept among the last."""


@dataclass
class _Pending:
    """A call without an answer yet."""

    number: int
    what: str
    patience_seconds: float
    ended: trio.Event = field(default_factory=trio.Event)
    end: framing.Answer | framing.Failed | None = None
    """The child's answer; None after `ended` if the child died."""
    waiting: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Cancelled after `patience_seconds` without progress."""
    sent: bool = False
    """Whether sending the job has started: the child may be working on it."""

    def advanced(self) -> None:
        self.waiting.deadline = trio.current_time() + self.patience_seconds

    def finish(self, end: framing.Answer | framing.Failed | None) -> None:
        self.end = end
        self.ended.set()


class LocalChild:
    """Implements `swarm.world.Child`."""

    def __init__(
        self, name: str, process: Process, connection: trio.SocketStream, events: Events | None
    ) -> None:
        self.name = name
        self._process = process
        self._connection = connection
        self._events = events
        self._sending = trio.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._said_second, self._said_count = 0, 0
        self._frames_ended, self._stderr_ended = trio.Event(), trio.Event()
        self._why = ""
        """Why the child was killed; empty if it was not."""
        self._how = "does not end though it was killed"
        self._hung = ""
        """See `ChildDied.hung`."""
        self._ended = False
        """Whether its process has ended; its last output may still be unread."""
        self._lost_server = False
        """Whether its fork server has ended, which ends it."""
        self._gone = trio.Event()
        self._supervision = trio.CancelScope(shield=True)
        self._nursery: trio.Nursery | None = None
        self._ending = False
        """Whether the owner ends the child: then its end is not reported."""

    # --- calls -------------------------------------------------------------------------------

    async def request(self, method: str, job: Job, reply: type[T]) -> T:
        """See `swarm.world.Child.request`."""
        with self._calling(repr(method), job.patience_seconds) as call:
            answer = await self._ask(
                call, framing.encode(framing.Call(call.number, method, framing.raw(job)))
            )
        try:
            return msgspec.msgpack.decode(answer, type=reply)
        except DECODE_ERRORS as error:
            self._kill(f"sent an invalid answer to {call.what} ({error}) and was killed")
            raise await self._died() from None

    async def assign(self, assignment: framing.Assignment, deadline_seconds: float) -> None:
        """Send the child its assignment; raises the same errors as `request`."""
        with self._calling("start", deadline_seconds, number=0) as call:
            await self._ask(call, framing.encode(assignment))

    @contextmanager
    def _calling(self, what: str, patience_seconds: float, number: int = -1) -> Iterator[_Pending]:
        """A pending call. If the block ends without an answer, the call is cancelled, and the child
        is killed unless it stops the call."""
        call = _Pending(next(self._numbers) if number < 0 else number, what, patience_seconds)
        self._pending[call.number] = call
        try:
            yield call
        finally:
            if call.ended.is_set():
                self._pending.pop(call.number, None)
            elif not call.sent or self._nursery is None:
                del self._pending[call.number]
            else:
                self._nursery.start_soon(self._give_up, call)

    async def _give_up(self, call: _Pending) -> None:
        with trio.move_on_after(process.GRACE_SECONDS):
            async with self._sending:
                await self._write(framing.encode(framing.Cancel(call.number)))
            await call.ended.wait()
        self._pending.pop(call.number, None)
        if not call.ended.is_set():
            self._ending = True
            self._kill(f"was given up during {call.what}")

    async def _ask(self, call: _Pending, frame: bytes) -> msgspec.Raw:
        if self._why or self._ended:
            call.finish(None)
            raise await self._died(blameless=True)
        with call.waiting:
            call.advanced()
            async with self._sending:
                await trio.lowlevel.checkpoint_if_cancelled()  # not a byte of it was sent yet
                call.sent = True
                await self._write(frame)
            call.advanced()
            await call.ended.wait()
        if not call.ended.is_set():
            call.finish(None)
            why = f"made no progress on {call.what} within {call.patience_seconds:g} s"
            self._kill(f"{why} and was killed")
            self._hung = f"child {self.name} {why} and was killed"
        if call.end is None:
            raise await self._died()
        if isinstance(call.end, framing.Failed):
            end = call.end
            raise error_of(f"{self.name}: {end.message}", end.kind, end.is_users)
        return call.end.reply

    async def _write(self, frame: bytes) -> None:
        """Send a complete frame, or kill the child: half a frame would garble all later ones."""
        whole = False
        try:
            await self._connection.send_all(frame)
            whole = True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            whole = True  # the task that reads the answers notices
        finally:
            if not whole:
                self._kill("was given up while it was called")

    # --- output of the child -----------------------------------------------------------------

    async def _read_frames(self) -> None:
        frames = framing.FrameReader(self._connection.receive_some)
        try:
            while True:
                response = framing.decode_response(await frames.next())
                call = self._pending.get(response.number)
                if call is None or call.ended.is_set():
                    raise msgspec.DecodeError(f"no call has the number {response.number}")
                call.advanced()
                if isinstance(response, framing.Answer | framing.Failed):
                    call.finish(response)
        except DECODE_ERRORS as error:
            asked = ", ".join(call.what for call in self._pending.values()) or "nothing"
            self._kill(f"sent an invalid answer to {asked} ({error}) and was killed")
        except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
            pass
        self._abandon_calls()
        self._frames_ended.set()

    def _abandon_calls(self) -> None:
        for call in self._pending.values():
            if not call.ended.is_set():
                call.finish(None)

    async def _read_stderr(self, stderr: int) -> None:
        async with trio.lowlevel.FdStream(stderr) as stream:
            async for line in lines_of(stream):
                self._hear(line)
        self._stderr_ended.set()

    def _hear(self, text: str) -> None:
        # An error message may quote a hostile file: drop characters that control a terminal.
        line = "".join(c if c.isprintable() else " " for c in text[:400]).rstrip()
        self._last_lines.append(line)
        second = int(trio.current_time())
        if second != self._said_second:
            self._said_second, self._said_count = second, 0
        self._said_count += 1
        if self._events is not None and self._said_count <= LINES_PER_SECOND_MAX:
            self._events.emit("compute.child_said", name=self.name, line=line)

    # --- the end -----------------------------------------------------------------------------

    def _kill(self, why: str) -> None:
        self._why = self._why or why
        self._process.kill()

    async def _died(self, *, blameless: bool = False) -> ChildDied:
        """Wait until the child has ended; returns the error that says how."""
        with trio.CancelScope(shield=True):
            await self._wait_gone()
        words = "; its last lines: " + " | ".join(self._last_lines) if self._last_lines else ""
        message = f"child {self.name} {self._how}{words}"
        return ChildDied(
            message, self.name, blameless=blameless or self._lost_server, hung=self._hung
        )

    async def _wait_gone(self) -> None:
        """Wait until the process has ended; kill it after `GRACE_SECONDS`."""
        with trio.move_on_after(process.GRACE_SECONDS):
            await self._gone.wait()
        self._process.kill()
        with trio.move_on_after(KILLED_SECONDS):
            await self._gone.wait()

    async def end(self) -> None:
        """Close the socket, which ends the child; kill it if it stays or a call is pending."""
        self._ending = True
        if self._pending:
            self._process.kill()
        with trio.CancelScope(shield=True):
            await self._connection.aclose()
            await self._wait_gone()
            self._supervision.cancel()
            self._process.close()

    async def supervise(
        self, stderr: int, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Read the child's frames and stderr until it ends; report an unexpected end."""
        with self._supervision:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._read_stderr, stderr)
                nursery.start_soon(self._read_frames)
                task_status.started()
                await self._process.wait()
                self._ended = True
                with trio.move_on_after(process.GRACE_SECONDS):  # its own child may hold them open
                    await self._frames_ended.wait()
                    await self._stderr_ended.wait()
                nursery.cancel_scope.cancel()
            self._nursery = None
            self._abandon_calls()
            status = await self._process.status()
            self._how = self._why or process.describe_ending(status)
            self._lost_server = status is None
            if status == HUNG_STATUS and self._last_lines:
                self._hung = self._last_lines[-1]
            self._gone.set()
            if self._events is not None and not self._ending:
                self._events.emit(
                    "compute.child_died", name=self.name, how=self._how, last=[*self._last_lines]
                )


class LocalCompute:
    """Implements `swarm.world.Compute`, with the fork server if one listens, else by subprocess."""

    def __init__(self, *, events: Events | None = None, fork_server: str | None = None) -> None:
        """`fork_server`: path of its socket; by default the value of SWARM_FORK_SERVER.

        Emits `compute.child_started`, `compute.child_said` (a line of stderr),
        `compute.child_died` and `compute.fork_server_missing`."""
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
        assignment = framing.Assignment(
            service,
            framing.raw(setup),
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
