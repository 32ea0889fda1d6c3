"""Sandboxes for a process that may no longer build walls itself.

A child of a peer gives up the peer's keys by Landlock, which forbids it mounts
(`swarm.world.landlock`). Before, it starts `peers.sandbox.server`, which only runs programs for it:
the control socket passes it a connection (SCM_RIGHTS), for a `Request` and a `Reply` as frames."""

import os
import socket
import subprocess
import sys

import msgspec

from peers.sandbox.execute import SandboxError, execute
from peers.sandbox.frames import receive, send
from peers.sandbox.program import Limits, Outcome, Program
from swarm.errors import DECODE_ERRORS

FRAME_BYTES_MAX = 64 << 20
INHERITED = "SWARM_SANDBOXES"
"""Variable of a child under another Python: the descriptor of its owner's launcher."""
SERVER = "peers.sandbox.server"


class Request(msgspec.Struct, frozen=True):
    """A program to run."""

    program: Program
    limits: Limits


class Reply(msgspec.Struct, frozen=True):
    """How it ended, or why it could not be started."""

    outcome: Outcome | None = None
    error: str = ""


class Launcher:
    """The caller's side: a launcher, which ends with the process that started it."""

    def __init__(self, inherited: int | None = None) -> None:
        if inherited is not None:
            self.control = socket.socket(fileno=inherited)
            return
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", SERVER, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": ":".join(sys.path)},
                cwd="/",
            )

    def execute(self, program: Program, limits: Limits) -> Outcome:
        """As `peers.sandbox.execute.execute`, in the launcher."""
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    socket.send_fds(self.control, [b"run"], [theirs.fileno()])
                send(ours, Request(program, limits), FRAME_BYTES_MAX)
                reply = msgspec.msgpack.decode(receive(ours, most=FRAME_BYTES_MAX), type=Reply)
            except (OSError, EOFError, ValueError, *DECODE_ERRORS) as error:
                raise SandboxError(f"its launcher does not answer: {error}") from error
        if reply.outcome is None:
            raise SandboxError(reply.error)
        return reply.outcome


_started: Launcher | None = None


def start_launcher() -> None:
    """Let a launcher run all further sandboxes of this process."""
    global _started
    _started = Launcher()


def handed_down() -> dict[str, str]:
    """The variable by which a child that inherits the descriptor uses this process's launcher."""
    return {} if _started is None else {INHERITED: str(_started.control.fileno())}


def use_inherited_launcher() -> None:
    """Let the owner's launcher run this process's sandboxes, if it handed one down."""
    global _started
    if _started is None and INHERITED in os.environ:
        _started = Launcher(int(os.environ[INHERITED]))


def execute_here_or_there(program: Program, limits: Limits) -> Outcome:
    """Run a program, by the launcher if there is one; raises `SandboxError`."""
    run = execute if _started is None else _started.execute
    return run(program, limits)
