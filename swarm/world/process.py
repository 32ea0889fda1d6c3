"""Processes that this one starts, watches and ends, and the text that they write.

A process is held by its pidfd, so that no other is ever signalled. It runs in its own session, so
Ctrl-C in a terminal reaches only its owner. A child holds what strangers wrote: weights, templates,
rows, files. It has neither secrets in its variables nor the owner's memory."""

import ctypes
import os
import re
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import trio

HOME_VARIABLE = "SWARM_HOME"
"""Environment variable with the home of a peer; a peer sets it for itself."""

INSTALLED_VARIABLE = "SWARM_INSTALLED"
"""Environment variable of children: the folder of the home with the installed environments."""

FORK_SERVER_VARIABLE = "SWARM_FORK_SERVER"
"""Environment variable with the socket of a fork server (`swarm.world.fork_server`)."""

KEPT_VARIABLE = "SWARM_CHILD_VARIABLES"
"""Environment variable with names of variables, separated by commas, that children get although
they look like secrets: a judge's key, for example."""

_SECRET = re.compile(
    r"(^|_)(TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|(API)?KEYS?|CREDENTIALS?|AUTH_SOCK)(_|$)",
    re.IGNORECASE,
)
"""Names of variables that hold secrets: one of the words between underscores."""

_PR_SET_DUMPABLE = 4


def childs_environment(own: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The variables that a child gets of its owner's: all but the home and secrets."""
    named = own.get(KEPT_VARIABLE.encode(), b"").decode("utf-8", "replace")
    kept = {name.strip() for name in named.split(",")}
    given = {name: value for name, value in own.items() if not _is_secret(name, kept)}
    home = given.pop(HOME_VARIABLE.encode(), None)
    if home is not None:
        given[INSTALLED_VARIABLE.encode()] = home + b"/environments"
    return given


def _is_secret(name: bytes, kept: set[str]) -> bool:
    text = name.decode("utf-8", "replace")
    return text not in kept and _SECRET.search(text) is not None


def close_memory() -> None:
    """Forbid other processes of the same user to read or trace this one, which holds a key.

    They find its files in /proc closed, too, and the kernel writes no core of it. A process that
    may trace any other, such as root's, still can."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


GRACE_SECONDS = 2.0
"""Time for a child to end by itself, or to stop a cancelled call, before it is killed."""

LINE_BYTES_MAX = 256 * 1024


@dataclass(eq=False)
class Process:
    """A started process: a child of this one, which leads a process group, or one of the fork
    server, which kills it when the connection to it is closed."""

    _pidfd: int
    _child: subprocess.Popen[bytes] | None = None
    _server: socket.socket | None = None

    @classmethod
    def spawn(
        cls,
        command: Sequence[str],
        *,
        output: int,
        errors: int,
        environment: Mapping[str, str] | Mapping[bytes, bytes],
        keep_open: Sequence[int] = (),
    ) -> "Process":
        """Start a command that writes to the pipes `output` and `errors`; raises `OSError`."""
        # Not trio's open_process: it starts children from a worker thread, and the kernel treats
        # the end of that thread as the parent's death (PR_SET_PDEATHSIG).
        child = subprocess.Popen(
            command,
            pass_fds=keep_open,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        return cls(os.pidfd_open(child.pid), child)

    @classmethod
    async def fork(
        cls,
        server: socket.socket,
        request: bytes,
        descriptors: Sequence[int],
        deadline_seconds: float,
    ) -> "Process":
        """Ask a fork server for a process (see `swarm.world.fork_server`).

        `server` is a non-blocking connection, closed on failure. Raises `OSError`, `ValueError` or
        `trio.TooSlowError` if the server does not answer."""
        try:
            socket.send_fds(server, [request], descriptors)
            with trio.fail_after(deadline_seconds):
                await trio.lowlevel.wait_readable(server)
            _, (pidfd,), _, _ = socket.recv_fds(server, 16, 1)
        except BaseException:
            server.close()
            raise
        return cls(pidfd, None, server)

    def pid(self) -> int:
        """The process id while the process runs; below 1 afterwards."""
        with open(f"/proc/self/fdinfo/{self._pidfd}", encoding="ascii") as file:  # noqa: PTH123
            return next(int(line[4:]) for line in file if line.startswith("Pid:"))

    def kill(self) -> None:
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end(self) -> None:
        """Kill a child, and wait for its end; its own children go on."""
        self.kill()
        assert self._child is not None
        self._child.wait()
        self.close()

    async def wait(self) -> None:
        await trio.lowlevel.wait_readable(self._pidfd)

    async def status(self) -> int | None:
        """Wait for the exit status, negative for a signal; None if it is lost with the fork server.
        Nothing of the process's group is left then. Call it once."""
        await self.wait()
        if self._child is not None:
            self._signal(signal.SIGKILL)  # before it is reaped, so that the group is still its
            return self._child.wait()
        assert self._server is not None
        with trio.move_on_after(GRACE_SECONDS):
            await trio.lowlevel.wait_readable(self._server)
            with suppress(ConnectionError):
                if status := self._server.recv(16):
                    return os.waitstatus_to_exitcode(int(status))
        return None

    async def terminate(self, grace_seconds: float) -> None:
        """End the process and its group: SIGTERM, and SIGKILL after `grace_seconds`."""
        with trio.CancelScope(shield=True):
            if self._pidfd >= 0 and (self._child is None or self._child.returncode is None):
                self._signal(signal.SIGTERM)
                with trio.move_on_after(grace_seconds):
                    await self.wait()
                self._signal(signal.SIGKILL)
                await self.wait()
                if self._child is not None:
                    self._child.wait()
        self.close()

    def _signal(self, which: signal.Signals) -> None:
        """Signal the group of a child, or a process of the fork server."""
        with suppress(ProcessLookupError):
            if self._child is None:
                signal.pidfd_send_signal(self._pidfd, which)
            else:
                os.killpg(self._child.pid, which)

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self._server is not None:
            self._server.close()


def describe_ending(status: int | None) -> str:
    """How a process ended, by its exit status if that is known."""
    if status is None:
        return "ended with its fork server"
    return f"{'ended' if status >= 0 else 'was killed'} {describe_status(status)}"


def describe_status(status: int) -> str:
    """How a process ended, by its exit status: "with status 1" or "by SIGKILL"."""
    if status >= 0:
        return f"with status {status}"
    with suppress(ValueError):  # a real-time signal has no name
        return f"by {signal.Signals(-status).name}"
    return f"by signal {-status}"


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
