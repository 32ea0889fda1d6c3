"""What kinds of adversaries have in common."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import msgspec
import trio

from simnet.compute.setting import Fabricates
from swarm.gossip.topics import RUN, WORK, Push
from swarm.kademlia import wire
from swarm.node.run_node import RunNode
from swarm.roles import Role
from swarm.transport import BlobReference, Source, Stream, Transport
from swarm.wire.envelope import STATE_LIFETIME_SECONDS, Envelope
from swarm.wire.identity import Identity
from swarm.wire.messages import Checkpoint, Message, StepOrder

ATTACK_SECONDS = 5.0
"""Time between two attempts of a repeated attack."""


@dataclass(frozen=True)
class Kind:
    """A kind of adversary, and how its attack ends."""

    acts: type[Role]
    claims: str = "relay"
    fabricates: Fabricates = ""
    """What its compute children fabricate: `simnet.compute.setting.Setting.fabricates`."""
    undefended: bool = False
    """Whether the attack succeeds, so that `byzantine` leaves it out."""
    returns: bool = False
    """Whether it returns with a new key once it is evicted."""
    uplink_bytes_per_second: float | None = None


async def beside(
    honest: Callable[[], Awaitable[None]],
    attack: Callable[[], Awaitable[None]],
    seconds: float = ATTACK_SECONDS,
) -> None:
    """Do honest work until cancelled, and attack every `seconds`."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(honest)
        while True:
            await trio.sleep(seconds)
            await attack()


class Adversary:
    """Joins like a relay, follows all announcements, and attacks every few seconds."""

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._heard: list[Envelope] = []
        for kind in (Checkpoint, StepOrder):
            peer.gossip.listen(kind, self._hear)

    def _hear(self, envelope: Envelope) -> None:
        self._heard = [*self._heard[-99:], envelope]

    async def run(self) -> None:
        await beside(self._peer.policies.follow, self.attack)

    async def attack(self) -> None:
        """Attack once; does nothing where wrong answers are the whole attack."""
        await trio.lowlevel.checkpoint()

    def push(self, *envelopes: bytes) -> None:
        """Send envelopes to every neighbour, bypassing this peer's own checks."""
        for neighbour in list(self._peer.gossip._slots.neighbours.values()):
            for raw in envelopes:
                self._peer.gossip._post(neighbour, Push(raw))

    async def claim(self, sender: str, message: Message) -> bytes:
        """Make an envelope that names `sender` but is signed with this peer's own key."""
        mine = await self._peer.seal(message, STATE_LIFETIME_SECONDS)
        body = msgspec.structs.replace(mine.body, sender=sender)
        return mine.raw[:64] + msgspec.msgpack.encode(body)


def answer_dht(transport: Transport, answer: Callable[[wire.Message], wire.Message | None]) -> None:
    """Make a peer answer every DHT request with `answer`; None is silence."""

    async def serve(stream: Stream) -> None:
        while (raw := await stream.receive()) is not None:
            said = answer(wire.decode(raw))
            if said is not None:
                await stream.send(wire.encode(said))

    cast(Any, transport)._handlers.pop(wire.PROTOCOL, None)
    transport.serve(wire.PROTOCOL, serve)


@asynccontextmanager
async def second_identity(
    peer: RunNode, identity: Identity, host: str | None
) -> AsyncIterator[tuple[Any, trio.Nursery]]:
    """Another identity on a peer's machine: its transport, and a nursery inside it."""
    node, here = peer.node, cast(Any, peer.node.transport)
    async with (
        here._network.transport(
            identity, world=node.world, disk=node.disk, line=here.line, host=host
        ) as transport,
        trio.open_nursery() as nursery,
    ):
        yield transport, nursery


def deliver_nothing(peer: RunNode) -> None:
    """Make a peer's pushes of files succeed without sending anything."""

    async def keep(target: Source, reference: BlobReference, path: str) -> None:
        await trio.lowlevel.checkpoint()

    cast(Any, peer.node.transport).push = keep
