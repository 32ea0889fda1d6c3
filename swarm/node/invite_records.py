"""The invites of a run at a trusted peer: redeemed by peers, revoked by the owner."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from swarm.ledger.entries import Entry, InviteRevoked, Redeemed
from swarm.ledger.redeemed_invites import RedeemedInvites
from swarm.node.node import Node
from swarm.run.run import Run
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.messages import Invite, InviteRevocation, Message
from swarm.world import Database


def of_owner(raw: bytes, run: Run, kind: type[Message], name: str) -> Envelope:
    """Open a message that anyone may bring; raises `ValueError` unless the run's owner signed it
    for this run."""
    try:
        envelope = open_envelope(raw)
    except Dropped as dropped:
        raise ValueError(f"the {name} is not valid ({dropped})") from dropped
    is_owners = envelope.sender == run.owner and envelope.body.run == run.id
    if not (isinstance(envelope.message, kind) and is_owners):
        raise ValueError(f"this is no {name} signed by the owner of this run")
    return envelope


class Invites(RedeemedInvites):
    """Logs that invites are redeemed or revoked."""

    def __init__(
        self,
        node: Node,
        run: Run,
        database: Database,
        append: Callable[[list[Entry]], Awaitable[None]],
    ) -> None:
        """`append` makes entries of this peer's log durable."""
        super().__init__(database)
        self._node = node
        self._run = run
        self._append = append
        self._writing = trio.Lock()

    async def redeem(self, shown: Envelope, peer: str) -> None:
        """Log that a peer redeems an invite, unless it is redeemed or revoked already."""
        invite = shown.expect(Invite).id
        async with self._writing:
            if self.holder(invite) is None and not self.is_revoked(invite):
                now_ms = max(int(self._node.world.wall_time() * 1000), shown.body.issued_ms)
                await self._append(
                    [Redeemed(invite=invite, peer=peer, redeemed_ms=now_ms, envelope=shown.raw)]
                )
                self._node.events.emit(
                    "membership.invite_redeemed", remote=peer, invite=invite.hex()
                )

    async def revoke(self, raw: bytes) -> None:
        """Log the owner's revocation of an invite; it is durable on return.

        Raises `ValueError` unless the owner of this run signed it.
        """
        envelope = of_owner(raw, self._run, InviteRevocation, "revocation")
        message = envelope.expect(InviteRevocation)
        async with self._writing:
            if not self.is_revoked(message.invite):
                await self._append([InviteRevoked(invite=message.invite, envelope=raw)])
