"""The program of a grader's process: it loads one service, then answers requests over a socket.

`python -m peers.environments.graders.worker DESCRIPTOR PARENT SERVICE MEMORY CPU_SECONDS`: SERVICE
is the `module:Class` of a callable object that turns a request into a reply, both JSON values. What
the service reads was written by a model. The process therefore has limited memory, ends by SIGPROF
when one request takes more CPU time than it may (0: as much as it likes), cannot open a network
connection, reads no key (where Linux has Landlock), and writes no file beyond `FILE_BYTES_MAX`.
"""

from __future__ import annotations

import ctypes
import importlib
import resource
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any

import msgspec

from peers.sandbox import seccomp
from swarm.world.child import die_with_parent, limit_memory
from swarm.world.landlock import close_keys

FRAME_BYTES_MAX = 1 << 24
FILE_BYTES_MAX = 1 << 20
"""Largest file that the process may write: its stderr."""
RECURSION_MAX = 3000
"""Python's own limit of 1000 frames refuses some honest answers of a few hundred characters."""

_HEADER = struct.Struct(">I")
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


class Reply(msgspec.Struct, frozen=True):
    """What a service answered, or why it failed."""

    value: Any = None
    error: str = ""
    """Name and text of the exception; empty for an answer."""
    out_of_memory: bool = False


def send(connection: socket.socket, value: Any) -> None:
    """Send a value; raises `ValueError` for one that fits no frame."""
    raw = msgspec.msgpack.encode(value)
    if len(raw) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(raw)} bytes; {FRAME_BYTES_MAX} are the most")
    connection.sendall(_HEADER.pack(len(raw)) + raw)


def receive(connection: socket.socket, seconds: float | None = None) -> bytes:
    """The next frame.

    Raises `EOFError` at the end, `ValueError` for a frame that is too long, and `TimeoutError`
    when it has not arrived after `seconds`.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    (size,) = _HEADER.unpack(_exactly(connection, _HEADER.size, deadline))
    if size > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {size} bytes; {FRAME_BYTES_MAX} are the most")
    return _exactly(connection, size, deadline)


def _exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    raw = bytearray()
    while len(raw) < size:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        chunk = connection.recv(min(size - len(raw), 1 << 16))
        if not chunk:
            raise EOFError
        raw += chunk
    return bytes(raw)


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


def _answered(service: Any, request: Any) -> Reply:
    try:
        return Reply(service(request))
    except MemoryError:
        return Reply(out_of_memory=True)
    except Exception as error:  # a library may raise anything
        return Reply(error=f"{type(error).__name__}: {error!s:.300}")


def main() -> None:
    descriptor, parent, target, memory, cpu_seconds = sys.argv[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    sys.setrecursionlimit(RECURSION_MAX)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, RuntimeError):  # a kernel without it, or a user without a home
        close_keys(())
    module, _, name = target.partition(":")
    service = getattr(importlib.import_module(module), name)()
    _filter_calls()
    limit_memory(int(memory))
    with socket.socket(fileno=int(descriptor)) as connection:
        send(connection, Reply())
        try:
            while True:
                request = msgspec.msgpack.decode(receive(connection))
                signal.setitimer(signal.ITIMER_PROF, float(cpu_seconds))
                reply = _answered(service, request)
                signal.setitimer(signal.ITIMER_PROF, 0.0)
                send(connection, reply)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    main()
