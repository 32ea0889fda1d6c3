"""The idempotent delivery of submissions: each is pushed and announced to one validator after the
other, in order of rank, until one has judged it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import trio

from peers.inference.outbox import Made, Outbox
from swarm.errors import PeerError
from swarm.node.run_node import RunNode
from swarm.run.heard_verdicts import failed_check, nearest
from swarm.run.work import judges_of, receipt_in
from swarm.transport import BlobReference, Source
from swarm.wire.envelope import STATE_LIFETIME_SECONDS, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import (
    Acknowledgement,
    Admission,
    AdmissionRefused,
    StepOrder,
    Submission,
    Verdict,
)
from swarm.wire.messenger import REQUEST_ENVELOPES_MAX, first
from swarm.wire.turns import Turn
from swarm.world.recent import Recent

COMPLAINT_SECONDS = 30.0
"""Seconds before the same event about a validator is emitted again."""

ANNOUNCEMENTS_SHOWN_MAX = REQUEST_ENVELOPES_MAX - 4
"""Announcements of policies presented with a submission, the newest that its file names: so many
envelopes has a request besides the submission, admission, step order and receipt."""

WAITS_MAX = 4
"""Most times that `verdict_seconds` (30 s by default) are waited for a validator that still says
that it has the file, since others come before it; then another one shares the load."""

RECEIPTS_KEPT = 64
"""Receipts kept to be presented with the worker's next submission; enough for a few steps."""


class Deliveries:
    """Submissions of this worker that have no verdict yet."""

    def __init__(
        self, peer: RunNode, heard: Callable[[Envelope], None] = lambda verdict: None
    ) -> None:
        """`heard` is called with the first verdict on each submission."""
        self._peer = peer
        self._node = peer.node
        self._run = peer.run
        self._heard = heard
        self._events = peer.node.events
        self._verdicts: dict[bytes, trio.Event] = {}
        self._receipts: Recent[tuple[int, int, int], Envelope] = Recent(RECEIPTS_KEPT)
        """The last acknowledgements and logged verdicts, by lineage, step and number. A validator
        acknowledges a number only if it knows that the one before was acknowledged or judged."""
        self.outbox = Outbox(peer.node, peer.run.id)
        self._was_accepted = False
        self._added, self._to_deliver = trio.open_memory_channel[tuple[Made, trio.Event]](math.inf)
        self.under_way = 0
        """Number of submissions made and not yet judged. It stays within one validator's quota per
        worker, so that any validator can take over all of them."""
        self._complaints: dict[tuple[str, str], tuple[float, int]] = {}
        """By event and validator: when it was last emitted, and how often suppressed since."""

    async def open(self) -> None:
        await self.outbox.open()
        for receipt in self.outbox.receipts()[-RECEIPTS_KEPT:]:
            self._keep(receipt)

    @property
    def room(self) -> int:
        """How many further submissions may be made before one has its verdict."""
        admission = self._peer.lease.admission if self._peer.lease else None
        most = self._run.manifest.limits.submissions_unjudged_max
        if admission is not None and admission.expect(Admission).trial and not self._was_accepted:
            most = 1
        return most - self.under_way

    def add(self, made: Made) -> trio.Event:
        """Deliver after those added before; the event: a validator has it, or delivery ended."""
        delivered = trio.Event()
        self.under_way += 1
        self._added.send_nowait((made, delivered))  # `room` bounds their number
        return delivered

    async def run(self) -> None:
        """Deliver what is added, in order: a number is announced once the one before is known."""
        async with trio.open_nursery() as nursery:
            async for made, delivered in self._to_deliver:
                await nursery.start(self.see_through, made)
                delivered.set()

    def ranked(self, submission: Submission, nonce: bytes) -> list[str]:
        """The validators in the order in which they have to be asked to judge a submission."""
        validators = self._run.manifest.validator_ids()
        return judges_of(validators, nonce, self._peer.peer_id, submission.number)

    async def see_through(
        self, made: Made, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Deliver to validators in rank until one has judged; `started` once one has the file."""
        submission = made.submission
        judged = self._verdicts.setdefault(submission.digest, trio.Event())
        limits = self._run.manifest.limits
        ranked = self.ranked(submission, made.nonce)
        shortest = pause = limits.acknowledgement_seconds / 5
        try:
            while not judged.is_set() and self._is_wanted(submission):
                announced = await self._peer.seal(submission, STATE_LIFETIME_SECONDS)
                for validator in ranked:
                    if not await self.deliver(PeerId(validator), announced, made):
                        continue
                    task_status.started()
                    task_status = trio.TASK_STATUS_IGNORED
                    await self._wait(PeerId(validator), announced, made, judged)
                    if judged.is_set():
                        break
                    self._events.emit("inference.verdict_late", validator=validator)
                else:
                    self._complain("inference.no_validator", "", step=submission.step)
                    returned = await self._rest(ranked, judged, pause)
                    pause = shortest if returned else min(2 * pause, limits.verdict_seconds)
        finally:
            self.under_way -= 1
            self._peer.order.touch()  # the quota may allow another submission now
            task_status.started()
            self._verdicts.pop(submission.digest, None)
        # A peer that leaves before keeps the file, and delivers it after its restart.
        key = (submission.lineage, submission.step, submission.number)
        await self.outbox.settle(submission, self._receipts.get(key))
        await self._node.disk.remove(made.path)

    async def _wait(
        self, validator: PeerId, announced: Envelope, made: Made, judged: trio.Event
    ) -> None:
        for _ in range(WAITS_MAX):
            with trio.move_on_after(self._run.manifest.limits.verdict_seconds):
                await judged.wait()
            if judged.is_set() or not self._is_wanted(made.submission):
                return
            if not await self._announce(validator, announced, made):
                return

    def _is_wanted(self, submission: Submission) -> bool:
        """Whether it may still be trained on; till then no later number is taken without it."""
        newest = self._peer.step_order()
        return (
            newest is not None
            and newest.lineage == submission.lineage
            and newest.step - submission.step <= self._run.max_staleness
        )

    async def _rest(self, validators: Sequence[str], judged: trio.Event, seconds: float) -> bool:
        returned = False

        async def look_out(nursery: trio.Nursery) -> None:
            nonlocal returned
            with self._node.transport.connection_events() as events:
                async for event in events:
                    if event.connected and event.peer in validators:
                        returned = True
                        nursery.cancel_scope.cancel()

        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look_out, nursery)
                await judged.wait()
                nursery.cancel_scope.cancel()
        return returned

    async def deliver(self, validator: PeerId, announced: Envelope, made: Made) -> bool:
        """Push a file and announce it; returns whether the validator acknowledged or judged it."""
        try:
            await self._node.reach(validator)
            record = self._node.record(validator)
            source = Source(validator, tuple(record.bulk_addresses) if record else ())
            reference = BlobReference(made.submission.digest, made.submission.size_bytes)
            await self._node.transport.push(source, reference, made.path)
        except PeerError as error:
            self._complain("inference.delivery_failed", validator, reason=str(error))
            return False
        if not await self._announce(validator, announced, made):
            return False
        offered = made.submission
        judged = self._verdicts.get(offered.digest)
        if judged is None or not judged.is_set():
            self._events.emit(
                "inference.submission_delivered",
                submission=offered.digest,
                step=offered.step,
                number=offered.number,
                validator=validator,
            )
        return True

    async def _announce(self, validator: PeerId, announced: Envelope, made: Made) -> bool:
        """Announce a file that was pushed; returns whether it is acknowledged or judged."""
        limits = self._run.manifest.limits
        supporting, digest = self._supporting(made), made.submission.digest
        try:
            await self._node.reach(validator)
            reply = await self._peer.messenger.request(
                validator, announced, *supporting, deadline_seconds=limits.acknowledgement_seconds
            )
        except PeerError as error:
            self._complain("inference.delivery_failed", validator, reason=str(error))
            return False
        for receipt in reply:
            self._keep(receipt)
        verdict = first(reply, Verdict)
        if verdict is not None and self._is_receipt(verdict, digest):
            await self.on_verdict(verdict, ())
            return True
        acknowledgement = first(reply, Acknowledgement)
        acknowledged = (
            acknowledgement is not None
            and acknowledgement.sender == validator
            and isinstance(acknowledgement.message, Acknowledgement)
            and acknowledgement.message.submission == digest
        )
        refusal = first(reply, AdmissionRefused)
        if refusal is not None:
            reason = refusal.expect(AdmissionRefused).reason
            self._complain("inference.delivery_failed", validator, reason=reason)
        return acknowledged

    def _supporting(self, made: Made) -> list[Envelope]:
        """What is presented with a submission, because its validator may have missed it."""
        offered = made.submission
        admission = self._peer.lease.admission if self._peer.lease else None
        before = self._before(offered)
        later = [step for step in made.policies if step != offered.policy]
        announced = [self._peer.announced.find(offered.lineage, step) for step in later]
        left_out = max(0, len(announced) + max(0, len(before) - 1) - ANNOUNCEMENTS_SHOWN_MAX)
        shown = (admission, made.ordered, *before, *announced[left_out:])
        return [envelope for envelope in shown if envelope is not None]

    def _before(self, offered: Submission) -> list[Envelope]:
        """What shows that the number before is taken; if it could not be made, that the one before
        that is, and so on."""
        shown: list[Envelope] = []
        for number in range(offered.number - 1, -1, -1):
            receipt = self._receipts.get((offered.lineage, offered.step, number))
            if receipt is None:
                break
            shown.append(receipt)
            if not isinstance(receipt.message, Turn):
                break
        return shown[:ANNOUNCEMENTS_SHOWN_MAX]

    def note_unmakeable(self, order: StepOrder, number: int, failed: Envelope) -> None:
        """Show, with later numbers, what an environment peer signed in place of a prompt."""
        self._receipts[order.lineage, order.step, number] = failed

    def _complain(self, name: str, validator: str, **fields: Any) -> None:
        """Emit a failure once per `COMPLAINT_SECONDS`; `times` counts those since the last."""
        now = self._node.world.now()
        said, times = self._complaints.get((name, validator), (-math.inf, 0))
        if now - said < COMPLAINT_SECONDS:
            self._complaints[name, validator] = (said, times + 1)
            return
        self._complaints[name, validator] = (now, 0)
        self._events.emit(name, validator=validator, times=times + 1, **fields)

    def _is_receipt(self, envelope: Envelope, digest: bytes) -> bool:
        """Whether `envelope` is any validator's verdict on it: one forwards a quicker one's."""
        verdict = envelope.message
        return (
            isinstance(verdict, Verdict)
            and verdict.submission == digest
            and self._run.may_be_shown(envelope)
        )

    def _keep(self, receipt: Envelope) -> None:
        named = receipt_in(self._run, receipt, self._peer.peer_id)
        if named is not None:
            self._receipts[named.lineage, named.step, named.number] = receipt

    async def on_verdict(
        self, envelope: Envelope, _supporting: Sequence[Envelope]
    ) -> Sequence[Envelope]:
        """Handle a verdict from a validator; verdicts on other workers' submissions are ignored."""
        verdict = envelope.message
        assert isinstance(verdict, Verdict)
        if verdict.worker != self._peer.peer_id or verdict.submission not in self._verdicts:
            return []
        event = self._verdicts[verdict.submission]
        if not event.is_set():
            event.set()
            self._was_accepted |= verdict.outcome == "accepted"
            self._keep(envelope)
            self._heard(envelope)
            failed = failed_check(verdict.checks, verdict.failed)
            credited = verdict.rewards if verdict.outcome != "refused" else []
            self._events.emit(
                "inference.receipt",
                submission=verdict.submission,
                outcome=verdict.outcome,
                groups=len(credited),
                completions=sum(len(group) for group in credited),
                failed=verdict.failed,
                figure=failed.figure if failed else 0.0,
                threshold=failed.threshold if failed else 0.0,
                detail=verdict.detail,
                nearest=nearest(verdict.checks),
                step=verdict.step,
                number=verdict.number,
                by=envelope.sender,
                log_index=verdict.log_index,
            )
        return []
