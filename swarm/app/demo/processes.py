"""The demo's processes: start them, read their output, restart dead ones, end them all.

Each process gets a process group of its own. Ctrl-C therefore reaches only the demo, which then
ends all groups, so that no child of a process outlives it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import trio

from swarm.errors import SwarmError

LINE_BYTES_MAX = 256 * 1024
LAST_LINES_KEPT = 12
LAST_LINE_CHARACTERS = 400
TERMINATE_SECONDS = 3.5
"""Time from SIGTERM to SIGKILL. The whole demo must end within 5 s."""
BACKOFF_SECONDS = 0.2
"""Wait before the first restart; it doubles with each further death."""
BACKOFF_SECONDS_MAX = 3.0
DEATHS_IN_A_ROW_MAX = 5
STEADY_SECONDS = 20.0
"""Lifetime after which a process's count of deaths in a row starts again."""


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
    """One process to keep alive."""

    name: str
    command: Callable[[bool], Sequence[str]]
    """Makes the command line; its argument says whether this is a restart."""
    log: Path | None = None
    """File to which all output is appended."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the environment that the process inherits."""
    pid: int | None = None
    """Process id while it runs."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES_KEPT))


async def keep_alive(process: Process, watcher: Watcher) -> None:
    """Run a process until it exits with status 0; restart it after any other exit.

    Cancellation sends SIGTERM to its group, and SIGKILL after `TERMINATE_SECONDS`. Raises
    `ProcessFailed` after `DEATHS_IN_A_ROW_MAX` deaths in a row, or if the process cannot be
    started.
    """
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
                f"{process.name} died {deaths} times in a row, last {_how(status)}; "
                f"it said:\n{last}"
            )
        watcher.died(process.name, status)
        restart = True
        await trio.sleep(min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS * 2 ** (deaths - 1)))


def _how(status: int) -> str:
    if status >= 0:
        return f"with status {status}"
    with suppress(ValueError):
        return f"by {signal.Signals(-status).name}"
    return f"by signal {-status}"


def _spawn(process: Process, restart: bool) -> tuple[subprocess.Popen[bytes], int, int]:
    """Start the process once.

    Returns it with the read ends of the pipes of its standard output and standard error.

    Does not use trio's `open_process`, which forks in a worker thread. The kernel treats the end
    of that thread as the parent's death, and would kill a child that asked to die with its parent,
    such as the fork server.
    """
    command = list(process.command(restart))
    output, output_end = os.pipe()
    complaints, complaints_end = os.pipe()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output_end,
            stderr=complaints_end,
            start_new_session=True,
            env={**os.environ, **process.environment},
        )
    except OSError as error:
        os.close(output)
        os.close(complaints)
        raise ProcessFailed(
            f"{process.name} cannot be started ({error.strerror}: {command[0]})"
        ) from error
    finally:
        os.close(output_end)
        os.close(complaints_end)
    return child, output, complaints


async def _live_once(process: Process, watcher: Watcher, restart: bool) -> int:
    """Run the process once; returns its exit status, negative for a signal."""
    child, output, complaints = _spawn(process, restart)
    process.pid = child.pid
    log = process.log.open("a", encoding="utf-8") if process.log is not None else None
    watch = os.pidfd_open(child.pid)

    def keep(line: str) -> None:
        if log is not None:
            log.write(line + "\n")
            log.flush()

    async def listen() -> None:
        async with trio.lowlevel.FdStream(output) as stream:
            async for line in lines_of(stream):
                keep(line)
                event = _event_of(line)
                if event is not None:
                    watcher.said(process.name, event)
                    continue
                process.last_lines.append(line[:LAST_LINE_CHARACTERS])

    async def hear_complaints() -> None:
        async with trio.lowlevel.FdStream(complaints) as stream:
            async for line in lines_of(stream):
                keep(line)
                if line.strip():
                    process.last_lines.append(line[:LAST_LINE_CHARACTERS])

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            nursery.start_soon(hear_complaints)
            await trio.lowlevel.wait_readable(watch)
            # Its own children may hold the pipes open, so kill them too.
            _signal_group(child.pid, signal.SIGKILL)
        return child.wait()
    finally:
        process.pid = None
        with trio.CancelScope(shield=True):
            await _end(child, watch)
        os.close(watch)
        if log is not None:
            log.close()


def _event_of(line: str) -> dict[str, Any] | None:
    """Parse a line as an event; None if it is not an event."""
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


async def _end(child: subprocess.Popen[bytes], watch: int) -> None:
    """End a process and its process group. `watch` is its pidfd."""
    if child.poll() is None:
        _signal_group(child.pid, signal.SIGTERM)
        with trio.move_on_after(TERMINATE_SECONDS):
            await trio.lowlevel.wait_readable(watch)
    _signal_group(child.pid, signal.SIGKILL)
    await trio.lowlevel.wait_readable(watch)
    child.wait()


def _signal_group(group: int, which: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, which)


async def lines_of(stream: trio.abc.ReceiveStream) -> AsyncIterator[str]:
    """Read lines of text from a pipe, each cut to `LINE_BYTES_MAX`."""
    held = b""
    with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
        async for chunk in stream:
            *whole, held = (held + chunk).split(b"\n")
            for line in whole:
                yield line[:LINE_BYTES_MAX].decode("utf-8", errors="replace")
            held = held[:LINE_BYTES_MAX]
        if held:
            yield held.decode("utf-8", errors="replace")


__all__ = ["Process", "ProcessFailed", "Watcher", "keep_alive", "lines_of"]
