"""Training: one step after the other. Each new policy is handed over, to be written and published
beside the next step, and the step's figures are reported."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from peers.evaluation.during import Evaluations
from peers.trainer.accepted import AcceptedSubmissions, TrainerLog
from peers.trainer.child import TrainerChild
from peers.trainer.environments import Curricula, environment_figures
from peers.trainer.merging import Merging
from peers.trainer.orders import Forecast, Orders
from peers.trainer.progress import Progress
from peers.trainer.publishing import Publisher
from peers.trainer.saving import State
from peers.trainer.settings import TrainerSettings
from peers.trainer.steps import Batches, Steps, StepTimes, TrainedStep
from swarm.events import Events
from swarm.jobs.training import Figures
from swarm.ledger.entries import TrainingFigures
from swarm.node.run_node import RunNode


class Training:
    """Takes the steps of the run, with what only they need."""

    def __init__(
        self,
        peer: RunNode,
        settings: TrainerSettings,
        progress: Progress,
        accepted: AcceptedSubmissions,
        orders: Orders,
        publisher: Publisher,
        published: Callable[[], None],
    ) -> None:
        """`published` is called after each published step."""
        self._world, self._progress = peer.node.world, progress
        log, curricula = accepted.log, orders.curricula
        self._batches = Batches(
            peer,
            log.trusted,
            progress,
            accepted.forecast,
            accepted,
            orders,
            settings.starved_seconds,
        )
        merging = Merging(peer, progress, accepted.store, settings.exchange)
        self.steps = Steps(
            peer, progress, self._batches, log, curricula, accepted.state_values, merging
        )
        self.evaluations = Evaluations(peer, settings)
        reports = StepReports(
            peer.node.events,
            progress,
            accepted.forecast,
            log,
            self._batches,
            curricula,
            self.evaluations,
        )
        self.handover = Handover(peer, progress, accepted, publisher, merging, reports, published)

    async def live(self, nursery: trio.Nursery, life: Callable[[], Awaitable[None]]) -> None:
        """Await `life`, which takes steps with one child; policies are published in `nursery`."""
        self.handover.background = Background(nursery)
        await self.handover.background.run(life)

    async def idle(self) -> None:
        """Wait until the newest policy is published."""
        await self.handover.background.idle()

    async def take_step(self, child: TrainerChild) -> Figures | None:
        """Turn the newest policy into the next one; return the learner's metrics, or None once the
        run has no further step."""
        if self._progress.over:
            return None
        step = self._progress.step
        await self.steps.apply_terms(child, step)
        times = StepTimes(began=self._world.now())
        self._batches.begin_step()
        trained = await self.steps.train(child, step, times)
        if trained is None:
            return None
        await self.handover.hand_over(child, step, trained, times)
        return trained.figures


@dataclass(eq=False)
class Handover:
    """Hands each new policy over: it is written and published beside the next step's training."""

    peer: RunNode
    progress: Progress
    accepted: AcceptedSubmissions
    publisher: Publisher
    merging: Merging
    reports: StepReports
    published: Callable[[], None]
    """Called after each published step."""
    background: Background = field(init=False)
    """Runs what is done beside the next step's training; a new one for each child."""

    async def hand_over(
        self, child: TrainerChild, step: int, trained: TrainedStep, times: StepTimes
    ) -> None:
        """Copy the new policy, and have it written and published beside the next step."""
        await self.accepted.record(step, trained.record)
        self.accepted.trained(step)
        self.progress.advance(step + 1)
        await self.background.idle()
        state = None
        if self.publisher.states.due(step + 1):
            state = State(self.progress.lineage, step + 1)
        snapshot = await self.merging.due(child, step + 1)
        await self.publisher.begin_save(child, step + 1, state, snapshot)
        times.handed_over = self.peer.node.world.now()
        figures = self.reports.figures(step, trained, times)
        self.background.start(
            lambda: self._publish(child, step, trained, figures, state, times.handed_over)
        )

    async def _publish(
        self,
        child: TrainerChild,
        step: int,
        trained: TrainedStep,
        figures: Figures,
        state: State | None,
        began: float,
    ) -> None:
        """Wait until the policy after `step` is durable, then log the step and publish it."""
        await self.publisher.finish_save(child, step + 1, state)
        await self.publisher.publish(
            child,
            step + 1,
            reward=trained.record.reward,
            figures=logged_figures(figures),
            consumed=trained.record.consumed,
        )
        self.published()
        figures["publish_seconds"] = self.peer.node.world.now() - began
        await self.reports.report(child, step, trained, figures)
        if state is not None:
            await self.accepted.saved(state.step)
            await self.merging.saved(child, state.step)


class Background:
    """Runs one piece of work at a time in a nursery, beside a loop that may go on meanwhile."""

    def __init__(self, nursery: trio.Nursery) -> None:
        """`nursery` must outlive `run`."""
        self._nursery = nursery
        self._loop = trio.CancelScope()
        self._ended = trio.Event()
        self._ended.set()
        self._error: Exception | None = None

    async def run(self, loop: Callable[[], Awaitable[None]]) -> None:
        """Await `loop`, then the work that it has started. Raises what either raises."""
        with self._loop:
            try:
                await loop()
            finally:
                await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def idle(self) -> None:
        """Wait until no work is running."""
        await self._ended.wait()

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Start a piece of work. None may be running."""
        assert self._ended.is_set()
        self._ended = trio.Event()
        self._nursery.start_soon(self._attempt, work)

    async def _attempt(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            self._error = error
            self._loop.cancel()
        finally:
            self._ended.set()


@dataclass(eq=False)
class StepReports:
    """Gathers the figures of each step, and reports them."""

    events: Events
    progress: Progress
    forecast: Forecast
    log: TrainerLog
    batches: Batches
    curricula: Curricula
    evaluations: Evaluations

    def figures(self, step: int, trained: TrainedStep, times: StepTimes) -> Figures:
        """The learner's metrics, those of the step's time, and of the groups left out."""
        idle = self.batches.idle
        batch, values = trained.batch, trained.record.values
        left_out = sorted(self.log.left_out.items())
        return {
            **trained.figures,
            "submissions": len(batch),
            "seconds": times.handed_over - times.training,
            "ahead_seconds": self.batches.ahead,
            "idle_seconds": sum(idle.values()),
            **{f"idle_{cause}_seconds": waited for cause, waited in idle.items()},
            "idle_weights_seconds": times.handed_over - times.trained,
            "step_seconds": times.handed_over - times.began,
            "keep_rate": self.forecast.keep_rate.value,
            **{f"left_out_{reason}": groups for reason, groups in left_out},
            "staleness": step - min(accepted.verdict.policy for accepted in batch),
            **({"states_valued": sum(map(len, values))} if values else {}),
        }

    async def report(
        self, child: TrainerChild, step: int, trained: TrainedStep, figures: Figures
    ) -> None:
        """Report a published step, and have the child record it."""
        manifest_of_step = self.progress.versions.manifest_of(step)
        environments = environment_figures(
            trained.batch, trained.group_tokens, manifest_of_step.environments
        )
        for label, level in self.curricula.levels_of(manifest_of_step).items():
            environments.setdefault(label, {})["level"] = level
        evaluated = self.evaluations.take()
        if evaluated is not None:
            policy = evaluated.reference.step
            figures |= {"evaluation": evaluated.reward, "evaluation_policy": policy}
            for found in evaluated.environments:
                environments.setdefault(found.label, {})["evaluation"] = found.reward
        self.events.emit(
            "trainer.trained_on",
            step=step,
            submissions=[accepted.digest for accepted in trained.batch],
        )
        self.events.emit(
            "trainer.step_trained", **{**figures, "environments": environments, "step": step}
        )
        await child.record(step, figures, environments)


def logged_figures(figures: Figures) -> TrainingFigures:
    """The figures of a step that its trainer logs, by the learner's names; only finite ones."""
    clipped = [value for name, value in figures.items() if name.startswith("clipped_")]
    found = {
        **{name: figures.get(name) for name in ("reward", "entropy", "gradient_norm", "loss")},
        "length": figures.get("completion_length"),
        "kl": figures.get("kl_generation"),
        "kl_reference": figures.get("kl_reference"),
        "clipped": sum(clipped) if clipped else None,
        "learning_rate": figures.get("learning_rate"),
        "seconds": figures.get("step_seconds"),
    }
    return TrainingFigures(
        **{
            name: float(value)
            for name, value in found.items()
            if value is not None and math.isfinite(value)
        }
    )
