"""Dial-back: a peer asks another to connect to it, and so learns whether others can reach it.

Like libp2p's AutoNAT. Only the IP address that the asker is seen at is dialled, so no third party.
The asker believes what it has seen itself: a handshake by the asked peer's key."""

import contextlib
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import msgspec
import trio
from libp2p.peer.id import ID
from msgspec import Meta
from multiaddr import Multiaddr

from swarm.transport import Stream, StreamError
from swarm.transport.libp2p.addresses import multiaddr
from swarm.transport.libp2p.guard import BROKEN
from swarm.transport.rates import TokenBuckets
from swarm.transport.room import origin_of
from swarm.wire.identity import PeerId

log = logging.getLogger(__name__)

PROTOCOL = "/swarm/dial-back/2.0.0"

FRAME_BYTES_MAX = 1024
"""A question and an answer have about 50 bytes."""

PORTS_MAX = 4
"""Ports dialled for one question: those that the asker listens at, or has forwarded."""

SEEN = 0
"""In place of a port: the one from which the asked peer sees the asker come."""

DIAL_SECONDS = 3.0
"""Given to each port: three round trips."""

ANSWER_SECONDS = 10.0
"""Deadline of an answer: all ports are dialled at once."""

QUESTIONS_PER_SECOND = 1 / 20
"""From one address range (/24, IPv6: /48), on average. An asker repeats itself after minutes."""

QUESTIONS_BURST = 8.0
"""From one address range at once: a few peers of one lab that start together."""

RANGES_MAX = 4096
"""Ranges whose questions are counted."""

DIALS_MAX = 16
"""Dials for all askers at once; more questions are refused."""

Port = Annotated[int, Meta(ge=0, le=65535)]


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Dial me."""

    ports: Annotated[list[Port], Meta(min_length=1, max_length=PORTS_MAX)]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What the asked peer sees."""

    host: Annotated[str, Meta(max_length=45)]
    """IP address of the asker; empty if the question is refused."""
    port: Port
    """From which the asker's connection comes."""
    reached: Annotated[list[Port], Meta(max_length=PORTS_MAX)]
    """Ports at which the asker answered; `SEEN` is replaced by the port itself."""
    refused: Annotated[str, Meta(max_length=200)] = ""
    """Why the question is refused."""


_question = msgspec.msgpack.Decoder(Question).decode
_answer = msgspec.msgpack.Decoder(Answer).decode
_encode = msgspec.msgpack.Encoder().encode


class DialBack:
    """Answers the questions of other peers."""

    def __init__(
        self,
        handshake: Callable[[Multiaddr, ID], Awaitable[None]],
        seen_at: Callable[[PeerId], tuple[str, int] | None],
        now: Callable[[], float],
    ) -> None:
        """`handshake`: connect, let the other side prove that it is the peer, and hang up.
        `seen_at`: the remote host and port of a peer's direct connection."""
        self._handshake = handshake
        self._seen_at = seen_at
        self._now = now
        self._asked = TokenBuckets(QUESTIONS_PER_SECOND, QUESTIONS_BURST, RANGES_MAX)
        self._dialling = 0

    async def serve(self, stream: Stream) -> None:
        """The handler of `PROTOCOL`."""
        frame = await stream.receive()
        try:
            question = _question(frame or b"")
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise StreamError("that is no question of dial-back") from error
        await stream.send(_encode(await self._answer(stream.peer, question)))

    async def _answer(self, peer: PeerId, question: Question) -> Answer:
        seen = self._seen_at(peer)
        if seen is None:
            return Answer("", 0, [], "ask on a direct connection")
        host, port = seen
        ports = sorted({each or port for each in question.ports})
        if self._dialling + len(ports) > DIALS_MAX:
            return Answer("", 0, [], "busy")
        if not self._asked.of(origin_of(host).range).take(1.0, self._now()):
            return Answer("", 0, [], "asked too often from this network")
        reached: list[int] = []

        async def dial(each: int) -> None:
            if await self._reaches(peer, host, each):
                reached.append(each)

        self._dialling += len(ports)
        try:
            async with trio.open_nursery() as nursery:
                for each in ports:
                    nursery.start_soon(dial, each)
        finally:
            self._dialling -= len(ports)
        return Answer(host, port, sorted(reached))

    async def _reaches(self, peer: PeerId, host: str, port: int) -> bool:
        with trio.move_on_after(DIAL_SECONDS), contextlib.suppress(*BROKEN, ValueError):
            await self._handshake(multiaddr(host, port), ID.from_string(peer))
            return True
        return False


def _checked(answer: Answer, asked: Sequence[int]) -> Answer:
    """The answer; raises `ValueError` if it names no host that a peer can have, or other ports."""
    if answer.host:
        ip = ipaddress.ip_address(answer.host)
        if ip.is_unspecified or ip.is_multicast or "%" in answer.host or not answer.port:
            raise ValueError("no address of a peer")
    if not set(answer.reached) <= {each or answer.port for each in asked} - {SEEN}:
        raise ValueError("ports that were not asked for")
    return answer


async def ask(stream: Stream, ports: Sequence[int]) -> Answer:
    """Ask the peer at the other end to dial back; raises `StreamError`."""
    with trio.move_on_after(ANSWER_SECONDS):
        await stream.send(_encode(Question(list(ports)[:PORTS_MAX])))
        frame = await stream.receive()
        try:
            return _checked(_answer(frame or b""), ports)
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
            raise StreamError("that is no answer of dial-back") from error
    raise StreamError(f"no answer within {ANSWER_SECONDS:g} s")
