"""Audits: accepted submissions that were not recomputed at once, recomputed later.

Drawn after the verdict, so that a worker learns from no receipt that its submission never will be.
An audit waits until no case does and loads no older policy than the newest loaded one. Its verdict
replaces the first (`swarm.ledger.ruling`). The draw follows from the validator's key, so a restart
draws the same submissions again."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from peers.validator.cases import Case
from peers.validator.examiner import Examiner
from peers.validator.queue import CaseQueue
from peers.validator.verdicts import Verdicts
from swarm.errors import PeerError
from swarm.jobs.validation import PrefillService
from swarm.node.run_node import RunNode
from swarm.wire.messages import Verdict
from swarm.world import ChildDied, ChildError
from swarm.world.observable import Observable

AUDITS_WAITING_MAX = 256
"""Most drawn submissions that wait for an idle moment; the oldest is forgotten first."""


@dataclass(eq=False)
class Audits:
    """Recomputes drawn submissions while no case waits."""

    _peer: RunNode
    _queue: CaseQueue
    _examiner: Examiner
    _verdicts: Verdicts

    def __post_init__(self) -> None:
        self._drawn: deque[tuple[Case, Verdict]] = deque(maxlen=AUDITS_WAITING_MAX)
        self._judged = Observable(None)
        """Changes with every verdict: then no case may be waiting any more."""
        self._prefill: PrefillService | None = None
        self._verdicts.given = self._note

    def _note(self, case: Case, verdict: Verdict) -> None:
        if self._is_due(verdict):
            self._drawn.append((case, verdict))
        self._judged.touch()

    def _is_due(self, verdict: Verdict) -> bool:
        unchecked = verdict.outcome == "accepted" and not verdict.recomputed
        return unchecked and self._examiner.is_drawn_later(verdict.submission)

    def recover(self, verdicts: Iterable[Verdict]) -> None:
        """Draw again what was drawn before a restart, among this validator's `verdicts`."""
        for verdict in deque(filter(self._is_due, verdicts), maxlen=AUDITS_WAITING_MAX):
            case = self._queue.judged((verdict.worker, verdict.submission))
            if case is not None:
                self._drawn.append((case, verdict))

    @contextmanager
    def using(self, prefill: PrefillService) -> Iterator[None]:
        """Audit with this child inside the block."""
        self._prefill = prefill
        self._judged.touch()
        try:
            yield
        finally:
            self._prefill = None

    async def run(self, nursery: trio.Nursery) -> None:
        """Audit until cancelled; `nursery` delivers receipts."""
        while True:
            if self._prefill is None or len(self._queue) or not self._drawn:
                await self._judged.wait_change()
                continue
            prefill = self._prefill
            case, verdict = self._drawn.popleft()
            if not self._examiner.is_current(case) or not self._verdicts.stands(case.key):
                continue
            try:
                found = await self._examiner.audit(case, verdict, prefill)
            except (ChildDied, ChildError, PeerError) as error:  # a dead child is restarted
                self._peer.node.events.emit(
                    "validator.audit_failed", **case.named, reason=str(error)
                )
                continue
            await self._verdicts.revise(case, verdict, found, nursery)
