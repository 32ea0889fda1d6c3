"""What runs inside a child process: one service, one call at a time, over a socket.

Frames are a 4-byte big-endian length and msgpack. The owner's first frame says what to be
(`Assignment`); every later one is `[method, arguments]`. Each is answered with `[true, result]` or
`[false, [exception name, message]]`. The child ends when the socket does.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import resource
import signal
import socket
import sys
import traceback
from typing import Any

import msgspec
import trio

from swarm import defaults
from swarm.errors import UserError
from swarm.world import job_type

_PR_SET_PDEATHSIG = 1

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow starts one as it is imported
}
"""Environment of a child unless its owner's says otherwise: peers share cores, and two OpenMP
threads on contended cores are ten times slower than one."""


class Assignment(msgspec.Struct, array_like=True):
    """What a child is to be."""

    service: str
    """`package.module:Class`."""
    arguments: dict[str, Any]
    memory_limit_bytes: int | None
    path: list[str]
    """The owner's module search path."""
    folder: str
    """The owner's working folder."""
    environment: dict[bytes, bytes]
    """The owner's, which a forked child did not inherit. Libraries that the fork server preloaded
    have read theirs already."""


def encode(message: Any) -> bytes:
    """A frame, length first."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def _receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        block = connection.recv(min(count - len(data), 1 << 20))
        if not block:
            raise EOFError
        data += block
    return bytes(data)


def _receive_frame(connection: socket.socket) -> bytes:
    return _receive(connection, int.from_bytes(_receive(connection, 4), "big"))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that made it ends; end if it has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit_memory(limit_bytes: int) -> None:
    """Bound private writable memory to what there is now plus the limit.

    RLIMIT_DATA, not RLIMIT_AS: libraries reserve address space and map files far beyond what they
    ever write (torch and transformers: 660 MB of address space, 230 MB of it writable, 250 MB
    resident). Since Linux 4.7 it counts private mappings too: all that malloc and torch allocate.
    """
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        pages = int(file.read().split()[5])
    bound = pages * resource.getpagesize() + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def _fresh_randomness() -> None:
    """A forked child must not draw what its siblings draw. (Python's `random` sees to itself.)"""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4), "big"))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(int.from_bytes(os.urandom(7), "big"))


def serve(connection: socket.socket) -> None:
    """Be the service that the owner assigns until it closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
    _fresh_randomness()
    try:
        assignment = msgspec.msgpack.decode(_receive_frame(connection), type=Assignment)
        try:
            sys.path[:] = assignment.path
            os.chdir(assignment.folder)
            os.environb.clear()
            os.environb.update(assignment.environment)
            for variable, value in ONE_THREAD.items():
                os.environ.setdefault(variable, value)
            service = _make(assignment)
        except BaseException as error:
            _answer_error(connection, error)
            return
        connection.sendall(encode([True, {}]))
        while True:
            method, arguments = msgspec.msgpack.decode(
                _receive_frame(connection), type=tuple[str, dict[str, Any]]
            )
            try:
                result = _call(service, method, arguments)
            except Exception as error:
                _answer_error(connection, error)
            else:
                connection.sendall(result)
    except (EOFError, ConnectionError):
        return


def _make(assignment: Assignment) -> Any:
    module_name, _, class_name = assignment.service.partition(":")
    service_class = getattr(importlib.import_module(module_name), class_name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if assignment.memory_limit_bytes is not None:
        _limit_memory(assignment.memory_limit_bytes)
    return service_class(**assignment.arguments)


def _call(service: Any, method: str, arguments: dict[str, Any]) -> bytes:
    """The frame that answers a call."""
    if method.startswith("_"):
        raise AttributeError(f"{method} is no public method")
    function = getattr(service, method)
    if inspect.iscoroutinefunction(function):
        result = trio.run(function, msgspec.convert(arguments["job"], job_type(function)))
    else:
        result = function(**arguments)
    frame = encode([True, result])
    if len(frame) > defaults.CHILD_FRAME_BYTES_MAX:
        raise ValueError(
            f"the answer to {method!r} has {len(frame)} bytes; at most "
            f"{defaults.CHILD_FRAME_BYTES_MAX} are allowed"
        )
    return frame


def _answer_error(connection: socket.socket, error: BaseException) -> None:
    if not isinstance(error, UserError):  # that one says it all in its sentence
        traceback.print_exception(error)
    connection.sendall(encode([False, [type(error).__name__, str(error)[:10_000]]]))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    serve(socket.socket(fileno=int(sys.argv[1])))
