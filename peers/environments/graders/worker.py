"""The program of a killable process: it loads one service, then answers requests over a socket.

`python -m peers.environments.graders.worker DESCRIPTOR PARENT`; the first frame is a `Setup`. The
service is a callable object that turns a request into a reply, both JSON values. What it reads was
written by a model. The process therefore has limited memory and ends by SIGPROF when one request
takes more CPU time than it may. Unless the service needs them, it cannot open a network connection,
reads no key (where Linux has Landlock), and writes no file beyond `FILE_BYTES_MAX`."""

import ctypes
import importlib
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import msgspec

from peers.sandbox import SandboxError, seccomp
from peers.sandbox.frames import receive, send
from swarm.world.child import die_with_parent, limit_memory
from swarm.world.landlock import close_keys

FILE_BYTES_MAX = 1 << 20
"""Largest file that the process may write."""
RECURSION_MAX = 3000
"""Python's own limit of 1000 frames refuses some honest answers of a few hundred characters."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


class Setup(msgspec.Struct, frozen=True):
    """What a process serves, and what it may do."""

    service: str
    """`module:Class`."""
    memory_bytes: int
    """Beyond what its libraries take."""
    cpu_seconds: float
    """CPU time of one request; 0: any."""
    arguments: dict[str, Any]
    """Of the class."""
    confined: bool


class Reply(msgspec.Struct, frozen=True):
    """What a service answered, or why it failed; the first says that it is loaded."""

    value: Any = None
    error: str = ""
    """Name and text of the exception; empty for an answer."""
    out_of_memory: bool = False
    without_sandbox: str = ""
    """Why this machine could not run a program in a sandbox."""


class Refusal(Exception):
    """An exception whose text says all."""


def _filter_calls() -> None:
    """Deny network connections, tracing and more, where the numbers of the calls are known."""
    if not seccomp.supported():
        return
    raw = seccomp.filter_program()
    kept = ctypes.create_string_buffer(raw, len(raw))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    program = Program(len(raw) // 8, ctypes.addressof(kept))
    libc = ctypes.CDLL(None, use_errno=True)
    one, mode = ctypes.c_ulong(1), ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, one, 0, 0, 0)
    libc.prctl(_PR_SET_SECCOMP, mode, ctypes.byref(program), 0, 0)


def _failed(error: BaseException) -> Reply:
    if isinstance(error, MemoryError):
        return Reply(out_of_memory=True)
    if isinstance(error, SandboxError):
        return Reply(without_sandbox=error.reason)
    if isinstance(error, Refusal):
        return Reply(error=str(error)[:500])
    return Reply(error=f"{type(error).__name__}: {error!s:.300}".replace("\n", " "))


def _loaded(setup: Setup) -> Any:
    if setup.confined:
        sys.setrecursionlimit(RECURSION_MAX)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, RuntimeError):  # a kernel without it, or a user without a home
            close_keys(())
    module, _, name = setup.service.partition(":")
    made = getattr(importlib.import_module(module), name)
    if not setup.confined:
        limit_memory(setup.memory_bytes)
        return made(**setup.arguments)
    service = made(**setup.arguments)
    _filter_calls()
    limit_memory(setup.memory_bytes)
    return service


def main() -> None:
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    with socket.socket(fileno=descriptor) as connection:
        setup = msgspec.msgpack.decode(receive(connection), type=Setup)
        try:
            service = _loaded(setup)
        except (Exception, SystemExit) as error:  # a library may raise anything
            send(connection, _failed(error))
            return
        try:
            send(connection, Reply())
            while True:
                request = msgspec.msgpack.decode(receive(connection))
                signal.setitimer(signal.ITIMER_PROF, setup.cpu_seconds)
                try:
                    reply = Reply(service(request))
                except (Exception, SystemExit) as error:
                    reply = _failed(error)
                signal.setitimer(signal.ITIMER_PROF, 0.0)
                send(connection, reply)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    from peers.environments.graders import worker

    worker.main()  # the module that services import, whose `Refusal` theirs is
