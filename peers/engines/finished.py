"""The finished rollouts of a submission that is being generated, kept for a restarted child.

An engine's process may die in the middle of a submission. The file beside the submission's path
keeps what was finished by then, with its proofs, so the next child generates only the rest. The
proofs are built beside generation, in another thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import blake3
import msgspec
import trio

from peers.engines.episodes import SpanStates
from peers.proofs import toploc
from swarm.errors import DECODE_ERRORS
from swarm.jobs import SubmissionOrder
from swarm.rollouts.rollout import Rollout

WRITE_SECONDS = 1.0
"""Time between two writes, so a submission that takes less is never written twice."""

SUFFIX = ".finished"


class _Row(msgspec.Struct, array_like=True):
    row: int
    rollout: Rollout
    proof: bytes
    turns: list[bytes] = []


class FinishedRollouts:
    """Rollouts and their proofs by row of the submission."""

    def __init__(self, submission: Path, order: SubmissionOrder) -> None:
        """Read what an earlier child finished of the same order."""
        self._path = submission.with_name(submission.name + SUFFIX)
        self._key = blake3.blake3(msgspec.msgpack.encode(order)).digest()
        self.rollouts: dict[int, Rollout] = {}
        self.proofs: dict[int, bytes] = {}
        self.turns: dict[int, list[bytes]] = {}
        """An environment peer's signed turns after the prompt, by row; of unfinished rows, too."""
        self.seconds_proofs = 0.0
        self._unproven: deque[tuple[int, Sequence[SpanStates]]] = deque()
        self._begun = False
        """Whether the file exists and is this order's."""
        for each in self._read():
            self.rollouts[each.row], self.proofs[each.row] = each.rollout, each.proof
            if each.turns:
                self.turns[each.row] = each.turns

    def add(self, row: int, rollout: Rollout, states: Sequence[SpanStates]) -> None:
        """Add a finished rollout and the hidden states of its spans. Any thread may call it."""
        self.rollouts[row] = rollout
        self._unproven.append((row, states))

    async def keep(self) -> None:
        """Every `WRITE_SECONDS`, write what was added, in another thread; until cancelled."""
        while True:
            await trio.sleep(WRITE_SECONDS)
            await trio.to_thread.run_sync(self.write)

    def write(self) -> None:
        """Build the proofs of the rollouts added since the last call, and write them."""
        self._write([self._packed(row) for row in self.prove()])

    def prove(self) -> list[int]:
        """Build the proofs of the rollouts added since the last call; returns their rows."""
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
        return [row for row, _ in added]

    def policies(self) -> list[int]:
        """Numbers of the policies that sampled the finished rollouts, ascending."""
        return sorted({span.policy for each in self.rollouts.values() for span in each.spans})

    def drop(self) -> None:
        """Forget what an earlier child finished."""
        self.rollouts.clear()
        self.proofs.clear()
        self.turns.clear()
        self.forget()
        self._begun = False

    def forget(self) -> None:
        """Remove the file; call it once the submission is written."""
        self._path.unlink(missing_ok=True)

    def _packed(self, row: int) -> bytes:
        turns = self.turns.get(row, [])
        return msgspec.msgpack.encode(_Row(row, self.rollouts[row], self.proofs[row], turns))

    def _write(self, bodies: list[bytes]) -> None:
        """Append rows, each after its length. Not durable: it need only outlive this process."""
        if not bodies:
            return
        with self._path.open("ab" if self._begun else "wb") as file:
            if not self._begun:
                file.write(self._key)
            file.write(b"".join(len(body).to_bytes(4, "big") + body for body in bodies))
        self._begun = True

    def _read(self) -> Iterator[_Row]:
        """The file's rows, up to one that was cut off, which is removed."""
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return
        if not raw.startswith(self._key):
            return
        at = len(self._key)
        while at + 4 <= len(raw):
            end = at + 4 + int.from_bytes(raw[at : at + 4], "big")
            try:
                row = msgspec.msgpack.decode(raw[at + 4 : end], type=_Row)
            except DECODE_ERRORS:
                break
            at = end
            yield row
        with self._path.open("r+b") as file:
            file.truncate(at)
        self._begun = True
