"""A worker's record: its stake, the share of its work to recompute, and the standing of its credit.

Everything here is a pure function of the union of the logs, so a restarted validator, another
validator and an outsider with copies of the logs find the same figures. docs/protocol.md ("Records
and credit") has the rules. Decision 25 proves that no lie pays, and bounds what a saboteur does."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from swarm.ledger.entries import Judged
from swarm.wire.manifest import RunManifest, Thresholds

Standing = Literal["held", "final", "void"]
"""Of a credited submission. Held credit may still be voided, final credit never."""

LATE_STEPS_MAX = 4
"""Steps beyond `max_staleness` by which the newest step may be ahead of a submission that is
judged or audited: files are kept 2 steps longer, and the trainer may be opening its next step."""


@dataclass(frozen=True)
class Rules:
    """The rules of records in one version of the run manifest."""

    stake_steps: int
    hold_steps: int
    """Larger than `stake_steps`, so that final credit is never voided: a worker may be evicted for
    a submission of an earlier step."""
    safety: float
    observes: bool
    """Whether nobody has measured the run's thresholds. As long as they are not, work on which no
    bets were laid adds to the stake; afterwards it does not, since any text was accepted."""

    @classmethod
    def of(cls, manifest: RunManifest) -> "Rules":
        thresholds = manifest.thresholds
        return cls(
            stake_steps=thresholds.stake_steps,
            hold_steps=thresholds.stake_steps + manifest.schedule.max_staleness + LATE_STEPS_MAX,
            safety=thresholds.recompute_safety,
            observes=thresholds.observes,
        )


def share_to_recompute(tokens: int, stake: int, thresholds: Thresholds) -> float:
    """The probability with which to recompute a submission of `tokens` by a worker with `stake`."""
    share = thresholds.recompute_safety * tokens / max(1, tokens + stake)
    return min(1.0, max(thresholds.recompute_share_min, share))


def fine(refused: Judged, safety: float) -> int:
    """The tokens of credit that a submission costs that was recomputed and refused."""
    return round(max(0.0, safety / refused.share - 1) * refused.tokens)


@dataclass(frozen=True)
class Work:
    """One worker's submissions that decide its record, each once."""

    credited: Mapping[bytes, Judged]
    """Final verdicts by submission: at most one of each number."""
    verified: frozenset[bytes]
    """Credited submissions that were recomputed."""
    refuted: tuple[Judged, ...]
    """Verdicts that refuse a submission after recomputing it, one of each submission."""
    observed: frozenset[bytes] = frozenset()
    """Verified submissions that were recomputed without bets, while the run observed."""

    def stake(self, step: int, rules: Rules) -> int:
        """The stake before a submission for `step`.

        Steps after it count too: they are known if one is judged late, or after a rollback."""
        start, balances = step - rules.stake_steps, self.balances(rules)
        return max(0, sum(tokens for each, tokens in balances.items() if each > start))

    def balances(self, rules: Rules) -> dict[int, int]:
        """Tokens that add to the stake, less fines, by step."""
        balances: defaultdict[int, int] = defaultdict(int)
        for submission in self.verified if rules.observes else self.verified - self.observed:
            balances[self.credited[submission].step] += self.credited[submission].tokens
        for refused in self.refuted:
            balances[refused.step] -= fine(refused, rules.safety)
        return dict(balances)

    def standings(
        self, newest_step: int, evicted_at: int | None, rules: Rules
    ) -> dict[bytes, Standing]:
        """The standing of each credited submission.

        `evicted_at` is the step of the submission for which the worker was evicted, None if no
        eviction is in force."""
        final = newest_step - rules.hold_steps
        voided = self._fined(rules)
        if evicted_at is not None:
            start = evicted_at - rules.stake_steps
            voided |= {name for name, entry in self.credited.items() if entry.step > start}
        return {
            name: "void" if name in voided else "final" if entry.step <= final else "held"
            for name, entry in sorted(self.credited.items())
        }

    def _fined(self, rules: Rules) -> set[bytes]:
        """Submissions whose credit pays the fines: whole ones, the newest of the window first."""
        by_step: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for name, entry in self.credited.items():
            by_step[entry.step].append((entry.number, name))
        voided: set[bytes] = set()
        for refused in sorted(
            self.refuted, key=lambda each: (each.step, each.number, each.submission)
        ):
            due = fine(refused, rules.safety)
            for step in range(refused.step, refused.step - rules.stake_steps, -1):
                if step not in by_step or due <= 0:
                    continue
                for _, name in sorted(by_step[step], reverse=True):
                    if due > 0 and name not in voided:
                        voided.add(name)
                        due -= self.credited[name].tokens
        return voided


def refutation(verdicts: Iterable[Judged], *, trained: bool) -> Judged | None:
    """The verdict that refuses a submission after recomputing it, if one is in force.

    An acceptance outweighs it only if it was recomputed too and a step took a group (`trained`)."""
    recomputed = [entry for entry in verdicts if entry.recomputed]
    if trained and any(entry.outcome == "accepted" for entry in recomputed):
        return None
    refusals = [entry for entry in recomputed if entry.outcome == "refused"]
    return min(refusals, key=lambda entry: (entry.share, entry.step), default=None)
