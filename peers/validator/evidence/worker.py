"""A worker's evidence over all verdicts, and the bound on false evictions.

*Restarts.* An honest record must not pay for later fakes, so a bet does not stake everything on the
first submission: it enters 1/(n(n+1)) of its capital at the n-th, and keeps the rest, 1/(n+1), in
cash. Losses touch only what was entered before. The whole capital still begins at 1, and it stays a
nonnegative supermartingale (a mixture over starting points; compare Shin, Ramdas and Rinaldo,
"E-detectors", 2024, whose sums bound only the average run length). So by Ville's inequality:

    the probability that an honest worker's capital EVER reaches 1/α, at any look, is at most α.

A lie that begins at the n-th submission has to earn back log(n(n+1)) nats: 9 after 100 honest ones.

*Validators.* Each validator's log has its own order, which its owner signed. The capitals of a bet
in several logs are multiplied. At any time only one of them moves, so the product is a
supermartingale however the logs interleave, and it depends only on the logs: whoever holds them
finds the same figure.

*Processes.* The worker's capital is the mean over its processes, and a process's the mean over its
bets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from peers.validator.evidence.betting import UNITS_PER_NAT, log_mean, log_sum
from swarm.ledger.entries import Judged, Reinstated
from swarm.ledger.state import Record
from swarm.messages import Evidence

PROCESSES = ("sampler", "policy", "text", "selection")
"""The fields of `Evidence` that hold bets."""

WORDS = {
    "sampler": "tokens that the run's sampling would not draw",
    "policy": "activations of other weights than the policy's",
    "text": "tokens that no rounding explains",
    "selection": "near ties that depend on the outcome of the rollout",
}
"""What each process is evidence of, for an eviction's reason."""


@dataclass
class _Process:
    """One process's bets in one validator's log."""

    submissions: int = 0
    entered: list[float] = field(default_factory=list)
    """[bets] log of the capital entered so far, with its gains."""

    def add(self, bets: Sequence[int]) -> None:
        self.submissions += 1
        entry = -math.log(self.submissions * (self.submissions + 1))
        before = self.entered
        if len(before) != len(bets):  # at first, and after a validator's change of version
            before = [-math.inf] * len(bets)
        self.entered = [
            log_sum(entered, entry) + bet / UNITS_PER_NAT
            for entered, bet in zip(before, bets, strict=True)
        ]

    def log_capitals(self) -> list[float]:
        """[bets] log of the capital, cash included."""
        cash = -math.log(self.submissions + 1)
        return [log_sum(entered, cash) for entered in self.entered]


@dataclass(frozen=True)
class Standing:
    """A worker's capital, and the process that contributes most."""

    log_capital: float
    """Natural logarithm. An honest worker's ever reaches log(1/α) with probability at most α."""
    process: str
    log_capital_of_process: float

    @property
    def p_value(self) -> float:
        """A bound on the probability that an honest worker ever looks as suspicious."""
        return math.exp(-max(0.0, self.log_capital))


class WorkerEvidence:
    """The evidence of all validators' logs against one worker."""

    def __init__(self) -> None:
        self._logs: dict[str, dict[str, _Process]] = {}

    def add(self, log: str, evidence: Evidence) -> None:
        """Add the evidence of the next verdict on the worker in a validator's log.

        A second opinion that confirms the first has no bets: each submission is bet on once.
        """
        if not evidence.sampler:
            return
        processes = self._logs.setdefault(log, {name: _Process() for name in PROCESSES})
        for name in PROCESSES:
            processes[name].add(getattr(evidence, name))

    def standing(self) -> Standing:
        """The worker's capital now."""
        capitals = {name: self._log_capital(name) for name in PROCESSES}
        leading = max(PROCESSES, key=lambda name: capitals[name])
        return Standing(log_mean(list(capitals.values())), leading, capitals[leading])

    def _log_capital(self, process: str) -> float:
        """log of a process's capital. A bet that a log does not have is untouched there."""
        by_log = [log[process].log_capitals() for log in self._logs.values()]
        return log_mean([sum(bets) for bets in zip_longest(*by_log, fillvalue=0.0)])


def evidence_in(records: Iterable[Record], worker: str) -> WorkerEvidence:
    """The evidence against a worker in validators' logs, each since its last reinstatement there.

    Other entries than verdicts and reinstatements may be left out.
    """
    entries: dict[str, list[Evidence]] = {}
    for record in sorted(records, key=lambda record: (record.owner, record.index)):
        of_log, entry = entries.setdefault(record.owner, []), record.entry
        if isinstance(entry, Reinstated) and entry.peer == worker:
            of_log.clear()
        elif isinstance(entry, Judged) and entry.worker == worker and entry.evidence.tokens:
            of_log.append(entry.evidence)
    found = WorkerEvidence()
    for owner, evidence in entries.items():
        for each in evidence:
            found.add(owner, each)
    return found
