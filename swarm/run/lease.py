"""The member's side of admission: obtaining a lease and renewing it."""

from collections.abc import Awaitable, Callable

import trio

from swarm.errors import PeerError
from swarm.rollouts.seeds import rendezvous
from swarm.run.admission import NotAdmitted, check_admission
from swarm.run.participant import Participant
from swarm.wire.envelope import EVENT_LIFETIME_SECONDS, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Admission, AdmissionRefused, AdmissionRequest, Heartbeat
from swarm.wire.messenger import first

HEARTBEAT_SECONDS = 10.0
"""Interval between heartbeats to one trusted peer (INTELLECT-2's protocol: 10 s, 3 misses)."""

RETRY_SECONDS_MIN = 0.5

RETRY_SECONDS_MAX = HEARTBEAT_SECONDS

GOODBYE_SECONDS = 3.0
"""A leaving peer gives up its goodbye after this long."""

SILENT_SECONDS = 60.0
"""A trusted peer that gave no answer is asked after the others for this long. To try a dead one
costs a search in the DHT, which asks twenty peers and more, and delays the heartbeat meanwhile."""


class LeaseKeeper:
    """This peer's admission to a run, obtained and renewed."""

    def __init__(
        self,
        me: Participant,
        *,
        reach: Callable[[PeerId], Awaitable[None]],
        granted: Callable[[Envelope], None],
        invite: Envelope | None = None,
    ) -> None:
        """`reach` connects to a peer or raises `PeerError`; `granted` is called with every new
        admission, and again with the held one when nobody renews it; `invite` is shown to them."""
        self._me = me
        self._reach = reach
        self._granted = granted
        self._invite = invite
        self._full = ""
        """Reason why the run had no room at the last attempt; empty if it had."""
        self._silent_until: dict[str, float] = {}
        """Of the run's trusted peers that gave no answer, until when others are asked first."""
        self._silent_since: dict[str, float] = {}
        self.admission: Envelope | None = None
        self.entry = b""
        """The entry of the newest admission."""

    async def keep(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Obtain an admission, report the task as started, and renew it until cancelled.

        Raises `NotAdmitted` with the reason if a trusted peer refuses for good."""
        started = False
        pause = RETRY_SECONDS_MIN
        while True:
            admission = await self._ask_in_rank()
            if admission is None:
                if self.admission and self._problem(self.admission):
                    self.admission = None
                    self._me.events.emit("membership.lease_lost")
                elif self.admission:
                    self._granted(self.admission)
                await trio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS_MAX)
                continue
            pause = RETRY_SECONDS_MIN
            if self.admission is None:
                self._me.events.emit("membership.admitted", by=admission.sender)
            self.admission = admission
            self.entry = admission.expect(Admission).entry
            self._granted(admission)
            if not started:
                started = True
                task_status.started()
            await trio.sleep(HEARTBEAT_SECONDS)

    async def say_goodbye(self) -> None:
        """Send a last heartbeat, which says that this peer leaves; does nothing without a lease."""
        if self.admission is not None:
            with trio.move_on_after(GOODBYE_SECONDS):
                await self._ask_in_rank()

    async def _ask_in_rank(self) -> Envelope | None:
        """Ask the trusted peers in turn; returns the first valid admission, if any."""
        full = ""
        for trusted in self._order():
            peer = PeerId(trusted)
            try:
                await self._reach(peer)
                message: Heartbeat | AdmissionRequest = self._me.describe()
                if self.admission is None:
                    message = AdmissionRequest(
                        roles=message.roles, protocol=message.protocol, build=message.build
                    )
                request = await self._me.seal(message, EVENT_LIFETIME_SECONDS)
                shown = [e for e in (self.admission, self._invite) if e is not None]
                reply = await self._me.messenger.request(peer, request, *shown)
            except PeerError as error:
                self._note_silence(peer, str(error))
                continue
            self._silent_until.pop(trusted, None)
            self._silent_since.pop(trusted, None)
            admission = first(reply, Admission)
            if admission is not None:
                problem = self._problem(admission)
                if problem is None:
                    return admission
                self._me.events.emit("membership.bad_admission", remote=peer, reason=problem)
            refusal = first(reply, AdmissionRefused)
            if refusal is not None and refusal.sender == trusted:
                refused = refusal.expect(AdmissionRefused)
                if not refused.later:
                    raise NotAdmitted(refused.reason)
                full = refused.reason
        if full and full != self._full:
            self._me.events.emit("membership.waiting_for_place", reason=full)
        self._full = full
        return None

    def _note_silence(self, peer: PeerId, reason: str) -> None:
        """Report a trusted peer without an answer, once in `SILENT_SECONDS`."""
        now = self._me.world.now()
        since = self._silent_since.setdefault(peer, now)
        if peer not in self._silent_until:
            self._me.events.emit(
                "membership.trusted_silent", remote=peer, reason=reason, seconds=now - since
            )
            self._silent_until[peer] = now + SILENT_SECONDS

    def _order(self) -> list[str]:
        """The other trusted peers in rank order, those that were silent lately last."""
        trusted = self._me.run.manifest.trusted_ids()
        now = self._me.world.now()
        silent = {peer: t for peer, t in self._silent_until.items() if peer in trusted and t > now}
        self._silent_until = silent
        self._silent_since = {p: t for p, t in self._silent_since.items() if p in trusted}
        ranked = [
            p for p in rendezvous(trusted, self._me.peer_id.encode()) if p != self._me.peer_id
        ]
        return sorted(ranked, key=lambda peer: peer in silent)

    def _problem(self, admission: Envelope) -> str | None:
        return check_admission(
            admission, self._me.run, self._me.peer_id, self._me.world.wall_time()
        )
