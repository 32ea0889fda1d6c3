"""Workers' records: stake, and evidence in the validators' logs."""

from __future__ import annotations

from dataclasses import dataclass, field

from peers.validator.evidence.worker import Standing, WorkerEvidence
from swarm.node.trusted import TrustedPart
from swarm.run.run import Run


@dataclass
class _Read:
    """The evidence against one worker, as far as it was read from the logs."""

    next: dict[str, int]
    """First index of each log that was not read."""
    reinstated: dict[str, int]
    """Index of the worker's last reinstatement in each log."""
    evidence: WorkerEvidence = field(default_factory=WorkerEvidence)


class Records:
    """The records of all workers.

    They are functions of the trusted peers' logs, so a restart does not change them, and every
    validator that mirrors the logs finds the same.
    """

    def __init__(self, run: Run, trusted: TrustedPart) -> None:
        self._run = run
        self._trusted = trusted
        self._read: dict[str, _Read] = {}

    def stake(self, worker: str, step: int) -> int:
        """The worker's stake before a submission for `step`, according to all logs held here."""
        return self._trusted.stake(worker, step)

    def standing(self, worker: str) -> Standing:
        """The evidence against a worker in all logs that this peer holds.

        In each log, evidence before the worker's last reinstatement does not count.
        """
        reinstated = self._trusted.tables.reinstatements_of(worker)
        read = self._read.get(worker)
        if read is None or read.reinstated != reinstated:
            read = self._read[worker] = _Read(dict(reinstated), reinstated)
        for log in self._run.manifest.validator_ids():
            for index, evidence in self._trusted.tables.evidence_on(
                worker, log, read.next.get(log, 0)
            ):
                read.evidence.add(log, evidence)
                read.next[log] = index + 1
        return read.evidence.standing()
