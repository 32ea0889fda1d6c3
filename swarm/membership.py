"""Who takes part in a run, and who is still there: admission leases, heartbeats, presence.

A peer asks one trusted peer to be admitted, then says a heartbeat to it every 10 s; each answer
renews its *admission*, a signed lease of 60 s. Which trusted peer is decided by rendezvous hash;
when it is silent the next in rank takes over, with nothing to hand over, since admission depends
on the manifest and the evictions only. Three missed heartbeats: suspected; six: gone; coming back
needs nothing but a heartbeat. Trusted peers publish what they know of who is there as `Presence`.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

import trio

from swarm import defaults
from swarm.envelope import Dropped, Envelope, Gate, open_envelope
from swarm.errors import PeerError, SwarmError
from swarm.events import Events
from swarm.gossip import Gossip
from swarm.identity import PeerId
from swarm.messages import (
    Admission,
    AdmissionRefused,
    AdmissionRequest,
    Heartbeat,
    Message,
    Presence,
    Present,
)
from swarm.messenger import Messenger, first
from swarm.run import Run
from swarm.seeds import rendezvous
from swarm.world import World

Standing = Literal["live", "suspected", "gone", "evicted"]

RETRY_SECONDS_MIN = 0.5
RETRY_SECONDS_MAX = defaults.HEARTBEAT_SECONDS


class TrustedClock:
    """Compares this peer's wall clock with the trusted peers' (design §6).

    Wrong by more than `CLOCK_SKEW_SECONDS_MAX` from their median, it says so and is corrected:
    otherwise everything this peer signs would be dropped as expired or from the future.
    """

    def __init__(self, run: Run, world: World, events: Events) -> None:
        self._run = run
        self._world = world
        self._events = events
        self._ahead: dict[str, float] = {}

    def compare(self, peer: PeerId, seconds_ahead: float) -> None:
        """Hear how far ahead of ours a neighbour's clock was when it greeted us."""
        if peer not in self._run.manifest.trusted_ids():
            return
        self._ahead[peer] = seconds_ahead
        median = statistics.median(self._ahead.values())
        if abs(median) > defaults.CLOCK_SKEW_SECONDS_MAX:
            self._events.emit("membership.clock_corrected", seconds=median)
            self._world.correct_clock(median)
            self._ahead = {peer: ahead - median for peer, ahead in self._ahead.items()}


class NotAdmitted(SwarmError):
    """A trusted peer refuses this peer; the message is its reason."""


class Sealer(Protocol):
    """Signs a message as this peer (`swarm.node.RunNode.seal`)."""

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
    if envelope.body.expires_ms <= wall_time * 1000:
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
        self.admission: Envelope | None = None

    async def keep(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be admitted (then `started`), and renew until cancelled.

        Raises `NotAdmitted` with the reason when every trusted peer that answers refuses.
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
                raise NotAdmitted(refusal.message.reason)
        return None


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
        proven: Callable[[str], bool],
        admitted: Callable[[str, Sequence[str]], Awaitable[None]],
    ) -> None:
        """`proven` says whether a worker has a record; `admitted` is told of each first admission
        and makes it durable before the peer hears of it."""
        self._run = run
        self._gate = gate
        self._gossip = gossip
        self._messenger = messenger
        self._world = world
        self._events = events
        self._peer_id = peer_id
        self._seal = seal
        self._describe = describe
        self._proven = proven
        self._admitted = admitted
        self._heard: dict[str, tuple[Heartbeat, float]] = {}
        self._standing: dict[str, str] = {}
        self._others: dict[str, tuple[Presence, float]] = {}
        gossip.listen(Presence, self._on_presence)

    async def run(self) -> None:
        """Admit, publish presence and notice silence, until cancelled."""
        async with self._messenger.answering(
            {AdmissionRequest: self._on_request, Heartbeat: self._on_heartbeat}
        ):
            while True:
                await trio.sleep(defaults.PRESENCE_SECONDS)
                self._notice_silence()
                presence = Presence(peers=self._own_view()[:200])
                self._gossip.publish(
                    await self._seal(presence, defaults.GONE_SECONDS + defaults.PRESENCE_SECONDS)
                )

    def present(self) -> list[Present]:
        """Everybody this peer or another trusted one has heard of, sorted by id; the freshest
        word on each."""
        freshest: dict[str, Present] = {p.peer: p for p in self._own_view()}
        now = self._world.now()
        for presence, received in self._others.values():
            for entry in presence.peers:
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
            if entry.standing == "live" and "inference" in entry.heartbeat.roles
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
        refusal = self._refusal(peer)
        if refusal is not None:
            self._events.emit("membership.refused", remote=peer, reason=refusal)
            message = AdmissionRefused(peer=peer, reason=refusal)
            return [await self._seal(message, defaults.ENVELOPE_LIFETIME_SECONDS)]
        first_time = peer not in self._heard
        self._heard[peer] = (heartbeat, self._world.now())
        if first_time:
            await self._admitted(peer, heartbeat.roles)
            self._standing[peer] = "live"
            self._events.emit("membership.peer_admitted", remote=peer, roles=heartbeat.roles)
        elif self._standing.get(peer) != "live":
            self._standing[peer] = "live"
            self._events.emit("membership.peer_returned", remote=peer)
        admission = Admission(peer=peer, roles=heartbeat.roles)
        return [await self._seal(admission, defaults.ADMISSION_LEASE_SECONDS)]

    def _refusal(self, peer: str) -> str | None:
        admissions = self._run.manifest.admissions
        if self._run.manifest.is_trainer(peer) or self._run.manifest.is_validator(peer):
            return None
        eviction = self._run.evicted(peer)
        if eviction is not None:
            return f"evicted: {eviction.reason}"
        if admissions.policy == "allow-list" and peer not in admissions.allowed:
            return "this run admits only the peers on its allow-list; ask its owner to add your id"
        if peer not in self._heard and not self._proven(peer):
            unproven = [p for p in self.live_workers() if not self._proven(p)]
            if len(unproven) >= admissions.unproven_max:
                return (
                    f"{len(unproven)} peers without a record take part already, the most this run "
                    "allows; try again later"
                )
        return None

    # --- who is there ------------------------------------------------------------------------

    def _on_presence(self, envelope: Envelope) -> None:
        if envelope.sender != self._peer_id:
            assert isinstance(envelope.message, Presence)
            self._others[envelope.sender] = (envelope.message, self._world.now())

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
                heartbeat=heartbeat,
                age_seconds=now - heard,
                standing=self._stand(peer, now - heard),
            )
            for peer, (heartbeat, heard) in sorted(self._heard.items())
        ]

    def _notice_silence(self) -> None:
        """Say which peers fell silent or came back: towards every trusted peer, not only this
        one, since a member that found another in charge sends its heartbeats there."""
        freshest = {entry.peer: entry for entry in self.present()}
        for peer in sorted(self._heard):
            entry = freshest[peer]
            if self._standing.get(peer) != entry.standing:
                self._standing[peer] = entry.standing
                word = "returned" if entry.standing == "live" else entry.standing
                self._events.emit(f"membership.peer_{word}", remote=peer)
            if entry.age_seconds > 10 * defaults.GONE_SECONDS:
                del self._heard[peer]
                del self._standing[peer]
