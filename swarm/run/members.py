"""The members of a run, as one trusted peer knows them.

Each trusted peer publishes, as `Presence`, the peers that renew their leases with it, the slot of
each, and the peers that lost theirs. So every trusted peer knows all leases, a member may renew its
lease at any of them, and the run's bounds count over all of them."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from swarm.run.admission import ADMISSION_LEASE_SECONDS
from swarm.run.run import Run
from swarm.wire.identity import PeerId
from swarm.wire.messages import LOST_MAX, Heartbeat, PeerState, Presence, Present, Slot
from swarm.world import World

SUSPECTED_SECONDS = 30.0
"""Silence (three missed heartbeats) after which no new work is expected from a peer."""

GONE_SECONDS = 60.0
"""Silence (six missed heartbeats) after which a peer is gone. One heartbeat brings it back."""

PRESENCE_BYTES_MAX = 40 * 1024
"""Size of one digest, enough for some 200 peers. Newcomers are named first; then the digest goes on
after the last peer named."""

PRESENCE_SECONDS = 5.0
"""Seconds from one digest to the next, if few peers take part."""

TRUSTED_FEW = 8
"""Of more trusted peers, those without members tell all others half as often that they live."""

PRESENCE_SECONDS_MIN = 1.0
"""Least seconds from one digest to the next."""

ROUND_SECONDS = 15.0
"""Seconds in which the digests name every member once. A heartbeat may be 10 s old when a digest
names it, and counts as late 30 s after it was sent. So from 600 members of one trusted peer on,
digests follow each other faster, and from some 3,000 on members appear as suspected elsewhere."""

LISTED_SECONDS = 1.0
"""Time for which a list of the leases in force is used again. Listing thousands takes tens of
milliseconds, and thousands of peers may ask for admission within a minute."""

PRESENT_MAX = 200
"""Most peers in one presence digest."""

Standing = Literal["live", "suspected", "gone", "evicted"]


@dataclass
class Member:
    """One peer that renews its lease with this trusted peer."""

    heartbeat: Heartbeat
    heard: float
    slot: Slot
    useful: float
    """Seconds of work (`Members.worked`) at its admission, or when its stake was seen to grow."""
    granted: float
    """Time at which this trusted peer gave it a slot; -inf if another one did."""
    standing: Standing = "live"


@dataclass(frozen=True)
class LeaseInForce:
    """A lease in force, granted by any trusted peer."""

    peer: str
    slot: Slot
    member: Member | None
    """Set if this trusted peer renewed it last."""

    @property
    def worker(self) -> bool:
        """Whether its slot is a worker's, whatever roles the peer has since: an admission as a
        worker was signed for it. If a peer could return to a helper's slot at once, others could
        try out their entries in its slot."""
        return bool(self.slot.entry)


class Members:
    """The members that renew their leases here, and the other trusted peers' reports."""

    def __init__(self, run: Run, world: World, peer_id: PeerId) -> None:
        self._run = run
        self._world = world
        self._peer_id = peer_id
        self.own: dict[str, Member] = {}
        self.worked = 0.0
        """Seconds during which a step wanted work, as far as this process has noticed. Idleness is
        measured in these, so that a paused run costs no member its slot."""
        self._reports: dict[str, dict[str, tuple[Present, float]]] = {}
        """Reports of other trusted peers, by reporter and peer, and when they arrived."""
        self._lost: dict[str, float] = {}
        """Peers that lost their slot at any trusted peer, and when this peer learned it."""
        self._took: dict[str, float] = {}
        """Those among them whose slot was taken here, and when. Only these are published: if
        trusted peers repeated others', none would be forgotten. The next digest names the first."""
        self._named_last = ""
        """Last peer in the newest digest; empty if the digest named all."""
        self._digested = self._began = self._world.now()
        """Time of the newest digest, and of the beginning."""
        self.digest_seconds = PRESENCE_SECONDS
        """Seconds from the newest digest to the next."""
        self._listed: dict[str, LeaseInForce] | None = None
        """Leases in force at `_listed_at`, by peer, and those granted here since."""
        self._listed_at = -math.inf

    # --- leases ------------------------------------------------------------------------------

    def lease_of(self, peer: str) -> LeaseInForce | None:
        """Return a peer's lease in force, whichever trusted peer renewed it; None without one.

        If two trusted peers admitted it at once, the earlier admission counts for both; one as a
        worker, which has an entry, before any other."""
        after = max(self._world.now() - ADMISSION_LEASE_SECONDS, self._lost.get(peer, -math.inf))
        member = self.own.get(peer)
        found: list[tuple[float, Slot, Member | None]] = []
        if member is not None and member.heard > after:
            found.append((member.heard, self._slot(member), member))
        for reports in self._reports.values():
            if peer in reports:
                entry, received = reports[peer]
                if entry.slot is not None and received - entry.age_seconds > after:
                    found.append((received - entry.age_seconds, entry.slot, None))
        if not found:
            return None
        _, newest, renewed_here = max(found, key=lambda each: each[0])
        slots = [slot for _, slot, _ in found]
        first = min(slots, key=lambda slot: (not slot.entry, slot.admitted_ms, slot.entry))
        slot = msgspec.structs.replace(newest, admitted_ms=first.admitted_ms, entry=first.entry)
        return LeaseInForce(peer, slot, renewed_here)

    def leases(self) -> list[LeaseInForce]:
        """List the leases in force, as they were less than `LISTED_SECONDS` ago, and those that
        this peer has granted since."""
        if self._listed is None or self._world.now() >= self._listed_at + LISTED_SECONDS:
            known = sorted(set(self.own).union(*self._reports.values()))
            found = ((peer, self.lease_of(peer)) for peer in known)
            self._listed = {peer: lease for peer, lease in found if lease is not None}
            self._listed_at = self._world.now()
        return list(self._listed.values())

    def grant(self, peer: str) -> None:
        """Note that this peer has just given another one a slot."""
        self.own[peer].granted = self._world.now()
        lease = self.lease_of(peer)
        if lease is not None and self._listed is not None:
            self._listed[peer] = lease

    def lose(self, peer: str) -> None:
        """Take a slot from a peer that renews its lease here."""
        del self.own[peer]
        if self._listed is not None:
            self._listed.pop(peer, None)
        self._lost[peer] = self._took[peer] = self._world.now()

    def has_lost(self, peer: str) -> bool:
        """Whether a peer's slot was taken less than a lease ago."""
        return peer in self._lost

    def _slot(self, member: Member) -> Slot:
        return msgspec.structs.replace(member.slot, idle_seconds=self.worked - member.useful)

    # --- presence ----------------------------------------------------------------------------

    def hear(self, reporter: str, presence: Presence) -> None:
        """Take note of another trusted peer's digest."""
        now = self._world.now()
        reports = self._reports.setdefault(reporter, {})
        reports.update((entry.peer, (entry, now)) for entry in presence.peers)
        for peer, (entry, received) in list(reports.items()):
            if entry.age_seconds + (now - received) > 10 * GONE_SECONDS:
                del reports[peer]
        for peer in presence.lost:
            self._lost.setdefault(peer, now)

    def present(self, me: Heartbeat) -> list[Present]:
        """List the latest report on each peer that any trusted peer knows, sorted by id."""
        freshest: dict[str, Present] = {entry.peer: entry for entry in self._own_view(me)}
        now = self._world.now()
        for reports in self._reports.values():
            for entry, received in reports.values():
                age = entry.age_seconds + (now - received)
                held = freshest.get(entry.peer)
                if held is None or age < held.age_seconds:
                    standing = self._stand(entry.peer, age, entry.heartbeat)
                    freshest[entry.peer] = msgspec.structs.replace(
                        entry, age_seconds=age, standing=standing
                    )
        return [freshest[peer] for peer in sorted(freshest)]

    def silent_seconds(self, peer: str) -> float:
        """Seconds since any trusted peer heard from a peer, or since this process began."""
        heard = [
            received - entry.age_seconds
            for entry, received in (
                reports[peer] for reports in self._reports.values() if peer in reports
            )
        ]
        if peer in self.own:
            heard.append(self.own[peer].heard)
        return self._world.now() - max(heard, default=self._began)

    def next_digest(self, me: Heartbeat) -> Presence:
        """Make a digest of this peer and as many members as fit: newcomers, then the others in
        the order of their ids, after the last one named before."""
        myself, *others = self._own_view(me)
        new = [e for e in others if self.own[e.peer].granted >= self._digested]
        rest = [e for e in others if self.own[e.peer].granted < self._digested]
        start = bisect_right([entry.peer for entry in rest], self._named_last)
        page = digest([myself, *new, *rest[start:], *rest[:start]])
        named = page[1 + len(new) :]
        if len(named) == len(rest):
            self._named_last = ""
        elif named:
            self._named_last = named[-1].peer
        self._digested = self._world.now()
        share = len(page) / (1 + len(others))
        self.digest_seconds = max(
            PRESENCE_SECONDS_MIN, min(PRESENCE_SECONDS, share * ROUND_SECONDS)
        )
        if not others and len(self._run.manifest.trusted_ids()) > TRUSTED_FEW:
            self.digest_seconds = 2 * PRESENCE_SECONDS  # it only says that this peer lives
        lost = list(self._took)[:LOST_MAX]
        self._took |= {peer: self._took.pop(peer) for peer in lost}  # the next digest goes on
        return Presence(peers=page, lost=lost)

    def forget(self, me: Heartbeat) -> Iterator[tuple[str, PeerState]]:
        """Forget members that are long silent, and yield the state of those that changed it.

        A member is silent if no trusted peer receives its heartbeats."""
        now = self._world.now()
        for times in (self._lost, self._took):
            for peer, lost in list(times.items()):
                if now - lost >= ADMISSION_LEASE_SECONDS:
                    del times[peer]
        freshest = {entry.peer: entry for entry in self.present(me)}
        for peer, member in sorted(self.own.items()):
            entry = freshest[peer]
            if member.standing != entry.standing:
                member.standing = entry.standing
                yield peer, entry.state
            # Identities are free, so a member without a stake is soon forgotten.
            if entry.age_seconds > (10 if member.slot.stake else 2) * GONE_SECONDS:
                del self.own[peer]

    def _own_view(self, me: Heartbeat) -> list[Present]:
        now = self._world.now()
        standing: Standing = "gone" if me.leaving else "live"
        return [Present(peer=self._peer_id, heartbeat=me, age_seconds=0.0, standing=standing)] + [
            Present(
                peer=peer,
                heartbeat=member.heartbeat,
                age_seconds=now - member.heard,
                standing=self._stand(peer, now - member.heard, member.heartbeat),
                slot=self._slot(member),
            )
            for peer, member in sorted(self.own.items())
        ]

    def _stand(self, peer: str, age_seconds: float, heartbeat: Heartbeat) -> Standing:
        if self._run.evicted(peer) is not None:
            return "evicted"
        if heartbeat.leaving or age_seconds >= GONE_SECONDS:
            return "gone"
        return "suspected" if age_seconds >= SUSPECTED_SECONDS else "live"


def digest(entries: Sequence[Present]) -> list[Present]:
    """Return the first of these peers, as many as fit into a digest."""
    room = PRESENCE_BYTES_MAX
    page: list[Present] = []
    for entry in entries[:PRESENT_MAX]:
        room -= len(msgspec.msgpack.encode(entry))
        if page and room < 0:
            break
        page.append(entry)
    return page
