"""On which seals the trusted peers agree, and which seals they may make (decision 41).

A peer votes for a seal by appending it to its own log. It votes for a second seal of an epoch only
if its first one is *lost*, and the peer that made the second one had seen that: so two seals of an
epoch are never both made by more than half of the peers, as long as those in both halves follow
the rule, and no peer alone can make another vote twice. (This is how Paxos keeps two values from
being chosen: Lamport, "The Part-Time Parliament", 1998. The logs themselves are the record of who
voted for what, and when.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from swarm.ledger.entries import Sealed, decode
from swarm.ledger.epochs import rules_digest
from swarm.ledger.state import Authority


@dataclass(frozen=True)
class Place:
    """A seal in a log."""

    owner: str
    position: int
    epoch: int
    stated: bytes
    """`swarm.ledger.epochs.stated`."""

    @cached_property
    def says(self) -> Sealed:
        """What the seal says of the run, without what only its own log says."""
        seal = decode(self.stated)
        assert isinstance(seal, Sealed)
        return seal


Seals = Mapping[str, Sequence[Place]]
"""The seals in each log, the oldest first."""


def voters(seals: Seals, stated: bytes, trusted: Sequence[str]) -> list[str]:
    """The trusted peers that have sealed the same."""
    return [peer for peer in trusted if any(p.stated == stated for p in seals.get(peer, ()))]


def agreed(seals: Seals, place: Place, trusted: Sequence[str]) -> bool:
    """Whether more than half of the trusted peers have sealed the same."""
    return len(voters(seals, place.stated, trusted)) > len(trusted) // 2


def newest_agreed(seals: Seals, trusted: Sequence[str], before: float = math.inf) -> Place | None:
    """The newest seal, in any log, that more than half of the trusted peers have made, of an epoch
    `before` another."""
    places = [place for owner in trusted for place in seals.get(owner, ())]
    found = [p for p in places if p.epoch < before and agreed(seals, p, trusted)]
    return max(found, key=lambda p: (p.epoch, p.says.lineage, p.says.step, p.stated), default=None)


def prunable(seals: Seals, own: Place, trusted: Sequence[str]) -> bool:
    """Whether what an epoch seals may be pruned: all trusted peers have sealed it, or more than
    half have sealed it and a later one."""
    if len(voters(seals, own.stated, trusted)) == len(trusted):
        return True
    later = [place for log in seals.values() for place in log if place.epoch > own.epoch]
    return agreed(seals, own, trusted) and any(agreed(seals, p, trusted) for p in later)


def is_lost(seals: Seals, place: Place, authority: Authority) -> bool:
    """Whether more than half of the trusted peers can never make a seal: so many have chosen
    another one for its epoch, or the owner has changed the trusted peers or the rules since."""
    says, trusted = place.says, authority.trusted
    if says.rules != rules_digest(authority) or [x.owner for x in says.logs] != sorted(trusted):
        return True
    elsewhere = sum(_chose_another(seals.get(peer, ()), place, peer) for peer in trusted)
    return len(trusted) - elsewhere <= len(trusted) // 2


def _chose_another(log: Sequence[Place], place: Place, owner: str) -> bool:
    """Whether a peer has made another seal that this one does not cover, so that it never makes
    this one."""
    covered = place.says.log(owner)
    if covered is None or any(made.stated == place.stated for made in log):
        return False
    return any(made.epoch >= place.epoch and made.position >= covered.size for made in log)


def may_follow(seals: Seals, me: str, theirs: Place, authority: Authority) -> bool:
    """Whether this peer, by what it has sealed itself, may seal what another one has sealed."""
    mine = [place for place in seals.get(me, ()) if place.epoch >= theirs.epoch]
    covered = theirs.says.log(me)
    return covered is not None and all(
        made.epoch == theirs.epoch
        and made.stated != theirs.stated
        and made.position < covered.size
        and is_lost(seals, made, authority)
        for made in mine
    )


def adoptable(seals: Seals, epoch: int, authority: Authority) -> list[Place]:
    """The seals of an epoch that more than half of the trusted peers may still make, those with
    the most votes first, each once."""
    trusted = authority.trusted
    found = {
        place.stated: place
        for owner in reversed(trusted)
        for place in seals.get(owner, ())
        if place.epoch == epoch and not is_lost(seals, place, authority)
    }
    return sorted(found.values(), key=lambda p: (-len(voters(seals, p.stated, trusted)), p.stated))
