"""The private network of hivemind's trainers: who is answered, and what the lines carry.

The library answers everyone who reaches its port, and counts nothing. But all that it serves goes
through its client of the libp2p daemon, which has proven by its handshake who calls."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client

from swarm.wire.identity import Identity, public_key_of

_ED25519 = bytes.fromhex("08011240")
"""Head of a libp2p private key: a protobuf of the type Ed25519 with 64 bytes."""


@contextmanager
def key_file(identity: Identity) -> Iterator[str]:
    """The file from which the daemon reads a trainer's key while it starts."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(_ED25519 + identity.seed + public_key_of(identity.peer_id))
        file.flush()
        yield file.name


def enclose(members: frozenset[bytes], traffic: Any) -> None:
    """Answer the members alone, in this process and in those that it forks from now on.

    `traffic`: two shared numbers, the bytes of updates and states sent and received."""
    send, receive = P2P.send_raw_data, P2P.receive_raw_data

    def guarded(register: Any, refuse: Callable[..., None]) -> Any:
        async def guard(self: Any, name: str, handler: Any, *options: Any, **named: Any) -> None:
            async def answer(first: Any, second: Any, *third: Any) -> Any:
                caller = first.peer_id if third else second
                if caller.to_bytes() not in members:
                    return refuse(*third)
                return await handler(first, second, *third)

            await register(self, name, answer, *options, **named)

        return guard

    def refuse_call() -> None:
        raise PermissionError("only the trainers of this training are answered")

    def count(index: int, data: bytes) -> bytes:
        with traffic.get_lock():
            traffic[index] += len(data)
        return data

    async def counted_send(data: bytes, writer: Any, **named: Any) -> None:
        await send(count(0, data), writer, **named)

    async def counted_receive(reader: Any) -> bytes:
        return count(1, await receive(reader))

    Client.add_unary_handler = guarded(Client.add_unary_handler, refuse_call)
    # A stream is closed before a byte of it is read: a message may have any size.
    Client.stream_handler = guarded(Client.stream_handler, lambda writer: writer.close())
    P2P.send_raw_data = staticmethod(counted_send)
    P2P.receive_raw_data = staticmethod(counted_receive)
