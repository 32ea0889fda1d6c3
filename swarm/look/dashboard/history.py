"""What the logs tell: figures by step and by worker, refusals, and the trainers' own figures."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from swarm.ledger.entries import CheckpointPublished, RoundFigures, TrainingFigures
from swarm.wire.messages import Evaluation, StepOrder, Verdict
from swarm.world.recent import Recent

STEPS_KEPT = 512
"""Steps with figures, the newest."""

AHEAD_MAX = 16
"""Steps by which a trainer's log may be ahead of the order that was read just before."""

WORKERS_MAX = 8192
"""Workers with figures, those heard last: as many as a status lists."""

REFUSALS_KEPT = 50
"""Verdicts other than accepted that are kept, the newest."""


@dataclass
class StepFigures:
    """One step's verdicts; sums are over the accepted submissions."""

    lineage: int
    accepted: int = 0
    refused: int = 0
    quarantined: int = 0
    reward_sum: float = 0.0
    rewarded: int = 0
    """Completions with a reward, outside continued and quarantined groups."""
    tokens: int = 0
    completions: int = 0
    size: int = 0
    """Bytes of the files."""
    workers: set[str] = field(default_factory=set)
    """Of all submissions that were judged."""
    seen: set[bytes] = field(default_factory=set)
    """Submissions that are counted already: several validators may judge one."""

    def learn(self, verdict: Verdict) -> None:
        """Count a verdict of this step."""
        self.seen.add(verdict.submission)
        self.workers.add(verdict.worker)
        setattr(self, verdict.outcome, getattr(self, verdict.outcome) + 1)
        if verdict.outcome == "accepted":
            rewards = _rewards(verdict)
            self.reward_sum += sum(rewards)
            self.rewarded += len(rewards)
            self.tokens += verdict.tokens
            self.size += verdict.size_bytes
            self.completions += sum(map(len, verdict.rewards))


@dataclass
class WorkerFigures:
    """One worker's verdicts since the first that the dashboard read."""

    accepted: int = 0
    refused: int = 0
    credited: int = 0
    """Tokens of accepted and quarantined submissions; an eviction may void them later."""


class History:
    """Figures of the verdicts read so far. Memory is bounded, whatever the run's length."""

    def __init__(self) -> None:
        self.steps: dict[int, StepFigures] = {}
        self.workers: Recent[str, WorkerFigures] = Recent(WORKERS_MAX)
        """The one heard last comes last."""
        self.refusals: deque[tuple[str, Verdict]] = deque(maxlen=REFUSALS_KEPT)
        """The newest verdicts other than accepted, and whose they are."""
        self.trained: dict[int, tuple[int, TrainingFigures]] = {}
        """(lineage, figures) by the figures' step; the policy that it made is one higher."""
        self.begun: dict[int, int] = {}
        """The policy that began the newest lineage, by that."""
        self.complete_from = 0
        """Step from which on the workers' figures lack no verdict."""
        self.evaluations: dict[int, Evaluation] = {}
        """By policy, as far as the dashboard was there."""
        self.rounds: dict[str, dict[int, RoundFigures]] = {}
        """What each of several trainers says of its rounds."""

    def learn(self, verdict: Verdict, by: str, order: StepOrder) -> None:
        """Count a verdict of the validator `by`; only the first on each submission counts.

        `order` is the trainer's newest. A refused submission may name any step and lineage, so it
        counts for its step only if the trainer has opened that."""
        first = order.step - STEPS_KEPT + 1
        refused = verdict.outcome == "refused"
        if refused and (verdict.step > order.step or verdict.lineage > order.lineage):
            self._learn_worker(verdict, by)
            return
        if verdict.step < first:
            return
        step = self.steps.get(verdict.step)
        if step is None or step.lineage < verdict.lineage:
            step = self.steps[verdict.step] = StepFigures(verdict.lineage)
            _forget(self.steps, first)
        if verdict.submission in step.seen or verdict.lineage < step.lineage:
            return
        step.learn(verdict)
        self._learn_worker(verdict, by)

    def begin(self, verdicts: Sequence[Verdict], order: StepOrder) -> None:
        """Note where the reading of a log begins, by its first verdicts that are read.

        Its older ones may be pruned, or too many to read."""
        # A refused submission may name any step.
        steps = [each.step for each in verdicts if each.outcome != "refused"]
        if steps:
            self.complete_from = max(self.complete_from, steps[0], order.step - STEPS_KEPT + 1)

    def learn_training(self, entry: CheckpointPublished, order: StepOrder) -> None:
        """Take a trainer's figures of the step that made a policy.

        The first entry of a lineage and step counts, so that no trainer changes another's. Steps
        far from the one that is open are left out."""
        step = entry.step - 1
        first = order.step - STEPS_KEPT + 1
        if entry.figures is None and order.lineage == entry.lineage > max(self.begun, default=0):
            self.begun = {entry.lineage: entry.step}
        if entry.figures is None or not max(0, first) <= step <= order.step + AHEAD_MAX:
            return
        held = self.trained.get(step)
        if held is None or held[0] < entry.lineage <= order.lineage:
            self.trained[step] = entry.lineage, entry.figures
            _forget(self.trained, first)

    def learn_round(self, trainer: str, round: int, told: RoundFigures) -> None:
        """Take what one of several trainers says of a round: the first entry counts."""
        of_trainer = self.rounds.setdefault(trainer, {})
        of_trainer.setdefault(round, told)
        _forget(of_trainer, max(of_trainer) - STEPS_KEPT + 1)

    def round(self) -> int:
        """The round that most of several trainers have contributed to; 0: none."""
        return median_low(map(max, self.rounds.values())) if self.rounds else 0

    def figures_by_round(self) -> dict[int, list[RoundFigures]]:
        """What the trainers say of each round, as far as most of them have got."""
        found: dict[int, list[RoundFigures]] = {}
        newest = self.round()
        for told in self.rounds.values():
            for round, figures in told.items():
                if newest - STEPS_KEPT < round <= newest + AHEAD_MAX:
                    found.setdefault(round, []).append(figures)
        return found

    def learn_evaluation(self, found: Evaluation) -> None:
        """Take a result on held-out tasks."""
        policy = found.reference.step
        self.evaluations[policy] = found
        _forget(self.evaluations, policy - STEPS_KEPT)

    def _learn_worker(self, verdict: Verdict, by: str) -> None:
        if verdict.outcome != "accepted":
            self.refusals.append((by, verdict))
        worker = self.workers.of(verdict.worker, WorkerFigures)
        worker.accepted += verdict.outcome == "accepted"
        worker.refused += verdict.outcome == "refused"
        if verdict.outcome != "refused":
            worker.credited += verdict.tokens


def _forget(by_step: dict[int, Any], first: int) -> None:
    for old in [step for step in by_step if step < first]:
        del by_step[old]


def _rewards(verdict: Verdict) -> Sequence[float]:
    left_out = set(verdict.quarantined)
    return [
        reward
        for group, rewards in enumerate(verdict.rewards)
        if group not in left_out and not verdict.continues(group)
        for reward in rewards
    ]
