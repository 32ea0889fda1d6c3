"""The trusted side of admission: leases, heartbeats, presence (docs/protocol.md).

Each answer to a heartbeat renews the sender's *admission*, a signed lease of 60 s. If a trusted
peer is silent, the next in rank takes over without a handover: it knows the lease from the silent
peer's digests, or from the admission that the sender shows."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import trio

from swarm.events import Rationed
from swarm.rollouts.seeds import digest
from swarm.run.admission import ADMISSION_LEASE_SECONDS, ROLES, check_admission, is_worker
from swarm.run.invites import Invites, invite_problem
from swarm.run.members import (
    GONE_SECONDS,
    PRESENCE_SECONDS,
    SUSPECTED_SECONDS,
    LeaseInForce,
    Member,
    Members,
)
from swarm.run.participant import Participant
from swarm.transport.rates import TokenBuckets
from swarm.wire.envelope import EVENT_LIFETIME_SECONDS, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import (
    DOING_REPEATED_MAX,
    Admission,
    AdmissionRefused,
    AdmissionRequest,
    Heartbeat,
    Invite,
    Presence,
    Present,
    Slot,
)
from swarm.wire.messenger import first
from swarm.wire.protocol import UPGRADE

SHARED_SECONDS = 2 * PRESENCE_SECONDS
"""Time after which all trusted peers know of a new slot. Meanwhile each gives away no more than its
share of the free slots, so that together they do not exceed the bound."""

RESERVED_SHARE = 0.25
"""Share of the slots that only peers of networks without a slot may take. Whoever fills the others
from a few networks thus shuts nobody else out."""

CROWDED_SECONDS = 60.0
"""Replaces `admissions.trial_seconds` for a peer without a stake if the waiting peer
comes from a network with fewer members."""

ANSWERS_PER_SECOND = 1.0
"""Average number of requests and heartbeats per second that one identity is answered, because each
answer costs a signature. An honest peer sends a heartbeat every 10 s."""

ANSWERS_BURST = 10.0

ANSWERED_REMEMBERED_MAX = 4096
"""Identities whose answers are counted; as many as the gate remembers."""

ENTRY_BYTES = 16


@dataclass(eq=False, repr=False)
class Registrar:
    """The trusted side of admission: answers requests and heartbeats, and tracks the members."""

    me: Participant
    stake: Callable[[str], int]
    """A worker's stake (`swarm.ledger.record`)."""
    invites: Invites
    secret: bytes
    """Key of the entries, so that a peer that leaves and returns gets the same one."""
    has_work: Callable[[], bool] = lambda: True
    """Whether a step wants work."""
    network_of: Callable[[PeerId], str] = lambda _peer: ""
    """The /24 or /48 of a connected peer, or an empty string."""
    vouch: Callable[[PeerId, float], None] = lambda _peer, _seconds: None
    """Called with each admitted peer and the seconds of its lease."""

    def __post_init__(self) -> None:
        self._members = Members(self.me.run, self.me.world, self.me.peer_id)
        self._refusals = Rationed(self.me.events)
        self._answers = TokenBuckets(ANSWERS_PER_SECOND, ANSWERS_BURST, ANSWERED_REMEMBERED_MAX)
        self.me.gossip.listen(Presence, self._on_presence)

    async def run(self) -> None:
        """Admit peers, publish presence and notice silent peers, until cancelled."""
        async with self.me.messenger.answering(
            {AdmissionRequest: self._on_request, Heartbeat: self._on_heartbeat}
        ):
            while True:
                seconds = self._members.digest_seconds
                await trio.sleep(seconds)
                if self.has_work():
                    self._members.worked += seconds
                for peer, state in self._members.forget(self.me.describe()):
                    word = "returned" if state == "live" else state
                    self.me.events.emit(f"membership.peer_{word}", remote=peer)
                await self.publish_presence()

    async def publish_presence(self) -> None:
        """Gossip the next digest of this peer and its members."""
        presence = self._members.next_digest(self.me.describe())
        self.me.gossip.publish(await self.me.seal(presence, GONE_SECONDS + PRESENCE_SECONDS))

    def present(self) -> list[Present]:
        """List the latest report on each peer that any trusted peer knows, sorted by id."""
        return self._members.present(self.me.describe())

    def live_workers(self) -> list[str]:
        """List the ids of live peers with the inference role, sorted."""
        return [
            entry.peer
            for entry in self.present()
            if entry.standing == "live" and is_worker(entry.heartbeat.roles)
        ]

    def is_silent(self, peer: str) -> bool:
        """Whether no trusted peer has heard from a peer for as long as makes it suspected."""
        return self._members.silent_seconds(peer) >= SUSPECTED_SECONDS

    def has_lease(self, peer: str) -> bool:
        """Whether a peer is admitted, as far as it is known here."""
        return self._members.lease_of(peer) is not None

    def is_helper(self, peer: str) -> bool:
        """Whether a peer's lease, as far as it is known here, is no worker's."""
        lease = self._members.lease_of(peer)
        return lease is not None and not lease.worker

    def _on_presence(self, envelope: Envelope) -> None:
        if envelope.sender != self.me.peer_id:
            self._members.hear(envelope.sender, envelope.expect(Presence))

    # --- requests ----------------------------------------------------------------------------

    async def _on_request(
        self, envelope: Envelope, supporting: Sequence[Envelope]
    ) -> Sequence[Envelope]:
        asked = envelope.expect(AdmissionRequest)
        heartbeat = Heartbeat(
            roles=asked.roles, doing="joining", protocol=asked.protocol, build=asked.build
        )
        return await self._answer(envelope.sender, heartbeat, supporting)

    async def _on_heartbeat(
        self, envelope: Envelope, supporting: Sequence[Envelope]
    ) -> Sequence[Envelope]:
        return await self._answer(envelope.sender, envelope.expect(Heartbeat), supporting)

    async def _answer(
        self, peer: str, heartbeat: Heartbeat, supporting: Sequence[Envelope]
    ) -> Sequence[Envelope]:
        """Renew a lease, give a newcomer one, or refuse. The peer may show a lease and an invite,
        which `supporting` holds. Beyond its rate it gets no answer."""
        if not self._answers.of(peer).take(1, self.me.world.now()):
            return []
        stake = self.stake(peer)
        network = self.network_of(PeerId(peer))
        shown, invite = first(supporting, Admission), first(supporting, Invite)
        lease = self._members.lease_of(peer) or self._lease_shown(peer, shown)
        if heartbeat.leaving and lease is None:
            return []
        refusal = self._uninvited(peer, invite)
        refusal = refusal or self._refusal(peer, heartbeat, stake, network, lease)
        if refusal is None and invite is not None and self._uninvited(peer, None) is not None:
            await self.invites.redeem(invite, peer)
            refusal = self._uninvited(peer, None)  # another peer may have redeemed it meanwhile
        if refusal is not None:
            self._refusals.emit("membership.refused", remote=peer, reason=refusal.reason)
            return [await self.me.seal(refusal, EVENT_LIFETIME_SECONDS)]
        member = self._renew(peer, heartbeat, lease, network, stake)
        admission = Admission(
            peer=peer,
            roles=heartbeat.roles,
            admitted_ms=member.slot.admitted_ms,
            entry=member.slot.entry,
            trial=self.me.run.manifest.admissions.trial and not stake,
        )
        self.vouch(PeerId(peer), ADMISSION_LEASE_SECONDS)
        return [await self.me.seal(admission, ADMISSION_LEASE_SECONDS)]

    def _renew(
        self, peer: str, heartbeat: Heartbeat, lease: LeaseInForce | None, network: str, stake: int
    ) -> Member:
        """Make or update the member; a peer with a lease keeps its entry and its idleness.

        Only a worker's slot has an entry: else ids could be tried out in the slots of helpers."""
        now = self.me.world.now()
        kept = msgspec.structs.replace(heartbeat, doing=heartbeat.doing[:DOING_REPEATED_MAX])
        before = self._members.own.get(peer)
        slot = lease.slot if lease is not None else before.slot if before is not None else None
        if slot is None:
            slot = Slot(admitted_ms=int(self.me.world.wall_time() * 1000))
        if not slot.entry and is_worker(heartbeat.roles):
            entry = digest("swarm/1/entry", self.secret, peer.encode())[:ENTRY_BYTES]
            slot = msgspec.structs.replace(slot, entry=entry)
        member = before
        if member is None:
            useful = self._members.worked - slot.idle_seconds
            member = self._members.own[peer] = Member(kept, now, slot, useful, -math.inf)
            self.me.events.emit("membership.peer_admitted", remote=peer, roles=heartbeat.roles)
        elif member.standing != "live" and not heartbeat.leaving:
            member.standing = "live"
            self.me.events.emit("membership.peer_returned", remote=peer)
        if stake > slot.stake:
            member.useful = self._members.worked
        network = network or slot.network
        member.slot = msgspec.structs.replace(slot, network=network, stake=stake)
        member.heartbeat, member.heard = kept, now
        if lease is None:
            self._members.grant(peer)
        return member

    def _lease_shown(self, peer: str, shown: Envelope | None) -> LeaseInForce | None:
        """Return the lease that a peer shows, which may be newer than the digests known here."""
        if shown is None or self._members.has_lost(peer):
            return None
        if check_admission(shown, self.me.run, peer, self.me.world.wall_time()) is not None:
            return None
        admission = shown.expect(Admission)
        slot = Slot(admitted_ms=admission.admitted_ms, entry=admission.entry)
        return LeaseInForce(peer, slot, None)

    def _uninvited(self, peer: str, invite: Envelope | None) -> AdmissionRefused | None:
        """Return the refusal of a peer that the run's policy admits only with another invite."""
        run, manifest = self.me.run, self.me.run.manifest
        by_invite = manifest.admissions.policy == "invite" and peer not in manifest.trusted_ids()
        if not by_invite or run.evicted(peer) is not None:
            return None
        problem = invite_problem(self.invites, run, peer, invite, self.me.world.wall_time())
        return AdmissionRefused(peer=peer, reason=problem[:500]) if problem else None

    def _refusal(
        self, peer: str, heartbeat: Heartbeat, stake: int, network: str, lease: LeaseInForce | None
    ) -> AdmissionRefused | None:
        """Return why a peer is not admitted, or None. May take an idle member's slot for it."""
        roles = heartbeat.roles

        def refused(reason: str, *, later: bool = False) -> AdmissionRefused:
            return AdmissionRefused(peer=peer, reason=reason, later=later)

        manifest = self.me.run.manifest
        admissions = manifest.admissions
        if peer in manifest.trusted_ids():
            return None
        eviction = self.me.run.evicted(peer)
        if eviction is not None:
            return refused(f"evicted: {eviction.reason}"[:500])
        if heartbeat.protocol < manifest.needs:
            return refused(
                f"this run needs protocol version {manifest.needs}, and the peer's build speaks "
                f"{heartbeat.protocol}: upgrade it with {UPGRADE}, and start it again"
            )
        known = (*ROLES, *admissions.further_roles, *(["replica"] * manifest.outer.is_scored))
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
        if is_worker(roles) and stake >= manifest.thresholds.proven_tokens:
            return None
        if lease is not None and (lease.worker or not is_worker(roles)):
            return None
        full = self._make_room(is_worker(roles), network)
        return refused(full, later=True) if full else None

    # --- slots -------------------------------------------------------------------------------

    def _make_room(self, worker: bool, network: str) -> str:
        """Make room for one more unproven worker, or one more helper.

        Takes an idle member's slot if needed. Returns why there is no room, or an empty string."""
        admissions = self.me.run.manifest.admissions
        proven = self.me.run.manifest.thresholds.proven_tokens
        held = [
            lease
            for lease in self._members.leases()
            if lease.worker == worker and not (worker and lease.slot.stake >= proven)
        ]
        taken = Counter(lease.slot.network for lease in held)
        bound = admissions.unproven_max if worker else admissions.helpers_max
        if not network or taken[network]:
            bound -= int(bound * RESERVED_SHARE)
        what = "peers without a record" if worker else "helpers"
        here = [lease for lease in held if lease.slot.network == network]
        if network and not self._is_free(here, admissions.range_max):
            held = here
            full = f"{taken[network]} {what} of your network ({network}) take part already"
        elif not self._is_free(held, bound):
            full = f"{len(held)} {what} take part already"
        else:
            return ""

        # Only leases that are renewed here can be ended here. Between networks as in
        # `Slots.may_have`: more than one apart, or the slot would be taken back.
        def idle(lease: LeaseInForce) -> bool:
            crowded = taken[lease.slot.network] > taken[network] + 1 and not lease.slot.stake
            trial = admissions.trial_seconds
            patience = min(CROWDED_SECONDS, trial) if crowded else trial
            return lease.member is not None and lease.slot.idle_seconds >= patience

        idlers = [lease for lease in held if idle(lease)]
        if not idlers:
            return f"{full}, the most this run allows; waiting for a free slot"
        loser = max(idlers, key=lambda each: (taken[each.slot.network], each.slot.idle_seconds))
        self._members.lose(loser.peer)
        self.me.events.emit("membership.place_lost", remote=loser.peer)
        return ""

    def _is_free(self, held: Sequence[LeaseInForce], bound: int) -> bool:
        """Whether this trusted peer may give away one more of `bound` slots.

        New slots become known to the other trusted peers with the next digests. Until then each
        gives away its share of the slots that were free before."""
        trusted = self.me.run.manifest.trusted_ids()
        now = self.me.world.now()
        new = sum(
            lease.member is not None and now - lease.member.granted < SHARED_SECONDS
            for lease in held
        )
        free = bound - (len(held) - new)
        return new < (free + len(trusted) - 1 - trusted.index(self.me.peer_id)) // len(trusted)
