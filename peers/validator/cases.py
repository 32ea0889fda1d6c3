"""A case (a submission to be judged), the outcome of its checks, and the resulting verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from peers.validator.checks.history import Speed
from peers.validator.inbox import Key
from swarm.jobs.validation import Inspected, Report, UngradedGroup
from swarm.wire.envelope import Envelope
from swarm.wire.messages import (
    Acknowledgement,
    Evidence,
    RewardParts,
    StepOrder,
    Submission,
    Verdict,
)


class Slot(NamedTuple):
    """A worker's submission number within a step; one submission fills it."""

    worker: str
    lineage: int
    step: int
    number: int

    @property
    def before(self) -> Slot:
        """The preceding slot, which must be taken before this one."""
        return self._replace(number=self.number - 1)


def slot_of(worker: str, named: Submission | Acknowledgement | Verdict) -> Slot:
    """The slot of a worker's submission, or of the one that a validator's message names."""
    return Slot(worker, named.lineage, named.step, named.number)


@dataclass(eq=False)
class Case:
    """An acknowledged submission that waits for its verdict."""

    announced: Envelope
    ordered: Envelope
    """The step order that the worker followed."""
    first: Envelope | None = None
    """The verdict of another validator that this one checks; None for a case of its own."""
    acknowledgement: Envelope | None = None
    """Signed once, and repeated while the worker asks again; None after a restart."""

    @property
    def submission(self) -> Submission:
        return self.announced.expect(Submission)

    @property
    def order(self) -> StepOrder:
        return self.ordered.expect(StepOrder)

    @property
    def worker(self) -> str:
        return self.announced.sender

    @property
    def client(self) -> str:
        """The peer whose use of the lanes a case counts as."""
        return self.worker if self.first is None else self.first.sender

    @property
    def key(self) -> Key:
        return (self.worker, self.submission.digest)

    @property
    def slot(self) -> Slot:
        return slot_of(self.worker, self.submission)


class Outcome(Inspected, kw_only=True):
    """The results of all checks of a submission, and those for training."""

    evidence: Evidence = Evidence()
    share: float = 1.0
    """The probability with which it was drawn for recomputation."""
    continued: list[int] = msgspec.field(default_factory=list)
    """[groups] Index of the state that each group continues, -1: none; empty if no group does."""
    seed: bytes = b""
    """The submission's, in a run that orders continuations."""

    @classmethod
    def of(cls, report: Report) -> Outcome:
        """Make an outcome from a report, or from an inspection with its results for training."""
        return cls(**msgspec.structs.asdict(report))

    @property
    def word(self) -> Literal["accepted", "refused", "quarantined"]:
        """The outcome as the verdict states it."""
        if not self.failed:
            return "accepted"
        return "quarantined" if self.quarantined else "refused"


UNCREDITED = frozenset({Speed.name})
"""Checks that withhold a submission for a reason of the worker's own. It earns no credit."""


def crashed(reason: str) -> Outcome:
    """The outcome when a check ends its child processes, or fails in them, whenever it is made."""
    return Outcome(failed="crash", detail=reason, quarantined=True)


def quarantine(reason: str) -> Outcome:
    """The outcome when this validator, not the worker, is at fault."""
    return Outcome(failed="internal", detail=reason, quarantined=True)


def quarantine_ungraded(outcome: Outcome) -> None:
    """Quarantine the ungraded groups; all of the submission if no group is graded.

    Only after the recomputation: it shows that the seed determined the tokens, so that the worker
    did not choose ungradable text.
    """
    ungraded = outcome.ungraded
    if outcome.rewards:
        outcome.detail = (
            f"{len(ungraded)} of {len(outcome.rewards)} groups are quarantined, the first because "
            f"{ungraded[0].reason}"
        )
        return
    first = next((each for each in ungraded if each.not_gradable), ungraded[0])
    outcome.failed = "not_gradable" if first.not_gradable else "environment"
    outcome.detail, outcome.quarantined = first.reason, True


def verdict_on(worker: str, submission: Submission, outcome: Outcome, log_index: int) -> Verdict:
    """The verdict that states an outcome; `log_index` is -1 for a verdict in no log."""
    uncredited = outcome.word == "refused" or outcome.failed in UNCREDITED
    return Verdict(
        submission=submission.digest,
        size_bytes=submission.size_bytes,
        worker=worker,
        lineage=submission.lineage,
        step=submission.step,
        policy=submission.policy,
        number=submission.number,
        outcome=outcome.word,
        failed=outcome.failed,
        detail=outcome.detail[:500],
        proven_fault=outcome.proven_fault,
        checks=outcome.checks,
        rewards=[] if uncredited else outcome.rewards,
        log_index=log_index,
        task_means=[] if uncredited else outcome.task_means,
        task_spreads=[] if uncredited else outcome.task_spreads,
        environments=[] if uncredited else outcome.environments,
        rollouts_digest=b"" if outcome.failed else outcome.canonical_digest,
        rollouts_bytes=0 if outcome.failed else outcome.canonical_bytes,
        evidence=outcome.evidence,
        tokens=0 if outcome.failed in UNCREDITED else outcome.tokens,
        share=outcome.share,
        policies=outcome.policies if outcome.policies != [submission.policy] else [],
        quarantined=_quarantined(outcome) if outcome.rewards and not uncredited else [],
        parts=RewardParts() if uncredited else outcome.parts,
        continued=outcome.continued,
        seed=outcome.seed,
    )


def _quarantined(outcome: Outcome) -> list[int]:
    return [each.group for each in outcome.ungraded]


def outcome_of(verdict: Verdict) -> Outcome:
    """The outcome that an acceptance states, for an audit."""
    return Outcome(
        checks=verdict.checks,
        rewards=verdict.rewards,
        task_means=verdict.task_means,
        task_spreads=verdict.task_spreads,
        environments=verdict.environments,
        canonical_digest=verdict.rollouts_digest,
        canonical_bytes=verdict.rollouts_bytes,
        tokens=verdict.tokens,
        share=verdict.share,
        evidence=verdict.evidence,
        policies=verdict.policies,
        ungraded=[UngradedGroup(group=each, reason="") for each in verdict.quarantined],
        parts=verdict.parts,
        continued=verdict.continued,
        seed=verdict.seed,
    )
