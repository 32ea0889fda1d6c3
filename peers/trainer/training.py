"""Training: one step after the other. Each new policy is handed over, to be written and published
beside the next step, and the step's figures are reported."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from peers.evaluation.during import Evaluations
from peers.trainer.accepted import AcceptedSubmissions
from peers.trainer.batches import Batches
from peers.trainer.child import accepted_submissions, training_terms
from peers.trainer.environments import environment_figures
from peers.trainer.orders import Orders
from peers.trainer.pool import Accepted
from peers.trainer.publishing import Publisher
from peers.trainer.saving import State
from peers.trainer.settings import TrainerSettings
from peers.trainer.store import Batch
from swarm.jobs.training import Figures, Follow, Record, ScoreAhead, TrainingService, TrainStep
from swarm.ledger.entries import Consumed, TrainingFigures
from swarm.run.manifest import manifest_in
from swarm.wire.envelope import Envelope
from swarm.wire.manifest import RunManifest


@dataclass
class StepTimes:
    """Start times of a step's parts, in the world's seconds."""

    began: float
    training: float = 0.0
    """When its last batch was complete."""
    trained: float = 0.0
    handed_over: float = 0.0
    """When the next step could begin: the policy was copied, to be written and published."""


@dataclass(frozen=True)
class TrainedStep:
    """A batch and the child's results on it."""

    batch: list[Accepted]
    figures: Figures
    """The learner's metrics."""
    record: Batch
    """The batch's entries for the log."""
    group_tokens: list[list[int]]
    """[submissions][groups] Completion tokens."""


class Training:
    """Takes the steps of the run, with what only they need."""

    def __init__(
        self,
        settings: TrainerSettings,
        accepted: AcceptedSubmissions,
        orders: Orders,
        publisher: Publisher,
        published: Callable[[], None],
    ) -> None:
        """`published` is called after each published step."""
        self._peer = peer = accepted.peer
        self._world, self._progress = peer.node.world, accepted.progress
        self._accepted = accepted
        self._publisher, self._published = publisher, published
        self._batches = Batches(accepted, orders, settings.starved_seconds)
        self.evaluations = Evaluations(peer, settings)
        self._followed: Envelope | None = None
        """The run manifest that the child follows."""

    async def live(self, nursery: trio.Nursery, life: Callable[[], Awaitable[None]]) -> None:
        """Await `life`, which takes steps with one child; policies are published in `nursery`."""
        self._background = Background(nursery)
        await self._background.run(life)

    async def idle(self) -> None:
        """Wait until the newest policy is published."""
        await self._background.idle()

    def follow(self, step: int) -> RunManifest:
        """The version of the run that the child is to begin with: that of a step."""
        self._followed = self._progress.versions.follow(step)
        return manifest_in(self._followed)

    async def apply_terms(self, child: TrainingService, step: int) -> None:
        """Have the child follow the version of the run that a step follows."""
        followed = self._progress.versions.follow(step)
        if followed is not self._followed:
            await child.follow(Follow(terms=training_terms(manifest_in(followed))))
            self._followed = followed

    async def take_step(self, child: TrainingService) -> Figures | None:
        """Turn the newest policy into the next one; return the learner's metrics, or None once the
        run has no further step."""
        if self._progress.over:
            return None
        step = self._progress.step
        await self.apply_terms(child, step)
        times = StepTimes(began=self._world.now())
        self._batches.begin_step()
        trained = await self._train(child, step, times)
        if trained is None:
            return None
        await self.hand_over(child, step, trained, times)
        return trained.figures

    async def _train(
        self, child: TrainingService, step: int, times: StepTimes
    ) -> TrainedStep | None:
        """Train on the next batch that the child can read; None if no further batch comes."""
        if not self._progress.paused:
            self._peer.status.doing = f"waiting for rollouts of step {step}"
        versions, disk = self._progress.versions, self._peer.node.disk

        async def score(some: list[Accepted]) -> None:
            await child.score(ScoreAhead(submissions=accepted_submissions(some, versions, disk)))

        while (batch := await self._batches.next(score)) is not None:
            self._peer.status.doing = f"training step {step}"
            times.training = self._world.now()
            values = self._accepted.state_values.of(batch)
            given = accepted_submissions(batch, versions, disk)
            result = await child.train(TrainStep(step=step, submissions=given, values=values))
            if not result.unreadable:
                break
            await self._accepted.leave_out({each.index: each.reason for each in result.unreadable})
        else:
            return None
        times.trained = self._world.now()
        for problem in result.problems:
            self._peer.node.events.emit("trainer.formula_failed", step=step, reason=problem)
        self._accepted.log.filtered(batch)
        consumed = [
            Consumed(step=step, submission=accepted.digest, outcomes=[*outcomes])
            for accepted, outcomes in zip(batch, result.outcomes, strict=True)
        ]
        record = Batch(consumed, result.figures["reward"], values)
        return TrainedStep(batch, result.figures, record, result.group_tokens)

    async def hand_over(
        self, child: TrainingService, step: int, trained: TrainedStep, times: StepTimes
    ) -> None:
        """Copy the new policy, and have it written and published beside the next step."""
        publisher, progress = self._publisher, self._progress
        await self._accepted.store.keep_batch(progress.lineage, step, trained.record)
        self._accepted.trained(step)
        progress.advance(step + 1)
        await self._background.idle()
        state = State(progress.lineage, step + 1) if publisher.states.due(step + 1) else None
        await publisher.begin_save(child, step + 1, state)
        times.handed_over = self._world.now()
        figures = self._figures(step, trained, times)

        async def publish() -> None:
            """Wait until the policy is durable, then log the step and publish it."""
            await publisher.finish_save(child, step + 1, state)
            await publisher.publish(
                child,
                step + 1,
                reward=trained.record.reward,
                figures=logged_figures(figures),
                consumed=trained.record.consumed,
            )
            self._published()
            figures["publish_seconds"] = self._world.now() - times.handed_over
            await self._report(child, step, trained, figures)
            if state is not None:
                await self._accepted.saved(state.step)

        self._background.start(publish)

    def _figures(self, step: int, trained: TrainedStep, times: StepTimes) -> Figures:
        """The learner's metrics, those of the step's time, and of the groups left out."""
        idle = self._batches.idle
        batch, values = trained.batch, trained.record.values
        left_out = sorted(self._accepted.log.left_out.items())
        return {
            **trained.figures,
            "submissions": len(batch),
            "seconds": times.handed_over - times.training,
            "ahead_seconds": self._batches.ahead,
            "idle_seconds": sum(idle.values()),
            **{f"idle_{cause}_seconds": waited for cause, waited in idle.items()},
            "idle_weights_seconds": times.handed_over - times.trained,
            "step_seconds": times.handed_over - times.began,
            "keep_rate": self._accepted.forecast.keep_rate.value,
            **{f"left_out_{reason}": groups for reason, groups in left_out},
            "staleness": step - min(accepted.verdict.policy for accepted in batch),
            **({"states_valued": sum(map(len, values))} if values else {}),
        }

    async def _report(
        self, child: TrainingService, step: int, trained: TrainedStep, figures: Figures
    ) -> None:
        """Report a published step, and have the child record it."""
        manifest = self._progress.versions.manifest_of(step)
        environments = environment_figures(
            trained.batch, trained.group_tokens, manifest.environments
        )
        evaluated = self.evaluations.take()
        if evaluated is not None:
            policy = evaluated.reference.step
            figures |= {"evaluation": evaluated.reward, "evaluation_policy": policy}
            for found in evaluated.environments:
                environments.setdefault(found.label, {})["evaluation"] = found.reward
        events, digests = self._peer.node.events, [each.digest for each in trained.batch]
        events.emit("trainer.trained_on", step=step, submissions=digests)
        events.emit(
            "trainer.step_trained", **{**figures, "environments": environments, "step": step}
        )
        await child.record(Record(step=step, figures=figures, environments=environments))


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
