"""Evidence against workers in the validators' logs; a proven fault needs none
(`swarm.node.trusted.append_verdict`)."""

from dataclasses import dataclass, field

from swarm.ledger.evidence import WORDS, Standing, WorkerEvidence
from swarm.node.trusted import TrustedPart
from swarm.run.run import Run
from swarm.wire.messages import Verdict
from swarm.world.recent import Recent

READ_MAX = 8192
"""Workers whose evidence is kept in memory, a few kilobytes each: more than a run has at a time.
That of others is read again from the tables when they hand something in."""


@dataclass
class _Read:
    """The evidence against one worker, as far as it was read from the logs."""

    since: tuple[dict[str, int], dict[str, int]]
    """Index of the worker's last reinstatement in each log, and where each pruned log begins."""
    next: dict[str, int] = field(default_factory=dict)
    """First index of each log that was not read."""
    evidence: WorkerEvidence = field(default_factory=WorkerEvidence)


class Records:
    """All workers' records, by the trusted logs: the same after a restart and on every mirror."""

    def __init__(self, run: Run, trusted: TrustedPart, read_max: int = READ_MAX) -> None:
        self._run = run
        self._trusted = trusted
        self._read: Recent[str, _Read] = Recent(read_max)
        """By worker; the last one asked for comes last."""

    def standing(self, worker: str) -> Standing:
        """A worker's evidence in all logs held, in each since its last reinstatement."""
        tables = self._trusted.tables
        reinstated = tables.reinstatements_of(worker)
        since = (reinstated, tables.starts())
        read = self._read.get(worker)
        if read is None or read.since != since:
            read = _Read(since)
            for log in self._run.manifest.validator_ids():
                start, sealed = tables.capitals_of(worker, log, reinstated.get(log, -1) + 1)
                read.evidence.begin(log, sealed)
                read.next[log] = max(start, reinstated.get(log, 0))
        self._read[worker] = read
        for log in self._run.manifest.validator_ids():
            for index, evidence in tables.evidence_on(worker, log, read.next.get(log, 0)):
                read.evidence.add(log, evidence)
                read.next[log] = index + 1
        return read.evidence.standing()


async def evict_if_due(verdict: Verdict, run: Run, trusted: TrustedPart, records: Records) -> None:
    """Evict a verdict's worker when honest chance cannot explain the evidence against it."""
    worker, thresholds = verdict.worker, run.manifest.thresholds
    if run.evicted(worker) is not None or not verdict.recomputed or thresholds.observes:
        return
    limit = thresholds.eviction_p_value
    standing = records.standing(worker)
    if standing.p_value <= limit:
        await trusted.evict(
            worker,
            f"{WORDS[standing.process]}: an honest worker ever looks like this with "
            f"p <= {standing.p_value:.1e}, threshold {limit:.0e}",
            verdict.submission,
            standing.p_value,
            limit,
        )
