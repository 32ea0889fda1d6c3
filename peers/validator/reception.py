"""The reception: answers workers that announce submissions."""

from collections.abc import Sequence

import trio

from peers.validator.cases import Case, Outcome, Slot, fields_naming, slot_of, verdict_on
from peers.validator.checks.announcement import CHECKS, PENDING, Announcement, admitted, pushed
from peers.validator.checks.base import first_failure
from peers.validator.docket import Docket
from peers.validator.inbox import Inbox, Key
from peers.validator.penalties import Penalties
from peers.validator.queue import CaseQueue
from swarm.errors import PeerError
from swarm.events import Rationed
from swarm.jobs.validation import Report
from swarm.ledger.ruling import settles
from swarm.node.run_node import RunNode
from swarm.node.trusted import VERDICT_LIFETIME_SECONDS
from swarm.rollouts.seeds import nonce_of, submission_seed
from swarm.rollouts.signed_turns import failed_prompt
from swarm.run.work import ORDER_WAIT_SECONDS, judges_of, receipt_in
from swarm.wire.envelope import EVENT_LIFETIME_SECONDS, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import (
    Acknowledgement,
    Admission,
    AdmissionRefused,
    Checkpoint,
    StepOrder,
    Submission,
    Verdict,
)
from swarm.wire.messenger import first
from swarm.world.recent import Recent

QUESTION_SHARE = 1 / 2
"""Deadline for an earlier validator's answer, as a part of `acknowledgement_seconds`: the worker
waits that long for the answer of this one."""

SENT_AWAY_KEPT = 4096
"""Submissions sent away whose time is remembered; the oldest is forgotten first."""


class Precedence:
    """Finds the validator that a submission must be delivered to before this one: an earlier one
    that answers to the announcement, which a worker cannot show to be unreachable. Passed over are
    those that have no room, or gave no verdict within the run's limit."""

    def __init__(self, peer: RunNode, docket: Docket) -> None:
        self._peer = peer
        self._docket = docket
        self._sent_away: Recent[Key, float] = Recent(SENT_AWAY_KEPT)
        """When each submission was first announced here too early."""
        self._silent_until: dict[str, float] = {}
        """Validators that did not answer, and until when they are not asked again."""

    async def earlier(self, announced: Envelope, order: StepOrder) -> Envelope | None:
        """The earlier validator's acknowledgement, verdict or request for the worker, if any."""
        run, here = self._peer.run, self._peer.peer_id
        submission = announced.expect(Submission)
        ranks = judges_of(
            run.manifest.validator_ids(), order.nonce, announced.sender, submission.number
        )
        if here not in ranks:
            return None
        # Counted from the first announcement, so that one that is repeated starts no new wait.
        key, now = (announced.sender, submission.digest), self._peer.node.world.now()
        if now - self._sent_away.get(key, now) >= run.manifest.limits.verdict_seconds:
            return None
        for validator in ranks[: ranks.index(here)]:
            answer = await self._answer_of(validator, announced)
            if answer is not None:
                self._sent_away.setdefault(key, now)
                return answer
        return None

    async def _answer_of(self, validator: str, announced: Envelope) -> Envelope | None:
        """One earlier validator's answer; None if it is passed over."""
        taken = self._docket.taken(slot_of(announced.sender, announced.expect(Submission)))
        known = taken.receipt if taken is not None else None
        # Heard already, so nobody need be asked. It must be for this very file: the worker may have
        # delivered another one under the same number.
        if (
            known is not None
            and known.sender == validator
            and isinstance(known.message, Acknowledgement)
            and _concerns(known, announced)
        ):
            return None if self._is_late(known) else known
        # Else every announcement would wait for a validator that is down, and workers would give up
        # on this one.
        now = self._peer.node.world.now()
        if now < self._silent_until.get(validator, now):
            return None
        try:
            reply = await self._ask(PeerId(validator), announced)
        except (PeerError, trio.TooSlowError):
            limit = self._peer.run.manifest.limits.verdict_seconds
            self._silent_until[validator] = self._peer.node.world.now() + limit
            return None
        run = self._peer.run
        for answer in reply:
            permitted = answer.body.run == run.id and answer.sender in run.manifest.validator_ids()
            if not permitted or not _concerns(answer, announced):
                continue
            if isinstance(answer.message, Verdict):
                # A refusal that binds nobody may have a reason that holds there only.
                return answer if settles(answer.message) else None
            if isinstance(answer.message, Acknowledgement):
                self._docket.hear(answer)
                return None if self._is_late(answer) else answer
            return answer
        return None

    async def _ask(self, validator: PeerId, announced: Envelope) -> Sequence[Envelope]:
        seconds = self._peer.run.manifest.limits.acknowledgement_seconds * QUESTION_SHARE
        question = await self._peer.seal(announced.expect(Submission), EVENT_LIFETIME_SECONDS)
        with trio.fail_after(seconds):
            await self._peer.node.reach(validator)
        return await self._peer.messenger.request(
            validator, question, announced, deadline_seconds=seconds
        )

    def _is_late(self, acknowledgement: Envelope) -> bool:
        age = self._peer.node.world.wall_time() - acknowledgement.body.issued_ms / 1000
        return age >= self._peer.run.manifest.limits.verdict_seconds


def _concerns(answer: Envelope, announced: Envelope) -> bool:
    message, worker = answer.message, announced.sender
    if isinstance(message, Acknowledgement | Verdict):
        return (message.worker, message.submission) == (worker, announced.expect(Submission).digest)
    return isinstance(message, AdmissionRefused) and message.peer == worker


class Reception:
    """Answers announcements: an acknowledgement, a verdict, a refusal, or nothing: not yet."""

    def __init__(
        self, peer: RunNode, docket: Docket, inbox: Inbox, queue: CaseQueue, penalties: Penalties
    ) -> None:
        self._peer = peer
        self._run = peer.run
        self._docket = docket
        self._inbox = inbox
        self._queue = queue
        self._penalties = penalties
        self._precedence = Precedence(peer, docket)
        self._answering: dict[Key, trio.Event] = {}
        """Announcements under examination; the event is set when the examination ends."""
        self._denials = Rationed(peer.node.events)
        self._strangers = Rationed(peer.node.events)

    async def answer(
        self, envelope: Envelope, supporting: Sequence[Envelope]
    ) -> Sequence[Envelope]:
        """Answer an announcement; a repeated announcement gets the same answer."""
        assert isinstance(envelope.message, Submission)
        asked = first(supporting, Submission)
        if asked is not None:
            return await self._inform(envelope.sender, asked)
        key = (envelope.sender, envelope.message.digest)
        for shown in supporting:
            if receipt_in(self._run, shown, envelope.sender) is not None:
                self._docket.hear(shown)  # its validator may be unreachable from here
            if isinstance(shown.message, Checkpoint) and self._run.may_be_shown(shown):
                self._peer.announced.note(shown)
        while key in self._answering:  # repeated before it was answered: give one verdict only
            await self._answering[key].wait()
        known = self._docket.answer_to(key)
        case = self._queue.find(key)
        if known is not None:
            if not self._docket.is_judged_here(key) and case is None:
                await self._inbox.discard(key)
            return [known, *self._rival(envelope.sender, envelope.message)]
        if case is not None:
            return [await self._acknowledge(case)]
        self._answering[key] = trio.Event()
        try:
            return await self._examine(envelope, envelope.message, supporting)
        finally:
            self._answering.pop(key).set()

    async def _examine(
        self, envelope: Envelope, submission: Submission, supporting: Sequence[Envelope]
    ) -> Sequence[Envelope]:
        """Acknowledge or refuse a submission that is announced for the first time."""
        worker, key = envelope.sender, (envelope.sender, submission.digest)
        if self._penalties.pause_seconds(worker) > 0:
            return []
        order = await self._order_of(submission, first(supporting, StepOrder))
        manifest = self._run.manifest if order is None else self._run.manifest_of(order)
        if manifest is None:
            return []  # the step's version of the manifest is unknown here: the worker asks again
        slot = slot_of(worker, submission)
        taken = self._docket.taken(slot)
        announcement = Announcement(
            worker=worker,
            submission=submission,
            admission=first(supporting, Admission),
            run=self._run,
            manifest=manifest,
            order=order,
            newest_order=self._peer.step_order(),
            slot_taken_by=taken.digest if taken else None,
            is_next=self._is_next(slot, submission, order, manifest, supporting),
            on_trial=self._peer.trusted_part("validator").is_on_trial(worker),
            unjudged=self._unjudged(worker, slot.before),
            pushed_bytes=self._inbox.size_bytes(key),
            wall_time=self._peer.node.world.wall_time(),
        )
        refusal = first_failure(CHECKS, announcement)
        if refusal is not None:
            if not self._penalties.may_refuse(worker, stranger=refusal.failed == admitted.name):
                return []
            answer = await self._refuse(worker, submission, refusal)
            return [answer, *self._rival(worker, submission)]
        pending = first_failure(PENDING, announcement)
        if pending is not None:
            if pending.failed == pushed.name:
                self._penalties.waste(worker)
                self._tell(worker, submission, pending)
            return []
        ordered = self._docket.orders.signed(submission.lineage, submission.step)
        assert ordered is not None, "the check of the step has passed"
        earlier = await self._precedence.earlier(envelope, ordered.expect(StepOrder))
        if earlier is not None:
            named = fields_naming(worker, submission)
            self._denials.emit("validator.not_first", **named, first=earlier.sender)
            return [earlier]
        case = Case(envelope, ordered)
        await self._queue.add(case)
        return [await self._acknowledge(case)]

    def _is_next(
        self,
        slot: Slot,
        submission: Submission,
        order: StepOrder | None,
        manifest: RunManifest,
        shown: Sequence[Envelope],
    ) -> bool:
        """Whether all numbers before are taken, but for those that their worker could not make: an
        environment peer has signed that it cannot render a prompt of theirs."""
        failed = {seed for each in shown if (seed := failed_prompt(self._run.id, manifest, each))}
        number = submission.number - 1
        while number >= 0 and self._docket.taken(slot._replace(number=number)) is None:
            if order is None:
                return False
            nonce = nonce_of(order.nonce, submission.entry)
            if submission_seed(self._run.id, nonce, slot.worker, number) not in failed:
                return False
            number -= 1
        return True

    async def _inform(self, asker: str, announced: Envelope) -> Sequence[Envelope]:
        """Tell a later validator our verdict, acknowledgement or request to deliver, if any."""
        submission = announced.expect(Submission)
        if not self._run.manifest.is_validator(asker) or announced.body.run != self._run.id:
            return []
        key = (announced.sender, submission.digest)
        while key in self._answering:
            await self._answering[key].wait()
        known = self._docket.answer_to(key)
        if known is not None:
            return [known]
        case = self._queue.find(key)
        if case is not None:
            return [await self._acknowledge(case)]
        inbox = self._peer.blobs.inbox
        if inbox is None or not self._inbox.has_room(PeerId(announced.sender), submission):
            return []
        reason = f"deliver it to {self._peer.peer_id} first, which precedes in rank"
        word = AdmissionRefused(peer=announced.sender, reason=reason, later=True)
        return [await self._peer.seal(word, EVENT_LIFETIME_SECONDS)]

    def _unjudged(self, worker: str, before: Slot) -> int:
        """A worker's unjudged submissions: those queued, or one acknowledged elsewhere before."""
        waiting = sum(case.worker == worker for case in self._queue.cases())
        taken = self._docket.taken(before)
        if taken is not None and taken.receipt is not None:
            return max(waiting, int(isinstance(taken.receipt.message, Acknowledgement)))
        return waiting

    async def _refuse(self, worker: str, submission: Submission, refusal: Report) -> Envelope:
        """Refuse an announcement to its worker alone: free to make, it enters no log."""
        if refusal.failed == admitted.name:  # a stranger gets an answer, but never a verdict
            reason = refusal.detail
            self._strangers.emit("validator.not_admitted", remote=worker, reason=reason)
            word = AdmissionRefused(peer=worker, reason=reason[:500])
            return await self._peer.seal(word, EVENT_LIFETIME_SECONDS)
        await self._inbox.discard((worker, submission.digest))
        verdict = verdict_on(worker, submission, Outcome.of(refusal), log_index=-1)
        envelope = await self._peer.seal(verdict, VERDICT_LIFETIME_SECONDS)
        self._docket.turn_down((worker, submission.digest), envelope)
        self._tell(worker, submission, refusal)
        return envelope

    def _tell(self, worker: str, submission: Submission, refusal: Report) -> None:
        self._denials.emit(
            "validator.turned_down",
            **fields_naming(worker, submission),
            failed=refusal.failed,
            reason=refusal.detail,
        )

    async def _acknowledge(self, case: Case) -> Envelope:
        """The case's acknowledgement: signed once, and anew only when it has expired."""
        held = case.acknowledgement
        if held is not None and held.body.expires_ms > self._peer.node.world.wall_time() * 1000:
            return held
        said = Acknowledgement(
            submission=case.submission.digest,
            worker=case.worker,
            lineage=case.submission.lineage,
            step=case.submission.step,
            number=case.submission.number,
            groups=case.submission.groups,
        )
        signed = await self._peer.seal(said, EVENT_LIFETIME_SECONDS)
        if held is None:
            self._peer.gossip.publish(signed)
        case.acknowledgement = signed
        self._docket.hear(signed)
        return signed

    def _rival(self, worker: str, submission: Submission) -> Sequence[Envelope]:
        """The receipt of another file in a slot, which a restarted worker shows with its next."""
        taken = self._docket.taken(slot_of(worker, submission))
        if taken is None or taken.digest == submission.digest or taken.receipt is None:
            return []
        return [taken.receipt]

    # --- messages of others that a worker presents -------------------------------------------

    async def _order_of(self, submission: Submission, shown: Envelope | None) -> StepOrder | None:
        """A step's order, if need be the one that the worker presents; None if unknown."""
        if shown is not None and self._run.may_be_shown(shown):
            self._docket.orders.take(shown)
        lineage, step, orders = submission.lineage, submission.step, self._docket.orders
        with trio.move_on_after(ORDER_WAIT_SECONDS):
            order = await orders.wait_for(lineage, step)
            if order is not None:
                await self._peer.versions.manifest_of(order)
        return orders.find(lineage, step)
