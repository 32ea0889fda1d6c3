"""What the tasks of the replica role share: the outer loop, and the other trainers' statuses."""

from __future__ import annotations

from dataclasses import dataclass

from peers.outer.artifacts import Artifacts
from peers.outer.chain import Chain
from swarm.node.run_node import RunNode
from swarm.wire.envelope import CLOCK_SKEW_SECONDS_MAX, Envelope
from swarm.wire.outer import OuterStatus
from swarm.world.observable import Observable


@dataclass(frozen=True, eq=False)
class OuterLoop:
    """The outer loop as this trainer knows it."""

    peer: RunNode
    chain: Chain
    presence: Presence
    artifacts: Artifacts
    changed: Observable[None]
    """Touched at every news of a trainer, record, contribution and new outer state."""


STATUS_SECONDS = 10.0
"""Interval of a trainer's status while nothing changes."""

PRESENT_SECONDS = 3 * STATUS_SECONDS
"""A trainer is present for this long after its status."""

STATUS_LIFETIME_SECONDS = 60.0


@dataclass(frozen=True)
class Heard:
    """A trainer's newest status."""

    envelope: Envelope
    until: float
    """When the trainer counts as gone, in the world's seconds."""

    @property
    def status(self) -> OuterStatus:
        return self.envelope.expect(OuterStatus)


class Presence:
    """The newest status of every other trainer."""

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._heard: dict[str, Heard] = {}

    def hear(self, envelope: Envelope) -> bool:
        """Take over a status, which may have been repeated long after it was signed.

        Returns whether it has news, and is not only a sign of life.
        """
        world = self._peer.node.world
        age = world.wall_time() - envelope.body.issued_ms / 1000
        late = max(0.0, age - CLOCK_SKEW_SECONDS_MAX)
        until = world.now() + PRESENT_SECONDS - late
        if envelope.expect(OuterStatus).leaving:
            until = world.now()
        before = self._heard.get(envelope.sender)
        self._heard[envelope.sender] = heard = Heard(envelope, until)
        return before is None or before.until <= world.now() or before.status != heard.status

    def others(self) -> dict[str, OuterStatus]:
        """The newest status of each other trainer that the run still trusts, by peer id."""
        trusted = self._peer.run.manifest.trainer_ids()
        return {
            trainer: heard.status
            for trainer, heard in sorted(self._heard.items())
            if trainer in trusted and trainer != self._peer.peer_id
        }

    def present(self) -> list[str]:
        """Trainers that are present, this one included, sorted."""
        now = self._peer.node.world.now()
        found = [trainer for trainer in self.others() if now < self._heard[trainer].until]
        return sorted([*found, self._peer.peer_id])

    def gone_in(self) -> float:
        """Seconds until the next of the present trainers counts as gone."""
        now = self._peer.node.world.now()
        untils = [self._heard[trainer].until for trainer in self.others()]
        return min((until - now for until in untils if until > now), default=float("inf"))
