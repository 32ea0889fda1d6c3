"""The trusted side of admission: leases, heartbeats, presence.

A peer asks one trusted peer for admission and then sends it a heartbeat every 10 s. Each answer
renews its *admission*, a signed lease of 60 s. A rendezvous hash ranks the trusted peers. If one is
silent, the next in rank takes over without a handover, since admission depends only on the manifest
and the evictions. A peer is suspected after three missed heartbeats and gone after six. One further
heartbeat brings it back. Trusted peers publish the peers that they know of as `Presence`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import trio

from swarm.envelope import EVENT_LIFETIME_SECONDS, Envelope
from swarm.events import Events, Rationed
from swarm.gossip.gossip import Gossip
from swarm.identity import PeerId
from swarm.messages import (
    DOING_REPEATED_MAX,
    Admission,
    AdmissionRefused,
    AdmissionRequest,
    Heartbeat,
    Presence,
    Present,
)
from swarm.messenger import Messenger
from swarm.run.admission import ADMISSION_LEASE_SECONDS, ROLES, Sealer
from swarm.run.run import Run
from swarm.world import World

SUSPECTED_SECONDS = 30.0
"""Silence (three missed heartbeats) after which a peer is suspected: no new work is expected from
it."""

GONE_SECONDS = 60.0
"""Silence (six missed heartbeats) after which a peer is gone. One heartbeat brings it back."""

PRESENCE_SECONDS = 5.0
"""Interval between a trusted peer's presence digests."""

PRESENCE_BYTES_MAX = 32 * 1024
"""Size of one digest, enough for some 230 peers. A trusted peer with a thousand members thus names
each of them again before it would count as suspected. The next digest begins with the peer after
the last one named."""

PLACE_IDLE_SECONDS = 600.0
"""Time without a further accepted submission after which an unproven peer yields to a waiting
one."""

PLACE_CROWDED_SECONDS = 60.0
"""The same time if the waiting peer comes from a network with fewer members, and the unproven peer
has no accepted submission."""

Standing = Literal["live", "suspected", "gone", "evicted"]

PRESENT_MAX = 200
"""Most peers in one presence digest."""


@dataclass
class _Member:
    """One peer that this trusted peer admitted."""

    heartbeat: Heartbeat
    heard: float
    useful: float
    """Time of its admission, or when a further accepted submission was noticed."""
    accepted: int
    """Number of its accepted submissions."""
    network: str
    """Its /24 (IPv6: /48); empty if unknown."""
    logged: bool = False
    standing: Standing = "live"


class Registrar:
    """The trusted side of admission: answers requests and heartbeats, and tracks the members."""

    def __init__(
        self,
        run: Run,
        gossip: Gossip,
        messenger: Messenger,
        world: World,
        events: Events,
        *,
        peer_id: PeerId,
        seal: Sealer,
        describe: Callable[[], Heartbeat],
        accepted: Callable[[str], int],
        admitted: Callable[[str, Sequence[str]], Awaitable[None]],
        network_of: Callable[[PeerId], str] = lambda _peer: "",
        vouch: Callable[[PeerId, float], None] = lambda _peer, _seconds: None,
    ) -> None:
        """`accepted` counts a worker's accepted submissions. `admitted` is called once for each
        peer that has any, and makes its admission durable. `network_of` returns the /24 or /48 of
        a connected peer, or an empty string. `vouch` is called with each admitted peer and the
        seconds of its lease."""
        self._run = run
        self._gossip = gossip
        self._messenger = messenger
        self._world = world
        self._events = events
        self._peer_id = peer_id
        self._seal = seal
        self._describe = describe
        self._accepted = accepted
        self._admitted = admitted
        self._network_of = network_of
        self._vouch = vouch
        self._members: dict[str, _Member] = {}
        self._others: dict[str, dict[str, tuple[Present, float]]] = {}
        """Reports of other trusted peers, by reporter and peer, and when they arrived."""
        self._refusals = Rationed(events)
        self._named_last = ""
        """Last peer in the newest digest; empty if the digest named all."""
        gossip.listen(Presence, self._on_presence)

    async def run(self) -> None:
        """Admit peers, publish presence and notice silent peers, until cancelled."""
        async with self._messenger.answering(
            {AdmissionRequest: self._on_request, Heartbeat: self._on_heartbeat}
        ):
            while True:
                await trio.sleep(PRESENCE_SECONDS)
                self._notice_silence()
                self._gossip.publish(
                    await self._seal(self._next_digest(), GONE_SECONDS + PRESENCE_SECONDS)
                )

    def present(self) -> list[Present]:
        """List the latest report on each peer that any trusted peer knows, sorted by id."""
        freshest: dict[str, Present] = {p.peer: p for p in self._own_view()}
        now = self._world.now()
        for entries in self._others.values():
            for entry, received in entries.values():
                age = entry.age_seconds + (now - received)
                held = freshest.get(entry.peer)
                if held is None or age < held.age_seconds:
                    freshest[entry.peer] = Present(
                        peer=entry.peer,
                        heartbeat=entry.heartbeat,
                        age_seconds=age,
                        standing=self._stand(entry.peer, age),
                    )
        return [freshest[peer] for peer in sorted(freshest)]

    def live_workers(self) -> list[str]:
        """List the ids of live peers with the inference role, sorted."""
        return [
            entry.peer
            for entry in self.present()
            if entry.standing == "live" and _is_worker(entry.heartbeat.roles)
        ]

    # --- requests ----------------------------------------------------------------------------

    async def _on_request(
        self, envelope: Envelope, _supporting: Sequence[Envelope]
    ) -> Sequence[Envelope]:
        roles = envelope.expect(AdmissionRequest).roles
        return await self._grant(envelope.sender, Heartbeat(roles=roles, doing="joining"))

    async def _on_heartbeat(
        self, envelope: Envelope, _supporting: Sequence[Envelope]
    ) -> Sequence[Envelope]:
        return await self._grant(envelope.sender, envelope.expect(Heartbeat))

    async def _grant(self, peer: str, heartbeat: Heartbeat) -> Sequence[Envelope]:
        accepted = self._accepted(peer)
        network = self._network_of(PeerId(peer))
        refusal = self._refusal(peer, heartbeat.roles, accepted, network)
        if refusal is not None:
            self._refusals.emit("membership.refused", remote=peer, reason=refusal.reason)
            return [await self._seal(refusal, EVENT_LIFETIME_SECONDS)]
        now = self._world.now()
        kept = msgspec.structs.replace(heartbeat, doing=heartbeat.doing[:DOING_REPEATED_MAX])
        member = self._members.get(peer)
        if member is None:
            member = self._members[peer] = _Member(kept, now, now, accepted, network)
            self._events.emit("membership.peer_admitted", remote=peer, roles=heartbeat.roles)
        elif member.standing != "live":
            self._events.emit("membership.peer_returned", remote=peer)
        if accepted > member.accepted:
            member.accepted, member.useful = accepted, now
        member.heartbeat, member.heard, member.standing = kept, now, "live"
        if accepted and not member.logged:
            member.logged = True
            await self._admitted(peer, heartbeat.roles)
        admission = Admission(peer=peer, roles=heartbeat.roles)
        self._vouch(PeerId(peer), ADMISSION_LEASE_SECONDS)
        return [await self._seal(admission, ADMISSION_LEASE_SECONDS)]

    def _refusal(
        self, peer: str, roles: Sequence[str], accepted: int, network: str
    ) -> AdmissionRefused | None:
        """Return why a peer is not admitted, or None. May drop an idle member to make room."""

        def refused(reason: str, *, later: bool = False) -> AdmissionRefused:
            return AdmissionRefused(peer=peer, reason=reason, later=later)

        manifest = self._run.manifest
        admissions = manifest.admissions
        if peer in manifest.trusted_ids():
            return None
        eviction = self._run.evicted(peer)
        if eviction is not None:
            return refused(f"evicted: {eviction.reason}"[:500])
        known = (*ROLES, *admissions.further_roles)
        unknown = [role for role in roles if role not in known]
        if unknown or not roles:
            what = f"no role {unknown[0]!r}" if unknown else "no peer without a role"
            return refused(
                f"this run admits {what}; its roles are {', '.join(sorted(known))}"[:400]
                + ", and its owner can add others to admissions.further_roles"
            )
        if admissions.policy == "allow-list" and peer not in admissions.allowed:
            return refused(
                "this run admits only the peers on its allow-list; ask its owner to add your id"
            )
        if _is_worker(roles) and accepted >= manifest.thresholds.proven_after:
            return None
        held = self._members.get(peer)
        if held is not None and _is_worker(held.heartbeat.roles) == _is_worker(roles):
            return None
        full = self._make_room(_is_worker(roles), network)
        return refused(full, later=True) if full else None

    def _make_room(self, worker: bool, network: str) -> str:
        """Make room for one more unproven worker, or one more helper.

        Drops an idle member if needed. Returns why there is no room, or an empty string.
        """
        admissions, trusted = self._run.manifest.admissions, self._run.manifest.trusted_ids()
        proven_after = self._run.manifest.thresholds.proven_after
        bound = admissions.unproven_max if worker else admissions.helpers_max
        now = self._world.now()
        held = {
            peer: member
            for peer, member in self._members.items()
            if _is_worker(member.heartbeat.roles) == worker
            and not (worker and member.accepted >= proven_after)
            and now - member.heard < ADMISSION_LEASE_SECONDS
        }
        taken = Counter(member.network for member in held.values())
        what = "peers without a record" if worker else "helpers"
        if network and taken[network] >= admissions.range_max:
            held = {peer: member for peer, member in held.items() if member.network == network}
            full = f"{taken[network]} {what} of your network ({network}) take part already"
        elif len(held) >= (bound + len(trusted) - 1 - trusted.index(self._peer_id)) // len(trusted):
            full = f"{len(held)} {what} take part here already"
        else:
            return ""

        def idle(member: _Member) -> bool:
            crowded = taken[member.network] > taken[network] + 1 and not member.accepted
            patience = PLACE_CROWDED_SECONDS if crowded else PLACE_IDLE_SECONDS
            return now - member.useful >= patience

        idlers = [peer for peer in sorted(held) if idle(held[peer])]
        if not idlers:
            return f"{full}, the most this run allows; waiting for a free slot"
        loser = max(idlers, key=lambda peer: (taken[held[peer].network], now - held[peer].useful))
        del self._members[loser]
        self._events.emit("membership.place_lost", remote=loser)
        return ""

    # --- presence ----------------------------------------------------------------------------

    def _on_presence(self, envelope: Envelope) -> None:
        if envelope.sender != self._peer_id:
            now = self._world.now()
            entries = self._others.setdefault(envelope.sender, {})
            entries.update((entry.peer, (entry, now)) for entry in envelope.expect(Presence).peers)
            for peer, (entry, received) in list(entries.items()):
                if entry.age_seconds + (now - received) > 10 * GONE_SECONDS:
                    del entries[peer]

    def _stand(self, peer: str, age_seconds: float) -> Standing:
        if self._run.evicted(peer) is not None:
            return "evicted"
        if age_seconds >= GONE_SECONDS:
            return "gone"
        return "suspected" if age_seconds >= SUSPECTED_SECONDS else "live"

    def _own_view(self) -> list[Present]:
        now = self._world.now()
        me = Present(
            peer=self._peer_id, heartbeat=self._describe(), age_seconds=0.0, standing="live"
        )
        return [me] + [
            Present(
                peer=peer,
                heartbeat=member.heartbeat,
                age_seconds=now - member.heard,
                standing=self._stand(peer, now - member.heard),
            )
            for peer, member in sorted(self._members.items())
        ]

    def _next_digest(self) -> Presence:
        """Make a digest of this peer and as many members as fit, continuing after the last one."""
        me, *others = self._own_view()
        start = bisect_right([entry.peer for entry in others], self._named_last)
        page = digest([me, *others[start:], *others[:start]])
        self._named_last = page.peers[-1].peer if len(page.peers) <= len(others) else ""
        return page

    def _notice_silence(self) -> None:
        """Report members that fell silent or came back.

        A member is silent only if no trusted peer receives its heartbeats, since it may send them
        to another one.
        """
        freshest = {entry.peer: entry for entry in self.present()}
        for peer, member in sorted(self._members.items()):
            entry = freshest[peer]
            if member.standing != entry.standing:
                member.standing = entry.standing
                word = "returned" if entry.standing == "live" else entry.standing
                self._events.emit(f"membership.peer_{word}", remote=peer)
            # Identities are free, so a member without an accepted submission is soon forgotten.
            if entry.age_seconds > (10 if member.accepted else 2) * GONE_SECONDS:
                del self._members[peer]


def digest(entries: Sequence[Present]) -> Presence:
    """Make a digest of the first of these peers, as many as fit."""
    room = PRESENCE_BYTES_MAX
    page: list[Present] = []
    for entry in entries[:PRESENT_MAX]:
        room -= len(msgspec.msgpack.encode(entry))
        if page and room < 0:
            break
        page.append(entry)
    return Presence(peers=page)


def _is_worker(roles: Sequence[str]) -> bool:
    return "inference" in roles
