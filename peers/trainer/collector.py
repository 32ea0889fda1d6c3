"""The collector: copies to this disk every submission that a validator accepted."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from peers.trainer.accepted import AcceptedSubmissions, path_of
from peers.trainer.forecast import UNJUDGED_SECONDS
from peers.trainer.precedence import Precedence
from peers.trainer.progress import hold
from swarm.errors import PeerError
from swarm.ledger.client import open_ledger
from swarm.node.log_copies import RETRY_SECONDS
from swarm.node.run_node import RunNode
from swarm.node.trusted import UNGRADED, UNGRADED_MAX
from swarm.run.run import Run
from swarm.transport import BlobReference
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Acknowledgement, Verdict
from swarm.world.observable import Observable
from swarm.world.tasks import alongside

VERDICTS_HELD_MAX = 16_384
"""Verdicts queued while a trainer loads; it reads any further ones in their validators' logs."""

FETCH_ATTEMPTS = 5
"""Failures after which an accepted submission leaves the forecast; it is still fetched."""
FETCH_PAUSE_SECONDS_MIN = 0.2
FETCH_PAUSE_SECONDS_MAX = 5.0
"""Longest pause between attempts; each pause is twice the previous one."""


class MissedVerdicts:
    """Verdicts that did not fit into the queue, by validator and worker."""

    def __init__(self, peer: RunNode) -> None:
        self._node = peer.node
        self._run = peer.run
        self._missed: Observable[dict[tuple[str, str], int]] = Observable({})
        """First index to read in the validator's log, by (validator, worker)."""

    def __bool__(self) -> bool:
        return bool(self._missed.value)

    def miss(self, validator: str, worker: str, index: int) -> None:
        """Schedule reading a worker's verdicts in a validator's log, from `index` on."""
        earlier = self._missed.value.get((validator, worker), index)
        self._missed.value[validator, worker] = min(earlier, index)
        self._missed.touch()

    async def run(self, hear: Callable[[Envelope], Awaitable[None]]) -> None:
        """Hand every missed verdict to `hear`, until cancelled."""
        while True:
            missed = await self._missed.wait_until(bool)
            (validator, worker), start = next(iter(missed.items()))
            del missed[validator, worker]
            try:
                await self._node.reach(PeerId(validator))
                async with open_ledger(self._node.transport, PeerId(validator)) as client:
                    page = await client.verdicts(worker, start)
                heard = [open_envelope(item.envelope) for item in page]
            except (PeerError, Dropped) as error:
                self._node.events.emit("ledger.mirror_failed", owner=validator, reason=str(error))
                self.miss(validator, worker, start)  # retried after the others
                await trio.sleep(RETRY_SECONDS)
                continue
            for envelope in heard:
                verdict = envelope.message
                if (
                    envelope.body.run == self._run.id
                    and isinstance(verdict, Verdict)
                    and verdict.outcome == "accepted"
                    and self._run.permits(envelope.sender, verdict) is None
                ):
                    await hear(envelope)
            if page and page[-1].index >= start:
                self.miss(validator, worker, page[-1].index + 1)


@dataclass(eq=False)
class Collector:
    """Listens for acknowledgements and verdicts, and copies every accepted submission once."""

    accepted: AcceptedSubmissions

    def __post_init__(self) -> None:
        accepted = self.accepted
        self.peer, self.progress = accepted.peer, accepted.progress
        self.forecast, self.log = accepted.forecast, accepted.log
        self._node = node = self.peer.node
        self._events = node.events
        self.precedence = Precedence(self.peer, accepted.store, accepted.refusals)
        self._grading = GradingWatch(self.peer.run, node.world.wall_time() * 1000)
        self._missed = MissedVerdicts(self.peer)
        self._fetching: set[bytes] = set()
        self._send, self._verdicts = trio.open_memory_channel[Envelope](VERDICTS_HELD_MAX)
        self._listens = False

    def listen(self) -> None:
        """Hear acknowledgements and verdicts from now on; what is accepted waits for `start`."""
        if not self._listens:
            self._listens = True
            self.peer.gossip.listen(Acknowledgement, self._on_acknowledgement)
            self.peer.gossip.listen(Verdict, self._on_verdict)

    def start(self, nursery: trio.Nursery) -> None:
        """Collect until cancelled."""
        nursery.start_soon(self._collect)
        nursery.start_soon(self._missed.run, self._send.send)
        nursery.start_soon(self._forget_unjudged)

    # --- hearing -----------------------------------------------------------------------------

    def _on_acknowledgement(self, envelope: Envelope) -> None:
        message = envelope.message
        assert isinstance(message, Acknowledgement)
        self.precedence.hear(envelope)
        offer, now = (message.worker, message.submission), self._node.world.now()
        stake = self.peer.trusted_part("trainer").stake(message.worker, message.step)
        if message.lineage == self.progress.lineage and self.forecast.announce(
            offer, message.groups, now, has_stake=stake > 0
        ):
            self.progress.changed.touch()

    def _on_verdict(self, envelope: Envelope) -> None:
        verdict = envelope.message
        assert isinstance(verdict, Verdict)
        self.accepted.hear(envelope)
        try:
            self._send.send_nowait(envelope)
        except trio.WouldBlock:
            if verdict.outcome == "accepted":
                if not self._missed:
                    self._events.emit("trainer.verdicts_missed", held=VERDICTS_HELD_MAX)
                self._missed.miss(envelope.sender, verdict.worker, max(0, verdict.log_index))

    async def _forget_unjudged(self) -> None:
        """Drop submissions from the forecast that no validator has judged for long."""
        while True:
            await trio.sleep(UNJUDGED_SECONDS / 10)
            late = self.forecast.forget_late(self._node.world.now())
            if late:
                self._events.emit("trainer.unjudged_forgotten", submissions=late)
                self.progress.changed.touch()

    # --- copying -----------------------------------------------------------------------------

    async def _collect(self) -> None:
        async with trio.open_nursery() as nursery:
            async for envelope in self._verdicts:
                verdict = envelope.message
                assert isinstance(verdict, Verdict)
                offer = (verdict.worker, verdict.submission)
                self.forecast.judge(offer, verdict.outcome, self._node.world.now())
                reason = self._grading.look(envelope, verdict)
                if reason and not self.progress.paused:
                    nursery.start_soon(hold, self.peer, self.progress, reason)
                if verdict.outcome == "accepted" and self._is_new(verdict):
                    self.accepted.expect(verdict)
                    self._fetching.add(verdict.submission)
                    nursery.start_soon(self._copy, envelope, verdict)
                else:
                    self._settle(verdict)

    def _is_new(self, verdict: Verdict) -> bool:
        """Whether an accepted submission was not handled yet."""
        digest = verdict.submission
        if self.accepted.knows(digest) or digest in self._fetching:
            return False
        return not (self.progress.too_old(verdict) and self.log.settled(digest))

    async def _copy(self, envelope: Envelope, verdict: Verdict) -> None:
        try:
            if await self._fetch(PeerId(envelope.sender), verdict):
                await self._hold(envelope, verdict)
                await self.accepted.take_in(envelope, verdict)
                self._events.emit(
                    "trainer.submission_pooled",
                    submission=verdict.submission,
                    worker=verdict.worker,
                    step=verdict.step,
                    number=verdict.number,
                )
            else:
                await self.log.stale([verdict])
            self._settle(verdict)
        finally:
            self._fetching.discard(verdict.submission)

    async def _hold(self, envelope: Envelope, verdict: Verdict) -> None:
        """Wait for earlier validators, but not beyond the use of the submission or the run's end:
        what was accepted must stand in the log or in the pool then."""

        async def is_useless() -> None:
            await self.progress.changed.wait_until(
                lambda _: self.progress.over or self.accepted.is_unfit(verdict)
            )

        async with alongside(until=is_useless):
            await self.precedence.wait(envelope.sender, verdict)

    async def _fetch(self, validator: PeerId, verdict: Verdict) -> bool:
        """Copy a submission here, durably; False if unfit by then, or another file has its key."""
        attempt = 0
        while not (self.accepted.is_unfit(verdict) or self.accepted.is_second(verdict)):
            try:
                path = path_of(verdict.submission)
                wanted = BlobReference(verdict.rollouts_digest, verdict.rollouts_bytes)
                await self._node.fetch_file(validator, wanted, path)
                await self._node.disk.sync(path)
                return True
            except PeerError as error:
                self._events.emit(
                    "trainer.fetch_failed", validator=validator, attempt=attempt, reason=str(error)
                )
            attempt += 1
            if attempt == FETCH_ATTEMPTS:  # other submissions fill its gap
                self.forecast.waste(1)
                self._settle(verdict)
            pause = FETCH_PAUSE_SECONDS_MIN * 2 ** min(attempt, 10)
            await trio.sleep(min(FETCH_PAUSE_SECONDS_MAX, pause))
        return False

    def _settle(self, verdict: Verdict) -> None:
        self.forecast.settle((verdict.worker, verdict.submission))
        self.progress.changed.touch()


@dataclass(eq=False)
class GradingWatch:
    """Counts, per validator, consecutive submissions that its environment could not grade."""

    run: Run
    since_ms: float
    """Verdicts issued before this do not count: a person has restarted the trainer since."""
    _ungraded: Counter[str] = field(default_factory=Counter)

    def look(self, envelope: Envelope, verdict: Verdict) -> str:
        """Why the run must pause: no validator can grade any more. Empty while one can."""
        if envelope.body.issued_ms < self.since_ms:
            return ""
        if verdict.failed in UNGRADED:
            self._ungraded[envelope.sender] += 1
        elif verdict.outcome == "accepted":
            self._ungraded[envelope.sender] = 0
        validators = self.run.manifest.validator_ids()
        heard = [self._ungraded[each] for each in validators if each in self._ungraded]
        if not heard or min(heard) < UNGRADED_MAX:
            return ""
        return f"no validator can grade: {verdict.detail}"
