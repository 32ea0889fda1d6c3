"""Resuming: continue from a training state, and repeat the recorded steps that it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peers.trainer.accepted import AcceptedSubmissions, Outcomes
from peers.trainer.child import TrainerChild
from peers.trainer.progress import Progress
from peers.trainer.publishing import NotAsLogged, Publisher
from peers.trainer.saving import SavedStates, State
from peers.trainer.steps import Steps, StepTimes, TrainedStep, logged_figures
from peers.trainer.store import Batch, TrainerStore
from swarm.ledger.entries import CheckpointPublished, Consumed
from swarm.node.run_node import RunNode
from swarm.wire.manifest import RunManifest


@dataclass(eq=False)
class Resumption:
    """Brings the child to where the run was."""

    peer: RunNode
    progress: Progress
    store: TrainerStore
    states: SavedStates
    outcomes: Outcomes
    accepted: AcceptedSubmissions
    publisher: Publisher
    steps: Steps

    async def resume(
        self, child: TrainerChild, manifest: RunManifest, state: State, *, load: bool
    ) -> str:
        """Continue from a training state, and repeat the steps that it lacks.

        `load`: read the pool from this disk first. Returns why the run must be rolled back to the
        state instead, or else an empty text.
        """
        step = state.step
        orders = self.store.newest_orders(state.lineage, 1)
        used = orders[0].checkpoint if orders else None
        await self.publisher.fetch_back(used)
        consumed = await child.resume(manifest, state.folder, self.publisher.folders())
        self.states.loaded(state)
        self.progress.advance(step)
        batches = self.store.batches_from(state.lineage, step - 1)
        before = batches.pop(step - 1, None)
        lacking = {each.submission for batch in batches.values() for each in batch.consumed}
        oldest = step - self.peer.run.manifest.schedule.max_staleness
        logged: dict[bytes, int] = {}
        """Step that consumed each submission, for those young enough to be offered again."""
        for entry in self.outcomes.entries(self.peer.peer_id):
            if isinstance(entry, CheckpointPublished):
                self.publisher.recall(entry)
            elif isinstance(entry, Consumed) and set(entry.outcomes) != {"carried"}:
                logged |= {entry.submission: entry.step} if entry.step >= oldest else {}
        done = {digest: at for digest, at in logged.items() if digest not in lacking}
        known = self.accepted.remember_consumed(dict.fromkeys(consumed, step) | done)
        self.peer.node.events.emit("trainer.resumed", step=step, consumed=known)
        if before is not None:
            await self.outcomes.complete(
                [entry for entry in before.consumed if entry.submission not in logged]
            )
        self.accepted.set_aside(lacking)
        await self.accepted.settle_batches(consumed)
        if load:
            await self.accepted.load()
        try:
            if not self.publisher.is_logged(step) or step not in self.publisher.published:
                # It crashed before that, or the policy's folder was deleted.
                await self.publisher.publish(child, step, reward=before.reward if before else 0.0)
            why = await self._repeat(child, batches)
        except NotAsLogged as error:
            why = str(error)
        await self.accepted.give_back(logged=self.outcomes.settled)
        if not why and used is not None and used.step not in self.publisher.published:
            why = f"policy {used.step}, which is in use, is on no disk that this trainer can reach"
        if why:
            return why
        await self.steps.publishing.idle()
        newest = self.progress.step
        reward = (batches.get(newest - 1) or before or Batch([], 0.0)).reward
        await self.publisher.publish(child, newest, reward=reward)
        return ""

    async def _repeat(self, child: TrainerChild, batches: Mapping[int, Batch]) -> str:
        """Repeat the recorded steps that the state lacks, in order.

        Returns why they cannot be repeated although one of their policies was published, or else
        an empty text.
        """
        newest = self.publisher.newest
        why = ""
        for step, batch in batches.items():
            taken = self.accepted.take_again([each.submission for each in batch.consumed])
            if taken is None or step != self.progress.step:
                why = f"the batch of step {step} is not on this disk"
                break
            now = self.peer.node.world.now()
            times = StepTimes(began=now, training=now)
            await self.steps.apply_terms(child, step)
            result = await child.train(step, taken, self.progress.versions, batch.values)
            if result.unreadable:
                why = f"step {step} cannot be repeated: {result.unreadable[0].reason}"
                break
            if batch.merged and (why := await self.steps.merging.adopt_again(child, batch.merged)):
                why = f"step {step} cannot be repeated: {why}"
                break
            times.trained = self.peer.node.world.now()
            if step + 1 > newest:
                trained = TrainedStep(taken, result.figures, batch, result.group_tokens)
                await self.steps.hand_over(child, step, trained, times)
                continue
            self.progress.advance(step + 1)
            self.accepted.trained(step)
            published = self.publisher.folders().get(step + 1)
            if published is not None and not await child.matches(published):
                why = f"step {step} was repeated and gave another policy than the published one"
                break
            self.peer.node.events.emit("trainer.step_repeated", step=step)
            logged = self.publisher.is_logged(step + 1)
            if not logged:
                await self.outcomes.consumed(batch.consumed)
            if not logged or published is None:
                figures = logged_figures(result.figures)
                await self.publisher.publish(child, step + 1, reward=batch.reward, figures=figures)
        settled = newest <= self.progress.step and not why.endswith("published one")
        return "" if settled else why or f"policy {newest} is newer than all that is recorded"
