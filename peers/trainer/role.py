"""The trainer role: open steps, collect accepted submissions, train, publish.

Three tasks run concurrently. The `Collector` turns the validators' verdicts into a durable
pool of accepted submissions. `Orders` keeps the right step open. This file takes batches from the
pool, has a child process step the optimiser, and publishes the new policy: weights, optimiser,
random states and the list of consumed submissions are durable before anything is announced, so a
crash at any instant loses nothing and repeats nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec
import trio

from peers.trainer.accepted import AcceptedSubmissions
from peers.trainer.alarms import RECENT_STEPS, Alarm, Alarms
from peers.trainer.batches import Batches
from peers.trainer.child import SERVICE, START_DEADLINE_SECONDS, TrainerChild
from peers.trainer.collector import Collector
from peers.trainer.filters import environment_rewards
from peers.trainer.forecast import Forecast
from peers.trainer.orders import Orders
from peers.trainer.outcomes import Outcomes
from peers.trainer.pool import Accepted
from peers.trainer.precedence import Precedence
from peers.trainer.progress import STEPS_REMEMBERED, Pause, Progress
from peers.trainer.publishing import Publisher
from peers.trainer.refusals import Refusals
from peers.trainer.saving import SavedStates, State
from peers.trainer.settings import TrainerSettings
from peers.trainer.store import TrainerStore
from swarm.envelope import Envelope
from swarm.errors import SwarmError, UserError
from swarm.gossip.topics import RUN, WORK
from swarm.jobs.training import Figures, TrainingService, TrainingSetup
from swarm.ledger.entries import CheckpointPublished, Consumed
from swarm.messages import RunManifest
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
    published: float = 0.0


@dataclass(frozen=True)
class _Trained:
    """A batch and the child's results on it."""

    batch: list[Accepted]
    figures: Figures
    """The learner's metrics."""
    consumed: list[Consumed]
    """The batch's entries for the log."""


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
        self._states = SavedStates(peer.node.disk, settings, progress)
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
        self._orders = Orders(peer, store, progress, forecast, accepted.pool, publisher, pause)
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

        Collecting and ordering run in `nursery`, which outlives the child.
        """
        try:
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
                    await self._accepted.load()
                    await self._orders.open_first()
                    self._collector.start(nursery)
                    nursery.start_soon(self._orders.run)
                while await self._take_step(child):
                    pass
                await self._finish(child)
        except ChildDied as error:
            if self._ranks > 1:
                raise SwarmError(f"{error}; torchrun starts all ranks together again") from error
            raise

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
            await self._resume(child, manifest, newest)
            return
        if self._settings.prepare_base:
            self._peer.status.doing = "preparing the base policy"
            measured = await child.prepare_base()
            self._events.emit("trainer.evaluated", moment="before", **msgspec.to_builtins(measured))
        await child.start(manifest)
        await self._states.begin(child, 0)
        await self._states.finish(child)
        await self._publisher.publish(child, 0, reward=0.0)

    def _continue_lineage(self, lineage: int) -> None:
        """Restore the lineage and the version of the run that each of its steps follows."""
        if lineage != self._progress.lineage:
            self._progress.versions.clear()
        self._progress.lineage = lineage
        self._progress.versions.restore(self._store.newest_orders(lineage, STEPS_REMEMBERED))

    async def _resume(self, child: TrainerChild, manifest: RunManifest, state: State) -> None:
        """Continue from a training state, and log the submissions of its step if they are not."""
        step = state.step
        consumed = await child.resume(manifest, state.folder, self._publisher.folders())
        oldest = step - self._run.manifest.schedule.max_staleness
        logged: dict[bytes, int] = {}
        """Step that consumed each submission, for those young enough to be offered again."""
        for entry in self._outcomes.entries(self._peer.peer_id):
            if isinstance(entry, CheckpointPublished):
                self._publisher.recall(entry)
            elif isinstance(entry, Consumed) and set(entry.outcomes) != {"carried"}:
                logged |= {entry.submission: entry.step} if entry.step >= oldest else {}
        known = self._accepted.remember_consumed(dict.fromkeys(consumed, step) | logged)
        self._events.emit("trainer.resumed", step=step, consumed=known)
        last, reward = self._store.consumed(step)
        await self._outcomes.complete([e for e in last if e.submission not in logged])
        await self._accepted.settle_batch(consumed)
        await self._publisher.publish(child, step, reward=reward)

    # --- one step ----------------------------------------------------------------------------

    async def _take_step(self, child: TrainerChild) -> bool:
        """Turn the newest policy into the next one; False once the run has no further step."""
        if self._progress.over:
            return False
        step = self._progress.policy
        followed = self._progress.versions.follow(step)
        if followed is not self._taught:
            await child.follow(manifest_in(followed))
            self._taught = followed
        times = _StepTimes(began=self._node.world.now())
        self._batches.begin_step()
        trained = await self._train(child, step, times)
        if trained is None:
            return False
        await self._store.keep_consumed(step + 1, trained.consumed, trained.figures["reward"])
        await self._states.begin(child, step + 1)
        await self._publisher.export(child, step + 1)  # while the state is written
        await self._states.finish(child)
        await self._outcomes.consumed(trained.consumed)
        await self._publisher.publish(child, step + 1, reward=trained.figures["reward"])
        self._restarts.succeeded()
        times.published = self._node.world.now()
        figures = {**trained.figures, **self._figures(step, trained.batch, times)}
        rewards = environment_rewards(
            [accepted.verdict for accepted in trained.batch],
            self._progress.versions.manifest_of(step).environments,
        )
        self._events.emit(
            "trainer.step_trained", **{**figures, "environment_rewards": rewards, "step": step}
        )
        await child.record(step, figures, rewards)
        await self._accepted.consumed()
        await self._heed(child, step, self._alarms.look(trained.figures))
        return True

    async def _train(self, child: TrainerChild, step: int, times: _StepTimes) -> _Trained | None:
        """Train on the next batch that the child can read; None if no further batch comes."""
        if not self._pause:
            self._peer.status.doing = f"waiting for rollouts of step {step}"
        while (batch := await self._batches.next()) is not None:
            self._peer.status.doing = f"training step {step}"
            times.training = self._node.world.now()
            result = await child.train(step, batch, self._progress.versions)
            if not result.unreadable:
                break
            await self._accepted.leave_out({each.index: each.reason for each in result.unreadable})
        else:
            return None
        times.trained = self._node.world.now()
        self._outcomes.filtered(batch)
        consumed = [
            Consumed(step=step, submission=accepted.digest, outcomes=[*outcomes])
            for accepted, outcomes in zip(batch, result.outcomes, strict=True)
        ]
        return _Trained(batch, result.figures, consumed)

    def _figures(self, step: int, batch: list[Accepted], times: _StepTimes) -> Figures:
        """Metrics of a step's time, and of the groups left out of its batch."""
        idle = self._batches.idle
        left_out = sorted(self._outcomes.left_out.items())
        return {
            "submissions": len(batch),
            "seconds": times.published - times.training,
            "idle_seconds": sum(idle.values()),
            **{f"idle_{cause}_seconds": waited for cause, waited in idle.items()},
            "idle_weights_seconds": times.published - times.trained,
            "step_seconds": times.published - times.began,
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
        self._rollbacks += 1
        self._peer.status.doing = f"rolling back to step {state.step}"
        lineage, step = self._progress.lineage + 1, state.step
        async with self._orders.reopened():
            await child.roll_back(state.folder, self._publisher.folders(), lineage)
            self._progress.lineage = lineage
            self._progress.versions.clear()
            self._publisher.forget_lineage()
            self._forecast.forget_announced()
            self._alarms = Alarms(self._settings.limits)
            await self._accepted.drop_stale()  # the whole pool, which belongs to the old lineage
            await self._states.begin(child, step)
            await self._states.finish(child)
            self._events.emit("trainer.rolled_back", step=step, lineage=lineage, reason=why)
            await self._publisher.publish(child, step, reward=0.0)

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
