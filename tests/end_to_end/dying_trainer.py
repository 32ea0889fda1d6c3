"""A trainer that dies by SIGKILL at a chosen moment of a step: `… MOMENT STEPS <peer's flags>`.

It trains STEPS - 1 steps normally. In the next one, at MOMENT, the whole process group dies, as in
a power cut. The trainer's code is unchanged; only its method calls are observed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import typer

from peers.trainer.accepted import AcceptedSubmissions
from peers.trainer.batches import Batches
from peers.trainer.publishing import Publisher
from peers.trainer.saving import SavedStates
from peers.trainer.store import TrainerStore
from swarm.commands.peer import peer
from swarm.node.trusted import TrustedPart
from swarm.shardcast.store import CheckpointStore

BEFORE, AFTER = "before", "after"
MOMENTS: dict[str, tuple[type, str, str]] = {
    "before-outcomes-kept": (TrainerStore, "keep_batch", BEFORE),
    "before-save": (Publisher, "begin_save", BEFORE),
    "after-copy": (Publisher, "begin_save", AFTER),
    "after-save": (SavedStates, "finish", AFTER),
    "after-log": (TrustedPart, "append", AFTER),
    "after-export": (CheckpointStore, "publish", AFTER),
    "after-announcement": (Publisher, "publish", AFTER),
    "before-drop": (AcceptedSubmissions, "discard", BEFORE),
    "after-drop": (AcceptedSubmissions, "discard", AFTER),
}
"""Moments by name. `trainer.step_trained` is emitted between after-announcement and before-drop. A
further moment is `during-save+N`, N ms after the start of the save."""


class Death:
    def __init__(self, moment: str, steps: int) -> None:
        self._steps = steps
        self._batches = 0
        self._watch(Batches, "next", after=self._count)
        if moment.startswith("during-save+"):
            milliseconds = int(moment.removeprefix("during-save+"))
            self._watch(Publisher, "begin_save", before=lambda: self._die_in(milliseconds / 1000))
            return
        owner, method, when = MOMENTS[moment]
        self._watch(owner, method, **{when: self._die})

    def _count(self) -> None:
        self._batches += 1

    def _die(self) -> None:
        if self._batches >= self._steps:
            os.killpg(0, signal.SIGKILL)

    def _die_in(self, seconds: float) -> None:
        def wait() -> None:
            time.sleep(seconds)
            self._die()

        if self._batches >= self._steps:
            threading.Thread(target=wait, daemon=True).start()

    @staticmethod
    def _watch(
        owner: type,
        method: str,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        original: Callable[..., Awaitable[Any]] = getattr(owner, method)

        async def watched(*arguments: Any, **named: Any) -> Any:
            before()
            result = await original(*arguments, **named)
            after()
            return result

        setattr(owner, method, watched)


if __name__ == "__main__":
    _, moment, steps, *flags = sys.argv
    Death(moment, int(steps))
    sys.argv = ["swarm.peer", *flags]
    typer.run(peer)
