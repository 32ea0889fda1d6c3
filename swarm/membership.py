"""Who takes part in a run, and who is still there: admission leases, heartbeats, presence.

A peer asks one trusted peer to be admitted, then says a heartbeat to it every 10 s; each answer
renews its *admission*, a signed lease of 60 s. Which trusted peer is decided by rendezvous hash;
when it is silent the next in rank takes over, with nothing to hand over, since admission depends
on the manifest and the evictions only. Three missed heartbeats: suspected; six: gone; coming back
needs nothing but a heartbeat. Trusted peers publish what they know of who is there as `Presence`.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import trio

from swarm import defaults
from swarm.envelope import Dropped, Envelope, Gate, open_envelope
from swarm.errors import PeerError, SwarmError
from swarm.events import Events, Rationed
from swarm.gossip import Gossip
from swarm.identity import PeerId
from swarm.messages import (
    DOING_REPEATED_MAX,
    Admission,
    AdmissionRefused,
    AdmissionRequest,
    Heartbeat,
    Message,
    Presence,
    Present,
)
from swarm.messenger import Messenger, first
from swarm.rollouts.seeds import rendezvous
from swarm.run import Run
from swarm.world import World

Standing = Literal["live", "suspected", "gone", "evicted"]

ROLES = ("bootstrap", "inference", "observer", "relay")
"""Roles that every run admits. Trainers and validators are named in the manifest, and not admitted;
further ones are an owner's to allow, so that what a stranger calls itself is never news."""

PRESENT_MAX = 200
"""Peers in one presence digest."""

RETRY_SECONDS_MIN = 0.5
RETRY_SECONDS_MAX = defaults.HEARTBEAT_SECONDS


class TrustedClock:
    """Decides whose clock counts.

    Where most of the trusted peers' clocks agree, theirs does, and a peer whose own is off by more
    than `CLOCK_SKEW_SECONDS_MAX` counts with theirs. A trusted peer has one voice among them, so
    that of two which differ each keeps its own: nobody could say who is right. Then it is said
    which clocks differ, and what such a peer signs is given that much longer to expire.
    """

    def __init__(self, run: Run, world: World, events: Events, peer_id: PeerId) -> None:
        self._run = run
        self._world = world
        self._events = events
        self._peer_id = peer_id
        self._ahead: dict[str, float] = {}
        """Of trusted peers that greeted this one: seconds that their clocks are ahead."""

    def check_own(self, signed_seconds: float) -> None:
        """Say so if the clock is behind what certainly lies behind it: the last sequence number
        of this peer, and when the owner signed the manifest."""
        wall = self._world.wall_time()
        issued = self._run.manifest_envelope.body.issued_ms / 1000
        for what, moment in (("itself", signed_seconds), ("manifest", issued)):
            if moment - wall > defaults.CLOCK_SKEW_SECONDS_MAX:
                self._events.emit(f"membership.clock_behind_{what}", seconds=moment - wall)

    def compare(self, peer: PeerId, seconds_ahead: float) -> None:
        """Hear how far ahead of ours a neighbour's clock was when it greeted us."""
        trusted = self._run.manifest.trusted_ids()
        if peer not in trusted:
            return
        self._ahead[peer] = seconds_ahead
        voices = [self._ahead[other] for other in trusted if other in self._ahead]
        if self._peer_id in trusted:
            voices.append(0.0)
        agreed = _agreed(voices)
        if agreed is not None and abs(agreed) > defaults.CLOCK_SKEW_SECONDS_MAX:
            self._events.emit("membership.clock_corrected", seconds=agreed)
            self._world.correct_clock(agreed)
            self._ahead = {other: ahead - agreed for other, ahead in self._ahead.items()}
        for other in sorted(self._ahead):
            self._allow_for(other, self._ahead[other])

    def on_presence(self, envelope: Envelope) -> None:
        """Learn of a trusted peer's clock from what it says every few seconds."""
        if envelope.sender != self._peer_id:
            ahead = envelope.body.issued_ms / 1000 - self._world.wall_time()
            self._allow_for(envelope.sender, ahead)

    def _allow_for(self, peer: str, ahead: float) -> None:
        known = self._run.clocks_off
        if abs(ahead) <= defaults.CLOCK_SKEW_SECONDS_MAX:
            known.pop(peer, None)
            return
        off = min(abs(ahead), defaults.TRUSTED_STATE_LATE_SECONDS_MAX)
        if abs(off - known.get(peer, 0.0)) > defaults.CLOCK_SKEW_SECONDS_MAX:
            self._events.emit("membership.clocks_differ", remote=peer, seconds=ahead)
        known[peer] = off


def _agreed(voices: Sequence[float]) -> float | None:
    """What more than half of these clocks say, if they do."""

    def beside(voice: float) -> list[float]:
        return [v for v in voices if abs(v - voice) <= defaults.CLOCK_SKEW_SECONDS_MAX]

    most = max((beside(voice) for voice in voices), key=len, default=[])
    return statistics.median(most) if 2 * len(most) > len(voices) else None


class NotAdmitted(SwarmError):
    """A trusted peer refuses this peer; the message is its reason."""


class Sealer(Protocol):
    """Signs a message as this peer (`swarm.node.run_node.RunNode.seal`)."""

    async def __call__(self, message: Message, lifetime_seconds: float) -> Envelope: ...


def check_admission(envelope: Envelope, run: Run, peer: str, wall_time: float) -> str | None:
    """Why an admission does not let `peer` in now, or None."""
    message = envelope.message
    if not isinstance(message, Admission):
        return "not an admission"
    if envelope.body.run != run.id:
        return "it is for another run"
    if envelope.sender not in run.manifest.trusted_ids():
        return "it is not signed by a trusted peer of this run"
    if message.peer != peer:
        return "it admits another peer"
    if envelope.body.expires_ms / 1000 + run.clock_off(envelope.sender) <= wall_time:
        return "it has expired"
    if run.evicted(peer) is not None:
        return "the peer is evicted"
    return None


def admits(run: Run, peer: PeerId | None, credential: bytes, wall_time: float) -> bool:
    """Whether a client of the bulk plane may use it: a trusted peer, or one with a live lease."""
    if peer is None:
        return False
    if peer in run.manifest.trusted_ids():
        return True
    try:
        envelope = open_envelope(credential)
    except Dropped:
        return False
    return check_admission(envelope, run, peer, wall_time) is None


class Lease:
    """The member's side: get admitted, and stay so."""

    def __init__(
        self,
        run: Run,
        messenger: Messenger,
        world: World,
        events: Events,
        *,
        peer_id: PeerId,
        seal: Sealer,
        reach: Callable[[PeerId], Awaitable[None]],
        describe: Callable[[], Heartbeat],
        granted: Callable[[Envelope], None],
    ) -> None:
        """`reach` connects to a peer or raises `PeerError`; `describe` makes the heartbeat;
        `granted` is told of every new admission."""
        self._run = run
        self._messenger = messenger
        self._world = world
        self._events = events
        self._peer_id = peer_id
        self._seal = seal
        self._reach = reach
        self._describe = describe
        self._granted = granted
        self._full = ""
        """Why there is no place yet."""
        self.admission: Envelope | None = None

    async def keep(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be admitted (then `started`), and renew until cancelled.

        Raises `NotAdmitted` with the reason when a trusted peer refuses for good.
        """
        started = False
        pause = RETRY_SECONDS_MIN
        while True:
            admission = await self._ask_in_rank()
            if admission is None:
                if self.admission and check_admission(
                    self.admission, self._run, self._peer_id, self._world.wall_time()
                ):
                    self.admission = None
                    self._events.emit("membership.lease_lost")
                await trio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS_MAX)
                continue
            pause = RETRY_SECONDS_MIN
            if self.admission is None:
                self._events.emit("membership.admitted", by=admission.sender)
            self.admission = admission
            self._granted(admission)
            if not started:
                started = True
                task_status.started()
            await trio.sleep(defaults.HEARTBEAT_SECONDS)

    async def _ask_in_rank(self) -> Envelope | None:
        """An admission from the first trusted peer in rank that answers; None if none does."""
        full = ""
        for trusted in rendezvous(self._run.manifest.trusted_ids(), self._peer_id.encode()):
            if trusted == self._peer_id:
                continue
            peer = PeerId(trusted)
            try:
                await self._reach(peer)
                heartbeat = self._describe()
                message: Message = heartbeat
                if self.admission is None:
                    message = AdmissionRequest(roles=heartbeat.roles)
                request = await self._seal(message, defaults.ENVELOPE_LIFETIME_SECONDS)
                reply = await self._messenger.request(peer, request)
            except PeerError as error:
                self._events.emit("membership.trusted_silent", remote=peer, reason=str(error))
                continue
            admission = first(reply, Admission)
            if admission is not None:
                problem = check_admission(
                    admission, self._run, self._peer_id, self._world.wall_time()
                )
                if problem is None:
                    return admission
                self._events.emit("membership.bad_admission", remote=peer, reason=problem)
            refusal = first(reply, AdmissionRefused)
            if refusal is not None and refusal.sender == trusted:
                assert isinstance(refusal.message, AdmissionRefused)
                if not refusal.message.later:
                    raise NotAdmitted(refusal.message.reason)
                full = refusal.message.reason
        if full and full != self._full:
            self._events.emit("membership.waiting_for_place", reason=full)
        self._full = full
        return None


@dataclass
class _Member:
    """Who was admitted here."""

    heartbeat: Heartbeat
    heard: float
    useful: float
    """When it was admitted, or a further submission of it was seen to be accepted."""
    accepted: int
    """Of its submissions."""
    network: str
    """Its /24 (IPv6: /48); empty where that says nothing."""
    logged: bool = False
    standing: Standing = "live"


class Registrar:
    """The trusted side: answers requests and heartbeats, and knows who is there."""

    def __init__(
        self,
        run: Run,
        gate: Gate,
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
        """`accepted` counts a worker's accepted submissions; `admitted` is told once of each peer
        that came to have any, and makes it durable; `network_of` names the /24 or /48 that a
        connected peer comes from, or nothing; `vouch` is told who is admitted, and for how long."""
        self._run = run
        self._gate = gate
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
        """What other trusted peers said of whom, and when that was heard."""
        self._refusals = Rationed(events)
        self._named_last = ""
        """The last peer in the newest digest, if that had no room for all."""
        gossip.listen(Presence, self._on_presence)

    async def run(self) -> None:
        """Admit, publish presence and notice silence, until cancelled."""
        async with self._messenger.answering(
            {AdmissionRequest: self._on_request, Heartbeat: self._on_heartbeat}
        ):
            while True:
                await trio.sleep(defaults.PRESENCE_SECONDS)
                self._notice_silence()
                self._gossip.publish(
                    await self._seal(
                        self._next_digest(), defaults.GONE_SECONDS + defaults.PRESENCE_SECONDS
                    )
                )

    def present(self) -> list[Present]:
        """Everybody this peer or another trusted one has heard of, sorted by id; the freshest
        word on each."""
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
        """Ids of live peers with the inference role, sorted."""
        return [
            entry.peer
            for entry in self.present()
            if entry.standing == "live" and _is_worker(entry.heartbeat.roles)
        ]

    # --- requests ----------------------------------------------------------------------------

    async def _on_request(
        self, envelope: Envelope, _supporting: Sequence[Envelope]
    ) -> Sequence[Envelope]:
        request = envelope.message
        assert isinstance(request, AdmissionRequest)
        return await self._grant(envelope.sender, Heartbeat(roles=request.roles, doing="joining"))

    async def _on_heartbeat(
        self, envelope: Envelope, _supporting: Sequence[Envelope]
    ) -> Sequence[Envelope]:
        assert isinstance(envelope.message, Heartbeat)
        return await self._grant(envelope.sender, envelope.message)

    async def _grant(self, peer: str, heartbeat: Heartbeat) -> Sequence[Envelope]:
        accepted = self._accepted(peer)
        network = self._network_of(PeerId(peer))
        refusal = self._refusal(peer, heartbeat.roles, accepted, network)
        if refusal is not None:
            self._refusals.emit("membership.refused", remote=peer, reason=refusal.reason)
            return [await self._seal(refusal, defaults.ENVELOPE_LIFETIME_SECONDS)]
        now = self._world.now()
        told = msgspec.structs.replace(heartbeat, doing=heartbeat.doing[:DOING_REPEATED_MAX])
        member = self._members.get(peer)
        if member is None:
            member = self._members[peer] = _Member(told, now, now, accepted, network)
            self._events.emit("membership.peer_admitted", remote=peer, roles=heartbeat.roles)
        elif member.standing != "live":
            self._events.emit("membership.peer_returned", remote=peer)
        if accepted > member.accepted:
            member.accepted, member.useful = accepted, now
        member.heartbeat, member.heard, member.standing = told, now, "live"
        if accepted and not member.logged:
            member.logged = True
            await self._admitted(peer, heartbeat.roles)
        admission = Admission(peer=peer, roles=heartbeat.roles)
        self._vouch(PeerId(peer), defaults.ADMISSION_LEASE_SECONDS)
        return [await self._seal(admission, defaults.ADMISSION_LEASE_SECONDS)]

    def _refusal(
        self, peer: str, roles: Sequence[str], accepted: int, network: str
    ) -> AdmissionRefused | None:
        """Why a peer is not let in, or None; one that waits may take an idle one's place."""

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
        """Find a place for one more worker without a record, or one more helper: free, or of one
        that is idle. Else why there is none."""
        admissions, trusted = self._run.manifest.admissions, self._run.manifest.trusted_ids()
        proven_after = self._run.manifest.thresholds.proven_after
        bound = admissions.unproven_max if worker else admissions.helpers_max
        now = self._world.now()
        held = {
            peer: member
            for peer, member in self._members.items()
            if _is_worker(member.heartbeat.roles) == worker
            and not (worker and member.accepted >= proven_after)
            and now - member.heard < defaults.ADMISSION_LEASE_SECONDS
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
            patience = defaults.PLACE_CROWDED_SECONDS if crowded else defaults.PLACE_IDLE_SECONDS
            return now - member.useful >= patience

        idlers = [peer for peer in sorted(held) if idle(held[peer])]
        if not idlers:
            return f"{full}, the most this run allows; waiting for a place"
        loser = max(idlers, key=lambda peer: (taken[held[peer].network], now - held[peer].useful))
        del self._members[loser]
        self._events.emit("membership.place_lost", remote=loser)
        return ""

    # --- who is there ------------------------------------------------------------------------

    def _on_presence(self, envelope: Envelope) -> None:
        if envelope.sender != self._peer_id:
            assert isinstance(envelope.message, Presence)
            now = self._world.now()
            entries = self._others.setdefault(envelope.sender, {})
            entries.update((entry.peer, (entry, now)) for entry in envelope.message.peers)
            for peer, (entry, received) in list(entries.items()):
                if entry.age_seconds + (now - received) > 10 * defaults.GONE_SECONDS:
                    del entries[peer]

    def _stand(self, peer: str, age_seconds: float) -> Standing:
        if self._run.evicted(peer) is not None:
            return "evicted"
        if age_seconds >= defaults.GONE_SECONDS:
            return "gone"
        return "suspected" if age_seconds >= defaults.SUSPECTED_SECONDS else "live"

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
        """This peer and as many members as fit, from the one after the last one named."""
        me, *others = self._own_view()
        start = bisect_right([entry.peer for entry in others], self._named_last)
        page = digest([me, *others[start:], *others[:start]])
        self._named_last = page.peers[-1].peer if len(page.peers) <= len(others) else ""
        return page

    def _notice_silence(self) -> None:
        """Say which peers fell silent or came back: towards every trusted peer, not only this
        one, since a member that found another in charge sends its heartbeats there."""
        freshest = {entry.peer: entry for entry in self.present()}
        for peer, member in sorted(self._members.items()):
            entry = freshest[peer]
            if member.standing != entry.standing:
                member.standing = entry.standing
                word = "returned" if entry.standing == "live" else entry.standing
                self._events.emit(f"membership.peer_{word}", remote=peer)
            # Identities are free: those that did nothing are not remembered for long.
            if entry.age_seconds > (10 if member.accepted else 2) * defaults.GONE_SECONDS:
                del self._members[peer]


def digest(entries: Sequence[Present]) -> Presence:
    """The first of these peers, as many as fit one digest."""
    room = defaults.PRESENCE_BYTES_MAX
    page: list[Present] = []
    for entry in entries[:PRESENT_MAX]:
        room -= len(msgspec.msgpack.encode(entry))
        if page and room < 0:
            break
        page.append(entry)
    return Presence(peers=page)


def _is_worker(roles: Sequence[str]) -> bool:
    return "inference" in roles
