"""Submissions of one policy that wait for the prefill child are judged in one pass.

The first to get its turn takes along all that wait then and use the same policy. At most one
submission per worker waits, because a worker occupies one lane, so no worker fills a pass. The
child bounds the pass in tokens and leaves the rest for the next; it judges each submission by
itself, so an error of one is not an error of the others. Submissions that were judged together when
the child died are judged alone from then on, and only a death alone counts against one of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from swarm.jobs.validation import Judge, Judged, JudgeTogether, PrefillService
from swarm.wire.messages import Digest
from swarm.world import ChildDied, ChildError

TOGETHER_MAX = 16
"""Submissions in one pass; beyond that, larger passes save nothing."""


@dataclass(eq=False)
class _Waiting:
    """A submission that waits for its results."""

    job: Judge
    judged: Judged | None = None
    error: Exception | None = None

    @property
    def is_open(self) -> bool:
        return self.judged is None and self.error is None


class Together:
    """Gives submissions to the prefill child."""

    def __init__(self, say_failed: Callable[[int, str], None]) -> None:
        """`say_failed` gets the size of each pass that failed as a whole, and why."""
        self._say_failed = say_failed
        self.turn = trio.Lock()
        """Held while the prefill child is used."""
        self._waiting: list[_Waiting] = []
        self._suspects: set[Digest] = set()
        """Submissions that were judged together when the child died."""

    async def judge(
        self, job: Judge, prefill: PrefillService, load: Callable[[], Awaitable[None]]
    ) -> Judged:
        """Judge a submission; `load` loads its policy. Raises the child's errors."""
        own = _Waiting(job)
        self._waiting.append(own)
        try:
            async with self.turn:
                if own.is_open:
                    await load()
                    await self._judge_with_others(own, prefill)
        finally:
            self._waiting.remove(own)
        if own.error is not None:
            raise own.error
        assert own.judged is not None
        return own.judged

    async def _judge_with_others(self, own: _Waiting, prefill: PrefillService) -> None:
        batch = [own, *self._others(own)][:TOGETHER_MAX]
        if len(batch) == 1:
            own.judged = await prefill.judge(own.job)
            self._suspects.discard(own.job.digest)
            return
        try:
            found = await prefill.judge_together(JudgeTogether(jobs=[each.job for each in batch]))
        except ChildDied as error:
            self._suspects |= {each.job.digest for each in batch}
            for each in batch:  # nobody knows which of them it died over
                each.error = ChildDied(str(error), error.child, blameless=True)
            return
        if found.failed:
            self._say_failed(len(batch), found.failed)
        for each, result in zip(batch, found.results, strict=True):
            each.judged = result.judged
            if result.error:
                each.error = ChildError(result.error, result.kind)

    def _others(self, own: _Waiting) -> list[_Waiting]:
        """The submissions that may be judged along with one."""
        if own.job.digest in self._suspects:
            return []
        return [
            each
            for each in self._waiting
            if each is not own
            and each.is_open
            and each.job.order.policy == own.job.order.policy
            and each.job.digest not in self._suspects
        ]
