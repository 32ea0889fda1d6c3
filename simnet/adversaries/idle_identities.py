from __future__ import annotations

from typing import Any, ClassVar, cast

import trio

from simnet.adversaries.base import Adversary, Kind
from swarm.errors import PeerError
from swarm.wire.envelope import Gate, seal
from swarm.wire.identity import Identity, PeerId
from swarm.wire.messages import Admission, Heartbeat
from swarm.wire.messenger import Messenger, first

CROWD = 40
"""Identities of one machine."""


class IdleIdentities(Adversary):
    """A crowd of identities on one machine that say heartbeats to every trusted peer, as long
    words as they may, and deliver nothing. *Harmless*: a network has few slots, and idle
    identities lose theirs."""

    roles: ClassVar[list[str]] = ["inference"]
    admitted: ClassVar[set[str]] = set()
    """Identities that some trusted peer admitted."""

    async def run(self) -> None:
        here = cast(Any, self._peer.node.transport)
        network = here.host.rpartition(".")[0]
        async with trio.open_nursery() as nursery:
            for number in range(CROWD):
                identity = Identity(self._peer.node.world.secret_bytes(32))
                nursery.start_soon(self._live, identity, f"{network}.{number + 2}")

    async def _live(self, identity: Identity, host: str) -> None:
        node, run = self._peer.node, self._peer.run
        here = cast(Any, node.transport)
        async with (
            here._network.transport(
                identity, world=node.world, disk=node.disk, line=here.line, host=host
            ) as transport,
            trio.open_nursery() as nursery,
        ):
            gate = Gate(node.world, run.id, run.permits, run.trusts)
            messenger = Messenger(transport, gate, node.events)
            await nursery.start(messenger.run)
            beat = Heartbeat(roles=self.roles, doing="\x1b" * 80, bytes_sent=2**53)
            for sequence in range(10**6):
                for trusted in run.manifest.trusted_ids():
                    record = node.record(trusted)
                    envelope = seal(
                        identity,
                        beat,
                        run=run.id,
                        sequence=sequence + 1,
                        wall_time=node.world.wall_time(),
                        lifetime_seconds=60,
                    )
                    try:
                        if record is not None:
                            await transport.connect(PeerId(trusted), record.addresses)
                            reply = await messenger.request(PeerId(trusted), envelope)
                            if first(reply, Admission) is not None:
                                self.admitted.add(identity.peer_id)
                    except PeerError:
                        continue
                await trio.sleep(5.0)


KIND = Kind(IdleIdentities)
