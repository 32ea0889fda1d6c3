"""A worker's evidence over all verdicts, and the bound on false evictions (docs/protocol.md).

The whole capital begins at 1 and is a nonnegative supermartingale: a mixture over starting points
(compare Shin, Ramdas and Rinaldo, "E-detectors", 2024, whose sums bound only the average run
length), and a product over logs of which only one moves at a time. So by Ville's inequality the
probability that an honest worker's capital EVER reaches 1/α, at any look, is at most α. A lie that
begins at the n-th submission has to earn back log(n(n+1)) nats: 9 after 100 honest ones."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from swarm.ledger.capital import PROCESSES, Capitals, log_mean
from swarm.ledger.entries import Judged, Reinstated, SealedCapital
from swarm.ledger.epochs import capitals_before
from swarm.ledger.state import Record
from swarm.wire.messages import Evidence

WORDS = {
    "sampler": "tokens that the run's sampling would not draw",
    "policy": "activations of other weights than the policy's",
    "text": "tokens that no rounding explains",
    "selection": "near ties that depend on the outcome of the rollout",
}
"""What each process is evidence of, for an eviction's reason."""


@dataclass(frozen=True)
class Standing:
    """A worker's capital, and the process that contributes most."""

    log_capital: float
    """Natural logarithm. An honest worker's ever reaches log(1/α) with probability at most α."""
    process: str

    @property
    def p_value(self) -> float:
        """A bound on the probability that an honest worker ever looks as suspicious."""
        return math.exp(-max(0.0, self.log_capital))


class WorkerEvidence:
    """The evidence of all validators' logs against one worker."""

    def __init__(self) -> None:
        self._logs: dict[str, Capitals] = {}

    def add(self, log: str, evidence: Evidence) -> None:
        """Add the evidence of the next verdict on the worker in a validator's log."""
        if evidence.sampler:
            self._logs.setdefault(log, Capitals()).add(evidence)

    def begin(self, log: str, sealed: Sequence[SealedCapital]) -> None:
        if sealed:
            self._logs[log] = Capitals.unsealed(sealed)

    def standing(self) -> Standing:
        """The worker's capital now."""
        capitals = {name: self._log_capital(name) for name in PROCESSES}
        leading = max(PROCESSES, key=lambda name: capitals[name])
        return Standing(log_mean(list(capitals.values())), leading)

    def _log_capital(self, process: str) -> float:
        """log of a process's capital. A bet that a log does not have is untouched there."""
        by_log = [log.of[process].log_capitals() for log in self._logs.values()]
        return log_mean([sum(bets) for bets in zip_longest(*by_log, fillvalue=0.0)])


def evidence_in(records: Iterable[Record], worker: str) -> WorkerEvidence:
    """The evidence against a worker in validators' logs, each since its last reinstatement there.

    Other entries than verdicts, reinstatements and seals may be left out. Pruned verdicts count by
    the seal that stands for them."""
    by_log: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: (record.owner, record.index)):
        by_log.setdefault(record.owner, []).append(record)
    found = WorkerEvidence()
    for owner, log in by_log.items():
        sealed: Sequence[SealedCapital] = capitals_before(log).get(worker, [])
        evidence: list[Evidence] = []
        for entry in (record.entry for record in log):
            if isinstance(entry, Reinstated) and entry.peer == worker:
                evidence.clear()
                sealed = []
            elif isinstance(entry, Judged) and entry.worker == worker and entry.evidence.tokens:
                evidence.append(entry.evidence)
        found.begin(owner, sealed)
        for each in evidence:
            found.add(owner, each)
    return found
