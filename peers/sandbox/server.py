"""The program that runs sandboxes for another process (`peers.sandbox.launcher`).

`python -m peers.sandbox.server DESCRIPTOR PARENT`"""

import socket
import sys
import threading
from contextlib import suppress
from dataclasses import fields

import msgspec

from peers.sandbox.execute import SandboxError, execute
from peers.sandbox.frames import receive, send
from peers.sandbox.launcher import FRAME_BYTES_MAX, Reply, Request
from peers.sandbox.program import Limits
from swarm.errors import DECODE_ERRORS, SwarmError
from swarm.world.child import die_with_parent

PARALLEL_MAX = 256
"""Programs at a time; the caller's own bound is far below."""

LIMITS_MAX = Limits(
    seconds=3600.0,
    cpu_seconds=600.0,
    memory_bytes=4 << 30,
    processes=64,
    output_bytes=64 << 20,
    files_bytes=256 << 20,
)
"""What any environment may ask for; the process that asks may have been taken over."""


def _answer(connection: socket.socket, free: threading.Semaphore) -> None:
    try:
        with connection, suppress(OSError, EOFError, ValueError, SwarmError, *DECODE_ERRORS):
            raw = receive(connection, most=FRAME_BYTES_MAX)
            send(connection, _reply(msgspec.msgpack.decode(raw, type=Request)), FRAME_BYTES_MAX)
    finally:
        free.release()


def _reply(asked: Request) -> Reply:
    for each in fields(Limits):
        wanted, most = getattr(asked.limits, each.name), getattr(LIMITS_MAX, each.name)
        if wanted > most:
            return Reply(error=f"{each.name} is {wanted}; a sandbox gets at most {most}")
    try:
        return Reply(execute(asked.program, asked.limits))
    except SandboxError as error:
        return Reply(error=error.reason)


def main() -> None:
    """Answer until the control socket ends."""
    die_with_parent(int(sys.argv[2]))
    control = socket.socket(fileno=int(sys.argv[1]))
    free = threading.Semaphore(PARALLEL_MAX)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 16, 1)
        if not message:
            return
        for descriptor in descriptors:
            free.acquire()
            arguments = (socket.socket(fileno=descriptor), free)
            threading.Thread(target=_answer, args=arguments, daemon=True).start()


if __name__ == "__main__":
    main()
