"""Handles of child processes: pidfds, so that no other process is ever signalled.

A child runs in its own session, so Ctrl-C in a terminal reaches only its owner, which ends the
child by closing the socket. The kernel kills the child when its owner dies.
"""

from __future__ import annotations

import abc
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import trio

from swarm.world.child import ONE_THREAD

GRACE_SECONDS = 2.0
"""Time for a child to end by itself, or to stop a cancelled call, before it is killed."""


class Process(abc.ABC):
    """A started process."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd

    def pid(self) -> int:
        """The process id while the process runs; below 1 afterwards."""
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
        """Describe how the process ended. Call it once, after `wait`."""

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Spawned(Process):
    """A child of this process."""

    def __init__(self, connection: socket.socket, stderr: int, interpreter: str | None) -> None:
        # Not trio's open_process: it starts children from a worker thread, and the kernel treats
        # the end of that thread as the parent's death (PR_SET_PDEATHSIG).
        self._popen = subprocess.Popen(
            [
                interpreter or sys.executable,
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


class Forked(Process):
    """A child of the fork server, which kills it when `server` is closed."""

    def __init__(self, server: socket.socket, pidfd: int) -> None:
        self._server = server
        super().__init__(pidfd)

    async def how_it_ended(self) -> str:
        with trio.move_on_after(GRACE_SECONDS):
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
