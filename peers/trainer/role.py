"""The trainer role: open steps, collect accepted submissions, train, publish.

Four tasks run concurrently. The `Collector` turns the validators' verdicts into a durable
pool of accepted submissions. `Orders` keeps the right step open. The main loop takes batches from
the pool and has a child process step the optimiser. Beside the next step's training, the new policy
is written and published.

A batch is recorded before anything of it leaves this disk, and a policy is durable before it is
announced. After a crash the trainer loads the newest training state and repeats the steps since
then with their recorded batches, which gives the same policies bit for bit.
So a crash at any instant loses nothing and consumes nothing twice.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import trio

from peers.evaluation.during import Evaluations
from peers.trainer.accepted import AcceptedSubmissions
from peers.trainer.alarms import RECENT_STEPS, Alarm, Alarms
from peers.trainer.background import Background
from peers.trainer.batches import Batches
from peers.trainer.child import SERVICE, START_DEADLINE_SECONDS, TrainerChild
from peers.trainer.collector import Collector
from peers.trainer.curricula import Curricula
from peers.trainer.forecast import Forecast
from peers.trainer.mixture import environment_figures
from peers.trainer.orders import Orders
from peers.trainer.outcomes import Outcomes
from peers.trainer.pool import Accepted
from peers.trainer.precedence import Precedence
from peers.trainer.progress import STEPS_REMEMBERED, Pause, Progress
from peers.trainer.publishing import NotAsLogged, Publisher
from peers.trainer.refusals import Refusals
from peers.trainer.saving import SavedStates, State
from peers.trainer.settings import TrainerSettings
from peers.trainer.store import Batch, TrainerStore
from swarm.envelope import Envelope
from swarm.errors import SwarmError, UserError
from swarm.gossip.topics import RUN, WORK
from swarm.jobs.memory import MemoryPlan, fullest, shown
from swarm.jobs.training import Figures, TrainingService, TrainingSetup
from swarm.ledger.entries import CheckpointPublished, Consumed
from swarm.manifest import RunManifest
from swarm.node.run_node import RunNode
from swarm.run.bounds import check_batch
from swarm.run.manifest import manifest_in
from swarm.world import ChildDied, client
from swarm.world.restarts import Restarts

FINAL_WORD_SECONDS = 2.0
"""Time for the last order to spread before the trainer leaves."""


@dataclass
class _StepTimes:
    """Start times of a step's parts, in the world's seconds."""

    began: float
    training: float = 0.0
    """When its last batch was complete."""
    trained: float = 0.0
    handed_over: float = 0.0
    """When the next step could begin: the policy was copied, to be written and published."""


@dataclass(frozen=True)
class _Trained:
    """A batch and the child's results on it."""

    batch: list[Accepted]
    figures: Figures
    """The learner's metrics."""
    record: Batch
    """The batch's entries for the log."""
    group_tokens: list[list[int]]
    """[submissions][groups] Completion tokens."""


class TrainerRole:
    """Trains. Must run on a peer whose key the manifest names as a trainer.

    Its settings are those of `peers.trainer.settings`.
    """

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)
    Settings: ClassVar[type[TrainerSettings]] = TrainerSettings
    rank_module: ClassVar[str] = "peers.trainer.follower"

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._node = peer.node
        self._run = peer.run
        self._events = peer.node.events
        self._settings = settings = peer.node.settings.of("trainer", TrainerSettings)
        trusted = peer.trusted_part("trainer")
        check_batch(self._run.manifest, f"run {self._run.id}")
        self._restarts = Restarts(self._events, "trainer")
        self._alarms = Alarms(settings.limits)
        self._rollbacks = 0
        """Rollbacks in this process."""
        self._begun = False
        """Whether this process began or resumed the run: a restarted child then continues from the
        states on this disk without `--resume`."""
        self._carried = False
        """Whether the submissions left in the pool at the end of the run are logged."""
        self._ranks = 1
        """Processes that train together: the child, and ranks that this peer cannot restart."""
        self._taught: Envelope | None = None
        """The run manifest that the child follows."""
        self._progress = progress = Progress(peer.run)
        self._store = store = TrainerStore(peer.node.disk.database("trainer.sqlite"))
        self._states = SavedStates(peer.node.disk, peer.node.world, settings, progress)
        self._forecast = forecast = Forecast()
        self._outcomes = outcomes = Outcomes(trusted, self._events, progress, forecast)
        refusals = Refusals(peer, trusted, progress)
        self._accepted = accepted = AcceptedSubmissions(
            peer, store, progress, forecast, outcomes, refusals
        )
        self._pause = pause = Pause(peer, progress)
        precedence = Precedence(peer, store, refusals)
        self._collector = Collector(peer, progress, forecast, outcomes, accepted, precedence, pause)
        self._publisher = publisher = Publisher(peer, trusted, progress, settings.mirrors)
        self._curricula = curricula = Curricula(self._events)
        self._evaluations = Evaluations(peer, settings)
        self._orders = Orders(
            peer, store, progress, forecast, accepted.pool, publisher, pause, curricula
        )
        self._batches = Batches(
            peer,
            trusted,
            progress,
            forecast,
            accepted,
            self._orders,
            pause,
            settings.starved_seconds,
        )
        peer.gossip.listen(RunManifest, lambda _: progress.changed.touch())

    async def run(self) -> None:
        """Train until every step of the run is done."""
        await self._store.open()
        async with trio.open_nursery() as nursery:
            await self._restarts.run(lambda: self._live(nursery))
            nursery.cancel_scope.cancel()

    async def _live(self, nursery: trio.Nursery) -> None:
        """Train while the child lives, from the newest durable state.

        Collecting, ordering and publishing run in `nursery`, which outlives the child.
        """
        self._publishing = Background(nursery)
        try:
            await self._publishing.run(lambda: self._live_with_child(nursery))
        except ChildDied as error:
            if self._ranks > 1:
                raise SwarmError(f"{error}; torchrun starts all ranks together again") from error
            raise

    async def _live_with_child(self, nursery: trio.Nursery) -> None:
        async with self._node.compute.child(
            SERVICE,
            TrainingSetup(hardware=self._settings.hardware),
            name="trainer",
            interpreter=self._settings.interpreter or None,
            start_deadline_seconds=START_DEADLINE_SECONDS,
        ) as process:
            service = client(TrainingService, process)
            child = TrainerChild(service, self._node.disk, self._settings)
            await self._begin(child)
            if not self._orders.opened:
                await self._orders.open_first()
                self._collector.start(nursery)
                nursery.start_soon(self._orders.run)
                nursery.start_soon(self._evaluations.run)
            while await self._take_step(child):
                pass
            await self._publishing.idle()
            await self._finish(child)

    # --- beginning ---------------------------------------------------------------------------

    async def _begin(self, child: TrainerChild) -> None:
        """Begin the run from the base policy, or continue from the newest durable state."""
        states = self._states.all()
        newest = states[-1] if states else None
        if newest is not None:
            self._continue_lineage(newest.lineage)
        self._taught = self._progress.versions.follow(newest.step if newest else 0)
        manifest = manifest_in(self._taught)
        if newest is not None and not self._node.settings.resume and not self._begun:
            raise UserError(
                f"this home has a trained state of step {newest.step} already; "
                "start the trainer with --resume, or with another --home"
            )
        self._peer.status.doing = "loading"
        self._begun = True
        self._publisher.begin_life()
        self._ranks = await child.record_to(self._run.id, manifest)
        if newest is not None:
            await self._plan(child, manifest)
            await self._resume(child, manifest, newest)
            return
        if not self._orders.opened:
            await self._accepted.load()
        if self._settings.prepare_base:
            self._peer.status.doing = "preparing the base policy"
            measured = await child.prepare_base()
            self._events.emit("trainer.evaluated", moment="before", **msgspec.to_builtins(measured))
        await self._plan(child, manifest)
        await child.start(manifest)
        self._progress.advance(0)
        await self._save_and_publish(child, 0)

    async def _save_and_publish(self, child: TrainerChild, step: int) -> None:
        """Write the state of policy `step`, which begins a lineage, and publish it."""
        state = State(self._progress.lineage, step)
        await self._states.begin(child, await self._publisher.clear_export(step), state)
        await self._states.finish(child, state)
        self._publisher.exported(step)
        await self._publisher.publish(child, step, reward=0.0)

    async def _plan(self, child: TrainerChild, manifest: RunManifest) -> None:
        """Say what the trainer will hold in memory; raises `UserError` if it does not fit."""
        found = await child.plan(manifest)
        self._events.emit(
            "trainer.planned",
            parameters=found.parameters,
            ranks=found.ranks,
            pass_tokens=found.tokens,
            device_bytes=found.device_bytes,
            device_limit=found.device_limit,
            host_bytes=found.host_bytes,
            host_limit=found.host_limit,
            device_parts=_words(found, "device"),
            host_parts=_words(found, "host"),
            problem=found.problem,
        )
        if found.problem and self._settings.memory_check == "refuse":
            raise UserError(found.problem)

    def _continue_lineage(self, lineage: int) -> None:
        """Restore the lineage and the version of the run that each of its steps follows."""
        if lineage != self._progress.lineage:
            self._progress.versions.clear()
        self._progress.lineage = lineage
        self._progress.versions.restore(self._store.newest_orders(lineage, STEPS_REMEMBERED))

    async def _resume(self, child: TrainerChild, manifest: RunManifest, state: State) -> None:
        """Continue from a training state, and repeat the steps that it lacks."""
        step = state.step
        orders = self._store.newest_orders(state.lineage, 1)
        used = orders[0].checkpoint if orders else None
        await self._publisher.fetch_back(used)
        consumed = await child.resume(manifest, state.folder, self._publisher.folders())
        self._states.loaded(state)
        self._progress.advance(step)
        batches = self._store.batches_from(state.lineage, step - 1)
        before = batches.pop(step - 1, None)
        lacking = {each.submission for batch in batches.values() for each in batch.consumed}
        oldest = step - self._run.manifest.schedule.max_staleness
        logged: dict[bytes, int] = {}
        """Step that consumed each submission, for those young enough to be offered again."""
        for entry in self._outcomes.entries(self._peer.peer_id):
            if isinstance(entry, CheckpointPublished):
                self._publisher.recall(entry)
            elif isinstance(entry, Consumed) and set(entry.outcomes) != {"carried"}:
                logged |= {entry.submission: entry.step} if entry.step >= oldest else {}
        done = {digest: at for digest, at in logged.items() if digest not in lacking}
        known = self._accepted.remember_consumed(dict.fromkeys(consumed, step) | done)
        self._events.emit("trainer.resumed", step=step, consumed=known)
        if before is not None:
            await self._outcomes.complete(
                [entry for entry in before.consumed if entry.submission not in logged]
            )
        self._accepted.set_aside(lacking)
        await self._accepted.settle_batches(consumed)
        if not self._orders.opened:
            await self._accepted.load()
        try:
            if not self._publisher.is_logged(step) or step not in self._publisher.published:
                # It crashed before that, or the policy's folder was deleted.
                await self._publisher.publish(child, step, reward=before.reward if before else 0.0)
            why = await self._repeat(child, batches)
        except NotAsLogged as error:
            why = str(error)
        await self._accepted.give_back(logged=self._outcomes.settled)
        if not why and used is not None and used.step not in self._publisher.published:
            why = f"policy {used.step}, which is in use, is on no disk that this trainer can reach"
        if why:
            await self._roll_back(child, state, why)
            return
        await self._publishing.idle()
        newest = self._progress.step
        reward = (batches.get(newest - 1) or before or Batch([], 0.0)).reward
        await self._publisher.publish(child, newest, reward=reward)

    async def _repeat(self, child: TrainerChild, batches: Mapping[int, Batch]) -> str:
        """Repeat the recorded steps that the state lacks, in order.

        Returns why they cannot be repeated although one of their policies was published, or else
        an empty text.
        """
        newest = self._publisher.newest
        why = ""
        for step, batch in batches.items():
            taken = self._accepted.take_again([each.submission for each in batch.consumed])
            if taken is None or step != self._progress.step:
                why = f"the batch of step {step} is not on this disk"
                break
            times = _StepTimes(began=self._node.world.now(), training=self._node.world.now())
            await self._teach(child, step)
            result = await child.train(step, taken, self._progress.versions)
            if result.unreadable:
                why = f"step {step} cannot be repeated: {result.unreadable[0].reason}"
                break
            times.trained = self._node.world.now()
            if step + 1 > newest:
                trained = _Trained(taken, result.figures, batch, result.group_tokens)
                await self._hand_over(child, step, trained, times)
                continue
            self._progress.advance(step + 1)
            self._accepted.trained(step)
            published = self._publisher.folders().get(step + 1)
            if published is not None and not await child.matches(published):
                why = f"step {step} was repeated and gave another policy than the published one"
                break
            self._events.emit("trainer.step_repeated", step=step)
            logged = self._publisher.is_logged(step + 1)
            if not logged:
                await self._outcomes.consumed(batch.consumed)
            if not logged or published is None:
                await self._publisher.publish(child, step + 1, reward=batch.reward)
        settled = newest <= self._progress.step and not why.endswith("published one")
        return "" if settled else why or f"policy {newest} is newer than all that is recorded"

    # --- one step ----------------------------------------------------------------------------

    async def _take_step(self, child: TrainerChild) -> bool:
        """Turn the newest policy into the next one; False once the run has no further step."""
        if self._progress.over:
            return False
        step = self._progress.step
        await self._teach(child, step)
        times = _StepTimes(began=self._node.world.now())
        self._batches.begin_step()
        trained = await self._train(child, step, times)
        if trained is None:
            return False
        await self._hand_over(child, step, trained, times)
        await self._heed(child, step, self._alarms.look(trained.figures))
        return True

    async def _teach(self, child: TrainerChild, step: int) -> None:
        """Have the child follow the version of the run that a step follows."""
        followed = self._progress.versions.follow(step)
        if followed is not self._taught:
            await child.follow(manifest_in(followed))
            self._taught = followed

    async def _train(self, child: TrainerChild, step: int, times: _StepTimes) -> _Trained | None:
        """Train on the next batch that the child can read; None if no further batch comes."""
        if not self._pause:
            self._peer.status.doing = f"waiting for rollouts of step {step}"
        versions = self._progress.versions
        score = functools.partial(child.score, versions=versions)
        while (batch := await self._batches.next(score)) is not None:
            self._peer.status.doing = f"training step {step}"
            times.training = self._node.world.now()
            result = await child.train(step, batch, versions)
            if not result.unreadable:
                break
            await self._accepted.leave_out({each.index: each.reason for each in result.unreadable})
        else:
            return None
        times.trained = self._node.world.now()
        self._outcomes.filtered(batch)
        self._curricula.observe(batch, versions.manifest_of(step))
        consumed = [
            Consumed(step=step, submission=accepted.digest, outcomes=[*outcomes])
            for accepted, outcomes in zip(batch, result.outcomes, strict=True)
        ]
        record = Batch(consumed, result.figures["reward"])
        return _Trained(batch, result.figures, record, result.group_tokens)

    async def _hand_over(
        self, child: TrainerChild, step: int, trained: _Trained, times: _StepTimes
    ) -> None:
        """Copy the new policy, and have it written and published beside the next step."""
        await self._store.keep_batch(self._progress.lineage, step, trained.record)
        self._accepted.trained(step)
        self._progress.advance(step + 1)
        await self._publishing.idle()
        state = None
        if self._states.due(step + 1):
            state = State(self._progress.lineage, step + 1)
        await self._states.begin(child, await self._publisher.clear_export(step + 1), state)
        times.handed_over = self._node.world.now()
        figures = {**trained.figures, **self._figures(step, trained.batch, times)}
        self._publishing.start(
            lambda: self._publish(child, step, trained, figures, state, times.handed_over)
        )

    async def _publish(
        self,
        child: TrainerChild,
        step: int,
        trained: _Trained,
        figures: Figures,
        state: State | None,
        began: float,
    ) -> None:
        """Wait until the policy after `step` is durable, then log the step and publish it."""
        await self._states.finish(child, state)
        self._publisher.exported(step + 1)
        await self._outcomes.consumed(trained.record.consumed)
        await self._publisher.publish(child, step + 1, reward=trained.record.reward)
        self._restarts.succeeded()
        figures["publish_seconds"] = self._node.world.now() - began
        manifest_of_step = self._progress.versions.manifest_of(step)
        environments = environment_figures(
            trained.batch, trained.group_tokens, manifest_of_step.environments
        )
        for label, level in self._curricula.levels_of(manifest_of_step).items():
            environments.setdefault(label, {})["level"] = level
        evaluated = self._evaluations.take()
        if evaluated is not None:
            policy = evaluated.reference.step
            figures |= {"evaluation": evaluated.reward, "evaluation_policy": policy}
            for found in evaluated.environments:
                environments.setdefault(found.label, {})["evaluation"] = found.reward
        self._events.emit(
            "trainer.step_trained", **{**figures, "environments": environments, "step": step}
        )
        await child.record(step, figures, environments)
        if state is not None:
            await self._accepted.saved(state.step)

    def _figures(self, step: int, batch: list[Accepted], times: _StepTimes) -> Figures:
        """Metrics of a step's time, and of the groups left out of its batch."""
        idle = self._batches.idle
        left_out = sorted(self._outcomes.left_out.items())
        return {
            "submissions": len(batch),
            "seconds": times.handed_over - times.training,
            "ahead_seconds": self._batches.ahead,
            "idle_seconds": sum(idle.values()),
            **{f"idle_{cause}_seconds": waited for cause, waited in idle.items()},
            "idle_weights_seconds": times.handed_over - times.trained,
            "step_seconds": times.handed_over - times.began,
            "keep_rate": self._forecast.keep_rate.value,
            **{f"left_out_{reason}": groups for reason, groups in left_out},
            "staleness": step - min(accepted.verdict.policy for accepted in batch),
        }

    # --- when it goes wrong ------------------------------------------------------------------

    async def _heed(self, child: TrainerChild, step: int, alarms: list[Alarm]) -> None:
        """Report alarms, then act as `alarm_action` says."""
        for alarm in alarms:
            self._events.emit(
                "trainer.alarm",
                step=step,
                sign=alarm.name,
                figure=alarm.figure,
                limit=alarm.limit,
                sentence=alarm.sentence,
            )
        if not alarms or self._settings.alarm_action == "report":
            return
        await self._publishing.idle()
        why = f"step {step}: {'; '.join(alarm.sentence for alarm in alarms)}"
        if self._settings.alarm_action == "rollback":
            good = [state for state in self._states.all() if state.step <= step + 1 - RECENT_STEPS]
            if good and self._rollbacks < self._settings.rollbacks_max:
                await self._roll_back(child, good[-1], why)
                return
        await self._pause.hold(why)

    async def _roll_back(self, child: TrainerChild, state: State, why: str) -> None:
        """Continue from an older state in a new lineage.

        The lineage inherits the consumed list, so nothing is trained on twice. Rollouts of the
        abandoned policies are stale.
        """
        await self._publishing.idle()
        self._rollbacks += 1
        self._peer.status.doing = f"rolling back to step {state.step}"
        lineage, step = self._progress.lineage + 1, state.step
        async with self._orders.reopened():
            await child.roll_back(state.folder, self._publisher.folders(), lineage)
            self._progress.begin_lineage(lineage, step)
            self._publisher.forget_lineage()
            self._forecast.forget_announced()
            self._alarms = Alarms(self._settings.limits)
            await self._accepted.drop_stale()  # the whole pool, which belongs to the old lineage
            self._events.emit("trainer.rolled_back", step=step, lineage=lineage, reason=why)
            await self._save_and_publish(child, step)
        await self._accepted.forget_unsaved()

    # --- ending ------------------------------------------------------------------------------

    async def _finish(self, child: TrainerChild) -> None:
        """Announce that the run is over, and evaluate the final policy."""
        if self._accepted.pool and not self._carried:
            self._carried = True
            await self._outcomes.carried(self._accepted.pool.oldest_first())
        await self._orders.end()
        folder = self._publisher.newest_folder()
        if self._settings.evaluate:
            self._peer.status.doing = "evaluating"
            measured = await child.evaluate(folder)
            self._events.emit("trainer.evaluated", moment="after", **msgspec.to_builtins(measured))
        self._peer.status.doing = "run over"
        self._events.emit(
            "trainer.run_complete",
            steps=self._progress.policy,
            folder=str(self._node.disk.local_path(folder)),
        )
        await child.end()
        await trio.sleep(FINAL_WORD_SECONDS)


def _words(found: MemoryPlan, memory: str) -> list[str]:
    """The parts of a rank's memory in its fullest phase, each with its size."""
    return [f"{part.name} {shown(part.bytes)}" for part in fullest(found.parts, memory)]
