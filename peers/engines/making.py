"""A submission in the making: the turns that it asks for, its finished rollouts, their proofs."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from peers.engines.episodes import Playing, SpanStates
from peers.proofs import toploc
from swarm.jobs import SubmissionOrder
from swarm.jobs.inference import AskedTurn, AskedTurns
from swarm.rollouts.rollout import Rollout, Segment
from swarm.wire.messages import CheckpointReference

TURNS_SECONDS = 60.0
"""Longest wait of a call for turns that were asked for."""


class AskedQueue:
    """Turns that episodes ask for, in the job thread, and the role takes, in trio's."""

    def __init__(self) -> None:
        self._ask, self._asked = trio.open_memory_channel[AskedTurn | int](math.inf)

    def stall(self, submissions: int) -> None:
        """Note that all episodes of the batch wait for their turns. For worker threads."""
        trio.from_thread.run_sync(self._ask.send_nowait, submissions)

    def asking(self, seed: bytes) -> Callable[[int, Sequence[Segment]], None]:
        """A function for `peers.engines.episodes.ServedTask.ask`, for worker threads."""

        def ask(row: int, segments: Sequence[Segment]) -> None:
            tokens = [list(segment.tokens) for segment in segments]
            asked = AskedTurn(seed=seed, row=row, segments=tokens)
            trio.from_thread.run_sync(self._ask.send_nowait, asked)

        return ask

    async def take(self) -> AskedTurns:
        """All turns asked for since the last call; waits for one, at most `TURNS_SECONDS`."""
        found: list[AskedTurn | int] = []
        with trio.move_on_after(TURNS_SECONDS):
            found.append(await self._asked.receive())
        with suppress(trio.WouldBlock):
            while True:
                found.append(self._asked.receive_nowait())
        turns = [each for each in found if isinstance(each, AskedTurn)]
        last = found[-1] if found else 0
        return AskedTurns(turns=turns, stalled=last if isinstance(last, int) else 0)


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


@dataclass(frozen=True)
class Made:
    """A submission that is being made."""

    order: SubmissionOrder
    path: Path
    prompts: dict[int, bytes]
    """Signed prompts of the groups of served environments."""
    finished: FinishedRollouts
    playing: Playing
    slots: int
    """The engine's slots when it began."""
    policies: set[int]
    """Numbers of the policies that it may have tokens of."""

    def turns(self) -> list[list[bytes]]:
        """[rows] Signed turns; the first row of a group has the prompt's, too."""
        size = self.order.sampling.group_size
        return [
            [self.prompts[row // size]] * (row % size == 0 and row // size in self.prompts)
            + self.finished.turns.get(row, [])
            for row in range(self.order.rows())
        ]

    def may_swap(self, policy: CheckpointReference) -> bool:
        """Whether a policy may sample its next tokens."""
        later = policy.lineage == self.order.policy.lineage and policy.step > max(self.policies)
        return later and len(self.policies) <= self.order.sampling.swaps_max
