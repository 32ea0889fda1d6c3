"""Precedence: a validator judges a submission only when none that comes before it in rank can.

A worker cannot show that an earlier validator is unreachable, so this validator finds out itself.
It asks the earlier ones with the worker's announcement. One that answers is where the worker has to
deliver. One that does not answer, or has no room, is passed over; so is every earlier one that gave
no verdict within the run's limit, because the worker may be unable to reach it.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from peers.validator.cases import slot_of
from peers.validator.docket import Docket
from peers.validator.inbox import Key
from swarm.errors import PeerError
from swarm.ledger.ruling import settles
from swarm.node.run_node import RunNode
from swarm.run.work import judges_of
from swarm.wire.envelope import EVENT_LIFETIME_SECONDS, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Acknowledgement, AdmissionRefused, StepOrder, Submission, Verdict
from swarm.world.recent import Recent

QUESTION_SHARE = 1 / 2
"""Deadline for an earlier validator's answer, as a part of `acknowledgement_seconds`: the worker
waits that long for the answer of this one."""

SENT_AWAY_KEPT = 4096
"""Submissions sent away whose time is remembered; the oldest is forgotten first."""


class Precedence:
    """Finds the validator that a submission must be delivered to before this one."""

    def __init__(self, peer: RunNode, docket: Docket) -> None:
        self._peer = peer
        self._docket = docket
        self._sent_away: Recent[Key, float] = Recent(SENT_AWAY_KEPT)
        """When each submission was first announced here too early."""
        self._silent_until: dict[str, float] = {}
        """Validators that did not answer, and until when they are not asked again."""

    async def earlier(self, announced: Envelope, order: StepOrder) -> Envelope | None:
        """The answer of an earlier validator that the worker must turn to; None if there is none.

        It is the acknowledgement or verdict of that validator, or its request to deliver there.
        """
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
        submission = announced.expect(Submission)
        taken = self._docket.taken(slot_of(announced.sender, submission))
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
        """Whether the verdict that an acknowledgement promises is overdue."""
        age = self._peer.node.world.wall_time() - acknowledgement.body.issued_ms / 1000
        return age >= self._peer.run.manifest.limits.verdict_seconds


def _concerns(answer: Envelope, announced: Envelope) -> bool:
    """Whether an answer concerns the announced submission."""
    message, worker = answer.message, announced.sender
    if isinstance(message, Acknowledgement | Verdict):
        digest = announced.expect(Submission).digest
        return (message.worker, message.submission) == (worker, digest)
    return isinstance(message, AdmissionRefused) and message.peer == worker
