"""Workers' records: accepted submissions, and the evidence in the validators' logs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from peers.validator.evidence.worker import Standing, WorkerEvidence
from swarm.messages import Reinstatement
from swarm.node.trusted import TrustedPart
from swarm.run.run import Run


@dataclass
class _Read:
    """The evidence against one worker, as far as it was read from the logs."""

    reinstated: bytes
    """The owner's newest reinstatement, which cleared earlier evidence; empty if there is none."""
    evidence: WorkerEvidence = field(default_factory=WorkerEvidence)
    next: dict[str, int] = field(default_factory=dict)
    """First index of each log that was not read."""


class Records:
    """The records of all workers.

    The evidence is a function of the trusted peers' logs, so a restart does not change it, and
    every validator that mirrors them finds the same.
    """

    def __init__(self, run: Run, trusted: TrustedPart) -> None:
        self._run = run
        self._trusted = trusted
        self._accepted: defaultdict[str, int] = defaultdict(int)
        self._read: dict[str, _Read] = {}

    def accepted(self, worker: str) -> int:
        """The worker's accepted submissions since this validator last refused one."""
        return self._accepted[worker]

    def accept(self, worker: str) -> None:
        """Count an accepted submission."""
        self._accepted[worker] += 1

    def refuse(self, worker: str) -> None:
        """Note a refusal: the worker is unproven again."""
        self._accepted[worker] = 0

    def standing(self, worker: str) -> Standing:
        """The evidence against a worker in all logs that this peer holds."""
        reinstated = b"".join(
            envelope.raw
            for envelope in self._run.expulsions_of(worker)
            if isinstance(envelope.message, Reinstatement)
        )
        read = self._read.get(worker)
        if read is None or read.reinstated != reinstated:
            read = self._read[worker] = _Read(reinstated)
        for log in self._run.manifest.validator_ids():
            for index, evidence in self._trusted.tables.evidence_on(
                worker, log, read.next.get(log, 0)
            ):
                read.evidence.add(log, evidence)
                read.next[log] = index + 1
        return read.evidence.standing()
