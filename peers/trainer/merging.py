"""Merging with other RL trainers: hand out snapshots, and adopt the answers.

The trainer never waits. Every so many steps it hands a snapshot of its policy to a replica, and at
the end of the first step that finds an answer it adds that answer's change to the policy. Which
answer which step has adopted is recorded with the step's batch, so a step that is repeated after a
crash adopts the same one. Snapshots and answers stay on disk until a training state includes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from peers.trainer.child import TrainerChild
from peers.trainer.progress import Progress
from peers.trainer.store import REFUSED, HandedOut, TrainerStore
from swarm.errors import UserError
from swarm.jobs.training import Snapshot
from swarm.node.run_node import RunNode
from swarm.wire.manifest import RunManifest

SILENT_STEPS = 10
"""Fewest steps between two reports that nobody merges with this trainer."""


@dataclass(eq=False)
class Merging:
    """The trainer's side of an exchange folder; does nothing without one."""

    peer: RunNode
    progress: Progress
    store: TrainerStore
    exchange: str
    """The folder; empty: this trainer does not merge."""
    _said: tuple[int, int] = (-1, 0)
    """Snapshot (0: no replica is there) and step of the last report that nobody merges."""

    def check(self, manifest: RunManifest) -> None:
        """Raise `UserError` if the run's policies cannot be merged."""
        if self.exchange and manifest.adapter.rank:
            raise UserError(
                "trainer.exchange is set, but the run trains adapters, whose mean is no adapter of "
                "the mean; omit it, or train whole weights (adapter.rank 0)"
            )

    async def adopt(self, child: TrainerChild, step: int) -> int:
        """Adopt the answer to the newest snapshot in the policy after `step`, if there is one.

        Returns the snapshot's number to be recorded with the step; 0: nothing was adopted.
        """
        if not self.exchange:
            return 0
        open_ = self._newest()
        if open_ is None or open_.merged is not None:
            return 0
        seen = await child.look_for_answer(self.exchange)
        if open_.number not in seen.answers:
            self._say(step, open_.number)
            return 0
        found = await child.adopt(self.exchange, open_.number)
        if found.problem:
            await self.store.settle(open_.number, REFUSED)
            self.peer.node.events.emit(
                "trainer.merge_refused", number=open_.number, reason=found.problem
            )
            return 0
        self.peer.node.events.emit(
            "trainer.merged",
            step=step,
            number=open_.number,
            round=found.round,
            trainers=found.trainers,
            norm=found.norm,
        )
        return open_.number

    async def adopt_again(self, child: TrainerChild, number: int) -> str:
        """Repeat what a recorded step has adopted; return why that is impossible, or nothing."""
        return (await child.adopt(self.exchange, number)).problem

    async def due(self, child: TrainerChild, policy: int) -> Snapshot | None:
        """The snapshot that policy `policy` is to be handed out as, recorded before it is written;
        None: it is not handed out."""
        if not self.exchange:
            return None
        newest = self._newest()
        since = policy - (newest.policy if newest is not None else 0)
        if newest is None or newest.merged is not None:
            seen = await child.look_for_answer(self.exchange)
            if not seen.inner_steps:
                self._say(policy, 0)
                return None
            if since < seen.inner_steps:
                return None
            number = 1 + max(seen.highest, self.store.highest_handed_out())
            newest = HandedOut(number, self.progress.lineage, policy, since, None)
            await self.store.hand_out(newest)
        elif newest.policy != policy:  # the answer is missing; a policy is written only once
            return None
        return Snapshot(
            exchange=self.exchange,
            number=newest.number,
            adopted=self.store.newest_merged(self.progress.lineage),
            steps=newest.steps,
        )

    async def saved(self, child: TrainerChild, step: int) -> None:
        """Delete what the durable state after `step - 1` includes."""
        if self.exchange:
            number = await self.store.drop_settled(self.progress.lineage, step)
            if number:
                await child.tidy_exchange(self.exchange, number)

    def _newest(self) -> HandedOut | None:
        return self.store.newest_handed_out(self.progress.lineage)

    def _say(self, step: int, number: int) -> None:
        """Say that the trainer goes on alone, and repeat it now and then."""
        before, at = self._said
        if number != before or step >= at + SILENT_STEPS:
            self._said = number, step
            self.peer.node.events.emit("trainer.merge_missing", step=step, number=number)
