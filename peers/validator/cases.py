"""A case (a submission to be judged), the outcome of its checks, and the resulting verdict."""

from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, Self

import msgspec

from peers.validator.checks.history import speed
from peers.validator.inbox import Key
from swarm.jobs.validation import Graded, Inspected, Report, UngradedGroup
from swarm.rollouts.rollouts import parts_of
from swarm.wire import messages
from swarm.wire.envelope import Envelope


class Slot(NamedTuple):
    """A worker's submission number within a step; one submission fills it."""

    worker: str
    lineage: int
    step: int
    number: int

    @property
    def before(self) -> Self:
        """The preceding slot, which must be taken before this one."""
        return self._replace(number=self.number - 1)


def slot_of(
    worker: str, named: messages.Submission | messages.Acknowledgement | messages.Verdict
) -> Slot:
    return Slot(worker, named.lineage, named.step, named.number)


def fields_naming(worker: str, named: messages.Submission) -> dict[str, Any]:
    """The fields of an event that say which submission it is about."""
    return {
        "submission": named.digest,
        "worker": worker,
        "step": named.step,
        "number": named.number,
    }


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
    def submission(self) -> messages.Submission:
        return self.announced.expect(messages.Submission)

    @property
    def order(self) -> messages.StepOrder:
        return self.ordered.expect(messages.StepOrder)

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

    @property
    def named(self) -> dict[str, Any]:
        return fields_naming(self.worker, self.submission)


class Outcome(Inspected, kw_only=True):
    """The results of all checks of a submission, and those for training."""

    rewards: messages.Rewards = msgspec.field(default_factory=list)
    """[groups][G] 0 for an ungraded group; empty if no group has grades."""
    task_means: list[float] = msgspec.field(default_factory=list)
    """[groups] Mean reward without the length penalty; empty if there is no penalty."""
    task_spreads: list[float] = msgspec.field(default_factory=list)
    """[groups] Largest minus smallest reward without the penalty; empty if there is none."""
    ungraded: list[UngradedGroup] = msgspec.field(default_factory=list)
    """By group. The sampling checks decide whether the worker is at fault."""
    parts: messages.RewardParts = messages.RewardParts()
    evidence: messages.Evidence = messages.Evidence()
    share: float = 1.0
    """The probability with which it was drawn for recomputation."""
    continued: list[int] = msgspec.field(default_factory=list)
    """[groups] Index of the state that each group continues, -1: none; empty if no group does."""
    seed: bytes = b""
    """The submission's, in a run that orders continuations."""

    @classmethod
    def of(cls, report: Report) -> Self:
        """Make an outcome from a report, or from an inspection."""
        return cls(**msgspec.structs.asdict(report))

    def add(self, report: Report) -> None:
        """Add the report of further checks; none before them failed."""
        self.checks.extend(report.checks)
        self.failed, self.detail = report.failed, report.detail
        self.proven_fault, self.quarantined = report.proven_fault, report.quarantined

    def settle(self, graded: Graded) -> None:
        """Take complete grades' rewards: an ungraded group's are 0; none if no group is graded."""
        self.ungraded = sorted(graded.ungraded, key=lambda each: each.group)
        without = {each.group for each in graded.ungraded}
        if len(without) == len(graded.graded):
            return
        size = max(map(len, graded.graded))
        for group in without:
            graded.graded[group] = [0.0] * size
            graded.penalties[group] = [0.0] * size
            graded.parts[group] = [{}] * size
        self.rewards = [
            [reward - penalty for reward, penalty in zip(*group, strict=True)]
            for group in zip(graded.graded, graded.penalties, strict=True)
        ]
        self.parts = parts_of(list(chain(*graded.parts)))
        if graded.has_target:
            self.task_means = [sum(group) / len(group) for group in graded.graded]
            self.task_spreads = [max(group) - min(group) for group in graded.graded]

    @property
    def word(self) -> Literal["accepted", "refused", "quarantined"]:
        """The outcome as the verdict states it."""
        if not self.failed:
            return "accepted"
        return "quarantined" if self.quarantined else "refused"


UNCREDITED = frozenset({speed.name})
"""Checks that withhold a submission for a reason of the worker's own. It earns no credit."""


def crashed(reason: str) -> Outcome:
    """The outcome when a check ends its child processes, or fails in them, whenever it is made."""
    return Outcome(failed="crash", detail=reason, quarantined=True)


def quarantine(reason: str) -> Outcome:
    """The outcome when this validator, not the worker, is at fault."""
    return Outcome(failed="internal", detail=reason, quarantined=True)


def quarantine_ungraded(outcome: Outcome) -> None:
    """Quarantine ungraded groups, or all, after recomputation: no worker chose such text."""
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


def verdict_on(
    worker: str, submission: messages.Submission, outcome: Outcome, log_index: int
) -> messages.Verdict:
    """The verdict that states an outcome; `log_index` is -1 for a verdict in no log."""
    verdict = messages.Verdict(
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
        rewards=outcome.rewards,
        log_index=log_index,
        task_means=outcome.task_means,
        task_spreads=outcome.task_spreads,
        environments=outcome.environments,
        rollouts_digest=b"" if outcome.failed else outcome.canonical_digest,
        rollouts_bytes=0 if outcome.failed else outcome.canonical_bytes,
        evidence=outcome.evidence,
        tokens=0 if outcome.failed in UNCREDITED else outcome.tokens,
        share=outcome.share,
        policies=outcome.policies if outcome.policies != [submission.policy] else [],
        quarantined=[each.group for each in outcome.ungraded] if outcome.rewards else [],
        parts=outcome.parts,
        continued=outcome.continued,
        seed=outcome.seed,
    )
    credited = outcome.word != "refused" and outcome.failed not in UNCREDITED
    return verdict if credited else without_training(verdict)


def without_training(verdict: messages.Verdict) -> messages.Verdict:
    """A verdict on a submission that earns nothing and is not trained on."""
    return msgspec.structs.replace(
        verdict,
        rewards=[],
        task_means=[],
        task_spreads=[],
        environments=[],
        rollouts_digest=b"",
        rollouts_bytes=0,
        quarantined=[],
        parts=messages.RewardParts(),
    )
