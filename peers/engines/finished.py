"""The finished rollouts of a submission that is being generated, and their proofs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import trio

from peers.engines.episodes import SpanStates
from peers.proofs import toploc
from swarm.rollouts.rollout import Rollout

PROVE_SECONDS = 1.0
"""Time between two looks for rollouts to prove, whose hidden states can then be forgotten."""


class FinishedRollouts:
    """Rollouts and their proofs by row of the submission."""

    def __init__(self) -> None:
        self.rollouts: dict[int, Rollout] = {}
        self.proofs: dict[int, bytes] = {}
        self.turns: dict[int, list[bytes]] = {}
        """An environment peer's signed turns after the prompt, by row; of unfinished rows, too."""
        self.seconds_proofs = 0.0
        self._unproven: deque[tuple[int, Sequence[SpanStates]]] = deque()

    def add(self, row: int, rollout: Rollout, states: Sequence[SpanStates]) -> None:
        """Add a finished rollout and the hidden states of its spans. Any thread may call it."""
        self.rollouts[row] = rollout
        self._unproven.append((row, states))

    async def keep_proving(self) -> None:
        """Prove what was added every `PROVE_SECONDS`, beside generation; until cancelled."""
        while True:
            await trio.sleep(PROVE_SECONDS)
            await trio.to_thread.run_sync(self.prove)

    def prove(self) -> None:
        """Build the proofs of the rollouts added since the last call."""
        started = time.perf_counter()
        added = [self._unproven.popleft() for _ in range(len(self._unproven))]
        chunks = [
            [chunk for span in states for chunk in toploc.chunk_rows(span.before, span.hidden)]
            for _, states in added
        ]
        proofs = iter(toploc.build([chunk for row in chunks for chunk in row]))
        for (row, _), own in zip(added, chunks, strict=True):
            self.proofs[row] = b"".join(next(proofs) for _ in own)
        self.seconds_proofs += time.perf_counter() - started

    def policies(self) -> list[int]:
        """Numbers of the policies that sampled the finished rollouts, ascending."""
        return sorted({span.policy for each in self.rollouts.values() for span in each.spans})
