"""The outcome of every accepted submission, in this trainer's log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from peers.trainer.forecast import Forecast
from peers.trainer.pool import Accepted
from peers.trainer.progress import Progress
from swarm.events import Events
from swarm.ledger.entries import Consumed, Entry, Outcome, decode
from swarm.node.trusted import TrustedPart
from swarm.wire.identity import PeerId
from swarm.wire.messages import Verdict

LOG_ENTRIES_READ = 1000
"""Entries of its own log that a starting trainer reads at once."""


@dataclass(eq=False)
class Outcomes:
    """Logs submissions as consumed, carried, stale or unreadable; durable on return."""

    trusted: TrustedPart
    events: Events
    progress: Progress
    forecast: Forecast
    left_out: Counter[str] = field(default_factory=Counter)
    """Accepted groups that this process did not train on, by reason."""

    def entries(self, owner: PeerId) -> Iterator[Entry]:
        """All entries of `owner`'s log that are not pruned, oldest first."""
        log = self.trusted.log_of(owner)
        assert log is not None
        for start in range(log.start(), log.size(), LOG_ENTRIES_READ):
            for raw in log.entries(start, LOG_ENTRIES_READ):
                yield decode(raw)

    def settled(self, submission: bytes) -> bool:
        """Whether a log holds a submission's final outcome; `carried` is not final."""
        return self.trusted.tables.is_used(submission)

    async def consumed(self, entries: Sequence[Consumed]) -> None:
        """Log the submissions that a step has trained on, unless a log holds them already."""
        await self.trusted.append([e for e in entries if not self.settled(e.submission)])

    async def complete(self, missing: Sequence[Consumed]) -> None:
        """Log submissions trained on before a crash that came after the state, before the log."""
        if missing:
            await self.consumed(missing)
            self.events.emit("trainer.log_completed", submissions=len(missing))

    async def carried(self, submissions: Sequence[Accepted]) -> None:
        """Log the submissions that the pool still holds when the run ends."""
        await self._log([accepted.verdict for accepted in submissions], "carried")

    async def stale(self, verdicts: Sequence[Verdict]) -> None:
        """Log submissions that may no longer be trained on, mostly because they are too old."""
        await self.lost(verdicts, "stale")
        self.events.emit("trainer.stale_dropped", submissions=len(verdicts))

    async def lost(
        self, verdicts: Sequence[Verdict], outcome: Literal["stale", "unreadable"]
    ) -> None:
        """Log submissions that no step has taken.

        They spent their workers' quota all the same, so the next order must allow more.
        """
        await self._log([each for each in verdicts if not self.settled(each.submission)], outcome)
        self.left_out[outcome] += sum(len(verdict.rewards) for verdict in verdicts)
        lineage = self.progress.lineage  # the orders of an older one are closed
        self.forecast.waste(sum(verdict.lineage >= lineage for verdict in verdicts))

    def filtered(self, batch: Sequence[Accepted]) -> None:
        """Count the groups of a batch that the online filter leaves out."""
        for accepted in batch:
            self.left_out.update(label for label in accepted.labels if label != "kept")

    async def _log(self, verdicts: Sequence[Verdict], outcome: Outcome) -> None:
        """Log one outcome for all groups of these submissions."""
        step = self.progress.step
        await self.trusted.append(
            [
                Consumed(
                    step=step, submission=each.submission, outcomes=[outcome] * len(each.rewards)
                )
                for each in verdicts
            ]
        )
