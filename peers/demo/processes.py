"""The demo's processes: read their output, restart dead ones, end them all.

Ctrl-C reaches only the demo, which then ends all process groups. Restarts are not those of
`swarm.world.restarts`: only a peer's lifetime decides whether deaths count as in a row."""

import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import trio

from swarm.errors import SwarmError
from swarm.world.fork_server import Program
from swarm.world.process import Process as Started
from swarm.world.process import describe_status, lines_of

LAST_LINES_KEPT = 12
LAST_LINE_CHARACTERS = 400
TERMINATE_SECONDS = 3.5
"""Time from SIGTERM to SIGKILL. The whole demo must end within 5 s."""
BACKOFF_SECONDS = 0.2
"""Wait before the first restart; it doubles with each further death."""
BACKOFF_SECONDS_MAX = 3.0
DEATHS_IN_A_ROW_MAX = 5
FORK_SERVER_SECONDS_MAX = 60.0
"""Deadline for a fork server to listen, and to finish its imports."""
FORK_SERVER_RETRY_SECONDS = 0.02
STEADY_SECONDS = 20.0
"""Lifetime after which a process's count of deaths in a row starts again."""

PRELOAD_COMPUTE = (
    "transformers.models.qwen2.modeling_qwen2",
    "peers.engines.service",
    "peers.validator.inspector",
    "peers.validator.prefill",
    "peers.trainer.service",
)
"""Modules that the fork server of the compute children imports, torch among them."""

PRELOAD_PEERS = (
    "swarm.commands.start",
    "swarm.commands.peer",
    "peers.inference.role",
    "peers.relay",
    "peers.trainer.role",
    "peers.validator.role",
)
"""Modules that the fork server of the peers imports; none of them imports torch."""


class ProcessFailed(SwarmError):
    """A process of the demo died too often in a row; the message contains its last lines."""


class Watcher(Protocol):
    """Receiver of the processes' output and exits. Its methods must not block."""

    def said(self, name: str, event: Mapping[str, Any]) -> None:
        """Handle an event: a JSON line from standard output."""

    def died(self, name: str, status: int) -> None:
        """Handle an exit with a status other than 0, before the restart."""

    def finished(self, name: str) -> None:
        """Handle an exit that no restart follows."""

    def restart_wanted(self, name: str) -> bool:
        """Whether to restart a process that exited with a status other than 0."""


@dataclass
class Process:
    name: str
    command: Callable[[bool], Sequence[str]]
    """Makes the command line; its argument says whether this is a restart."""
    log: Path | None = None
    """File to which all output is appended."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the environment that the process inherits."""
    fork_server: Path | None = None
    """Socket of the fork server that starts it; the command is then `python -m MODULE …`."""
    started: tuple[Started, int, int] | None = None
    """Its first life, where that began before `keep_alive`; see `start_fork_server`."""
    pid: int | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES_KEPT))


def start_fork_server(
    name: str, folder: Path, preload: Sequence[str], environment: Mapping[str, str] | None = None
) -> Process:
    """Start a process that imports `preload` once; others fork off it by its socket in `folder`,
    which has its name. `keep_alive` goes on with it, or `end` ends it. Raises `ProcessFailed`."""
    command = [sys.executable, "-m", "swarm.world.fork_server", "--socket", str(folder / name)]
    command += ["--preload", ",".join(preload)]
    process = Process(name, lambda restart: command, environment=environment or {})
    process.started = _spawn(process)
    return process


def end(process: Process) -> None:
    """End a process with which no `keep_alive` goes on."""
    if process.started is not None:
        child, *pipes = process.started
        process.started = None
        child.end()
        for pipe in pipes:
            os.close(pipe)


async def keep_alive(process: Process, watcher: Watcher) -> None:
    """Run a process until it exits with status 0. Cancellation sends SIGTERM to its group, and
    SIGKILL after `TERMINATE_SECONDS`. Raises `ProcessFailed` after `DEATHS_IN_A_ROW_MAX` deaths in
    a row, or if the process cannot be started."""
    deaths = 0
    restart = False
    while True:
        began = trio.current_time()
        status = await _live_once(process, watcher, restart)
        if status == 0 or not watcher.restart_wanted(process.name):
            watcher.finished(process.name)
            return
        deaths = 1 if trio.current_time() - began >= STEADY_SECONDS else deaths + 1
        if deaths >= DEATHS_IN_A_ROW_MAX:
            last = "\n".join(f"  {line}" for line in process.last_lines) or "  (it said nothing)"
            raise ProcessFailed(
                f"{process.name} died {deaths} times in a row, last {describe_status(status)}; "
                f"it said:\n{last}"
            )
        watcher.died(process.name, status)
        restart = True
        await trio.sleep(min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS * 2 ** (deaths - 1)))


async def _live_once(process: Process, watcher: Watcher, restart: bool) -> int:
    """Run the process once; returns its exit status, negative for a signal."""
    with ExitStack() as files:
        log = files.enter_context(process.log.open("a", encoding="utf-8")) if process.log else None
        child, output, errors = await _start(process, restart)

        async def listen(pipe: int, *, for_events: bool) -> None:
            async with trio.lowlevel.FdStream(pipe) as stream:
                async for line in lines_of(stream):
                    if log is not None:
                        log.write(line + "\n")
                        log.flush()
                    event = _event_of(line) if for_events else None
                    if event is not None:
                        watcher.said(process.name, event)
                    elif for_events or line.strip():
                        process.last_lines.append(line[:LAST_LINE_CHARACTERS])

        try:
            process.pid = child.pid()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(listen, output, for_events=True))
                nursery.start_soon(partial(listen, errors, for_events=False))
                # Its own children may hold the pipes open; `status` kills them.
                status = await child.status()
                return -signal.SIGKILL if status is None else status
        finally:
            process.pid = None
            await child.terminate(TERMINATE_SECONDS)


async def _start(process: Process, restart: bool) -> tuple[Started, int, int]:
    """Start the process once; returns it with the read ends of its output and error pipes."""
    if process.started is not None:
        started, process.started = process.started, None
        return started
    if process.fork_server is None:
        return _spawn(process, restart)
    with _starting(process) as (pipes, ends):
        command, environment = process.command(restart), {**os.environ, **process.environment}
        return await _fork(process.fork_server, command, environment, ends), *pipes


def _spawn(process: Process, restart: bool = False) -> tuple[Started, int, int]:
    with _starting(process) as (pipes, (output, errors)):
        environment = {**os.environ, **process.environment}
        command = process.command(restart)
        child = Started.spawn(command, output=output, errors=errors, environment=environment)
        return child, *pipes


@contextmanager
def _starting(process: Process) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The read and the write ends of two pipes; raises `ProcessFailed` if no process starts."""
    (output, output_end), (errors, errors_end) = os.pipe(), os.pipe()
    try:
        yield (output, errors), (output_end, errors_end)
    except BaseException as error:
        os.close(output)
        os.close(errors)
        if not isinstance(error, (OSError, ValueError, trio.TooSlowError)):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error) or "no answer"
        place = process.fork_server or process.command(False)[0]
        raise ProcessFailed(f"{process.name} cannot be started ({reason}: {place})") from error
    finally:
        os.close(output_end)
        os.close(errors_end)


async def _fork(
    path: Path, command: Sequence[str], environment: Mapping[str, str], outputs: Sequence[int]
) -> Started:
    _python, _option, module, *arguments = command
    program = Program(
        module,
        arguments,
        os.getcwd(),  # noqa: PTH109
        {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
    )
    server = await reach(path)
    request = msgspec.msgpack.encode(program)
    return await Started.fork(server, request, outputs, FORK_SERVER_SECONDS_MAX)


async def reach(path: Path) -> socket.socket:
    """A connection to a fork server, which may be about to listen; raises `trio.TooSlowError`."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.setblocking(False)
    try:
        with trio.fail_after(FORK_SERVER_SECONDS_MAX):
            while True:
                try:
                    server.connect(str(path))
                    return server
                except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                    await trio.sleep(FORK_SERVER_RETRY_SECONDS)
    except BaseException:
        server.close()
        raise


def _event_of(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
