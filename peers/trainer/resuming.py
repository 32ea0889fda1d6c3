"""Resuming from a training state: `Resumption` repeats lost steps, `Lineages` abandons them."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from peers.trainer.accepted import AcceptedSubmissions
from peers.trainer.child import accepted_submissions, start_training
from peers.trainer.collapse import COLLAPSE, RECENT_STEPS, UNREWARDED, Alarms
from peers.trainer.orders import Orders
from peers.trainer.progress import hold
from peers.trainer.publishing import NotAsLogged, Publisher
from peers.trainer.saving import State
from peers.trainer.settings import TrainerSettings
from peers.trainer.store import Batch
from peers.trainer.training import StepTimes, TrainedStep, Training, logged_figures
from swarm.jobs.training import Compare, Figures, Resume, RollBack, TrainingService, TrainStep
from swarm.ledger.entries import CheckpointPublished, Consumed
from swarm.shardcast.held import Held
from swarm.wire.manifest import RunManifest

LINEAGES_LEFT = 15
"""Lineages that a takeover leaves out: the trainer before may have rolled back unheard."""


@dataclass(eq=False)
class Resumption:
    """Brings the child to where the run was."""

    settings: TrainerSettings
    accepted: AcceptedSubmissions
    publisher: Publisher
    training: Training

    def __post_init__(self) -> None:
        self.peer, self.progress = self.accepted.peer, self.accepted.progress
        self.store = self.accepted.store

    async def resume(
        self, child: TrainingService, manifest: RunManifest, state: State, *, load: bool
    ) -> str:
        """Continue from a training state, and repeat the steps that it lacks.

        `load`: read the pool from this disk first. Returns why the run must be rolled back to the
        state instead, or else an empty text."""
        step = state.step
        orders = self.store.newest_orders(state.lineage, 1)
        used = orders[0].checkpoint if orders else None
        oldest = step - self.peer.run.manifest.schedule.max_staleness
        await self.publisher.fetch_back(oldest, used)
        job = Resume(
            start=start_training(self.settings, manifest),
            folder=self.publisher.local(state.folder),
            policies=self.publisher.folders(),
        )
        consumed = set((await child.resume(job)).consumed)
        self.publisher.states.loaded(state)
        self.progress.advance(step)
        # Of the batch before the state the weights are durable, though perhaps not the log. Those
        # after it are repeated, whatever a log says of them.
        batches = self.store.batches_from(state.lineage, step - 1)
        before = batches.pop(step - 1, None)
        lacking = {each.submission for batch in batches.values() for each in batch.consumed}
        logged: dict[bytes, int] = {}
        """Step that consumed each submission, for those young enough to be offered again."""
        for entry in self.accepted.log.entries(self.peer.peer_id):
            if isinstance(entry, CheckpointPublished):
                self.publisher.recall(entry)
            elif isinstance(entry, Consumed) and set(entry.outcomes) != {"carried"}:
                logged |= {entry.submission: entry.step} if entry.step >= oldest else {}
        # Known before the pool is read, or a submission that was consumed would be trained on
        # again.
        done = {digest: at for digest, at in logged.items() if digest not in lacking}
        known = self.accepted.remember_consumed(dict.fromkeys(consumed, step) | done)
        self.peer.node.events.emit("trainer.resumed", step=step, consumed=known)
        if before is not None:
            await self.accepted.log.complete(
                [entry for entry in before.consumed if entry.submission not in logged]
            )
        # Also before that: the steps to repeat need the very submissions that they took.
        self.accepted.set_aside(lacking)
        await self.accepted.settle_batches(consumed)
        if load:
            await self.accepted.load()
        try:
            if not self.publisher.is_logged(step) or step not in self.progress.published:
                # It crashed before that, or the policy's folder was deleted.
                await self.publisher.publish(child, step, reward=before.reward if before else 0.0)
            why = await self._repeat(child, batches)
        except NotAsLogged as error:
            why = str(error)
        await self.accepted.give_back(logged=self.accepted.log.settled)
        if not why and used is not None and used.step not in self.progress.published:
            why = f"policy {used.step}, which is in use, is on no disk that this trainer can reach"
        if why:
            return why
        await self.training.idle()
        newest = self.progress.step
        reward = (batches.get(newest - 1) or before or Batch([], 0.0)).reward
        await self.publisher.publish(child, newest, reward=reward)
        return ""

    async def _repeat(self, child: TrainingService, batches: Mapping[int, Batch]) -> str:
        """Repeat recorded steps; returns why not, if one's policy was published; else empty."""
        newest = self.publisher.newest
        why = ""
        for step, batch in batches.items():
            taken = self.accepted.take_again([each.submission for each in batch.consumed])
            if taken is None or step != self.progress.step:
                why = f"the batch of step {step} is not on this disk"
                break
            now = self.peer.node.world.now()
            times = StepTimes(began=now, training=now)
            await self.training.apply_terms(child, step)
            given = accepted_submissions(taken, self.progress.versions, self.peer.node.disk)
            job = TrainStep(step=step, submissions=given, values=list(batch.values))
            result = await child.train(job)
            if result.unreadable:
                why = f"step {step} cannot be repeated: {result.unreadable[0].reason}"
                break
            times.trained = self.peer.node.world.now()
            if step + 1 > newest:
                trained = TrainedStep(taken, result.figures, batch, result.environments)
                await self.training.hand_over(child, step, trained, times)
                continue
            self.progress.advance(step + 1)
            self.accepted.trained(step)
            published = self.publisher.folders().get(step + 1)
            if published is not None and not await child.compare(Compare(folder=published)):
                why = f"step {step} was repeated and gave another policy than the published one"
                break
            self.peer.node.events.emit("trainer.step_repeated", step=step)
            logged = self.publisher.is_logged(step + 1)
            if not logged or published is None:
                await self.publisher.publish(
                    child,
                    step + 1,
                    reward=batch.reward,
                    figures=logged_figures(result.figures),
                    consumed=() if logged else batch.consumed,
                )
        settled = newest <= self.progress.step and not why.endswith("published one")
        return "" if settled else why or f"policy {newest} is newer than all that is recorded"


@dataclass(eq=False)
class Lineages:
    """Begins a lineage with an older state: after an alarm, or in another trainer's place."""

    settings: TrainerSettings
    orders: Orders
    accepted: AcceptedSubmissions
    publisher: Publisher
    training: Training
    rollbacks: int = 0
    """Rollbacks in this process."""

    def __post_init__(self) -> None:
        self.peer, self.progress = self.accepted.peer, self.accepted.progress
        self.alarms = Alarms(self.settings.limits)

    async def heed(self, child: TrainingService, figures: Figures) -> None:
        """Report the alarms that a trained step raises, then act as `alarm_action` says."""
        step = self.progress.step - 1
        alarms = self.alarms.look(figures)
        for alarm in alarms:
            self.peer.node.events.emit(
                "trainer.alarm",
                step=step,
                sign=alarm.name,
                figure=alarm.figure,
                limit=alarm.limit,
                sentence=alarm.sentence,
            )
        alarms = [alarm for alarm in alarms if alarm.name != UNREWARDED]
        action = self.settings.alarm_action
        if action == "recover":
            alarms = [each for each in alarms if each.name == COLLAPSE and not self.rollbacks]
        if not alarms or action == "report":
            return
        await self.training.idle()
        why = f"step {step}: {'; '.join(alarm.sentence for alarm in alarms)}"
        if action != "pause":
            good = [
                state
                for state in self.publisher.states.all()
                if state.step <= step + 1 - RECENT_STEPS
            ]
            if good and self.rollbacks < self.settings.rollbacks_max:
                then = "; a further collapse is only reported" if action == "recover" else ""
                await self.roll_back(child, good[-1], why + then)
                return
        if action != "recover":
            await hold(self.peer, self.progress, why)

    async def roll_back(self, child: TrainingService, state: State, why: str) -> None:
        """Continue from an older state in a new lineage, which inherits the consumed list."""
        await self.training.idle()
        self.rollbacks += 1
        self.peer.status.doing = f"rolling back to step {state.step}"
        lineage = self.progress.lineage + 1
        async with self._beginning(child, lineage, state.step, why):
            folder, policies = self.publisher.local(state.folder), self.publisher.folders()
            await child.roll_back(RollBack(folder=folder, policies=policies, lineage=lineage))

    async def take_over(
        self, child: TrainingService, manifest: RunManifest, policy: Held, newest: int
    ) -> None:
        """Continue from a published policy above lineage `newest`, led by a trainer before."""
        self.progress.advance(policy.manifest.step)
        await self.accepted.load()  # of a home that has trained before: all of it is stale
        # Of two standbys that take over at once, the one that prevails has the later lineage.
        places = max(1, len(self.peer.run.manifest.standbys))
        ahead = places - min(self.peer.run.standby_place, places - 1)
        lineage, step = newest + ahead * (LINEAGES_LEFT + 1), policy.manifest.step
        why = f"took over from the trainer of lineage {newest}"
        async with self._beginning(child, lineage, step, why):
            folder = self.publisher.local(policy.folder)
            await child.start(start_training(self.settings, manifest, folder, step, lineage))

    @asynccontextmanager
    async def _beginning(
        self, child: TrainingService, lineage: int, step: int, why: str
    ) -> AsyncIterator[None]:
        """Begin a lineage with policy `step`, loaded by the block; abandoned rollouts are stale."""
        async with self.orders.reopened():
            yield
            self.progress.begin_lineage(lineage, step)
            self.publisher.forget_lineage()
            self.accepted.forecast.forget_announced()
            self.alarms.forget()
            await self.accepted.drop_stale()  # the whole pool, which belongs to the old lineage
            self.peer.node.events.emit(
                "trainer.rolled_back", step=step, lineage=lineage, reason=why
            )
            await self.publisher.publish_first(child, step)
        await self.accepted.forget_unsaved()
